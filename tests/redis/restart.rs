//! A server that is killed and started again, every few seconds, under load: nothing that was
//! acknowledged is lost, and the workers go on by themselves.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::inspect::QueueView;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::support::redis::{AOF, PATIENCE, Standalone};

#[derive(Serialize, Deserialize)]
struct Work {
    n: u64,
}

impl Job for Work {
    const KIND: &'static str = "work";
}

/// Jobs that are due long after the test.
const SLEEPERS: u64 = 100;

/// What is known of the jobs: `n` of those that were acknowledged, and of those that ran.
#[derive(Default)]
struct Books {
    next: AtomicU64,
    unknown: AtomicU64,
    acknowledged: Mutex<HashSet<u64>>,
    done: Mutex<HashSet<u64>>,
}

impl Books {
    fn done(&self) -> usize {
        self.done.lock().unwrap().len()
    }
}

async fn produce(client: Client, books: Arc<Books>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let n = books.next.fetch_add(1, Ordering::Relaxed);
        match client.enqueue(&Work { n }).await {
            Ok(_) => {
                books.acknowledged.lock().unwrap().insert(n);
            }
            Err(_) => {
                books.unknown.fetch_add(1, Ordering::Relaxed);
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits for a fact that only a hang keeps from coming true.
async fn until(what: &str, mut fact: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !fact().await {
        assert!(
            start.elapsed() < PATIENCE,
            "{what}: not within {PATIENCE:?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

struct Outcome {
    lost: u64,
    queue: QueueView,
}

/// Kills and restarts a server so often, each time when it has been at work for a while.
async fn run(lines: &[&str], kills: usize) -> Outcome {
    let mut one = Standalone::start(lines);
    let client = Client::open(one.url()).await.unwrap();
    let books = Arc::new(Books::default());
    let sleepers = (0..SLEEPERS).map(|n| {
        let job = NewJob::of(&Work { n: u64::MAX - n }).unwrap();
        job.delay(Duration::from_secs(3_600))
    });
    client.enqueue_all(sleepers.collect()).await.unwrap();

    let counted = Arc::clone(&books);
    let handler = move |job: Work, _: Context| {
        let books = Arc::clone(&counted);
        async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            books.done.lock().unwrap().insert(job.n);
            Ok::<(), Failure>(())
        }
    };
    let pool = client.worker().slots(16).terms(LeaseTerms::SHORT);
    let ended = CancellationToken::new();
    let pool = pool
        .handle(handler)
        .run_until(ended.clone().cancelled_owned());
    let pool = tokio::spawn(pool);
    let stop = CancellationToken::new();
    let mut producers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        producers.spawn(produce(client.clone(), Arc::clone(&books), stop.clone()));
    }

    for _ in 0..kills {
        let before = books.done();
        tokio::time::sleep(Duration::from_secs(2)).await;
        until("the workers go on", async || books.done() >= before + 100).await;
        tokio::task::block_in_place(|| one.server.restart());
    }
    let before = books.done();
    until("the workers go on", async || books.done() >= before + 100).await;
    stop.cancel();
    producers.join_all().await;
    let look = async || client.queues().await.unwrap().remove(0);
    until("the queue drains", async || {
        let counts = look().await.counts;
        counts.ready + counts.leased == 0
    })
    .await;
    let queue = look().await;
    assert!(!pool.is_finished(), "the same workers, to the end");
    ended.cancel();
    pool.await.unwrap().unwrap();

    let acknowledged = books.acknowledged.lock().unwrap();
    let done = books.done.lock().unwrap();
    let lost = acknowledged.difference(&done).count() as u64;
    let slept = SLEEPERS - queue.counts.scheduled;
    println!(
        "{kills} kills, {} acknowledged, {} unknown, {} done, lost {lost} and {slept} of {SLEEPERS} \
         that wait: {:?}",
        acknowledged.len(),
        books.unknown.load(Ordering::Relaxed),
        done.len(),
        queue.ledger
    );
    Outcome {
        lost: lost + slept,
        queue,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_that_writes_every_call_to_disk_loses_nothing_to_kills() {
    let campaign = std::env::var("LEASEHOLD_CAMPAIGN").is_ok_and(|value| value == "1");
    let outcome = run(AOF, if campaign { 25 } else { 4 }).await;
    assert_eq!(outcome.lost, 0);
    let ledger = outcome.queue.ledger;
    assert!(ledger.balances(), "{ledger:?}");
    assert_eq!(ledger.enqueued, ledger.completed + SLEEPERS, "{ledger:?}");
}

/// Control arm: it is the disk that keeps them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_that_writes_nothing_to_disk_loses_jobs_to_a_kill() {
    assert!(run(&[], 1).await.lost >= SLEEPERS);
}
