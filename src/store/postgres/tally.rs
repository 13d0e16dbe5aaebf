//! What a call adds to the counts and the ledger of a queue.
//!
//! A tally is an array of numbers, one for each column; `tallies` holds one row for each call until
//! they are folded. A row may end before the last columns: it adds nothing to them. The sum of the rows is what the queue counts.

use crate::inspect::{Counts, Ledger};
use crate::lease::{Cause, LeaseEnd};

pub(super) const COLUMNS: usize = 24;

/// The columns, in the order of the array.
#[derive(Clone, Copy)]
pub(super) enum Count {
    Scheduled,
    Ready,
    Parked,
    Leased,
    Completed,
    Dead,
    Cancelled,
    Enqueued,
    Granted,
    LeaseCompleted,
    Retried,
    Surrendered,
    Buried,
    LeaseCancelled,
    ExpiredDeadline,
    ExpiredStalled,
    ExpiredLifetime,
    Revoked,
    Live,
    Late,
    Fenced,
    Pruned,
    Purged,
    DeadByExpiry,
}

impl Count {
    /// The count of the jobs that are aside in a state.
    pub(super) fn aside(state: i64) -> Self {
        match state {
            0 => Self::Scheduled,
            3 => Self::Completed,
            4 => Self::Dead,
            5 => Self::Cancelled,
            _ => Self::Ready,
        }
    }

    pub(super) fn end(end: LeaseEnd) -> Self {
        match end {
            LeaseEnd::Completed => Self::LeaseCompleted,
            LeaseEnd::Retried => Self::Retried,
            LeaseEnd::Surrendered => Self::Surrendered,
            LeaseEnd::Buried => Self::Buried,
            LeaseEnd::Cancelled => Self::LeaseCancelled,
            LeaseEnd::Expired(Cause::Deadline) => Self::ExpiredDeadline,
            LeaseEnd::Expired(Cause::Stalled) => Self::ExpiredStalled,
            LeaseEnd::Expired(Cause::Lifetime) => Self::ExpiredLifetime,
            LeaseEnd::Revoked => Self::Revoked,
        }
    }
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct Tally([i64; COLUMNS]);

impl Tally {
    pub(super) fn add(&mut self, count: Count, n: i64) {
        self.0[count as usize] += n;
    }

    pub(super) fn is_nothing(&self) -> bool {
        self.0.iter().all(|n| *n == 0)
    }

    pub(super) fn columns(&self) -> &[i64] {
        &self.0
    }

    /// A sum as it was read.
    pub(super) fn read(columns: &[i64]) -> (Counts, Ledger) {
        let of = |count: Count| columns.get(count as usize).map_or(0, |n| *n as u64);
        let counts = Counts {
            scheduled: of(Count::Scheduled),
            ready: of(Count::Ready),
            parked: of(Count::Parked),
            leased: of(Count::Leased),
            completed: of(Count::Completed),
            dead: of(Count::Dead),
            cancelled: of(Count::Cancelled),
        };
        let ledger = Ledger {
            enqueued: of(Count::Enqueued),
            granted: of(Count::Granted),
            completed: of(Count::LeaseCompleted),
            retried: of(Count::Retried),
            surrendered: of(Count::Surrendered),
            buried: of(Count::Buried),
            cancelled: of(Count::LeaseCancelled),
            expired_deadline: of(Count::ExpiredDeadline),
            expired_stalled: of(Count::ExpiredStalled),
            expired_lifetime: of(Count::ExpiredLifetime),
            revoked: of(Count::Revoked),
            live: of(Count::Live),
            late: of(Count::Late),
            fenced: of(Count::Fenced),
            pruned: of(Count::Pruned),
            purged: of(Count::Purged),
            dead_by_expiry: of(Count::DeadByExpiry),
        };
        (counts, ledger)
    }
}
