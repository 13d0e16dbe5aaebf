//! For autoscalers: what waits and what is held, per queue, as JSON.

use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use super::page::{Asked, parsed};
use super::watch;
use crate::prometheus::PATIENCE;
use leasehold::inspect::QueueView;
use leasehold::job::QueueName;

/// All queues, or the one that is asked for. 404 for a queue that is not there; 503 if the store
/// does not answer in time, so that a scaler leaves things as they are.
pub(super) async fn scale(asked: Asked) -> Response {
    let wanted = match parsed::<QueueName>(asked.params.queue.as_ref()) {
        Ok(wanted) => wanted,
        Err(trouble) => return refused(StatusCode::BAD_REQUEST, &trouble.words()),
    };
    let seen = match tokio::time::timeout(PATIENCE, watch::fresh(&asked.app)).await {
        Ok(Ok(seen)) => seen,
        Ok(Err(error)) => return refused(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
        Err(_) => {
            let why = format!("the store has not answered within {PATIENCE:?}");
            return refused(StatusCode::SERVICE_UNAVAILABLE, &why);
        }
    };
    let is_wanted = |view: &&QueueView| wanted.as_ref().is_none_or(|name| view.queue == *name);
    let queues: Vec<Value> = seen.queues.iter().filter(is_wanted).map(figures).collect();
    if let Some(name) = wanted.filter(|_| queues.is_empty()) {
        let why = format!("nothing was ever enqueued in {name}");
        return refused(StatusCode::NOT_FOUND, &why);
    }
    let store = asked.app.client.store().namespace();
    let answer = json!({ "store": store.as_str(), "queues": queues });
    said(StatusCode::OK, &answer)
}

fn figures(view: &QueueView) -> Value {
    let counts = &view.counts;
    json!({
        "queue": view.queue,
        "paused": view.paused,
        "ready": counts.ready,
        "parked": counts.parked,
        // More workers do not help what waits behind its exclusive key.
        "waiting": counts.ready.saturating_sub(counts.parked),
        "leased": counts.leased,
        "oldest_ready_seconds": view.oldest_ready.map_or(0.0, |age: Duration| age.as_secs_f64()),
    })
}

fn refused(status: StatusCode, why: &str) -> Response {
    said(status, &json!({ "error": why }))
}

fn said(status: StatusCode, what: &Value) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, what.to_string()).into_response()
}
