//! Workers: the one place that wires the parts together. `config.rs` describes one.
//!
//! ```text
//!            ┌─ claimer ──► buffer ──► slots (run handlers) ──► outbox ──► settler ─┐
//!   store ◄──┤                             ▲ stop                                   │
//!            └─ renewer (own thread) ──────┘                                        │
//!   store ◄─────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Several pools can run in one process; nothing is global.

pub(crate) mod claimer;
mod config;
mod deaths;
pub(crate) mod declines;
#[doc(hidden)]
pub mod executor;
mod handle;
pub(crate) mod held;
pub(crate) mod lost;
pub(crate) mod outcome;
pub(crate) mod pool;
mod pruner;
mod reaper;
mod renewer;
pub(crate) mod settler;
pub(crate) mod slots;
pub(crate) mod suspects;
mod sync;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::deaths::Deaths;
use self::executor::Executor;
use self::pool::{Pool, noted, part};
use crate::error::{Error, ErrorKind, Result, Verb};

pub use self::config::{QueueConfig, Worker};
pub use self::handle::{DrainReport, QueueStats, WorkerHandle, WorkerHealth, WorkerStats};
pub use crate::observe::Death;

/// How long after its beginning a drain waits for the answer to a claim, unless handlers run.
const LAST_CLAIM: Duration = Duration::from_secs(1);

async fn run_pool(
    pool: &Arc<Pool>,
    executor: &dyn Executor,
    deaths: Option<Deaths>,
    stop: impl Future<Output = ()> + Send,
) -> Result<DrainReport> {
    // Panics here, where it is seen, if the runtime has no timers: each part would, unseen.
    drop(tokio::time::sleep(Duration::ZERO));
    let own = || Arc::clone(pool);
    let renewer = noted(own(), |pool| &pool.renewer_ran, renewer::renewer(own()));
    let renewer = part(own(), "renewer", renewer);
    let renewing = executor::start(executor, "leasehold-renew", renewer).map_err(|e| {
        Error::new(ErrorKind::Unavailable, "the renewer's thread did not start")
            .caused_by(e)
            .during(Verb::Run)
    })?;

    let mut slots = JoinSet::new();
    for _ in 0..pool.slots {
        slots.spawn(part(own(), "slot", slots::slot(own())));
    }
    let mut parts = JoinSet::new();
    parts.spawn(part(own(), "settler", settler::settler(own())));
    parts.spawn(part(own(), "reaper", reaper::reaper(own())));
    parts.spawn(part(own(), "pruner", pruner::pruner(own())));
    parts.spawn(part(own(), "meter", measure(own())));
    let mut hooks = JoinSet::new();
    let no_more_deaths = CancellationToken::new();
    if let Some(deaths) = deaths {
        hooks.spawn(part(own(), "on_dead", deaths.call(no_more_deaths.clone())));
    }
    let mut claimers = JoinSet::new();
    let claimer = noted(own(), |pool| &pool.claimer_ran, claimer::claimer(own()));
    claimers.spawn(part(own(), "claimer", claimer));
    // Whoever drops this future half way takes everything down with it; the leases expire.
    let _ending = Ending(pool);

    tokio::select! {
        biased;
        () = stop => {}
        () = pool.drain.cancelled() => {}
    }
    pool.begin_drain();
    claimer::give_back(pool);
    let drained = tokio::time::timeout_at(pool.drain_deadline(), async {
        while slots.join_next().await.is_some() {}
        // What a claim in doubt was granted goes back if the answer comes in time; it expires
        // otherwise, and is nothing to keep a supervisor waiting for.
        let last_claim = pool.drain_began() + LAST_CLAIM;
        let _ = tokio::time::timeout_at(last_claim, claimers.join_next()).await;
        claimers.shutdown().await;
        claimer::give_back(pool);
        while pool.board.leases() > 0 && settling(pool) {
            pool.outbox.flush();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        no_more_deaths.cancel();
        hooks.join_next().await;
    });
    let _ = drained.await;
    drop(renewing);
    if let Some(error) = pool.failure() {
        tracing::error!(%error, "the worker could not go on");
        return Err(error.duplicate());
    }
    let report = DrainReport {
        finished: pool.finished(),
        unsettled: pool.board.leases(),
    };
    Ok(report)
}

/// Abandons what is left when a pool ends.
struct Ending<'a>(&'a Pool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Whether any lease waits for its verdict.
fn settling(pool: &Pool) -> bool {
    let grants = pool.board.grants();
    grants
        .iter()
        .flat_map(|held| &held.leases)
        .any(|lease| lease.is_handed_in() && !lease.has_ended())
}

/// Measures the utilisation ρ = λ · hold ÷ slots of each queue.
async fn measure(pool: Arc<Pool>) {
    const EVERY: Duration = Duration::from_secs(5);
    loop {
        tokio::time::sleep(EVERY).await;
        let (before, now) = pool.measure();
        let capacity = (now - before) as f64 * pool.slots as f64;
        for (number, queue) in pool.queues.iter().enumerate() {
            // A run of an hour is busy for an hour, not at its end.
            let running = pool.board.running(number, before, now);
            let busy = queue.busy.swap(0, Ordering::Relaxed) + running;
            queue.meter.utilization(busy as f64 / capacity);
        }
        pool.meter
            .slots(pool.busy.load(Ordering::Relaxed), pool.slots);
        pool.meter.held(pool.board.leases());
    }
}

/// Done when the process is asked to end: by Ctrl-C, or by SIGTERM as a supervisor sends it.
pub async fn shutdown_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
