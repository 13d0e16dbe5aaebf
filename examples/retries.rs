//! The four ways not to complete a job: retry by policy, retry in a given time, snooze, bury.
//!
//! Run it: `cargo run --example retries`

use std::time::Duration;

use leasehold::inspect::Page;
use leasehold::job::{JobState, QueueName};
use leasehold::{Client, Context, Failure, Job, NewJob, RetryPolicy};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
enum Download {
    /// The network is down: two failures, then it works.
    Flaky,
    /// The server says when to come back.
    RateLimited,
    /// The page is not there yet, which is nobody's fault.
    NotYet,
    /// The page will never be there.
    Gone,
    /// It fails whatever is done.
    Hopeless,
}

impl Job for Download {
    const KIND: &'static str = "download";
}

async fn download(job: Download, ctx: Context) -> Result<(), Failure> {
    let first = ctx.attempt() == 1;
    match job {
        // Any error is a failure; the policy decides when to retry, and after how many to bury.
        Download::Flaky if ctx.attempt() < 3 => Err("connection reset".into()),
        // A failure too, but the handler knows better than the policy when to come back.
        Download::RateLimited if first => {
            let after = Duration::from_millis(50);
            Err(Failure::retry_in(after, "429: too many requests"))
        }
        // A snooze surrenders the lease and counts nothing, so the attempt stays 1. What an earlier
        // run did shows in the job's history.
        Download::NotYet if ctx.job().history.is_empty() => {
            Err(Failure::snooze(Duration::from_millis(50)))
        }
        Download::Gone => Err(Failure::bury("410: gone")),
        Download::Hopeless => Err("500: internal error".into()),
        Download::Flaky | Download::RateLimited | Download::NotYet => Ok(()),
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    let jobs = [
        Download::Flaky,
        Download::RateLimited,
        Download::NotYet,
        Download::Gone,
        Download::Hopeless,
    ];
    let jobs: Result<Vec<_>, _> = jobs.iter().map(NewJob::of).collect();
    client.enqueue_many(jobs?).await?;

    client
        .worker()
        .handle(download)
        // Short waits for the example. The default is up to 1 s, 2 s, 4 s … 10 minutes.
        .retry(RetryPolicy::exponential(
            Duration::from_millis(20),
            Duration::from_millis(100),
        ))
        .max_failures(4)
        .run_until(all_settled(client.clone()))
        .await?;

    let ledger = client.ledger().await?;
    println!(
        "granted {} = completed {} + retried {} + surrendered {} + buried {}",
        ledger.granted, ledger.completed, ledger.retried, ledger.surrendered, ledger.buried
    );
    assert!(ledger.balances());

    let queue = QueueName::default();
    let dead = client.jobs(queue, JobState::Dead, Page::first(10)).await?;
    for view in dead.rows {
        let last = view.job.history.last();
        let reason = last.and_then(|lease| lease.reason.as_deref());
        println!(
            "dead after {} failures: {}",
            view.job.failures,
            reason.unwrap_or("no reason")
        );
    }
    Ok(())
}

/// Resolves when no job waits and none is leased.
async fn all_settled(client: Client) {
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let queues = client.queues().await.unwrap_or_default();
        let open = queues
            .iter()
            .map(|queue| queue.counts.ready + queue.counts.scheduled + queue.counts.leased);
        if !queues.is_empty() && open.sum::<u64>() == 0 {
            return;
        }
    }
}
