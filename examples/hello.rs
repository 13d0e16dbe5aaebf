//! One job, one handler, one worker, on a SQLite file.
//!
//! Run it: `cargo run --example hello`
//!
//! A real worker would end with `.run().await`, which works until SIGTERM or Ctrl-C. This one stops
//! by itself, when nothing is left to do.

use std::time::Duration;

use leasehold::{Client, Context, Job};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
}

impl Job for Greet {
    const KIND: &'static str = "greet";
}

async fn greet(job: Greet, ctx: Context) -> anyhow::Result<()> {
    println!("hello {} (attempt {})", job.name, ctx.attempt());
    // Ok completes the job; Err retries it; a crash lets the lease expire, and another worker runs
    // it.
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("jobs.db");
    // A relative path has two slashes (`sqlite://jobs.db`), an absolute one three.
    let client = Client::open(&format!("sqlite://{}", file.display())).await?;

    client
        .enqueue(&Greet {
            name: "world".into(),
        })
        .await?;

    let report = client
        .worker()
        .handle(greet)
        .run_until(all_settled(client.clone()))
        .await?;
    println!("handlers run: {}", report.finished);
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
