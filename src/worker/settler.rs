//! Settling: end each lease with the receipt of that one claim.
//!
//! ```text
//!   slots ── hand_in ──► outbox ──► settler ──► store
//! ```
//!
//! Slots hand in how their handlers ended. The settler sends what has gathered in one call, and the
//! next call gathers while that one is under way. A settlement is repeated until its verdict is
//! known. A [lost](super::lost) lease is not settled.
//!
//! Before: a [slot](super::slots) ran the handler. After: the job is completed, waits, or is dead.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::declines::decline;
use super::held::{HeldGrant, HeldLease};
use super::lost;
use super::outcome::{Decision, Facts, HandlerEnd, decide};
use super::pool::Pool;
use crate::calls::lane::{Answer, Lane};
use crate::clock::monotonic;
use crate::error::Verb;
use crate::lease::Verdict;
use crate::limits;
use crate::observe::Event;
use crate::observe::metrics::Release;
use crate::store::{Outcome, SettleRequest, Settlement};

/// How long the first settlement waits for others while the slots are busy.
const GATHER: Duration = Duration::from_millis(1);

/// Leases whose handlers have ended. In cache lines of its own, because all slots write here.
#[repr(align(128))]
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    /// Wakes the settler: something waits.
    filled: Notify,
    /// What waits should be sent now.
    flush: Notify,
}

struct Waiting {
    leases: Vec<EndedLease>,
    /// Whether the settler sleeps until something is handed in.
    settler_sleeps: bool,
    /// Nobody settles any longer.
    closed: bool,
}

/// A lease to be settled.
struct EndedLease {
    held: Arc<HeldGrant>,
    index: usize,
    outcome: Outcome,
}

impl EndedLease {
    fn lease(&self) -> &HeldLease {
        &self.held.leases[self.index]
    }

    fn settlement(&self) -> Settlement {
        Settlement {
            receipt: self.held.receipt(self.index),
            outcome: self.outcome.clone(),
        }
    }
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            waiting: Mutex::new(Waiting {
                leases: Vec::new(),
                settler_sleeps: true,
                closed: false,
            }),
            filled: Notify::new(),
            flush: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, lease: EndedLease) {
        let mut waiting = self.lock();
        if waiting.closed {
            return;
        }
        waiting.leases.push(lease);
        let slept = std::mem::replace(&mut waiting.settler_sleeps, false);
        drop(waiting);
        if slept {
            self.filled.notify_one();
        }
    }

    /// Whether something waits, or is being settled.
    fn is_filled(&self) -> bool {
        !self.lock().settler_sleeps
    }

    /// What waits should not wait any longer.
    pub(crate) fn flush(&self) {
        if self.is_filled() {
            self.flush.notify_one();
        }
    }

    /// Forgets what waits, and takes nothing more: a lease that waits here knows the pool, and each
    /// would keep the other.
    pub(crate) fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        waiting.leases.clear();
    }

    /// What goes into the next call. None: nothing waits, and the settler can sleep.
    fn take(&self) -> Option<Vec<EndedLease>> {
        let mut waiting = self.lock();
        let most = waiting.leases.len().min(limits::CALL_ITEMS);
        let batch: Vec<_> = waiting.leases.drain(..most).collect();
        waiting.settler_sleeps = batch.is_empty();
        (!batch.is_empty()).then_some(batch)
    }
}

/// Settles what the slots hand in, until the pool is done.
pub(crate) async fn settler(pool: Arc<Pool>) {
    let outbox = &pool.outbox;
    let mut lane = pool.session.lane();
    loop {
        tokio::select! {
            biased;
            () = outbox.flush.notified() => {}
            // A flush that came together with the first lease has sent it already.
            () = outbox.filled.notified() => if outbox.is_filled() {
                let _ = tokio::time::timeout(GATHER, outbox.flush.notified()).await;
            }
        }
        settle_waiting(&pool, &mut lane).await;
    }
}

/// Settles call after call, until nothing waits.
pub(crate) async fn settle_waiting(pool: &Pool, lane: &mut Lane) {
    while let Some(leases) = pool.outbox.take() {
        settle(pool, lane, &leases).await;
    }
}

/// Sends settlements in one call, until their verdicts are known.
async fn settle(pool: &Pool, lane: &mut Lane, leases: &[EndedLease]) {
    let sent = monotonic();
    loop {
        let call = lane.call(Duration::MAX, |store, request| {
            let settlements = leases.iter().map(EndedLease::settlement).collect();
            let request = SettleRequest {
                request,
                settlements,
            };
            let span = tracing::debug_span!("store.settle", leases = leases.len());
            async move { store.settle(request).await }.instrument(span)
        });
        match call.await {
            Answer::Known(verdicts) => {
                pool.meter.settled(sent.elapsed());
                return close(pool, leases, &verdicts);
            }
            // Receipts make it safe to go again under a new id: what was applied is refused, and
            // only the store knew that it was.
            Answer::Lost => leases.iter().for_each(|left| left.lease().doubt()),
            Answer::Refused(error) | Answer::GaveUp(error) => {
                tracing::error!(%error, leases = leases.len(), "leases left to expire");
                for left in leases {
                    left.lease().let_lapse();
                    pool.end(&left.held, left.index);
                }
                return;
            }
        }
    }
}

/// The verdicts are known: counts them, tells the observers, and lets go of the leases.
fn close(pool: &Pool, leases: &[EndedLease], verdicts: &[Verdict]) {
    let now = monotonic();
    let settled: Vec<_> = leases.iter().zip(verdicts.iter().copied()).collect();
    for alike in settled.chunk_by(are_alike) {
        let Some(&(first, verdict)) = alike.first() else {
            continue;
        };
        let (held, lease) = (&first.held, first.lease());
        let (queue, count) = (&pool.queues[held.queue].meter, alike.len() as u64);
        match verdict {
            Verdict::Held { late, cancel } => {
                if late {
                    queue.late(count);
                }
                if let Some(kind) = lease.kind() {
                    let meter = &pool.kinds[kind].meters[held.queue];
                    let release = Release::at(held, now);
                    meter.released(&first.outcome, cancel, lease.attempt, release, count);
                }
            }
            Verdict::Fenced => {}
        }
        for (lease, verdict) in alike {
            tell(pool, lease, *verdict);
        }
        pool.end_all(held, alike.iter().map(|(lease, _)| lease.index));
    }
}

/// Whether two settlements count alike. Neighbours mostly do, and are counted together.
fn are_alike(one: &(&EndedLease, Verdict), other: &(&EndedLease, Verdict)) -> bool {
    let key = |(lease, verdict): &(&EndedLease, Verdict)| {
        let (grant, outcome) = (&lease.held, &lease.outcome);
        let (grant, outcome) = (Arc::as_ptr(grant), std::mem::discriminant(outcome));
        let lease = lease.lease();
        (grant, lease.kind(), lease.attempt, outcome, *verdict)
    };
    key(one) == key(other)
}

/// Tells the observers what became of a settlement.
fn tell(pool: &Pool, settled: &EndedLease, verdict: Verdict) {
    let (held, lease) = (&settled.held, settled.lease());
    match verdict {
        Verdict::Held { late, cancel } => pool.observers.emit(|| Event::Settled {
            queue: &held.grant.queue,
            job: &lease.job,
            token: lease.token,
            outcome: &settled.outcome,
            late,
            cancel,
        }),
        Verdict::Fenced => lost::refused(pool, held, settled.index, Verb::Settle),
    }
}

impl Release {
    fn at(held: &HeldGrant, now: Instant) -> Self {
        let left = held.deadline().saturating_duration_since(now);
        Self {
            held: now - held.claimed,
            margin: left.as_secs_f64() / held.grant.term.as_secs_f64(),
        }
    }
}

/// What a handler took.
#[derive(Clone, Copy, Default)]
pub(crate) struct Times {
    /// From due to the start of the handler. None if it never started.
    pub(crate) waited: Option<Duration>,
    /// From the start of the handler to its end.
    pub(crate) ran: Duration,
}

/// A slot is done with a lease.
pub(crate) fn hand_in(
    pool: &Pool,
    held: Arc<HeldGrant>,
    index: usize,
    ended: HandlerEnd,
    times: Times,
) {
    let lease = &held.leases[index];
    lease.hand_in();
    pool.handed_in(held.queue);
    if let (Some(kind), Some(waited)) = (lease.kind(), times.waited) {
        let meter = &pool.kinds[kind].meters[held.queue];
        meter.started(waited);
        meter.finished(times.ran);
    }
    let verdict = lease.completed();
    let declines = ended.declines();
    let mut decision = if verdict.is_some() {
        // It was completed in one step with the handler's effect, whatever the handler did then.
        if !matches!(ended, HandlerEnd::Returned(Ok(()))) {
            let (queue, job) = (&held.grant.queue, lease.job.id);
            tracing::warn!(%queue, %job, "a handler failed after it had completed its job");
        }
        let _ = crate::panics::caught(|| drop(ended));
        let result = lease.result();
        Decision::Settle(Outcome::Complete { result })
    } else {
        let facts = Facts {
            job: &lease.job,
            queue: &pool.queues[held.queue],
            token: lease.token,
            granted_at: held.granted_at(),
            result: lease.result(),
            started: times.waited.is_some(),
            stopped: lease.stopped(),
        };
        decide(&facts, ended, fastrand::f64)
    };
    if let (Some(cause), Decision::Settle(outcome)) = (declines, &mut decision) {
        decline(pool, (&held.grant.queue, &lease.job), cause, outcome);
    }
    pool.observers.emit(|| Event::Finished {
        queue: &held.grant.queue,
        job: &lease.job,
        token: lease.token,
        run: times.ran,
        outcome: match &decision {
            Decision::Settle(outcome) => Some(outcome),
            Decision::LetLapse | Decision::Nothing => None,
        },
    });
    let outcome = match decision {
        Decision::Settle(outcome) => outcome,
        Decision::LetLapse => {
            lease.let_lapse();
            return pool.end(&held, index);
        }
        Decision::Nothing => return pool.end(&held, index),
    };
    let lease = EndedLease {
        held,
        index,
        outcome,
    };
    match verdict {
        Some(verdict) => close(pool, &[lease], &[verdict]),
        None => pool.outbox.push(lease),
    }
}
