//! Repeating a call until its answer is known.
//!
//! A [`Lane`] names the calls of one component: one request in flight, each with its sequence
//! number. When the store does not answer, the same request goes again, verbatim, under the same
//! id, until it does. When the session is gone the answer can no longer be had, and what then is
//! safe depends on the verb: the caller gets [`Answer::Lost`] and decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::sync::Mutex;

use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{RequestId, SessionId, Store};

/// The session of one process with one store, opened on first use and again whenever it is lost.
pub(crate) struct Session {
    pub(crate) store: Arc<dyn Store>,
    open: Mutex<Option<SessionId>>,
    lanes: AtomicU32,
    /// Lanes that nobody uses any longer: number and last sequence number. The store remembers an
    /// answer for each, so they are used again.
    spare: std::sync::Mutex<Vec<(u32, u64)>>,
    budget: Budget,
}

impl Session {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            store,
            open: Mutex::new(None),
            lanes: AtomicU32::new(0),
            spare: std::sync::Mutex::default(),
            budget: Budget::default(),
        })
    }

    pub(crate) fn lane(self: &Arc<Self>) -> Lane {
        let spare = self.spare().pop();
        let (number, seq) =
            spare.unwrap_or_else(|| (self.lanes.fetch_add(1, Ordering::Relaxed), 0));
        Lane {
            session: Arc::clone(self),
            id: None,
            number,
            seq,
            waits_for_room: true,
        }
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Vec<(u32, u64)>> {
        let spare = self.spare.lock();
        spare.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The open session, or a new one if `lost` is the one that was open.
    async fn id(&self, lost: Option<SessionId>) -> Result<SessionId> {
        let mut open = self.open.lock().await;
        match *open {
            Some(id) if Some(id) != lost => Ok(id),
            _ => {
                let id = self.store.open_session().await?;
                *open = Some(id);
                Ok(id)
            }
        }
    }
}

/// One line of calls: one in flight, in order.
pub(crate) struct Lane {
    session: Arc<Session>,
    id: Option<SessionId>,
    number: u32,
    seq: u64,
    /// Whether a full store is worth waiting for. It is for whoever holds leases.
    waits_for_room: bool,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A call that was dropped unanswered is older than the next one, and not applied after it.
        self.session.spare().push((self.number, self.seq));
    }
}

/// Lanes for calls that are made beside each other. The store remembers an answer for each, so they
/// are used again.
#[cfg(feature = "redis")]
#[derive(Default)]
pub(crate) struct SpareLanes(std::sync::Mutex<Vec<Lane>>);

#[cfg(feature = "redis")]
impl SpareLanes {
    pub(crate) fn take(&self) -> Option<Lane> {
        self.lock().pop()
    }

    pub(crate) fn give(&self, lane: Lane) {
        self.lock().push(lane);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Lane>> {
        let lanes = self.0.lock();
        lanes.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// How a repeated call ended.
pub(crate) enum Answer<T> {
    Known(T),
    /// The session is gone, and an earlier copy of the call may have been applied.
    Lost,
    /// The call is certain to have done nothing, and repeating it will not help.
    Refused(Error),
    /// Still unanswered when the time was up: unknown.
    GaveUp(Error),
}

impl Lane {
    /// A lane whose caller wants to hear at once that the store is full.
    pub(crate) fn told_when_full(mut self) -> Self {
        self.waits_for_room = false;
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
        let mut in_doubt = false;
        let mut warned = false;
        self.session.budget.earn();
        self.seq += 1;
        loop {
            let error = match self.open().await {
                Err(error) => error,
                Ok(id) => {
                    let request = RequestId {
                        session: id,
                        lane: self.number,
                        seq: self.seq,
                    };
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
            let worth_it = (error.is_transient() && !full)
                || error.kind() == ErrorKind::SessionLost
                || (in_doubt && error.kind() == ErrorKind::Unexpected);
            if !worth_it {
                return if in_doubt {
                    Answer::GaveUp(error)
                } else {
                    Answer::Refused(error)
                };
            }
            let bound = waits.next().filter(|_| self.session.budget.spend());
            let wait = spread(bound.unwrap_or(LONGEST_WAIT));
            if start.elapsed() + wait > limit {
                return if in_doubt {
                    Answer::GaveUp(error)
                } else {
                    Answer::Refused(error)
                };
            }
            if !warned && start.elapsed() > WARN_AFTER {
                warned = true;
                tracing::warn!(%error, "still repeating a call to the store");
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// The id of a call that another call takes along.
    pub(crate) async fn reserve(&mut self) -> Result<RequestId> {
        let session = self.open().await?;
        self.seq += 1;
        Ok(RequestId {
            session,
            lane: self.number,
            seq: self.seq,
        })
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

/// What a process may spend on quick repeats: every call earns half of one, and a few can be saved
/// up. When it is spent, repeats wait as long as they would at the end of a long outage, so that a
/// store that is half down never sees more than one and a half times the calls of good days.
struct Budget {
    /// In halves of a repeat.
    saved: AtomicU32,
}

impl Budget {
    const MOST: u32 = 20;

    fn earn(&self) {
        let more = |saved: u32| (saved < Self::MOST).then_some(saved + 1);
        let _ = self
            .saved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    fn spend(&self) -> bool {
        let less = |saved: u32| saved.checked_sub(2);
        self.saved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            saved: AtomicU32::new(Self::MOST),
        }
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

/// Full jitter: everybody who was cut off together must not come back together.
pub(crate) fn spread(bound: Duration) -> Duration {
    bound.mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_are_at_most_half_of_the_calls_once_the_savings_are_spent() {
        let budget = Budget::default();
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
