//! The files of the project.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::tidy::lex::{Language, Lexed, without_tests};
use crate::tidy::modules;

/// Skipped folders: build output, and what fuzzers find.
const APART: [&str; 2] = ["target", "corpus"];

pub(crate) struct Tree {
    /// By path relative to the root, with `/` as the separator.
    pub(crate) files: BTreeMap<String, File>,
}

pub(crate) struct File {
    pub(crate) text: String,
    /// Empty if the language is unknown.
    pub(crate) lexed: Lexed,
    pub(crate) language: Option<Language>,
    /// The code without `#[cfg(test)]` items.
    pub(crate) shipped: String,
    /// True if only tests include this file.
    pub(crate) is_test: bool,
}

impl File {
    fn new(path: &str, text: String) -> Self {
        let language = match path.rsplit_once('.') {
            Some((_, "rs")) => Some(Language::Rust),
            Some((_, "sql")) => Some(Language::Sql),
            Some((_, "lua")) => Some(Language::Lua),
            _ => None,
        };
        let lexed = language.map_or_else(Lexed::default, |known| Lexed::of(&text, known));
        let shipped = match language {
            Some(Language::Rust) => without_tests(&lexed.code),
            _ => lexed.code.clone(),
        };
        Self {
            text,
            lexed,
            language,
            shipped,
            is_test: false,
        }
    }

    /// The strings outside `#[cfg(test)]` items.
    pub(crate) fn shipped_strings(&self) -> impl Iterator<Item = &(usize, String)> {
        // Quotes are only blanked inside test items.
        let is_shipped = |at: usize| self.shipped.as_bytes().get(at - 1) != Some(&b' ');
        self.lexed
            .strings
            .iter()
            .filter(move |(at, _)| is_shipped(*at))
    }
}

impl Tree {
    pub(crate) fn read(root: &Path) -> Self {
        let mut files = BTreeMap::new();
        read(root, "", &mut files);
        Self::with(files)
    }

    /// A tree of snippets, for unit tests.
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        Self::with(
            files
                .iter()
                .map(|(path, text)| ((*path).into(), (*text).into()))
                .collect(),
        )
    }

    fn with(files: BTreeMap<String, String>) -> Self {
        let file = |(path, text): (String, String)| {
            let file = File::new(&path, text);
            (path, file)
        };
        let mut tree = Self {
            files: files.into_iter().map(file).collect(),
        };
        for path in modules::only_of_tests(&tree) {
            if let Some(file) = tree.files.get_mut(&path) {
                file.is_test = true;
            }
        }
        tree
    }

    /// The files in one language.
    pub(crate) fn in_language(&self, language: Language) -> impl Iterator<Item = (&str, &File)> {
        let files = self.files.iter().map(|(path, file)| (&path[..], file));
        files.filter(move |(_, file)| file.language == Some(language))
    }

    /// The files of the library and of the crates, without tests.
    pub(crate) fn shipped(&self, language: Language) -> impl Iterator<Item = (&str, &File)> {
        self.in_language(language).filter(|(path, file)| {
            let is_source = path.starts_with("src/")
                || (path.starts_with("crates/") && path.split('/').nth(2) == Some("src"));
            is_source && !file.is_test
        })
    }
}

fn read(folder: &Path, below: &str, files: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let path = format!("{below}{name}");
        if name.starts_with('.') || APART.contains(&&name[..]) || name == "Cargo.lock" {
            continue;
        }
        if entry.file_type().unwrap().is_dir() {
            read(&entry.path(), &format!("{path}/"), files);
        } else if let Ok(text) = fs::read_to_string(entry.path()) {
            // Binary files are skipped.
            files.insert(path, text);
        }
    }
}

/// The folder of a path, with the trailing `/`; empty for the root.
pub(crate) fn folder(path: &str) -> &str {
    path.rfind('/').map_or("", |at| &path[..=at])
}

/// The file name without extension.
pub(crate) fn stem(path: &str) -> &str {
    let name = &path[folder(path).len()..];
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

/// `a/b/` joined with `../c.rs` is `a/c.rs`.
pub(crate) fn joined(folder: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in relative.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[test]
fn paths() {
    assert_eq!((folder("a/b/c.rs"), folder("c.rs")), ("a/b/", ""));
    assert_eq!((stem("a/b/c.rs"), stem("c")), ("c", "c"));
    assert_eq!(joined("a/b/", "../c/d.rs"), "a/c/d.rs");
    assert_eq!(joined("", "./d.rs"), "d.rs");
}

#[test]
fn strings_of_tests_are_not_shipped() {
    let text = "fn a() { b(\"one\") }\n#[cfg(test)]\nmod tests { const C: &str = \"two\"; }";
    let tree = Tree::of(&[("src/a.rs", text)]);
    let strings: Vec<&str> = tree.files["src/a.rs"]
        .shipped_strings()
        .map(|(_, s)| &s[..])
        .collect();
    assert_eq!(strings, ["one"]);
}
