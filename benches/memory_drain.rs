//! Memory: a drain through the worker runtime, with a Prometheus recorder, against a bare loop and
//! against a runtime that spawns a task for each job over the same store.
//!
//! ```text
//! cargo bench --bench memory_drain
//! ```
//! The three sides take turns; a ratio is the median of the ratios of the rounds.

#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Sum, bare_loop, drain, enqueue, median, per_second, setting};
use leasehold::job::QueueName;
use leasehold::lease::Nonce;
use leasehold::store::{
    ClaimQueue, ClaimRequest, Outcome, RequestId, SessionId, SettleRequest, Settlement,
};
use leasehold::{Client, LeaseTerms, MemoryStore, Store};
use tokio::sync::{Semaphore, mpsc};

const SLOTS: usize = 16;

fn main() {
    let jobs = setting("JOBS", 100_000, 2_000);
    let rounds = setting("ROUNDS", 15, 1);
    common::record_metrics();
    common::runtime().block_on(async {
        let (mut ours, mut bare, mut spawned) = (vec![], vec![], vec![]);
        for _ in 0..rounds {
            bare.push(per_second(jobs, bare_loop(jobs).await));
            ours.push(per_second(
                jobs,
                drain(&queued(jobs).await, jobs, SLOTS).await,
            ));
            spawned.push(per_second(
                jobs,
                spawn_per_job(&queued(jobs).await, jobs).await,
            ));
        }
        let ratio = |others: &[f64]| median(ours.iter().zip(others).map(|(a, b)| a / b));
        println!("{jobs} jobs, {SLOTS} slots, {rounds} rounds");
        println!("  bare loop        {:>10.0} jobs/s", median(bare.clone()));
        println!("  leasehold        {:>10.0} jobs/s", median(ours.clone()));
        println!(
            "  spawn per job    {:>10.0} jobs/s",
            median(spawned.clone())
        );
        println!("  leasehold / bare loop      {:.2}", ratio(&bare));
        println!("  leasehold / spawn per job  {:.2}", ratio(&spawned));
    });
}

async fn queued(jobs: usize) -> Client {
    let client = Client::new(Arc::new(MemoryStore::new()));
    enqueue(&client, jobs).await;
    client
}

/// The plain way: claim a batch, spawn a task for each job under a semaphore, settle what gathers.
/// It renews nothing and records nothing.
async fn spawn_per_job(client: &Client, jobs: usize) -> Duration {
    let store = Arc::clone(client.store());
    let session = store.open_session().await.expect("a session");
    let sum = Sum::default();
    let slots = Arc::new(Semaphore::new(SLOTS));
    let (done, settling) = mpsc::unbounded_channel();
    let began = Instant::now();
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
    let took = began.elapsed();
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
