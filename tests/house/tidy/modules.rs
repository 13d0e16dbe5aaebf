//! Follows the `mod` declarations of every crate from its root.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::tidy::lex::{Language, without_tests, words};
use crate::tidy::tree::{File, Tree, folder, joined, stem};

/// A file, as a `mod` declaration includes it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Included {
    path: String,
    /// The folder of its own modules.
    modules: String,
    is_test: bool,
}

/// All Rust files that belong to a crate; true for those that only tests include.
fn included(tree: &Tree) -> BTreeMap<String, bool> {
    let mut open: Vec<Included> = roots(tree)
        .into_iter()
        .map(|path| Included {
            modules: folder(&path).into(),
            path,
            is_test: false,
        })
        .collect();
    let mut seen = BTreeSet::new();
    let mut found: BTreeMap<String, bool> = BTreeMap::new();
    while let Some(file) = open.pop() {
        let Some(source) = tree.files.get(&file.path) else {
            continue;
        };
        if !seen.insert(file.clone()) {
            continue;
        }
        let is_test = found.entry(file.path.clone()).or_insert(true);
        *is_test &= file.is_test;
        open.extend(modules(tree, &file, source));
    }
    found
}

/// The Rust files that belong to a crate.
pub(crate) fn of_crates(tree: &Tree) -> BTreeSet<String> {
    included(tree).into_keys().collect()
}

/// The Rust files that are only included by a `#[cfg(test)] mod name;`.
pub(crate) fn only_of_tests(tree: &Tree) -> Vec<String> {
    let only = included(tree).into_iter().filter(|(_, is_test)| *is_test);
    only.map(|(path, _)| path).collect()
}

/// The roots of all crates: those that cargo finds by itself, and those that a manifest names.
fn roots(tree: &Tree) -> BTreeSet<String> {
    let mut roots = BTreeSet::new();
    for (manifest, file) in &tree.files {
        let root = folder(manifest);
        if &manifest[root.len()..] != "Cargo.toml" {
            continue;
        }
        let named = file.text.split('"').skip(1).step_by(2);
        roots.extend(
            named
                .filter(|text| is_rust(text))
                .map(|text| joined(root, text)),
        );
        for path in tree.files.keys().filter(|path| path.starts_with(root)) {
            let below: Vec<&str> = path[root.len()..].split('/').collect();
            let is_root = matches!(
                below[..],
                ["build.rs"]
                    | ["src", "lib.rs" | "main.rs"]
                    | ["src", "bin", _]
                    | ["src", "bin", _, "main.rs"]
                    | ["tests" | "benches" | "examples", _]
                    | ["tests" | "benches" | "examples", _, "main.rs"]
            );
            if is_root {
                roots.insert(path.clone());
            }
        }
    }
    roots.retain(|path| is_rust(path));
    roots
}

/// The files that the `mod` declarations of a file include.
fn modules(tree: &Tree, file: &Included, source: &File) -> Vec<Included> {
    let code = &source.lexed.code;
    let shipped = without_tests(code);
    let mut found = Vec::new();
    for (at, word) in words(code) {
        let Some(name) = declared(code, at, word) else {
            continue;
        };
        let is_test = file.is_test || shipped.as_bytes()[at] == b' ';
        let (path, modules) = if let Some(written) = path_attribute(source, at) {
            let path = joined(folder(&file.path), written);
            let modules = folder(&path).to_owned();
            (path, modules)
        } else {
            let flat = format!("{}{name}.rs", file.modules);
            let below = format!("{}{name}/", file.modules);
            let is_flat = tree.files.contains_key(&flat);
            let path = if is_flat {
                flat
            } else {
                format!("{below}mod.rs")
            };
            (path, below)
        };
        found.push(Included {
            path,
            modules,
            is_test,
        });
    }
    found
}

/// The name in `mod name;`.
fn declared<'a>(code: &'a str, at: usize, word: &str) -> Option<&'a str> {
    let (name, _) = code[at..].strip_prefix("mod ")?.split_once(';')?;
    let is_name = word == "mod" && words(name).next().is_some_and(|(_, word)| word == name);
    is_name.then_some(name)
}

/// The value of a `#[path = "…"]` before the declaration at `at`.
fn path_attribute(source: &File, at: usize) -> Option<&str> {
    let code = &source.lexed.code;
    let from = code[..at].rfind([';', '}']).map_or(0, |end| end + 1);
    let attribute = from + code[from..at].find("#[path")?;
    let mut strings = source.lexed.strings.iter();
    let (_, path) = strings.find(|(start, _)| (attribute..at).contains(start))?;
    Some(path)
}

fn is_rust(path: &str) -> bool {
    Path::new(path)
        .extension()
        .is_some_and(|extension| extension == "rs")
}

/// The files that one of these macros includes: `include_str!`, `include!`.
pub(crate) fn included_by(tree: &Tree, macros: &[&str]) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for (path, file) in tree.in_language(Language::Rust) {
        for (at, text) in &file.lexed.strings {
            let before = file.lexed.code[..at - 1].trim_end();
            let is_include = macros.iter().any(|name| {
                let call = before
                    .strip_suffix('(')
                    .and_then(|before| before.strip_suffix(name));
                call.is_some_and(|before| {
                    !before.ends_with(|c: char| c.is_alphanumeric() || c == '_')
                })
            });
            if is_include {
                named.insert(joined(folder(path), text));
            }
        }
    }
    named
}

/// The module path of a file of the library: `src/store/sqlite/claim.rs` is `store::sqlite::claim`.
pub(crate) fn module_path(path: &str) -> Vec<&str> {
    let below = path.strip_prefix("src/").unwrap_or(path);
    let mut parts: Vec<&str> = folder(below)
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    if !["mod", "lib", "main"].contains(&stem(below)) {
        parts.push(stem(below));
    }
    parts
}

#[test]
fn modules_are_followed() {
    let tree = Tree::of(&[
        ("Cargo.toml", "[[bench]]\npath = \"extra/speed.rs\""),
        ("extra/speed.rs", ""),
        (
            "src/lib.rs",
            "mod a;\n#[cfg(test)]\nmod tests;\n// mod c;\nmod inline {}",
        ),
        (
            "src/a/mod.rs",
            "pub(crate) mod b;\n#[cfg(test)]\n#[path = \"../../tests/help.rs\"]\nmod help;",
        ),
        ("src/a/b.rs", "mod deep;"),
        ("src/a/b/deep.rs", ""),
        ("src/tests.rs", "mod more;"),
        ("src/tests/more.rs", ""),
        ("src/c.rs", ""),
        ("tests/one/main.rs", "mod help;"),
        ("tests/one/help.rs", ""),
        ("tests/help.rs", ""),
        ("crates/x/Cargo.toml", ""),
        ("crates/x/src/main.rs", ""),
        ("crates/x/src/lost.rs", ""),
    ]);
    let all = of_crates(&tree);
    let lost: Vec<&String> = tree
        .files
        .keys()
        .filter(|path| !all.contains(*path))
        .collect();
    let expected = [
        "Cargo.toml",
        "crates/x/Cargo.toml",
        "crates/x/src/lost.rs",
        "src/c.rs",
    ];
    assert_eq!(lost, expected);
    assert_eq!(only_of_tests(&tree), ["src/tests.rs", "src/tests/more.rs"]);
    assert_eq!(module_path("src/a/b/deep.rs"), ["a", "b", "deep"]);
    assert_eq!(module_path("src/a/mod.rs"), ["a"]);
    assert!(module_path("src/lib.rs").is_empty());
}
