//! Metrics: every name, with its unit and labels, and the handles that record them.
//!
//! The names are literal and final: a dashboard written today fits tomorrow. They go through the
//! [`metrics`](https://docs.rs/metrics) facade, and cost nothing without a recorder. Handles are
//! looked up once per queue and kind, never per job, and not before the first job: a worker with
//! many queues and many kinds has series only for the pairs that it has seen.
//!
//! Counts of a worker die with it. The ledger is kept by the store, in the same step as the change
//! it counts; [`export`] puts it beside the others, under a label `store`: the namespace. What the
//! store runs on is the label `engine`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ::metrics::{Counter, Gauge, Histogram, Label, Unit};

use crate::error::{Result, Verb};
use crate::fence::{self, Op};
use crate::inspect::{self, QueueView};
use crate::job::{JobState, Kind, QueueName};
use crate::lease::{Cause, DeclineCause};
use crate::store::{Outcome, Store};

/// Jobs stored by this process. Labels: queue, kind.
pub const JOBS_ENQUEUED: &str = "leasehold_jobs_enqueued_total";
/// Enqueues that found their unique key held. Labels: queue, kind.
pub const JOBS_DUPLICATE: &str = "leasehold_jobs_duplicate_total";
/// Leases granted to this process. Labels: queue, kind.
pub const LEASES_GRANTED: &str = "leasehold_leases_granted_total";
/// Leases ended by this process. Labels: queue, kind, outcome = complete, retry, surrender, bury,
/// cancelled.
pub const LEASES_RELEASED: &str = "leasehold_leases_released_total";
/// Expiries recorded by this process, whoever held the lease. Labels: queue, kind, cause =
/// deadline, stalled, lifetime.
pub const LEASES_EXPIRED: &str = "leasehold_leases_expired_total";
/// Jobs that this process handed back because it cannot work them. Labels: queue, cause =
/// `unknown_kind`, `newer_version`, `undecodable_payload`.
pub const JOBS_DECLINED: &str = "leasehold_jobs_declined_total";
/// Leases that this process lost while it worked on them. Labels: queue, kind, cause = fenced,
/// deadline, stalled.
pub const LEASES_LOST: &str = "leasehold_leases_lost_total";
/// Leases in renewal calls. Labels: queue, result = held, fenced, error.
pub const LEASE_RENEWALS: &str = "leasehold_lease_renewals_total";
/// Calls of this process that the store refused as stale, one for each lease. A renewal is none if
/// it was overtaken by the settlement of its own lease, or came after its loss was known; neither
/// is a settlement [in doubt](SETTLEMENTS_IN_DOUBT). Labels: queue, verb.
pub const CALLS_FENCED: &str = "leasehold_calls_fenced_total";
/// Operations of this process that a fence refused, and of others that a fence in this process
/// refused. Labels: queue, op = open, read, write.
pub const STALE_WRITES_REJECTED: &str = fence::STALE_WRITES_REJECTED;
/// Settlements after the deadline of a lease whose job had not been granted to anybody else.
/// Labels: queue.
pub const SETTLEMENTS_LATE: &str = "leasehold_settlements_late_total";
/// Settlements whose answer is lost for good, and that were refused when they were sent again: they
/// were applied the first time, or the lease was somebody else's by then. Labels: queue.
pub const SETTLEMENTS_IN_DOUBT: &str = "leasehold_settlements_in_doubt_total";
/// Claims that granted nothing.
pub const CLAIMS_EMPTY: &str = "leasehold_claims_empty_total";
/// Seconds from grant to release. Labels: queue, kind.
pub const LEASE_HELD: &str = "leasehold_lease_held_seconds";
/// Seconds from due to the start of the handler. Labels: queue, kind.
pub const JOB_WAIT: &str = "leasehold_job_wait_seconds";
/// Seconds that the handler ran. Labels: queue, kind.
pub const JOB_RUN: &str = "leasehold_job_run_seconds";
/// Time left at release, as a share of the term. Labels: queue, kind.
pub const LEASE_MARGIN: &str = "leasehold_lease_margin_ratio";
/// The attempt at release. Labels: queue, kind.
pub const JOB_ATTEMPTS: &str = "leasehold_job_attempts";
/// Slots of this process. Labels: state = busy, free.
pub const WORKER_SLOTS: &str = "leasehold_worker_slots";
/// Leases that this process holds, running or waiting for a slot.
pub const LEASES_HELD: &str = "leasehold_leases_held";
/// Arrival rate × hold time ÷ slots. Labels: queue.
pub const UTILIZATION: &str = "leasehold_utilization_ratio";
/// Seconds that a store call took. Labels: engine, verb.
pub const STORE_CALL: &str = "leasehold_store_call_seconds";
/// Jobs in the store. Labels: store, queue, state.
pub const QUEUE_JOBS: &str = "leasehold_queue_jobs";
/// Jobs that wait behind another of their exclusive key. Labels: store, queue.
pub const QUEUE_PARKED: &str = "leasehold_queue_parked_jobs";
/// Seconds that the job next in line has been due. Labels: store, queue.
pub const OLDEST_READY: &str = "leasehold_oldest_ready_seconds";
/// Seconds that the store's clock is behind the tokens of a queue, if by more than speed can
/// explain: it was set back. Labels: store, queue.
pub const CLOCK_BEHIND: &str = "leasehold_clock_behind_seconds";
/// 1 while a queue grants nothing. Labels: store, queue.
pub const QUEUE_PAUSED: &str = "leasehold_queue_paused";
/// The store's ledger: jobs stored. Labels: store, queue.
pub const LEDGER_ENQUEUED: &str = "leasehold_ledger_enqueued_total";
/// The store's ledger: leases granted. Labels: store, queue.
pub const LEDGER_GRANTED: &str = "leasehold_ledger_granted_total";
/// The store's ledger: leases ended. Labels: store, queue, end = completed, retried, surrendered,
/// buried, cancelled, `expired_deadline`, `expired_stalled`, `expired_lifetime`, revoked.
pub const LEDGER_ENDED: &str = "leasehold_ledger_ended_total";
/// The store's ledger: leases that live. Labels: store, queue.
pub const LEDGER_LIVE: &str = "leasehold_ledger_live";
/// The store's ledger: settlements and checkpoints refused as stale. Labels: store, queue.
pub const LEDGER_FENCED: &str = "leasehold_ledger_fenced_total";
/// The store's ledger: settlements after the deadline and before anybody else. Labels: store,
/// queue.
pub const LEDGER_LATE: &str = "leasehold_ledger_late_total";
/// The store's ledger: settled jobs deleted. Labels: store, queue, by = retention, operator.
pub const LEDGER_DELETED: &str = "leasehold_ledger_deleted_total";
/// The store's ledger: jobs that died. A retry or a purge takes none back. Labels: store, queue,
/// cause = buried, expired.
pub const LEDGER_DEATHS: &str = "leasehold_ledger_deaths_total";
/// 1 if the store answered this scrape; 0 if it did not, and its other series are missing. Labels:
/// store.
pub const STORE_UP: &str = "leasehold_store_up";
/// Scrapes of this process that the store did not answer. Labels: store.
pub const SCRAPES_FAILED: &str = "leasehold_scrapes_failed_total";
/// Always 1. Labels: version, engine, store.
pub const BUILD_INFO: &str = "leasehold_build_info";

/// Buckets for times: from a tenth of a millisecond to four hours. Between half a minute and ten,
/// where terms and time-outs are, no bound is more than 2.5 times the one before.
pub const SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 90.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0, 14_400.0,
];
/// Buckets for shares of a term.
pub const RATIO: &[f64] = &[0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];
/// Buckets for attempts.
pub const ATTEMPTS: &[f64] = &[1.0, 2.0, 3.0, 5.0, 8.0, 13.0];

/// The histograms and their buckets, for exporters that want to know.
pub const BUCKETS: &[(&str, &[f64])] = &[
    (LEASE_HELD, SECONDS),
    (JOB_WAIT, SECONDS),
    (JOB_RUN, SECONDS),
    (STORE_CALL, SECONDS),
    (LEASE_MARGIN, RATIO),
    (JOB_ATTEMPTS, ATTEMPTS),
];

/// Gives the recorder each metric's unit and one line about it.
pub fn describe() {
    use ::metrics::{describe_counter, describe_gauge, describe_histogram};
    let counters = [
        (JOBS_ENQUEUED, "jobs stored by this process"),
        (JOBS_DUPLICATE, "enqueues that found their unique key held"),
        (LEASES_GRANTED, "leases granted to this process"),
        (LEASES_RELEASED, "leases ended by this process, by outcome"),
        (
            LEASES_EXPIRED,
            "expiries recorded by this process, by cause",
        ),
        (
            JOBS_DECLINED,
            "jobs that this process cannot work, by cause",
        ),
        (LEASES_LOST, "leases lost while this process worked on them"),
        (LEASE_RENEWALS, "leases in renewal calls, by result"),
        (CALLS_FENCED, "calls refused as stale, by verb"),
        (STALE_WRITES_REJECTED, "operations refused by a fence"),
        (
            SETTLEMENTS_LATE,
            "settlements after the deadline and before anybody else",
        ),
        (
            SETTLEMENTS_IN_DOUBT,
            "settlements that may have been applied before they were refused",
        ),
        (CLAIMS_EMPTY, "claims that granted nothing"),
        (LEDGER_ENQUEUED, "jobs stored, from the store's ledger"),
        (LEDGER_GRANTED, "leases granted, from the store's ledger"),
        (LEDGER_ENDED, "leases ended, from the store's ledger"),
        (
            LEDGER_FENCED,
            "settlements and checkpoints refused as stale, from the store's ledger",
        ),
        (LEDGER_LATE, "late settlements, from the store's ledger"),
        (LEDGER_DELETED, "jobs deleted, from the store's ledger"),
        (LEDGER_DEATHS, "jobs that died, from the store's ledger"),
        (SCRAPES_FAILED, "scrapes that the store did not answer"),
    ];
    for (name, about) in counters {
        describe_counter!(name, Unit::Count, about);
    }
    let gauges = [
        (WORKER_SLOTS, "slots of this process"),
        (LEASES_HELD, "leases that this process holds"),
        (UTILIZATION, "arrival rate x hold time / slots"),
        (QUEUE_JOBS, "jobs in the store, by state"),
        (QUEUE_PARKED, "jobs behind another of their exclusive key"),
        (QUEUE_PAUSED, "1 while the queue grants nothing"),
        (
            CLOCK_BEHIND,
            "how far the clock is behind the queue's tokens",
        ),
        (OLDEST_READY, "how long the job next in line has been due"),
        (LEDGER_LIVE, "leases that live, from the store's ledger"),
        (STORE_UP, "1 if the store answered this scrape"),
        (BUILD_INFO, "always 1"),
    ];
    for (name, about) in gauges {
        describe_gauge!(name, about);
    }
    let histograms = [
        (LEASE_HELD, Unit::Seconds, "from grant to release"),
        (
            JOB_WAIT,
            Unit::Seconds,
            "from due to the start of the handler",
        ),
        (JOB_RUN, Unit::Seconds, "run of the handler"),
        (STORE_CALL, Unit::Seconds, "duration of a store call"),
        (LEASE_MARGIN, Unit::Count, "time left at release / term"),
        (JOB_ATTEMPTS, Unit::Count, "attempt at release"),
    ];
    for (name, unit, about) in histograms {
        describe_histogram!(name, unit, about);
    }
}

/// Sets the series that come from the store: whether it answers, its ledger, its depths. Call it
/// before a scrape.
///
/// # Errors
/// As [`Store::inspect`]. [`STORE_UP`] is 0 then, and the other series keep their last values.
pub async fn export(store: &dyn Store) -> Result<()> {
    let queues = inspect::queues(store).await;
    export_views(store, queues.as_deref().ok());
    queues.map(drop)
}

/// As [`export`], from what the store has said, if it has said anything.
pub fn export_views(store: &dyn Store, queues: Option<&[QueueView]>) {
    let namespace = store.namespace().to_string();
    ::metrics::gauge!(
        BUILD_INFO,
        "version" => env!("CARGO_PKG_VERSION"), "engine" => store.name(), "store" => namespace.clone()
    )
    .set(1.0);
    ::metrics::gauge!(STORE_UP, "store" => namespace.clone())
        .set(f64::from(u8::from(queues.is_some())));
    for view in queues.unwrap_or_default() {
        export_queue(&namespace, view);
    }
}

fn export_queue(store: &str, view: &QueueView) {
    let labels = |more: Option<(&'static str, &'static str)>| {
        let own = [("store", store), ("queue", view.queue.as_str())];
        let labels = own.into_iter().chain(more);
        labels
            .map(|(name, value)| Label::new(name, value.to_owned()))
            .collect::<Vec<_>>()
    };
    let gauge = |name: &'static str, more, value: f64| {
        ::metrics::gauge!(name, labels(more)).set(value);
    };
    let counter = |name: &'static str, more, count: u64| {
        ::metrics::counter!(name, labels(more)).absolute(count);
    };
    for state in JobState::ALL {
        let jobs = view.counts.of(state) as f64;
        gauge(QUEUE_JOBS, Some(("state", state.as_str())), jobs);
    }
    let oldest = view.oldest_ready.unwrap_or_default().as_secs_f64();
    let behind = view.clock_behind.unwrap_or_default().as_secs_f64();
    let ledger = &view.ledger;
    gauge(CLOCK_BEHIND, None, behind);
    gauge(QUEUE_PARKED, None, view.counts.parked as f64);
    gauge(OLDEST_READY, None, oldest);
    gauge(QUEUE_PAUSED, None, f64::from(u8::from(view.paused)));
    gauge(LEDGER_LIVE, None, ledger.live as f64);
    counter(LEDGER_ENQUEUED, None, ledger.enqueued);
    counter(LEDGER_GRANTED, None, ledger.granted);
    counter(LEDGER_LATE, None, ledger.late);
    counter(LEDGER_FENCED, None, ledger.fenced);
    for (by, jobs) in [("retention", ledger.pruned), ("operator", ledger.purged)] {
        counter(LEDGER_DELETED, Some(("by", by)), jobs);
    }
    let deaths = [
        ("buried", ledger.buried),
        ("expired", ledger.dead_by_expiry),
    ];
    for (cause, jobs) in deaths {
        counter(LEDGER_DEATHS, Some(("cause", cause)), jobs);
    }
    let ends = [
        ("completed", ledger.completed),
        ("retried", ledger.retried),
        ("surrendered", ledger.surrendered),
        ("buried", ledger.buried),
        ("cancelled", ledger.cancelled),
        ("expired_deadline", ledger.expired_deadline),
        ("expired_stalled", ledger.expired_stalled),
        ("expired_lifetime", ledger.expired_lifetime),
        ("revoked", ledger.revoked),
    ];
    for (end, leases) in ends {
        counter(LEDGER_ENDED, Some(("end", end)), leases);
    }
}

/// The handles for one kind in one queue, looked up when they are first needed: most pairs of a
/// queue and a kind never meet.
pub(crate) struct KindMeter {
    queue: QueueName,
    kind: String,
    series: OnceLock<KindSeries>,
}

struct KindSeries {
    granted: Counter,
    complete: Counter,
    retry: Counter,
    surrender: Counter,
    bury: Counter,
    cancelled: Counter,
    lost_fenced: Counter,
    lost_deadline: Counter,
    lost_stalled: Counter,
    held: Histogram,
    wait: Histogram,
    run: Histogram,
    margin: Histogram,
    attempts: Histogram,
}

impl KindSeries {
    fn new(queue: &QueueName, kind: &str) -> Self {
        let queue = || queue.to_string();
        let kind = || kind.to_owned();
        let released = |outcome: &'static str| ::metrics::counter!(LEASES_RELEASED, "queue" => queue(), "kind" => kind(), "outcome" => outcome);
        let lost = |cause: &'static str| ::metrics::counter!(LEASES_LOST, "queue" => queue(), "kind" => kind(), "cause" => cause);
        let histogram =
            |name: &'static str| ::metrics::histogram!(name, "queue" => queue(), "kind" => kind());
        Self {
            granted: ::metrics::counter!(LEASES_GRANTED, "queue" => queue(), "kind" => kind()),
            complete: released("complete"),
            retry: released("retry"),
            surrender: released("surrender"),
            bury: released("bury"),
            cancelled: released("cancelled"),
            lost_fenced: lost("fenced"),
            lost_deadline: lost("deadline"),
            lost_stalled: lost("stalled"),
            held: histogram(LEASE_HELD),
            wait: histogram(JOB_WAIT),
            run: histogram(JOB_RUN),
            margin: histogram(LEASE_MARGIN),
            attempts: histogram(JOB_ATTEMPTS),
        }
    }
}

impl KindMeter {
    pub(crate) fn new(queue: &QueueName, kind: &str) -> Self {
        Self {
            queue: queue.clone(),
            kind: kind.to_owned(),
            series: OnceLock::new(),
        }
    }

    fn series(&self) -> &KindSeries {
        self.series
            .get_or_init(|| KindSeries::new(&self.queue, &self.kind))
    }

    pub(crate) fn granted(&self, leases: u64) {
        self.series().granted.increment(leases);
    }

    pub(crate) fn started(&self, wait: Duration) {
        self.series().wait.record(wait.as_secs_f64());
    }

    pub(crate) fn finished(&self, run: Duration) {
        self.series().run.record(run.as_secs_f64());
    }

    /// Leases ended in the hands of their holder, all alike.
    pub(crate) fn released(
        &self,
        outcome: &Outcome,
        cancelled: bool,
        attempt: u32,
        release: Release,
        leases: u64,
    ) {
        let series = self.series();
        match outcome {
            Outcome::Retry { .. } | Outcome::Surrender { .. } | Outcome::Decline { .. }
                if cancelled =>
            {
                &series.cancelled
            }
            Outcome::Complete { .. } => &series.complete,
            Outcome::Retry { .. } => &series.retry,
            Outcome::Surrender { .. } | Outcome::Decline { .. } => &series.surrender,
            Outcome::Bury { .. } => &series.bury,
        }
        .increment(leases);
        let leases = leases as usize;
        series.held.record_many(release.held.as_secs_f64(), leases);
        series.margin.record_many(release.margin, leases);
        series.attempts.record_many(f64::from(attempt), leases);
    }

    pub(crate) fn lost(&self, why: LostWhy) {
        let series = self.series();
        match why {
            LostWhy::Fenced => &series.lost_fenced,
            LostWhy::Deadline => &series.lost_deadline,
            LostWhy::Stalled => &series.lost_stalled,
        }
        .increment(1);
    }
}

/// What is measured when leases of one grant are released together.
#[derive(Clone, Copy)]
pub(crate) struct Release {
    pub(crate) held: Duration,
    pub(crate) margin: f64,
}

/// How a worker found out that a lease is not its own any longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LostWhy {
    /// The store said so.
    Fenced,
    /// Its deadline came near and no renewal got through.
    Deadline,
    /// Its handler showed no progress.
    Stalled,
}

/// The handles for one queue.
pub(crate) struct QueueMeter {
    renewed_held: Counter,
    renewed_fenced: Counter,
    renewed_error: Counter,
    late: Counter,
    in_doubt: Counter,
    fenced: [Counter; 3],
    utilization: Gauge,
}

impl QueueMeter {
    pub(crate) fn new(queue: &QueueName) -> Self {
        let queue = || queue.to_string();
        let renewed = |result: &'static str| ::metrics::counter!(LEASE_RENEWALS, "queue" => queue(), "result" => result);
        let fenced = |verb: Verb| ::metrics::counter!(CALLS_FENCED, "queue" => queue(), "verb" => verb.as_str());
        for op in [Op::Open, Op::Read, Op::Write] {
            // Known from the start: an absent series is not a zero.
            let _ =
                ::metrics::counter!(STALE_WRITES_REJECTED, "queue" => queue(), "op" => op.as_str());
        }
        Self {
            renewed_held: renewed("held"),
            renewed_fenced: renewed("fenced"),
            renewed_error: renewed("error"),
            late: ::metrics::counter!(SETTLEMENTS_LATE, "queue" => queue()),
            in_doubt: ::metrics::counter!(SETTLEMENTS_IN_DOUBT, "queue" => queue()),
            fenced: [Verb::Renew, Verb::Settle, Verb::Checkpoint].map(fenced),
            utilization: ::metrics::gauge!(UTILIZATION, "queue" => queue()),
        }
    }

    pub(crate) fn renewed(&self, held: u64, fenced: u64) {
        self.renewed_held.increment(held);
        self.renewed_fenced.increment(fenced);
    }

    pub(crate) fn renewal_failed(&self, leases: u64) {
        self.renewed_error.increment(leases);
    }

    pub(crate) fn fenced(&self, verb: Verb) {
        match verb {
            Verb::Renew => &self.fenced[0],
            Verb::Checkpoint => &self.fenced[2],
            _ => &self.fenced[1],
        }
        .increment(1);
    }

    pub(crate) fn in_doubt(&self) {
        self.in_doubt.increment(1);
    }

    pub(crate) fn late(&self, leases: u64) {
        self.late.increment(leases);
    }

    pub(crate) fn utilization(&self, ratio: f64) {
        self.utilization.set(ratio);
    }
}

/// The handles for one pool.
pub(crate) struct PoolMeter {
    busy: Gauge,
    free: Gauge,
    held: Gauge,
    empty: Counter,
    claim: Histogram,
    renew: Histogram,
    settle: Histogram,
}

impl PoolMeter {
    pub(crate) fn new(engine: &'static str) -> Arc<Self> {
        let call = |verb: Verb| ::metrics::histogram!(STORE_CALL, "engine" => engine, "verb" => verb.as_str());
        Arc::new(Self {
            busy: ::metrics::gauge!(WORKER_SLOTS, "state" => "busy"),
            free: ::metrics::gauge!(WORKER_SLOTS, "state" => "free"),
            held: ::metrics::gauge!(LEASES_HELD),
            empty: ::metrics::counter!(CLAIMS_EMPTY),
            claim: call(Verb::Claim),
            renew: call(Verb::Renew),
            settle: call(Verb::Settle),
        })
    }

    pub(crate) fn slots(&self, busy: usize, slots: usize) {
        self.busy.set(busy as f64);
        self.free.set(slots.saturating_sub(busy) as f64);
    }

    pub(crate) fn held(&self, leases: usize) {
        self.held.set(leases as f64);
    }

    pub(crate) fn claimed(&self, took: Duration, leases: usize) {
        self.claim.record(took.as_secs_f64());
        self.empty.increment(u64::from(leases == 0));
    }

    pub(crate) fn renewed(&self, took: Duration) {
        self.renew.record(took.as_secs_f64());
    }

    pub(crate) fn settled(&self, took: Duration) {
        self.settle.record(took.as_secs_f64());
    }
}

/// Counts a job that this process declined.
pub(crate) fn declined(queue: &QueueName, cause: DeclineCause) {
    ::metrics::counter!(JOBS_DECLINED, "queue" => queue.to_string(), "cause" => cause.as_str())
        .increment(1);
}

/// Counts an expiry that this process recorded.
pub(crate) fn expired(queue: &QueueName, kind: &Kind, cause: Cause) {
    ::metrics::counter!(
        LEASES_EXPIRED,
        "queue" => queue.to_string(), "kind" => kind.to_string(), "cause" => cause.as_str()
    )
    .increment(1);
}

/// Counts jobs that were enqueued, or found to be duplicates.
pub(crate) fn enqueued(queue: &QueueName, kind: &Kind, duplicate: bool, jobs: u64) {
    let name = if duplicate {
        JOBS_DUPLICATE
    } else {
        JOBS_ENQUEUED
    };
    ::metrics::counter!(name, "queue" => queue.to_string(), "kind" => kind.to_string())
        .increment(jobs);
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    #[test]
    fn a_queue_and_a_kind_have_series_from_their_first_job_on() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        let lines = || {
            let text = handle.render();
            let series = text.lines().filter(|line| line.contains("kind="));
            series.map(str::to_owned).collect::<Vec<_>>()
        };
        ::metrics::with_local_recorder(&recorder, || {
            let queues = ["a", "b", "c", "d", "e"].map(|name| QueueName::new(name).unwrap());
            let meters: Vec<KindMeter> = queues
                .iter()
                .flat_map(|queue| (0..7).map(|kind| KindMeter::new(queue, &kind.to_string())))
                .collect();
            assert_eq!(lines(), Vec::<String>::new());
            meters[9].granted(1);
        });
        let found = lines();
        assert!(!found.is_empty());
        for line in found {
            assert!(line.contains("queue=\"b\",kind=\"2\""), "{line}");
        }
    }

    #[test]
    fn a_store_is_up_while_it_answers_and_keeps_its_series_when_it_does_not() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        let store = crate::store::MemoryStore::new();
        let views = [QueueView::new(QueueName::new("mail").unwrap())];
        for (queues, up) in [(Some(&views[..]), 1), (None, 0), (Some(&views[..]), 1)] {
            ::metrics::with_local_recorder(&recorder, || export_views(&store, queues));
            let text = handle.render();
            let line = format!("{STORE_UP}{{store=\"leasehold\"}} {up}\n");
            assert!(text.contains(&line), "{text}");
            assert!(text.contains(LEDGER_LIVE), "{text}");
        }
    }

    #[test]
    fn a_clock_that_is_behind_is_exported_by_queue_until_it_has_caught_up() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        let mut view = QueueView::new(QueueName::new("mail").unwrap());
        for (behind, value) in [(Some(Duration::from_secs(7_200)), 7_200), (None, 0)] {
            view.clock_behind = behind;
            ::metrics::with_local_recorder(&recorder, || export_queue("shop", &view));
            let line = format!("{CLOCK_BEHIND}{{store=\"shop\",queue=\"mail\"}} {value}\n");
            assert!(handle.render().contains(&line), "{}", handle.render());
        }
    }

    /// A percentile is read from the bucket it falls into, so it cannot tell times in the same one.
    #[test]
    fn buckets_tell_a_minute_from_a_minute_and_a_half() {
        let bucket = |seconds: f64| SECONDS.partition_point(|bound| *bound < seconds);
        assert_ne!(bucket(60.0), bucket(90.0));
        assert!(SECONDS.last() >= Some(&14_400.0), "nothing beyond an hour");
        let usual = SECONDS.iter().zip(&SECONDS[1..]);
        for (low, high) in usual.filter(|(low, _)| (30.0..600.0).contains(*low)) {
            assert!(high / low <= 2.5, "{low} to {high}");
        }
    }
}
