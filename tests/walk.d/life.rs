//! The program that `tests/walk` traces: one job's life, on the store that the URL names.
//!
//! `life URL` enqueues a plain job, which is claimed, run, renewed and completed. With
//! `life URL retried` its first attempt fails. `life_begins` and `life_ends` mark the part that
//! counts: before it the worker has started, and has completed a job that opened connections and
//! created the queue.

#![allow(clippy::disallowed_methods, reason = "it prints the real time")]

use std::time::{Duration, SystemTime};

use leasehold::{Client, Context, Failure, Job, LeaseTerms, RetryPolicy};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// Time for a settlement to be answered, and for the worker to wait again.
const QUIET: Duration = Duration::from_millis(400);
/// The lease is renewed every third of this.
const TERM: Duration = Duration::from_millis(900);

#[derive(Serialize, Deserialize)]
enum Step {
    /// Completes at once.
    Prepare,
    /// Is renewed, and completes.
    Live,
    /// Fails first.
    LiveTwice,
}

impl Job for Step {
    const KIND: &'static str = "step";
}

async fn work(step: Step, ctx: Context, done: mpsc::Sender<()>) -> Result<(), Failure> {
    match step {
        Step::Prepare => {}
        Step::LiveTwice if ctx.attempt() == 1 => return Err("the first attempt".into()),
        // Longer than the term: without a renewal the lease would expire.
        Step::Live | Step::LiveTwice => tokio::time::sleep(TERM * 4 / 3).await,
    }
    let _ = done.send(()).await;
    Ok(())
}

#[inline(never)]
fn life_begins() {
    print_time();
}

#[inline(never)]
fn life_ends() {
    print_time();
}

/// In seconds, for what is recorded outside of this process.
fn print_time() {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    println!("{:.6}", time.unwrap_or_default().as_secs_f64());
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().ok_or("which store?")?;
    let retried = arguments.next().is_some();
    let client = Client::open(&url).await?;
    let before = settled(&client).await?;
    let (done, mut is_done) = mpsc::channel(1);

    let step = if retried { Step::LiveTwice } else { Step::Live };
    let life = async {
        let prepared = client.enqueue(&Step::Prepare).await;
        is_done.recv().await;
        tokio::time::sleep(QUIET).await;
        life_begins();
        let enqueued = client.enqueue(&step).await;
        is_done.recv().await;
        tokio::time::sleep(QUIET).await;
        life_ends();
        prepared.and(enqueued).expect("both are enqueued");
    };
    let report = client
        .worker()
        .handle(move |step: Step, ctx: Context| work(step, ctx, done.clone()))
        .slots(1)
        .prefetch(0)
        .terms(LeaseTerms::of_term(TERM))
        .retry(RetryPolicy::exponential(
            Duration::from_millis(1),
            Duration::from_millis(1),
        ))
        .run_until(life)
        .await?;

    let after = settled(&client).await?;
    assert_eq!(report.finished, 2 + u64::from(retried));
    assert_eq!(after.0 - before.0, 2, "completed");
    assert_eq!(after.1 - before.1, u64::from(retried), "retried");
    Ok(())
}

/// How many leases ended with a completed job, and how many with a retry.
async fn settled(client: &Client) -> leasehold::Result<(u64, u64)> {
    let queues = client.queues().await?;
    let ledger = queues.first().map(|queue| queue.ledger);
    Ok(ledger.map_or((0, 0), |ledger| (ledger.completed, ledger.retried)))
}
