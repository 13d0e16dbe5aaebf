//! The store under measurement: typed jobs through the client and a worker.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::Trouble;
use super::bench_raw::Rates;
use crate::client::Client;
use crate::clock::{micros, monotonic};
use crate::context::Context;
use crate::handler::{Failure, Handler, Running};
use crate::job::{Job, NewJob};
use crate::limits;

/// Callers that enqueue at the same time.
const CALLERS: usize = 8;
/// Jobs in one call, and rows in one transaction of the bare engine.
pub(super) const BATCH: usize = 100;

/// 200 jobs a second for 3 seconds.
const WAIT_JOBS: usize = 600;
const WAIT_EVERY: Duration = Duration::from_millis(5);

/// Nothing that works takes longer for a round.
const ROUND_LIMIT: Duration = Duration::from_secs(600);

/// The job of the drain: its number, and as much beside it as the payload should weigh.
#[derive(Serialize, Deserialize)]
pub(super) struct Numbered {
    n: usize,
    pad: String,
}

impl Job for Numbered {
    const KIND: &'static str = "bench.drain";
    const QUEUE: &'static str = "bench-drain";
}

impl Numbered {
    /// Makes jobs whose JSON has `payload` bytes, or as few as possible.
    pub(super) fn maker(payload: usize) -> impl Fn(usize) -> Self + Clone {
        let bare = r#"{"n":12345,"pad":""}"#.len();
        let pad = "x".repeat(payload.saturating_sub(bare));
        move |n| Self {
            n,
            pad: pad.clone(),
        }
    }
}

/// How often each job ran.
pub(super) struct Tally {
    runs: Box<[AtomicU8]>,
    count: AtomicUsize,
}

impl Tally {
    pub(super) fn new(jobs: usize) -> Arc<Self> {
        Arc::new(Self {
            runs: (0..jobs).map(|_| AtomicU8::new(0)).collect(),
            count: AtomicUsize::new(0),
        })
    }

    fn note(&self, n: usize) {
        if let Some(runs) = self.runs.get(n) {
            runs.fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Release);
    }

    fn lost(&self) -> u64 {
        let never = |runs: &&AtomicU8| runs.load(Ordering::Relaxed) == 0;
        self.runs.iter().filter(never).count() as u64
    }

    fn duplicates(&self) -> u64 {
        let extra = |runs: &AtomicU8| u64::from(runs.load(Ordering::Relaxed).saturating_sub(1));
        self.runs.iter().map(extra).sum()
    }
}

/// The handler: counts its runs.
pub(super) struct Count(pub(super) Arc<Tally>);

#[async_trait]
impl Handler<Numbered> for Count {
    async fn handle(&self, job: Numbered, _ctx: Context) -> Result<(), Failure> {
        self.0.note(job.n);
        Ok(())
    }
}

/// A handler without a lease: decodes the payload, and has the same body in a box.
pub(super) trait Bare {
    fn start(&self, payload: &[u8]) -> Result<Running<'_>, Failure>;
}

impl Bare for Count {
    fn start(&self, payload: &[u8]) -> Result<Running<'_>, Failure> {
        let job: Numbered = serde_json::from_slice(payload)?;
        Ok(Box::pin(async move {
            self.0.note(job.n);
            Ok(())
        }))
    }
}

pub(super) struct Round {
    pub(super) rates: Rates,
    pub(super) lost: u64,
    pub(super) duplicates: u64,
}

/// Enqueues all jobs, then drains them by one worker.
pub(super) async fn round(
    client: &Client,
    jobs: usize,
    slots: usize,
    payload: usize,
) -> Result<Round, Trouble> {
    let before = completed(client, Numbered::QUEUE).await?;
    let began = monotonic();
    enqueue(client, jobs, payload).await?;
    let enqueue = rate(jobs, began.elapsed());

    let tally = Tally::new(jobs);
    let all_settled: Arc<OnceLock<Instant>> = Arc::default();
    let until = {
        let (client, tally) = (client.clone(), Arc::clone(&tally));
        let all_settled = Arc::clone(&all_settled);
        async move {
            while tally.count.load(Ordering::Acquire) < jobs {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let target = before + jobs as u64;
            while completed(&client, Numbered::QUEUE)
                .await
                .is_ok_and(|n| n < target)
            {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let _ = all_settled.set(monotonic());
        }
    };
    let until = async {
        let _ = tokio::time::timeout(ROUND_LIMIT, until).await;
    };
    let began = monotonic();
    client
        .worker()
        .handle(Count(Arc::clone(&tally)))
        .slots(slots)
        .run_until(until)
        .await?;
    let ended = all_settled.get().copied().unwrap_or_else(monotonic);
    let drain = rate(jobs, ended - began);
    Ok(Round {
        rates: Rates { enqueue, drain },
        lost: tally.lost(),
        duplicates: tally.duplicates(),
    })
}

async fn enqueue(client: &Client, jobs: usize, payload: usize) -> Result<(), Trouble> {
    let next = Arc::new(AtomicUsize::new(0));
    let batch = BATCH.min((limits::CALL_BYTES / payload.max(1)).max(1));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (client, next) = (client.clone(), Arc::clone(&next));
        let make = Numbered::maker(payload);
        callers.spawn(async move {
            loop {
                let from = next.fetch_add(batch, Ordering::Relaxed);
                if from >= jobs {
                    return Ok(());
                }
                let numbers = from..(from + batch).min(jobs);
                let batch = gathered(numbers, |n| NewJob::of(&make(n)))?;
                client.enqueue_many(batch).await?;
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller
            .unwrap_or(Ok(()))
            .map_err(|error: crate::Error| Trouble::from(error))?;
    }
    Ok(())
}

/// The jobs of one call. `collect` of results would not know how many come, and grow as it goes.
pub(super) fn gathered<T, E>(
    numbers: Range<usize>,
    make: impl Fn(usize) -> Result<T, E>,
) -> Result<Vec<T>, E> {
    let mut batch = Vec::with_capacity(numbers.len());
    for n in numbers {
        batch.push(make(n)?);
    }
    Ok(batch)
}

async fn completed(client: &Client, queue: &str) -> Result<u64, Trouble> {
    let queues = client.queues().await?;
    let queue = queues.iter().find(|view| view.queue.as_str() == queue);
    Ok(queue.map_or(0, |view| view.ledger.completed))
}

pub(super) fn rate(jobs: usize, took: Duration) -> f64 {
    jobs as f64 / took.as_secs_f64().max(1e-9)
}

/// Milliseconds from enqueue to the start of the handler.
#[derive(Default)]
pub(super) struct Waits {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) lost: u64,
    pub(super) duplicates: u64,
}

/// The job of the wait.
#[derive(Serialize, Deserialize)]
struct Timed(Numbered);

impl Job for Timed {
    const KIND: &'static str = "bench.wait";
    const QUEUE: &'static str = "bench-wait";
}

/// The handler: takes the time.
struct Stamp {
    tally: Arc<Tally>,
    began: Instant,
    started: Arc<[AtomicU64]>,
}

#[async_trait]
impl Handler<Timed> for Stamp {
    async fn handle(&self, Timed(job): Timed, _ctx: Context) -> Result<(), Failure> {
        if let Some(started) = self.started.get(job.n) {
            started.store(micros(self.began.elapsed()), Ordering::Relaxed);
        }
        self.tally.note(job.n);
        Ok(())
    }
}

/// Enqueues at a steady pace while a worker runs.
pub(super) async fn waits(client: &Client, slots: usize, payload: usize) -> Result<Waits, Trouble> {
    let tally = Tally::new(WAIT_JOBS);
    let began = monotonic();
    let started: Arc<[AtomicU64]> = (0..WAIT_JOBS).map(|_| AtomicU64::new(0)).collect();
    let sent: Arc<[AtomicU64]> = (0..WAIT_JOBS).map(|_| AtomicU64::new(0)).collect();
    let stamp = Stamp {
        tally: Arc::clone(&tally),
        began,
        started: Arc::clone(&started),
    };
    let pace = async {
        let mut ticks = tokio::time::interval(WAIT_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut callers = JoinSet::new();
        let make = Numbered::maker(payload);
        for n in 0..WAIT_JOBS {
            ticks.tick().await;
            let (client, sent, job) = (client.clone(), Arc::clone(&sent), Timed(make(n)));
            callers.spawn(async move {
                sent[n].store(micros(began.elapsed()), Ordering::Relaxed);
                client.enqueue(&job).await.map(drop)
            });
        }
        while callers.join_next().await.is_some() {}
        let all_ran = async {
            while tally.count.load(Ordering::Acquire) < WAIT_JOBS {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(30), all_ran).await;
    };
    client
        .worker()
        .handle(stamp)
        .slots(slots)
        .run_until(pace)
        .await?;
    let micros = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
    let pairs = sent.iter().zip(&*started);
    let mut waits: Vec<u64> = pairs
        .filter(|(_, started)| micros(started) > 0)
        .map(|(sent, started)| micros(started).saturating_sub(micros(sent)))
        .collect();
    waits.sort_unstable();
    let percentile = |p: usize| {
        let at = (waits.len() * p / 100).min(waits.len().saturating_sub(1));
        waits.get(at).map_or(0.0, |us| *us as f64 / 1e3)
    };
    Ok(Waits {
        p50: percentile(50),
        p99: percentile(99),
        lost: tally.lost(),
        duplicates: tally.duplicates(),
    })
}
