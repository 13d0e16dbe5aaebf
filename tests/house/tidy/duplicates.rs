//! No two files of a layer declare a type by the same name.

use std::collections::BTreeMap;

use crate::tidy::Finding;
use crate::tidy::lex::{Language, line_of, words};
use crate::tidy::tree::Tree;

/// The usual name for a command's arguments with clap, one per command.
const IDIOMS: [&str; 1] = ["Args"];

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut declared: BTreeMap<(String, &str), Vec<(&str, usize)>> = BTreeMap::new();
    for (path, file) in tree.shipped(Language::Rust) {
        for (at, name) in types(&file.shipped) {
            let places = declared.entry((layer(path), name)).or_default();
            places.push((path, at));
        }
    }
    let mut findings = Vec::new();
    for ((layer, name), places) in declared {
        // Several in one file are alternatives for platforms or features.
        let mut files: Vec<&str> = places.iter().map(|(path, _)| *path).collect();
        files.dedup();
        if files.len() > 1 && !IDIOMS.contains(&name) {
            let (path, at) = places[0];
            let line = line_of(&tree.files[path].shipped, at);
            let why = format!(
                "is a type of {layer} {} times: {}",
                files.len(),
                files.join(", ")
            );
            findings.push(Finding {
                path: path.into(),
                line,
                what: name.into(),
                why,
            });
        }
    }
    findings
}

/// The layer of a file: a folder of the library, one store, or one crate.
pub(crate) fn layer(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').collect();
    let parts = match &parts[..] {
        ["src", "store", store, _, ..] => vec!["src", "store", store],
        ["src" | "crates", name, _, ..] => vec![parts[0], name],
        _ => vec!["src"],
    };
    parts.join("/")
}

/// The names of declared types, with their positions.
fn types(code: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut all = words(code).peekable();
    while let Some((at, word)) = all.next() {
        let Some(&(_, name)) = all.peek() else { break };
        let is_type = match word {
            "struct" | "enum" | "trait" | "union" => true,
            // Indented ones are associated types.
            "type" => {
                let line = code[..at].rfind('\n').map_or(0, |end| end + 1);
                line == at || code[line..].starts_with("pub")
            }
            _ => false,
        };
        let between = &code[at + word.len()..];
        let is_name = between.trim_start().starts_with(name)
            && name.starts_with(|first: char| first.is_ascii_uppercase());
        if is_type && is_name {
            found.push((at, name));
        }
    }
    found
}

#[test]
fn a_type_that_two_files_of_a_layer_declare_is_found() {
    let tree = Tree::of(&[
        (
            "src/worker/a.rs",
            "struct Run;\npub(crate) type Done<T> = Result<T>;\nenum Only {}",
        ),
        (
            "src/worker/b.rs",
            "pub struct Run<T>(T);\ntype Done = ();\nimpl A for B {\n    type Only = u8;\n}\n\
             #[cfg(test)]\nmod tests { struct Only; }",
        ),
        ("src/calls/a.rs", "struct Run;"),
        (
            "src/store/sqlite/a.rs",
            "struct Run; struct Twice; #[cfg(x)] struct Twice;",
        ),
        ("src/store/memory/a.rs", "struct Run; // struct Done;"),
        ("src/store/memory/b.rs", "struct Done;"),
        ("src/a.rs", "trait Value {}"),
        ("src/b.rs", "struct Value; struct Args;"),
        (
            "src/c.rs",
            "struct Args; macro_rules! d { ($n:ident) => { struct $n; } }",
        ),
    ]);
    let found: Vec<(String, String)> = check(&tree)
        .into_iter()
        .map(|finding| (finding.path, finding.what))
        .collect();
    let found: Vec<(&str, &str)> = found
        .iter()
        .map(|(path, what)| (&path[..], &what[..]))
        .collect();
    let expected = [
        ("src/a.rs", "Value"),
        ("src/worker/a.rs", "Done"),
        ("src/worker/a.rs", "Run"),
    ];
    assert_eq!(found, expected);
}
