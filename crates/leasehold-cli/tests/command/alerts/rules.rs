//! Every rule fires where it must and is silent where it must be, as promtool sees it.
//!
//! The control arm: a rule that never fires, one that always does, and one without its floor or
//! without its share are each noticed by the cases.

use std::process::Command;

use super::RULES;

const CASES: &str = include_str!("../../../../../contrib/prometheus/alerts_test.yml");
const GUIDE: &str = include_str!("../../../../../src/guide/operations.md");

/// A rule of the file: its name and its expression, as they are written.
fn alerts() -> Vec<(&'static str, &'static str)> {
    let rules = RULES.split("- alert: ").skip(1).map(|rule| {
        let (name, rest) = rule.split_once('\n').unwrap();
        let (_, rest) = rest.split_once("expr:").unwrap();
        (name, rest.split_once("\n        for:").unwrap().0)
    });
    rules.collect()
}

/// The cases that ask for an alert.
fn cases_of(name: &str) -> String {
    let mut cases = CASES.split("  - name: ");
    let head = cases.next().unwrap().to_owned();
    let asks = |case: &&str| case.contains(&format!("alertname=\"{name}\""));
    cases
        .filter(asks)
        .fold(head, |all, case| all + "  - name: " + case)
}

/// What promtool says of cases, with these rules.
fn judged(rules: &str, cases: &str) -> (bool, String) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("alerts.yml"), rules).unwrap();
    let file = dir.path().join("alerts_test.yml");
    std::fs::write(&file, cases).unwrap();
    let promtool = Command::new("promtool")
        .args(["test", "rules"])
        .arg(file)
        .output();
    let said = promtool.expect("promtool is not installed: ./tests/run installs it");
    let text = [said.stdout, said.stderr].concat();
    (
        said.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
#[ignore = "needs promtool: ./tests/run"]
fn every_case_is_as_promtool_sees_it() {
    let (well, said) = judged(RULES, CASES);
    assert!(well, "{said}");
}

#[test]
#[ignore = "needs promtool: ./tests/run"]
fn a_rule_that_is_wrong_is_noticed() {
    let alerts = alerts();
    assert!(alerts.len() >= 15, "{}", alerts.len());
    for (name, expression) in alerts {
        let mut wrong = vec![" vector(0) > 1".to_owned(), " vector(1)".to_owned()];
        // Of a floor and a share, each alone.
        let lines: Vec<&str> = expression.lines().collect();
        let and = lines
            .iter()
            .position(|line| line.trim_start().split(' ').next() == Some("and"));
        if let Some(at) = and.filter(|at| *at + 1 < lines.len() && name != "LeaseholdNobodyWorks") {
            wrong.push(lines[..at].join("\n"));
            wrong.push(format!(" |\n{}", lines[at + 1..].join("\n")));
        }
        let cases = cases_of(name);
        for wrong in wrong {
            let of = |expression: &str| format!("- alert: {name}\n        expr:{expression}\n");
            assert_eq!(RULES.matches(&of(expression)).count(), 1, "{name}");
            let (well, said) = judged(&RULES.replace(&of(expression), &of(&wrong)), &cases);
            assert!(!well, "nobody noticed {name} as{wrong}");
            assert!(said.contains(name), "{name} as{wrong}:\n{said}");
        }
    }
}

#[test]
fn every_rule_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() {
    for (name, _) in alerts() {
        let asked = format!("ALERTS{{alertname=\"{name}\",alertstate=\"firing\"}}\n");
        let expected: Vec<bool> = CASES
            .split(&asked)
            .skip(1)
            .map(|case| case.lines().nth(1).unwrap().ends_with("[]"))
            .collect();
        assert!(expected.contains(&false), "{name} never fires");
        assert!(expected.contains(&true), "{name} is never silent");
    }
}

#[test]
fn every_rule_says_what_it_means_and_what_to_do() {
    for (name, _) in alerts() {
        let (_, rule) = RULES.split_once(&format!("- alert: {name}\n")).unwrap();
        let rule = rule.split("- alert: ").next().unwrap();
        for part in ["severity:", "summary:", "description:", "runbook_url:"] {
            assert!(rule.contains(part), "{name} has no {part}");
        }
        let row = format!("\n| `{name}` |");
        assert!(GUIDE.contains(&row), "{name} is not in the guide's table");
    }
}
