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
    "concurrent acquisition",
    "owner crash",
    "owner pause, stale owner resume",
    "partition, both ways",
    "partition, requests lost",
    "partition, replies lost",
    "partition, link down",
    "delayed renewal",
    "duplicate request",
    "ambiguous settle",
    "service restart",
    "server stall",
    "token across issuer rollback",
    "server clock forward",
    "server clock back",
    "server clock drifts",
    "holder clock forward",
    "holder clock back",
    "holder clock drifts",
    "resource-side rejection",
    "retry storm",
    "manual recovery",
    "no-progress zombie",
    "renewal storm",
    "rolling deploy",
    "stale checkpoint",
    "kill -9 in commit",
    "kill -9 of the enqueuer",
    "frozen inside a SQLite transaction",
    "full disk",
    "Redis out of memory",
    "poison job",
    "owner crash, PostgreSQL",
    "owner pause, stale owner resume, PostgreSQL",
    "partition, both ways, PostgreSQL",
    "partition, requests lost, PostgreSQL",
    "partition, replies lost, PostgreSQL",
    "partition, link down, PostgreSQL",
    "delayed renewal, PostgreSQL",
    "duplicate request, PostgreSQL",
    "ambiguous settle, PostgreSQL",
    "service restart, PostgreSQL",
    "server stall, PostgreSQL",
    "renewal storm, PostgreSQL",
    "stale checkpoint, PostgreSQL",
];

/// Those that take so long that they are in the campaign only.
const LONG: &[&str] = &["failover by Sentinel", "failover of a cluster"];

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
