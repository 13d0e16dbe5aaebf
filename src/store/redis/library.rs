//! The function library, put together from its parts. By hand: the same bodies on a clock that a
//! test drives.
//!
//! A library bears the hash of its text in its name and in those of its functions, so that two
//! versions of this crate live side by side on one server, and nobody has to know which was first.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::STATUS;
use super::inspect::{ENDINGS, LEDGER, LOSSES};
use super::link::{Function, Library};
use crate::clock::micros;
use crate::fence::commands::LUA as COMMANDS;
use crate::job::{JobOptions, JobRecord};
use crate::rules;
use crate::store::codec::{self, flag};

/// One function per verb.
pub(super) struct Functions {
    pub(super) enqueue: Function,
    pub(super) claim: Function,
    pub(super) renew: Function,
    pub(super) settle: Function,
    pub(super) complete: Function,
    pub(super) checkpoint: Function,
    pub(super) checkpoint_with: Function,
    pub(super) reap: Function,
    pub(super) control: Function,
    pub(super) inspect: Function,
    pub(super) parked: Function,
    pub(super) prune: Function,
    pub(super) wait: Function,
    pub(super) open: Function,
    pub(super) audit: Function,
    pub(super) rights: Function,
    #[cfg(feature = "doctor")]
    pub(super) census: Function,
    #[cfg(feature = "doctor")]
    pub(super) leases: Function,
    #[cfg(feature = "doctor")]
    pub(super) mend: Function,
    #[cfg(feature = "doctor")]
    pub(super) orphans: Function,
    #[cfg(feature = "doctor")]
    pub(super) recount: Function,
}

pub(super) static SERVERS: LazyLock<Functions> =
    LazyLock::new(|| Functions::new(include_str!("clock.lua")));
pub(super) static BY_HAND: LazyLock<Functions> =
    LazyLock::new(|| Functions::new(include_str!("clock_by_hand.lua")));

/// What the verbs share, in this order: a part can use those before it.
const SHARED: [&str; 8] = [
    include_str!("base.lua"),
    include_str!("wake.lua"),
    include_str!("record.lua"),
    include_str!("place.lua"),
    include_str!("grant.lua"),
    include_str!("ending.lua"),
    COMMANDS,
    include_str!("library.lua"),
];
/// Each in a block of its own.
const VERBS: [&str; 15] = [
    include_str!("enqueue.lua"),
    include_str!("claim.lua"),
    include_str!("renew.lua"),
    include_str!("settle.lua"),
    include_str!("checkpoint.lua"),
    include_str!("reap.lua"),
    include_str!("control.lua"),
    include_str!("inspect.lua"),
    include_str!("parked.lua"),
    include_str!("prune.lua"),
    include_str!("wait.lua"),
    include_str!("open.lua"),
    include_str!("audit.lua"),
    include_str!("rights.lua"),
    include_str!("mend.lua"),
];

/// The numbers of the rules, the places and flags of a record, what a call can come to: no Lua file
/// defines one of them.
fn numbers() -> HashMap<&'static str, u64> {
    let flags = flag::ALL.map(|(name, bit)| (name, u64::from(bit)));
    let statuses = STATUS.map(|(name, status)| (name, u64::from(status)));
    let own = [
        ("SLEEP", micros(super::wait::SLEEP)),
        ("USUAL_PRIORITY", JobOptions::DEFAULT_PRIORITY.into()),
        ("LAYOUT", super::queue::LAYOUT.into()),
        ("LINES", super::keys::LINES as u64),
        ("SUSPECT", JobRecord::SUSPECT.into()),
    ];
    let all = rules::constants().into_iter().chain(flags).chain(statuses);
    all.chain(own).chain(codec::PLACES).collect()
}

/// The text with the numbers in the place of their names: a function can have 200 names of its own,
/// and the library is one.
fn with_numbers(text: &str) -> String {
    let numbers = numbers();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(from) = rest.find(is_word) {
        let word = &rest[from..];
        let end = word.find(|c| !is_word(c)).unwrap_or(word.len());
        out.push_str(&rest[..from]);
        match numbers.get(&word[..end]) {
            Some(number) => out.push_str(&number.to_string()),
            None => out.push_str(&word[..end]),
        }
        rest = &word[end..];
    }
    out + rest
}

/// The names of counters.
fn lists() -> String {
    let list = |name: &str, fields: &[&str]| {
        let quoted: Vec<_> = fields.iter().map(|field| format!("'{field}'")).collect();
        format!("local {name} = {{ {} }}\n", quoted.join(", "))
    };
    let lists = [
        list("ENDINGS", &LEDGER[ENDINGS]),
        list("LEDGER", &LEDGER),
        list("LOST_COUNTS", &LEDGER[LEDGER.len() - LOSSES..]),
    ];
    lists.concat()
}

impl Functions {
    fn new(clock: &str) -> Self {
        let verbs = VERBS.map(|verb| format!("do\n{verb}end\n"));
        let shared = [include_str!("words.lua"), clock, &SHARED.concat()].concat();
        let parts = [shared, verbs.concat()].concat();
        let library = Library::new("leasehold", &(lists() + &with_numbers(&parts)));
        let function = |verb| library.function(verb);
        Self {
            enqueue: function("enqueue"),
            claim: function("claim"),
            renew: function("renew"),
            settle: function("settle"),
            complete: function("complete"),
            checkpoint: function("checkpoint"),
            checkpoint_with: function("checkpoint_with"),
            reap: function("reap"),
            control: function("control"),
            inspect: function("inspect"),
            parked: function("parked"),
            prune: function("prune"),
            wait: function("wait"),
            open: function("open"),
            audit: function("audit"),
            rights: function("rights"),
            #[cfg(feature = "doctor")]
            census: function("census"),
            #[cfg(feature = "doctor")]
            leases: function("leases"),
            #[cfg(feature = "doctor")]
            mend: function("mend"),
            #[cfg(feature = "doctor")]
            orphans: function("orphans"),
            #[cfg(feature = "doctor")]
            recount: function("recount"),
        }
    }
}
