//! Rules for the source tree that the compiler does not check.
//!
//! Each rule is a function that returns findings, with a unit test which proves that it can fail. A
//! finding fails the rule's test unless `known.rs` lists it as an exception. An exception that no
//! longer applies is a failure too, so the lists can only shrink.

mod api;
mod duplicates;
mod files;
mod known;
mod layers;
mod lex;
mod marks;
mod modules;
mod statements;
mod tree;
mod width;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::LazyLock;

use known::Exception;
use tree::Tree;

static TREE: LazyLock<Tree> = LazyLock::new(|| Tree::read(Path::new(env!("CARGO_MANIFEST_DIR"))));

/// A violation of a rule.
#[derive(PartialEq, Eq, Debug)]
struct Finding {
    path: String,
    /// Counted from 1; 0 for the whole file.
    line: usize,
    /// The statement, type, word or import; empty if the rule is about the place alone.
    what: String,
    /// The explanation for the reader.
    why: String,
}

/// Fails on findings that are not exceptions, and on exceptions without a finding.
fn hold(rule: &str, findings: &[Finding]) {
    if let Err(report) = judge(rule, findings, &known::exceptions()) {
        panic!("{report}");
    }
}

fn judge(rule: &str, findings: &[Finding], exceptions: &[Exception]) -> Result<(), String> {
    let ours = || exceptions.iter().filter(|exception| exception.rule == rule);
    let new: Vec<&Finding> = findings
        .iter()
        .filter(|finding| !ours().any(|exception| exception.covers(finding)))
        .collect();
    let stale: Vec<&Exception> = ours()
        .filter(|exception| !findings.iter().any(|finding| exception.covers(finding)))
        .collect();
    if new.is_empty() && stale.is_empty() {
        return Ok(());
    }
    let mut report = format!("{} new findings\n", new.len());
    for finding in &new {
        let (path, line, what) = (&finding.path, finding.line, &finding.what);
        let separator = if what.is_empty() { "" } else { " " };
        let _ = writeln!(
            report,
            "{path}:{line}: {rule}: {what}{separator}{}",
            finding.why
        );
    }
    // As they would stand in the lists.
    let mut entries: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for finding in new {
        let whats = entries.entry(&finding.path).or_default();
        whats.extend(Some(&finding.what[..]).filter(|what| !what.is_empty()));
    }
    for (path, whats) in entries {
        let _ = writeln!(report, "    ({path:?}, &{:?}),", Vec::from_iter(whats));
    }
    for Exception { path, what, .. } in stale {
        let _ = writeln!(
            report,
            "no longer found, remove from the exceptions: {path:?} {what:?}"
        );
    }
    Err(report)
}

#[test]
fn every_statement_is_used() {
    hold("dead statement", &statements::dead(&TREE));
}

#[test]
fn a_statement_is_used_by_the_file_of_its_name() {
    hold("foreign statement", &statements::foreign(&TREE));
}

#[test]
fn every_function_in_lua_and_sql_is_used() {
    hold("dead function", &statements::dead_functions(&TREE));
}

#[test]
fn a_type_name_is_declared_once_in_a_layer() {
    hold("duplicate type", &duplicates::check(&TREE));
}

#[test]
fn names_and_comments_use_ordinary_words() {
    hold("word", &words::check(&TREE));
}

#[test]
fn comments_fit_into_a_hundred_columns() {
    hold("width", &width::check(&TREE));
}

#[test]
fn nothing_is_left_to_do_and_no_path_is_of_one_machine() {
    hold("mark", &marks::check(&TREE));
}

#[test]
fn imports_go_down_only() {
    hold("import", &layers::check(&TREE));
}

#[test]
fn every_file_is_part_of_something() {
    hold("dead file", &files::check(&TREE));
}

#[test]
fn every_exception_belongs_to_a_rule() {
    let rules = [
        "dead statement",
        "foreign statement",
        "dead function",
        "duplicate type",
        "word",
        "width",
        "mark",
        "import",
        "dead file",
    ];
    for exception in known::exceptions() {
        assert!(rules.contains(&exception.rule), "{exception:?}");
    }
}

#[test]
fn a_finding_fails_unless_it_is_known_and_a_stale_exception_fails() {
    let finding = |path: &str, what: &str| Finding {
        path: path.into(),
        line: 1,
        what: what.into(),
        why: String::new(),
    };
    let found = [finding("src/a.rs", "nap")];
    assert!(judge("word", &found, &[]).is_err());
    assert!(judge("word", &[], &[]).is_ok());
    let exception = |rule, (path, what)| Exception { rule, path, what };
    for fits in [("src/a.rs", "nap"), ("src/a.rs", ""), ("src/", "nap")] {
        assert!(judge("word", &found, &[exception("word", fits)]).is_ok());
        assert!(judge("word", &[], &[exception("word", fits)]).is_err());
        // Exceptions of other rules do not count.
        assert!(judge("word", &found, &[exception("width", fits)]).is_err());
        assert!(judge("word", &[], &[exception("width", fits)]).is_ok());
    }
    for other in [
        ("src/b.rs", "nap"),
        ("src/a.rs", "bell"),
        ("src/a", "nap"),
        ("tests/", ""),
    ] {
        assert!(judge("word", &found, &[exception("word", other)]).is_err());
    }
}
