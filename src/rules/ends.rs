//! How a lease can end, and what becomes of its job: [`settle`], [`expire`], [`revoke`].
//!
//! A store finds the job and the lease, asks one of these functions, and writes what the answer
//! says. Nothing here does I/O or asks the time.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::job::{JobRecord, JobState};
use crate::lease::{Cause, EndedLease, FencingToken, LeaseEnd, Progress};
use crate::limits::{self, clip};
use crate::rules::issue::Issuer;
use crate::store::Outcome;

use JobState::{Cancelled, Completed, Dead};

/// How long a cancelled job stays to be looked at, if its own retention is not longer.
pub const CANCELLED_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The wait after a surrender whose mark was not believed: the fence is broken, and a job that
/// comes straight back would loop.
pub const DISBELIEVED_DELAY: Duration = Duration::from_secs(10);

/// What is known of a lease when it ends.
#[derive(Clone, Debug)]
pub(crate) struct LeaseFacts {
    pub(crate) token: FencingToken,
    pub(crate) owner: Arc<str>,
    pub(crate) task: Arc<str>,
    pub(crate) granted_at: Timestamp,
    pub(crate) renewals: u32,
    pub(crate) progress: Option<Progress>,
    /// Somebody asked for the job to be cancelled while it was leased.
    pub(crate) cancel: bool,
}

/// Where a job goes when its lease ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Ready, ahead of everything in its line.
    Front,
    /// Ready, behind everything in its line.
    Back,
    /// Waits until its `run_at`.
    Scheduled {
        /// Whether it stays at the head of its exclusive key meanwhile.
        keeps_key: bool,
    },
    /// Its life is over.
    Settled {
        state: JobState,
        /// Until when it is kept. None: deleted at once.
        keep_until: Option<Timestamp>,
    },
}

/// The end of one lease: how it counts, and what becomes of the job.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Step {
    pub(crate) end: LeaseEnd,
    pub(crate) next: Next,
    failed: bool,
    expired: bool,
    run_at: Option<Timestamp>,
    reason: Option<String>,
    result: Option<bytes::Bytes>,
}

impl Step {
    fn new(end: LeaseEnd, next: Next) -> Self {
        Self {
            end,
            next,
            failed: false,
            expired: false,
            run_at: None,
            reason: None,
            result: None,
        }
    }

    /// Writes the step into the job. Not needed when the job is gone.
    pub(crate) fn apply(self, job: &mut JobRecord, facts: &LeaseFacts, now: Timestamp) {
        job.failures += u32::from(self.failed);
        job.expiries += u32::from(self.expired);
        if let Some(run_at) = self.run_at {
            job.run_at = run_at;
        }
        if self.result.is_some() {
            job.result = self.result;
        }
        job.remember(EndedLease {
            token: facts.token,
            owner: Arc::clone(&facts.owner),
            task: Arc::clone(&facts.task),
            granted_at: facts.granted_at,
            ended_at: now,
            renewals: facts.renewals,
            end: self.end,
            reason: self.reason,
            progress: facts.progress.clone(),
        });
    }
}

/// A job's holder ends its lease.
///
/// `believed` says whether the mark of a surrender, if it has one, was believed; `relaxed` whether
/// a waiting retry lets the next job of its exclusive key go.
pub(crate) fn settle(
    job: &JobRecord,
    outcome: &Outcome,
    cancel: bool,
    believed: bool,
    relaxed: bool,
    now: Timestamp,
) -> Step {
    let cancelled = || Step::new(LeaseEnd::Cancelled, settled(job, Cancelled, now));
    match outcome {
        Outcome::Complete { result } => {
            let mut step = Step::new(LeaseEnd::Completed, settled(job, Completed, now));
            step.result.clone_from(result);
            step
        }
        Outcome::Bury { reason } => {
            let mut step = Step::new(LeaseEnd::Buried, settled(job, Dead, now));
            step.failed = true;
            step.reason = Some(clipped(reason));
            step
        }
        Outcome::Retry { delay, reason } => {
            let mut step = if cancel {
                cancelled()
            } else {
                again(*delay, relaxed, now)
            };
            step.failed = true;
            step.reason = Some(clipped(reason));
            step
        }
        Outcome::Surrender {
            mark: Some(mark), ..
        } if !believed => {
            let mut step = if cancel {
                cancelled()
            } else {
                again(DISBELIEVED_DELAY, relaxed, now)
            };
            step.failed = true;
            step.reason = Some(format!(
                "broken fence: its mark {mark} is more than {:?} ahead of the store's clock",
                Issuer::BELIEF
            ));
            step
        }
        Outcome::Surrender { .. } if cancel => cancelled(),
        Outcome::Surrender { delay, .. } if delay.is_zero() => {
            Step::new(LeaseEnd::Surrendered, Next::Front)
        }
        Outcome::Surrender { delay, .. } => {
            let mut step = Step::new(LeaseEnd::Surrendered, Next::Scheduled { keeps_key: true });
            step.run_at = Some(now.after(*delay));
            step
        }
    }
}

/// A job's lease has expired.
pub(crate) fn expire(job: &JobRecord, cause: Cause, cancel: bool, now: Timestamp) -> Step {
    let next = if cancel {
        settled(job, Cancelled, now)
    } else if job.expiries + 1 >= job.options.max_expiries {
        settled(job, Dead, now)
    } else {
        Next::Front
    };
    let mut step = Step::new(LeaseEnd::Expired(cause), next);
    step.expired = true;
    step
}

/// An operator ends a job's lease.
pub(crate) fn revoke(job: &JobRecord, reason: &str, cancel: bool, now: Timestamp) -> Step {
    let next = if cancel {
        settled(job, Cancelled, now)
    } else {
        Next::Back
    };
    let mut step = Step::new(LeaseEnd::Revoked, next);
    step.reason = Some(clipped(reason));
    step
}

/// Where a job goes whose life is over.
pub(crate) fn settled(job: &JobRecord, state: JobState, now: Timestamp) -> Next {
    let retention = job.options.retention;
    let keep_until = match state {
        // A dead job must not vanish silently: it stays until somebody retries or purges it.
        Dead => Some(Timestamp::from_micros(i64::MAX as u64)),
        Cancelled => Some(now.after(retention.unwrap_or_default().max(CANCELLED_RETENTION))),
        _ => retention.map(|retention| now.after(retention)),
    };
    Next::Settled { state, keep_until }
}

/// Whether a job is gone once it is completed, and nobody waits for its keys. Of such a job a store
/// need not read the record.
pub fn leaves_nothing(job: &JobRecord) -> bool {
    job.options.retention.is_none() && job.unique.is_none() && job.exclusive.is_none()
}

/// Gives a dead job another life.
pub(crate) fn revive(job: &mut JobRecord, now: Timestamp) {
    job.failures = 0;
    job.expiries = 0;
    job.run_at = now;
}

fn again(delay: Duration, relaxed: bool, now: Timestamp) -> Step {
    let mut step = Step::new(
        LeaseEnd::Retried,
        Next::Scheduled {
            keeps_key: !relaxed,
        },
    );
    step.run_at = Some(now.after(delay));
    step
}

fn clipped(reason: &str) -> String {
    clip(reason, limits::REASON_BYTES).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobId, Kind, NewJob, QueueName};
    use crate::rules::{TRANSITIONS, Transition, is_legal};
    use JobState::{Leased, Ready, Scheduled};

    fn state_of(next: Next) -> Option<JobState> {
        match next {
            Next::Front | Next::Back => Some(Ready),
            Next::Scheduled { .. } => Some(Scheduled),
            Next::Settled { state, keep_until } => keep_until.map(|_| state),
        }
    }

    /// Every way in which a lease can end, with what it makes of the job.
    fn ends() -> Vec<(Transition, Step)> {
        let now = Timestamp::from_micros(1_000_000);
        let mark = Some(FencingToken::new(7));
        let delay = Duration::from_secs(9);
        let reason = || "why".to_owned();
        let mut ends = Vec::new();
        for kept in [None, Some(delay)] {
            let kind = Kind::new("work").expect("a name");
            let mut new = NewJob::raw(QueueName::default(), kind, "{}");
            new.options.retention = kept;
            let mut job = JobRecord::new(JobId::generate(), new, now);
            for (cancel, believed, relaxed) in
                [0, 1, 2, 3, 4, 5, 6, 7].map(|n| (n & 1 > 0, n & 2 > 0, n & 4 > 0))
            {
                let outcomes = [
                    (Transition::Complete, Outcome::Complete { result: None }),
                    (
                        Transition::Retry,
                        Outcome::Retry {
                            delay,
                            reason: reason(),
                        },
                    ),
                    (Transition::Bury, Outcome::Bury { reason: reason() }),
                    (
                        Transition::Surrender,
                        Outcome::Surrender { delay, mark: None },
                    ),
                    (
                        Transition::Surrender,
                        Outcome::Surrender {
                            delay: Duration::ZERO,
                            mark: None,
                        },
                    ),
                    (Transition::Surrender, Outcome::Surrender { delay, mark }),
                ];
                for (by, outcome) in outcomes {
                    let step = settle(&job, &outcome, cancel, believed, relaxed, now);
                    // A mark that is not believed makes a retry of it.
                    let retried = step.end == LeaseEnd::Retried;
                    ends.push((if retried { Transition::Retry } else { by }, step));
                }
                for expiries in [0, job.options.max_expiries - 1] {
                    job.expiries = expiries;
                    let step = expire(&job, Cause::Deadline, cancel, now);
                    ends.push((Transition::Expire, step));
                }
                ends.push((Transition::Revoke, revoke(&job, "why", cancel, now)));
            }
        }
        ends
    }

    #[test]
    fn every_end_is_in_the_table_and_every_row_of_it_is_an_end() {
        let ends = ends();
        for (by, step) in &ends {
            let to = state_of(step.next);
            assert!(is_legal(Some(Leased), *by, to), "{by:?} to {to:?}");
        }
        for (from, by, to) in TRANSITIONS {
            let elsewhere = matches!(by, Transition::Cancel);
            if *from == Some(Leased) && !elsewhere {
                let made = |(b, step): &(Transition, Step)| b == by && state_of(step.next) == *to;
                assert!(ends.iter().any(made), "nothing goes {by:?} to {to:?}");
            }
        }
    }

    #[test]
    fn what_is_not_in_the_table_is_not_legal() {
        for state in [Scheduled, Leased, Completed, Dead, Cancelled] {
            assert!(!is_legal(Some(state), Transition::Claim, Some(Leased)));
        }
        assert!(!is_legal(
            Some(Ready),
            Transition::Complete,
            Some(Completed)
        ));
        assert!(!is_legal(Some(Dead), Transition::Prune, None));
    }
}
