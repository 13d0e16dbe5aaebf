//! The scripts, put together from their parts. By hand: the same bodies on a clock that a test drives.

use std::sync::LazyLock;

use super::link::Script;

/// One script per verb.
pub(super) struct Scripts {
    pub(super) enqueue: Script,
    pub(super) claim: Script,
    pub(super) renew: Script,
    pub(super) settle: Script,
    pub(super) checkpoint: Script,
    pub(super) reap: Script,
    pub(super) control: Script,
    pub(super) inspect: Script,
    pub(super) prune: Script,
    pub(super) wait: Script,
    pub(super) open: Script,
    pub(super) audit: Script,
}

pub(super) static SERVERS: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::new(include_str!("clock.lua")));
pub(super) static BY_HAND: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::new(include_str!("clock_by_hand.lua")));

const BASE: &str = include_str!("base.lua");
const RECORD: &str = include_str!("record.lua");
const PLACE: &str = include_str!("place.lua");
const GRANT: &str = include_str!("grant.lua");
const ENDING: &str = include_str!("ending.lua");

/// Takes more memory: refused on a full server.
const GROWS: &str = "#!lua\n";
/// What a holder or an operator needs to get out: runs on a full server, too.
const ALWAYS: &str = "#!lua flags=allow-oom\n";
const READS: &str = "#!lua flags=no-writes\n";

impl Scripts {
    fn new(clock: &str) -> Self {
        let script = |name, flags: &str, parts: &[&str], body: &str| {
            let text = [flags, clock, BASE, &parts.concat(), body].concat();
            Script::new(name, text)
        };
        let ends = &[RECORD, PLACE, GRANT, ENDING];
        let grants = &[RECORD, PLACE, GRANT];
        Self {
            enqueue: script(
                "enqueue",
                GROWS,
                &[RECORD, PLACE],
                include_str!("enqueue.lua"),
            ),
            claim: script("claim", GROWS, ends, include_str!("claim.lua")),
            renew: script("renew", ALWAYS, ends, include_str!("renew.lua")),
            settle: script("settle", ALWAYS, ends, include_str!("settle.lua")),
            checkpoint: script("checkpoint", ALWAYS, grants, include_str!("checkpoint.lua")),
            reap: script("reap", ALWAYS, ends, include_str!("reap.lua")),
            control: script("control", ALWAYS, grants, include_str!("control.lua")),
            inspect: script("inspect", READS, grants, include_str!("inspect.lua")),
            prune: script("prune", ALWAYS, &[RECORD, PLACE], include_str!("prune.lua")),
            wait: script("wait", ALWAYS, &[], include_str!("wait.lua")),
            open: script("open", ALWAYS, &[], include_str!("open.lua")),
            audit: script("audit", ALWAYS, &[], include_str!("audit.lua")),
        }
    }
}
