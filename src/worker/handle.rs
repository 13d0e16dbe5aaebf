//! A handle to a worker that runs in the background.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::pool::Pool;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::QueueName;

/// What a worker left behind once it had drained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DrainReport {
    /// Handlers that ended.
    pub finished: u64,
    /// Leases that were not settled when the worker gave up: their handlers could not be dropped,
    /// or the store did not answer. They expire.
    pub unsettled: usize,
}

/// A worker that runs in the background. Made by [`Worker::start`](super::Worker::start).
///
/// Clones are handles to the same worker. It goes on if all of them are dropped, and ends with the
/// runtime; its leases expire then. To end it well, ask it to [drain](Self::drain) and await it:
///
/// ```
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)] struct Greet;
/// # impl leasehold::Job for Greet { const KIND: &'static str = "greet"; }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// # let client = leasehold::Client::open("memory:").await?;
/// # let greet = |_: Greet, _: leasehold::Context| async { Ok::<(), leasehold::Failure>(()) };
/// let worker = client.worker().handle(greet).start()?;
/// // … serve requests, answer health checks with `worker.health()` …
/// worker.drain();
/// let report = worker.await?;
/// assert_eq!(report.unsettled, 0);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct WorkerHandle {
    pool: Arc<Pool>,
    ended: watch::Receiver<Option<Arc<Result<DrainReport>>>>,
}

impl WorkerHandle {
    /// Runs `worker` in a task of the runtime.
    pub(super) fn spawn(
        pool: Arc<Pool>,
        worker: impl Future<Output = Result<DrainReport>> + Send + 'static,
    ) -> Self {
        let (tell, ended) = watch::channel(None);
        tokio::spawn(async move {
            let report = worker.await;
            tell.send_replace(Some(Arc::new(report)));
        });
        Self { pool, ended }
    }

    /// Asks the worker to end: it claims no more, hands back what has not started, and lets
    /// handlers end within the drain grace. Returns at once; [`join`](Self::join) waits for it.
    pub fn drain(&self) {
        self.pool.begin_drain();
    }

    /// Waits until the worker has drained, because it was asked to or because it could not go on.
    ///
    /// # Errors
    /// `Unexpected` if a part of the worker panicked, or if its runtime ended before it had
    /// drained.
    pub async fn join(&self) -> Result<DrainReport> {
        let mut ended = self.ended.clone();
        let report = ended.wait_for(Option::is_some).await.ok();
        let report = report.and_then(|report| report.clone());
        match report.as_deref() {
            Some(Ok(report)) => Ok(*report),
            Some(Err(error)) => Err(error.duplicate()),
            None => {
                let why = "the worker's runtime ended before it had drained";
                Err(Error::new(ErrorKind::Unexpected, why).during(Verb::Run))
            }
        }
    }

    /// Stops claiming, and hands back what has not started. Handlers that run go on, and so do the
    /// renewals of their leases. A claim that is under way may still bring a few jobs.
    ///
    /// This worker alone pauses. To pause a queue for all workers, see
    /// [`Operator::pause`](crate::operator::Operator::pause).
    pub fn pause(&self) {
        self.pool.pause();
    }

    /// Claims again after a [`pause`](Self::pause).
    pub fn resume(&self) {
        self.pool.resume();
    }

    /// How the worker is doing, for a health check.
    pub fn health(&self) -> WorkerHealth {
        let pool = &*self.pool;
        let now = monotonic();
        let ago = |stamp: u64| {
            let at = (stamp != 0).then(|| pool.clock.instant(stamp))?;
            Some(now.saturating_duration_since(at))
        };
        let (paused, draining) = (pool.is_paused(), pool.draining());
        let has_ended = self.ended.borrow().is_some() || self.ended.has_changed().is_err();
        let terms = pool.queues.iter().map(|queue| queue.terms.term);
        let calls = !paused || pool.board.leases() > 0;
        WorkerHealth {
            claiming: !(paused || draining || has_ended),
            paused,
            draining,
            ended: has_ended,
            store_answered: ago(pool.answered.load(Ordering::Acquire)),
            renewed: ago(pool.renewed.load(Ordering::Acquire)),
            failed_renewals: pool.failed_renewals.load(Ordering::Acquire),
            claimer_ran: ago(pool.claimer_ran.load(Ordering::Acquire)).unwrap_or_default(),
            renewer_ran: ago(pool.renewer_ran.load(Ordering::Acquire)).unwrap_or_default(),
            running_for: ago(1).unwrap_or_default(),
            patience: terms.min().filter(|_| calls),
        }
    }

    /// What the worker holds and does.
    pub fn stats(&self) -> WorkerStats {
        let pool = &*self.pool;
        let queues = pool.queues.iter();
        let mut queues: Vec<QueueStats> = queues
            .map(|queue| QueueStats {
                queue: queue.name.clone(),
                slots: queue.slots.unwrap_or(pool.slots),
                held: 0,
                running: 0,
            })
            .collect();
        for held in pool.board.grants() {
            let queue = &mut queues[held.queue];
            let live = (held.leases.iter().enumerate()).filter(|(_, lease)| !lease.has_ended());
            for (index, lease) in live {
                queue.held += 1;
                let runs = held.last_progress(index).is_some() && !lease.is_handed_in();
                queue.running += usize::from(runs);
            }
        }
        WorkerStats {
            slots: pool.slots,
            busy: pool.busy.load(Ordering::Acquire),
            buffered: pool.buffered(),
            held: pool.board.leases(),
            finished: pool.finished(),
            queues,
        }
    }
}

impl IntoFuture for WorkerHandle {
    type Output = Result<DrainReport>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<DrainReport>> + Send>>;

    /// Waits as [`join`](Self::join) does.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.join().await })
    }
}

impl fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerHandle")
            .field("owner", &self.pool.owner)
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}

/// How a worker is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "a paused worker may drain: these are independent"
)]
#[non_exhaustive]
pub struct WorkerHealth {
    /// It asks the store for work as soon as a slot is free.
    pub claiming: bool,
    /// It was [paused](WorkerHandle::pause).
    pub paused: bool,
    /// It was asked to end, or could not go on.
    pub draining: bool,
    /// It has ended.
    pub ended: bool,
    /// How long ago the store last answered a claim or a renewal. None: not yet.
    pub store_answered: Option<Duration>,
    /// How long ago a renewal last succeeded. None: no lease was held long enough to need one.
    pub renewed: Option<Duration>,
    /// Renewal calls that failed since the last that succeeded.
    pub failed_renewals: u32,
    /// How long ago the claimer was last seen running. It reports every few seconds, even while it
    /// waits for the store.
    pub claimer_ran: Duration,
    /// The same for the renewer.
    pub renewer_ran: Duration,
    running_for: Duration,
    /// How long the store may stay silent. None: there is nothing to ask it for.
    patience: Option<Duration>,
}

/// A part that has not been seen running for this long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

impl WorkerHealth {
    /// Whether the worker's parts are running: the answer to a liveness check. If it fails, a
    /// supervisor restarts the process.
    ///
    /// It does not depend on the store, which a restart would not bring back. A worker that is
    /// paused or drains is alive; one that has ended is not.
    pub fn is_alive(&self) -> bool {
        self.why_not_alive().is_none()
    }

    /// Why the worker is not [alive](Self::is_alive), in words.
    pub fn why_not_alive(&self) -> Option<String> {
        if self.ended {
            return Some("the worker has ended".into());
        }
        // Once it drains, it needs no claimer.
        let claimer = (!self.draining).then_some(("claimer", self.claimer_ran));
        let parts = [("renewer", self.renewer_ran)].into_iter().chain(claimer);
        let stuck = parts.max_by_key(|(_, ran)| *ran);
        stuck
            .filter(|(_, ran)| *ran > STUCK_AFTER)
            .map(|(part, ran)| {
                let seconds = ran.as_secs();
                format!("the {part} has not run for {seconds} s: does a handler block its thread?")
            })
    }

    /// Whether the worker takes on work and has heard from the store within the shortest term of
    /// its queues: the answer to a readiness check.
    ///
    /// A paused worker is ready; one that drains is not.
    pub fn is_ready(&self) -> bool {
        self.why_not_ready().is_none()
    }

    /// Why the worker is not [ready](Self::is_ready), in words.
    pub fn why_not_ready(&self) -> Option<String> {
        if let Some(why) = self.why_not_alive() {
            return Some(why);
        }
        if self.draining {
            return Some("the worker is draining".into());
        }
        let silence = self.store_answered.unwrap_or(self.running_for);
        let patience = self.patience.filter(|patience| silence > *patience)?;
        let (silence, patience) = (silence.as_secs_f64(), patience.as_secs_f64());
        Some(format!(
            "the store has not answered for {silence:.1} s, longer than the shortest term ({patience:.1} s)"
        ))
    }
}

/// What a worker holds and does.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WorkerStats {
    /// How many handlers may run at once.
    pub slots: usize,
    /// Slots that have a job.
    pub busy: usize,
    /// Leases that wait for a slot.
    pub buffered: usize,
    /// Leases held: running, waiting for a slot, or waiting for their settlement.
    pub held: usize,
    /// Handlers that have ended since the worker started.
    pub finished: u64,
    /// The same by queue, in the order in which the queues were named.
    pub queues: Vec<QueueStats>,
}

/// What a worker holds of one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct QueueStats {
    /// The queue.
    pub queue: QueueName,
    /// How many of its handlers may run at once.
    pub slots: usize,
    /// Leases held.
    pub held: usize,
    /// Handlers that run.
    pub running: usize,
}
