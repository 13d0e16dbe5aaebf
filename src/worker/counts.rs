//! Counting: how many handlers have ended, and how busy they kept their slots.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A handler that runs for longer is measured while it runs; a shorter one when it ends, which
/// costs no look at the clock.
const LONG: Duration = Duration::from_millis(10);

/// What the slots of one pool have done.
pub(crate) struct Counts {
    /// Handlers that have ended.
    finished: AtomicU64,
    /// Nanoseconds for which handlers ran that ended since the last measurement, by queue.
    busy: Box<[AtomicU64]>,
    /// When the last measurement was made.
    measured: Mutex<Instant>,
}

impl Counts {
    pub(crate) fn new(queues: usize, now: Instant) -> Self {
        Self {
            finished: AtomicU64::new(0),
            busy: (0..queues).map(|_| AtomicU64::new(0)).collect(),
            measured: Mutex::new(now),
        }
    }

    /// Handlers that have ended.
    pub(crate) fn finished(&self) -> u64 {
        self.finished.load(Ordering::Relaxed)
    }

    /// Begins a new measurement of how busy the slots are. Returns when the last one began.
    pub(crate) fn measure(&self, now: Instant) -> Instant {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut measured, now)
    }

    /// How long handlers of a queue ran that ended since this was last asked.
    pub(crate) fn take_busy(&self, queue: usize) -> Duration {
        Duration::from_nanos(self.busy[queue].swap(0, Ordering::Relaxed))
    }

    /// The part of a run which ends now that no measurement has seen.
    fn unmeasured(&self, ran: Duration) -> Duration {
        if ran < LONG {
            return ran;
        }
        let measured = *self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        ran.min(measured.elapsed())
    }
}

/// The handlers of one slot that have ended and are not counted yet. They are counted together
/// whenever the slot pauses, because all slots count in the same memory.
#[derive(Default)]
pub(crate) struct SlotCounts {
    queue: usize,
    finished: u64,
    busy: Duration,
}

impl SlotCounts {
    /// A handler of this queue has ended.
    pub(crate) fn add(&mut self, counts: &Counts, queue: usize, ran: Duration) {
        if self.queue != queue {
            self.flush(counts);
            self.queue = queue;
        }
        self.finished += 1;
        self.busy += counts.unmeasured(ran);
    }

    /// Counts what has been added.
    pub(crate) fn flush(&mut self, counts: &Counts) {
        if self.finished > 0 {
            let busy = self.busy.as_nanos() as u64;
            counts.finished.fetch_add(self.finished, Ordering::Relaxed);
            counts.busy[self.queue].fetch_add(busy, Ordering::Relaxed);
            (self.finished, self.busy) = (0, Duration::ZERO);
        }
    }
}
