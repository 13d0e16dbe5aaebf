//! How long a job waits when nothing is in its way: from the call of `enqueue` to the start of its
//! handler, in one process, one job at a time.
//!
//! ```text
//! cargo bench --bench enqueue_to_start
//! ```

#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]

mod common;

use std::time::{Duration, Instant};

use common::{Numbered, job, setting};
use leasehold::{Client, Context, Failure};
use tokio::sync::mpsc;

fn main() {
    let jobs = setting("JOBS", 1_000, 20);
    let dir = tempfile::tempdir().expect("a directory");
    common::runtime().block_on(async {
        println!("{jobs} jobs, one every 2 ms; milliseconds");
        let sqlite = format!("sqlite://{}", dir.path().join("store.db").display());
        for (name, url) in [("memory", "memory:"), ("sqlite", &sqlite)] {
            let mut waits = waits(url, jobs).await;
            waits.sort_unstable();
            let percentile = |p: usize| waits[(waits.len() * p / 100).min(waits.len() - 1)];
            let [p50, p99] = [50, 99].map(|p| percentile(p).as_secs_f64() * 1e3);
            println!("  {name}  p50 {p50:.3}   p99 {p99:.3}");
        }
    });
}

async fn waits(url: &str, jobs: usize) -> Vec<Duration> {
    let client = Client::open(url).await.expect("a store");
    let (started, mut starts) = mpsc::unbounded_channel();
    let handler = move |_: Numbered, _: Context| {
        let _ = started.send(Instant::now());
        async { Ok::<(), Failure>(()) }
    };
    let mut waits = Vec::new();
    let pace = async {
        for n in 0..jobs {
            let job = job(n);
            let began = Instant::now();
            client.enqueue(job).await.expect("enqueued");
            let start = starts.recv().await.expect("started");
            waits.push(start - began);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    client
        .worker()
        .handle(handler)
        .run_until(pace)
        .await
        .expect("a worker");
    waits
}
