//! The public interface as a text, `docs/api.txt`: whoever changes it notices, and a reviewer sees
//! the change as a difference.
//!
//! After a change that is meant: `LEASEHOLD_BLESS=1 cargo test --test house api`.
//!
//! It is read from the sources, so that any compiler will do. Public items of private modules are
//! listed where they are declared; the `pub use` lines say where users find them. What is hidden
//! from the documentation is no part of it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use crate::tidy::TREE;
use crate::tidy::lex::{Lexed, closed, words};
use crate::tidy::tree::Tree;

/// The interface of `leasehold-conformance` is its cases, which its own `list.rs` has.
const CRATES: [(&str, &str); 5] = [
    ("leasehold", "src"),
    ("leasehold-diesel", "crates/leasehold-diesel/src"),
    ("leasehold-sqlx", "crates/leasehold-sqlx/src"),
    ("leasehold-testing", "crates/leasehold-testing/src"),
    ("leasehold-web", "crates/leasehold-web/src"),
];

#[test]
fn the_public_interface_is_on_record() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/api.txt");
    let found = interface(&TREE);
    if std::env::var_os("LEASEHOLD_BLESS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap_or_default();
    let (gone, new) = (lacking(&recorded, &found), lacking(&found, &recorded));
    assert!(
        recorded == found,
        "the public interface is not that of docs/api.txt\ngone:\n{gone}new:\n{new}\
         if that is meant: LEASEHOLD_BLESS=1 cargo test --test house api"
    );
}

/// The lines of `one` that `other` does not have.
fn lacking(one: &str, other: &str) -> String {
    let others: BTreeSet<&str> = other.lines().collect();
    let missing = one.lines().filter(|line| !others.contains(line));
    missing.fold(String::new(), |text, line| text + line + "\n")
}

fn interface(tree: &Tree) -> String {
    let mut text = String::new();
    for (name, folder) in CRATES {
        let _ = writeln!(text, "# {name}\n");
        let path = format!("{folder}/lib.rs");
        let mut types = BTreeSet::new();
        file(tree, &path, folder, "crate", &mut |_, items| {
            types.extend(
                items
                    .iter()
                    .filter_map(Item::public_type)
                    .map(str::to_owned),
            );
        });
        file(tree, &path, folder, "crate", &mut |module, items| {
            let lines = items.iter().flat_map(|item| item.lines(&types));
            let lines: Vec<String> = lines.collect();
            if !lines.is_empty() {
                let _ = writeln!(text, "## {module}\n{}\n", lines.join("\n"));
            }
        });
    }
    text
}

/// Shows the items of a file and of the modules below it.
fn file(
    tree: &Tree,
    path: &str,
    below: &str,
    module: &str,
    see: &mut dyn FnMut(&str, &[Item<'_>]),
) {
    let Some(source) = tree.files.get(path) else {
        return;
    };
    let told = with_strings(&source.shipped, &source.lexed);
    let items = items(&source.shipped, &told);
    see(module, &items);
    for name in items.iter().filter_map(Item::module) {
        for path in [
            format!("{below}/{name}.rs"),
            format!("{below}/{name}/mod.rs"),
        ] {
            let (below, module) = (format!("{below}/{name}"), format!("{module}::{name}"));
            file(tree, &path, &below, &module, see);
        }
    }
}

/// Code with the contents of its strings, but without its comments.
fn with_strings(code: &str, lexed: &Lexed) -> String {
    let mut bytes = code.as_bytes().to_vec();
    for (at, string) in &lexed.strings {
        if bytes[at - 1] != b' ' {
            bytes[*at..at + string.len()].copy_from_slice(string.as_bytes());
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// An item: its attributes, what stands before its body, and its body.
#[derive(Debug)]
struct Item<'a> {
    attributes: Vec<&'a str>,
    head: String,
    body: Option<(&'a str, &'a str)>,
}

/// The items of a module, a trait or an `impl`. `code` is without the contents of strings, `told`
/// is the same with them.
fn items<'a>(code: &'a str, told: &'a str) -> Vec<Item<'a>> {
    separated(code, told, b';')
}

/// The items between which `separator` stands: a comma between fields and variants.
fn separated<'a>(code: &'a str, told: &'a str, separator: u8) -> Vec<Item<'a>> {
    let bytes = code.as_bytes();
    let (mut items, mut attributes, mut at) = (Vec::new(), Vec::new(), 0);
    while at < code.len() {
        if bytes[at].is_ascii_whitespace() {
            at += 1;
            continue;
        }
        if bytes[at] == b'#' {
            let open = at + code[at..].find('[').unwrap_or(0);
            let end = closed(code, open);
            if bytes.get(at + 1) != Some(&b'!') {
                attributes.push(&told[at..end]);
            }
            at = end;
            continue;
        }
        let start = at;
        let is_use = words(&code[at..]).take(2).any(|(_, word)| word == "use");
        let mut angles = 0_i32;
        let (end, body) = loop {
            match bytes.get(at) {
                None => break (at, None),
                Some(byte) if *byte == separator && angles == 0 => break (at, None),
                Some(b'{') if !is_use => {
                    let end = closed(code, at);
                    break (at, Some((at + 1, end - 1)));
                }
                Some(b'=') if bytes.get(at + 1) == Some(&b' ') && angles == 0 && !is_use => {
                    // A value, or the type that an alias stands for.
                    let end = at;
                    while at < code.len() && bytes[at] != separator {
                        at = match bytes[at] {
                            b'{' | b'(' | b'[' => closed(code, at),
                            _ => at + 1,
                        };
                    }
                    let is_alias = words(&code[start..])
                        .take(2)
                        .any(|(_, word)| word == "type");
                    break (if is_alias { at } else { end }, None);
                }
                Some(b'(' | b'[' | b'{') => at = closed(code, at),
                Some(b'<') => (angles, at) = (angles + 1, at + 1),
                Some(b'>') if bytes[at - 1] != b'-' => (angles, at) = (angles - 1, at + 1),
                Some(_) => at += 1,
            }
        };
        let head = one_line(&told[start..end]);
        at = body.map_or(at.max(end), |(_, close)| close) + 1;
        if !head.is_empty() {
            items.push(Item {
                attributes: std::mem::take(&mut attributes),
                head,
                body: body.map(|(from, to)| (&code[from..to], &told[from..to])),
            });
        }
    }
    items
}

fn one_line(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (broken, whole) in [
        ("( ", "("),
        (", )", ")"),
        (" )", ")"),
        ("< ", "<"),
        (", >", ">"),
        (", }", " }"),
        ("(mut self", "(self"),
    ] {
        line = line.replace(broken, whole);
    }
    line
}

impl Item<'_> {
    fn is_hidden(&self) -> bool {
        self.attributes
            .iter()
            .any(|mark| mark.contains("doc(hidden)"))
    }

    /// The module that is declared here and has a file of its own.
    fn module(&self) -> Option<&str> {
        // For the other crates of the workspace.
        let is_inside = |mark: &&str| mark.contains("\"doctor\"") || mark.contains("\"testing\"");
        let is_hidden = self.is_hidden() || self.attributes.iter().any(is_inside);
        let is_file = self.body.is_none() && !is_hidden;
        let (_, name) = self.head.rsplit_once("mod ").filter(|_| is_file)?;
        Some(name)
    }

    fn public_type(&self) -> Option<&str> {
        let declared = self
            .head
            .strip_prefix("pub ")
            .filter(|_| !self.is_hidden())?;
        let (kind, rest) = declared.split_once(' ')?;
        let is_type = ["struct", "enum", "trait"].contains(&kind);
        words(rest).next().map(|(_, name)| name).filter(|_| is_type)
    }

    /// Its lines in the text.
    fn lines(&self, types: &BTreeSet<String>) -> Vec<String> {
        if self.is_hidden() {
            return Vec::new();
        }
        let head = &self.head;
        let is_member = |item: &Item<'_>| item.head.starts_with("pub ") || item.head.contains("!(");
        if head.starts_with("impl") {
            let is_of_trait = head.contains(" for ");
            let own = head.rsplit_once(" for ").map_or(&head[..], |(_, own)| own);
            let own = own.split(" where ").next().unwrap_or(own);
            let is_public = words(own).any(|(_, word)| types.contains(word));
            return match (is_of_trait, is_public) {
                (true, true) if self.is_of_public_trait(types) => vec![head.clone()],
                (false, _) => self.block(|item| is_member(item)),
                _ => Vec::new(),
            };
        }
        if head.starts_with("macro_rules!") {
            // What it writes for a type that calls it.
            let Some((code, told)) = self.body else {
                return Vec::new();
            };
            let Some(open) = code.find("=> {").map(|at| at + 3) else {
                return Vec::new();
            };
            let inside = open + 1..closed(code, open) - 1;
            let written = Item {
                attributes: Vec::new(),
                head: head.clone(),
                body: Some((&code[inside.clone()], &told[inside])),
            };
            return written.block(|item| item.head.starts_with("pub "));
        }
        let Some(declared) = head.strip_prefix("pub ") else {
            return Vec::new();
        };
        match declared.split(' ').next().unwrap_or_default() {
            "struct" if self.body.is_some() => self.block(|item| item.head.starts_with("pub ")),
            "struct" if !head.contains("(pub ") && head.contains('(') => {
                let (shown, _) = head.split_once('(').unwrap_or((head, ""));
                vec![format!("{}{shown}(_)", self.marks())]
            }
            "enum" | "trait" => self.block(|_| true),
            _ => vec![format!("{}{head}", self.marks())],
        }
    }

    /// Traits of others, and those that are public here.
    fn is_of_public_trait(&self, types: &BTreeSet<String>) -> bool {
        const OTHERS: [&str; 20] = [
            "Clone",
            "Copy",
            "Debug",
            "Default",
            "Deref",
            "DerefMut",
            "Display",
            "Drop",
            "Error",
            "Eq",
            "Extend",
            "From",
            "FromStr",
            "Future",
            "IntoFuture",
            "IntoIterator",
            "Iterator",
            "Layer",
            "PartialEq",
            "Service",
        ];
        let (of, _) = self.head.rsplit_once(" for ").unwrap_or_default();
        // Past the parameters of the block.
        let of = match of.strip_prefix("impl<") {
            Some(_) => of.split_once("> ").map_or(of, |(_, of)| of),
            None => &of["impl ".len().min(of.len())..],
        };
        let name = of.split('<').next().unwrap_or(of);
        let name = name.rsplit("::").next().unwrap_or(name);
        types.contains(name) || OTHERS.contains(&name) || name == "StdError"
    }

    /// The head, and the lines of those parts of the body.
    fn block(&self, wanted: impl Fn(&Item<'_>) -> bool) -> Vec<String> {
        let (code, told) = self.body.unwrap_or_default();
        let is_list = ["struct ", "enum "]
            .iter()
            .any(|kind| self.head.contains(kind));
        let parts = separated(code, told, if is_list { b',' } else { b';' });
        let shown = parts
            .iter()
            .filter(|part| !part.is_hidden() && wanted(part));
        let inside: Vec<String> = shown.map(Self::member).collect();
        let is_frame = ["impl", "macro_rules!"]
            .iter()
            .any(|frame| self.head.starts_with(frame));
        if inside.is_empty() && is_frame {
            return inside;
        }
        let mut lines = vec![format!("{}{}", self.marks(), self.head)];
        lines.extend(inside.iter().map(|line| format!("    {line}")));
        if self.head.contains("struct ") && parts.len() > inside.len() {
            lines.push("    ..".into());
        }
        lines
    }

    fn member(&self) -> String {
        let fields = self.body.filter(|_| !self.head.contains("fn "));
        let fields = fields.map(|(_, told)| format!(" {{ {} }}", one_line(&fields_of(told))));
        format!(
            "{}{}{}",
            self.marks(),
            self.head,
            fields.unwrap_or_default()
        )
    }

    /// Those of its attributes that are part of the interface.
    fn marks(&self) -> String {
        let told = ["#[non_exhaustive]", "#[must_use", "#[cfg(", "#[derive("];
        let marks = self
            .attributes
            .iter()
            .filter(|mark| told.iter().any(|told| mark.starts_with(told)));
        let mark = |mark: &&str| match mark.split_once(" = ") {
            Some(("#[must_use", _)) => "#[must_use] ".to_owned(),
            _ => one_line(mark) + " ",
        };
        marks.map(mark).collect()
    }
}

/// The fields of a variant, without their attributes.
fn fields_of(told: &str) -> String {
    let fields = separated(told, told, b',')
        .into_iter()
        .map(|field| field.head);
    fields.collect::<Vec<_>>().join(", ")
}

#[test]
fn what_users_can_name_is_listed_with_its_signature() {
    let lib = r#"
        #[cfg(feature = "redis")]
        pub mod far;
        mod near;
        #[doc(hidden)]
        pub mod hooks;
        pub use near::{One, Kind};
    "#;
    let near = r#"
        /// A struct.
        #[derive(Clone)]
        #[must_use = "or else"]
        pub struct One<T> { pub a: HashMap<u8, T>, b: u8 }
        pub struct Two(u8);
        impl<T> One<T> {
            pub const MOST: usize = { 1 + 2 };
            pub fn get(mut self, a: &str) -> Option<T>
            where
                T: Clone, { let x = ";"; None }
            pub(crate) fn inner(&self) {}
            #[doc(hidden)]
            pub fn hidden(&self) {}
            setters!();
        }
        impl<T> Clone for One<T> { fn clone(&self) -> Self { todo() } }
        impl Private for Two {}
        trait Private {}
        #[non_exhaustive]
        pub enum Kind { A, B(u8), C { x: u8, y: Vec<u8> } }
        pub trait Open: Send { type Out; fn open(&self) -> Self::Out { x() } }
        macro_rules! setters { () => { pub fn set(self, a: u8) -> Self { self } }; }
        #[cfg(test)]
        mod tests { pub struct Three; }
    "#;
    let tree = |near: &str| {
        let files = [
            ("src/lib.rs", lib),
            ("src/near.rs", near),
            ("src/far.rs", "pub fn f() {}"),
        ];
        interface(&Tree::of(&[
            files[0],
            files[1],
            files[2],
            ("src/hooks.rs", "pub fn g() {}"),
        ]))
    };
    let text = tree(near);
    let expected = r#"# leasehold

## crate
#[cfg(feature = "redis")] pub mod far
pub use near::{One, Kind}

## crate::far
pub fn f()

## crate::near
#[derive(Clone)] #[must_use] pub struct One<T>
    pub a: HashMap<u8, T>
    ..
pub struct Two(_)
impl<T> One<T>
    pub const MOST: usize
    pub fn get(self, a: &str) -> Option<T> where T: Clone,
    setters!()
impl<T> Clone for One<T>
#[non_exhaustive] pub enum Kind
    A
    B(u8)
    C { x: u8, y: Vec<u8> }
pub trait Open: Send
    type Out
    fn open(&self) -> Self::Out
macro_rules! setters
    pub fn set(self, a: u8) -> Self
"#;
    let (found, _) = text.split_once("\n# leasehold-diesel").unwrap();
    assert_eq!(found.trim_end(), expected.trim_end());
    assert_ne!(tree(&near.replace("a: &str", "a: &[u8]")), text);
}
