//! SQLite, `synchronous=FULL`: a drain through the worker runtime against the bare engine, which
//! deletes rows with the same payload, a hundred in a transaction.
//!
//! ```text
//! cargo bench --bench sqlite_drain
//! ```
//! The two sides take turns; the ratio is the median of the ratios of the rounds.

mod common;

use common::{bare_sqlite, drain, enqueue, median, per_second, setting};
use leasehold::Client;

const SLOTS: usize = 16;

fn main() {
    let jobs = setting("JOBS", 20_000, 1_000);
    let rounds = setting("ROUNDS", 9, 1);
    let dir = tempfile::tempdir().expect("a directory");
    common::record_metrics();
    common::runtime().block_on(async {
        let url = format!("sqlite://{}", dir.path().join("store.db").display());
        let client = Client::open(&url).await.expect("a store");
        let (mut ours, mut bare) = (vec![], vec![]);
        for _ in 0..rounds {
            let file = dir.path().join("bare.db");
            let deleted = tokio::task::spawn_blocking(move || bare_sqlite(&file, jobs));
            let took = deleted.await.expect("no panics").expect("the bare engine");
            bare.push(per_second(jobs, took));
            enqueue(&client, jobs).await;
            ours.push(per_second(jobs, drain(&client, jobs, SLOTS).await));
        }
        let ratio = median(ours.iter().zip(&bare).map(|(a, b)| a / b));
        println!("{jobs} jobs, {SLOTS} slots, {rounds} rounds, synchronous=FULL");
        println!("  bare engine  {:>10.0} jobs/s", median(bare));
        println!("  leasehold    {:>10.0} jobs/s", median(ours));
        println!("  leasehold / bare engine  {ratio:.2}");
    });
}
