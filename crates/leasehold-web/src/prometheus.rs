//! Prometheus: the metrics as text, for the dashboard's `/metrics` or a server of their own.
//!
//! Counts of a worker die with it; the store's ledger does not. A scrape has both. The names are
//! final. No label is an id, an owner or a key: the number of series grows with queues and kinds
//! only. What comes from the store is the same in every process that exports it: take it with `max`
//! over instances, not with `sum`.
//!
//! | metric | type, unit | labels | says |
//! |---|---|---|---|
//! | `leasehold_jobs_enqueued_total` | counter, jobs | queue, kind | stored by this process |
//! | `leasehold_jobs_duplicate_total` | counter, jobs | queue, kind | found their unique key held |
//! | `leasehold_leases_granted_total` | counter, leases | queue, kind | granted to this process |
//! | `leasehold_leases_released_total` | counter, leases | queue, kind, outcome | ended by this process |
//! | `leasehold_leases_expired_total` | counter, leases | queue, kind, cause | expiries that this process recorded, of whoever's leases |
//! | `leasehold_leases_lost_total` | counter, leases | queue, kind, cause | lost while this process worked on them |
//! | `leasehold_lease_renewals_total` | counter, leases | queue, result | in renewal calls: held, fenced, error |
//! | `leasehold_calls_fenced_total` | counter, calls | queue, verb | refused as stale |
//! | `leasehold_stale_writes_rejected_total` | counter, operations | queue, op | refused by a fence: open, read, write |
//! | `leasehold_settlements_late_total` | counter, settlements | queue | after the deadline, before anybody else |
//! | `leasehold_claims_empty_total` | counter, claims | | granted nothing |
//! | `leasehold_lease_held_seconds` | histogram, seconds | queue, kind | from grant to release |
//! | `leasehold_job_wait_seconds` | histogram, seconds | queue, kind | from due to the start of the handler |
//! | `leasehold_job_run_seconds` | histogram, seconds | queue, kind | run of the handler |
//! | `leasehold_lease_margin_ratio` | histogram, 0 to 1 | queue, kind | time left at release ÷ term |
//! | `leasehold_job_attempts` | histogram, attempts | queue, kind | attempt at release |
//! | `leasehold_worker_slots` | gauge, slots | state | busy, free |
//! | `leasehold_leases_held` | gauge, leases | | held by this process, running or not |
//! | `leasehold_utilization_ratio` | gauge, 1 is full | queue | ρ = arrival rate × hold time ÷ slots |
//! | `leasehold_store_call_seconds` | histogram, seconds | store, verb | duration of a store call |
//! | `leasehold_queue_jobs` | gauge, jobs | queue, state | in the store |
//! | `leasehold_queue_parked_jobs` | gauge, jobs | queue | behind another of their exclusive key |
//! | `leasehold_queue_paused` | gauge, 0 or 1 | queue | grants nothing |
//! | `leasehold_oldest_ready_seconds` | gauge, seconds | queue | how long the job next in line has been due |
//! | `leasehold_ledger_enqueued_total` | counter, jobs | queue | the store's ledger: stored |
//! | `leasehold_ledger_granted_total` | counter, leases | queue | the store's ledger: granted |
//! | `leasehold_ledger_ended_total` | counter, leases | queue, end | the store's ledger: how they ended |
//! | `leasehold_ledger_live` | gauge, leases | queue | the store's ledger: still held |
//! | `leasehold_ledger_late_total` | counter, settlements | queue | the store's ledger: after the deadline |
//! | `leasehold_ledger_fenced_total` | counter, calls | queue | the store's ledger: refused as stale |
//! | `leasehold_ledger_deleted_total` | counter, jobs | queue, by | the store's ledger: by retention, by operator |
//! | `leasehold_build_info` | gauge, 1 | version, store | |
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

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::histogram::{Counted, Sorting};
use crate::server;
use leasehold::Client;
use leasehold::error::Verb;
use leasehold::inspect;
use leasehold::observe::metrics;
use leasehold::store::Store;
use leasehold::{Error, ErrorKind, Result};

/// The type of a scrape.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Where a scrape comes from. Clones share it.
#[derive(Clone)]
pub struct Exporter {
    counted: Counted,
    /// None if it is the process's own: then the facade finds it.
    recorder: Option<Arc<Sorting>>,
}

impl Exporter {
    /// Becomes the recorder of this process: a scrape has what its workers count, and the ledger.
    ///
    /// # Errors
    /// If the process has a recorder already.
    pub fn install() -> Result<Self> {
        let recorder = recorder();
        let counted = recorder.counted();
        ::metrics::set_global_recorder(recorder).map_err(|_| {
            let text = "this process already has a metrics recorder";
            Error::new(ErrorKind::Unsupported, text).during(Verb::Open)
        })?;
        metrics::describe();
        Ok(Self {
            counted,
            recorder: None,
        })
    }

    /// Changes nothing in the process: a scrape has the store's ledger and its depths only.
    ///
    /// # Errors
    /// None in practice.
    pub fn of_the_store() -> Result<Self> {
        let recorder = recorder();
        ::metrics::with_local_recorder(&recorder, metrics::describe);
        Ok(Self {
            counted: recorder.counted(),
            recorder: Some(Arc::new(recorder)),
        })
    }

    /// Everything there is to know, in the Prometheus text format.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn scrape(&self, store: &dyn Store) -> Result<String> {
        let queues = inspect::queues(store).await?;
        let name = store.name();
        match &self.recorder {
            None => metrics::export_views(name, &queues),
            Some(recorder) => {
                ::metrics::with_local_recorder(&**recorder, || {
                    metrics::export_views(name, &queues);
                });
            }
        }
        Ok(self.counted.render())
    }
}

/// What the workers of this process have measured, as far as the dashboard shows it.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// ρ by queue.
    pub(crate) utilization: std::collections::HashMap<String, f64>,
    /// Leases released with at most so much of their term left, all queues and kinds together.
    pub(crate) margin: Vec<(f64, u64)>,
}

impl Exporter {
    /// Read from the rendered text: the recorder has no other way to be asked.
    pub(crate) fn measured(&self) -> Measured {
        let mut measured = Measured::default();
        if self.recorder.is_some() {
            return measured;
        }
        let margin = format!("{}_bucket", metrics::LEASE_MARGIN);
        for line in self
            .counted
            .render()
            .lines()
            .filter(|line| !line.starts_with('#'))
        {
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

fn recorder() -> Sorting {
    Sorting::new(PrometheusBuilder::new().build_recorder())
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
    match exporter.scrape(&**client.store()).await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::warn!(%error, "a scrape found no store");
            (
                StatusCode::SERVICE_UNAVAILABLE,
                "the store does not answer\n",
            )
                .into_response()
        }
    }
}
