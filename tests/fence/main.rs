//! Fences: every adapter against the conformance suite, what a refusal does to a handler, and broken
//! variants that the suite must catch.

#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]

mod broken;
mod file;
mod handler;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
#[path = "../support/postgres.rs"]
mod postgres_server;
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
