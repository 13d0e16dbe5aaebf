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
use tracing::Instrument as _;

use super::fence::{Held, HeldLease, Stop};
use super::lane::{Answer, Lane};
use super::pool::{Pool, PoolQueue, Run};
use super::run::{Ran, caught};
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

/// A run that takes longer is measured while it lasts; a shorter one when it ends, which costs no
/// look at the clock.
const LONG_RUN: Duration = Duration::from_millis(10);

/// Leases whose handlers have ended, and the lane to settle them.
///
/// In shards, so that slots on different threads seldom meet.
pub(crate) struct Outbox {
    shards: Box<[Mutex<Shard>]>,
    /// Rings when something waits to be settled.
    soon: Notify,
    /// Rings when it should not wait any longer.
    now: Notify,
    /// Up to when long runs have been measured.
    measured: Mutex<Instant>,
    lane: Arc<tokio::sync::Mutex<Lane>>,
}

/// What some of the slots have handed in.
#[derive(Default)]
struct Shard {
    batch: Batch,
    /// Handlers that have ended.
    finished: u64,
    /// How long handlers ran since it was last asked, by queue.
    busy: Vec<Duration>,
    /// Nobody settles any longer.
    closed: bool,
}

/// Leases to be settled.
#[derive(Default)]
struct Batch {
    runs: Vec<RunDone>,
    leases: usize,
}

/// Leases of one run: neighbours share one count of references, which the slot and the settler would
/// otherwise pull to and fro, and change hands together.
struct RunDone {
    run: Arc<Run>,
    done: Vec<Done>,
}

/// A lease to be settled.
struct Done {
    index: usize,
    outcome: Outcome,
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    fn push(&mut self, run: &Arc<Run>, done: Done) {
        self.leases += 1;
        match self.runs.last_mut() {
            Some(last) if Arc::ptr_eq(&last.run, run) => last.done.push(done),
            _ => {
                let mut all = Vec::with_capacity(run.length());
                all.push(done);
                let run = Arc::clone(run);
                self.runs.push(RunDone { run, done: all });
            }
        }
    }

    /// Takes over as many of the other's runs as there is room for.
    fn take(&mut self, other: &mut Self, most: usize) {
        let mut room = most - self.leases;
        let fits = |run: &&RunDone| {
            let left = room.checked_sub(run.done.len());
            room = left.unwrap_or(room);
            left.is_some()
        };
        let runs = other.runs.iter().take_while(fits).count();
        let taken = most - self.leases - room;
        self.runs.extend(other.runs.drain(..runs));
        self.leases += taken;
        other.leases -= taken;
    }
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
            measured: Mutex::new(monotonic()),
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
    fn push(&self, slot: usize, queue: usize, times: Times, done: Option<(&Arc<Run>, Done)>) {
        let mut shard = self.shard(slot);
        if times.waited.is_some() {
            shard.finished += 1;
            shard.busy[queue] += self.unmeasured(times.ran);
        }
        let Some((run, done)) = done.filter(|_| !shard.closed) else {
            return;
        };
        shard.batch.push(run, done);
        let gathered = shard.batch.leases;
        drop(shard);
        if gathered == BATCH {
            self.now.notify_one();
        } else if gathered == 1 {
            self.soon.notify_one();
        }
    }

    /// What no measurement has seen of a run that ends now.
    fn unmeasured(&self, ran: Duration) -> Duration {
        if ran < LONG_RUN {
            return ran;
        }
        let measured = *self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        ran.min(measured.elapsed())
    }

    /// From now on, long runs count from here. Returns from where they counted.
    pub(crate) fn measure(&self, now: Instant) -> Instant {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut measured, now)
    }

    /// Sends what the slot has handed in, however little.
    pub(crate) fn flush(&self, slot: usize) {
        if !self.shard(slot).batch.is_empty() {
            self.now.notify_one();
        }
    }

    /// Sends everything.
    pub(crate) fn flush_all(&self) {
        self.now.notify_one();
    }

    /// Lets go of what waits, and takes in no more: what is handed in knows the pool, and each would
    /// keep the other.
    pub(crate) fn close(&self) {
        for mut shard in self.all() {
            shard.closed = true;
            shard.batch = Batch::default();
        }
    }

    /// Handlers that have ended.
    pub(crate) fn finished(&self) -> u64 {
        self.all().map(|shard| shard.finished).sum()
    }

    /// How long handlers of a queue ran that ended since it was last asked.
    pub(crate) fn take_busy(&self, queue: usize) -> Duration {
        self.all()
            .map(|mut shard| std::mem::take(&mut shard.busy[queue]))
            .sum()
    }

    fn take(&self) -> Batch {
        let mut batch = Batch::default();
        for mut shard in self.all() {
            batch.take(&mut shard.batch, limits::CALL_ITEMS);
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
    batch: Batch,
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
                let span = tracing::debug_span!("store.settle", leases = batch.leases);
                async move { store.settle(request).await }.instrument(span)
            });
            match call.await {
                Answer::Known(verdicts) => {
                    pool.meter.settled(sent.elapsed());
                    return close(pool, &self.batch, &verdicts);
                }
                // Receipts make it safe to go again under a new id: what was applied is fenced.
                Answer::Lost => {}
                Answer::Refused(error) | Answer::GaveUp(error) => {
                    tracing::error!(%error, leases = self.batch.leases, "leases left to expire");
                    for RunDone { run, done } in &self.batch.runs {
                        let left = done.iter().map(|done| &run.leases[done.index]);
                        left.for_each(HeldLease::let_lapse);
                        pool.end_all(run, done.iter().map(|done| done.index));
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

fn settlements(batch: &Batch) -> Vec<Settlement> {
    let mut settlements = Vec::with_capacity(batch.leases);
    for RunDone { run, done } in &batch.runs {
        settlements.extend(done.iter().map(|done| Settlement {
            receipt: run.receipt(done.index),
            outcome: done.outcome.clone(),
        }));
    }
    settlements
}

/// The verdicts are known: counts them, and lets go of the leases.
fn close(pool: &Pool, batch: &Batch, verdicts: &[Verdict]) {
    let now = monotonic();
    let mut verdicts = verdicts.iter();
    for RunDone { run, done } in &batch.runs {
        let release = Release::at(run, now);
        for (done, verdict) in done.iter().zip(&mut verdicts) {
            close_one(pool, run, done, *verdict, release);
        }
        pool.end_all(run, done.iter().map(|done| done.index));
    }
}

fn close_one(pool: &Pool, held: &Held, done: &Done, verdict: Verdict, release: Release) {
    let Done { index, outcome } = done;
    let lease = &held.leases[*index];
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    match verdict {
        Verdict::Held { late, cancel } => {
            if late {
                pool.queues[held.queue].meter.late();
            }
            if let Some(kind) = lease.kind {
                let meter = &pool.kinds[kind].meters[held.queue];
                meter.released(outcome, cancel, job.attempt(), release);
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

impl Release {
    fn at(held: &Held, now: Instant) -> Self {
        let left = held.deadline().saturating_duration_since(now);
        Self {
            held: now - held.claimed,
            margin: left.as_secs_f64() / held.grant.term.as_secs_f64(),
        }
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
    held: &Arc<Run>,
    index: usize,
    ran: Ran,
    slot: usize,
    times: Times,
) {
    let at = held.queue;
    let lease = &held.leases[index];
    lease.hand_in();
    if let Some(kind) = lease.kind {
        times.record(&pool.kinds[kind].meters[at]);
    }
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    if let Some(verdict) = lease.completed() {
        completed(pool, held, index, &ran, slot, times, verdict);
        let _ = caught(|| drop(ran));
        return;
    }
    let stopped = lease.stopped();
    // One that ran out before its handler began goes back: nobody worked under it, the receipt
    // keeps that safe, and a slow store must not move a job toward dead.
    let unused = times.waited.is_none() && stopped == Some(Stop::Deadline);
    let is_lost = stopped.is_some_and(|stop| stop.lost().is_some()) && !unused;
    let outcome_of = |ran| {
        if is_lost {
            return None;
        }
        decide(job, &pool.queues[at], ran, stopped, token, fastrand::f64)
    };
    // A failure's words are its author's code, and so is what happens when it is dropped.
    let outcome = caught(|| outcome_of(ran));
    let mut outcome = outcome.unwrap_or_else(|panic| outcome_of(Ran::Panicked(panic)));
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
        if !is_lost {
            lease.let_lapse();
        }
        pool.outbox.push(slot, at, times, None);
        pool.end(held, index);
        return;
    };
    let done = Done { index, outcome };
    pool.outbox.push(slot, at, times, Some((held, done)));
}

/// A slot is done with a lease that its handler has completed in a transaction of its own: there is
/// nothing left to settle, whatever the handler did afterwards.
fn completed(
    pool: &Pool,
    held: &Held,
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
    pool.outbox.push(slot, at, times, None);
    let done = Done { index, outcome };
    close_one(pool, held, &done, verdict, Release::at(held, monotonic()));
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
            // A mark that no issuer could have given yet would make the job loop, and so would one
            // for which no fence refuses this token.
            let believable = token
                .get()
                .saturating_add(Issuer::BELIEF.as_micros() as u64);
            if mark.get() > believable || mark < token {
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
