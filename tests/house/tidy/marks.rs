//! No marks of unfinished work and no paths of somebody's machine, in any file.

use crate::tidy::Finding;
use crate::tidy::lex::words;
use crate::tidy::tree::Tree;

const UNFINISHED: [&str; 4] = ["TODO", "FIXME", "XXX", "HACK"];
/// The first parts of paths that exist on one machine only.
const MACHINES: [&str; 5] = ["home", "root", "Users", "work", "build"];
/// These files have to spell out what they look for.
const ITSELF: &str = "tests/house/tidy/";

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree
        .files
        .iter()
        .filter(|(path, _)| !path.starts_with(ITSELF))
    {
        for (number, line) in file.text.lines().enumerate() {
            let unfinished = words(line)
                .map(|(_, word)| word)
                .filter(|word| UNFINISHED.contains(word));
            let machines = MACHINES.map(|name| format!("/{name}/"));
            let machines = machines
                .into_iter()
                .filter(|start| begins_a_path(line, start));
            for what in unfinished.map(str::to_owned).chain(machines) {
                findings.push(Finding {
                    path: path.clone(),
                    line: number + 1,
                    what,
                    why: "must not be left behind".into(),
                });
            }
        }
    }
    findings
}

/// False inside a longer path or a URL.
fn begins_a_path(line: &str, start: &str) -> bool {
    line.match_indices(start).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !"_-.:/}$*".contains(c))
    })
}

#[test]
fn what_is_left_behind_is_found() {
    let found = |text: &str| -> Vec<String> {
        let tree = Tree::of(&[("README.md", text)]);
        check(&tree)
            .into_iter()
            .map(|finding| finding.what)
            .collect()
    };
    assert_eq!(found("a\n// TODO: b"), ["TODO"]);
    let [home, root] = ["home", "root"].map(|name| format!("/{name}/"));
    assert_eq!(
        found(&format!("see `{home}ann/x` and {root}y")),
        [home, root]
    );
    assert!(found("target/home/x, https://example.org/home/, todo = \"warn\", TODOS").is_empty());
    assert_eq!(check(&Tree::of(&[("src/a.rs", "\n// FIXME")]))[0].line, 2);
}
