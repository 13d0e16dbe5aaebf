//! A long queue costs no more than a short one: CPU time per job with a million and with a thousand
//! jobs ready.
//!
//! ```text
//! cargo bench --bench queue_depth
//! ```
//! A hundred jobs are enqueued, claimed and settled at a time, so that the depth stays. The two
//! depths take turns; figures are medians of the rounds. `LEASEHOLD_BENCH_DEPTH` is the larger one.

mod common;

use std::sync::Arc;

use common::{cpu_time, job, median, setting};
use leasehold::job::QueueName;
use leasehold::lease::Nonce;
use leasehold::store::MemoryStore;
use leasehold::store::{
    ClaimQueue, ClaimRequest, EnqueueRequest, Outcome, RequestId, SessionId, SettleRequest,
    Settlement,
};
use leasehold::{Client, JobId, LeaseTerms, Store};

const SHORT: usize = 1_000;
const STEP: usize = 100;

fn main() {
    let jobs = setting("JOBS", 20_000, 500);
    let rounds = setting("ROUNDS", 9, 1);
    let depth = setting("DEPTH", 1_000_000, 5_000);
    let dir = tempfile::tempdir().expect("a directory");
    common::runtime().block_on(async {
        println!("{jobs} jobs a round, {rounds} rounds; CPU time per job in µs");
        let memory = [
            Arc::new(MemoryStore::new()) as Arc<dyn Store>,
            Arc::new(MemoryStore::new()),
        ];
        compare("memory", memory, depth, jobs, rounds).await;
        let mut sqlite = Vec::new();
        for name in ["short", "long"] {
            let url = format!("sqlite://{}", dir.path().join(name).display());
            let client = Client::open(&url).await.expect("a store");
            sqlite.push(Arc::clone(client.store()));
        }
        let sqlite: [Arc<dyn Store>; 2] = sqlite.try_into().ok().expect("two");
        compare("sqlite", sqlite, depth, jobs, rounds).await;
    });
}

async fn compare(
    name: &str,
    [short, long]: [Arc<dyn Store>; 2],
    depth: usize,
    jobs: usize,
    rounds: usize,
) {
    let mut short = Side::new(short, SHORT).await;
    let mut long = Side::new(long, depth).await;
    let (mut shorts, mut longs) = (vec![], vec![]);
    for _ in 0..rounds {
        shorts.push(short.work(jobs).await);
        longs.push(long.work(jobs).await);
    }
    let ratio = median(longs.iter().zip(&shorts).map(|(long, short)| long / short));
    println!(
        "  {name}  {SHORT} ready {:>6.2}   {depth} ready {:>6.2}   ratio {ratio:.2}",
        median(shorts),
        median(longs),
    );
}

/// A store whose queue has a certain depth.
struct Side {
    store: Arc<dyn Store>,
    session: SessionId,
    seq: u64,
}

impl Side {
    async fn new(store: Arc<dyn Store>, depth: usize) -> Self {
        let session = store.open_session().await.expect("a session");
        let mut side = Self {
            store,
            session,
            seq: 0,
        };
        for from in (0..depth).step_by(SHORT) {
            side.enqueue(SHORT.min(depth - from)).await;
        }
        side
    }

    fn request(&mut self, lane: u32) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane,
            seq: self.seq,
        }
    }

    async fn enqueue(&mut self, jobs: usize) {
        let jobs = (0..jobs).map(|n| (JobId::generate(), job(n)));
        let jobs = Arc::new(jobs.collect());
        let request = self.request(0);
        let request = EnqueueRequest { request, jobs };
        self.store.enqueue(request).await.expect("enqueued");
    }

    /// Takes this many jobs through the queue. Returns the CPU time of each, in microseconds.
    async fn work(&mut self, jobs: usize) -> f64 {
        let before = cpu_time();
        let mut settled = 0;
        while settled < jobs {
            self.enqueue(STEP).await;
            let terms = LeaseTerms::MEDIUM;
            let request = ClaimRequest {
                request: self.request(1),
                owner: "bench".into(),
                task: "bench".into(),
                nonce: Nonce::draw().expect("randomness"),
                queues: vec![ClaimQueue {
                    queue: QueueName::default(),
                    term: terms.term,
                    max_lifetime: terms.max_lifetime,
                }],
                max: STEP,
                admit_suspect: false,
            };
            let claimed = self.store.claim(request).await.expect("claimed");
            let settlements: Vec<_> = claimed
                .grants
                .iter()
                .flat_map(|grant| grant.leases.iter().map(|lease| grant.receipt(lease)))
                .map(|receipt| Settlement {
                    receipt,
                    outcome: Outcome::Complete { result: None },
                })
                .collect();
            settled += settlements.len();
            let request = SettleRequest {
                request: self.request(2),
                settlements,
            };
            let verdicts = self.store.settle(request).await.expect("settled");
            assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        }
        cpu_time().saturating_sub(before).as_secs_f64() * 1e6 / settled as f64
    }
}
