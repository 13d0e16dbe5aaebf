//! Settling: end each lease with the receipt of that one claim.
//!
//! Slots hand in how their handlers ended; the settler sends what has gathered in one call, and the
//! next call gathers while that one is under way. A claim that is about to be sent takes the
//! waiting settlements along. A settlement is repeated until its verdict is known.
//!
//! A lost lease is settled by nobody: what its handler produced counts for nothing.
//!
//! Before: [`run`](super::slots) ended. After: the job is completed, waits, or is dead.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::held::{Held, HeldLease, Stop};
use super::nap::Nap;
use super::pool::{Pool, PoolQueue, Run};
use super::slots::{Ran, caught};
use crate::calls::lane::{Answer, Lane};
use crate::clock::monotonic;
use crate::error::{Result, Verb};
use crate::handler::{Failure, Wish};
use crate::job::JobRecord;
use crate::lease::{FencingToken, Verdict};
use crate::limits;
use crate::observe::Event;
use crate::observe::metrics::{KindMeter, Release};
use crate::rules::issue::Issuer;
use crate::store::{Outcome, RequestId, SettleRequest, Settlement};

/// As many leases of some slots are worth a call at once. At the pace at which so many gather in less
/// than [`GATHER`] there are claims all the time, which take them along; a call of their own would
/// only meet those in the store.
const BATCH: u64 = 4_096;

/// How long the first settlement waits for others while the slots are busy.
const GATHER: Duration = Duration::from_millis(1);

/// How long a job of unknown kind is put off: a rolling deploy will bring its handler.
const UNKNOWN_KIND_DELAY: Duration = Duration::from_secs(30);

/// A run that takes longer is measured while it lasts; a shorter one when it ends, which costs no
/// look at the clock.
const LONG_RUN: Duration = Duration::from_millis(10);

/// Leases whose handlers have ended, and the lane to settle them.
///
/// A lease that is to be completed is left where it is, and gathered when a call is about to be
/// sent: between its handler and the settlement no slot waits for another.
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    counts: Box<[Count]>,
    /// Whoever hands in a lease while the settler sleeps wakes it.
    nap: Nap,
    /// Rings when something waits to be settled.
    soon: Notify,
    /// Rings when it should not wait any longer.
    now: Notify,
    /// Up to when long runs have been measured.
    measured: Mutex<Instant>,
    lane: Arc<tokio::sync::Mutex<Lane>>,
}

/// What is not settled yet.
#[derive(Default)]
struct Waiting {
    /// Runs in which leases may have been left.
    open: Vec<Open>,
    /// Leases that end in another way than completed.
    others: Batch,
    /// Nobody settles any longer.
    closed: bool,
}

/// A run, and the first of its leases that may still be left.
struct Open {
    run: Arc<Run>,
    first: usize,
}

/// What some of the slots have done. In memory of its own, so that slots on different threads seldom
/// meet.
#[repr(align(128))]
struct Count {
    /// Handlers that have ended.
    finished: AtomicU64,
    /// Nanoseconds for which handlers ran since it was last asked, by queue.
    busy: Box<[AtomicU64]>,
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
    ends: Ends,
}

/// How leases of one run end.
enum Ends {
    /// These are completed.
    Completed(Range<usize>),
    /// Each in its own way.
    Others(Vec<Done>),
}

/// A lease to be settled.
struct Done {
    index: usize,
    outcome: Outcome,
}

impl Open {
    /// Takes along what has been left, as long as there is room.
    fn gather(&mut self, batch: &mut Batch, most: usize) {
        let begun = self.run.begun();
        let mut in_order = true;
        for index in self.first..begun {
            if batch.leases == most {
                return;
            }
            let lease = &self.run.leases[index];
            if lease.take_along() {
                batch.complete(&self.run, index);
            } else {
                in_order &= lease.is_gone();
            }
            self.first += usize::from(in_order);
        }
    }

    fn is_over(&self) -> bool {
        self.first == self.run.places().end
    }
}

impl RunDone {
    fn leases(&self) -> usize {
        match &self.ends {
            Ends::Completed(range) => range.len(),
            Ends::Others(done) => done.len(),
        }
    }

    /// The places of its leases in the grant.
    fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        let (range, others) = match &self.ends {
            Ends::Completed(range) => (range.clone(), &[][..]),
            Ends::Others(done) => (0..0, &done[..]),
        };
        range.chain(others.iter().map(|done| done.index))
    }
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// A lease of the run is completed.
    fn complete(&mut self, run: &Arc<Run>, index: usize) {
        self.leases += 1;
        match self.runs.last_mut() {
            Some(RunDone {
                run: last,
                ends: Ends::Completed(range),
            }) if range.end == index && Arc::ptr_eq(last, run) => range.end += 1,
            _ => self.runs.push(RunDone {
                run: Arc::clone(run),
                ends: Ends::Completed(index..index + 1),
            }),
        }
    }

    /// A lease of the run ends in another way.
    fn push(&mut self, run: &Arc<Run>, done: Done) {
        self.leases += 1;
        match self.runs.last_mut() {
            Some(RunDone {
                run: last,
                ends: Ends::Others(all),
            }) if Arc::ptr_eq(last, run) => all.push(done),
            _ => self.runs.push(RunDone {
                run: Arc::clone(run),
                ends: Ends::Others(vec![done]),
            }),
        }
    }

    /// Takes over as many of the other's runs as there is room for.
    fn take(&mut self, other: &mut Self, most: usize) {
        let mut room = most - self.leases;
        let fits = |run: &&RunDone| {
            let left = room.checked_sub(run.leases());
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

/// Handlers of one slot that have ended, and are not counted yet.
pub(crate) struct Tally {
    slot: usize,
    queue: usize,
    finished: u64,
    busy: Duration,
}

impl Tally {
    pub(crate) fn of(slot: usize) -> Self {
        Self {
            slot,
            queue: 0,
            finished: 0,
            busy: Duration::ZERO,
        }
    }

    /// A handler for a job of this queue has ended.
    pub(crate) fn add(&mut self, outbox: &Outbox, queue: usize, ran: Duration) {
        if self.queue != queue {
            self.tell(outbox);
            self.queue = queue;
        }
        self.finished += 1;
        self.busy += outbox.unmeasured(ran);
    }

    /// Has them counted: once for many, because other slots may count in the same memory.
    pub(crate) fn tell(&mut self, outbox: &Outbox) {
        if self.finished > 0 {
            outbox.count(self);
            (self.finished, self.busy) = (0, Duration::ZERO);
        }
    }
}

impl Outbox {
    pub(crate) fn new(lane: Lane, slots: usize, queues: usize) -> Self {
        let count = || Count {
            finished: AtomicU64::new(0),
            busy: (0..queues).map(|_| AtomicU64::new(0)).collect(),
        };
        Self {
            waiting: Mutex::default(),
            counts: (0..slots.min(16)).map(|_| count()).collect(),
            nap: Nap::begun(),
            soon: Notify::new(),
            now: Notify::new(),
            measured: Mutex::new(monotonic()),
            lane: Arc::new(tokio::sync::Mutex::new(lane)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs whose leases will be handed in.
    pub(crate) fn open(&self, runs: impl Iterator<Item = Arc<Run>>) {
        let open = runs.map(|run| Open {
            first: run.places().start,
            run,
        });
        let mut waiting = self.lock();
        if !waiting.closed {
            waiting.open.extend(open);
        }
    }

    /// Lets go of runs of which nothing is left.
    #[cfg(feature = "testing")]
    pub(crate) fn sweep(&self) {
        let over = |open: &Open| open.run.places().all(|at| open.run.leases[at].is_gone());
        self.lock().open.retain(|open| !over(open));
    }

    /// Lets go of what waits, and takes in no more: what is handed in knows the pool, and each would
    /// keep the other.
    pub(crate) fn close(&self) {
        *self.lock() = Waiting {
            closed: true,
            ..Waiting::default()
        };
    }

    /// Takes in a lease that ends in another way than completed.
    fn push(&self, run: &Arc<Run>, done: Done) {
        let mut waiting = self.lock();
        if !waiting.closed {
            waiting.others.push(run, done);
        }
    }

    /// Counts handlers that have ended.
    fn count(&self, done: &Tally) {
        let count = &self.counts[done.slot % self.counts.len()];
        let before = count.finished.fetch_add(done.finished, Ordering::Relaxed);
        count.busy[done.queue].fetch_add(done.busy.as_nanos() as u64, Ordering::Relaxed);
        if before / BATCH != (before + done.finished) / BATCH {
            self.now.notify_one();
        }
    }

    /// Something has been handed in.
    fn ring(&self) {
        if self.nap.end() {
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

    /// What has been handed in should not wait any longer. If the settler sleeps, nothing has.
    pub(crate) fn flush(&self) {
        if !self.nap.is_asleep() {
            self.now.notify_one();
        }
    }

    /// Sends everything.
    pub(crate) fn flush_all(&self) {
        self.now.notify_one();
    }

    /// Handlers that have ended.
    pub(crate) fn finished(&self) -> u64 {
        let counts = self.counts.iter();
        counts
            .map(|count| count.finished.load(Ordering::Relaxed))
            .sum()
    }

    /// How long handlers of a queue ran that ended since it was last asked.
    pub(crate) fn take_busy(&self, queue: usize) -> Duration {
        let counts = self.counts.iter();
        let busy = counts.map(|count| count.busy[queue].swap(0, Ordering::Relaxed));
        Duration::from_nanos(busy.sum())
    }

    fn take(&self) -> Batch {
        let mut batch = Batch::default();
        let mut waiting = self.lock();
        let Waiting { open, others, .. } = &mut *waiting;
        batch.take(others, limits::CALL_ITEMS);
        open.retain_mut(|open| {
            open.gather(&mut batch, limits::CALL_ITEMS);
            !open.is_over()
        });
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
                    for ended in &self.batch.runs {
                        let left = ended.indices().map(|index| &ended.run.leases[index]);
                        left.for_each(HeldLease::let_lapse);
                        pool.end_all(&ended.run, ended.indices());
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
            let left = || Some(outbox.take()).filter(|batch| !batch.is_empty());
            let Some(batch) = outbox.nap.unless(left) else {
                break;
            };
            Ride { lane, batch }.send(&pool).await;
        }
    }
}

fn settlements(batch: &Batch) -> Vec<Settlement> {
    let mut settlements = Vec::with_capacity(batch.leases);
    for RunDone { run, ends } in &batch.runs {
        match ends {
            Ends::Completed(range) => settlements.extend(range.clone().map(|index| Settlement {
                receipt: run.receipt(index),
                outcome: completion(&run.leases[index]),
            })),
            Ends::Others(done) => settlements.extend(done.iter().map(|done| Settlement {
                receipt: run.receipt(done.index),
                outcome: done.outcome.clone(),
            })),
        }
    }
    settlements
}

fn completion(lease: &HeldLease) -> Outcome {
    let result = lease.result();
    Outcome::Complete { result }
}

/// The verdicts are known: counts them, and lets go of the leases.
fn close(pool: &Pool, batch: &Batch, verdicts: &[Verdict]) {
    let now = monotonic();
    let mut verdicts = verdicts.iter().copied();
    for ended in &batch.runs {
        let RunDone { run, ends } = ended;
        let release = Release::at(run, now);
        match ends {
            Ends::Completed(range) => {
                close_completed(pool, run, range.clone().zip(&mut verdicts), release);
            }
            Ends::Others(done) => {
                for (Done { index, outcome }, verdict) in done.iter().zip(&mut verdicts) {
                    close_one(pool, run, *index, outcome, verdict, release);
                }
            }
        }
        pool.end_all(run, ended.indices());
    }
}

/// As [`close_one`] for each; neighbours that are alike are counted together.
fn close_completed(
    pool: &Pool,
    held: &Held,
    verdicts: impl Iterator<Item = (usize, Verdict)>,
    release: Release,
) {
    let meter = |kind: usize| &pool.kinds[kind].meters[held.queue];
    let mut alike: Option<((usize, u32), u64)> = None;
    for (index, verdict) in verdicts {
        let lease = &held.leases[index];
        let outcome = completion(lease);
        let (Verdict::Held { late: false, .. }, Some(kind)) = (verdict, lease.kind()) else {
            close_one(pool, held, index, &outcome, verdict, release);
            continue;
        };
        let this = (kind, lease.attempt);
        match &mut alike {
            Some((last, count)) if *last == this => *count += 1,
            alike => {
                if let Some(((kind, attempt), count)) = alike.replace((this, 1)) {
                    meter(kind).released(&outcome, false, attempt, release, count);
                }
            }
        }
        settled(pool, held, index, &outcome, verdict);
    }
    if let Some(((kind, attempt), count)) = alike {
        let outcome = Outcome::Complete { result: None };
        meter(kind).released(&outcome, false, attempt, release, count);
    }
}

fn close_one(
    pool: &Pool,
    held: &Held,
    index: usize,
    outcome: &Outcome,
    verdict: Verdict,
    release: Release,
) {
    let lease = &held.leases[index];
    let queue = &pool.queues[held.queue];
    match verdict {
        Verdict::Held { late, cancel } => {
            if late {
                queue.meter.late();
            }
            if let Some(kind) = lease.kind() {
                let meter = &pool.kinds[kind].meters[held.queue];
                meter.released(outcome, cancel, lease.attempt, release, 1);
            }
        }
        Verdict::Fenced => queue.meter.settle_fenced(),
    }
    settled(pool, held, index, outcome, verdict);
}

/// Tells whoever watches what became of a settlement.
fn settled(pool: &Pool, held: &Held, index: usize, outcome: &Outcome, verdict: Verdict) {
    let lease = &held.leases[index];
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    pool.observers.emit(|| match verdict {
        Verdict::Held { late, cancel } => Event::Settled {
            queue,
            job,
            token,
            outcome,
            late,
            cancel,
        },
        Verdict::Fenced => Event::Fenced {
            verb: Verb::Settle,
            queue,
            job: job.id,
            token,
        },
    });
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
pub(crate) fn hand_in(pool: &Pool, held: &Arc<Run>, index: usize, ran: Ran, times: Times) {
    let at = held.queue;
    let lease = &held.leases[index];
    lease.hand_in();
    if let Some(kind) = lease.kind() {
        times.record(&pool.kinds[kind].meters[at]);
    }
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    if let Some(verdict) = lease.completed() {
        completed(pool, held, index, &ran, times, verdict);
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
    let outcome = match ran {
        Ran::Returned(Ok(())) if !is_lost => Some(completion(lease)),
        // A failure's words are its author's code, and so is what happens when it is dropped.
        ran => caught(|| outcome_of(ran)).unwrap_or_else(|panic| outcome_of(Ran::Panicked(panic))),
    };
    let run = times.ran;
    pool.observers.emit(|| Event::Finished {
        queue,
        job,
        token,
        run,
        outcome: outcome.as_ref(),
    });
    match outcome {
        None => {
            if !is_lost {
                lease.let_lapse();
            }
            return pool.end(held, index);
        }
        Some(Outcome::Complete { .. }) => lease.leave(),
        Some(outcome) => pool.outbox.push(held, Done { index, outcome }),
    }
    pool.outbox.ring();
}

/// A slot is done with a lease that its handler has completed in a transaction of its own: there is
/// nothing left to settle, whatever the handler did afterwards.
fn completed(pool: &Pool, held: &Held, index: usize, ran: &Ran, times: Times, verdict: Verdict) {
    let lease = &held.leases[index];
    let outcome = completion(lease);
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
    let release = Release::at(held, monotonic());
    close_one(pool, held, index, &outcome, verdict, release);
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
        // Handed back, it would be claimed again at once, and come too late again.
        Ran::TooShort(granted) => failed(format!(
            "its lease of {granted:?} was over before it arrived; \
             the job's own term or lifetime is too short for this store"
        )),
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
