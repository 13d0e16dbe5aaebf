//! A job that outlives its lease: progress, checkpoints, and going on where another run stopped.
//!
//! Run it: `cargo run --example long_job`
//!
//! Half way through, an operator revokes the lease. The first run is fenced at its next checkpoint
//! and ends; the second starts from what was saved, under a larger token.

use std::time::Duration;

use leasehold::{Client, Context, Failure, Job, LeaseTerms};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
struct Import {
    rows: u64,
}

impl Job for Import {
    const KIND: &'static str = "import";
}

/// What a run leaves for the next one.
#[derive(Default, Serialize, Deserialize)]
struct Cursor {
    row: u64,
}

async fn import(job: Import, ctx: Context, rows: mpsc::Sender<u64>) -> Result<(), Failure> {
    let mut cursor: Cursor = ctx.last_checkpoint()?.unwrap_or_default();
    if let Some(saved) = ctx.saved_checkpoint() {
        assert!(
            ctx.token() > saved.token,
            "a later claim has a larger token"
        );
        println!("resumed at row {}, saved under an older token", cursor.row);
    }
    while cursor.row < job.rows {
        // Told to stop (lost, cancelled, draining): whatever was saved is the next run's start.
        if ctx.is_cancelled() {
            return Err("told to stop".into());
        }
        // The work. It may be done twice, if the run ends before the checkpoint: at least once.
        tokio::time::sleep(Duration::from_millis(20)).await;
        cursor.row += 1;
        rows.send(cursor.row).await?;

        // Progress is free: it travels with the next renewal. A handler with a stall limit that
        // shows none for that long loses its lease, however faithfully it is renewed.
        ctx.progress(cursor.row, job.rows, "rows");
        // A checkpoint is a call to the store, and refused if the lease is lost: `?` ends the run.
        if cursor.row.is_multiple_of(5) {
            ctx.save_checkpoint(&cursor).await?;
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    let id = client.enqueue(&Import { rows: 30 }).await?.id();

    // Room for one row: while the operator is busy, the handler gets no further than the next but
    // one.
    let (sender, mut rows) = mpsc::channel(1);
    let operator = client.clone();
    let stop = async move {
        let mut done = 0;
        let mut revoked = false;
        while let Some(row) = rows.recv().await {
            done += 1;
            if row == 12 && !revoked {
                revoked = true;
                let operator = operator.operator("ops@example.org").because("a test");
                let answer = operator.revoke(id).await;
                println!("revoked {} lease", answer.map_or(0, |done| done.done));
            }
            if row == 30 {
                break;
            }
        }
        println!("rows worked: {done}, of which twice: {}", done - 30);
    };

    client
        .worker()
        .handle(move |job: Import, ctx: Context| import(job, ctx, sender.clone()))
        .slots(1)
        .stall_limit(Duration::from_secs(5))
        .terms(LeaseTerms::SHORT)
        .run_until(stop)
        .await?;

    let ledger = client.queues().await?[0].ledger;
    println!(
        "granted {}, revoked {}, completed {}, fenced calls {}",
        ledger.granted, ledger.revoked, ledger.completed, ledger.fenced
    );
    Ok(())
}
