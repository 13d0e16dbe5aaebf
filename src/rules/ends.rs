//! How a lease can end, and what becomes of its job: [`settle`], [`expire`], [`revoke`].
//!
//! A store finds the job and the lease, asks one of these functions, and writes what the answer
//! says. Nothing here does I/O or asks the time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::job::{JobRecord, JobState};
use crate::lease::{Cause, EndedLease, FencingToken, LeaseEnd, Progress};
use crate::limits::{self, clip};
use crate::rules::issue::Issuer;

use JobState::{Cancelled, Completed, Dead, Ready, Scheduled};

/// How long a cancelled job stays to be looked at, if its own retention is not longer.
pub const CANCELLED_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The wait after a surrender whose mark was not believed: the fence is broken, and a job that
/// comes straight back would loop.
pub const DISBELIEVED_DELAY: Duration = Duration::from_secs(10);

/// How a holder ends a lease.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// Done.
    Complete {
        /// Kept with the job if it has a retention.
        result: Option<Bytes>,
    },
    /// Again after `delay`; a failure is counted.
    Retry {
        /// How long to wait.
        delay: Duration,
        /// What went wrong.
        reason: String,
    },
    /// Handed back unfinished; nothing is counted.
    Surrender {
        /// Zero: ready at once, at the front. More: a snooze.
        delay: Duration,
        /// The mark of a fence that refused this holder although it is the current one: the store
        /// raises its floor above it. A mark too far ahead to be believed makes this a failure.
        mark: Option<FencingToken>,
    },
    /// Handed back by a worker that cannot work it, and others may: nothing is counted, and the
    /// job notes since when it is declined.
    Decline {
        /// How long to wait.
        delay: Duration,
        /// Why this worker cannot.
        reason: String,
    },
    /// Given up; a failure is counted.
    Bury {
        /// Why.
        reason: String,
    },
}

impl Outcome {
    /// The outcome's one spelling.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Complete { .. } => "complete",
            Self::Retry { .. } => "retry",
            Self::Surrender { .. } => "surrender",
            Self::Decline { .. } => "decline",
            Self::Bury { .. } => "bury",
        }
    }

    /// The mark of a fence, which the store's issuer has to rise above.
    pub const fn mark(&self) -> Option<FencingToken> {
        match self {
            Self::Surrender { mark, .. } => *mark,
            _ => None,
        }
    }
}

/// All that decides what a settlement makes of a job.
#[derive(Clone, Copy, Debug)]
pub struct Settling<'a> {
    /// What the holder says.
    pub outcome: &'a Outcome,
    /// A cancel was requested while the job was leased.
    pub cancel: bool,
    /// Whether the outcome's mark, if it has one, was believed: [`Issuer::raise`].
    pub believed: bool,
    /// Whether a waiting retry lets the next job of its exclusive key go.
    pub relaxed: bool,
    /// The store's time.
    pub now: Timestamp,
}

/// What is known of a lease when it ends.
#[derive(Clone, Debug)]
pub struct LeaseFacts {
    /// Its token.
    pub token: FencingToken,
    /// Who held it.
    pub owner: Arc<str>,
    /// For which run.
    pub task: Arc<str>,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// How often it was renewed.
    pub renewals: u32,
    /// The last progress shown.
    pub progress: Option<Progress>,
    /// A cancel was requested while the job was leased.
    pub cancel: bool,
}

/// Where a job goes when its lease ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Ready, ahead of everything in its tier.
    Front,
    /// Ready, behind everything in its tier.
    Back,
    /// Waits until its `run_at`.
    Scheduled {
        /// Whether it keeps its exclusive key meanwhile.
        keeps_key: bool,
    },
    /// Its life is over, and its keys are free.
    Settled {
        /// Completed, dead or cancelled.
        state: JobState,
        /// Until when it is kept. None: deleted at once.
        keep_until: Option<Timestamp>,
    },
}

impl Next {
    /// The job's state from now on. A job that is deleted at once has the state in which it ended.
    pub const fn state(self) -> JobState {
        match self {
            Self::Front | Self::Back => Ready,
            Self::Scheduled { .. } => Scheduled,
            Self::Settled { state, .. } => state,
        }
    }

    /// Whether nothing of the job is stored any longer.
    pub const fn is_gone(self) -> bool {
        matches!(
            self,
            Self::Settled {
                keep_until: None,
                ..
            }
        )
    }
}

/// The end of one lease: how it counts, and what becomes of the job.
#[derive(Clone, PartialEq, Debug)]
pub struct End {
    /// What the ledger and the job's history say of it.
    pub counts_as: LeaseEnd,
    /// Where the job goes.
    pub next: Next,
    /// Whether the job has failed once more.
    pub failed: bool,
    /// Whether a lease of the job has expired once more.
    pub expired: bool,
    /// Whether its worker declined the job.
    pub declined: bool,
    /// When the job falls due again, if that changes.
    pub run_at: Option<Timestamp>,
    /// Why, for the job's history.
    pub reason: Option<String>,
    /// What the run left.
    pub result: Option<Bytes>,
}

impl End {
    fn new(counts_as: LeaseEnd, next: Next) -> Self {
        Self {
            counts_as,
            next,
            failed: false,
            expired: false,
            declined: false,
            run_at: None,
            reason: None,
            result: None,
        }
    }

    /// Whether the job dies because its leases expired too often.
    pub fn is_death_by_expiry(&self) -> bool {
        self.expired && self.next.state() == Dead
    }

    /// Writes the end into the job. Not needed when the job is gone.
    pub fn apply(self, job: &mut JobRecord, facts: &LeaseFacts, now: Timestamp) {
        job.failures += u32::from(self.failed);
        job.expiries += u32::from(self.expired);
        job.declined_since = self.declined.then(|| job.declined_since.unwrap_or(now));
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
            end: self.counts_as,
            reason: self.reason,
            progress: facts.progress.clone(),
        });
    }
}

/// A job's holder ends its lease.
pub fn settle(job: &JobRecord, settling: &Settling<'_>) -> End {
    let Settling {
        outcome,
        cancel,
        believed,
        relaxed,
        now,
    } = *settling;
    let cancelled = || End::new(LeaseEnd::Cancelled, settled(job, Cancelled, now));
    match outcome {
        Outcome::Complete { result } => {
            let mut end = End::new(LeaseEnd::Completed, settled(job, Completed, now));
            end.result.clone_from(result);
            end
        }
        Outcome::Bury { reason } => {
            let end = End::new(LeaseEnd::Buried, settled(job, Dead, now));
            failed(end, clipped(reason))
        }
        Outcome::Retry { reason, .. } if cancel => failed(cancelled(), clipped(reason)),
        Outcome::Retry { delay, reason } => failed(again(*delay, relaxed, now), clipped(reason)),
        Outcome::Surrender {
            mark: Some(mark), ..
        } if !believed => {
            let end = if cancel {
                cancelled()
            } else {
                again(DISBELIEVED_DELAY, relaxed, now)
            };
            let reason = format!(
                "broken fence: its mark {mark} is more than {:?} ahead of the store's clock",
                Issuer::BELIEF
            );
            failed(end, reason)
        }
        Outcome::Surrender { .. } | Outcome::Decline { .. } if cancel => cancelled(),
        Outcome::Surrender { delay, .. } if delay.is_zero() => {
            End::new(LeaseEnd::Surrendered, Next::Front)
        }
        Outcome::Surrender { delay, .. } => snoozed(*delay, now),
        Outcome::Decline { delay, reason } => {
            let mut end = snoozed(*delay, now);
            end.declined = true;
            end.reason = Some(clipped(reason));
            end
        }
    }
}

/// A job's lease has expired.
pub fn expire(job: &JobRecord, cause: Cause, cancel: bool, now: Timestamp) -> End {
    let next = if cancel {
        settled(job, Cancelled, now)
    } else if job.expiries + 1 >= job.options.max_expiries {
        settled(job, Dead, now)
    } else {
        Next::Front
    };
    let mut end = End::new(LeaseEnd::Expired(cause), next);
    end.expired = true;
    end
}

/// An operator ends a job's lease.
pub fn revoke(job: &JobRecord, reason: &str, cancel: bool, now: Timestamp) -> End {
    let next = if cancel {
        settled(job, Cancelled, now)
    } else {
        Next::Back
    };
    let mut end = End::new(LeaseEnd::Revoked, next);
    end.reason = Some(clipped(reason));
    end
}

/// Where a job goes whose life is over.
pub fn settled(job: &JobRecord, state: JobState, now: Timestamp) -> Next {
    let retention = job.options.retention;
    let keep_until = match state {
        // A dead job must not vanish silently: it stays until an operator retries or purges it.
        Dead => Some(Timestamp::from_micros(i64::MAX as u64)),
        Cancelled => Some(now.after(retention.unwrap_or_default().max(CANCELLED_RETENTION))),
        _ => retention.map(|retention| now.after(retention)),
    };
    Next::Settled { state, keep_until }
}

/// Gives a dead job another life.
pub fn revive(job: &mut JobRecord, now: Timestamp) {
    job.failures = 0;
    job.expiries = 0;
    job.run_at = now;
}

fn again(delay: Duration, relaxed: bool, now: Timestamp) -> End {
    let keeps_key = !relaxed;
    let mut end = End::new(LeaseEnd::Retried, Next::Scheduled { keeps_key });
    end.run_at = Some(now.after(delay));
    end
}

/// Comes back after `delay`, ahead of the others of its exclusive key.
fn snoozed(delay: Duration, now: Timestamp) -> End {
    let mut end = End::new(LeaseEnd::Surrendered, Next::Scheduled { keeps_key: true });
    end.run_at = Some(now.after(delay));
    end
}

fn failed(mut end: End, reason: String) -> End {
    end.failed = true;
    end.reason = Some(reason);
    end
}

fn clipped(reason: &str) -> String {
    clip(reason, limits::REASON_BYTES).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobId, Kind, NewJob, QueueName};
    use crate::rules::{TRANSITIONS, Transition};
    use JobState::Leased;

    fn state_of(next: Next) -> Option<JobState> {
        (!next.is_gone()).then(|| next.state())
    }

    /// Every way in which a lease can end, with what it makes of the job.
    fn ends() -> Vec<(Transition, End)> {
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
                    (
                        Transition::Surrender,
                        Outcome::Decline {
                            delay,
                            reason: reason(),
                        },
                    ),
                ];
                for (by, outcome) in outcomes {
                    let settling = Settling {
                        outcome: &outcome,
                        cancel,
                        believed,
                        relaxed,
                        now,
                    };
                    let end = settle(&job, &settling);
                    // A mark that is not believed makes a retry of it.
                    let retried = end.counts_as == LeaseEnd::Retried;
                    ends.push((if retried { Transition::Retry } else { by }, end));
                }
                for expiries in [0, job.options.max_expiries - 1] {
                    job.expiries = expiries;
                    let end = expire(&job, Cause::Deadline, cancel, now);
                    ends.push((Transition::Expire, end));
                }
                ends.push((Transition::Revoke, revoke(&job, "why", cancel, now)));
            }
        }
        ends
    }

    #[test]
    fn every_end_is_in_the_table_and_every_row_of_it_is_an_end() {
        let ends = ends();
        for (by, end) in &ends {
            let row = (Some(Leased), *by, state_of(end.next));
            assert!(TRANSITIONS.contains(&row), "{row:?}");
        }
        for (from, by, to) in TRANSITIONS {
            let elsewhere = matches!(by, Transition::Cancel);
            if *from == Some(Leased) && !elsewhere {
                let made = |(b, end): &(Transition, End)| b == by && state_of(end.next) == *to;
                assert!(ends.iter().any(made), "nothing goes {by:?} to {to:?}");
            }
        }
    }
}
