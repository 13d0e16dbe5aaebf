//! The worker runtime over the memory store, on real time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Client, Context, Failure, Job, LeaseTerms, MemoryStore, NewJob, RetryPolicy};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

#[derive(Serialize, Deserialize)]
struct Add {
    n: usize,
}

impl Job for Add {
    const KIND: &'static str = "add";
}

fn client() -> Client {
    Client::new(Arc::new(MemoryStore::new()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_job_is_handled_once() {
    let client = client();
    let jobs = (0..1_000)
        .map(|n| NewJob::of(&Add { n }).unwrap())
        .collect();
    client.enqueue_all(jobs).await.unwrap();
    let sum = Arc::new(AtomicUsize::new(0));
    let runs = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(Notify::new());
    let handler = {
        let (sum, runs, done) = (sum.clone(), runs.clone(), done.clone());
        move |job: Add, _ctx: Context| {
            let (sum, runs, done) = (sum.clone(), runs.clone(), done.clone());
            async move {
                sum.fetch_add(job.n, Ordering::SeqCst);
                if runs.fetch_add(1, Ordering::SeqCst) + 1 == 1_000 {
                    done.notify_one();
                }
                Ok::<(), Failure>(())
            }
        }
    };
    let report = client
        .worker()
        .handle(handler)
        .slots(8)
        .run_until(async move { done.notified().await })
        .await
        .unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1_000);
    assert_eq!(sum.load(Ordering::SeqCst), 499_500);
    assert_eq!(report.unsettled, 0);
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!(
        (ledger.granted, ledger.completed, ledger.live),
        (1_000, 1_000, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_is_retried_and_then_buried() {
    let client = client();
    client.enqueue(&Add { n: 1 }).await.unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let handler = move |_: Add, _: Context| {
        let runs = counted.clone();
        async move {
            runs.fetch_add(1, Ordering::SeqCst);
            Err::<(), _>("no luck")
        }
    };
    let watch = client.clone();
    let until_dead = async move {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            if watch.queues().await.unwrap()[0].counts.dead == 1 {
                return;
            }
        }
    };
    client
        .worker()
        .handle(handler)
        .max_failures(3)
        .retry(RetryPolicy::constant(Duration::from_millis(5)))
        .terms(LeaseTerms::of_term(Duration::from_secs(2)))
        .run_until(until_dead)
        .await
        .unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    let queue = &client.queues().await.unwrap()[0];
    assert_eq!((queue.ledger.retried, queue.ledger.buried), (2, 1));
    assert!(queue.ledger.balances());
}
