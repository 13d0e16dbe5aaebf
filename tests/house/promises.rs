//! What the pages name as holding a promise is there: each test, and each case of the fault campaign.

use std::fs;
use std::path::{Path, PathBuf};

const GUARANTEES: &str = include_str!("../../src/guide/guarantees.md");
const SECURITY: &str = include_str!("../../src/guide/security.md");
const CHANGELOG: &str = include_str!("../../CHANGELOG.md");

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
    /// A text between backticks, if it is a name. One that begins with an ellipsis is in the place of
    /// the one before.
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

    /// Where its source is. None: it is not the name of a test.
    fn sources(&self, root: &Path) -> Option<Vec<PathBuf>> {
        let (folder, file) = match self.place.as_str() {
            "conformance" => (root.join("src/store/conformance"), None),
            "store" => (root.join("src/store"), None),
            place => {
                let file = root.join(format!("tests/{place}.rs"));
                (root.join("tests").join(place), Some(file))
            }
        };
        let mut all = Vec::new();
        if folder.is_dir() {
            walk(&folder, &mut all);
        }
        all.extend(file.filter(|file| file.is_file()));
        (!all.is_empty()).then_some(all)
    }

    fn exists(&self, root: &Path) -> bool {
        let Some(sources) = self.sources(root) else {
            return false;
        };
        let Some(last) = self.path.last() else {
            return true;
        };
        let is_module = |source: &PathBuf| source.file_stem().is_some_and(|stem| stem == &**last);
        if self.open == (false, false) && sources.iter().any(is_module) {
            return true;
        }
        sources.iter().any(|source| {
            let text = fs::read_to_string(source).unwrap();
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

fn walk(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, all);
        } else if path.extension().is_some_and(|end| end == "rs") {
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
    for (page, rows) in [(GUARANTEES, 20), (SECURITY, 8)] {
        assert!(cells(page).len() > rows, "{:?}", cells(page));
        assert_eq!(wrong(page), Vec::<String>::new());
    }
}

#[test]
fn every_invariant_is_on_the_page() {
    let rows: Vec<&str> = cells(GUARANTEES).into_iter().map(|(row, _)| row).collect();
    for invariant in 1..=15 {
        let name = format!("I{invariant}");
        assert!(rows.contains(&&*name), "{name} is not promised: {rows:?}");
    }
}

#[test]
fn every_case_of_the_campaign_has_its_figures_on_the_page() {
    let campaign = campaign(root());
    assert!(campaign.len() > 30, "{campaign:?}");
    let plain = GUARANTEES.replace('`', "");
    for case in campaign {
        let row = format!("\n| {case}");
        assert!(plain.contains(&row), "no row for {case:?}");
    }
}

#[test]
fn every_test_that_the_changelog_names_exists() {
    let names = quoted(CHANGELOG).filter_map(|text| Name::parse(text, None));
    let names = names.filter(|name| !name.path.is_empty() && name.sources(root()).is_some());
    let (there, missing): (Vec<Name>, _) = names.partition(|name| name.exists(root()));
    assert_eq!(missing, []);
    assert!(there.len() > 20, "{there:?}");
}

/// Control arm: what is not there is missed.
#[test]
fn a_name_without_a_test_is_found() {
    let page =
        |cell: &str| format!("| | promise | held by |\n|---|---|---|\n| I0 | a | {cell} |\n");
    for good in [
        "`promises::a_name_without…`",
        "`promises`, `…without_a_test…`",
        "`conformance::renew`",
        "`fault`: owner crash, full disk; `model`",
    ] {
        assert_eq!(wrong(&page(good)), Vec::<String>::new(), "{good}");
    }
    for bad in [
        "",
        "trust",
        "`promises::a_name_with_a…`",
        "`promises::a_name_without`",
        "`nowhere`",
        "`conformance::nothing`",
        "`fault`: owner bored",
        "`model`; `fault`: owner crash, owner bored, `model`",
    ] {
        assert_eq!(wrong(&page(bad)).len(), 1, "{bad}");
    }
}
