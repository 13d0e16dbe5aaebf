//! Comments are at most 100 columns wide. rustfmt wraps code only.

use crate::tidy::Finding;
use crate::tidy::tree::Tree;

const COLUMNS: usize = 100;

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in &tree.files {
        let lines: Vec<&str> = file.text.lines().collect();
        for (number, comment) in &file.lexed.comments {
            let width = lines[number - 1].chars().count();
            if width > COLUMNS && !cannot_be_wrapped(comment) {
                let why = format!("a comment of {width} columns");
                findings.push(Finding {
                    path: path.clone(),
                    line: *number,
                    what: String::new(),
                    why,
                });
            }
        }
    }
    findings
}

/// Table rows and URLs.
fn cannot_be_wrapped(comment: &str) -> bool {
    comment
        .trim_start_matches(['/', '!', '-', ' '])
        .starts_with('|')
        || comment.contains("://")
}

#[test]
fn a_long_comment_is_found() {
    let long = "x".repeat(98);
    let text = format!(
        "// {long}\nlet a = \"{long}\";\n//! | {long} |\n// {}\nlet b = 1; // {}\n// https://{long}",
        "ü".repeat(97),
        &long[..80]
    );
    let tree = Tree::of(&[
        ("src/a.rs", &text),
        ("README.md", &text),
        ("b.lua", &format!("-- {long}")),
    ]);
    let found: Vec<(String, usize)> = check(&tree)
        .into_iter()
        .map(|finding| (finding.path, finding.line))
        .collect();
    assert_eq!(found, [("b.lua".to_owned(), 1), ("src/a.rs".to_owned(), 1)]);
    assert_eq!(check(&tree)[0].why, "a comment of 101 columns");
}
