//! The table of the campaign: one line per named fault.
//!
//! A case reports what it has counted, and asserts on it there. Each line is shown when its case
//! ends, and all of them together when the last has: `CASES` is what the campaign promises to do.

use std::sync::Mutex;
use std::time::Duration;

use crate::in_campaign;
use crate::world::figures;

/// What came of one fault.
#[derive(Clone, Default)]
pub(crate) struct Row {
    /// Calls whose effect was promised: jobs that were enqueued, or updates that were stored.
    pub(crate) acknowledged: u64,
    /// Of these, the ones that are gone.
    pub(crate) lost: u64,
    /// Jobs that were completed, or effects that were applied, more than once.
    pub(crate) duplicated: u64,
    /// Settlements, checkpoints and writes that were refused, by the store or a resource.
    pub(crate) refused: u64,
    /// Tokens, marks and checkpoints that went back.
    pub(crate) regressions: u64,
    /// From the last sign of life of an owner to the next owner's grant.
    pub(crate) takeovers: Vec<Duration>,
    /// What the same run showed without the protection.
    pub(crate) control: String,
}

impl Row {
    /// Median and 99th percentile of the takeovers.
    pub(crate) fn takeover(&self) -> Option<[Duration; 2]> {
        let mut times = self.takeovers.clone();
        times.sort();
        let at = |part: usize| times.get((times.len() * part / 100).min(times.len() - 1));
        (!times.is_empty()).then(|| [50, 99].map(|part| at(part).copied().unwrap_or_default()))
    }

    /// Nothing lost, nothing twice, nothing back.
    pub(crate) fn assert_clean(&self, case: &str) {
        let wrong = (self.lost, self.duplicated, self.regressions);
        assert_eq!(wrong, (0, 0, 0), "{case}: lost, duplicated, regressions");
        assert!(self.acknowledged > 0, "{case}: nothing was at stake");
    }

    fn line(&self, case: &str) -> String {
        let ms = |time: Duration| format!("{} ms", time.as_millis());
        let [median, p99] = match self.takeover() {
            Some(times) => times.map(ms),
            None => ["-".into(), "-".into()],
        };
        format!(
            "{case:<43} {:>12} {:>5} {:>10} {:>8} {:>11} {median:>9} {p99:>9}  {}",
            self.acknowledged,
            self.lost,
            self.duplicated,
            self.refused,
            self.regressions,
            self.control,
        )
    }
}

fn header() -> String {
    format!(
        "{:<43} {:>12} {:>5} {:>10} {:>8} {:>11} {:>9} {:>9}  {}",
        "fault",
        "acknowledged",
        "lost",
        "duplicated",
        "refused",
        "regressions",
        "p50",
        "p99",
        "without the protection",
    )
}

/// Every fault, in the order of the table.
const CASES: &[&str] = &[
    #[cfg(feature = "redis")]
    "concurrent acquisition",
    "owner crash",
    "owner pause, stale owner resume",
    #[cfg(feature = "redis")]
    "partition, both ways",
    #[cfg(feature = "redis")]
    "partition, requests lost",
    #[cfg(feature = "redis")]
    "partition, replies lost",
    #[cfg(feature = "redis")]
    "partition, link down",
    #[cfg(feature = "redis")]
    "delayed renewal",
    #[cfg(feature = "redis")]
    "duplicate request",
    #[cfg(feature = "redis")]
    "ambiguous settle",
    #[cfg(feature = "redis")]
    "service restart",
    #[cfg(feature = "redis")]
    "server stall",
    #[cfg(feature = "redis")]
    "token across issuer rollback",
    #[cfg(feature = "redis")]
    "server clock forward",
    #[cfg(feature = "redis")]
    "server clock back",
    #[cfg(feature = "redis")]
    "server clock drifts",
    "holder clock forward",
    "holder clock back",
    "holder clock drifts",
    "resource-side rejection",
    #[cfg(feature = "redis")]
    "retry storm",
    #[cfg(feature = "redis")]
    "manual recovery",
    #[cfg(feature = "redis")]
    "no-progress zombie",
    #[cfg(feature = "redis")]
    "renewal storm",
    #[cfg(feature = "redis")]
    "rolling deploy",
    "stale checkpoint",
    "kill -9 in commit",
    "kill -9 of the enqueuer",
    "frozen inside a SQLite transaction",
    "full disk",
    #[cfg(feature = "redis")]
    "Redis out of memory",
    "poison job",
    #[cfg(feature = "postgres")]
    "owner crash, PostgreSQL",
    #[cfg(feature = "postgres")]
    "owner pause, stale owner resume, PostgreSQL",
    #[cfg(feature = "postgres")]
    "partition, both ways, PostgreSQL",
    #[cfg(feature = "postgres")]
    "partition, requests lost, PostgreSQL",
    #[cfg(feature = "postgres")]
    "partition, replies lost, PostgreSQL",
    #[cfg(feature = "postgres")]
    "partition, link down, PostgreSQL",
    #[cfg(feature = "postgres")]
    "delayed renewal, PostgreSQL",
    #[cfg(feature = "postgres")]
    "duplicate request, PostgreSQL",
    #[cfg(feature = "postgres")]
    "ambiguous settle, PostgreSQL",
    #[cfg(feature = "postgres")]
    "service restart, PostgreSQL",
    #[cfg(feature = "postgres")]
    "server stall, PostgreSQL",
    #[cfg(feature = "postgres")]
    "renewal storm, PostgreSQL",
    #[cfg(feature = "postgres")]
    "stale checkpoint, PostgreSQL",
];

/// Those that take so long that they are in the campaign only.
const LONG: &[&str] = &[
    #[cfg(feature = "redis")]
    "failover by Sentinel",
    #[cfg(feature = "redis")]
    "failover of a cluster",
];

static REPORTED: Mutex<Vec<(&str, Row)>> = Mutex::new(Vec::new());

/// Shows the line of a case, and the whole table with the last of them.
pub(crate) fn report(case: &'static str, row: Row) {
    let long = if in_campaign() { LONG } else { &[] };
    let cases: Vec<&str> = [CASES, long].concat();
    assert!(cases.contains(&case), "{case} is not in the table");
    figures(&format!("{}\n{}", header(), row.line(case)));
    let mut reported = REPORTED.lock().unwrap();
    reported.push((case, row));
    let of = |case: &&str| reported.iter().find(|(name, _)| name == case);
    let lines: Option<Vec<String>> = cases
        .iter()
        .map(|case| of(case).map(|(name, row)| row.line(name)))
        .collect();
    if let Some(lines) = lines {
        figures(&format!("{}\n{}", header(), lines.join("\n")));
    }
}
