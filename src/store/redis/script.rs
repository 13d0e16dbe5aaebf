//! The scripts, put together from their parts. By hand: the same bodies on a clock that a test drives.

use std::sync::LazyLock;

use super::link::Script;
use crate::fence::commands::LUA as COMMANDS;

/// One script per verb.
pub(super) struct Scripts {
    pub(super) enqueue: Verb,
    pub(super) enqueue_bulk: Script,
    pub(super) claim: Verb,
    pub(super) renew: Script,
    pub(super) settle: Verb,
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

/// The script of a verb, and the one that plain calls try first.
pub(super) struct Verb {
    pub(super) plain: Script,
    pub(super) full: Script,
}

pub(super) static SERVERS: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::new(include_str!("clock.lua")));
pub(super) static BY_HAND: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::new(include_str!("clock_by_hand.lua")));

const WORDS: &str = include_str!("words.lua");
const WAKE: &str = include_str!("wake.lua");
const NAMES: &str = include_str!("names.lua");
const BASE: &str = include_str!("base.lua");
const RECORD: &str = include_str!("record.lua");
const PLACE: &str = include_str!("place.lua");
const ROUND: &str = include_str!("round.lua");
const DEADLINE: &str = include_str!("deadline.lua");
const GRANT: &str = include_str!("grant.lua");
const ENDS: &str = include_str!("ends.lua");
const BASES: &str = include_str!("bases.lua");
const ENDING: &str = include_str!("ending.lua");
const PLAIN: &str = include_str!("plain.lua");
const RUNS: &str = include_str!("runs.lua");
const CUT: &str = include_str!("cut.lua");
const SEQ: &str = include_str!("seq.lua");

const RENEWS: &[&str] = &[
    ROUND,
    DEADLINE,
    include_str!("renew_plain.lua"),
    BASE,
    RECORD,
    PLACE,
    GRANT,
    ENDS,
    ENDING,
];

/// Takes more memory: refused on a full server.
const GROWS: &str = "#!lua\n";
/// What a holder or an operator needs to get out: runs on a full server, too.
const ALWAYS: &str = "#!lua flags=allow-oom\n";
const READS: &str = "#!lua flags=no-writes\n";

impl Scripts {
    fn new(clock: &str) -> Self {
        let made = |name, flags: &str, parts: &[&str], body: &str| {
            let text = [flags, clock, WORDS, &parts.concat(), body].concat();
            Script::new(name, text)
        };
        let script = |name, flags, parts: &[&str], body| {
            let parts = [&[WAKE, NAMES], parts].concat();
            made(name, flags, &parts, body)
        };
        let ends = &[BASE, RECORD, PLACE, ROUND, GRANT, ENDS, ENDING];
        let looks = &[BASE, RECORD, PLACE, ROUND, GRANT, ENDS, BASES];
        let places = &[BASE, RECORD, PLACE];
        let enqueue = Verb {
            plain: made(
                "enqueue_plain",
                GROWS,
                &[WAKE, PLAIN],
                include_str!("enqueue_plain.lua"),
            ),
            full: script("enqueue", GROWS, places, include_str!("enqueue.lua")),
        };
        // Both halves in one: the server knows both, or none.
        let enqueue_bulk = made(
            "enqueue_bulk",
            GROWS,
            &[include_str!("seal.lua"), WAKE, PLAIN],
            include_str!("enqueue_bulk.lua"),
        );
        let claim = Verb {
            plain: made(
                "claim_plain",
                GROWS,
                &[
                    PLAIN,
                    "local HELD, ENDS, RUNS, IDS = KEYS[3], KEYS[4], ARGV[6], 7\n",
                    ROUND,
                    DEADLINE,
                    RUNS,
                    CUT,
                ],
                include_str!("claim_plain.lua"),
            ),
            full: script(
                "claim",
                GROWS,
                &[BASE, RECORD, PLACE, ROUND, GRANT, ENDS, ENDING, CUT],
                include_str!("claim.lua"),
            ),
        };
        let settle = Verb {
            plain: made(
                "settle_plain",
                ALWAYS,
                &[
                    PLAIN,
                    "local HELD, ENDS, RUNS, IDS = KEYS[3], KEYS[4], ARGV[2], 3\n",
                    ROUND,
                    DEADLINE,
                    RUNS,
                ],
                include_str!("settle_plain.lua"),
            ),
            full: script("settle", ALWAYS, ends, include_str!("settle.lua")),
        };
        Self {
            enqueue,
            enqueue_bulk,
            claim,
            settle,
            renew: script("renew", ALWAYS, RENEWS, include_str!("renew.lua")),
            // Grows: the commands may.
            complete: script(
                "complete",
                GROWS,
                &[BASE, RECORD, PLACE, ROUND, GRANT, ENDS, ENDING, COMMANDS],
                include_str!("complete.lua"),
            ),
            checkpoint: script(
                "checkpoint",
                ALWAYS,
                &[BASE, RECORD, PLACE, ROUND, GRANT, SEQ],
                include_str!("checkpoint.lua"),
            ),
            checkpoint_with: script(
                "checkpoint_with",
                GROWS,
                &[BASE, RECORD, PLACE, ROUND, GRANT, SEQ, COMMANDS],
                include_str!("checkpoint_with.lua"),
            ),
            reap: script("reap", ALWAYS, ends, include_str!("reap.lua")),
            control: script("control", ALWAYS, looks, include_str!("control.lua")),
            inspect: script("inspect", READS, looks, include_str!("inspect.lua")),
            parked: script("parked", READS, places, include_str!("parked.lua")),
            prune: script("prune", ALWAYS, places, include_str!("prune.lua")),
            wait: script("wait", ALWAYS, &[BASE], include_str!("wait.lua")),
            open: script("open", ALWAYS, &[BASE], include_str!("open.lua")),
            audit: script("audit", ALWAYS, &[BASE], include_str!("audit.lua")),
        }
    }
}
