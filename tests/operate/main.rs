//! The `leasehold` command at work on a store that others use: what each command shows and does, the
//! shape of what it prints, and how it ends.

#![cfg(unix)]
#![allow(
    clippy::disallowed_methods,
    reason = "the limits here are of real time"
)]
#![allow(clippy::unwrap_used, reason = "a test")]

mod act;
mod guide;
#[path = "../support/http.rs"]
mod http;
mod look;
mod migrate;
#[path = "../support/postgres.rs"]
mod postgres_server;
#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
#[path = "../support/redis/mod.rs"]
mod redis_server;
mod schema;
mod shell;
mod terminal;
mod trouble;
mod world;
