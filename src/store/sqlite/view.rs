//! Jobs and leases as inspections show them, and the states of jobs as columns hold them.

use std::sync::Arc;

use super::stored_grant::StoredGrant;
use crate::clock::Timestamp;
use crate::inspect::{JobView, LeaseView, ParkedView};
use crate::job::{JobRecord, JobState, Key, QueueName};
use crate::rules::ends::LeaseFacts;

pub(super) const SCHEDULED: i64 = 0;
pub(super) const PARKED: i64 = 1;

/// A state as a column's value.
pub(super) fn state_code(state: JobState) -> i64 {
    match state {
        JobState::Scheduled => SCHEDULED,
        JobState::Ready => PARKED,
        JobState::Leased => 2,
        JobState::Completed => 3,
        JobState::Dead => 4,
        JobState::Cancelled => 5,
    }
}

/// A job without a lease.
pub(super) fn waiting(queue: &QueueName, state: JobState, job: JobRecord) -> JobView {
    JobView::new(queue.clone(), state, Arc::new(job))
}

/// A lease of a live grant.
pub(super) fn lease_view(
    queue: &QueueName,
    held: &StoredGrant,
    facts: &LeaseFacts,
    job: &JobRecord,
    now: Timestamp,
) -> LeaseView {
    LeaseView {
        queue: queue.clone(),
        job: job.id,
        kind: job.kind.clone(),
        token: facts.token,
        owner: Arc::clone(&facts.owner),
        task: Arc::clone(&facts.task),
        attempt: job.attempt(),
        granted_at: facts.granted_at,
        time_left: held.deadline.since(now),
        term: held.term,
        renewals: facts.renewals,
        cancel: facts.cancel,
        progress: facts.progress.clone(),
    }
}

/// A row of a page of keys, under its cursor.
pub(super) fn parked_view(key: Vec<u8>, jobs: u64) -> Option<(String, ParkedView)> {
    let text = String::from_utf8(key).ok()?;
    let key = Key::new(&text).ok()?;
    Some((text, ParkedView::new(key, jobs)))
}
