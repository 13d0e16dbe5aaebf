//! Imports go down only.
//!
//! Every top-level module of the library belongs to a layer, and imports from lower layers only. A
//! module that is missing in the table below is a finding too.

use std::collections::BTreeMap;

use crate::tidy::Finding;
use crate::tidy::lex::{Language, closed, line_of, words};
use crate::tidy::modules::module_path;
use crate::tidy::tree::Tree;

struct Layer {
    modules: &'static [&'static str],
    /// Whether the modules of this layer may import each other.
    is_mixed: bool,
}

/// From the bottom to the top.
const LAYERS: [Layer; 7] = [
    // Values.
    Layer {
        modules: &[
            "clock",
            "driver",
            "error",
            "history",
            "job",
            "lease",
            "limits",
            "names",
            "panics",
            "point",
            "receipt",
            "retry",
            "settings",
            "sqlite_error",
            "terms",
            "token",
        ],
        is_mixed: true,
    },
    // The pure rules; and the fence, which needs values only.
    Layer {
        modules: &["rules", "fence"],
        is_mixed: false,
    },
    // The store trait, its engines and the views they return.
    Layer {
        modules: &["store", "inspect"],
        is_mixed: true,
    },
    // Events and metrics.
    Layer {
        modules: &["observe"],
        is_mixed: false,
    },
    // Calling a store so that repeats are safe.
    Layer {
        modules: &["calls"],
        is_mixed: false,
    },
    // What a user holds.
    Layer {
        modules: &[
            "atomic_redis",
            "client",
            "context",
            "ending",
            "flow",
            "handler",
            "holding",
            "layer",
            "operator",
            "schedule",
            "state",
            "transaction",
            "worker",
        ],
        is_mixed: true,
    },
    // What the other crates of the workspace use.
    Layer {
        modules: &["guide", "hooks"],
        is_mixed: true,
    },
];

/// The crate root and programs are in no layer.
const ROOTS: [&str; 2] = ["lib", "bin"];

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let exports = exports(tree);
    let mut findings = Vec::new();
    let files = tree
        .shipped(Language::Rust)
        .filter(|(path, _)| path.starts_with("src/"));
    for (path, file) in files {
        let module = module_path(path);
        let Some(&from) = module.first().filter(|name| !ROOTS.contains(name)) else {
            continue;
        };
        let mut finding = |at: usize, what: String, why: &str| {
            let line = line_of(&file.shipped, at);
            findings.push(Finding {
                path: path.into(),
                line,
                what,
                why: why.into(),
            });
        };
        let Some(own) = level(from) else {
            finding(
                0,
                from.into(),
                "belongs to no layer: name it in tests/house/tidy/layers.rs",
            );
            continue;
        };
        for (at, name) in imports(&file.shipped, module.len()) {
            let name = exports.get(name).copied().unwrap_or(name);
            let Some(other) = level(name).filter(|_| name != from) else {
                continue;
            };
            if other > own || (other == own && !LAYERS[own].is_mixed) {
                finding(at, format!("{from} -> {name}"), "imports go down only");
            }
        }
    }
    findings
}

fn level(module: &str) -> Option<usize> {
    LAYERS
        .iter()
        .position(|layer| layer.modules.contains(&module))
}

/// The names that the crate root re-exports, with the module of each.
fn exports(tree: &Tree) -> BTreeMap<&str, &str> {
    let mut exports = BTreeMap::new();
    let root = tree
        .files
        .get("src/lib.rs")
        .map_or("", |file| &file.shipped);
    for (at, _) in root.match_indices("pub use ") {
        let end = root[at..].find(';').map_or(root.len(), |end| at + end);
        let mut words = words(&root[at..end]).map(|(_, word)| word).skip(2);
        if let Some(module) = words.next() {
            exports.extend(words.map(|name| (name, module)));
        }
    }
    exports
}

/// The names directly below the crate root that the code refers to, with their offsets. `depth` is
/// the number of modules around it, for paths that start with `super`.
fn imports(code: &str, depth: usize) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut supers = 0;
    let mut end = 0;
    for (at, word) in words(code) {
        supers = match word {
            "super" if supers > 0 && code[end..at] == *"::" => supers + 1,
            "super" => 1,
            _ => 0,
        };
        end = at + word.len();
        let is_root = word == "crate" || (supers == depth && depth > 0);
        if let Some(rest) = code[end..].strip_prefix("::").filter(|_| is_root) {
            let start = end + 2;
            if rest.starts_with('{') {
                let group = &code[start..closed(code, start)];
                found.extend(
                    members(group)
                        .into_iter()
                        .map(|(offset, name)| (start + offset, name)),
                );
            } else if let Some((0, name)) = words(rest).next() {
                found.push((start, name));
            }
        }
    }
    found
}

/// `a` and `b` of `{a, b::{c, d}}`.
fn members(group: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut depth, mut is_first) = (0, false);
    let mut next = words(group).peekable();
    for (at, byte) in group.bytes().enumerate() {
        let word = next.next_if(|(from, _)| *from == at);
        match (byte, word) {
            (_, Some(word)) if depth == 1 && is_first => {
                found.push(word);
                is_first = false;
            }
            (b'{', _) => (depth, is_first) = (depth + 1, true),
            (b'}', _) => depth -= 1,
            (b',', _) => is_first = true,
            _ => {}
        }
    }
    found
}

#[test]
fn an_import_from_above_is_found() {
    let tree = Tree::of(&[
        ("Cargo.toml", ""),
        (
            "src/lib.rs",
            "mod job; mod rules; mod store; mod worker; mod fence; mod odd; pub use worker::{Worker, Report};\n",
        ),
        (
            "src/job.rs",
            "use crate::names::Name;\nfn a() { crate::store::open() }",
        ),
        (
            "src/rules/mod.rs",
            "use crate::job::Job; // use crate::worker;\nuse crate::fence::Mark;",
        ),
        (
            "src/store/mod.rs",
            "mod memory;\nuse crate::{job, rules::{self, worker}, worker::Pool};\nuse super::client;\n\
             #[cfg(test)]\nmod tests { use crate::hooks; }",
        ),
        (
            "src/store/memory.rs",
            "use super::worker; use super::super::calls::Lane; use crate::Report;",
        ),
        (
            "src/worker.rs",
            "use crate::client::Client; use crate::store::Store;",
        ),
        ("src/fence/mod.rs", "use crate::store::Store;"),
        ("src/odd.rs", ""),
    ]);
    let found: Vec<(String, usize, String)> = check(&tree)
        .into_iter()
        .map(|f| (f.path, f.line, f.what))
        .collect();
    let found: Vec<(&str, usize, &str)> = found
        .iter()
        .map(|(path, line, what)| (&path[..], *line, &what[..]))
        .collect();
    let expected = [
        ("src/fence/mod.rs", 1, "fence -> store"),
        ("src/job.rs", 2, "job -> store"),
        ("src/odd.rs", 1, "odd"),
        ("src/rules/mod.rs", 2, "rules -> fence"),
        ("src/store/memory.rs", 1, "store -> calls"),
        ("src/store/memory.rs", 1, "store -> worker"),
        ("src/store/mod.rs", 2, "store -> worker"),
        ("src/store/mod.rs", 3, "store -> client"),
    ];
    assert_eq!(found, expected);
}
