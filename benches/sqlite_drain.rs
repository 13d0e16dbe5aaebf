//! SQLite, `synchronous=FULL`: a drain through the worker runtime against the bare engine, which
//! deletes rows with the same payload, a hundred in a transaction.
//!
//! ```text
//! cargo bench --bench sqlite_drain
//! ```
//! The two sides take turns; the ratio is the median of the ratios of the rounds.

mod common;

use common::{bare_sqlite, drain, enqueue, median, setting};
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
            bare.push(deleted.await.expect("no panics").expect("the bare engine"));
            enqueue(&client, jobs).await;
            ours.push(drain(&client, jobs, SLOTS).await);
        }
        println!("{jobs} jobs, {SLOTS} slots, {rounds} rounds, synchronous=FULL");
        for (name, side) in [("bare engine", &bare), ("leasehold", &ours)] {
            let rate = median(side.iter().map(|took| took.per_second(jobs)));
            let cpu = median(side.iter().map(|took| took.cpu_per_job(jobs)));
            println!("  {name:<12} {rate:>8.0} jobs/s   {cpu:.2} µs of CPU each");
        }
        let pairs = ours.iter().zip(&bare);
        let ratio = median(pairs.map(|(a, b)| a.per_second(jobs) / b.per_second(jobs)));
        println!("  leasehold / bare engine  {ratio:.2}");
    });
}
