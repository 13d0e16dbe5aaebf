//! `/healthz` and `/readyz`: what a supervisor asks, answered from a worker's own report.
//!
//! ```no_run
//! # async fn example(client: leasehold::Client) -> leasehold::Result<()> {
//! # let worker = client.worker().start()?;
//! let app = axum::Router::<()>::new().merge(leasehold_web::health::router(worker.clone()));
//! # Ok(()) }
//! ```
//!
//! | path | 200 while | what a failure is for |
//! |---|---|---|
//! | `/healthz` | the worker's parts run, whatever the store does | restart the process |
//! | `/readyz` | it takes on work, and the store answers | wait: a rollout goes no further |
//!
//! Otherwise the status is 503. The body is JSON, with the reason under `why`.

use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};

use leasehold::worker::WorkerHandle;
use leasehold::worker::WorkerHealth;

/// Routes for the health of a worker, to be merged or nested anywhere. They ask for no
/// authentication, and tell nothing of the jobs.
pub fn router(worker: WorkerHandle) -> Router {
    let (live, ready) = (worker.clone(), worker);
    let live = move || async move {
        let health = live.health();
        answer(health.why_not_alive(), report(&health))
    };
    let ready = move || async move {
        let health = ready.health();
        answer(health.why_not_ready(), report(&health))
    };
    Router::new()
        .route("/healthz", get(live))
        .route("/readyz", get(ready))
}

fn report(health: &WorkerHealth) -> Value {
    let seconds = |ago: Option<Duration>| ago.map(|ago| ago.as_secs_f64());
    json!({
        "claiming": health.claiming,
        "paused": health.paused,
        "draining": health.draining,
        "ended": health.ended,
        "store_answered_seconds_ago": seconds(health.store_answered),
        "renewed_seconds_ago": seconds(health.renewed),
        "failed_renewals": health.failed_renewals,
        "claimer_ran_seconds_ago": seconds(Some(health.claimer_ran)),
        "renewer_ran_seconds_ago": seconds(Some(health.renewer_ran)),
    })
}

/// 200, or 503 with the reason.
pub(crate) fn answer(why: Option<String>, mut body: Value) -> Response {
    let status = match why {
        None => StatusCode::OK,
        Some(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    body["ok"] = why.is_none().into();
    body["why"] = why.into();
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (status, headers, body.to_string()).into_response()
}
