//! When a lease is over, and why it expired.

use std::time::Duration;

use crate::clock::{Timestamp, micros};
use crate::history::Cause;

/// The deadline that a renewal at `now` gives: a term from now, cut by the maximum lifetime.
pub(crate) fn deadline(
    now: Timestamp,
    term: Duration,
    granted_at: Timestamp,
    max_lifetime: Duration,
) -> Timestamp {
    now.after(term).min(granted_at.after(max_lifetime))
}

/// Why a lease expired whose deadline passed.
pub(crate) fn overdue_cause(
    deadline: Timestamp,
    granted_at: Timestamp,
    max_lifetime: Duration,
) -> Cause {
    if deadline.as_micros() >= granted_at.as_micros().saturating_add(micros(max_lifetime)) {
        Cause::Lifetime
    } else {
        Cause::Deadline
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_is_cut_by_the_lifetime_and_so_is_the_cause() {
        let (at, second) = (Timestamp::from_micros, Duration::from_secs(1));
        let (granted, life) = (at(5_000_000), 10 * second);
        let until = |now| deadline(at(now), second, granted, life);
        assert_eq!(until(6_000_000), at(7_000_000));
        assert_eq!(until(14_500_000), at(15_000_000));
        let cause = |deadline| overdue_cause(at(deadline), granted, life);
        assert_eq!(cause(14_999_999), Cause::Deadline);
        assert_eq!(cause(15_000_000), Cause::Lifetime);
    }
}
