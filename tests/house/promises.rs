//! The pages name nothing that does not exist: each test, each case of the fault campaign, and each
//! source file of the internals page.

use std::fs;
use std::path::{Path, PathBuf};

const GUARANTEES: &str = include_str!("../../src/guide/guarantees.md");
const EVIDENCE: &str = include_str!("../../docs/evidence.md");
const INTERNALS: &str = include_str!("../../docs/internals.md");

/// What a page calls a test.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Name {
    /// `conformance`, `store`, or a test binary.
    place: String,
    /// Modules, and the function if one is named.
    path: Vec<String>,
    /// It began, or it ended, with an ellipsis.
    open: (bool, bool),
}

impl Name {
    /// A text between backticks, if it is a name. One that begins with an ellipsis is in the place
    /// of the one before.
    fn parse(text: &str, before: Option<&Self>) -> Option<Self> {
        let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == ':';
        let (bare, open_front) = text.strip_prefix('…').map_or((text, false), |t| (t, true));
        let (bare, open_end) = bare.strip_suffix('…').map_or((bare, false), |t| (t, true));
        if bare.is_empty() || !bare.chars().all(word) {
            return None;
        }
        let mut parts = bare.split("::").map(str::to_owned);
        let place = match (open_front, before) {
            (true, Some(before)) => before.place.clone(),
            (true, None) => return None,
            (false, _) => parts.next()?,
        };
        Some(Self {
            place,
            path: parts.collect(),
            open: (open_front, open_end),
        })
    }

    /// The files in which it can be, relative to the folder of its place: all of that folder, or
    /// those of the modules it names. None: there is no such place.
    fn sources(&self, root: &Path) -> Option<Vec<(PathBuf, String)>> {
        let folder = match self.place.as_str() {
            "conformance" => root.join("crates/leasehold-conformance/src"),
            "command" => root.join("crates/leasehold-cli/tests/command"),
            "page" => root.join("crates/leasehold-web/tests/page"),
            "store" => root.join("src/store"),
            place => root.join("tests").join(place),
        };
        let mut all = Vec::new();
        if folder.is_dir() {
            walk(&folder, &mut all);
        }
        let read = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap();
            (path.strip_prefix(&folder).unwrap().to_owned(), text)
        };
        let mut all: Vec<_> = all.into_iter().map(read).collect();
        if all.is_empty() {
            return None;
        }
        let modules = self
            .path
            .split_last()
            .map_or(&[][..], |(_, modules)| modules);
        for module in modules {
            all.retain(|(path, text)| {
                is_below(path, module) || text.contains(&format!("mod {module} {{"))
            });
        }
        Some(all)
    }

    fn exists(&self, root: &Path) -> bool {
        let Some(sources) = self.sources(root) else {
            return false;
        };
        let Some(last) = self.path.last() else {
            return true;
        };
        if self.open == (false, false) && sources.iter().any(|(path, _)| is_below(path, last)) {
            return true;
        }
        sources.iter().any(|(_, text)| {
            let named = text.split("fn ").skip(1).filter_map(|rest| {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))?;
                Some(&rest[..end])
            });
            let mut named = named.chain(text.split("mod ").skip(1).filter_map(|rest| {
                let (name, _) = rest.split_once(" {")?;
                Some(name)
            }));
            named.any(|name| match self.open {
                (false, false) => name == last,
                (false, true) => name.starts_with(&**last),
                (true, false) => name.ends_with(&**last),
                (true, true) => name.contains(&**last),
            })
        })
    }
}

/// Whether a file is that of a module, or in its folder.
fn is_below(path: &Path, module: &str) -> bool {
    path.file_stem().is_some_and(|stem| stem == module)
        || path.components().any(|part| part.as_os_str() == module)
}

fn walk(folder: &Path, all: &mut Vec<PathBuf>) {
    walk_all(folder, all);
    all.retain(|path| path.extension().is_some_and(|end| end == "rs"));
}

fn walk_all(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk_all(&path, all);
        } else {
            all.push(path);
        }
    }
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The cells of a page's tables in which tests are named, each with the first cell of its row.
fn cells(page: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut column = None;
    for line in page.lines() {
        if !line.starts_with('|') {
            column = None;
            continue;
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        match column {
            None => {
                let naming = |cell: &&str| ["held by", "test"].contains(cell);
                column = Some(cells.iter().position(naming));
            }
            Some(Some(at)) if !cells[0].starts_with("---") => found.push((cells[0], cells[at])),
            Some(_) => {}
        }
    }
    found
}

/// The names in a cell, without the campaign's cases.
fn names(cell: &str) -> Vec<Name> {
    let mut names: Vec<Name> = Vec::new();
    for text in quoted(cell) {
        names.extend(Name::parse(text, names.last()));
    }
    names
}

/// The cases of the campaign that a cell names: behind `fault`, up to the next semicolon or name.
fn cases(cell: &str) -> Vec<&str> {
    let lists = cell.split("`fault`: ").skip(1);
    let lists = lists.filter_map(|rest| rest.split([';', '`']).next());
    let all = lists.flat_map(|list| list.split(", "));
    all.map(|case| case.trim_end_matches(',').trim())
        .filter(|case| !case.is_empty())
        .collect()
}

/// The table of the campaign, as its code has it.
fn campaign(root: &Path) -> Vec<String> {
    let code = fs::read_to_string(root.join("tests/fault/table.rs")).unwrap();
    let tables = ["const CASES", "const LONG"].map(|start| {
        let (_, rest) = code.split_once(start).unwrap();
        rest.split_once("];").unwrap().0
    });
    let lines = tables.iter().flat_map(|table| table.lines());
    let lines = lines.filter_map(|line| line.trim().strip_prefix('"')?.strip_suffix("\","));
    lines.map(str::to_owned).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What is wrong with a page.
fn wrong(page: &str) -> Vec<String> {
    let campaign = campaign(root());
    let mut wrong = Vec::new();
    for (row, cell) in cells(page) {
        let (names, cases) = (names(cell), cases(cell));
        if names.is_empty() {
            wrong.push(format!("{row}: no test is named"));
        }
        let missing = names.iter().filter(|name| !name.exists(root()));
        wrong.extend(missing.map(|name| format!("{row}: {name:?}")));
        let known = |case: &&&str| !campaign.iter().any(|known| known.contains(**case));
        let missing = cases.iter().filter(known);
        wrong.extend(missing.map(|case| format!("{row}: no case of the campaign is {case:?}")));
    }
    wrong
}

#[test]
fn every_promise_names_tests_that_exist() {
    let (promises, rest) = EVIDENCE.split_once("\n| threat ").unwrap();
    let (threats, rest) = rest.split_once("\n## ").unwrap();
    let threats = format!("| threat {threats}");
    for (page, rows) in [(promises, 14), (&threats, 8), (rest, 6)] {
        assert!(cells(page).len() > rows, "{:?}", cells(page));
        assert_eq!(wrong(page), Vec::<String>::new());
    }
}

#[test]
fn every_invariant_is_promised_and_held() {
    let rows: Vec<&str> = cells(EVIDENCE).into_iter().map(|(row, _)| row).collect();
    for invariant in 1..=15 {
        let name = format!("I{invariant}");
        assert!(rows.contains(&&*name), "{name} is not held: {rows:?}");
        let promise = format!("\n| {name} | ");
        assert!(GUARANTEES.contains(&promise), "{name} is not promised");
    }
}

#[test]
fn every_case_of_the_campaign_has_its_figures_on_the_page() {
    let campaign = campaign(root());
    assert!(campaign.len() > 30, "{campaign:?}");
    let plain = EVIDENCE.replace('`', "");
    for case in campaign {
        let row = format!("\n| {case}");
        assert!(plain.contains(&row), "no row for {case:?}");
    }
}

#[test]
fn every_test_that_the_text_names_exists() {
    let mut names: Vec<Name> = Vec::new();
    for text in EVIDENCE.lines().flat_map(quoted) {
        let name = Name::parse(text, names.last());
        names.extend(name.filter(|name| !name.path.is_empty() && name.place != "binary"));
    }
    let (there, missing): (Vec<Name>, _) = names.into_iter().partition(|n| n.exists(root()));
    assert_eq!(missing, []);
    assert!(there.len() > 60, "{there:?}");
}

/// The names of source files in a text: words that end like one.
fn files(text: &str) -> impl Iterator<Item = &str> {
    let part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let words = text.split(move |c: char| !part(c));
    words.filter(|word| {
        let end = Path::new(word).extension().and_then(|end| end.to_str());
        end.is_some_and(|end| ["rs", "sql", "lua"].contains(&end))
    })
}

/// Those that are no file: a path must lead to one from the root, a bare name be that of some file.
fn absent(text: &str) -> Vec<&str> {
    let mut all = Vec::new();
    for folder in ["src", "crates", "tests"] {
        walk_all(&root().join(folder), &mut all);
    }
    let is_there = |name: &&str| {
        let bare = !name.contains('/');
        root().join(name).is_file() || bare && all.iter().any(|path| path.ends_with(name))
    };
    files(text).filter(|name| !is_there(name)).collect()
}

#[test]
fn every_file_of_the_internals_exists() {
    assert!(INTERNALS.lines().count() <= 90, "more than a screen");
    assert!(files(INTERNALS).count() > 40);
    assert_eq!(absent(INTERNALS), Vec::<&str>::new());
    assert_eq!(
        absent("`src/nothing.rs`, nothing.lua ─► lib.rs"),
        ["src/nothing.rs", "nothing.lua"]
    );
}

/// Control arm: what is not there is missed.
#[test]
fn a_name_without_a_test_is_found() {
    let page =
        |cell: &str| format!("| | promise | held by |\n|---|---|---|\n| I0 | a | {cell} |\n");
    for good in [
        "`house::promises::a_name_without…`",
        "`house`, `…without_a_test…`",
        "`conformance::renew`, `engines::redis`, `command::operate`, `page::clicks`",
        "`fault`: owner crash, full disk; `simulation::model`",
    ] {
        assert_eq!(wrong(&page(good)), Vec::<String>::new(), "{good}");
    }
    for bad in [
        "",
        "trust",
        "`house::promises::a_name_with_a…`",
        "`house::promises::a_name_without`",
        "`house::tidy::a_name_without…`",
        "`nowhere`",
        "`conformance::nothing`",
        "`fault`: owner bored",
        "`house`; `fault`: owner crash, owner bored, `house`",
    ] {
        assert_eq!(wrong(&page(bad)).len(), 1, "{bad}");
    }
}
