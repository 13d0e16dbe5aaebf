//! What the parts of one running pool share.
//!
//! The claimer fills the buffer with leases, the slots take them from it one by one. Everything
//! that ends a lease comes through [`Pool::end`], once.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::declines::Declines;
use super::held::{Board, HeldGrant, HolderClock, Stop};
use super::lost;
use super::settler::Outbox;
use super::suspects::SuspectGate;
use crate::calls::checkpoint::SaveCheckpoints;
use crate::calls::enqueue::Enqueuer;
use crate::calls::merge::Merger;
use crate::calls::session::Session;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Verb};
use crate::handler::AnyHandler;
use crate::job::{Kind, QueueName, RunSettings};
use crate::lease::LeaseTerms;
use crate::observe::Observers;
use crate::observe::metrics::{KindMeter, PoolMeter, QueueMeter};
use crate::state::StateMap;
use crate::store::{ClaimQueue, Store};

/// One queue that a pool claims from.
pub(crate) struct PoolQueue {
    pub(crate) name: QueueName,
    pub(crate) weight: f64,
    pub(crate) terms: LeaseTerms,
    /// The queue's, and the worker's where the queue says nothing.
    pub(crate) runs: RunSettings,
    /// How many of its handlers may run at once in this pool. None: as many as the pool has slots.
    pub(crate) slots: Option<usize>,
    /// For how long a payload that cannot be decoded is left to others.
    pub(crate) decode_grace: Duration,
    pub(crate) meter: QueueMeter,
    /// Nanoseconds for which handlers ran that ended since the last measurement.
    pub(crate) busy: AtomicU64,
}

impl PoolQueue {
    pub(crate) fn wanted(&self) -> ClaimQueue {
        ClaimQueue {
            queue: self.name.clone(),
            term: self.terms.term,
            max_lifetime: self.terms.max_lifetime,
        }
    }
}

/// One kind of job that a pool can work.
pub(crate) struct PoolKind {
    pub(crate) name: Kind,
    pub(crate) handler: Box<dyn AnyHandler>,
    /// By the index of the queue in the pool's list.
    pub(crate) meters: Vec<KindMeter>,
}

/// The part of the drain grace that is kept for handing back the jobs of dropped handlers; at most
/// a quarter of it.
const HAND_BACK: Duration = Duration::from_secs(5);

/// A lease that waits for a slot: a grant, and the index of the lease in it.
pub(crate) type BufferedLease = (Arc<HeldGrant>, usize);

/// The leases that wait for slots, in the order of their claims. In cache lines of its own, because
/// all slots take from here.
#[derive(Default)]
#[repr(align(128))]
struct Buffer(Mutex<VecDeque<BufferedLease>>);

pub(crate) struct Pool {
    pub(crate) session: Arc<Session>,
    pub(crate) enqueuer: Enqueuer,
    pub(crate) checkpoints: Arc<Merger<SaveCheckpoints>>,
    pub(crate) owner: Arc<str>,
    pub(crate) task: Arc<str>,
    pub(crate) queues: Vec<PoolQueue>,
    pub(crate) kinds: Vec<PoolKind>,
    /// Kinds by name.
    names: HashMap<Kind, usize>,
    pub(crate) slots: usize,
    pub(crate) prefetch: usize,
    pub(crate) grace: Duration,
    pub(crate) drain_grace: Duration,
    pub(crate) clock: HolderClock,
    pub(crate) board: Board,
    pub(crate) outbox: Outbox,
    pub(crate) suspects: Arc<SuspectGate>,
    pub(crate) declines: Declines,
    pub(crate) observers: Observers,
    /// What the handlers share.
    pub(crate) state: StateMap,
    pub(crate) meter: Arc<PoolMeter>,
    /// Leases that wait for a slot. Filled by the claimer, emptied by the slots.
    buffer: Buffer,
    /// Leases of each queue that wait for a slot or run. Kept for queues with slots of their own.
    unfinished: Box<[AtomicUsize]>,
    /// Handlers that have ended.
    finished: AtomicU64,
    /// When it was last measured how busy the slots are.
    measured: AtomicU64,
    /// Slots that have a job.
    pub(crate) busy: AtomicUsize,
    /// Wakes a slot.
    work: Notify,
    /// Wakes the claimer.
    pub(crate) room: Notify,
    /// While the claimer sleeps for want of room: how few buffered leases are worth waking it.
    pub(crate) low_water: AtomicUsize,
    /// Wakes the renewer's two halves: a grant with a shorter term than usual has arrived.
    pub(crate) short_term: [Notify; 2],
    /// The claimer rests until it is told to go on.
    paused: AtomicBool,
    resumed: Notify,
    /// When the claimer was last seen to run, and the renewer.
    pub(crate) claimer_ran: AtomicU64,
    pub(crate) renewer_ran: AtomicU64,
    /// When the store last answered a claim or a renewal; zero before.
    pub(crate) answered: AtomicU64,
    /// When a renewal last succeeded; zero before.
    pub(crate) renewed: AtomicU64,
    /// Renewal calls that failed since.
    pub(crate) failed_renewals: AtomicU32,
    /// The pool stops claiming.
    pub(crate) drain: CancellationToken,
    /// The same without a lock, for the look that is taken for each job.
    drains: AtomicBool,
    /// When the drain began.
    drain_began: OnceLock<Instant>,
    /// Nothing is taken in any longer.
    closed: AtomicBool,
    /// Why the pool could not go on.
    failure: OnceLock<Error>,
}

/// What the builder decides; the rest of a [`Pool`] starts empty.
pub(crate) struct Plan {
    pub(crate) owner: Arc<str>,
    pub(crate) task: Arc<str>,
    pub(crate) queues: Vec<PoolQueue>,
    pub(crate) kinds: Vec<PoolKind>,
    pub(crate) slots: usize,
    pub(crate) prefetch: usize,
    pub(crate) grace: Duration,
    pub(crate) drain_grace: Duration,
    pub(crate) observers: Observers,
    pub(crate) state: StateMap,
}

impl Pool {
    pub(crate) fn new(
        plan: Plan,
        enqueuer: Enqueuer,
        checkpoints: Arc<Merger<SaveCheckpoints>>,
        suspects: Arc<SuspectGate>,
    ) -> Arc<Self> {
        let session = Arc::clone(enqueuer.session());
        Arc::new(Self {
            meter: PoolMeter::new(session.store.name()),
            outbox: Outbox::new(),
            unfinished: plan.queues.iter().map(|_| AtomicUsize::new(0)).collect(),
            session,
            enqueuer,
            checkpoints,
            owner: plan.owner,
            task: plan.task,
            queues: plan.queues,
            names: plan
                .kinds
                .iter()
                .zip(0..)
                .map(|(kind, at)| (kind.name.clone(), at))
                .collect(),
            kinds: plan.kinds,
            slots: plan.slots,
            prefetch: plan.prefetch,
            grace: plan.grace,
            drain_grace: plan.drain_grace,
            clock: HolderClock::starting(monotonic()),
            board: Board::default(),
            suspects,
            declines: Declines::default(),
            observers: plan.observers,
            state: plan.state,
            buffer: Buffer::default(),
            finished: AtomicU64::new(0),
            measured: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            work: Notify::new(),
            room: Notify::new(),
            low_water: AtomicUsize::new(0),
            short_term: Default::default(),
            paused: AtomicBool::new(false),
            resumed: Notify::new(),
            claimer_ran: AtomicU64::new(1),
            renewer_ran: AtomicU64::new(1),
            answered: AtomicU64::new(0),
            renewed: AtomicU64::new(0),
            failed_renewals: AtomicU32::new(0),
            drain: CancellationToken::new(),
            drains: AtomicBool::new(false),
            drain_began: OnceLock::new(),
            closed: AtomicBool::new(false),
            failure: OnceLock::new(),
        })
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.session.store
    }

    pub(crate) fn draining(&self) -> bool {
        self.drains.load(Ordering::Acquire)
    }

    fn stop_claiming(&self) {
        self.drains.store(true, Ordering::Release);
        self.drain.cancel();
    }

    /// When the drain began: now, if it has not.
    pub(crate) fn drain_began(&self) -> Instant {
        *self.drain_began.get_or_init(monotonic)
    }

    /// When a handler that ignores the drain is dropped: early enough for its job to be handed back
    /// before the [end](Self::drain_deadline).
    pub(crate) fn drop_deadline(&self) -> Instant {
        self.drain_deadline() - HAND_BACK.min(self.drain_grace / 4)
    }

    /// When the worker ends, whatever is left.
    pub(crate) fn drain_deadline(&self) -> Instant {
        self.drain_began() + self.drain_grace
    }

    /// Whether nothing is taken in any longer.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Gives the leases of a grant to the slots, and wakes as many as can run at once.
    pub(crate) fn fill(&self, held: &Arc<HeldGrant>) {
        let leases = held.leases.len();
        let mut buffer = self.lock();
        if self.is_closed() {
            return;
        }
        if self.queues[held.queue].slots.is_some() {
            self.unfinished[held.queue].fetch_add(leases, Ordering::AcqRel);
        }
        buffer.extend((0..leases).map(|index| (Arc::clone(held), index)));
        drop(buffer);
        // Each of them wakes another as soon as its handler waits for something.
        for _ in 0..leases.min(parallelism()) {
            self.work.notify_one();
        }
    }

    /// How many leases wait for a slot.
    pub(crate) fn buffered(&self) -> usize {
        self.lock().len()
    }

    /// Takes back everything that waits for a slot.
    pub(crate) fn unfill(&self) -> Vec<BufferedLease> {
        self.lock().drain(..).collect()
    }

    /// The next lease that waits for a slot.
    pub(crate) fn take(&self) -> Option<BufferedLease> {
        let mut buffer = self.lock();
        let taken = buffer.pop_front();
        let left = buffer.len();
        drop(buffer);
        self.make_room(left);
        taken
    }

    /// How many more leases of a queue may be claimed. None: as many as the pool has room for.
    pub(crate) fn queue_room(&self, queue: usize) -> Option<usize> {
        let slots = self.queues[queue].slots?;
        Some(slots.saturating_sub(self.unfinished[queue].load(Ordering::Acquire)))
    }

    /// A slot is done with a lease of this queue.
    pub(crate) fn handed_in(&self, queue: usize) {
        if let Some(slots) = self.queues[queue].slots
            && self.unfinished[queue].fetch_sub(1, Ordering::AcqRel) == slots
        {
            self.room.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<BufferedLease>> {
        self.buffer.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next lease for a free slot, which is busy from then on; none once the pool
    /// drains.
    pub(crate) async fn next(&self) -> Option<BufferedLease> {
        loop {
            let woken = self.work.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            if let Some(waiting) = self.take() {
                self.busy.fetch_add(1, Ordering::AcqRel);
                return Some(waiting);
            }
            if self.draining() {
                return None;
            }
            woken.await;
        }
    }

    /// A slot has nothing left to work.
    pub(crate) fn has_free_slot(&self) {
        self.busy.fetch_sub(1, Ordering::AcqRel);
        self.outbox.flush();
        self.room.notify_one();
    }

    /// A handler waits for something: another slot can go on meanwhile.
    pub(crate) fn wake_another(&self) {
        self.outbox.flush();
        if self.buffered() > 0 {
            self.work.notify_one();
        } else {
            self.room.notify_one();
        }
    }

    /// Tells the claimer, once, if so few leases wait that a claim is worth it.
    fn make_room(&self, buffered: usize) {
        let low = self.low_water.load(Ordering::Acquire);
        if buffered < low && self.low_water.swap(0, Ordering::AcqRel) != 0 {
            self.room.notify_one();
        }
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    pub(crate) fn pause(&self) {
        self.paused.store(true, Ordering::Release);
        self.room.notify_one();
    }

    pub(crate) fn resume(&self) {
        self.paused.store(false, Ordering::Release);
        self.resumed.notify_one();
    }

    /// Waits while the pool is paused.
    pub(crate) async fn until_resumed(&self) {
        while self.is_paused() {
            tokio::select! {
                biased;
                () = self.drain.cancelled() => return,
                () = self.resumed.notified() => {}
            }
        }
    }

    /// A handler of this queue has ended.
    pub(crate) fn count(&self, queue: usize, started: u64, ended: u64) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        // What ran before the last measurement is counted by it.
        let since = started.max(self.measured.load(Ordering::Relaxed));
        let busy = &self.queues[queue].busy;
        busy.fetch_add(ended.saturating_sub(since), Ordering::Relaxed);
    }

    /// Handlers that have ended.
    pub(crate) fn finished(&self) -> u64 {
        self.finished.load(Ordering::Relaxed)
    }

    /// Begins a new measurement of how busy the slots are. Returns when the last one began, and
    /// when this one does.
    pub(crate) fn measure(&self) -> (u64, u64) {
        let now = self.clock.stamp(monotonic());
        (self.measured.swap(now, Ordering::Relaxed), now)
    }

    /// The store has answered.
    pub(crate) fn answered(&self) {
        let now = self.clock.stamp(monotonic());
        self.answered.store(now, Ordering::Release);
    }

    /// The store has answered a renewal, or has not.
    pub(crate) fn renewal_answered(&self, succeeded: bool) {
        if !succeeded {
            self.failed_renewals.fetch_add(1, Ordering::AcqRel);
            return;
        }
        self.answered();
        let now = self.answered.load(Ordering::Acquire);
        self.renewed.store(now, Ordering::Release);
        self.failed_renewals.store(0, Ordering::Release);
    }

    /// Stops claiming, and tells every handler.
    pub(crate) fn begin_drain(&self) {
        self.drain_began();
        self.stop_claiming();
        self.work.notify_waiters();
        self.work.notify_one();
        for held in self.board.grants() {
            for lease in &held.leases {
                lease.stop(Stop::Drain);
            }
        }
    }

    /// The pool cannot go on: it drains, and its caller hears why.
    pub(crate) fn fail(&self, why: Error) {
        // The first reason is the reason.
        let _ = self.failure.set(why);
        self.begin_drain();
    }

    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Lets go of all leases: they are no longer worked, renewed or settled. Held grants and the
    /// pool refer to each other, and would keep each other alive.
    pub(crate) fn close(&self) {
        self.stop_claiming();
        self.closed.store(true, Ordering::Release);
        for held in self.board.grants() {
            lost::abandon(self, &held);
        }
        self.lock().clear();
        self.outbox.close();
    }

    /// The index of a kind in the list; none if no handler knows it.
    pub(crate) fn kind(&self, name: &Kind) -> Option<usize> {
        self.names.get(name).copied()
    }

    pub(crate) fn queue_index(&self, name: &QueueName) -> Option<usize> {
        self.queues.iter().position(|queue| queue.name == *name)
    }

    /// A lease has ended, or is not ours any longer.
    pub(crate) fn end(&self, held: &HeldGrant, index: usize) {
        self.end_all(held, std::iter::once(index));
    }

    /// Leases of one grant have ended, or are not ours any longer.
    pub(crate) fn end_all(&self, held: &HeldGrant, indices: impl Iterator<Item = usize>) {
        let mut suspect = false;
        let ended = indices.filter(|index| held.leases[*index].end());
        let is_suspect = |index: usize| held.has_suspect && held.leases[index].job.is_suspect();
        let ended = ended.inspect(|index| suspect |= is_suspect(*index)).count();
        self.board.end(held, ended);
        if suspect {
            self.suspects.release();
        }
    }
}

/// Runs a part of a pool. If it panics, the pool ends, and whoever runs it gets the error.
pub(crate) async fn part(pool: Arc<Pool>, name: &'static str, part: impl Future<Output = ()>) {
    let _watched = Watched { pool, name };
    part.await;
}

/// Runs a part, and records every few seconds that it was polled. A part that blocks its thread, or
/// is no longer polled, falls silent; one that waits for the store does not.
pub(crate) async fn noted(
    pool: Arc<Pool>,
    ran: fn(&Pool) -> &AtomicU64,
    part: impl Future<Output = ()>,
) {
    const EVERY: Duration = Duration::from_secs(5);
    let note = async {
        loop {
            ran(&pool).store(pool.clock.stamp(monotonic()), Ordering::Release);
            tokio::time::sleep(EVERY).await;
        }
    };
    tokio::select! {
        biased;
        () = part => {}
        () = note => {}
    }
}

struct Watched {
    pool: Arc<Pool>,
    name: &'static str,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = format!("the worker's {} panicked", self.name);
            self.pool
                .fail(Error::new(ErrorKind::Unexpected, why).during(Verb::Run));
        }
    }
}

fn parallelism() -> usize {
    tokio::runtime::Handle::try_current().map_or(1, |handle| handle.metrics().num_workers())
}
