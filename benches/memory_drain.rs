//! Memory: a drain through the worker runtime, with a Prometheus recorder, against a bare loop and
//! against a runtime that spawns a task for each job over the same store.
//!
//! ```text
//! cargo bench --bench memory_drain
//! ```
//! The three sides take turns; a ratio is the median of the ratios of the rounds.

mod common;

use std::sync::Arc;

use common::{Stopwatch, Sum, Took, bare_loop, drain, enqueue, median, setting};
use leasehold::job::QueueName;
use leasehold::lease::Nonce;
use leasehold::store::MemoryStore;
use leasehold::store::{
    ClaimQueue, ClaimRequest, Outcome, RequestId, SessionId, SettleRequest, Settlement,
};
use leasehold::{Client, LeaseTerms, Store};
use tokio::sync::{Semaphore, mpsc};

const SLOTS: usize = 16;

fn main() {
    let jobs = setting("JOBS", 100_000, 2_000);
    let rounds = setting("ROUNDS", 15, 1);
    common::record_metrics();
    common::runtime().block_on(async {
        let [mut bare, mut ours, mut spawned] = [const { Vec::new() }; 3];
        for _ in 0..rounds {
            bare.push(bare_loop(jobs).await);
            ours.push(drain(&queued(jobs).await, jobs, SLOTS).await);
            spawned.push(spawn_per_job(&queued(jobs).await, jobs).await);
        }
        println!("{jobs} jobs, {SLOTS} slots, {rounds} rounds");
        for (name, side) in [
            ("bare loop", &bare),
            ("leasehold", &ours),
            ("spawn per job", &spawned),
        ] {
            let rate = median(side.iter().map(|took| took.per_second(jobs)));
            let cpu = median(side.iter().map(|took| took.cpu_per_job(jobs)));
            println!("  {name:<14} {rate:>9.0} jobs/s   {cpu:.2} µs of CPU each");
        }
        let pairs = |others: &[Took], of: fn(Took, usize) -> f64| {
            let pairs = ours.iter().zip(others);
            median(pairs.map(|(a, b)| of(*a, jobs) / of(*b, jobs)))
        };
        for (name, side) in [("bare loop", &bare), ("spawn per job", &spawned)] {
            let rate = pairs(side, Took::per_second);
            let cpu = pairs(side, Took::cpu_per_job);
            println!("  leasehold / {name:<14} rate {rate:.2}   CPU {cpu:.2}");
        }
    });
}

async fn queued(jobs: usize) -> Client {
    let client = Client::new(Arc::new(MemoryStore::new()));
    enqueue(&client, jobs).await;
    client
}

/// The plain way: claim a batch, spawn a task for each job under a semaphore, settle what gathers.
/// It renews nothing and records nothing.
async fn spawn_per_job(client: &Client, jobs: usize) -> Took {
    let store = Arc::clone(client.store());
    let session = store.open_session().await.expect("a session");
    let sum = Sum::default();
    let slots = Arc::new(Semaphore::new(SLOTS));
    let (done, settling) = mpsc::unbounded_channel();
    let watch = Stopwatch::start();
    let settler = tokio::spawn(settle(Arc::clone(&store), session, settling, jobs));
    let (mut claimed, mut seq) = (0, 0);
    while claimed < jobs {
        seq += 1;
        let answer = store.claim(request(session, seq)).await.expect("claimed");
        for grant in &answer.grants {
            claimed += grant.leases.len();
            for lease in &grant.leases {
                let slot = Arc::clone(&slots).acquire_owned().await.expect("open");
                let (receipt, job) = (grant.receipt(lease), Arc::clone(&lease.job));
                let (sum, done) = (sum.clone(), done.clone());
                tokio::spawn(async move {
                    sum.bare(&job.payload).await.expect("done");
                    drop(slot);
                    let outcome = Outcome::Complete { result: None };
                    let _ = done.send(Settlement { receipt, outcome });
                });
            }
        }
    }
    settler.await.expect("no panics");
    let took = watch.stop();
    sum.check(jobs);
    took
}

fn request(session: SessionId, seq: u64) -> ClaimRequest {
    let terms = LeaseTerms::MEDIUM;
    ClaimRequest {
        request: RequestId {
            session,
            lane: 0,
            seq,
        },
        owner: "spawner".into(),
        task: "bench".into(),
        nonce: Nonce::draw().expect("randomness"),
        queues: vec![ClaimQueue {
            queue: QueueName::default(),
            term: terms.term,
            max_lifetime: terms.max_lifetime,
        }],
        max: 1_000,
        admit_suspect: false,
        settle: None,
    }
}

async fn settle(
    store: Arc<dyn Store>,
    session: SessionId,
    mut settling: mpsc::UnboundedReceiver<Settlement>,
    jobs: usize,
) {
    let (mut settled, mut seq) = (0, 0);
    while settled < jobs {
        let mut settlements = Vec::new();
        settled += settling.recv_many(&mut settlements, 1_000).await;
        seq += 1;
        let request = RequestId {
            session,
            lane: 1,
            seq,
        };
        let request = SettleRequest {
            request,
            settlements,
        };
        let verdicts = store.settle(request).await.expect("settled");
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    }
}
