//! Fences: every adapter against the conformance suite, what a refusal does to a handler, and
//! broken variants that the suite must catch.

#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it waits on the real time")]

mod broken;
mod file;
mod handler;
mod http;
mod memory;
mod one_step;
use leasehold_support::paying;
mod postgres;
use leasehold_support::postgres as postgres_server;
mod redis;
#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
use leasehold_support::redis as redis_server;
mod round_trips;
mod sqlite;
mod transaction;

use leasehold_conformance::resource::{Subject, check};

/// Random interleavings for each adapter.
const INTERLEAVINGS: usize = 10_000;

/// Runs the whole suite on a resource that must pass, and prints how much was tried.
async fn conforms(name: &str, subject: &dyn Subject) {
    let figures = check(subject, seed(), INTERLEAVINGS).await;
    let figures = figures.unwrap_or_else(|breach| panic!("{name}: {breach}"));
    println!("{name}, seed {}: {figures:?}", seed());
    assert_eq!(figures.interleavings, INTERLEAVINGS);
}

/// The same interleavings, shared out to resources of one kind that have nothing in common: where
/// each step waits for a server, they need not wait for each other.
async fn conform_side_by_side(name: &str, subjects: Vec<Box<dyn Subject>>) {
    let share = INTERLEAVINGS / subjects.len();
    let mut checks = tokio::task::JoinSet::new();
    for (subject, at) in subjects.into_iter().zip(0..) {
        let seed = seed() + at * share as u64;
        let runtime = tokio::runtime::Handle::current();
        checks.spawn_blocking(move || runtime.block_on(check(&*subject, seed, share)));
    }
    let mut interleavings = 0;
    while let Some(checked) = checks.join_next().await {
        let figures = checked.unwrap();
        let figures = figures.unwrap_or_else(|breach| panic!("{name}: {breach}"));
        println!("{name}: {figures:?}");
        interleavings += figures.interleavings;
    }
    assert_eq!(interleavings, INTERLEAVINGS);
}

fn seed() -> u64 {
    std::env::var("LEASEHOLD_SEED").map_or(7, |seed| seed.parse().unwrap())
}
