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

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::observe::Event;
use leasehold::{Client, Worker};
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

/// Runs a worker whose job is completed in its handler, by a call whose answer is lost, until the
/// settlement that follows was refused: it is in doubt, and no stale holder's.
async fn assert_completed_in_doubt(client: &Client, worker: Worker) {
    let told: Arc<Mutex<Vec<&str>>> = Arc::default();
    let seen = Arc::clone(&told);
    let worker = worker.observer(move |event: &Event<'_>| match event {
        Event::Fenced { .. } => seen.lock().unwrap().push("stale"),
        Event::InDoubt { .. } => seen.lock().unwrap().push("in doubt"),
        _ => {}
    });
    let watch = Arc::clone(&told);
    let until_told = async move {
        while watch.lock().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    worker.run_until(until_told).await.unwrap();
    assert_eq!(*told.lock().unwrap(), ["in doubt"]);
    let ledger = client.ledger().await.unwrap();
    let ends = (ledger.granted, ledger.completed, ledger.retried);
    assert_eq!(ends, (1, 1, 0), "{ledger:?}");
}

fn seed() -> u64 {
    std::env::var("LEASEHOLD_SEED").map_or(7, |seed| seed.parse().unwrap())
}
