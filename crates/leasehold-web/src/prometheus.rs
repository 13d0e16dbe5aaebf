//! Prometheus: the metrics as text, for the dashboard's `/metrics` or a server of their own.
//!
//! Counts of a worker die with it; the store's ledger does not. A scrape has both. The names are
//! final. What comes from the store has the label `store`, its namespace, and is the same in every
//! process that exports it: take it with `max` over instances, not with `sum`.
//!
//! **A scrape always answers.** If the store says nothing within [`PATIENCE`], `leasehold_store_up`
//! is 0, the store's other series are missing, and what the process counts is there.
//!
//! **The number of series is bounded.** No label is an id, an owner or a key. A pair of
//! queue and kind has series from its first job on, and at most 10,000 lines of one metric are
//! exported; a warning says when there would be more.
//!
//! | metric | type, unit | labels | says |
//! |---|---|---|---|
//! | `leasehold_jobs_enqueued_total` | counter, jobs | queue, kind | stored by this process |
//! | `leasehold_jobs_duplicate_total` | counter, jobs | queue, kind | found their unique key held |
//! | `leasehold_leases_granted_total` | counter, leases | queue, kind | granted to this process |
//! | `leasehold_leases_released_total` | counter, leases | queue, kind, outcome | ended by this process |
//! | `leasehold_leases_expired_total` | counter, leases | queue, kind, cause | expiries that this process recorded, whoever held the lease |
//! | `leasehold_leases_lost_total` | counter, leases | queue, kind, cause | lost while this process worked on them |
//! | `leasehold_lease_renewals_total` | counter, leases | queue, result | in renewal calls: held, fenced, error |
//! | `leasehold_calls_fenced_total` | counter, calls | queue, verb | refused as stale: the lease was replaced, and its holder did not know it |
//! | `leasehold_stale_writes_rejected_total` | counter, operations | queue, op | refused by a fence: open, read, write |
//! | `leasehold_settlements_late_total` | counter, settlements | queue | after the deadline, before anybody else |
//! | `leasehold_settlements_in_doubt_total` | counter, settlements | queue | refused when sent again; an earlier copy may have been applied |
//! | `leasehold_claims_empty_total` | counter, claims | | granted nothing |
//! | `leasehold_lease_held_seconds` | histogram, seconds | queue, kind | from grant to release |
//! | `leasehold_job_wait_seconds` | histogram, seconds | queue, kind | from due to the start of the handler |
//! | `leasehold_job_run_seconds` | histogram, seconds | queue, kind | run of the handler |
//! | `leasehold_lease_margin_ratio` | histogram, 0 to 1 | queue, kind | time left at release ÷ term |
//! | `leasehold_job_attempts` | histogram, attempts | queue, kind | attempt at release |
//! | `leasehold_worker_slots` | gauge, slots | state | busy, free |
//! | `leasehold_leases_held` | gauge, leases | | held by this process, running or not |
//! | `leasehold_utilization_ratio` | gauge, 1 is full | queue | ρ = arrival rate × hold time ÷ slots |
//! | `leasehold_store_call_seconds` | histogram, seconds | engine, verb | duration of a store call |
//! | `leasehold_queue_jobs` | gauge, jobs | store, queue, state | in the store |
//! | `leasehold_queue_parked_jobs` | gauge, jobs | store, queue | behind another of their exclusive key |
//! | `leasehold_queue_paused` | gauge, 0 or 1 | store, queue | grants nothing |
//! | `leasehold_clock_behind_seconds` | gauge, seconds | store, queue | how far the clock is behind the queue's tokens, after it was set back |
//! | `leasehold_oldest_ready_seconds` | gauge, seconds | store, queue | how long the job next in line has been due |
//! | `leasehold_ledger_enqueued_total` | counter, jobs | store, queue | the store's ledger: stored |
//! | `leasehold_ledger_granted_total` | counter, leases | store, queue | the store's ledger: granted |
//! | `leasehold_ledger_ended_total` | counter, leases | store, queue, end | the store's ledger: how they ended |
//! | `leasehold_ledger_live` | gauge, leases | store, queue | the store's ledger: still held |
//! | `leasehold_ledger_late_total` | counter, settlements | store, queue | the store's ledger: after the deadline |
//! | `leasehold_ledger_fenced_total` | counter, calls | store, queue | the store's ledger: settlements and checkpoints refused, because the lease was not theirs any more |
//! | `leasehold_ledger_deleted_total` | counter, jobs | store, queue, by | the store's ledger: by retention, by operator |
//! | `leasehold_ledger_deaths_total` | counter, jobs | store, queue, cause | the store's ledger: jobs that died, buried or by expiry; a retry or a purge takes none back |
//! | `leasehold_store_up` | gauge, 0 or 1 | store | whether the store answered this scrape |
//! | `leasehold_scrapes_failed_total` | counter, scrapes | store | of this process, that the store did not answer |
//! | `leasehold_build_info` | gauge, 1 | version, engine, store | |
//!
//! ```no_run
//! # async fn example(client: leasehold::Client) -> leasehold::Result<()> {
//! use leasehold_web::prometheus::{self, Exporter};
//!
//! let exporter = Exporter::install()?; // before the worker starts
//! let address = ([127, 0, 0, 1], 9464).into();
//! let metrics = prometheus::serve_metrics(address, client.clone(), exporter, None);
//! tokio::spawn(metrics);
//! // client.worker()…
//! # Ok(()) }
//! ```

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::histogram::{Counted, Sorting, Told};
use crate::server;
use leasehold::Client;
use leasehold::error::Verb;
use leasehold::inspect;
use leasehold::inspect::QueueView;
use leasehold::observe::metrics;
use leasehold::store::Store;
use leasehold::{Error, ErrorKind, Result};

/// The type of a scrape.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How long a scrape waits for the store. Prometheus gives up after 10 s by default.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Where a scrape comes from. Clones share it.
#[derive(Clone)]
pub struct Exporter {
    /// What this process counts; none if a scrape has the store's series only.
    process: Option<Counted>,
    /// Scrapes that the store did not answer.
    failed: Arc<AtomicU64>,
    told: Told,
}

impl Exporter {
    /// Becomes the recorder of this process: a scrape has what its workers count, and the ledger.
    ///
    /// # Errors
    /// If the process has a recorder already.
    pub fn install() -> Result<Self> {
        let mut exporter = Self::of_the_store();
        let recorder = recorder(&exporter.told);
        exporter.process = Some(recorder.counted());
        ::metrics::set_global_recorder(recorder).map_err(|_| {
            let text = "this process already has a metrics recorder";
            Error::new(ErrorKind::Unsupported, text).during(Verb::Open)
        })?;
        metrics::describe();
        Ok(exporter)
    }

    /// Changes nothing in the process: a scrape has the store's ledger and its depths only.
    pub fn of_the_store() -> Self {
        Self {
            process: None,
            failed: Arc::default(),
            told: Told::default(),
        }
    }

    /// Everything there is to know, in the Prometheus text format. What the process counts is there
    /// whatever the store does, and what the store said earlier is not said again.
    pub async fn scrape(&self, store: &dyn Store) -> String {
        let queues = self.ask(store).await;
        let mut text = self
            .process
            .as_ref()
            .map_or_else(String::new, Counted::render);
        text.push_str(&self.of(store, queues.as_deref()));
        text
    }

    /// The queues, if the store has the time.
    async fn ask(&self, store: &dyn Store) -> Option<Vec<QueueView>> {
        match tokio::time::timeout(PATIENCE, inspect::queues(store)).await {
            Ok(Ok(queues)) => return Some(queues),
            Ok(Err(error)) => tracing::warn!(%error, "the store failed a scrape"),
            Err(_) => tracing::warn!(after = ?PATIENCE, "the store did not answer a scrape"),
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// The store's series. Their recorder lives for one scrape, so that nothing in them is older.
    fn of(&self, store: &dyn Store, queues: Option<&[QueueView]>) -> String {
        let recorder = recorder(&self.told);
        ::metrics::with_local_recorder(&recorder, || {
            metrics::describe();
            metrics::export_views(store, queues);
            let namespace = store.namespace().to_string();
            ::metrics::counter!(metrics::SCRAPES_FAILED, "store" => namespace)
                .absolute(self.failed.load(Ordering::Relaxed));
        });
        recorder.counted().render()
    }
}

/// What the workers of this process have measured, as far as the dashboard shows it.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// ρ by queue.
    pub(crate) utilization: std::collections::HashMap<String, f64>,
    /// Leases released with at most so much of their term left, all queues and kinds together.
    pub(crate) margin: Vec<(f64, u64)>,
    /// How the runs of each kind ended.
    pub(crate) runs: Vec<KindRuns>,
}

/// How the runs of a kind in a queue ended.
#[derive(Debug)]
pub(crate) struct KindRuns {
    pub(crate) queue: String,
    pub(crate) kind: String,
    pub(crate) completed: u64,
    /// Retried or buried.
    pub(crate) failed: u64,
}

impl KindRuns {
    pub(crate) fn failed_share(&self) -> f64 {
        self.failed as f64 / (self.completed + self.failed).max(1) as f64
    }
}

impl Measured {
    fn count_runs(&mut self, queue: &str, kind: &str, outcome: &str, runs: u64) {
        let known = self
            .runs
            .iter()
            .position(|known| known.queue == queue && known.kind == kind);
        let at = known.unwrap_or_else(|| {
            self.runs.push(KindRuns {
                queue: queue.to_owned(),
                kind: kind.to_owned(),
                completed: 0,
                failed: 0,
            });
            self.runs.len() - 1
        });
        match outcome {
            "complete" => self.runs[at].completed += runs,
            "retry" | "bury" => self.runs[at].failed += runs,
            _ => {}
        }
    }
}

impl Exporter {
    /// Read from the rendered text: the recorder has no other way to be asked.
    pub(crate) fn measured(&self) -> Measured {
        let mut measured = Measured::default();
        let Some(process) = &self.process else {
            return measured;
        };
        let margin = format!("{}_bucket", metrics::LEASE_MARGIN);
        let text = process.render();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let label = |wanted: &str| {
                let (_, rest) = labels.split_once(&format!("{wanted}=\""))?;
                rest.split('"').next()
            };
            if name == metrics::UTILIZATION {
                if let (Some(queue), Ok(ratio)) = (label("queue"), value.parse()) {
                    measured.utilization.insert(queue.to_owned(), ratio);
                }
            } else if name == metrics::LEASES_RELEASED {
                if let (Some(queue), Some(kind), Some(outcome), Ok(runs)) = (
                    label("queue"),
                    label("kind"),
                    label("outcome"),
                    value.parse(),
                ) {
                    measured.count_runs(queue, kind, outcome, runs);
                }
            } else if name == margin
                && let (Some(Ok(edge)), Ok(below)) =
                    (label("le").map(str::parse::<f64>), value.parse::<u64>())
                && edge.is_finite()
            {
                let known = measured
                    .margin
                    .iter_mut()
                    .find(|(known, _)| (known - edge).abs() < 1e-9);
                match known {
                    Some((_, sum)) => *sum += below,
                    None => measured.margin.push((edge, below)),
                }
            }
        }
        measured.margin.sort_by(|a, b| a.0.total_cmp(&b.0));
        measured
    }
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter").finish_non_exhaustive()
    }
}

fn recorder(told: &Told) -> Sorting {
    Sorting::new(PrometheusBuilder::new().build_recorder(), told.clone())
}

/// Serves `/metrics` of a worker that has no dashboard, until dropped. With a `token`, only to
/// those who send it as `Authorization: Bearer`.
///
/// # Errors
/// `InvalidInput` for an address that others can reach, without a token. `Unavailable` if it cannot
/// be bound.
pub async fn serve_metrics(
    address: SocketAddr,
    client: Client,
    exporter: Exporter,
    token: Option<String>,
) -> Result<()> {
    let listener = server::bind(address, token.is_some()).await?;
    let expected = token.map(|token| format!("Bearer {token}"));
    let scrape = move |headers: HeaderMap| async move {
        let given = headers
            .get(header::AUTHORIZATION)
            .map(HeaderValue::as_bytes);
        if let Some(expected) = &expected
            && !server::same(expected.as_bytes(), given.unwrap_or_default())
        {
            let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
            return (StatusCode::UNAUTHORIZED, challenge).into_response();
        }
        answer(&exporter, &client).await
    };
    let router = Router::new().route("/metrics", get(scrape));
    server::serve(listener, router, std::future::pending()).await;
    Ok(())
}

/// The answer to a scrape.
pub(crate) async fn answer(exporter: &Exporter, client: &Client) -> Response {
    let text = exporter.scrape(&**client.store()).await;
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}
