//! Repeating a call until its answer is known.
//!
//! A [`Lane`] numbers the calls of one component and sends them one at a time. If the store does
//! not answer, the same request is sent again under the same id until it does. Once the session is
//! gone, the answer is no longer available. What is safe then depends on the verb: the caller gets
//! [`Answer::Lost`] and decides.
//!
//! **Invariant.** Once one copy of a call may have been applied, the call never ends as `Refused`,
//! whatever the later copies are told.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio_util::sync::CancellationToken;

use super::session::Session;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{InHand, RequestId, SessionId, Store};

/// A sequence of calls: one in flight, in order.
pub(crate) struct Lane {
    session: Arc<Session>,
    /// The session as it was last seen open.
    id: Option<SessionId>,
    number: u32,
    /// Of the last call.
    seq: u64,
    /// Whether a full store is worth waiting for. It is for callers that hold leases.
    waits_for_room: bool,
    /// Once this is cancelled, a call that did nothing is not made again.
    until: CancellationToken,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The store does not apply a call after a later one of its lane. So the lane can be used
        // again although this one may have been dropped unanswered.
        self.session.take_back(self.number, self.seq);
    }
}

/// How a repeated call ended.
pub(crate) enum Answer<T> {
    Known(T),
    /// The session is gone, and an earlier copy of the call may have been applied.
    Lost,
    /// The call is certain to have done nothing, and repeating it will not help, or not soon.
    Refused(Error),
    /// Still unanswered when the time was up: unknown.
    GaveUp(Error),
}

impl Lane {
    pub(super) fn new(session: Arc<Session>, number: u32, seq: u64) -> Self {
        Self {
            session,
            id: None,
            number,
            seq,
            waits_for_room: true,
            until: CancellationToken::new(),
        }
    }

    /// The same lane, for a caller that wants to be told at once when the store is full.
    pub(crate) fn told_when_full(mut self) -> Self {
        self.waits_for_room = false;
        self
    }

    /// The same lane, for a caller that has no use for an answer once `until` is cancelled: a call
    /// that is certain to have done nothing is refused then. One in doubt is still repeated.
    pub(crate) fn until(mut self, until: CancellationToken) -> Self {
        self.until = until;
        self
    }

    /// Makes one call, and repeats it until it is answered or `limit` has passed.
    pub(crate) async fn call<T, F>(
        &mut self,
        limit: Duration,
        mut send: impl FnMut(Arc<dyn Store>, RequestId) -> F,
    ) -> Answer<T>
    where
        F: Future<Output = Result<T>>,
    {
        let start = monotonic();
        let mut waits = backoff();
        // Whether an earlier copy of this call may have been applied.
        let mut in_doubt = false;
        let mut warned = false;
        self.session.repeats.earn();
        self.seq += 1;
        loop {
            let error = match self.open().await {
                Err(error) => error,
                Ok(id) => {
                    let request = self.request(id);
                    match send(Arc::clone(&self.session.store), request).await {
                        Ok(answer) => return Answer::Known(answer),
                        Err(error) if error.kind() == ErrorKind::SessionLost => {
                            self.lose(id).await;
                            if in_doubt {
                                return Answer::Lost;
                            }
                            error
                        }
                        Err(error) => {
                            in_doubt |= !error.kind().is_certain();
                            error
                        }
                    }
                }
            };
            let full = error.kind() == ErrorKind::Full && !self.waits_for_room && !in_doubt;
            // The other items of the call need not wait with these.
            let in_hand = InHand::of(&error).is_some() && !in_doubt;
            let worth_it = (error.is_transient() && !full && !in_hand)
                || error.kind() == ErrorKind::SessionLost
                || (in_doubt && error.kind() == ErrorKind::Unexpected);
            let ended = |error| {
                if in_doubt {
                    Answer::GaveUp(error)
                } else {
                    Answer::Refused(error)
                }
            };
            if !worth_it {
                return ended(error);
            }
            let bound = waits.next().filter(|_| self.session.repeats.spend());
            let wait = spread(bound.unwrap_or(LONGEST_WAIT));
            if start.elapsed() + wait > limit {
                return ended(error);
            }
            if !warned && start.elapsed() > WARN_AFTER {
                warned = true;
                tracing::warn!(%error, "still repeating a call to the store");
            }
            tokio::select! {
                biased;
                () = self.until.cancelled(), if !in_doubt => return ended(error),
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn request(&self, session: SessionId) -> RequestId {
        RequestId {
            session,
            lane: self.number,
            seq: self.seq,
        }
    }

    async fn open(&mut self) -> Result<SessionId> {
        if let Some(id) = self.id {
            return Ok(id);
        }
        let id = self.session.id(None).await?;
        self.id = Some(id);
        Ok(id)
    }

    async fn lose(&mut self, lost: SessionId) {
        self.id = None;
        // If the store cannot open one now, the next call tries again.
        self.id = self.session.id(Some(lost)).await.ok();
    }
}

/// A call that is repeated for longer than this is worth a warning.
const WARN_AFTER: Duration = Duration::from_secs(2);

const LONGEST_WAIT: Duration = Duration::from_secs(1);

fn backoff() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(LONGEST_WAIT)
        .without_max_times()
        .build()
}

/// Full jitter: callers that were cut off together must not all come back at the same moment.
pub(crate) fn spread(bound: Duration) -> Duration {
    bound.mul_f64(fastrand::f64())
}

/// How many quick repeats a process can afford: each call earns half of one, and ten can be saved
/// up. Once they are spent, repeats wait as long as they would at the end of a long outage, so that
/// a store that is half down never sees more than one and a half times its usual number of calls.
pub(super) struct RepeatBudget {
    /// In halves of a repeat.
    saved: AtomicU32,
}

impl RepeatBudget {
    const MOST: u32 = 20;

    /// A call is made.
    fn earn(&self) {
        let more = |saved: u32| (saved < Self::MOST).then_some(saved + 1);
        let _ = self
            .saved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Whether a quick repeat is affordable. If so, it is paid for.
    fn spend(&self) -> bool {
        let less = |saved: u32| saved.checked_sub(2);
        self.saved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    }
}

impl Default for RepeatBudget {
    fn default() -> Self {
        Self {
            saved: AtomicU32::new(Self::MOST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    /// Makes one call to a store that gives these answers, and then none but success.
    async fn call(answers: &[ErrorKind]) -> Answer<()> {
        let mut lane = Session::new(Arc::new(MemoryStore::new())).lane();
        let mut answers = answers.iter();
        let limit = Duration::from_secs(60);
        lane.call(limit, |_, _| {
            let answer = answers.next().map(|kind| Error::new(*kind, "scripted"));
            async move { answer.map_or(Ok(()), Err) }
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn a_certain_error_does_not_clear_the_doubt_about_an_earlier_copy() {
        use ErrorKind::{Contended, Denied, SessionLost, Unavailable};
        // Nothing can have been applied: the call goes again, or is refused.
        assert!(matches!(call(&[SessionLost]).await, Answer::Known(())));
        assert!(matches!(
            call(&[Contended, Denied]).await,
            Answer::Refused(_)
        ));
        // The first copy may have been applied, whatever the second is told.
        let lost = call(&[Unavailable, Contended, SessionLost]).await;
        assert!(matches!(lost, Answer::Lost));
        let denied = call(&[Unavailable, Contended, Denied]).await;
        assert!(matches!(denied, Answer::GaveUp(_)));
        let known = call(&[Unavailable, Contended]).await;
        assert!(matches!(known, Answer::Known(())));
    }

    #[tokio::test(start_paused = true)]
    async fn once_nobody_needs_the_answer_only_a_call_in_doubt_is_repeated() {
        let until = CancellationToken::new();
        until.cancel();
        let lane = || Session::new(Arc::new(MemoryStore::new())).lane();
        let mut lane = lane().until(until);
        let mut sent = 0;
        let mut answers = async |kind: ErrorKind| {
            sent = 0;
            let call = lane.call(Duration::from_secs(60), |_, _| {
                sent += 1;
                let answer = (sent < 3).then(|| Error::new(kind, "scripted"));
                async move { answer.map_or(Ok(()), Err) }
            });
            (call.await, sent)
        };
        let certain = answers(ErrorKind::TokensAhead).await;
        assert!(matches!(certain, (Answer::Refused(_), 1)));
        let in_doubt = answers(ErrorKind::Unavailable).await;
        assert!(matches!(in_doubt, (Answer::Known(()), 3)));
    }

    #[test]
    fn repeats_are_at_most_half_of_the_calls_once_the_savings_are_spent() {
        let budget = RepeatBudget::default();
        let saved = (0..1_000).filter(|_| budget.spend()).count();
        assert_eq!(saved, 10);
        let calls = 1_000;
        let repeats = (0..calls).filter(|_| {
            budget.earn();
            budget.spend()
        });
        assert_eq!(repeats.count(), calls / 2);
    }
}
