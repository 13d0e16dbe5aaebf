//! In which order jobs are claimed, how they are cut into grants, and when a grant is over.

use std::ops::Range;
use std::time::Duration;

use crate::clock::{Timestamp, micros};
use crate::history::Cause;
use crate::job::{JobId, JobRecord};
use crate::limits;

/// A queue has two tiers of ready jobs for each priority. A claim serves them from the first to the
/// last.
pub const TIERS: usize = 2 * (limits::PRIORITY_MAX as usize + 1);

/// The tier of a ready job. Suspects wait in a tier of their own, ahead of the others of their
/// priority.
pub fn tier_of(job: &JobRecord) -> usize {
    usize::from(job.options.priority) * 2 + usize::from(!job.is_suspect())
}

/// Whether it is a tier of suspects, of which a claim takes at most one job.
pub const fn is_suspects(tier: usize) -> bool {
    tier.is_multiple_of(2)
}

/// Whether a unique key keeps a job out: another job holds it, for good or until a moment that is
/// still to come.
pub fn is_duplicate(job: JobId, holder: JobId, until: Option<Timestamp>, now: Timestamp) -> bool {
    holder != job && until.is_none_or(|until| until > now)
}

/// Claimed jobs that go into one grant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrantSpan {
    /// Which of the claimed jobs.
    pub jobs: Range<usize>,
    /// How long each renewal extends their leases.
    pub term: Duration,
    /// How long their leases may live.
    pub max_lifetime: Duration,
}

/// Cuts claimed jobs into grants: each has neighbours of the same terms, as many as it may weigh.
/// `terms` are the term and the maximum lifetime of jobs that bring none of their own.
pub fn grant_spans<'j>(
    jobs: impl IntoIterator<Item = &'j JobRecord>,
    terms: (Duration, Duration),
) -> Vec<GrantSpan> {
    let mut spans: Vec<GrantSpan> = Vec::new();
    let mut bytes = 0;
    for (at, job) in jobs.into_iter().enumerate() {
        let term = job.options.term.unwrap_or(terms.0);
        let max_lifetime = job.options.max_lifetime.unwrap_or(terms.1);
        bytes += job.weight();
        match spans.last_mut() {
            Some(span)
                if (span.term, span.max_lifetime) == (term, max_lifetime)
                    && bytes <= limits::GRANT_BYTES =>
            {
                span.jobs.end = at + 1;
            }
            _ => {
                bytes = job.weight();
                spans.push(GrantSpan {
                    jobs: at..at + 1,
                    term,
                    max_lifetime,
                });
            }
        }
    }
    spans
}

/// The first of two times from now, where there are any.
pub fn earliest(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}

/// The deadline that a renewal at `now` gives: a term from now, cut by the maximum lifetime.
pub fn deadline(
    now: Timestamp,
    term: Duration,
    granted_at: Timestamp,
    max_lifetime: Duration,
) -> Timestamp {
    now.after(term).min(granted_at.after(max_lifetime))
}

/// Why a lease expired whose deadline passed.
pub fn overdue_cause(deadline: Timestamp, granted_at: Timestamp, max_lifetime: Duration) -> Cause {
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
