//! One worker of `leasehold bench --regime`: a process of its own, as in production.
//!
//! It says `ready` on stdout once its store is open, drains when its stdin closes, and then tells
//! which jobs it ran and how long each had waited, one line of JSON.

use std::io::Read as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::{Done, Trouble, out};
use leasehold::clock::{Clock as _, SystemClock};
use leasehold::{Client, Context, Failure, Job};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[arg(long)]
    slots: usize,
    #[arg(long)]
    job_ms: u64,
}

/// The job of the regime: its number, and when it was about to be enqueued.
#[derive(Serialize, Deserialize)]
pub(super) struct Stamped {
    pub(super) n: u64,
    /// Microseconds on this machine's clock.
    pub(super) sent: u64,
    pub(super) pad: String,
}

impl Job for Stamped {
    const KIND: &'static str = "bench.regime";
    const QUEUE: &'static str = "bench-regime";
}

/// What one worker ran: the job's number and its wait in microseconds, in order.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Runs(pub(super) Vec<(u64, u64)>);

pub(super) async fn run(args: &Args, url: &str) -> Done {
    let closing = stdin_closes();
    let client = Client::open(url).await?;
    let runs: Arc<Mutex<Runs>> = Arc::default();
    let takes = Duration::from_millis(args.job_ms);
    let handler = {
        let runs = Arc::clone(&runs);
        move |job: Stamped, _: Context| {
            let waited = SystemClock.now().as_micros().saturating_sub(job.sent);
            let mut runs = runs.lock().unwrap_or_else(PoisonError::into_inner);
            runs.0.push((job.n, waited));
            async move {
                tokio::time::sleep(takes).await;
                Ok::<(), Failure>(())
            }
        }
    };
    let worker = client.worker().handle(handler).slots(args.slots).start()?;
    out::data("ready")?;
    let _ = closing.await;
    worker.drain();
    worker.await?;
    let runs = runs.lock().unwrap_or_else(PoisonError::into_inner);
    let runs = serde_json::to_string(&*runs)
        .map_err(|error| Trouble::Failed(format!("bench: {error}")))?;
    out::data(&runs)?;
    Ok(())
}

/// Resolves when the bench is gone or wants no more.
fn stdin_closes() -> oneshot::Receiver<()> {
    let (open, closing) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let mut byte = [0];
        while matches!(std::io::stdin().lock().read(&mut byte), Ok(1)) {}
        drop(open);
    });
    closing
}
