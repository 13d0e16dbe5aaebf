//! The exceptions. The lists only shrink: remove an entry when its last finding is fixed.

use crate::tidy::Finding;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Exception {
    pub(crate) rule: &'static str,
    /// A file, or a folder that ends with `/`.
    pub(crate) path: &'static str,
    /// As in the finding; empty for all findings there.
    pub(crate) what: &'static str,
}

impl Exception {
    pub(crate) fn covers(&self, finding: &Finding) -> bool {
        let is_there = if self.path.ends_with('/') {
            finding.path.starts_with(self.path)
        } else {
            finding.path == self.path
        };
        is_there && (self.what.is_empty() || self.what == finding.what)
    }
}

/// Both lists.
pub(crate) fn exceptions() -> Vec<Exception> {
    let mut found = Vec::new();
    for (rule, places) in KNOWN.iter().chain(REBUILT_LATER) {
        for (path, whats) in *places {
            let whats = if whats.is_empty() { &[""] } else { *whats };
            found.extend(whats.iter().map(|what| Exception { rule, path, what }));
        }
    }
    found
}

/// By rule: the places, each with what is found there. An empty list stands for everything.
type List = &'static [(
    &'static str,
    &'static [(&'static str, &'static [&'static str])],
)];

/// What is still to be fixed.
const KNOWN: List = &[
    (
        "duplicate type",
        &[
            (
                "crates/leasehold-cli/src/dead.rs",
                &["Ls", "Purge", "Retry"],
            ),
            ("crates/leasehold-cli/src/demo_stage.rs", &["Snapshot"]),
            ("crates/leasehold-testing/src/stage.rs", &["Shared"]),
            ("crates/leasehold-web/src/dashboard/leases.rs", &["Row"]),
            ("src/fence/file.rs", &["Opened"]),
            ("src/fence/http.rs", &["Fenced"]),
        ],
    ),
    (
        "width",
        &[
            ("crates/leasehold-cli/src/bench.rs", &[]),
            ("crates/leasehold-testing/src/run.rs", &[]),
            ("fuzz/src/http.rs", &[]),
            ("src/fence/http.rs", &[]),
        ],
    ),
    (
        "import",
        &[
            ("src/fence/http.rs", &["fence -> context"]),
            ("src/fence/mod.rs", &["fence -> observe"]),
            ("src/fence/sqlite.rs", &["fence -> store"]),
            ("src/store/postgres/within.rs", &["store -> calls"]),
        ],
    ),
    (
        "word",
        &[
            ("benches/redis.rs", &["ride", "riders", "riding"]),
            ("crates/leasehold-cli/src/demo_stage.rs", &["heard"]),
            (
                "crates/leasehold-conformance/src/checker.rs",
                &["ride", "rider"],
            ),
            (
                "crates/leasehold-conformance/src/claim.rs",
                &["ride", "rider", "riders", "rides", "rode"],
            ),
            (
                "crates/leasehold-conformance/src/repeat.rs",
                &["riders", "riding"],
            ),
            ("crates/leasehold-conformance/src/resource.rs", &["rides"]),
            ("crates/leasehold-web/src/dashboard/workers.rs", &["heard"]),
            ("examples/embedding.rs", &["greetings"]),
            ("src/guide/mod.rs", &["lifecycle"]),
            ("src/store/sqlite/migrate.rs", &["nap"]),
            ("src/store/sqlite/turn.rs", &["nap", "naps"]),
            ("src/worker/mod.rs", &["rides"]),
            ("src/worker/pool.rs", &["heard"]),
            ("tests/differential/main.rs", &["seal"]),
            ("tests/differential/world.rs", &["ride"]),
            ("tests/fault/broken.rs", &["riders"]),
            ("tests/fault/crew.rs", &["nap"]),
            ("tests/fault/failover.rs", &["naps"]),
            ("tests/fault/freeze.rs", &["naps"]),
            ("tests/fault/kill.rs", &["naps"]),
            ("tests/fault/memory.rs", &["nap", "naps"]),
            ("tests/fault/partition.rs", &["heard"]),
            ("tests/fault/roles.rs", &["bell", "nap"]),
            ("tests/fault/stage.rs", &["nap", "naps"]),
            ("tests/fault/storm.rs", &["nap"]),
            ("tests/fence/redis.rs", &["rides"]),
            ("tests/fence/round_trips.rs", &["rides"]),
            ("tests/simulation/broken.rs", &["riders"]),
            ("tests/simulation/net.rs", &["nap"]),
            ("tests/simulation/plan.rs", &["bell"]),
            ("tests/stores/checker.rs", &["rode"]),
            ("tests/support/machine.rs", &["nap"]),
            ("tests/worker/edges.rs", &["heard"]),
            ("tests/worker/face.rs", &["greeting", "heard"]),
            ("tests/worker/runs.rs", &["bell"]),
        ],
    ),
];

/// The PostgreSQL and Redis stores are rebuilt later, and stay as they are until then.
const REBUILT_LATER: List = &[
    // Statements move to the files that use them.
    ("foreign statement", &[("src/store/postgres/", &[])]),
    // Types that several files declare get names of their own.
    (
        "duplicate type",
        &[("src/store/redis/", &["Share", "Shared"])],
    ),
    // Renamed together with the code they describe.
    (
        "word",
        &[
            (
                "src/store/postgres/",
                &[
                    "bell",
                    "bells",
                    "ear",
                    "fold",
                    "folded",
                    "folds",
                    "lifecycle",
                    "luck",
                    "nap",
                    "ride",
                    "rider",
                    "riders",
                    "riding",
                    "rode",
                    "seal",
                    "sealing",
                ],
            ),
            (
                "src/store/redis/",
                &[
                    "bell", "bells", "doubted", "doze", "ear", "greeting", "heard", "met", "ride",
                    "riders", "riding",
                ],
            ),
            (
                "tests/engines/postgres/",
                &["ride", "rider", "riders", "rides", "seal", "seals"],
            ),
            ("tests/engines/redis/", &["riders"]),
        ],
    ),
    // Rewrapped when their files are rewritten.
    (
        "width",
        &[
            ("src/store/postgres/", &[]),
            ("src/store/redis/", &[]),
            ("tests/engines/postgres/", &[]),
            ("tests/engines/redis/", &[]),
        ],
    ),
    // The rules move below the store, and URLs are parsed there.
    ("import", &[("src/store/redis/", &["store -> client"])]),
];
