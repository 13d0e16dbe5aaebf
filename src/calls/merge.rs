//! Merging: callers that ask at the same time share one call.
//!
//! A call with one item costs a store as much as a call with a hundred. So the items of all callers
//! wait in one list, and a driver sends what has gathered there while the previous call was under
//! way. The driver is a task of its own: a caller that gives up must not take its neighbours' items
//! with it. Where order does not matter, a second driver starts once [`BESIDE`] items wait, so that
//! the store finds the next call at hand when it is done with one.
//!
//! If the store names items that wait for somebody else's transaction ([`InHand`]), the call goes
//! again without the callers whose items these are. Each of them is then tried by itself, in turn,
//! on a lane beside the others.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::lane::{Answer, Lane, spread};
use super::session::Session;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::limits;
use crate::store::{InHand, RequestId, Store};

/// How long a call is repeated before its callers are told that the result is unknown.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How many waiting items are worth another call while one is under way: with this many, the fixed
/// cost of a call hardly matters.
const BESIDE: usize = 200;

/// Between two tries of items that wait for somebody else's transaction. The store waits, too.
const ASIDE_PAUSE: Duration = Duration::from_millis(100);

/// A call of one verb that takes the items of several callers.
pub(crate) trait MergedCall: Send + Sync + 'static {
    /// What a caller asks for.
    type Item: Send + 'static;
    /// What is sent for it.
    type Sent: Clone + Send + Sync + 'static;
    /// What it is answered.
    type Answer: Send + 'static;

    const VERB: Verb;
    /// How many calls may be under way at once.
    const LANES: usize;
    /// Whether the call may be made again, under a new id, if its answer was lost with the session.
    const SAFE_AGAIN: bool;

    /// Adds the items of one caller to a call.
    fn add(items: Vec<Self::Item>, call: &mut Vec<Self::Sent>);

    /// Makes the call: one answer for each item, in order.
    fn send(
        &self,
        store: Arc<dyn Store>,
        request: RequestId,
        items: Arc<Vec<Self::Sent>>,
    ) -> impl Future<Output = Result<Vec<Self::Answer>>> + Send;
}

/// Merges calls of one verb.
pub(crate) struct Merger<C: MergedCall> {
    call: C,
    session: Arc<Session>,
    waiting: Mutex<Waiting<C>>,
}

struct Waiting<C: MergedCall> {
    entries: VecDeque<Entry<C>>,
    /// Of all entries.
    items: usize,
    /// The lanes that are free for drivers.
    lanes: Vec<Lane>,
    /// Drivers that send.
    drivers: usize,
    /// What waits for somebody else's transaction.
    aside: VecDeque<Aside<C>>,
    /// Its lane, while nobody uses it.
    aside_lane: Option<Lane>,
}

impl<C: MergedCall> Waiting<C> {
    /// Whether what waits is worth another driver.
    fn is_worth_a_driver(&self) -> bool {
        match self.drivers {
            0 => !self.entries.is_empty(),
            _ => self.items >= BESIDE,
        }
    }
}

/// The items of one caller: they go in one call.
struct Entry<C: MergedCall> {
    items: Vec<C::Item>,
    weight: usize,
    answer: oneshot::Sender<Result<Vec<C::Answer>>>,
}

/// What was sent for one caller, and is tried by itself.
struct Aside<C: MergedCall> {
    sent: Vec<C::Sent>,
    answer: oneshot::Sender<Result<Vec<C::Answer>>>,
    until: Instant,
}

impl<C: MergedCall> Merger<C> {
    pub(crate) fn new(call: C, session: Arc<Session>) -> Arc<Self> {
        let lane = || {
            if C::SAFE_AGAIN {
                session.lane()
            } else {
                session.lane().told_when_full()
            }
        };
        let waiting = Waiting {
            entries: VecDeque::new(),
            items: 0,
            lanes: (0..C::LANES).map(|_| lane()).collect(),
            drivers: 0,
            aside: VecDeque::new(),
            aside_lane: Some(lane()),
        };
        let waiting = Mutex::new(waiting);
        Arc::new(Self {
            call,
            session,
            waiting,
        })
    }

    /// The session that the calls are made under.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Sends the items with those of others, and returns the answer to each.
    pub(crate) async fn submit(
        self: &Arc<Self>,
        items: Vec<C::Item>,
        weight: usize,
    ) -> Result<Vec<C::Answer>> {
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
            Err(Error::new(ErrorKind::Unknown, why).during(C::VERB))
        })
    }

    /// Adds an entry. If a driver is returned, it must be run.
    fn add(self: &Arc<Self>, entry: Entry<C>) -> Option<Driver<C>> {
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
    fn take(&self) -> Vec<Entry<C>> {
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

    async fn deliver(self: &Arc<Self>, lane: &mut Lane, entries: Vec<Entry<C>>) {
        let until = monotonic() + CALL_LIMIT;
        let count: usize = entries.iter().map(|entry| entry.items.len()).sum();
        let mut items = Vec::with_capacity(count);
        let mut callers = Vec::with_capacity(entries.len());
        for entry in entries {
            callers.push((entry.answer, entry.items.len()));
            C::add(entry.items, &mut items);
        }
        loop {
            let sent = Arc::new(items);
            let answer = self.send(lane, &sent).await;
            let Some(held) = in_hand(&answer) else {
                return tell(known(answer), callers, C::VERB);
            };
            // Without a name of one of them, all are.
            let is_held = |nth| held.is_empty() || held.contains(&nth);
            let mut sent = Arc::unwrap_or_clone(sent).into_iter();
            let (mut rest, mut others, mut nth) = (Vec::new(), Vec::new(), 0);
            for (answer, count) in callers {
                let its = sent.by_ref().take(count);
                if (nth..nth + count).any(is_held) {
                    let sent = its.collect();
                    self.set_aside(Aside {
                        sent,
                        answer,
                        until,
                    });
                } else {
                    rest.extend(its);
                    others.push((answer, count));
                }
                nth += count;
            }
            (items, callers) = (rest, others);
            if callers.is_empty() {
                return;
            }
        }
    }

    async fn send(&self, lane: &mut Lane, items: &Arc<Vec<C::Sent>>) -> Answer<Vec<C::Answer>> {
        loop {
            let call = lane.call(CALL_LIMIT, |store, request| {
                self.call.send(store, request, Arc::clone(items))
            });
            match call.await {
                Answer::Lost if C::SAFE_AGAIN => {}
                answer => return answer,
            }
        }
    }

    fn set_aside(self: &Arc<Self>, one: Aside<C>) {
        let mut waiting = self.lock();
        waiting.aside.push_back(one);
        let Some(lane) = waiting.aside_lane.take() else {
            return;
        };
        drop(waiting);
        let driver = AsideDriver {
            merger: Arc::clone(self),
            lane: Some(lane),
        };
        tokio::spawn(driver.drive());
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<C>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends what waits, on a lane of its own. If it is dropped with its runtime, or never runs because
/// there is none, the lane goes back.
struct Driver<C: MergedCall> {
    merger: Arc<Merger<C>>,
    lane: Option<Lane>,
}

impl<C: MergedCall> Driver<C> {
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

impl<C: MergedCall> Drop for Driver<C> {
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

/// The items that wait for somebody else's transaction, if the call was refused for them.
fn in_hand<A>(answer: &Answer<A>) -> Option<Vec<usize>> {
    let Answer::Refused(error) = answer else {
        return None;
    };
    InHand::of(error).map(Into::into)
}

fn known<A>(answer: Answer<A>) -> Result<A> {
    let unknown = || Error::new(ErrorKind::Unknown, "it may or may not have been stored");
    match answer {
        Answer::Known(answers) => Ok(answers),
        Answer::Lost => Err(unknown()),
        Answer::GaveUp(error) => Err(unknown().caused_by(error)),
        Answer::Refused(error) => Err(error),
    }
}

/// What became of a call, to each of its callers. One that gave up needs no answer.
type Caller<A> = (oneshot::Sender<Result<Vec<A>>>, usize);

fn tell<A>(result: Result<Vec<A>>, callers: Vec<Caller<A>>, verb: Verb) {
    match result {
        Ok(answers) => {
            let mut answers = answers.into_iter();
            for (caller, count) in callers {
                let _ = caller.send(Ok(answers.by_ref().take(count).collect()));
            }
        }
        Err(error) => {
            let error = error.during(verb);
            for (caller, _) in callers {
                let _ = caller.send(Err(error.duplicate()));
            }
        }
    }
}

/// Tries what was set aside, one after the other, until the store takes it or its time is up. If it
/// is dropped with its runtime, the lane goes back.
struct AsideDriver<C: MergedCall> {
    merger: Arc<Merger<C>>,
    lane: Option<Lane>,
}

impl<C: MergedCall> AsideDriver<C> {
    async fn drive(mut self) {
        while let Some(lane) = &mut self.lane {
            let Some(one) = self.merger.lock().aside.pop_front() else {
                self.rest();
                continue;
            };
            if one.answer.is_closed() {
                continue;
            }
            let sent = Arc::new(one.sent);
            let answer = self.merger.send(lane, &sent).await;
            if in_hand(&answer).is_none() || monotonic() >= one.until {
                tell(known(answer), vec![(one.answer, sent.len())], C::VERB);
                continue;
            }
            let sent = Arc::unwrap_or_clone(sent);
            self.merger.lock().aside.push_back(Aside { sent, ..one });
            tokio::time::sleep(spread(ASIDE_PAUSE)).await;
        }
    }

    /// Gives the lane back if nothing waits.
    fn rest(&mut self) {
        let mut waiting = self.merger.lock();
        if waiting.aside.is_empty() {
            waiting.aside_lane = self.lane.take();
        }
    }
}

impl<C: MergedCall> Drop for AsideDriver<C> {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            let mut waiting = self.merger.lock();
            waiting.aside_lane = Some(lane);
            // Their callers are told that the runtime stopped.
            waiting.aside.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    /// A call that is never answered, and tells how many items it has.
    struct Unanswered<const LANES: usize>(tokio::sync::mpsc::UnboundedSender<usize>);

    impl<const LANES: usize> MergedCall for Unanswered<LANES> {
        type Item = ();
        type Sent = ();
        type Answer = ();

        const VERB: Verb = Verb::Enqueue;
        const LANES: usize = LANES;
        const SAFE_AGAIN: bool = false;

        fn add(items: Vec<()>, call: &mut Vec<()>) {
            call.extend(items);
        }

        async fn send(
            &self,
            _: Arc<dyn Store>,
            _: RequestId,
            items: Arc<Vec<()>>,
        ) -> Result<Vec<()>> {
            let _ = self.0.send(items.len());
            std::future::pending().await
        }
    }

    /// Submits entries of these sizes while no call is answered. Returns how many items are in each
    /// call that is under way then.
    async fn under_way<const LANES: usize>(entries: &[usize]) -> Vec<usize> {
        let (told, mut calls) = tokio::sync::mpsc::unbounded_channel();
        let session = Session::new(Arc::new(MemoryStore::new()));
        let merger = Merger::new(Unanswered::<LANES>(told), session);
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
        assert_eq!(under_way::<2>(&[1; 50]).await, [1]);
        assert_eq!(under_way::<2>(&[1, BESIDE - 1]).await, [1]);
        assert_eq!(under_way::<2>(&[1, BESIDE - 1, 1]).await, [1, BESIDE]);
        assert_eq!(under_way::<2>(&[BESIDE; 5]).await, [BESIDE; 2]);
        assert_eq!(under_way::<1>(&[BESIDE; 5]).await, [BESIDE]);
    }
}
