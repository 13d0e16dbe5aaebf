//! What a call adds to the counts and the ledger of a queue.
//!
//! A tally is an array of numbers, one for each column; `tallies` holds one row for each call until
//! they are folded. A row may end before the last columns: it adds nothing to them. The sum of the
//! rows is what the queue counts.

use crate::inspect::{Counts, Ledger};

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
    /// As the functions call them: `count.READY`.
    pub(super) const NAMES: [(&'static str, Self); COLUMNS] = [
        ("SCHEDULED", Self::Scheduled),
        ("READY", Self::Ready),
        ("PARKED", Self::Parked),
        ("LEASED", Self::Leased),
        ("COMPLETED", Self::Completed),
        ("DEAD", Self::Dead),
        ("CANCELLED", Self::Cancelled),
        ("ENQUEUED", Self::Enqueued),
        ("GRANTED", Self::Granted),
        ("LEASE_COMPLETED", Self::LeaseCompleted),
        ("RETRIED", Self::Retried),
        ("SURRENDERED", Self::Surrendered),
        ("BURIED", Self::Buried),
        ("LEASE_CANCELLED", Self::LeaseCancelled),
        ("EXPIRED_DEADLINE", Self::ExpiredDeadline),
        ("EXPIRED_STALLED", Self::ExpiredStalled),
        ("EXPIRED_LIFETIME", Self::ExpiredLifetime),
        ("REVOKED", Self::Revoked),
        ("LIVE", Self::Live),
        ("LATE", Self::Late),
        ("FENCED", Self::Fenced),
        ("PRUNED", Self::Pruned),
        ("PURGED", Self::Purged),
        ("DEAD_BY_EXPIRY", Self::DeadByExpiry),
    ];
}

/// Sums of counts.
#[derive(Debug)]
pub(super) struct Tally;

impl Tally {
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
