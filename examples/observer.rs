//! An observer of one's own: every lease that ends by expiry is a crash report.
//!
//! Run it: `cargo run --example observer`
//!
//! The first worker dies with a lease in its hands. Nobody cleans up. The second worker's claim
//! finds the lease overdue, records the expiry, and gets the job.

use std::future::pending;
use std::time::Duration;

use leasehold::inspect::{LeaseFilter, Page};
use leasehold::observe::{Event, Observer};
use leasehold::{Client, Context, Job, LeaseTerms};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
struct Render {
    frames: u64,
}

impl Job for Render {
    const KIND: &'static str = "render";
}

/// Called on the path of the work: it prints, and does nothing slow.
struct Watch;

impl Observer for Watch {
    fn observe(&self, event: &Event<'_>) {
        match event {
            Event::Expired { expiry } => {
                let progress = expiry.progress.as_ref();
                println!(
                    "expired: kind {} owner {} task {} cause {} last progress {} expiries {} now {}",
                    expiry.kind,
                    expiry.owner,
                    expiry.task,
                    expiry.cause.as_str(),
                    progress.map_or(0, |progress| progress.done),
                    expiry.expiries,
                    expiry.state,
                );
            }
            Event::Settled { outcome, job, .. } => {
                println!("settled: {} at attempt {}", outcome.as_str(), job.attempt());
            }
            // The list of events may grow.
            _ => {}
        }
    }
}

async fn seen_progress(client: &Client) -> anyhow::Result<bool> {
    let leases = client
        .leases(LeaseFilter::default(), Page::first(10))
        .await?;
    Ok(leases.rows.iter().any(|lease| lease.progress.is_some()))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?.observer(Watch);
    client.enqueue(&Render { frames: 100 }).await?;
    let terms = LeaseTerms::of_term(Duration::from_secs(3));

    // A worker in a runtime of its own, so that all of it can die at once.
    let doomed = tokio::runtime::Runtime::new()?;
    let (started, mut start) = mpsc::unbounded_channel();
    let hang = move |job: Render, ctx: Context| {
        let started = started.clone();
        async move {
            ctx.progress(40, job.frames, "frames");
            started.send(())?;
            pending::<anyhow::Result<()>>().await
        }
    };
    let worker = client.worker().handle(hang).terms(terms);
    doomed.spawn(worker.owner("doomed").task("deploy-1").run_until(pending()));
    start.recv().await;
    // Progress travels with a renewal: the worker lives until the store has seen it.
    while !seen_progress(&client).await? {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("killed: the worker called doomed");
    doomed.shutdown_background();

    let (done, mut finished) = mpsc::unbounded_channel();
    let render = move |_job: Render, _ctx: Context| {
        let done = done.clone();
        async move { anyhow::Ok(done.send(())?) }
    };
    client
        .worker()
        .handle(render)
        .terms(terms)
        .owner("heir")
        .run_until(async move {
            finished.recv().await;
        })
        .await?;

    let ledger = client.queues().await?[0].ledger;
    println!(
        "released {}, expired {}",
        ledger.released(),
        ledger.expired()
    );
    Ok(())
}
