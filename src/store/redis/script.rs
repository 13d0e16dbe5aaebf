//! The scripts, put together from their parts. By hand: the same bodies on a clock that a test drives.

use std::sync::LazyLock;

use super::link::Script;
use crate::fence::commands::LUA as COMMANDS;

/// One script per verb.
pub(super) struct Scripts {
    pub(super) enqueue: Script,
    pub(super) claim: Script,
    pub(super) renew: Script,
    pub(super) settle: Script,
    pub(super) complete: Script,
    pub(super) checkpoint: Script,
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

const NAMES: &str = include_str!("names.lua");
const BASE: &str = include_str!("base.lua");
const RECORD: &str = include_str!("record.lua");
const PLACE: &str = include_str!("place.lua");
const GRANT: &str = include_str!("grant.lua");
const ENDING: &str = include_str!("ending.lua");
const PLAIN: &str = include_str!("plain.lua");
const RUNS: &str = include_str!("runs.lua");

/// Takes more memory: refused on a full server.
const GROWS: &str = "#!lua\n";
/// What a holder or an operator needs to get out: runs on a full server, too.
const ALWAYS: &str = "#!lua flags=allow-oom\n";
const READS: &str = "#!lua flags=no-writes\n";

impl Scripts {
    fn new(clock: &str) -> Self {
        let script = |name, flags: &str, plain: &[&str], parts: &[&str], body: &str| {
            let (plain, parts) = (plain.concat(), parts.concat());
            let text = [flags, clock, NAMES, &plain, BASE, &parts, body].concat();
            Script::new(name, text)
        };
        let ends = &[RECORD, PLACE, GRANT, ENDING];
        let grants = &[RECORD, PLACE, GRANT];
        // In a block: a script can have 200 names at a time.
        let enqueue = &["do\n", PLAIN, include_str!("enqueue_plain.lua"), "end\n"];
        let settle = &[
            "do\n",
            PLAIN,
            RUNS,
            include_str!("settle_plain.lua"),
            "end\n",
        ];
        let claim = &[
            "do\n",
            PLAIN,
            RUNS,
            include_str!("claim_plain.lua"),
            "end\n",
        ];
        let renew = &[include_str!("renew_plain.lua")];
        let places = &[RECORD, PLACE];
        Self {
            enqueue: script(
                "enqueue",
                GROWS,
                enqueue,
                places,
                include_str!("enqueue.lua"),
            ),
            claim: script("claim", GROWS, claim, ends, include_str!("claim.lua")),
            renew: script("renew", ALWAYS, renew, ends, include_str!("renew.lua")),
            settle: script("settle", ALWAYS, settle, ends, include_str!("settle.lua")),
            // Grows: the commands may.
            complete: script(
                "complete",
                GROWS,
                &[],
                &[RECORD, PLACE, GRANT, ENDING, COMMANDS],
                include_str!("complete.lua"),
            ),
            checkpoint: script(
                "checkpoint",
                ALWAYS,
                &[],
                grants,
                include_str!("checkpoint.lua"),
            ),
            reap: script("reap", ALWAYS, &[], ends, include_str!("reap.lua")),
            control: script("control", ALWAYS, &[], grants, include_str!("control.lua")),
            inspect: script("inspect", READS, &[], grants, include_str!("inspect.lua")),
            parked: script("parked", READS, &[], places, include_str!("parked.lua")),
            prune: script("prune", ALWAYS, &[], places, include_str!("prune.lua")),
            wait: script("wait", ALWAYS, &[], &[], include_str!("wait.lua")),
            open: script("open", ALWAYS, &[], &[], include_str!("open.lua")),
            audit: script("audit", ALWAYS, &[], &[], include_str!("audit.lua")),
        }
    }
}
