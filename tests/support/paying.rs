//! A worker whose handler pays, and the job it is paid for: kept for an hour, so that it can be
//! asked what became of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::inspect::Ledger;
use leasehold::job::JobOptions;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, RetryPolicy};
use serde::{Deserialize, Serialize};

/// Only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize, Clone, Default)]
pub struct Pay {
    pub n: u64,
}

impl Job for Pay {
    const KIND: &'static str = "pay";

    fn options(&self) -> JobOptions {
        let mut options = JobOptions::default();
        options.retention = Some(Duration::from_secs(3600));
        options
    }
}

/// Runs the handler until the ledger says so. The handler gets the number of its run.
pub async fn run<F, Fut>(
    client: &Client,
    slots: usize,
    handler: F,
    enough: impl Fn(&Ledger) -> bool + Sync,
) -> Ledger
where
    F: Fn(Pay, Context, usize) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    let runs = AtomicUsize::new(0);
    let handler =
        move |job: Pay, ctx: Context| handler(job, ctx, runs.fetch_add(1, Ordering::SeqCst));
    let done = async {
        let start = Instant::now();
        loop {
            let ledger = client.ledger().await.unwrap();
            if enough(&ledger) {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{ledger:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(slots)
        .terms(LeaseTerms::of_term(Duration::from_secs(10)))
        .retry(RetryPolicy::constant(Duration::from_millis(1)));
    let report = worker.run_until(done).await.unwrap();
    assert_eq!(report.unsettled, 0);
    let ledger = client.ledger().await.unwrap();
    assert_eq!(ledger.live, 0);
    assert!(ledger.balances(), "{ledger:?}");
    ledger
}
