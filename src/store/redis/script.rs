//! The scripts, put together from their parts. By hand: the same bodies on a clock that a test drives.

use std::sync::LazyLock;

use super::link::Script;
use crate::fence::commands::LUA as COMMANDS;
use crate::rules;
use crate::store::codec::flag;

/// One script per verb.
pub(super) struct Scripts {
    pub(super) enqueue: Script,
    pub(super) claim: Script,
    pub(super) renew: Script,
    pub(super) settle: Script,
    pub(super) complete: Script,
    pub(super) checkpoint: Script,
    pub(super) checkpoint_with: Script,
    pub(super) reap: Script,
    pub(super) control: Script,
    pub(super) inspect: Script,
    pub(super) parked: Script,
    pub(super) prune: Script,
    pub(super) wait: Script,
    pub(super) open: Script,
    pub(super) audit: Script,
}

pub(super) static SERVERS: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::new(include_str!("clock.lua")));
pub(super) static BY_HAND: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::new(include_str!("clock_by_hand.lua")));

const WORDS: &str = include_str!("words.lua");
const NAMES: &str = include_str!("names.lua");
const BASE: &str = include_str!("base.lua");
const RECORD: &str = include_str!("record.lua");
const PLACE: &str = include_str!("place.lua");
const GRANT: &str = include_str!("grant.lua");
const ENDS: &str = include_str!("ends.lua");
const ENDING: &str = include_str!("ending.lua");
const SEQ: &str = include_str!("seq.lua");

/// Takes more memory: refused on a full server.
const GROWS: &str = "#!lua\n";
/// What a holder or an operator needs to get out: runs on a full server, too.
const ALWAYS: &str = "#!lua flags=allow-oom\n";
const READS: &str = "#!lua flags=no-writes\n";

/// The numbers of the rules and the flags of a record, as far as a script names them. No script
/// defines one of its own.
fn numbers(script: &str) -> String {
    let flags = flag::ALL.map(|(name, bit)| (name, u64::from(bit)));
    let all = rules::constants().into_iter().chain(flags);
    let named = all.filter(|(name, _)| script.contains(name));
    let lines = named.map(|(name, number)| format!("local {name} = {number}\n"));
    lines.collect::<Vec<_>>().concat()
}

impl Scripts {
    fn new(clock: &str) -> Self {
        let script = |name, flags: &str, parts: &[&str], body: &str| {
            let text = [clock, WORDS, NAMES, BASE, &parts.concat(), body].concat();
            Script::new(name, [flags, &numbers(&text), &text].concat())
        };
        let ends = &[RECORD, PLACE, GRANT, ENDS, ENDING];
        let looks = &[RECORD, PLACE, GRANT, ENDS];
        let saves = &[RECORD, PLACE, GRANT, SEQ];
        let places = &[RECORD, PLACE];
        // Grow: the caller's commands may.
        let completes = &[&ends[..], &[COMMANDS]].concat();
        let saves_with = &[&saves[..], &[COMMANDS]].concat();
        Self {
            enqueue: script("enqueue", GROWS, places, include_str!("enqueue.lua")),
            claim: script("claim", GROWS, ends, include_str!("claim.lua")),
            renew: script("renew", ALWAYS, ends, include_str!("renew.lua")),
            settle: script("settle", ALWAYS, ends, include_str!("settle.lua")),
            complete: script("complete", GROWS, completes, include_str!("complete.lua")),
            checkpoint: script("checkpoint", ALWAYS, saves, include_str!("checkpoint.lua")),
            checkpoint_with: script(
                "checkpoint_with",
                GROWS,
                saves_with,
                include_str!("checkpoint_with.lua"),
            ),
            reap: script("reap", ALWAYS, ends, include_str!("reap.lua")),
            control: script("control", ALWAYS, looks, include_str!("control.lua")),
            inspect: script("inspect", READS, looks, include_str!("inspect.lua")),
            parked: script("parked", READS, places, include_str!("parked.lua")),
            prune: script("prune", ALWAYS, places, include_str!("prune.lua")),
            wait: script("wait", ALWAYS, &[], include_str!("wait.lua")),
            open: script("open", ALWAYS, &[], include_str!("open.lua")),
            audit: script("audit", ALWAYS, &[], include_str!("audit.lua")),
        }
    }
}
