//! The dashboard over plain HTTP: each page, who may see it and who may act, what hostile clients
//! achieve, and whether its numbers are the ledger's.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

#[path = "../support/http.rs"]
mod http;
#[path = "../support/postgres.rs"]
mod postgres_server;
#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
#[allow(
    clippy::unused_self,
    clippy::format_push_string,
    reason = "it is not this test's"
)]
#[path = "../support/redis/mod.rs"]
mod redis_server;
#[path = "../support/scene.rs"]
mod scene;

mod actions;
mod attack;
mod cli;
mod grafana;
mod numbers;
mod pages;
mod safety;
mod speed;
