//! `tests/README.md` lists every test binary, and no other.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const README: &str = include_str!("../README.md");

/// A test binary: the folder of its package, empty for that of the root, and its name.
type Binary = (String, String);

/// The binaries in the tables of a page, whose first cell is `` `name` `` or
/// `` `name` (`folder`) ``.
fn listed(page: &str) -> BTreeSet<Binary> {
    let (_, rest) = page.split_once("\n## Test binaries\n").unwrap_or_default();
    let section = rest.split("\n## ").next().unwrap_or_default();
    let cells = section.lines().filter_map(|line| {
        let (cell, _) = line.strip_prefix("| `")?.split_once(" | ")?;
        let (name, folder) = cell.split_once('`')?;
        let folder = folder
            .trim()
            .trim_start_matches("(`")
            .trim_end_matches("`)");
        Some((folder.to_owned(), name.to_owned()))
    });
    cells.collect()
}

/// The binaries of the packages in a folder and below.
fn built(root: &Path, folder: &str, found: &mut BTreeSet<Binary>) {
    let here = root.join(folder);
    let mut add = |name: &str| found.insert((folder.to_owned(), name.to_owned()));
    if let Ok(manifest) = fs::read_to_string(here.join("Cargo.toml")) {
        let named = manifest.split("\n[[test]]\n").skip(1);
        let name = |table: &str| {
            Some(
                table
                    .split_once("name = \"")?
                    .1
                    .split_once('"')?
                    .0
                    .to_owned(),
            )
        };
        for name in named.filter_map(name) {
            add(&name);
        }
        for path in entries(&here.join("tests")) {
            let is_file = path.extension().is_some_and(|end| end == "rs");
            if let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
                && (is_file || path.join("main.rs").is_file())
            {
                add(stem);
            }
        }
    }
    for path in entries(&here).filter(|path| path.is_dir()) {
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|name| *name != "target" && !name.starts_with('.')) {
            let below = format!("{folder}/{name}");
            built(root, below.trim_start_matches('/'), found);
        }
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("a readable folder").path())
}

#[test]
fn the_list_of_test_binaries_is_complete() {
    let mut binaries = BTreeSet::new();
    built(Path::new(env!("CARGO_MANIFEST_DIR")), "", &mut binaries);
    assert_eq!(listed(README), binaries);
    assert!(binaries.contains(&(String::new(), "house".to_owned())));
}

/// Control arm: a binary that is not listed is seen, wherever its package is.
#[test]
fn a_binary_that_is_not_listed_is_found() {
    let root = tempfile::tempdir().expect("a folder");
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a file in a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    };
    write("Cargo.toml", "[package]\n");
    write("tests/one/main.rs", "");
    write("tests/two.rs", "");
    write("tests/none/other.rs", "");
    write("target/x/Cargo.toml", "\n[[test]]\nname = \"old\"\n");
    write(
        "tests/far/Cargo.toml",
        "[package]\n\n[[test]]\nname = \"three\"\npath = \"a.rs\"\n",
    );
    let mut binaries = BTreeSet::new();
    built(root.path(), "", &mut binaries);
    let page = "\n## Test binaries\n| `one` | a | b |\n| `two` | a | b |\n| `three` (`tests/far`) | a | b |\n\n## X\n| `four` | a |";
    assert_eq!(binaries, listed(page));
    assert_eq!(binaries.len(), 3);
}
