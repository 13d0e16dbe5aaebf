//! Fences: every adapter against the conformance suite, what a refusal does to a handler, and broken
//! variants that the suite must catch.

#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it waits on the real time")]

mod broken;
mod file;
mod handler;
#[cfg(feature = "http")]
mod http;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
#[path = "../support/postgres.rs"]
mod postgres_server;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
#[allow(
    clippy::unused_self,
    clippy::format_push_string,
    reason = "it is not this test's"
)]
#[path = "../support/redis/mod.rs"]
mod redis_server;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "sqlite")]
mod transaction;

use leasehold::fence::conformance::{Subject, check};

/// Random interleavings for each adapter.
const INTERLEAVINGS: usize = 10_000;

/// Runs the whole suite on a resource that must pass, and prints how much was tried.
async fn conforms(name: &str, subject: &dyn Subject) {
    let seed = std::env::var("LEASEHOLD_SEED").map_or(7, |seed| seed.parse().unwrap());
    let figures = check(subject, seed, INTERLEAVINGS).await;
    let figures = figures.unwrap_or_else(|breach| panic!("{name}: {breach}"));
    println!("{name}, seed {seed}: {figures:?}");
    assert_eq!(figures.interleavings, INTERLEAVINGS);
}
