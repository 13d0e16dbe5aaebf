//! How fast the `SQLite` store is, beside a raw loop that keeps no promise at all.
//!
//! `cargo bench --bench sqlite` prints jobs per second and CPU per job. The raw loop inserts batches of
//! 100 rows and takes them out again with `DELETE … RETURNING`, with the same payload and the same
//! `synchronous = FULL`. Only ratios within one run mean anything.

#![allow(missing_docs, reason = "a program, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::job::{Kind, QueueName};
use leasehold::lease::Nonce;
use leasehold::store::{
    ClaimQueue, ClaimRequest, EnqueueRequest, Outcome, RequestId, SessionId, SettleRequest,
    Settlement, SqliteStore,
};
use leasehold::{ErrorKind, JobId, NewJob, Store};

/// CPU time of all threads of this process.
fn cpu() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let nanos = tasks.filter_map(|task| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}

struct Timer(Instant, Duration);

impl Timer {
    fn start() -> Self {
        Self(Instant::now(), cpu())
    }

    fn report(&self, what: &str, jobs: usize) -> f64 {
        show(what, jobs, self.0.elapsed(), cpu().saturating_sub(self.1))
    }
}

fn show(what: &str, jobs: usize, wall: Duration, cpu: Duration) -> f64 {
    let rate = jobs as f64 / wall.as_secs_f64();
    let each = cpu.as_secs_f64() * 1e6 / jobs as f64;
    println!("{what:<42} {rate:>9.0} jobs/s {each:>7.2} µs CPU/job");
    rate
}

fn raw(dir: &Path, jobs: usize) -> f64 {
    let mut db = rusqlite::Connection::open(dir.join("raw.db")).unwrap();
    db.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 4000;
         PRAGMA cache_size = -65536;
         CREATE TABLE IF NOT EXISTS job (id INTEGER PRIMARY KEY, payload BLOB);",
    )
    .unwrap();
    let payload = [7_u8; 100];
    let timer = Timer::start();
    for _ in 0..jobs / 100 {
        let tx = db.transaction().unwrap();
        for _ in 0..100 {
            tx.prepare_cached("INSERT INTO job (payload) VALUES (?1)")
                .unwrap()
                .execute([&payload[..]])
                .unwrap();
        }
        tx.commit().unwrap();
    }
    timer.report("raw insert, 100 per commit", jobs);
    let timer = Timer::start();
    let mut bytes = 0;
    for _ in 0..jobs / 100 {
        let tx = db.transaction().unwrap();
        {
            let mut take = tx
                .prepare_cached(
                    "DELETE FROM job WHERE id IN (SELECT id FROM job ORDER BY id LIMIT 100)
                     RETURNING payload",
                )
                .unwrap();
            let mut rows = take.query([]).unwrap();
            while let Some(row) = rows.next().unwrap() {
                bytes += row.get::<_, Vec<u8>>(0).unwrap().len();
            }
        }
        tx.commit().unwrap();
    }
    assert_eq!(bytes, jobs * 100);
    timer.report("raw DELETE … RETURNING, 100 per commit", jobs)
}

struct Client<'a> {
    store: &'a SqliteStore,
    session: SessionId,
    seq: u64,
    lane: u32,
}

impl Client<'_> {
    fn id(&mut self) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane: self.lane,
            seq: self.seq,
        }
    }

    async fn fill(&mut self, jobs: usize, each: usize) {
        for _ in 0..jobs / each {
            let job = || {
                let kind = Kind::new("bench").unwrap();
                let job = NewJob::raw(QueueName::default(), kind, vec![7; 100]);
                (JobId::generate(), job)
            };
            let request = EnqueueRequest {
                request: self.id(),
                jobs: Arc::new((0..each).map(|_| job()).collect()),
            };
            self.store.enqueue(request).await.unwrap();
        }
    }

    /// Claims and settles. With `ride`, settlements go along with the next claim.
    async fn drain(&mut self, jobs: usize, each: usize, ride: bool) {
        let mut done = 0;
        let mut riding = None;
        while done < jobs {
            let request = ClaimRequest {
                request: self.id(),
                owner: "bench".into(),
                task: "bench".into(),
                nonce: Nonce::draw().unwrap(),
                queues: vec![ClaimQueue {
                    queue: QueueName::default(),
                    term: Duration::from_secs(60),
                    max_lifetime: Duration::from_secs(600),
                }],
                max: each,
                admit_suspect: false,
                settle: riding.take(),
            };
            let claimed = match self.store.claim(request).await {
                Err(error) if error.kind() == ErrorKind::TokensAhead => continue,
                claimed => claimed.unwrap(),
            };
            let settlements: Vec<_> = claimed
                .grants
                .iter()
                .flat_map(|grant| grant.leases.iter().map(|lease| grant.receipt(lease)))
                .map(|receipt| Settlement {
                    receipt,
                    outcome: Outcome::Complete { result: None },
                })
                .collect();
            assert!(!settlements.is_empty());
            done += settlements.len();
            self.lane = 1;
            let request = SettleRequest {
                request: self.id(),
                settlements,
            };
            self.lane = 0;
            if ride && done < jobs {
                riding = Some(request);
                continue;
            }
            let verdicts = self.store.settle(request).await.unwrap();
            assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        }
    }
}

async fn drained(client: &mut Client<'_>, jobs: usize, each: usize, ride: bool, raw: f64) {
    let timer = Timer::start();
    client.fill(jobs, each).await;
    timer.report(&format!("enqueue, {each} per call"), jobs);
    let timer = Timer::start();
    client.drain(jobs, each, ride).await;
    let how = if ride { "settle rides" } else { "one caller" };
    let rate = timer.report(&format!("claim + settle, {each} per call, {how}"), jobs);
    println!("  ÷ raw {:.2}", rate / raw);
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let jobs = 100_000;
    let rounds = if std::env::args().any(|arg| arg == "depth") {
        0
    } else {
        3
    };
    for round in 1..=rounds {
        println!("round {round}");
        let dir = tempfile::tempdir().unwrap();
        let raw = raw(dir.path(), jobs);
        let store = SqliteStore::open(dir.path().join("jobs.db")).unwrap();
        let session = store.open_session().await.unwrap();
        let mut client = Client {
            store: &store,
            session,
            seq: 0,
            lane: 0,
        };
        for (each, ride) in [(100, false), (100, true), (1_000, false), (1_000, true)] {
            drained(&mut client, jobs, each, ride, raw).await;
        }
    }
    println!("depth: jobs claimed and settled, 1,000 per call, in turns");
    let dir = tempfile::tempdir().unwrap();
    let stores = [1_000, 1_000_000].map(|depth| {
        let store = SqliteStore::open(dir.path().join(format!("{depth}.db"))).unwrap();
        (depth, store)
    });
    let mut clients = Vec::new();
    for (depth, store) in &stores {
        let session = store.open_session().await.unwrap();
        let mut client = Client {
            store,
            session,
            seq: 0,
            lane: 0,
        };
        client.fill(*depth, 1_000).await;
        clients.push((*depth, client, Duration::ZERO, Duration::ZERO));
    }
    for _ in 0..100 {
        for (_, client, wall, used) in &mut clients {
            client.fill(1_000, 1_000).await;
            let timer = Timer::start();
            client.drain(1_000, 1_000, false).await;
            *wall += timer.0.elapsed();
            *used += cpu().saturating_sub(timer.1);
        }
    }
    for (depth, _, wall, used) in &clients {
        show(&format!("{depth} jobs in line"), 100_000, *wall, *used);
    }
}
