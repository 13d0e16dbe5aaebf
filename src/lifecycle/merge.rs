//! Merging: callers that ask at the same time share one call.
//!
//! A single job costs a store as much as a hundred. One driver runs while there is something to
//! send; it is a task of its own, so that a caller that gives up does not take its neighbours'
//! items with it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::lane::{Answer, Lane, Session};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::limits;
use crate::store::{RequestId, Store};

/// How long a call is repeated before its callers are told that the result is unknown.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// One merged call, under way.
pub(crate) type Sending<A> = Pin<Box<dyn Future<Output = Result<Vec<A>>> + Send>>;

/// What a merger does with the items that it has gathered: one answer for each, in order.
pub(crate) trait Deliver<T, A>:
    Fn(Arc<dyn Store>, RequestId, Arc<[T]>) -> Sending<A>
{
}
impl<T, A, F: Fn(Arc<dyn Store>, RequestId, Arc<[T]>) -> Sending<A>> Deliver<T, A> for F {}

/// Merges calls of one verb.
pub(crate) struct Merger<T, A> {
    verb: Verb,
    session: Arc<Session>,
    send: Box<dyn Deliver<T, A> + Send + Sync>,
    /// Whether a call whose first answer is lost with its session may go again under a new id.
    safe_again: bool,
    waiting: Mutex<Waiting<T, A>>,
}

struct Waiting<T, A> {
    entries: VecDeque<Entry<T, A>>,
    /// The lane, while no driver has it.
    lane: Option<Lane>,
}

/// The items of one caller: they go in one call.
struct Entry<T, A> {
    items: Vec<T>,
    weight: usize,
    answer: Caller<A>,
}

type Caller<A> = oneshot::Sender<Result<Vec<A>>>;

impl<T: Clone + Send + Sync + 'static, A: Send + 'static> Merger<T, A> {
    pub(crate) fn new(
        verb: Verb,
        session: Arc<Session>,
        safe_again: bool,
        send: impl Deliver<T, A> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let lane = if safe_again {
            session.lane()
        } else {
            session.lane().told_when_full()
        };
        let waiting = Waiting {
            entries: VecDeque::new(),
            lane: Some(lane),
        };
        let waiting = Mutex::new(waiting);
        Arc::new(Self {
            verb,
            session,
            send: Box::new(send),
            safe_again,
            waiting,
        })
    }

    /// The session that the calls are made under.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Sends the items with those of others, and returns the answer to each.
    pub(crate) async fn submit(self: &Arc<Self>, items: Vec<T>, weight: usize) -> Result<Vec<A>> {
        let (answer, answered) = oneshot::channel();
        {
            let mut waiting = self.lock();
            waiting.entries.push_back(Entry {
                items,
                weight,
                answer,
            });
            if let Some(lane) = waiting.lane.take() {
                tokio::spawn(Arc::clone(self).drive(lane));
            }
        }
        answered.await.unwrap_or_else(|_| {
            let why = "the runtime stopped before the store answered";
            Err(Error::new(ErrorKind::Unknown, why).during(self.verb))
        })
    }

    /// Sends until nothing waits.
    async fn drive(self: Arc<Self>, lane: Lane) {
        let mut driver = Driver {
            merger: self,
            lane: Some(lane),
        };
        while let Some(lane) = &mut driver.lane {
            let entries = driver.merger.take();
            if entries.is_empty() {
                driver.rest();
            } else {
                driver.merger.deliver(lane, entries).await;
            }
        }
    }

    /// As many entries as fit one call.
    fn take(&self) -> Vec<Entry<T, A>> {
        let mut waiting = self.lock();
        let (mut items, mut weight, mut entries) = (0, 0, Vec::new());
        while let Some(first) = waiting.entries.front() {
            items += first.items.len();
            weight += first.weight;
            let fits = items <= limits::CALL_ITEMS && weight <= limits::CALL_BYTES;
            if !fits && !entries.is_empty() {
                break;
            }
            entries.extend(waiting.entries.pop_front());
        }
        entries
    }

    async fn deliver(&self, lane: &mut Lane, entries: Vec<Entry<T, A>>) {
        let mut items = Vec::with_capacity(entries.iter().map(|entry| entry.items.len()).sum());
        let mut callers = Vec::with_capacity(entries.len());
        for mut entry in entries {
            callers.push((entry.answer, entry.items.len()));
            items.append(&mut entry.items);
        }
        let items: Arc<[T]> = items.into();
        let answer = loop {
            let call = lane.call(CALL_LIMIT, |store, request| {
                (self.send)(store, request, Arc::clone(&items))
            });
            match call.await {
                Answer::Lost if self.safe_again => {}
                answer => break answer,
            }
        };
        let unknown = || Error::new(ErrorKind::Unknown, "it may or may not have been stored");
        let error = match answer {
            Answer::Known(answers) => {
                let mut answers = answers.into_iter();
                for (caller, count) in callers {
                    // A caller that gave up needs no answer.
                    let _ = caller.send(Ok(answers.by_ref().take(count).collect()));
                }
                return;
            }
            Answer::Lost => unknown(),
            Answer::GaveUp(error) => unknown().caused_by(error),
            Answer::Refused(error) => error,
        };
        let error = error.during(self.verb);
        for (caller, _) in callers {
            let _ = caller.send(Err(error.duplicate()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<T, A>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the lane while it sends. If it is dropped with its runtime, the lane goes back.
struct Driver<T: Clone + Send + Sync + 'static, A: Send + 'static> {
    merger: Arc<Merger<T, A>>,
    lane: Option<Lane>,
}

impl<T: Clone + Send + Sync + 'static, A: Send + 'static> Driver<T, A> {
    /// Gives the lane back if nothing waits.
    fn rest(&mut self) {
        let mut waiting = self.merger.lock();
        if waiting.entries.is_empty() {
            waiting.lane = self.lane.take();
        }
    }
}

impl<T: Clone + Send + Sync + 'static, A: Send + 'static> Drop for Driver<T, A> {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            let mut waiting = self.merger.lock();
            // Their callers are told that the runtime stopped.
            waiting.entries.clear();
            waiting.lane = Some(lane);
        }
    }
}
