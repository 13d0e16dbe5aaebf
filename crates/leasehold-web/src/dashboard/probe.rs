//! For supervisors: whether the dashboard runs, and whether its store answers.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use serde_json::json;

use super::{App, watch};
use crate::health::answer;

/// How long the store may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Who can answer is alive.
pub(super) async fn alive() -> Response {
    answer(None, json!({}))
}

/// The reason names no error of the store: it may tell an address to somebody who has no password.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let why = match tokio::time::timeout(PATIENCE, watch::recent(&app)).await {
        Ok(Ok(_)) => None,
        Ok(Err(_)) => Some("the store cannot be reached".to_owned()),
        Err(_) => Some(format!("the store has not answered within {PATIENCE:?}")),
    };
    answer(why, json!({}))
}
