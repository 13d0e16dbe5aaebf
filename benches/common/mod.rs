//! What the benchmarks share: the job and its handler, the bare engines, and how figures are
//! printed.
//!
//! Settings, by the environment: `LEASEHOLD_BENCH_JOBS` jobs in a round, `LEASEHOLD_BENCH_ROUNDS`
//! rounds, `LEASEHOLD_BENCH_QUICK=1` few of both. Run by anything but `cargo bench`, they are
//! quick.

#![allow(dead_code, reason = "each benchmark uses a part")]
#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]

use std::collections::VecDeque;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use leasehold::{Client, Context, Failure, Handler, Job, NewJob, async_trait};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

pub(crate) type Running<'a> = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send + 'a>>;

/// Bytes of JSON in a payload.
const PAYLOAD: usize = 100;

/// A setting: from the environment, or by whether there is time.
pub(crate) fn setting(name: &str, full: usize, quick: usize) -> usize {
    let given = std::env::var(format!("LEASEHOLD_BENCH_{name}"));
    let hurry = std::env::var_os("LEASEHOLD_BENCH_QUICK").is_some()
        || !std::env::args().any(|arg| arg == "--bench");
    match given.map(|text| text.parse()) {
        Ok(Ok(number)) => number,
        _ if hurry => quick,
        _ => full,
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Installs the recorder that a service would have: the crate's own.
pub(crate) fn record_metrics() {
    leasehold_web::prometheus::Exporter::install().expect("the only recorder");
}

/// Installs the recorder that a service would have, and folds its histograms as one would.

#[derive(Serialize, Deserialize)]
pub(crate) struct Numbered {
    n: usize,
    pad: String,
}

impl Job for Numbered {
    const KIND: &'static str = "bench";
}

pub(crate) fn job(n: usize) -> NewJob {
    let pad = "x".repeat(PAYLOAD - r#"{"n":12345,"pad":""}"#.len());
    NewJob::of(&Numbered { n, pad }).expect("a job")
}

/// The handler: adds up what it saw.
#[derive(Clone, Default)]
pub(crate) struct Sum(Arc<Seen>);

#[derive(Default)]
struct Seen {
    runs: AtomicUsize,
    sum: AtomicU64,
    /// The run that rings, if any does.
    last: usize,
    ended: Notify,
}

impl Sum {
    /// Rings at the end of so many runs.
    fn of(jobs: usize) -> Self {
        Self(Arc::new(Seen {
            last: jobs,
            ..Seen::default()
        }))
    }

    fn note(&self, n: usize) {
        self.0.sum.fetch_add(n as u64, Ordering::Relaxed);
        if self.0.runs.fetch_add(1, Ordering::Release) + 1 == self.0.last {
            self.0.ended.notify_one();
        }
    }

    pub(crate) fn runs(&self) -> usize {
        self.0.runs.load(Ordering::Acquire)
    }

    /// The same work without a lease: decodes the payload, and the same body in a box.
    pub(crate) fn bare(&self, payload: &[u8]) -> Running<'_> {
        let job: Numbered = serde_json::from_slice(payload).expect("a payload");
        Box::pin(async move {
            self.note(job.n);
            Ok(())
        })
    }

    /// Every job ran, and none twice.
    pub(crate) fn check(&self, jobs: usize) {
        let sum = self.0.sum.load(Ordering::Relaxed);
        let all = jobs as u64 * (jobs as u64 - 1) / 2;
        assert_eq!(
            (self.runs(), sum),
            (jobs, all),
            "jobs were lost or ran twice"
        );
    }
}

/// A handler without a lease.
pub(crate) trait Bare {
    fn start(&self, payload: &[u8]) -> Running<'_>;
}

impl Bare for Sum {
    fn start(&self, payload: &[u8]) -> Running<'_> {
        self.bare(payload)
    }
}

#[async_trait]
impl Handler<Numbered> for Sum {
    async fn handle(&self, job: Numbered, _ctx: Context) -> Result<(), Failure> {
        self.note(job.n);
        Ok(())
    }
}

pub(crate) async fn enqueue(client: &Client, jobs: usize) {
    for from in (0..jobs).step_by(1_000) {
        let batch = (from..(from + 1_000).min(jobs)).map(job);
        client.enqueue_many(batch).await.expect("enqueued");
    }
}

/// One worker drains what is queued; until the last completion is settled.
pub(crate) async fn drain(client: &Client, jobs: usize, slots: usize) -> Took {
    let sum = Sum::of(jobs);
    let settled: Arc<OnceLock<Took>> = Arc::default();
    let target = completed(client).await + jobs as u64;
    let watch = Stopwatch::start();
    let until = async {
        // A timer would add up to two milliseconds to a round of forty.
        sum.0.ended.notified().await;
        let ran = Instant::now();
        while completed(client).await < target {
            if ran.elapsed() < Duration::from_millis(1) {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let _ = settled.set(watch.stop());
    };
    client
        .worker()
        .handle(sum.clone())
        .slots(slots)
        .run_until(until)
        .await
        .expect("a worker");
    sum.check(jobs);
    *settled.get().expect("settled")
}

async fn completed(client: &Client) -> u64 {
    let queues = client.queues().await.expect("queues");
    queues.iter().map(|view| view.ledger.completed).sum()
}

/// A locked deque, and one loop that pops it and awaits the handler.
pub(crate) async fn bare_loop(jobs: usize) -> Took {
    let deque: VecDeque<_> = (0..jobs).map(|n| job(n).payload).collect();
    let deque = Mutex::new(deque);
    let sum = Sum::default();
    tokio::spawn(async move {
        // Known only by its trait, as the runtime knows handlers.
        let handler: &(dyn Bare + Sync) = std::hint::black_box(&sum);
        let watch = Stopwatch::start();
        loop {
            let payload = deque.lock().expect("no panics").pop_front();
            let Some(payload) = payload else { break };
            handler.start(&payload).await.expect("done");
        }
        let took = watch.stop();
        sum.check(jobs);
        took
    })
    .await
    .expect("no panics")
}

/// One table: rows go in and come out, a hundred in a transaction, `synchronous=FULL`.
pub(crate) fn bare_sqlite(file: &Path, jobs: usize) -> rusqlite::Result<Took> {
    let db = rusqlite::Connection::open(file)?;
    db.pragma_update(None, "journal_mode", "WAL")?;
    db.pragma_update(None, "synchronous", "FULL")?;
    db.execute_batch(
        "CREATE TABLE IF NOT EXISTS raw (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)",
    )?;
    let mut insert = db.prepare("INSERT INTO raw (payload) VALUES (?)")?;
    for from in (0..jobs).step_by(100) {
        db.execute_batch("BEGIN IMMEDIATE")?;
        for n in from..(from + 100).min(jobs) {
            insert.execute([&*job(n).payload])?;
        }
        db.execute_batch("COMMIT")?;
    }
    let mut delete = db.prepare(
        "DELETE FROM raw WHERE id IN (SELECT id FROM raw ORDER BY id LIMIT 100) RETURNING payload",
    )?;
    let watch = Stopwatch::start();
    let mut taken = 0;
    while taken < jobs {
        let mut rows = delete.query([])?;
        while let Some(row) = rows.next()? {
            row.get_ref(0)?.as_blob().expect("a blob");
            taken += 1;
        }
    }
    Ok(watch.stop())
}

/// CPU time of this process, all threads.
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What a round took, on the clock and of the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Took {
    wall: Duration,
    cpu: Duration,
}

impl Took {
    pub(crate) fn per_second(self, jobs: usize) -> f64 {
        jobs as f64 / self.wall.as_secs_f64()
    }

    /// Microseconds of CPU per job: steadier than the clock on a machine that others use.
    pub(crate) fn cpu_per_job(self, jobs: usize) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / jobs as f64
    }
}

pub(crate) struct Stopwatch(Instant, Duration);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now(), cpu_time())
    }

    pub(crate) fn stop(&self) -> Took {
        Took {
            wall: self.0.elapsed(),
            cpu: cpu_time().saturating_sub(self.1),
        }
    }
}

pub(crate) fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
