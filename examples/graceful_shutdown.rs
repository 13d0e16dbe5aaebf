//! Draining: what a deploy does to running jobs.
//!
//! Run it: `cargo run --example graceful_shutdown`
//!
//! `.run()` drains on SIGTERM (what a container gets before it is killed) and on Ctrl-C. Here
//! `.run_until` does the same once they run. Set `drain_grace` below the time your supervisor
//! waits before SIGKILL: what is not handed back by then expires instead, one term later. Handlers
//! have three quarters of it here, and all but 5 s of a long one; the rest is for handing back.

use std::time::Duration;

use leasehold::{Client, Context, Failure, Job};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
enum Work {
    /// Ends within the grace.
    Short,
    /// Listens for the drain, and hands its job back.
    Polite,
    /// Listens to nobody, and is dropped when the grace is over.
    Stubborn,
}

impl Job for Work {
    const KIND: &'static str = "work";
}

async fn work(job: Work, ctx: Context, started: mpsc::UnboundedSender<()>) -> Result<(), Failure> {
    started.send(())?;
    match job {
        Work::Short => tokio::time::sleep(Duration::from_millis(300)).await,
        Work::Polite => tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(60)) => {}
            () = ctx.cancelled() => {
                // `is_draining` tells a deploy from a lost lease. Save what is worth saving, then
                // return an error: once told to stop, an error is a surrender, not a failure.
                println!("polite: draining {}", ctx.is_draining());
                ctx.save_checkpoint(&"half done").await?;
                return Err("stopping early".into());
            }
        },
        Work::Stubborn => tokio::time::sleep(Duration::from_secs(60)).await,
    }
    println!("short: done");
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    for job in [Work::Short, Work::Polite, Work::Stubborn] {
        client.enqueue(&job).await?;
    }

    // In production: `.run()`, or your own signal here. This one comes when all three are at work.
    let (started, mut starts) = mpsc::unbounded_channel();
    let signal = async move {
        for _ in 0..3 {
            starts.recv().await;
        }
    };
    let report = client
        .worker()
        .handle(move |job: Work, ctx: Context| work(job, ctx, started.clone()))
        .drain_grace(Duration::from_secs(2))
        .run_until(signal)
        .await?;
    println!(
        "finished {}, unsettled {}",
        report.finished, report.unsettled
    );

    let queue = &client.queues().await?[0];
    println!(
        "completed {}, surrendered {}, expired {}, ready again {}",
        queue.ledger.completed,
        queue.ledger.surrendered,
        queue.ledger.expired(),
        queue.counts.ready
    );
    Ok(())
}
