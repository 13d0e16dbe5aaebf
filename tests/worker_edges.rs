//! The worker at its edges: user code that panics where nobody expects it, parts that die, futures
//! that are dropped half way, settings and wishes that go to the limit.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests measure real time, and panic on purpose"
)]

mod support;

use std::fmt;
use std::future::{Future, pending};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};

use leasehold::clock::ManualClock;
use leasehold::executor::SameRuntime;
use leasehold::inspect::QueueView;
use leasehold::job::{JobOptions, QueueName};
use leasehold::lease::Nonce;
use leasehold::observe::Event;
use leasehold::store::{ClaimQueue, ClaimRequest, RequestId};
use leasehold::{
    Client, Context, ErrorKind, Failure, FencingToken, Job, LeaseTerms, MemoryStore, NewJob,
    RetryPolicy, Store, Verb, WorkerBuilder,
};
use serde::{Deserialize, Serialize};
use support::{Fate, Faulty};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize, Clone)]
struct Add {
    n: usize,
}

impl Job for Add {
    const KIND: &'static str = "add";
}

/// Longer than anything here takes, on a machine that has better things to do.
const LIMIT: Duration = Duration::from_secs(30);

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn client() -> Client {
    Client::new(memory())
}

fn adds(count: usize) -> Vec<NewJob> {
    (0..count)
        .map(|n| NewJob::of(&Add { n }).unwrap())
        .collect()
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, what)
        .await
        .expect("it never happened")
}

/// Resolves once `check` is true.
async fn true_soon(check: impl Fn() -> bool) {
    soon(async {
        while !check() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Resolves once `check` says so of the queue.
async fn until(client: &Client, check: impl Fn(&QueueView) -> bool) {
    soon(async {
        while !client.queues().await.unwrap().first().is_some_and(&check) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

async fn completed(client: &Client, jobs: u64) {
    until(client, |queue| queue.ledger.completed >= jobs).await;
}

/// Why each lease of a job ended.
async fn reasons(client: &Client, id: leasehold::JobId) -> Vec<String> {
    let job = client.job(id).await.unwrap().unwrap().job;
    let ends = job.history.iter();
    ends.map(|end| end.reason.clone().unwrap_or_default())
        .collect()
}

async fn quick(_: Add, _: Context) -> Result<(), Failure> {
    Ok(())
}

#[test]
fn an_enqueue_outside_of_a_runtime_does_not_stop_those_inside() {
    let client = client();
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let job = Add { n: 0 };
        let mut enqueue = std::pin::pin!(client.enqueue(&job));
        let _ = enqueue
            .as_mut()
            .poll(&mut std::task::Context::from_waker(Waker::noop()));
    }));
    assert!(outside.is_err(), "there is no runtime to do it on");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime
        .block_on(async { soon(client.enqueue(&Add { n: 1 })).await })
        .unwrap();
}
