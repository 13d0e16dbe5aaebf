//! Around the handlers of a worker: what they share, a layer that logs, one that turns jobs away,
//! and a hook for jobs that die.
//!
//! Run it: `cargo run --example layers`

#![allow(clippy::disallowed_methods, reason = "an example measures real time")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::layer::{Layer, Next};
use leasehold::{Client, Context, Failure, Job, State, async_trait};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Charge {
    customer: String,
    cents: u64,
}

impl Job for Charge {
    const KIND: &'static str = "charge";
}

/// What handlers share: in real life a connection pool, a configuration.
#[derive(Clone, Default)]
struct Till {
    cents: Arc<AtomicU64>,
}

async fn charge(job: Charge, _: Context, State(till): State<Till>) -> Result<(), Failure> {
    till.cents.fetch_add(job.cents, Ordering::Relaxed);
    Ok(())
}

/// Says how each run went.
struct Logged;

#[async_trait]
impl Layer for Logged {
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
        let start = Instant::now();
        let result = next.run().await;
        let how = match &result {
            Ok(()) => "done".to_owned(),
            Err(failure) => failure.reason(),
        };
        let (kind, in_time) = (&ctx.job().kind, start.elapsed() < Duration::from_secs(5));
        println!(
            "{kind}, attempt {}: {how} (in time: {in_time})",
            ctx.attempt()
        );
        result
    }
}

/// Lets no charge of zero through to any handler.
struct NothingForFree;

#[async_trait]
impl Layer for NothingForFree {
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
        let charge: Charge = serde_json::from_slice(&ctx.job().payload)?;
        if charge.cents == 0 {
            return Err(Failure::bury("a charge of nothing"));
        }
        next.run().await
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    let charges = [("ann", 1_200), ("bob", 0), ("cid", 300)];
    let charges = charges.map(|(customer, cents)| Charge {
        customer: customer.into(),
        cents,
    });
    client.enqueue_many(charges).await?;

    let till = Till::default();
    let worker = client
        .worker()
        .handle(charge)
        .state(till.clone()) // without it the worker would not start: `charge` takes it
        .layer(Logged) // the outermost: it sees what the next one turns away
        .layer(NothingForFree)
        .on_dead(|death| async move {
            println!("dead: {}: {}", death.kind, death.reason);
        })
        .slots(1)
        .start()?;

    // A worker in the background can be asked how it is.
    while worker.stats().finished < 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    println!("ready: {}", worker.health().is_ready());
    worker.drain();
    let report = worker.await?;
    println!("{} runs, {} unsettled", report.finished, report.unsettled);
    println!("in the till: {} cents", till.cents.load(Ordering::Relaxed));
    Ok(())
}
