//! Every Rust file belongs to a crate, and every SQL or Lua file is included by one.

use crate::tidy::Finding;
use crate::tidy::lex::Language;
use crate::tidy::modules::{included_by, of_crates};
use crate::tidy::tree::Tree;

/// trybuild finds these by a pattern.
const COMPILE_ERRORS: &str = "tests/ui/cases/";

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let alive = of_crates(tree);
    let code = included_by(tree, &["include!"]);
    let data = included_by(tree, &["include_str!", "include_bytes!"]);
    let mut findings = Vec::new();
    for (path, file) in &tree.files {
        let (is_alive, why) = match file.language {
            Some(Language::Rust) => (
                alive.contains(path) || code.contains(path),
                "no `mod` leads to it",
            ),
            Some(Language::Sql | Language::Lua) => (data.contains(path), "nothing includes it"),
            None => continue,
        };
        if !is_alive && !path.starts_with(COMPILE_ERRORS) {
            findings.push(Finding {
                path: path.clone(),
                line: 0,
                what: String::new(),
                why: why.into(),
            });
        }
    }
    findings
}

#[test]
fn a_file_that_nothing_includes_is_found() {
    let tree = Tree::of(&[
        ("Cargo.toml", ""),
        ("src/lib.rs", "mod a;"),
        (
            "src/a.rs",
            "const A: &str = include_str!(\"a.sql\");\nconst B: &str = \"b.sql\";",
        ),
        ("src/a.sql", ""),
        ("src/b.sql", ""),
        ("src/c.lua", ""),
        ("src/d.rs", ""),
        ("tests/ui/cases/wrong.rs", ""),
    ]);
    let found: Vec<String> = check(&tree)
        .into_iter()
        .map(|finding| finding.path)
        .collect();
    assert_eq!(found, ["src/b.sql", "src/c.lua", "src/d.rs"]);
}
