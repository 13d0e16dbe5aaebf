//! Every SQL statement is used, and only by the Rust file of the same name.
//!
//! A statement starts at a line `-- name: …` in a SQL file. Rust refers to it by a string literal.

use std::collections::BTreeMap;

use crate::tidy::Finding;
use crate::tidy::duplicates::layer;
use crate::tidy::lex::{Language, words};
use crate::tidy::tree::{Tree, stem};

pub(crate) const NAME: &str = "-- name: ";

/// Statements that no Rust file names.
pub(crate) fn dead(tree: &Tree) -> Vec<Finding> {
    let literals = literals(tree);
    let mut findings = Vec::new();
    for (path, line, name) in declared(tree) {
        if users(&literals, path, name).is_empty() {
            let why = "nothing uses this statement";
            findings.push(Finding {
                path: path.into(),
                line,
                what: name.into(),
                why: why.into(),
            });
        }
    }
    findings
}

/// Statements that are used outside the Rust file of the same name. Shared statements belong into a
/// file of their own: `session.sql` is used by `session.rs`.
pub(crate) fn foreign(tree: &Tree) -> Vec<Finding> {
    let literals = literals(tree);
    let mut findings = Vec::new();
    for (path, line, name) in declared(tree) {
        let mut others = users(&literals, path, name);
        others.retain(|user| stem(user) != stem(path));
        if !others.is_empty() {
            let why = format!("is used by {}", others.join(", "));
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

/// Functions in Lua and SQL that no script calls and no Rust file names.
pub(crate) fn dead_functions(tree: &Tree) -> Vec<Finding> {
    let mut found = dead_in(tree, Language::Lua, |line| {
        let mut words = words(line)
            .map(|(_, word)| word)
            .skip_while(|word| *word == "local");
        let is_declared = words.next() == Some("function") && line.contains("function ");
        words.next().filter(|_| is_declared)
    });
    found.extend(dead_in(tree, Language::Sql, |line| {
        let (_, name) = line.split_once("FUNCTION leasehold.")?;
        let (_, name) = words(name).next().filter(|_| line.starts_with("CREATE "))?;
        // The others are there for other languages to call.
        let is_ours = name.ends_with(|last: char| last.is_ascii_digit());
        Some(name).filter(|_| is_ours)
    }));
    found
}

/// The functions of one language that are mentioned once. `declared` finds the name in a line.
fn dead_in(
    tree: &Tree,
    language: Language,
    declared: impl Fn(&str) -> Option<&str>,
) -> Vec<Finding> {
    let mut mentions: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, file) in tree.in_language(language) {
        let strings = file.lexed.strings.iter().map(|(_, text)| &text[..]);
        for (_, word) in strings.chain([&file.lexed.code[..]]).flat_map(words) {
            *mentions.entry(word).or_default() += 1;
        }
    }
    for (_, file) in tree.shipped(Language::Rust) {
        for (_, text) in file.shipped_strings() {
            for (_, word) in words(text) {
                *mentions.entry(word).or_default() += 1;
            }
        }
    }
    let mut findings = Vec::new();
    for (path, file) in tree.in_language(language) {
        for (number, line) in file.lexed.code.lines().enumerate() {
            let Some(name) = declared(line) else {
                continue;
            };
            if mentions.get(name) == Some(&1) {
                findings.push(Finding {
                    path: path.into(),
                    line: number + 1,
                    what: name.into(),
                    why: "nothing calls this function".into(),
                });
            }
        }
    }
    findings
}

/// File, line and name of each statement.
fn declared(tree: &Tree) -> impl Iterator<Item = (&str, usize, &str)> {
    tree.in_language(Language::Sql).flat_map(|(path, file)| {
        let lines = file.text.lines().enumerate();
        lines.filter_map(move |(n, line)| Some((path, n + 1, line.strip_prefix(NAME)?.trim())))
    })
}

/// Every string literal of the shipped code, with the files that contain it.
fn literals(tree: &Tree) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (path, file) in tree.shipped(Language::Rust) {
        for (_, text) in file.shipped_strings() {
            found.entry(text).or_default().push(path);
        }
    }
    found
}

/// The files of its own store that name a statement. Elsewhere the same string means something
/// else.
fn users<'a>(literals: &BTreeMap<&str, Vec<&'a str>>, sql: &str, name: &str) -> Vec<&'a str> {
    let all = literals.get(name).into_iter().flatten().copied();
    let mut users: Vec<&str> = all.filter(|user| layer(user) == layer(sql)).collect();
    users.dedup();
    users
}

#[cfg(test)]
fn names(findings: Vec<Finding>) -> Vec<String> {
    findings.into_iter().map(|finding| finding.what).collect()
}

#[test]
fn a_statement_that_nothing_uses_is_found() {
    let tree = Tree::of(&[
        (
            "src/store/sqlite/claim.sql",
            "-- claim: why\n-- name: take\nSELECT 1;\n-- name: lost\nSELECT 2;",
        ),
        // Comments and tests do not count as uses.
        (
            "src/store/sqlite/claim.rs",
            "fn a() { b(\"take\") } // \"lost\"\n#[cfg(test)]\nmod tests { const C: &str = \"lost\"; }",
        ),
    ]);
    assert_eq!(names(dead(&tree)), ["lost"]);
    assert_eq!(dead(&tree)[0].line, 4);
    assert!(foreign(&tree).is_empty());
}

#[test]
fn a_statement_that_another_verb_uses_is_found() {
    let tree = Tree::of(&[
        (
            "src/store/sqlite/claim.sql",
            "-- name: take\n-- name: give\n-- name: both",
        ),
        (
            "src/store/sqlite/claim.rs",
            "fn a() { b(\"take\"); b(\"both\") }",
        ),
        (
            "src/store/sqlite/renew.rs",
            "fn a() { b(\"give\"); b(\"both\"); b(\"both\") }",
        ),
        // Other stores have their own statements by that name.
        ("src/store/postgres/grant.rs", "fn a() { b(\"take\") }"),
        ("src/store/call.rs", "fn a() { b(\"take\") }"),
    ]);
    assert_eq!(names(foreign(&tree)), ["give", "both"]);
    assert_eq!(
        foreign(&tree)[1].why,
        "is used by src/store/sqlite/renew.rs"
    );
}

#[test]
fn a_function_that_no_script_calls_is_found() {
    let tree = Tree::of(&[
        (
            "src/store/redis/a.lua",
            "local function used(x) return x end\nlocal function lost() end -- lost",
        ),
        (
            "src/store/redis/b.lua",
            "used(1)\nfunction named() end\nlocal f = function() end",
        ),
        ("src/store/redis/link.rs", "fn a() { b(\"named\") }"),
        (
            "src/store/postgres/ends.sql",
            "CREATE OR REPLACE FUNCTION leasehold.used_1() AS $$ SELECT 1 $$;\n\
             CREATE OR REPLACE FUNCTION leasehold.gone_1() AS $$ -- gone_1\n\
             SELECT leasehold.used_1() $$;\n\
             CREATE OR REPLACE FUNCTION leasehold.for_others() AS $$ SELECT 1 $$;",
        ),
    ]);
    assert_eq!(names(dead_functions(&tree)), ["lost", "gone_1"]);
}
