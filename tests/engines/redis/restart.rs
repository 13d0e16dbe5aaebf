//! A server that is killed and started again, every few seconds, under load: nothing that was
//! acknowledged is lost, and the workers go on by themselves.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::inspect::Ledger;
use leasehold::worker::DrainReport;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob};
use serde::{Deserialize, Serialize};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::redis::support::redis::{AOF, Cluster, PATIENCE, STEADY, SentinelSet, Standalone};

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

/// Producers and a pool, at work on a server until they are stopped.
struct Load {
    client: Client,
    books: Arc<Books>,
    stop: CancellationToken,
    producers: JoinSet<()>,
    end: CancellationToken,
    pool: JoinHandle<leasehold::Result<DrainReport>>,
}

impl Load {
    async fn start(url: &str) -> Self {
        let client = Client::open(url).await.unwrap();
        let books = Arc::new(Books::default());
        let sleepers = (0..SLEEPERS).map(|n| {
            let job = NewJob::of(&Work { n: u64::MAX - n }).unwrap();
            job.delay(Duration::from_secs(3_600))
        });
        client.enqueue_many(sleepers).await.unwrap();
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
        let end = CancellationToken::new();
        let pool = pool
            .handle(handler)
            .run_until(end.clone().cancelled_owned());
        let stop = CancellationToken::new();
        let mut producers = JoinSet::new();
        for _ in 0..4 {
            producers.spawn(produce(client.clone(), Arc::clone(&books), stop.clone()));
        }
        Self {
            client,
            books,
            stop,
            producers,
            end,
            pool: tokio::spawn(pool),
        }
    }

    /// Waits until the workers have got on with it.
    async fn goes_on(&self) {
        let before = self.books.done();
        until("the workers go on", async || {
            self.books.done() >= before + 100
        })
        .await;
    }

    /// Lets the queue drain and the pool end. How many acknowledged jobs are lost, and the books of
    /// the store.
    async fn finish(self) -> (u64, Ledger) {
        self.stop.cancel();
        self.producers.join_all().await;
        let look = async || self.client.queues().await.unwrap().remove(0);
        until("the queue drains", async || {
            let counts = look().await.counts;
            counts.ready + counts.leased == 0
        })
        .await;
        let queue = look().await;
        assert!(!self.pool.is_finished(), "the same workers, to the end");
        self.end.cancel();
        self.pool.await.unwrap().unwrap();

        let acknowledged = self.books.acknowledged.lock().unwrap();
        let done = self.books.done.lock().unwrap();
        let lost = acknowledged.difference(&done).count() as u64;
        let slept = SLEEPERS - queue.counts.scheduled;
        println!(
            "{} acknowledged, {} unknown, {} done, lost {lost} and {slept} of {SLEEPERS} that \
             wait: {:?}",
            acknowledged.len(),
            self.books.unknown.load(Ordering::Relaxed),
            done.len(),
            queue.ledger
        );
        (lost + slept, queue.ledger)
    }
}

/// Kills and restarts a server so often, each time when it has been at work for a while.
async fn run(lines: &[&str], kills: usize) -> (u64, Ledger) {
    let mut one = Standalone::start(lines);
    let load = Load::start(one.url()).await;
    for _ in 0..kills {
        tokio::time::sleep(Duration::from_secs(2)).await;
        load.goes_on().await;
        tokio::task::block_in_place(|| one.server.restart());
    }
    load.goes_on().await;
    load.finish().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_that_writes_every_call_to_disk_loses_nothing_to_kills() {
    let (lost, ledger) = run(AOF, if crate::redis::in_campaign() { 25 } else { 4 }).await;
    assert_eq!(lost, 0);
    assert!(ledger.balances(), "{ledger:?}");
    assert_eq!(ledger.enqueued, ledger.completed + SLEEPERS, "{ledger:?}");
}

/// Control arm: it is the disk that keeps them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_that_writes_nothing_to_disk_loses_jobs_to_a_kill() {
    let (lost, _) = run(&[], 1).await;
    assert!(lost >= SLEEPERS);
}

/// A replica may lack the last moments of its primary; the workers go on with what it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn workers_go_on_through_a_failover_by_sentinels() {
    let mut set = SentinelSet::start(&[]);
    let load = Load::start(&set.url()).await;
    load.goes_on().await;
    tokio::task::block_in_place(|| {
        set.servers[0].kill();
        set.failed_over(set.servers[0].port());
    });
    load.goes_on().await;
    let (_, ledger) = load.finish().await;
    assert!(ledger.balances(), "{ledger:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn workers_go_on_through_a_failover_of_a_cluster() {
    let mut cluster = Cluster::start(&[]);
    let load = Load::start(&cluster.url()).await;
    load.goes_on().await;
    tokio::task::block_in_place(|| {
        // The partition's slot, by the name that is hashed.
        let key = "{leasehold:default:0}";
        let old = cluster.owner_of(key);
        cluster.nodes[old].kill();
        cluster.failed_over(key, old);
    });
    load.goes_on().await;
    let (_, ledger) = load.finish().await;
    assert!(ledger.balances(), "{ledger:?}");
}

/// A slot moves key by key, while its queue is worked: calls that would see half of a partition are
/// refused as a whole, and go on where it has moved to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn workers_go_on_while_their_slot_moves() {
    let key = "{leasehold:default:0}";
    let cluster = Cluster::start(STEADY);
    let load = Load::start(&cluster.url()).await;
    load.goes_on().await;
    let source = cluster.owner_of(key);
    let target = (source + 1) % 3;
    // There and back: from here on both have the functions.
    for (from, to) in [(source, target), (target, source)] {
        tokio::task::block_in_place(|| cluster.move_slot(key, from, to));
        load.goes_on().await;
    }
    let primaries = [&cluster.nodes[source], &cluster.nodes[target]];
    for node in primaries {
        node.tell::<()>(&["CONFIG", "RESETSTAT"]);
    }
    for (from, to) in [(source, target), (target, source), (source, target)] {
        tokio::task::block_in_place(|| cluster.move_slot(key, from, to));
        load.goes_on().await;
    }
    let (lost, ledger) = load.finish().await;
    assert_eq!(lost, 0);
    assert!(ledger.balances(), "{ledger:?}");
    assert_eq!(ledger.enqueued, ledger.completed + SLEEPERS, "{ledger:?}");
    let mut refused = 0;
    for node in primaries {
        let stats = node
            .info(&["INFO", "commandstats"], "cmdstat_fcall")
            .unwrap();
        let count = |name: &str| -> u64 {
            let mut parts = stats.split(',').filter_map(|part| part.split_once('='));
            let found = parts.find(|(is, _)| *is == name);
            found.unwrap().1.parse().unwrap()
        };
        assert_eq!(count("failed_calls"), 0, "a function failed: {stats}");
        refused += count("rejected_calls");
    }
    // Control arm: there were calls while it moved.
    assert!(refused > 0);
}
