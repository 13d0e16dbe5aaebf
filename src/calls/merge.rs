//! Merging: callers that ask at the same time share one call.
//!
//! A single job costs a store as much as a hundred. One driver runs while there is something to
//! send; it is a task of its own, so that a caller that gives up does not take its neighbours'
//! items with it. Where order does not matter, others run beside it once so much waits that merging more
//! would save little: the store has the next call at hand when it is done with one.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::lane::{Answer, Lane, Session};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::limits;
use crate::store::{RequestId, Store};

/// How long a call is repeated before its callers are told that the result is unknown.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// Items that are worth a call of their own beside those that are under way: what a call costs by itself
/// hardly shows in what they cost.
const BESIDE: usize = 200;

/// One merged call, under way.
pub(crate) type Sending<A> = Pin<Box<dyn Future<Output = Result<Vec<A>>> + Send>>;

/// What callers ask for.
pub(crate) trait Item: Send + Sync + Sized + 'static {
    /// What goes into a call for it.
    type Sent: Send + Sync + 'static;

    /// Adds what goes into a call for the items of one caller. Each is moved once, whoever it is merged with.
    fn join(items: Vec<Self>, call: &mut Vec<Self::Sent>);
}

/// What a merger does with the items that it has gathered: one answer for each, in order.
pub(crate) trait Deliver<T: Item, A>:
    Fn(Arc<dyn Store>, RequestId, Arc<Vec<T::Sent>>) -> Sending<A>
{
}
impl<T: Item, A, F> Deliver<T, A> for F where
    F: Fn(Arc<dyn Store>, RequestId, Arc<Vec<T::Sent>>) -> Sending<A>
{
}

/// Merges calls of one verb.
pub(crate) struct Merger<T: Item, A> {
    verb: Verb,
    session: Arc<Session>,
    send: Box<dyn Deliver<T, A> + Send + Sync>,
    /// Whether a call whose first answer is lost with its session may go again under a new id.
    safe_again: bool,
    waiting: Mutex<Waiting<T, A>>,
}

struct Waiting<T, A> {
    entries: VecDeque<Entry<T, A>>,
    /// Of all entries.
    items: usize,
    /// The lanes that no driver has.
    lanes: Vec<Lane>,
    /// Drivers that send.
    drivers: usize,
}

impl<T, A> Waiting<T, A> {
    /// Whether what waits is worth another driver.
    fn is_worth_a_driver(&self) -> bool {
        match self.drivers {
            0 => !self.entries.is_empty(),
            _ => self.items >= BESIDE,
        }
    }
}

/// The items of one caller: they go in one call.
struct Entry<T, A> {
    items: Vec<T>,
    weight: usize,
    answer: Caller<A>,
}

type Caller<A> = oneshot::Sender<Result<Vec<A>>>;

impl<T: Item, A: Send + 'static> Merger<T, A> {
    pub(crate) fn new(
        verb: Verb,
        session: Arc<Session>,
        lanes: usize,
        safe_again: bool,
        send: impl Deliver<T, A> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let lane = |_| {
            if safe_again {
                session.lane()
            } else {
                session.lane().told_when_full()
            }
        };
        let waiting = Waiting {
            entries: VecDeque::new(),
            items: 0,
            lanes: (0..lanes).map(lane).collect(),
            drivers: 0,
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
        let entry = Entry {
            items,
            weight,
            answer,
        };
        if let Some(driver) = self.add(entry) {
            // Outside of the lock, which the driver takes if the runtime does not run it.
            tokio::spawn(driver.drive());
        }
        answered.await.unwrap_or_else(|_| {
            let why = "the runtime stopped before the store answered";
            Err(Error::new(ErrorKind::Unknown, why).during(self.verb))
        })
    }

    /// Adds an entry. Whoever is returned must send.
    fn add(self: &Arc<Self>, entry: Entry<T, A>) -> Option<Driver<T, A>> {
        let mut waiting = self.lock();
        waiting.items += entry.items.len();
        waiting.entries.push_back(entry);
        if !waiting.is_worth_a_driver() {
            return None;
        }
        let lane = waiting.lanes.pop()?;
        waiting.drivers += 1;
        Some(Driver {
            merger: Arc::clone(self),
            lane: Some(lane),
        })
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
            let taken = waiting.entries.pop_front();
            waiting.items -= taken.as_ref().map_or(0, |entry| entry.items.len());
            entries.extend(taken);
        }
        entries
    }

    async fn deliver(&self, lane: &mut Lane, entries: Vec<Entry<T, A>>) {
        let count: usize = entries.iter().map(|entry| entry.items.len()).sum();
        let mut items = Vec::with_capacity(count);
        let mut callers = Vec::with_capacity(entries.len());
        for entry in entries {
            callers.push((entry.answer, entry.items.len()));
            T::join(entry.items, &mut items);
        }
        let items = Arc::new(items);
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

/// Has the lane while it sends. If it is dropped with its runtime, or never run because there is
/// none, the lane goes back.
struct Driver<T: Item, A: Send + 'static> {
    merger: Arc<Merger<T, A>>,
    lane: Option<Lane>,
}

impl<T: Item, A: Send + 'static> Driver<T, A> {
    /// Sends until nothing waits that is worth it.
    async fn drive(mut self) {
        while let Some(lane) = &mut self.lane {
            let entries = self.merger.take();
            if !entries.is_empty() {
                self.merger.deliver(lane, entries).await;
            }
            self.rest();
        }
    }

    /// Gives the lane back if nothing waits, or only what another driver can take along.
    fn rest(&mut self) {
        let mut waiting = self.merger.lock();
        waiting.drivers -= 1;
        if waiting.is_worth_a_driver() {
            waiting.drivers += 1;
        } else {
            waiting.lanes.extend(self.lane.take());
        }
    }
}

impl<T: Item, A: Send + 'static> Drop for Driver<T, A> {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            let mut waiting = self.merger.lock();
            waiting.lanes.push(lane);
            waiting.drivers -= 1;
            if waiting.drivers == 0 {
                // Their callers are told that the runtime stopped.
                waiting.entries.clear();
                waiting.items = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    impl Item for () {
        type Sent = ();

        fn join(items: Vec<Self>, call: &mut Vec<()>) {
            call.extend(items);
        }
    }

    /// Sends entries of so many items while no call is answered. Returns the items of each call that is
    /// under way then.
    async fn under_way(lanes: usize, entries: &[usize]) -> Vec<usize> {
        let (told, mut calls) = tokio::sync::mpsc::unbounded_channel();
        let session = Session::new(Arc::new(MemoryStore::new()));
        let merger = Merger::new(Verb::Enqueue, session, lanes, false, move |_, _, items| {
            let _ = told.send(items.len());
            Box::pin(std::future::pending::<Result<Vec<()>>>())
        });
        for items in entries {
            let (merger, items) = (Arc::clone(&merger), vec![(); *items]);
            tokio::spawn(async move { merger.submit(items, 0).await });
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }
        let mut sent = Vec::new();
        while let Ok(items) = calls.try_recv() {
            sent.push(items);
        }
        sent
    }

    #[tokio::test]
    async fn few_items_wait_to_be_merged_and_many_go_beside() {
        assert_eq!(under_way(2, &[1; 50]).await, [1]);
        assert_eq!(under_way(2, &[1, BESIDE - 1]).await, [1]);
        assert_eq!(under_way(2, &[1, BESIDE - 1, 1]).await, [1, BESIDE]);
        assert_eq!(under_way(2, &[BESIDE; 5]).await, [BESIDE; 2]);
        assert_eq!(under_way(1, &[BESIDE; 5]).await, [BESIDE]);
    }
}
