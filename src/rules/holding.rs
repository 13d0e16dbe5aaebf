//! What a holding is on, what conflicts with what, and until when it lives.
//!
//! A store finds the holdings and tickets that may conflict with an ask, by whatever index it has,
//! and asks these functions. Nothing here does I/O or asks the time.
//!
//! # How scopes can be stored
//!
//! Every scope has a [`ScopeKind`] and a [`key`](Scope::key); a range has [offsets](Scope::offsets)
//! besides. Two scopes of one kind have the same key exactly if they are the same name or path, or
//! ranges of the same resource. Nothing is escaped or cut, so no two texts can collide. Keys must
//! be compared byte by byte (`BINARY` in SQLite, `"C"` or `bytea` in PostgreSQL).
//!
//! The key of a path is its text, and that of the root is empty. So its ancestors are
//! [some of its prefixes](Scope::ancestors), one look-up each, and its descendants are the keys in
//! [one interval](Scope::below): the first key at or after its start tells whether there are any.
//!
//! Ranges that are held exclusively are disjoint: one that overlaps an ask is the last to start
//! before its end. Shared and waiting ones may lie in each other: they are found by
//! [class](Scope::class), that is by length, and [start](Scope::starts).

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::order;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::limits::{self, at_most, without_zero};
use crate::token::FencingToken;

pub use crate::names::FamilyName;

/// What is held, within its family: a name, a path, or a range of a resource.
///
/// Its [text](fmt::Display) is `name:customer-42`, `path:/a/b` or `range:0..4096:inode-7`. Two
/// scopes are equal exactly if their texts are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Scope {
    kind: ScopeKind,
    key: Arc<str>,
    /// Of a range; empty for the others.
    offsets: (u64, u64),
}

/// The kinds of scopes. Scopes of different kinds never conflict.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScopeKind {
    /// A name: conflicts with the same name.
    Name,
    /// A path: conflicts with itself, its ancestors and its descendants.
    Path,
    /// A range of a resource: conflicts with the ranges of the resource that overlap it.
    Range,
}

impl ScopeKind {
    /// One word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Path => "path",
            Self::Range => "range",
        }
    }
}

impl Scope {
    /// A name: any text of 1 to 256 bytes, without a zero byte.
    ///
    /// # Errors
    /// `InvalidInput` for the field `name`.
    pub fn name(name: &str) -> Result<Self> {
        check_text("name", name)?;
        Ok(Self {
            kind: ScopeKind::Name,
            key: name.into(),
            offsets: (0, 0),
        })
    }

    /// A path: `/` and up to 32 components with a slash between them, at most 256 bytes.
    ///
    /// A path that could be written in another way is refused, not repaired: one without a leading
    /// slash, with a trailing one, with an empty component, or with `.` or `..` for one.
    ///
    /// # Errors
    /// `InvalidInput` for the field `path`.
    pub fn path(path: &str) -> Result<Self> {
        check_text("path", path)?;
        let refused = |found: String, limit: &str| Err(Error::invalid("path", found, limit));
        let Some(rest) = path.strip_prefix('/') else {
            return refused("no leading slash".into(), "a path from the root");
        };
        if rest.is_empty() {
            return Ok(Self::root());
        }
        let mut components = 0;
        for component in rest.split('/') {
            components += 1;
            if matches!(component, "" | "." | "..") {
                let found = format!("{component:?} as component {components}");
                return refused(found, "components other than \"\", \".\" and \"..\"");
            }
        }
        at_most("path", components, limits::PATH_COMPONENTS, "components")?;
        Ok(Self {
            kind: ScopeKind::Path,
            key: path.into(),
            offsets: (0, 0),
        })
    }

    /// The path `/`, above all others.
    pub fn root() -> Self {
        Self {
            kind: ScopeKind::Path,
            key: "".into(),
            offsets: (0, 0),
        }
    }

    /// A half-open range of a resource. The resource is any text of 1 to 256 bytes, without a zero
    /// byte; offsets go up to 2^53.
    ///
    /// # Errors
    /// `InvalidInput` for the field `resource` or `range`.
    pub fn range(resource: &str, offsets: Range<u64>) -> Result<Self> {
        check_text("resource", resource)?;
        let Range { start, end } = offsets;
        if start >= end {
            let found = format!("{start}..{end}");
            return Err(Error::invalid("range", found, "a start before the end"));
        }
        if end > limits::OFFSET_MAX {
            let limit = format!("offsets up to {}", limits::OFFSET_MAX);
            return Err(Error::invalid("range", format!("{start}..{end}"), limit));
        }
        Ok(Self {
            kind: ScopeKind::Range,
            key: resource.into(),
            offsets: (start, end),
        })
    }

    /// All of a resource: the range from 0 to 2^53.
    ///
    /// # Errors
    /// `InvalidInput` for the field `resource`.
    pub fn whole(resource: &str) -> Result<Self> {
        Self::range(resource, 0..limits::OFFSET_MAX)
    }

    /// What kind of scope it is.
    pub fn kind(&self) -> ScopeKind {
        self.kind
    }

    /// The name, the path (empty for the root), or the resource: what a store looks up.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The offsets of a range; `0..0` for the others.
    pub fn offsets(&self) -> Range<u64> {
        self.offsets.0..self.offsets.1
    }

    /// The keys of a path's ancestors, from its parent to the root. None for the other kinds.
    pub fn ancestors(&self) -> impl Iterator<Item = &str> {
        let key = if self.kind == ScopeKind::Path {
            self.key()
        } else {
            ""
        };
        let slashes = key.rmatch_indices('/');
        slashes.map(move |(at, _)| &key[..at])
    }

    /// The interval of keys, by bytes, in which a path's descendants are and no other path is.
    /// Nothing for the other kinds.
    pub fn below(&self) -> Option<Range<String>> {
        // The byte after a slash is a zero.
        let below = || format!("{}/", self.key)..format!("{}0", self.key);
        (self.kind == ScopeKind::Path).then(below)
    }

    /// The class of a range: the position of the highest bit of its length, 0 to 53. 0 for the
    /// other kinds.
    pub fn class(&self) -> u32 {
        (self.offsets.1 - self.offsets.0).max(1).ilog2()
    }

    /// Where the ranges of a class start that may overlap this one. A store that keeps them by
    /// (resource, class, start) finds those that do in one interval for each class that is there;
    /// of disjoint ones it looks at two at most that do not.
    pub fn starts(&self, class: u32) -> Range<u64> {
        let longest = (2 << class) - 1;
        (self.offsets.0 + 1).saturating_sub(longest)..self.offsets.1
    }

    /// Whether the two have something in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self) || {
            let (a, b) = (self.offsets(), other.offsets());
            self.kind == other.kind && self.key == other.key && a.start < b.end && b.start < a.end
        }
    }

    /// Whether the other is all within this one: the same name, a path at or below, a part of the
    /// range.
    pub fn covers(&self, part: &Self) -> bool {
        let same = self.key == part.key;
        self.kind == part.kind
            && match self.kind {
                ScopeKind::Name => same,
                ScopeKind::Path => same || part.ancestors().any(|key| key == self.key()),
                ScopeKind::Range => {
                    let (own, part) = (self.offsets(), part.offsets());
                    same && own.start <= part.start && part.end <= own.end
                }
            }
    }

    /// The partition of the family that issues its tokens: names by their hash, ranges by their
    /// resource's, paths all the first. The hash is FNV-1a with 64 bits.
    pub fn partition(&self, partitions: u16) -> u16 {
        if self.kind == ScopeKind::Path || partitions < 2 {
            return 0;
        }
        let hash = self.key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        (hash % u64::from(partitions)) as u16
    }
}

fn check_text(field: &'static str, text: &str) -> Result<()> {
    if !(1..=limits::SCOPE_BYTES).contains(&text.len()) {
        let limit = format!("1 to {} bytes", limits::SCOPE_BYTES);
        return Err(Error::invalid(
            field,
            format!("{} bytes", text.len()),
            limit,
        ));
    }
    without_zero(field, text)
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = self.offsets;
        match self.kind {
            ScopeKind::Name => write!(f, "name:{}", self.key),
            ScopeKind::Path if self.key.is_empty() => f.write_str("path:/"),
            ScopeKind::Path => write!(f, "path:{}", self.key),
            ScopeKind::Range => write!(f, "range:{start}..{end}:{}", self.key),
        }
    }
}

impl FromStr for Scope {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let scope = match text.split_once(':') {
            Some(("name", name)) => Self::name(name)?,
            Some(("path", path)) => Self::path(path)?,
            Some(("range", rest)) => ranged(rest)?,
            _ => return Err(malformed(text)),
        };
        // One scope has one text: leading zeros and signs are not its own.
        if scope.to_string() != text {
            return Err(malformed(text));
        }
        Ok(scope)
    }
}

fn ranged(text: &str) -> Result<Scope> {
    let parts = text.split_once(':');
    let numbers = parts.and_then(|(numbers, _)| numbers.split_once(".."));
    let (Some((_, resource)), Some((start, end))) = (parts, numbers) else {
        return Err(malformed(text));
    };
    let number = |text: &str| text.parse().map_err(|_| malformed(text));
    Scope::range(resource, number(start)?..number(end)?)
}

fn malformed(text: &str) -> Error {
    let found = format!("{} bytes of text", text.len());
    Error::invalid("scope", found, "name:…, path:/… or range:start..end:…")
}

impl TryFrom<String> for Scope {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Scope> for String {
    fn from(scope: Scope) -> Self {
        scope.to_string()
    }
}

/// How a scope is held, and what else can be held beside it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Beside anything but exclusive.
    Shared,
    /// So many of the units that the family gives each name. Of names only.
    Units(u32),
}

impl Mode {
    /// How many units it takes.
    pub const fn units(self) -> u64 {
        match self {
            Self::Units(units) => units as u64,
            Self::Exclusive | Self::Shared => 0,
        }
    }

    /// Whether two holdings of one scope exclude each other whatever else is held. Units are
    /// counted instead: [`free_units`].
    pub const fn excludes(self, other: Self) -> bool {
        matches!(self, Self::Exclusive) || matches!(other, Self::Exclusive)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => f.write_str("exclusive"),
            Self::Shared => f.write_str("shared"),
            Self::Units(units) => write!(f, "{units} units"),
        }
    }
}

/// Whether any two of the scopes overlap.
pub fn overlap(a: &[Scope], b: &[Scope]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.overlaps(b)))
}

/// Whether a holding stands in the way of an ask, units apart.
pub fn conflict(held: (&[Scope], Mode), asked: (&[Scope], Mode)) -> bool {
    held.1.excludes(asked.1) && overlap(held.0, asked.0)
}

/// Whether an earlier ticket stands in the way of an ask. Tickets for units of one name do, however
/// many are free: else a small ask would overtake a large one.
pub fn ticket_conflict(earlier: (&[Scope], Mode), asked: (&[Scope], Mode)) -> bool {
    let both_units = earlier.1.units() > 0 && asked.1.units() > 0;
    (both_units || earlier.1.excludes(asked.1)) && overlap(earlier.0, asked.0)
}

/// The units of a name that can be had: those that the family gives, less what is used up and what
/// is held. None if the family's number was lowered below that.
pub fn free_units(of: u32, committed: u64, held: u64) -> u64 {
    u64::from(of).saturating_sub(committed).saturating_sub(held)
}

/// Checks the scopes and the mode of one ask.
///
/// # Errors
/// `InvalidInput` for the field `scopes` or `units`.
pub fn check_ask(scopes: &[Scope], mode: Mode) -> Result<()> {
    if scopes.is_empty() {
        return Err(Error::invalid("scopes", "none", "at least 1 in an ask"));
    }
    at_most("scopes", scopes.len(), limits::ASK_SCOPES, "in an ask")?;
    for (at, scope) in scopes.iter().enumerate() {
        if overlap(&scopes[..at], std::slice::from_ref(scope)) {
            let found = format!("scope {} overlaps an earlier one", at + 1);
            return Err(Error::invalid("scopes", found, "scopes without overlap"));
        }
    }
    if let Mode::Units(units) = mode {
        if units == 0 {
            return Err(Error::invalid("units", 0, "at least 1"));
        }
        if let Some(scope) = scopes.iter().find(|scope| scope.kind() != ScopeKind::Name) {
            let found = format!("units of a {}", scope.kind().as_str());
            return Err(Error::invalid("units", found, "units of names"));
        }
    }
    Ok(())
}

/// The deadline that a renewal at `now` gives: a term from now, cut by the maximum lifetime and by
/// the grace of a recall. It is never earlier than the one that the holder already has.
pub fn renewed(
    deadline: Timestamp,
    now: Timestamp,
    term: Duration,
    (granted_at, max_lifetime): (Timestamp, Duration),
    recalled_until: Option<Timestamp>,
) -> Timestamp {
    let next = order::deadline(now, term, granted_at, max_lifetime);
    let next = recalled_until.map_or(next, |until| next.min(until));
    next.max(deadline)
}

/// The last moment at which a holding can still be live, however it is renewed.
pub fn latest(
    deadline: Timestamp,
    (granted_at, max_lifetime): (Timestamp, Duration),
    recalled_until: Option<Timestamp>,
) -> Timestamp {
    let end = granted_at.after(max_lifetime);
    let end = recalled_until.map_or(end, |until| end.min(until));
    end.max(deadline)
}

/// Whether state may be saved over what is there: it never goes back in (token, sequence).
pub fn may_save(saved: Option<(FencingToken, u64)>, token: FencingToken, seq: u64) -> bool {
    saved.is_none_or(|saved| saved <= (token, seq))
}

/// Whether a scope without holding or ticket can be forgotten: its retention is over, and its last
/// token is behind the clock, so that the next one is larger though nobody remembers. Units that
/// are used up are never forgotten: they would be free again.
pub fn is_forgotten(
    used_at: Timestamp,
    has_state: bool,
    committed: u64,
    last: FencingToken,
    now: Timestamp,
) -> bool {
    let retention = if has_state {
        limits::STATE_RETENTION
    } else {
        limits::SCOPE_RETENTION
    };
    committed == 0 && used_at.after(retention) <= now && last.get() < now.as_micros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::ops::Bound;

    fn path(text: &str) -> Scope {
        Scope::path(text).unwrap()
    }

    /// All paths of up to three components, out of texts that tempt a careless encoding.
    fn paths() -> Vec<Scope> {
        let parts = [
            "a", "a.", "a0", "a-b", "b", "0", " ", "...", "{a}", "é", ":",
        ];
        let mut texts = vec![String::new()];
        let mut all = vec![Scope::root()];
        for _ in 0..3 {
            let longer = texts
                .iter()
                .flat_map(|text| parts.map(|part| format!("{text}/{part}")));
            texts = longer.collect();
            all.extend(texts.iter().map(|text| path(text)));
        }
        all
    }

    #[test]
    fn keys_of_paths_tell_ancestors_and_descendants() {
        let all = paths();
        let keys: BTreeSet<&str> = all.iter().map(Scope::key).collect();
        assert_eq!(keys.len(), all.len(), "no two paths share a key");
        let components = |scope: &Scope| -> Vec<String> {
            scope.key().split('/').skip(1).map(str::to_owned).collect()
        };
        for a in all.iter().step_by(7).chain(&all[..30]) {
            let below = a.below().unwrap();
            let interval = (Bound::Included(&*below.start), Bound::Excluded(&*below.end));
            let probed: Vec<&str> = keys.range::<str, _>(interval).copied().collect();
            let own = components(a);
            let expected = all.iter().filter(|b| {
                let other = components(b);
                other.len() > own.len() && other.starts_with(&own)
            });
            let mut expected: Vec<&str> = expected.map(Scope::key).collect();
            expected.sort_unstable();
            assert_eq!(probed, expected, "below {a}");
            let ancestors: Vec<&str> = a.ancestors().collect();
            assert_eq!(ancestors.len(), own.len());
            for b in &all {
                let is_above = ancestors.contains(&b.key());
                assert_eq!(is_above, b.covers(a) && a != b, "{b} above {a}");
                let related = is_above || a == b || probed.contains(&b.key());
                assert_eq!(a.overlaps(b), related, "{a} {b}");
            }
        }
    }

    #[test]
    fn ranges_overlap_by_halves() {
        let range = |start, end| Scope::range("r", start..end).unwrap();
        for (a, b, overlaps, covers) in [
            ((0, 5), (5, 9), false, false),
            ((0, 5), (4, 9), true, false),
            ((0, 9), (3, 4), true, true),
            ((0, 9), (0, 9), true, true),
            ((3, 4), (0, 9), true, false),
            ((3, 4), (0, 3), false, false),
        ] {
            let (a, b) = (range(a.0, a.1), range(b.0, b.1));
            assert_eq!(a.overlaps(&b), overlaps, "{a} {b}");
            assert_eq!(b.overlaps(&a), overlaps, "{b} {a}");
            assert_eq!(a.covers(&b), covers, "{a} {b}");
        }
        assert!(
            Scope::whole("r")
                .unwrap()
                .covers(&range(7, limits::OFFSET_MAX))
        );
        assert!(!Scope::whole("s").unwrap().overlaps(&range(7, 8)));
    }

    #[test]
    fn overlapping_ranges_start_in_one_interval_of_their_class() {
        let ranges = (0..24).flat_map(|start| (start + 1..=24).map(move |end| (start, end)));
        let ranges = ranges.map(|(start, end)| Scope::range("r", start..end).unwrap());
        let ranges: Vec<Scope> = ranges.collect();
        for a in &ranges {
            for b in &ranges {
                let starts = a.starts(b.class());
                let found = starts.contains(&b.offsets().start);
                assert!(found || !a.overlaps(b), "{a} {b}");
                // A near miss ends before, and by less than the longest of its class.
                if found && !a.overlaps(b) {
                    assert!(b.offsets().end <= a.offsets().start, "{a} {b}");
                    assert!(
                        a.offsets().start - b.offsets().end < 1 << b.class(),
                        "{a} {b}"
                    );
                }
            }
        }
        let whole = Scope::whole("r").unwrap();
        assert_eq!((whole.class(), ranges[0].class()), (53, 0));
        assert_eq!(ranges[0].starts(53), 0..1);
    }

    #[test]
    fn scopes_of_different_kinds_never_conflict_and_each_text_is_read_back() {
        let texts = ["/", "/a", "a", "0..1:a", "path:/a", "{a}"];
        let mut scopes = paths();
        scopes.truncate(40);
        for text in texts {
            scopes.push(Scope::name(text).unwrap());
            scopes.push(Scope::range(text, 0..1).unwrap());
            scopes.push(Scope::whole(text).unwrap());
        }
        let written: BTreeSet<String> = scopes.iter().map(ToString::to_string).collect();
        assert_eq!(written.len(), scopes.len());
        for a in &scopes {
            assert_eq!(&a.to_string().parse::<Scope>().unwrap(), a);
            for b in scopes.iter().filter(|b| b.kind() != a.kind()) {
                assert!(!a.overlaps(b), "{a} {b}");
            }
        }
        for text in [
            "",
            "name",
            "name:",
            "range:0..01:a",
            "range:+0..1:a",
            "path:a",
            "x:y",
        ] {
            let error = text.parse::<Scope>().unwrap_err();
            assert!(error.field().is_some(), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_no_scope_is_refused_and_not_repaired() {
        let field = |scope: Result<Scope>| scope.unwrap_err().field().unwrap();
        let long = "x".repeat(limits::SCOPE_BYTES + 1);
        for bad in ["", "a\0b", &long] {
            assert_eq!(field(Scope::name(bad)), "name");
            assert_eq!(field(Scope::whole(bad)), "resource");
            assert_eq!(field(Scope::path(bad)), "path");
        }
        let deep = "/a".repeat(limits::PATH_COMPONENTS + 1);
        for bad in [
            "a", "a/b", "//", "/a/", "/a//b", "/.", "/a/..", "/a/./b", &deep,
        ] {
            assert_eq!(field(Scope::path(bad)), "path", "{bad}");
        }
        assert!(Scope::path(&deep[2..]).is_ok());
        assert!(Scope::name(&long[1..]).is_ok());
        for (start, end) in [(0, 0), (5, 4), (0, limits::OFFSET_MAX + 1)] {
            assert_eq!(field(Scope::range("r", start..end)), "range");
        }
    }

    #[test]
    fn asks_are_checked() {
        let field = |scopes: &[Scope], mode| check_ask(scopes, mode).unwrap_err().field().unwrap();
        let name = |text: &str| Scope::name(text).unwrap();
        assert_eq!(field(&[], Mode::Shared), "scopes");
        let many: Vec<Scope> = (0..17).map(|n| name(&n.to_string())).collect();
        assert_eq!(field(&many, Mode::Shared), "scopes");
        assert!(check_ask(&many[..16], Mode::Units(u32::MAX)).is_ok());
        assert_eq!(field(&[path("/a"), path("/a/b")], Mode::Shared), "scopes");
        assert_eq!(field(&[name("a"), name("a")], Mode::Units(1)), "scopes");
        assert_eq!(field(&[name("a")], Mode::Units(0)), "units");
        assert_eq!(field(&[name("a"), path("/a")], Mode::Units(1)), "units");
    }

    #[test]
    fn a_recall_is_never_passed_and_takes_nothing_that_was_given() {
        let (at, second) = (Timestamp::from_micros, Duration::from_secs(1));
        let age = (at(0), 100 * second);
        let renew = |deadline, now, until| {
            renewed(at(deadline), at(now), 10 * second, age, until).as_micros()
        };
        assert_eq!(renew(10_000_000, 5_000_000, None), 15_000_000);
        assert_eq!(renew(99_000_000, 95_000_000, None), 100_000_000);
        assert_eq!(
            renew(10_000_000, 5_000_000, Some(at(12_000_000))),
            12_000_000
        );
        assert_eq!(
            renew(10_000_000, 5_000_000, Some(at(7_000_000))),
            10_000_000
        );
        let ends = |until| latest(at(10_000_000), age, until).as_micros();
        assert_eq!(ends(None), 100_000_000);
        assert_eq!(ends(Some(at(7_000_000))), 10_000_000);
        assert_eq!(ends(Some(at(12_000_000))), 12_000_000);
    }

    #[test]
    fn state_goes_forward_and_used_up_units_are_remembered() {
        let token = FencingToken::new;
        assert!(may_save(None, token(1), 0));
        assert!(may_save(Some((token(1), 5)), token(1), 5));
        assert!(may_save(Some((token(1), 5)), token(2), 0));
        assert!(!may_save(Some((token(1), 5)), token(1), 4));
        assert!(!may_save(Some((token(2), 0)), token(1), 9));
        let (day, late) = (
            Timestamp::ZERO.after(limits::SCOPE_RETENTION),
            token(u64::MAX),
        );
        let used = Timestamp::ZERO;
        assert!(is_forgotten(used, false, 0, token(1), day));
        assert!(!is_forgotten(
            used,
            false,
            0,
            token(1),
            day.before(Duration::from_micros(1))
        ));
        assert!(!is_forgotten(used, true, 0, token(1), day));
        assert!(!is_forgotten(used, false, 1, token(1), day));
        assert!(!is_forgotten(used, false, 0, late, day));
    }
}
