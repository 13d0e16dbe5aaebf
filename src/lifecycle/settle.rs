//! Settling: end each lease with the receipt of that one claim.
//!
//! Slots hand in how their handlers ended; the settler sends what has gathered in one call, and the
//! next call gathers while that one is under way. A claim that is about to be sent takes the
//! waiting settlements along. A settlement is repeated until its verdict is known.
//!
//! A lost lease is settled by nobody: what its handler produced counts for nothing.
//!
//! Before: [`run`](super::run) ended. After: the job is completed, waits, or is dead.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::time::Instant;

use super::fence::{HeldLease, Stop};
use super::lane::{Answer, Lane};
use super::pool::{Pool, PoolQueue, Run};
use super::run::Ran;
use crate::clock::monotonic;
use crate::error::{Result, Verb};
use crate::handler::{Failure, Wish};
use crate::job::{JobRecord, limits};
use crate::lease::{FencingToken, Issuer, Verdict};
use crate::observe::Event;
use crate::observe::metrics::{KindMeter, Release};
use crate::store::{Outcome, RequestId, SettleRequest, Settlement};

/// Handed-in leases of one shard that are worth a call at once.
const BATCH: usize = 512;

/// How long the first settlement waits for others while the slots are busy.
const GATHER: Duration = Duration::from_millis(1);

/// How long a job of unknown kind is put off: a rolling deploy will bring its handler.
const UNKNOWN_KIND_DELAY: Duration = Duration::from_secs(30);

/// Leases whose handlers have ended, and the lane to settle them.
///
/// In shards, so that slots on different threads seldom meet.
pub(crate) struct Outbox {
    shards: Box<[Mutex<Shard>]>,
    /// Rings when something waits to be settled.
    soon: Notify,
    /// Rings when it should not wait any longer.
    now: Notify,
    lane: Arc<tokio::sync::Mutex<Lane>>,
}

/// What some of the slots have handed in.
#[derive(Default)]
struct Shard {
    done: Vec<Done>,
    /// Handlers that have ended.
    finished: u64,
    /// How long handlers ran since it was last asked, by queue.
    busy: Vec<Duration>,
}

/// A lease to be settled.
pub(crate) struct Done {
    held: Arc<Run>,
    index: usize,
    outcome: Outcome,
    times: Times,
}

/// What a run took.
#[derive(Clone, Copy, Default)]
pub(crate) struct Times {
    /// From due to the start of the handler. None if it never started.
    pub(crate) waited: Option<Duration>,
    /// From the start of the handler to its end.
    pub(crate) ran: Duration,
}

impl Outbox {
    pub(crate) fn new(lane: Lane, slots: usize, queues: usize) -> Self {
        let shard = || {
            Mutex::new(Shard {
                busy: vec![Duration::ZERO; queues],
                ..Shard::default()
            })
        };
        Self {
            shards: (0..slots.min(16)).map(|_| shard()).collect(),
            soon: Notify::new(),
            now: Notify::new(),
            lane: Arc::new(tokio::sync::Mutex::new(lane)),
        }
    }

    fn shard(&self, slot: usize) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[slot % self.shards.len()];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        (0..self.shards.len()).map(|slot| self.shard(slot))
    }

    /// Takes in what a slot has done: the run, and the lease if it is to be settled.
    fn push(&self, slot: usize, queue: usize, times: Times, done: Option<Done>) {
        let mut shard = self.shard(slot);
        if times.waited.is_some() {
            shard.finished += 1;
            shard.busy[queue] += times.ran;
        }
        if done.is_none() {
            return;
        }
        shard.done.extend(done);
        let gathered = shard.done.len();
        drop(shard);
        if gathered == BATCH {
            self.now.notify_one();
        } else if gathered == 1 {
            self.soon.notify_one();
        }
    }

    /// Sends what the slot has handed in, however little.
    pub(crate) fn flush(&self, slot: usize) {
        if !self.shard(slot).done.is_empty() {
            self.now.notify_one();
        }
    }

    /// Sends everything.
    pub(crate) fn flush_all(&self) {
        self.now.notify_one();
    }

    /// Handlers that have ended.
    pub(crate) fn finished(&self) -> u64 {
        self.all().map(|shard| shard.finished).sum()
    }

    /// How long handlers of a queue ran since it was last asked.
    pub(crate) fn take_busy(&self, queue: usize) -> Duration {
        self.all()
            .map(|mut shard| std::mem::take(&mut shard.busy[queue]))
            .sum()
    }

    fn take(&self) -> Vec<Done> {
        let mut batch = Vec::new();
        for mut shard in self.all() {
            let room = limits::CALL_ITEMS - batch.len();
            let taken = shard.done.len().min(room);
            batch.extend(shard.done.drain(..taken));
        }
        batch
    }

    /// What a claim can take along: the waiting settlements, and their lane until they are known.
    pub(crate) fn ride(&self) -> Option<Ride> {
        let lane = Arc::clone(&self.lane).try_lock_owned().ok()?;
        let batch = self.take();
        (!batch.is_empty()).then_some(Ride { lane, batch })
    }
}

/// Settlements that go with a claim, or alone.
pub(crate) struct Ride {
    lane: OwnedMutexGuard<Lane>,
    batch: Vec<Done>,
}

impl Ride {
    /// The id under which a claim takes the settlements along.
    pub(crate) async fn reserve(&mut self) -> Result<RequestId> {
        self.lane.reserve().await
    }

    pub(crate) fn settlements(&self) -> Vec<Settlement> {
        settlements(&self.batch)
    }

    /// The claim brought the verdicts.
    pub(crate) fn arrived(self, pool: &Pool, verdicts: &[Verdict]) {
        close(pool, &self.batch, verdicts);
    }

    /// Sends the settlements alone, until they are known.
    pub(crate) async fn send(mut self, pool: &Pool) {
        let sent = monotonic();
        loop {
            let batch = &self.batch;
            let call = self.lane.call(Duration::MAX, |store, request| {
                let request = SettleRequest {
                    request,
                    settlements: settlements(batch),
                };
                async move { store.settle(request).await }
            });
            match call.await {
                Answer::Known(verdicts) => {
                    pool.meter.settled(sent.elapsed());
                    return close(pool, &self.batch, &verdicts);
                }
                // Receipts make it safe to go again under a new id: what was applied is fenced.
                Answer::Lost => {}
                Answer::Refused(error) | Answer::GaveUp(error) => {
                    tracing::error!(%error, leases = self.batch.len(), "leases left to expire");
                    for done in &self.batch {
                        pool.end(&done.held, done.index);
                    }
                    return;
                }
            }
        }
    }
}

/// Settles what the slots hand in, until the pool is done.
pub(crate) async fn settler(pool: Arc<Pool>) {
    let outbox = &pool.outbox;
    loop {
        tokio::select! {
            biased;
            () = outbox.now.notified() => {}
            () = outbox.soon.notified() => {
                let _ = tokio::time::timeout(GATHER, outbox.now.notified()).await;
            }
        }
        loop {
            let lane = Arc::clone(&outbox.lane).lock_owned().await;
            let batch = outbox.take();
            if batch.is_empty() {
                break;
            }
            Ride { lane, batch }.send(&pool).await;
        }
    }
}

fn settlements(batch: &[Done]) -> Vec<Settlement> {
    let settlement = |done: &Done| Settlement {
        receipt: done.held.receipt(done.index),
        outcome: done.outcome.clone(),
    };
    batch.iter().map(settlement).collect()
}

/// The verdicts are known: counts them, and lets go of the leases.
fn close(pool: &Pool, batch: &[Done], verdicts: &[Verdict]) {
    let now = monotonic();
    // Neighbours are mostly of one grant and one kind.
    let alike = |a: &Done, b: &Done| a.held.is(&b.held) && a.lease().kind == b.lease().kind;
    let mut verdicts = verdicts.iter();
    for run in batch.chunk_by(alike) {
        let held = &run[0].held;
        let meter = run[0]
            .lease()
            .kind
            .map(|kind| &pool.kinds[kind].meters[held.queue]);
        for (done, verdict) in run.iter().zip(&mut verdicts) {
            close_one(pool, done, *verdict, meter, now);
        }
        pool.end_all(held, run.iter().map(|done| done.index));
    }
}

fn close_one(pool: &Pool, done: &Done, verdict: Verdict, meter: Option<&KindMeter>, now: Instant) {
    let Done {
        held,
        outcome,
        times,
        ..
    } = done;
    let lease = done.lease();
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    match verdict {
        Verdict::Held { late, cancel } => {
            if late {
                pool.queues[held.queue].meter.late();
            }
            if let Some(meter) = meter {
                times.record(meter);
                let left = held.deadline().saturating_duration_since(now);
                let release = Release {
                    held: now - held.claimed,
                    margin: left.as_secs_f64() / held.grant.term.as_secs_f64(),
                    attempt: job.attempt(),
                };
                meter.released(outcome, cancel, &release);
            }
            pool.observers.emit(|| Event::Settled {
                queue,
                job,
                token,
                outcome,
                late,
                cancel,
            });
        }
        Verdict::Fenced => {
            pool.queues[held.queue].meter.settle_fenced();
            let (verb, job) = (Verb::Settle, job.id);
            pool.observers.emit(|| Event::Fenced {
                verb,
                queue,
                job,
                token,
            });
        }
    }
}

impl Done {
    fn lease(&self) -> &HeldLease {
        &self.held.leases[self.index]
    }
}

impl Times {
    fn record(&self, meter: &KindMeter) {
        if let Some(waited) = self.waited {
            meter.started(waited);
            meter.finished(self.ran);
        }
    }
}

/// A slot is done with a lease.
pub(crate) fn hand_in(
    pool: &Pool,
    held: Arc<Run>,
    index: usize,
    ran: Ran,
    slot: usize,
    times: Times,
) {
    let at = held.queue;
    let lease = &held.leases[index];
    lease.hand_in();
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    if let Some(verdict) = lease.completed() {
        return completed(pool, &held, index, &ran, slot, times, verdict);
    }
    let stopped = lease.stopped();
    // One that ran out before its handler began goes back: nobody worked under it, the receipt
    // keeps that safe, and a slow store must not move a job toward dead.
    let unused = times.waited.is_none() && stopped == Some(Stop::Deadline);
    let mut outcome = if stopped.is_some_and(|stop| stop.lost().is_some()) && !unused {
        None
    } else {
        decide(job, &pool.queues[at], ran, stopped, token, fastrand::f64)
    };
    if let Some(Outcome::Complete { result }) = &mut outcome {
        *result = lease.result();
    }
    let run = times.ran;
    pool.observers.emit(|| Event::Finished {
        queue,
        job,
        token,
        run,
        outcome: outcome.as_ref(),
    });
    let Some(outcome) = outcome else {
        if let Some(kind) = lease.kind {
            times.record(&pool.kinds[kind].meters[at]);
        }
        pool.outbox.push(slot, at, times, None);
        pool.end(&held, index);
        return;
    };
    pool.outbox.push(
        slot,
        at,
        times,
        Some(Done {
            held,
            index,
            outcome,
            times,
        }),
    );
}

/// A slot is done with a lease that its handler has completed in a transaction of its own: there is
/// nothing left to settle, whatever the handler did afterwards.
fn completed(
    pool: &Pool,
    held: &Arc<Run>,
    index: usize,
    ran: &Ran,
    slot: usize,
    times: Times,
    verdict: Verdict,
) {
    let at = held.queue;
    let lease = &held.leases[index];
    let result = lease.result();
    let outcome = Outcome::Complete { result };
    let (queue, job, token, run) = (&held.grant.queue, &*lease.job, lease.token, times.ran);
    if !matches!(ran, Ran::Returned(Ok(()))) {
        tracing::warn!(%queue, job = %job.id, "a handler failed after it had completed its job");
    }
    pool.observers.emit(|| Event::Finished {
        queue,
        job,
        token,
        run,
        outcome: Some(&outcome),
    });
    let meter = lease.kind.map(|kind| &pool.kinds[kind].meters[at]);
    pool.outbox.push(slot, at, times, None);
    let done = Done {
        held: Arc::clone(held),
        index,
        outcome,
        times,
    };
    close_one(pool, &done, verdict, meter, monotonic());
}

/// What a run's end means for the lease. Pure. None: settle nothing.
fn decide(
    job: &JobRecord,
    queue: &PoolQueue,
    ran: Ran,
    stopped: Option<Stop>,
    token: FencingToken,
    jitter: impl Fn() -> f64,
) -> Option<Outcome> {
    let failed = |reason: String| {
        let failures = job.failures + 1;
        if failures >= job.options.max_failures.unwrap_or(queue.max_failures) {
            return Outcome::Bury { reason };
        }
        let policy = job.options.retry.unwrap_or(queue.retry);
        Outcome::Retry {
            delay: policy.delay(failures, jitter()).min(limits::DURATION_MAX),
            reason,
        }
    };
    let surrender = |delay: Duration| Outcome::Surrender {
        delay: delay.min(limits::DURATION_MAX),
        mark: None,
    };
    Some(match ran {
        Ran::Returned(Ok(())) => Outcome::Complete { result: None },
        Ran::Returned(Err(failure)) => return wished(&failure, stopped, token, failed, surrender),
        Ran::Panicked(reason) => failed(reason),
        Ran::TimedOut(limit) => failed(format!("timed out after {limit:?}")),
        Ran::Dropped => surrender(Duration::ZERO),
        Ran::UnknownKind => surrender(UNKNOWN_KIND_DELAY),
    })
}

fn wished(
    failure: &Failure,
    stopped: Option<Stop>,
    token: FencingToken,
    failed: impl Fn(String) -> Outcome,
    surrender: impl Fn(Duration) -> Outcome,
) -> Option<Outcome> {
    let reason = failure.reason();
    Some(match failure.wish {
        Wish::Lost => return None,
        Wish::Bury => Outcome::Bury { reason },
        Wish::Snooze(delay) => surrender(delay),
        Wish::RetryIn(delay) => match failed(reason) {
            Outcome::Retry { reason, .. } => Outcome::Retry {
                delay: delay.min(limits::DURATION_MAX),
                reason,
            },
            bury => bury,
        },
        Wish::Behind(mark) => {
            // A mark that no issuer could have given yet would make the job loop.
            let believable = token
                .get()
                .saturating_add(Issuer::BELIEF.as_micros() as u64);
            if mark.get() > believable {
                failed(format!("broken fence: {reason}"))
            } else {
                Outcome::Surrender {
                    delay: Duration::ZERO,
                    mark: Some(mark),
                }
            }
        }
        // A handler that heeds its bell and returns early has not failed: a deploy must not move a
        // job toward dead.
        Wish::Policy if stopped.is_some() => surrender(Duration::ZERO),
        Wish::Policy => failed(reason),
    })
}
