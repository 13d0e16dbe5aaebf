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

use super::fence::{Held, Stop};
use super::lane::{Answer, Lane};
use super::pool::{Pool, PoolQueue};
use super::run::Ran;
use crate::clock::monotonic;
use crate::error::{Result, Verb};
use crate::handler::{Failure, Wish};
use crate::job::{JobRecord, limits};
use crate::lease::{FencingToken, Issuer, Verdict};
use crate::observe::Event;
use crate::observe::metrics::Release;
use crate::store::{Outcome, SettleRequest, Settlement};

/// Handed-in leases that are worth a call of their own while the slots are busy.
const BATCH: usize = 128;

/// How long a job of unknown kind is put off: a rolling deploy will bring its handler.
const UNKNOWN_KIND_DELAY: Duration = Duration::from_secs(30);

/// Leases whose handlers have ended, and the lane to settle them.
pub(crate) struct Outbox {
    done: Mutex<Vec<Done>>,
    bell: Notify,
    lane: Arc<tokio::sync::Mutex<Lane>>,
}

/// A lease to be settled.
pub(crate) struct Done {
    held: Arc<Held>,
    index: usize,
    outcome: Outcome,
}

impl Outbox {
    pub(crate) fn new(lane: Lane) -> Self {
        let lane = Arc::new(tokio::sync::Mutex::new(lane));
        Self {
            done: Mutex::default(),
            bell: Notify::new(),
            lane,
        }
    }

    fn push(&self, done: Done) {
        let mut waiting = self.lock();
        waiting.push(done);
        if waiting.len().is_multiple_of(BATCH) {
            self.bell.notify_one();
        }
    }

    /// Sends what has gathered, however little.
    pub(crate) fn flush(&self) {
        if !self.lock().is_empty() {
            self.bell.notify_one();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Done>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Vec<Done> {
        let mut waiting = self.lock();
        let rest = waiting.len().min(limits::CALL_ITEMS);
        let rest = waiting.split_off(rest);
        std::mem::replace(&mut *waiting, rest)
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
    /// The settlements as a request that a claim can take along.
    pub(crate) async fn reserve(&mut self) -> Result<SettleRequest> {
        let request = self.lane.reserve().await?;
        Ok(SettleRequest {
            request,
            settlements: settlements(&self.batch),
        })
    }

    /// The claim brought the verdicts.
    pub(crate) fn arrived(self, pool: &Pool, verdicts: &[Verdict]) {
        close(pool, &self.batch, verdicts);
    }

    /// Sends the settlements alone, until they are known.
    pub(crate) async fn send(mut self, pool: &Pool) {
        let sent = monotonic();
        let settlements = settlements(&self.batch);
        loop {
            let call = self.lane.call(Duration::MAX, |store, request| {
                let request = SettleRequest {
                    request,
                    settlements: settlements.clone(),
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
    loop {
        pool.outbox.bell.notified().await;
        while !pool.outbox.is_empty() {
            let lane = Arc::clone(&pool.outbox.lane).lock_owned().await;
            let batch = pool.outbox.take();
            if !batch.is_empty() {
                Ride { lane, batch }.send(&pool).await;
            }
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
    for (
        Done {
            held,
            index,
            outcome,
        },
        verdict,
    ) in batch.iter().zip(verdicts)
    {
        let lease = &held.leases[*index];
        let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
        match *verdict {
            Verdict::Held { late, cancel } => {
                if late {
                    pool.queues[held.queue].meter.late();
                }
                if let Some(kind) = pool.kinds.get(job.kind.as_str()) {
                    let left = held.deadline().saturating_duration_since(now);
                    let release = Release {
                        held: now - held.claimed,
                        margin: left.as_secs_f64() / held.grant.term.as_secs_f64(),
                        attempt: job.attempt(),
                    };
                    kind.meters[held.queue].released(outcome, cancel, &release);
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
        pool.end(held, *index);
    }
}

/// A slot is done with a lease.
pub(crate) fn hand_in(pool: &Arc<Pool>, held: &Arc<Held>, index: usize, ran: Ran, run: Duration) {
    let lease = &held.leases[index];
    lease.hand_in();
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    let outcome = if lease.stopped().is_some_and(|stop| stop.lost().is_some()) {
        None
    } else {
        let result = lease.result.get().cloned();
        decide(
            job,
            &pool.queues[held.queue],
            ran,
            lease.stopped(),
            token,
            fastrand::f64(),
        )
        .map(|outcome| match outcome {
            Outcome::Complete { .. } => Outcome::Complete { result },
            other => other,
        })
    };
    pool.observers.emit(|| Event::Finished {
        queue,
        job,
        token,
        run,
        outcome: outcome.as_ref(),
    });
    match outcome {
        Some(outcome) => pool.outbox.push(Done {
            held: Arc::clone(held),
            index,
            outcome,
        }),
        None => pool.end(held, index),
    }
}

/// What a run's end means for the lease. Pure. None: settle nothing.
fn decide(
    job: &JobRecord,
    queue: &PoolQueue,
    ran: Ran,
    stopped: Option<Stop>,
    token: FencingToken,
    jitter: f64,
) -> Option<Outcome> {
    let failed = |reason: String| {
        let failures = job.failures + 1;
        if failures >= job.options.max_failures.unwrap_or(queue.max_failures) {
            return Outcome::Bury { reason };
        }
        let policy = job.options.retry.unwrap_or(queue.retry);
        Outcome::Retry {
            delay: policy.delay(failures, jitter).min(limits::DURATION_MAX),
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
