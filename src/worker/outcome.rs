//! Deciding: what the end of a handler means for its lease.
//!
//! | the handler | the lease |
//! |---|---|
//! | returned `Ok` | completed |
//! | failed, panicked or timed out | retried after the policy's delay; dead after too many failures |
//! | asked to be retried, snoozed or buried | as it asked |
//! | returned an error after it was told to stop | handed back: a deploy must not count against it |
//! | was dropped, or never started | handed back |
//! | does not exist, or cannot read the job | [declined](super::declines), or dead after a time |
//! | said that the lease is lost | nothing is settled, and the lease lapses |
//! | worked under a lease that is [lost](super::lost) | nothing is settled |
//!
//! Everything here is a pure function. Before: a [slot](super::slots) ran the handler. After: the
//! [settler](super::settler) sends the outcome.

use std::time::Duration;

use bytes::Bytes;

use super::declines::put_off;
use super::held::Stop;
use super::pool::PoolQueue;
use crate::clock::Timestamp;
use crate::handler::{Failure, Wish};
use crate::job::{JobRecord, RunSettings};
use crate::lease::{DeclineCause, FencingToken};
use crate::limits;
use crate::panics::caught;
use crate::rules::issue::Issuer;
use crate::store::Outcome;

/// How a handler ended.
pub(crate) enum HandlerEnd {
    /// It returned.
    Returned(Result<(), Failure>),
    /// It panicked.
    Panicked(String),
    /// It took longer than this.
    TimedOut(Duration),
    /// It was told to stop and did not, or never started.
    Dropped,
    /// It never started: the lease, as short as this, was over before the claim was answered.
    TooShort(Duration),
    /// There is none for a job of this kind.
    UnknownKind,
}

impl HandlerEnd {
    /// Why this worker cannot work the job, if it cannot.
    pub(crate) fn declines(&self) -> Option<DeclineCause> {
        match self {
            Self::UnknownKind => Some(DeclineCause::UnknownKind),
            Self::Returned(Err(failure)) => match failure.wish {
                Wish::Decline(cause) => Some(cause),
                _ => None,
            },
            _ => None,
        }
    }
}

/// What to do with a lease whose handler has ended.
#[derive(PartialEq, Debug)]
pub(crate) enum Decision {
    /// Settle it.
    Settle(Outcome),
    /// Settle nothing, and let it expire with the next renewal of its grant.
    LetLapse,
    /// Settle nothing: it is lost, and whatever its handler produced counts for nothing.
    Nothing,
}

/// What the decision depends on, apart from how the handler ended.
pub(crate) struct Facts<'a> {
    pub(crate) job: &'a JobRecord,
    pub(crate) queue: &'a PoolQueue,
    pub(crate) token: FencingToken,
    /// On the store's clock.
    pub(crate) granted_at: Timestamp,
    /// What the handler leaves with the job.
    pub(crate) result: Option<Bytes>,
    /// Whether the handler was ever called.
    pub(crate) started: bool,
    /// Why it was told to stop, if it was.
    pub(crate) stopped: Option<Stop>,
}

/// Decides what becomes of a lease. `jitter` draws a number from 0 to 1, for the
/// delay of a retry.
pub(crate) fn decide(facts: &Facts<'_>, ended: HandlerEnd, jitter: fn() -> f64) -> Decision {
    // A lease that ran out before its handler started goes back. Nobody worked under it, its
    // receipt keeps that safe, and a slow store must not move a job toward dead.
    let unused = !facts.started && facts.stopped == Some(Stop::Deadline);
    if facts.stopped.is_some_and(Stop::is_lost) && !unused {
        // A failure's author wrote what happens when it is dropped.
        let _ = caught(|| drop(ended));
        return Decision::Nothing;
    }
    // And how it is turned into words.
    let decided = caught(|| facts.outcome(ended, jitter));
    let outcome = decided.unwrap_or_else(|panic| Some(facts.failed(panic, None, jitter)));
    outcome.map_or(Decision::LetLapse, Decision::Settle)
}

impl Facts<'_> {
    fn outcome(&self, ended: HandlerEnd, jitter: fn() -> f64) -> Option<Outcome> {
        Some(match ended {
            HandlerEnd::Returned(Ok(())) => Outcome::Complete {
                result: self.result.clone(),
            },
            HandlerEnd::Returned(Err(failure)) => return self.wished(&failure, jitter),
            HandlerEnd::Panicked(reason) => self.failed(reason, None, jitter),
            HandlerEnd::TimedOut(limit) => {
                self.failed(format!("timed out after {limit:?}"), None, jitter)
            }
            HandlerEnd::Dropped => surrendered(Duration::ZERO),
            // Handed back, it would be claimed again at once, and come too late again.
            HandlerEnd::TooShort(granted) => {
                let reason = format!(
                    "its lease of {granted:?} was over before it arrived; \
                     the job's own term or lifetime is too short for this store"
                );
                self.failed(reason, None, jitter)
            }
            HandlerEnd::UnknownKind => {
                let reason = format!("no handler for kind {:?}", self.job.kind.as_str());
                self.declined(DeclineCause::UnknownKind, reason)
            }
        })
    }

    /// What a handler that returned a failure asked for. None: it says that the lease is lost.
    fn wished(&self, failure: &Failure, jitter: fn() -> f64) -> Option<Outcome> {
        let reason = failure.reason();
        Some(match failure.wish {
            Wish::Lost => return None,
            Wish::Bury => Outcome::Bury { reason },
            Wish::Snooze(delay) => surrendered(delay),
            Wish::RetryIn(delay) => self.failed(reason, Some(delay), jitter),
            Wish::Behind(mark) if self.is_believable(mark) => Outcome::Surrender {
                delay: Duration::ZERO,
                mark: Some(mark),
            },
            Wish::Decline(cause) => self.declined(cause, reason),
            Wish::Behind(_) => self.failed(format!("broken fence: {reason}"), None, jitter),
            // A handler that stops early because it was told to has not failed.
            Wish::Policy if self.stopped.is_some() => surrendered(Duration::ZERO),
            Wish::Policy => self.failed(reason, None, jitter),
        })
    }

    /// One more failure: the job is retried after `delay`, or else after the policy's, until it has
    /// failed too often.
    fn failed(&self, reason: String, delay: Option<Duration>, jitter: fn() -> f64) -> Outcome {
        let runs = self.job.options.runs.or(self.queue.runs);
        let failures = self.job.failures + 1;
        let most = runs.max_failures;
        if failures >= most.unwrap_or(RunSettings::DEFAULT_MAX_FAILURES) {
            return Outcome::Bury { reason };
        }
        let policy = runs.retry.unwrap_or_default();
        let delay = delay.unwrap_or_else(|| policy.delay(failures, jitter()));
        Outcome::Retry {
            delay: delay.min(limits::DURATION_MAX),
            reason,
        }
    }

    /// Left to workers of another version. During a deploy there will be one; a payload that no
    /// worker could read for long enough is broken.
    fn declined(&self, cause: DeclineCause, reason: String) -> Outcome {
        let since = self.job.declined_since.unwrap_or(self.granted_at);
        let declined_for = self.granted_at.since(since);
        let is_payload = cause == DeclineCause::UndecodablePayload;
        if is_payload && declined_for >= self.queue.decode_grace {
            return Outcome::Bury { reason };
        }
        let delay = put_off(declined_for);
        Outcome::Decline { delay, reason }
    }

    /// Whether a fence that shows this mark can have refused this token. A mark that no issuer can
    /// have given yet would make the job loop, and so would one below the token.
    fn is_believable(&self, mark: FencingToken) -> bool {
        let ahead = Issuer::BELIEF.as_micros() as u64;
        mark >= self.token && mark.get() <= self.token.get().saturating_add(ahead)
    }
}

/// Handed back; no failure is counted.
fn surrendered(delay: Duration) -> Outcome {
    Outcome::Surrender {
        delay: delay.min(limits::DURATION_MAX),
        mark: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::job::{JobId, Kind, NewJob, QueueName};
    use crate::lease::LeaseTerms;
    use crate::observe::metrics::QueueMeter;
    use crate::retry::RetryPolicy;

    const DELAY: Duration = Duration::from_secs(7);
    const TOKEN: FencingToken = FencingToken::new(100);
    const NOW: Timestamp = Timestamp::from_micros(5_000_000_000);
    const GRACE: Duration = Duration::from_secs(600);

    /// What becomes of a job that has failed this often, in a queue that allows three failures.
    fn decided(failures: u32, stopped: Option<Stop>, ended: HandlerEnd) -> Decision {
        let mut job = job();
        job.failures = failures;
        decided_of(&job, stopped, ended)
    }

    fn job() -> JobRecord {
        let new = NewJob::raw(QueueName::default(), Kind::new("k").unwrap(), Bytes::new());
        JobRecord::new(JobId::generate(), new, Timestamp::ZERO)
    }

    fn decided_of(job: &JobRecord, stopped: Option<Stop>, ended: HandlerEnd) -> Decision {
        let name = QueueName::default();
        let runs = RunSettings {
            retry: Some(RetryPolicy::constant(DELAY)),
            max_failures: Some(3),
            ..RunSettings::default()
        };
        let queue = PoolQueue {
            meter: QueueMeter::new(&name),
            name,
            weight: 1.0,
            terms: LeaseTerms::default(),
            runs,
            slots: None,
            decode_grace: GRACE,
            busy: AtomicU64::new(0),
        };
        let facts = Facts {
            job,
            queue: &queue,
            token: TOKEN,
            granted_at: NOW,
            result: None,
            started: !matches!(ended, HandlerEnd::TooShort(_) | HandlerEnd::UnknownKind),
            stopped,
        };
        decide(&facts, ended, || 0.0)
    }

    fn failed(failure: Failure) -> HandlerEnd {
        HandlerEnd::Returned(Err(failure))
    }

    fn is_retry(decision: &Decision) -> bool {
        matches!(decision, Decision::Settle(Outcome::Retry { .. }))
    }

    fn is_decline(decision: &Decision) -> bool {
        matches!(decision, Decision::Settle(Outcome::Decline { .. }))
    }

    fn is_bury(decision: &Decision) -> bool {
        matches!(decision, Decision::Settle(Outcome::Bury { .. }))
    }

    #[test]
    fn a_job_is_retried_until_it_has_failed_too_often() {
        let ends: [fn() -> HandlerEnd; 4] = [
            || failed("no".into()),
            || failed(Failure::retry_in(DELAY, "no")),
            || HandlerEnd::Panicked("no".into()),
            || HandlerEnd::TimedOut(DELAY),
        ];
        for end in ends {
            assert!(is_retry(&decided(0, None, end())));
            assert!(is_retry(&decided(1, None, end())));
            assert!(is_bury(&decided(2, None, end())));
        }
        assert!(is_bury(&decided(0, None, failed(Failure::bury("never")))));
    }

    #[test]
    fn a_handler_that_stops_because_it_was_told_to_has_not_failed() {
        let back = Decision::Settle(surrendered(Duration::ZERO));
        for stop in [Stop::Drain, Stop::Cancel] {
            assert_eq!(decided(2, Some(stop), failed("stopped".into())), back);
            assert_eq!(decided(2, Some(stop), HandlerEnd::Dropped), back);
            let done = decided(2, Some(stop), HandlerEnd::Returned(Ok(())));
            assert_eq!(done, Decision::Settle(Outcome::Complete { result: None }));
        }
    }

    #[test]
    fn nothing_is_settled_under_a_lost_lease() {
        for stop in [Stop::Stalled, Stop::Deadline, Stop::Fenced] {
            let ends = [
                HandlerEnd::Returned(Ok(())),
                failed("no".into()),
                HandlerEnd::Panicked("no".into()),
                HandlerEnd::TimedOut(DELAY),
                HandlerEnd::Dropped,
            ];
            for end in ends {
                assert_eq!(decided(0, Some(stop), end), Decision::Nothing);
            }
        }
        // Unless it ran out before its handler started: nobody has worked under it.
        let unused = decided(0, Some(Stop::Deadline), HandlerEnd::UnknownKind);
        assert!(is_decline(&unused));
        assert_eq!(
            decided(0, Some(Stop::Fenced), HandlerEnd::UnknownKind),
            Decision::Nothing
        );
        assert_eq!(
            decided(0, None, failed(Failure::lost())),
            Decision::LetLapse
        );
    }

    #[test]
    fn a_job_that_this_worker_cannot_work_is_left_to_others() {
        let declined = |cause, ago: Option<Duration>| {
            let mut job = job();
            // Had a decline counted as a failure, this would have been the last.
            job.failures = 2;
            job.declined_since = ago.map(|ago| NOW.before(ago));
            let ended = match cause {
                DeclineCause::UnknownKind => HandlerEnd::UnknownKind,
                cause => failed(Failure::declined(cause, "strange")),
            };
            assert_eq!(ended.declines(), Some(cause));
            decided_of(&job, None, ended)
        };
        let delay_of = |decision| match decision {
            Decision::Settle(Outcome::Decline { delay, .. }) => delay,
            other => panic!("{other:?}"),
        };
        let nearly = GRACE.saturating_sub(Duration::from_micros(1));
        for cause in DeclineCause::ALL {
            for ago in [None, Some(Duration::ZERO), Some(nearly)] {
                let delay = delay_of(declined(cause, ago));
                assert_eq!(delay, put_off(ago.unwrap_or_default()));
            }
        }
        // Only what could not be read is given up: others may be all right, but early.
        for cause in [DeclineCause::UnknownKind, DeclineCause::NewerVersion] {
            let long = delay_of(declined(cause, Some(100 * GRACE)));
            assert_eq!(long, put_off(100 * GRACE));
        }
        let Decision::Settle(Outcome::Bury { reason }) =
            declined(DeclineCause::UndecodablePayload, Some(GRACE))
        else {
            panic!("an unreadable payload lives on");
        };
        assert_eq!(reason, "strange");
    }

    #[test]
    fn a_mark_is_believed_only_if_a_fence_can_have_shown_it_to_this_token() {
        let marked = |mark| decided(0, None, failed(Failure::fenced(FencingToken::new(mark))));
        let ahead = 100 + Issuer::BELIEF.as_micros() as u64;
        for mark in [100, ahead] {
            let surrendered = Outcome::Surrender {
                delay: Duration::ZERO,
                mark: Some(FencingToken::new(mark)),
            };
            assert_eq!(marked(mark), Decision::Settle(surrendered));
        }
        assert!(is_retry(&marked(99)) && is_retry(&marked(ahead + 1)));
    }
}
