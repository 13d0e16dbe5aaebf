//! Holding: what this process holds, until when, and which handlers must stop.
//!
//! The states of a held lease:
//!
//! ```text
//!             a slot takes it       the handler ends       the verdict is known
//!   waiting ──────────────────► running ───────────► handed in ─────────────────► ended
//!      │                        │     ▲                │   │                        ▲
//!      │                        │     └── taken back ──┘   │                        │
//!      │                        │  (a completion of the    └── nothing to settle ───┤
//!      │                        │   handler's own failed)                           │
//!      └────────────────────────┴─────────── the pool is gone ──────────────────────┘
//! ```
//!
//! | state | kept in | set by |
//! |---|---|---|
//! | waiting, running | `started` | [`slots`](super::slots) |
//! | handed in | `handed_in` | [`settler`](super::settler), or a completion of the handler's own |
//! | ended | `ended` | [`Pool::end`](super::pool::Pool::end), once |
//!
//! Besides its state, a lease has a stop reason ([`Stop`]), which can only become more severe.
//! `Drain` and `Cancel` ask the handler to finish, and its outcome is settled. `Stalled`,
//! `Deadline` and `Fenced` mean that the lease is lost; [`lost`](super::lost) has everything that
//! follows. A lease can also be marked to lapse: it will not be settled, and the next renewal of
//! its grant lets it expire.
//!
//! A holder cannot tell by itself that it was replaced, but it can tell when it *may* have been:
//! once the time granted has passed since the claim or the last successful renewal was first sent,
//! less the guard. From then on the handler is told to stop, whatever the store might still say.
//!
//! **Invariant (I8).** A lease's `until` is *first send + time granted − guard* on the monotonic
//! clock. The arrival of a reply never counts, and neither does the wall clock.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::pool::Pool;
use super::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};
use super::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::lease::{FencingToken, Grant, Nonce, Progress, Receipt, Verdict};
use crate::observe::metrics::LostWhy;

/// A grant that this process holds.
pub(crate) struct HeldGrant {
    /// The pool that holds it. Let go of when the last lease ends and the pool forgets the grant.
    pub(crate) pool: Arc<Pool>,
    /// The index of its queue in the pool's list.
    pub(crate) queue: usize,
    pub(crate) grant: Grant,
    pub(crate) leases: Box<[HeldLease]>,
    /// Whether one of its jobs is a suspect.
    pub(crate) has_suspect: bool,
    /// When the claim was first sent.
    pub(crate) claimed: Instant,
    claimed_stamp: u64,
    guard: Duration,
    /// The answer to the claim took longer than may be relied on.
    pub(crate) came_late: bool,
    /// When it must no longer be relied on. Written by the renewer.
    until: AtomicU64,
    /// When the last renewal that succeeded was sent. Written by the renewer.
    renewed: AtomicU64,
    live: AtomicUsize,
    key: u64,
}

/// One lease of a grant that this process holds. It fills one cache line, because its neighbours
/// are worked by other threads.
#[repr(align(64))]
pub(crate) struct HeldLease {
    pub(crate) token: FencingToken,
    pub(crate) job: Arc<JobRecord>,
    /// The job's attempt, here so that counting an ended lease does not have to read its job again.
    pub(crate) attempt: u32,
    /// The index of its kind in the pool's list; none if no handler knows it.
    kind: Option<u32>,
    /// Set when the handler starts; zero before.
    started: AtomicU64,
    progressed: AtomicU64,
    stop: AtomicU8,
    /// Whether its handler is done with it: what is left is the settlement.
    handed_in: AtomicBool,
    ended: AtomicBool,
    /// Whether it is to lapse, and the store has not confirmed it yet. Without that it would not
    /// expire as long as the other leases of its grant are renewed.
    lapses: AtomicBool,
    /// Made on first use: most handlers need none of it.
    rare: OnceLock<Box<Rare>>,
}

/// What few leases need.
struct Rare {
    /// The number of checkpoints saved.
    seq: AtomicU64,
    /// What the handler leaves behind.
    result: Mutex<Option<Bytes>>,
    /// The verdict on a completion that was committed in the handler's own transaction.
    completed: OnceLock<Verdict>,
    /// Whether a settlement of this process may have ended it, and its answer is lost for good.
    in_doubt: AtomicBool,
    progress: Mutex<Option<Progress>>,
    stop_signal: StopSignal,
}

/// Tells a handler and its slot to stop.
#[derive(Default)]
pub(crate) struct StopSignal {
    /// For the handler: raised once.
    pub(crate) token: CancellationToken,
    /// For the slot: raised again whenever the reason becomes more severe.
    pub(crate) changed: Notify,
}

impl StopSignal {
    fn raise(&self) {
        self.token.cancel();
        self.changed.notify_one();
    }
}

/// Why a handler is told to stop. A more severe reason overrides a less severe one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Stop {
    /// The worker shuts down.
    Drain = 1,
    /// Somebody cancelled the job.
    Cancel,
    /// No progress: the lease lapses.
    Stalled,
    /// The deadline is near and no renewal got through.
    Deadline,
    /// The store refused the receipt: this is no longer the current lease.
    Fenced,
}

impl Stop {
    const ALL: [Self; 5] = [
        Self::Drain,
        Self::Cancel,
        Self::Stalled,
        Self::Deadline,
        Self::Fenced,
    ];

    /// Whether another worker may hold the lease by now, so that nothing may be settled.
    pub(crate) fn is_lost(self) -> bool {
        self.lost().is_some()
    }

    /// How it was lost, for the metrics. None: it is still ours.
    pub(crate) fn lost(self) -> Option<LostWhy> {
        match self {
            Self::Drain | Self::Cancel => None,
            Self::Stalled => Some(LostWhy::Stalled),
            Self::Deadline => Some(LostWhy::Deadline),
            Self::Fenced => Some(LostWhy::Fenced),
        }
    }
}

impl HeldLease {
    fn new(token: FencingToken, job: Arc<JobRecord>, kind: Option<usize>) -> Self {
        Self {
            token,
            attempt: job.attempt(),
            job,
            kind: kind.and_then(|kind| u32::try_from(kind).ok()),
            started: AtomicU64::new(0),
            progressed: AtomicU64::new(0),
            stop: AtomicU8::new(0),
            handed_in: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            lapses: AtomicBool::new(false),
            rare: OnceLock::new(),
        }
    }

    /// The index of its kind in the pool's list; none if no handler knows it.
    pub(crate) fn kind(&self) -> Option<usize> {
        self.kind.map(|kind| kind as usize)
    }

    fn rare(&self) -> &Rare {
        self.rare.get_or_init(|| {
            let saved = self.job.checkpoint.as_ref();
            Box::new(Rare {
                seq: AtomicU64::new(saved.map_or(0, |saved| saved.seq)),
                result: Mutex::default(),
                completed: OnceLock::new(),
                in_doubt: AtomicBool::new(false),
                progress: Mutex::default(),
                stop_signal: StopSignal::default(),
            })
        })
    }

    /// The number of the next checkpoint.
    pub(crate) fn next_seq(&self) -> u64 {
        self.rare().seq.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Leaves a result, in place of any before.
    pub(crate) fn set_result(&self, result: Bytes) {
        let mut place = self
            .rare()
            .result
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *place = Some(result);
    }

    pub(crate) fn result(&self) -> Option<Bytes> {
        let result = &self.rare.get()?.result;
        result
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Tells the handler to stop. Returns true if this reason is more severe than any earlier one.
    pub(crate) fn stop(&self, why: Stop) -> bool {
        let before = self.stop.fetch_max(why as u8, Ordering::SeqCst);
        if before >= why as u8 {
            return false;
        }
        // Together with the fence in `stop_signal`: either this sees the signal, or the one who
        // makes the signal sees the reason.
        fence(Ordering::SeqCst);
        if let Some(rare) = self.rare.get() {
            rare.stop_signal.raise();
        }
        true
    }

    pub(crate) fn stopped(&self) -> Option<Stop> {
        match self.stop.load(Ordering::SeqCst) {
            0 => None,
            level => Stop::ALL.into_iter().find(|stop| *stop as u8 == level),
        }
    }

    /// The stop signal, already raised if there is a reason to stop.
    pub(crate) fn stop_signal(&self) -> &StopSignal {
        let signal = &self.rare().stop_signal;
        fence(Ordering::SeqCst);
        // A stop that came before the signal was made could not raise it.
        if self.stop.load(Ordering::SeqCst) != 0 && !signal.token.is_cancelled() {
            signal.raise();
        }
        signal
    }

    /// The handler is done with it.
    pub(crate) fn hand_in(&self) {
        self.handed_in.store(true, Ordering::Release);
    }

    /// The handler is not done with it after all.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
    pub(crate) fn take_back(&self) {
        self.handed_in.store(false, Ordering::Release);
    }

    /// Whether its handler is done with it.
    pub(crate) fn is_handed_in(&self) -> bool {
        self.handed_in.load(Ordering::Acquire)
    }

    /// It was completed in one step with what the handler did.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
    pub(crate) fn complete(&self, verdict: Verdict) {
        let _ = self.rare().completed.set(verdict);
    }

    pub(crate) fn completed(&self) -> Option<Verdict> {
        self.rare.get()?.completed.get().copied()
    }

    /// A settlement of this process may have ended it, and nobody can tell any more: a refusal
    /// from now on says nothing of a stale holder.
    pub(crate) fn doubt(&self) {
        self.rare().in_doubt.store(true, Ordering::Release);
    }

    /// It is certain after all what became of that settlement.
    #[cfg(feature = "redis")]
    pub(crate) fn clear_doubt(&self) {
        self.rare().in_doubt.store(false, Ordering::Release);
    }

    pub(crate) fn is_in_doubt(&self) -> bool {
        self.rare
            .get()
            .is_some_and(|rare| rare.in_doubt.load(Ordering::Acquire))
    }

    /// It has ended, or is not ours any longer. Returns true the first time.
    pub(crate) fn end(&self) -> bool {
        !self.ended.swap(true, Ordering::AcqRel)
    }

    /// Nobody will settle it, and it is to expire with the next renewal of its grant.
    pub(crate) fn let_lapse(&self) {
        self.lapses.store(true, Ordering::Release);
    }

    /// The store has let it expire.
    pub(crate) fn has_lapsed(&self) {
        self.lapses.store(false, Ordering::Release);
    }

    pub(crate) fn is_to_lapse(&self) -> bool {
        self.lapses.load(Ordering::Acquire)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// The monotonic clock of one pool, as a number of nanoseconds that fits an atomic.
pub(crate) struct HolderClock {
    epoch: Instant,
}

impl HolderClock {
    pub(crate) fn starting(epoch: Instant) -> Self {
        Self { epoch }
    }

    pub(crate) fn stamp(&self, at: Instant) -> u64 {
        let nanos = at.saturating_duration_since(self.epoch).as_nanos();
        // Never zero, which means "not yet".
        u64::try_from(nanos).unwrap_or(u64::MAX).max(1)
    }

    pub(crate) fn instant(&self, stamp: u64) -> Instant {
        self.epoch + Duration::from_nanos(stamp)
    }
}

impl HeldGrant {
    pub(crate) fn receipt(&self, index: usize) -> Receipt {
        let lease = &self.leases[index];
        Receipt {
            queue: self.grant.queue.clone(),
            partition: self.grant.partition,
            grant: self.grant.id,
            token: lease.token,
            job: lease.job.id,
            nonce: self.grant.nonce,
        }
    }

    pub(crate) fn nonce(&self) -> Nonce {
        self.grant.nonce
    }

    pub(crate) fn granted_at(&self) -> Timestamp {
        self.grant.granted_at
    }

    /// When its leases must no longer be relied on.
    pub(crate) fn until(&self) -> Instant {
        self.pool.clock.instant(self.until.load(Ordering::Acquire))
    }

    /// Whether its leases must no longer be relied on.
    pub(crate) fn is_over(&self, stamp: u64) -> bool {
        self.until.load(Ordering::Acquire) <= stamp
    }

    /// How long before this moment the claim was first sent.
    pub(crate) fn age(&self, stamp: u64) -> Duration {
        Duration::from_nanos(stamp.saturating_sub(self.claimed_stamp))
    }

    /// When its leases end in the store, as far as this process can know.
    pub(crate) fn deadline(&self) -> Instant {
        self.until() + self.guard
    }

    /// When the claim or the last renewal that succeeded was sent.
    pub(crate) fn renewed(&self) -> Instant {
        self.pool
            .clock
            .instant(self.renewed.load(Ordering::Acquire))
    }

    /// A renewal that was sent at `sent` granted this much.
    pub(crate) fn extend(&self, sent: Instant, granted: Duration) {
        let until = self
            .pool
            .clock
            .stamp(sent + granted.saturating_sub(self.guard));
        self.renewed
            .store(self.pool.clock.stamp(sent), Ordering::Release);
        self.until.store(until, Ordering::Release);
    }

    pub(crate) fn start(&self, index: usize, stamp: u64) {
        self.leases[index].started.store(stamp, Ordering::Release);
    }

    /// Shows that the work advances.
    pub(crate) fn progress(&self, index: usize, progress: Progress, now: Instant) {
        let lease = &self.leases[index];
        *lease
            .rare()
            .progress
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(progress);
        lease
            .progressed
            .store(self.pool.clock.stamp(now), Ordering::Release);
    }

    /// Shows that the work advances, without words.
    pub(crate) fn touch(&self, index: usize, now: Instant) {
        self.leases[index]
            .progressed
            .store(self.pool.clock.stamp(now), Ordering::Release);
    }

    /// The progress that the store has not seen yet.
    pub(crate) fn unseen_progress(&self, index: usize) -> Option<Progress> {
        self.progress_of(index)?.clone()
    }

    /// The store has seen it. Progress shown since then stays.
    pub(crate) fn progress_seen(&self, index: usize, seen: &Progress) {
        if let Some(mut progress) = self.progress_of(index)
            && progress.as_ref() == Some(seen)
        {
            *progress = None;
        }
    }

    fn progress_of(&self, index: usize) -> Option<MutexGuard<'_, Option<Progress>>> {
        let lease = &self.leases[index];
        if lease.progressed.load(Ordering::Acquire) == 0 {
            return None;
        }
        let progress = &lease.rare.get()?.progress;
        Some(progress.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// When the handler last showed that it advances; its start counts. None while it waits for a
    /// slot.
    pub(crate) fn last_progress(&self, index: usize) -> Option<Instant> {
        let lease = &self.leases[index];
        let started = lease.started.load(Ordering::Acquire);
        let last = started.max(lease.progressed.load(Ordering::Acquire));
        (started != 0).then(|| self.pool.clock.instant(last))
    }

    pub(crate) fn live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }
}

/// All grants that a pool holds.
#[derive(Default)]
pub(crate) struct Board {
    /// In the order in which they were granted, so that a seed replays.
    grants: Mutex<BTreeMap<u64, Arc<HeldGrant>>>,
    keys: AtomicU64,
    leases: AtomicUsize,
}

impl Board {
    /// Takes note of a grant whose claim was first sent at `sent`.
    pub(crate) fn hold(
        &self,
        queue: usize,
        mut grant: Grant,
        sent: Instant,
        guard: Duration,
        pool: &Arc<Pool>,
    ) -> Arc<HeldGrant> {
        let leases = std::mem::take(&mut grant.leases);
        let mut held: Vec<HeldLease> = Vec::with_capacity(leases.len());
        // Neighbours are mostly of one kind: looked up, and counted, once.
        let (mut kind, mut alike) = (None, 0);
        let mut has_suspect = false;
        let count = |kind: Option<usize>, leases: u64| {
            if let Some(kind) = kind {
                pool.kinds[kind].meters[queue].granted(leases);
            }
        };
        for lease in leases {
            let last = held.last().map(|last| &last.job.kind);
            if last != Some(&lease.job.kind) {
                count(kind, alike);
                (kind, alike) = (pool.kind(&lease.job.kind), 0);
            }
            alike += 1;
            has_suspect |= lease.job.is_suspect();
            held.push(HeldLease::new(lease.token, lease.job, kind));
        }
        count(kind, alike);
        let leases = held.into_boxed_slice();
        let key = self.keys.fetch_add(1, Ordering::Relaxed);
        let granted = grant.granted;
        let held = Arc::new(HeldGrant {
            came_late: sent.elapsed() + guard >= granted,
            queue,
            grant,
            has_suspect,
            claimed: sent,
            claimed_stamp: pool.clock.stamp(sent),
            guard,
            pool: Arc::clone(pool),
            until: AtomicU64::new(0),
            renewed: AtomicU64::new(0),
            live: AtomicUsize::new(leases.len()),
            leases,
            key,
        });
        held.extend(sent, granted);
        self.leases.fetch_add(held.leases.len(), Ordering::Relaxed);
        self.lock().insert(key, Arc::clone(&held));
        held
    }

    /// This many leases of a grant have ended.
    pub(crate) fn end(&self, held: &HeldGrant, leases: usize) {
        self.leases.fetch_sub(leases, Ordering::Relaxed);
        if leases > 0 && held.live.fetch_sub(leases, Ordering::AcqRel) == leases {
            self.lock().remove(&held.key);
        }
    }

    pub(crate) fn grants(&self) -> Vec<Arc<HeldGrant>> {
        self.lock().values().cloned().collect()
    }

    /// How long the handlers of a queue that run now have run since a moment, in nanoseconds.
    pub(crate) fn running(&self, queue: usize, since: u64, now: u64) -> u64 {
        let grants = self.grants();
        let of_queue = grants.iter().filter(|held| held.queue == queue);
        let ran = |lease: &HeldLease| {
            let started = lease.started.load(Ordering::Acquire);
            if started == 0 || lease.is_handed_in() {
                return 0;
            }
            now.saturating_sub(started.max(since))
        };
        of_queue.flat_map(|held| held.leases.iter().map(ran)).sum()
    }

    /// How many leases are held, running or not.
    pub(crate) fn leases(&self) -> usize {
        self.leases.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<HeldGrant>>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::job::{JobId, Kind, NewJob, QueueName};

    fn lease() -> HeldLease {
        let new = NewJob::raw(QueueName::default(), Kind::new("k").unwrap(), Bytes::new());
        let job = JobRecord::new(JobId::generate(), new, Timestamp::ZERO);
        HeldLease::new(FencingToken::new(1), Arc::new(job), None)
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn a_held_lease_is_one_line_of_the_cache() {
        assert_eq!(size_of::<HeldLease>(), 64);
    }

    #[test]
    fn a_handler_that_listens_while_it_is_stopped_hears_it() {
        for _ in 0..2_000 {
            let (lease, start) = (lease(), Barrier::new(4));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    lease.stop_signal();
                });
                let stops = [Stop::Drain, Stop::Cancel, Stop::Fenced];
                let told = stops.map(|why| {
                    let (lease, start) = (&lease, &start);
                    scope.spawn(move || {
                        start.wait();
                        (lease.stop(why), lease.end())
                    })
                });
                let told = told.map(|thread| thread.join().unwrap());
                assert!(told[2].0, "the most severe reason is always news");
                assert_eq!(told.iter().filter(|(_, first)| *first).count(), 1);
            });
            assert_eq!(lease.stopped(), Some(Stop::Fenced));
            assert!(lease.stop_signal().token.is_cancelled());
        }
    }
}
