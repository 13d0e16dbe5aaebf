//! Declared names and comments use ordinary words.

use std::collections::BTreeSet;

use crate::tidy::Finding;
use crate::tidy::lex::{Language, closed, line_of, words};
use crate::tidy::statements::NAME as STATEMENT;
use crate::tidy::tree::{File, Tree};

struct Banned {
    /// All its forms, in lower case.
    forms: &'static [&'static str],
    /// Fine in a sentence, cryptic as a name.
    is_for_names_only: bool,
    instead: &'static str,
}

const fn never(forms: &'static [&'static str], instead: &'static str) -> Banned {
    Banned {
        forms,
        is_for_names_only: false,
        instead,
    }
}

const fn not_a_name(forms: &'static [&'static str], instead: &'static str) -> Banned {
    Banned {
        forms,
        is_for_names_only: true,
        instead,
    }
}

const BANNED: &[Banned] = &[
    never(
        &["seal", "seals", "sealing"],
        "advance (line starts), stamp (segments)",
    ),
    never(
        &["ride", "rides", "riding", "rode", "rider", "riders"],
        "piggyback, travel with",
    ),
    never(&["bell", "bells"], "wakeup"),
    never(&["doze", "dozes", "dozing"], "sleep"),
    never(&["greeting", "greetings"], "introduce the session"),
    never(&["stow", "stows", "stowed"], "parked, kept"),
    never(&["nap", "naps", "napping"], "sleep, back-off"),
    never(&["detour", "detours"], "back-off, the long path"),
    never(
        &["lifecycle", "lifecycles"],
        "rules, worker; in prose: life",
    ),
    never(&["doubted"], "the word for what is unknown"),
    not_a_name(&["fold", "folds", "folded"], "compact, add up"),
    not_a_name(&["ear", "ears"], "channel"),
    not_a_name(&["met"], "a word for what was done"),
    not_a_name(&["heard"], "a word for what was received"),
    not_a_name(&["luck"], "heuristic"),
];

/// These files have to spell out what they look for.
const ITSELF: &str = "tests/house/tidy/";
/// What was released stays as it was.
const RELEASED: &str = "tests/engines/postgres/release_";

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree
        .files
        .iter()
        .filter(|(path, _)| !path.starts_with(ITSELF) && !path.starts_with(RELEASED))
    {
        for (at, name) in declared(file) {
            for (what, why) in banned(name, true) {
                let line = line_of(&file.lexed.code, at);
                findings.push(Finding {
                    path: path.clone(),
                    line,
                    what,
                    why,
                });
            }
        }
        for (line, comment) in &file.lexed.comments {
            let is_name = comment.starts_with(STATEMENT);
            for (what, why) in banned(comment, is_name) {
                findings.push(Finding {
                    path: path.clone(),
                    line: *line,
                    what,
                    why,
                });
            }
        }
    }
    findings
}

/// The banned words of a text, each with what to say instead.
fn banned(text: &str, is_name: bool) -> impl Iterator<Item = (String, String)> {
    parts(text).into_iter().filter_map(move |part| {
        let is_banned = |banned: &&Banned| {
            banned.forms.contains(&&part[..]) && (is_name || !banned.is_for_names_only)
        };
        let instead = BANNED.iter().find(is_banned)?.instead;
        Some((part, format!("say instead: {instead}")))
    })
}

/// The words of a text in lower case, with names split: `HeldLease`, `held_lease`.
fn parts(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for piece in text.split(|c: char| !c.is_alphabetic()) {
        let mut part = String::new();
        for c in piece.chars() {
            let is_next = c.is_uppercase() && part.ends_with(|last: char| last.is_lowercase());
            if is_next {
                found.push(std::mem::take(&mut part));
            }
            part.push(c);
        }
        found.push(part);
    }
    found
        .iter()
        .filter(|part| !part.is_empty())
        .map(|part| part.to_lowercase())
        .collect()
}

/// The names that a file declares, with their offsets. Uses do not count: `iter.fold(…)` is fine.
fn declared(file: &File) -> Vec<(usize, &str)> {
    let code = &file.lexed.code;
    match file.language {
        Some(Language::Rust) => rust(code),
        Some(Language::Lua) => behind(code, &["local", "function"]),
        Some(Language::Sql) => sql(code),
        None => Vec::new(),
    }
}

const DECLARING: [&str; 12] = [
    "fn", "struct", "enum", "trait", "union", "type", "const", "static", "mod", "let", "mut", "for",
];

fn rust(code: &str) -> Vec<(usize, &str)> {
    let mut found: BTreeSet<(usize, &str)> = behind(code, &DECLARING).into_iter().collect();
    for (at, word) in words(code) {
        let end = at + word.len();
        let rest = &code[end..];
        // A field, an argument or a binding with a type.
        if rest.starts_with(": ") && word.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.insert((at, word));
        }
        if word == "enum" {
            found.extend(variants(code, end));
        }
    }
    found.into_iter().collect()
}

/// What is created, and parameters, columns and variables: the words before a type.
fn sql(code: &str) -> Vec<(usize, &str)> {
    const CREATED: [&str; 7] = [
        "TABLE", "INDEX", "FUNCTION", "VIEW", "TYPE", "TRIGGER", "AS",
    ];
    const BETWEEN: [&str; 4] = ["IF", "NOT", "EXISTS", "leasehold"];
    const TYPES: [&str; 17] = [
        "bigint",
        "boolean",
        "bytea",
        "integer",
        "interval",
        "jsonb",
        "leasehold",
        "record",
        "smallint",
        "text",
        "timestamptz",
        "uuid",
        "xid8",
        "ANY",
        "BLOB",
        "INTEGER",
        "TEXT",
    ];
    let mut found = Vec::new();
    let mut before = "";
    let mut all = words(code).peekable();
    while let Some((at, word)) = all.next() {
        let end = at + word.len();
        let is_typed = all
            .peek()
            .is_some_and(|(next, of)| &code[end..*next] == " " && TYPES.contains(of));
        if is_typed || CREATED.contains(&before) && !BETWEEN.contains(&word) {
            found.push((at, word));
        }
        if !BETWEEN.contains(&word) {
            before = word;
        }
    }
    found
}

/// The words that follow one of the keywords.
fn behind<'a>(code: &'a str, keywords: &[&str]) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    let mut last: Option<(usize, &str)> = None;
    for (at, word) in words(code) {
        let is_behind = last.is_some_and(|(end, before)| {
            keywords.contains(&before) && code[end..at].trim().is_empty()
        });
        if is_behind && !keywords.contains(&word) {
            found.push((at, word));
        }
        last = Some((at + word.len(), word));
    }
    found
}

/// The variants of the enum whose keyword ends at `from`.
fn variants(code: &str, from: usize) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let Some(open) = code[from..].find(['{', ';']).map(|at| from + at) else {
        return found;
    };
    let end = closed(code, open);
    let mut at = open + 1;
    while at < end {
        match code.as_bytes()[at] {
            b'#' => at += 1,
            b'{' | b'(' | b'[' => at = closed(code, at),
            byte if byte.is_ascii_alphabetic() => {
                let Some((_, name)) = words(&code[at..]).next() else {
                    break;
                };
                found.push((at, name));
                at += name.len();
            }
            _ => at += 1,
        }
    }
    found
}

#[test]
fn a_banned_word_is_found_in_names_and_comments() {
    let found = |path: &str, text: &str| -> Vec<String> {
        let tree = Tree::of(&[(path, text)]);
        check(&tree)
            .into_iter()
            .map(|finding| finding.what)
            .collect()
    };
    let rust = |text: &str| found("src/a.rs", text);
    assert_eq!(rust("// It takes a nap."), ["nap"]);
    assert_eq!(rust("fn ring_bell() {}"), ["bell"]);
    assert_eq!(
        rust("struct RideAlong { greeting: u8 }"),
        ["ride", "greeting"]
    );
    assert_eq!(
        rust("enum Way { #[doc(x)] Luck(u8), Other { stowed: u8 } }"),
        ["luck", "stowed"]
    );
    assert_eq!(
        rust("fn a(ear: u8) { let met = 1; let mut heard = 2; }"),
        ["ear", "met", "heard"]
    );
    assert_eq!(
        rust("mod lifecycle;\nstatic NAPS: u8 = 1;"),
        ["lifecycle", "naps"]
    );
    assert_eq!(
        found("src/a.lua", "local detour = 1 -- a doze"),
        ["detour", "doze"]
    );
    let sql = |text: &str| found("src/a.sql", text);
    assert_eq!(sql("-- name: fold_line"), ["fold"]);
    assert_eq!(
        sql("CREATE OR REPLACE FUNCTION leasehold.fold_1(met smallint[]) AS $$\nDECLARE ear text;"),
        ["fold", "met", "ear"]
    );
    assert_eq!(
        sql("CREATE TABLE IF NOT EXISTS naps (heard INTEGER); SELECT 1 AS luck"),
        ["naps", "heard", "luck"]
    );
    assert!(sql("SELECT folded, b.met FROM a -- They met.").is_empty());
    // Calls, sentences, strings, parts of longer words.
    assert!(rust("a.fold(b.met()); fn label() {} // He heard that they met.").is_empty());
    assert!(rust("const A: &str = \"nap\"; fn snapshot(bellows: u8) {}").is_empty());
    assert!(found("README.md", "A nap.").is_empty());
}
