//! The rules: what may happen to a job. Pure functions of (job, lease, event, now).
//!
//! | file | decides |
//! |---|---|
//! | this one | which moves between states exist: [`TRANSITIONS`] |
//! | [`ends`] | what becomes of a job when its lease ends |
//! | [`holding`] | what a holding is on, what conflicts with what, until when it lives |
//! | [`issue`] | which token the next lease gets |
//! | [`order`] | which job is claimed next, how jobs are cut into grants, when a grant is over |
//!
//! The memory and SQLite stores call these functions. Redis repeats them in Lua and PostgreSQL in
//! PL/pgSQL, with numbers that are generated from [`constants`]. The tests play tables of inputs
//! and outcomes, made by these functions, through every store: a disagreement is a failed test. A
//! store of your own can call the functions too. Where a store keeps its jobs is up to the store.
//! The guide's page [`life`](crate::guide::life) has a diagram of the moves.

pub mod ends;
pub mod holding;
pub mod issue;
pub mod order;
#[doc(hidden)]
pub mod vectors;

use crate::clock::micros;
use crate::job::JobState;
use crate::limits;

/// What moves a job from state to state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "the verbs are the glossary's")]
pub enum Transition {
    Enqueue,
    Promote,
    Claim,
    Complete,
    Retry,
    Surrender,
    Bury,
    Expire,
    Revoke,
    Cancel,
    RetryDead,
    Reschedule,
    Purge,
    Prune,
}

use JobState::{Cancelled, Completed, Dead, Leased, Ready, Scheduled};

/// The transition table: from, by, to. `None` is "not there".
pub const TRANSITIONS: &[(Option<JobState>, Transition, Option<JobState>)] = &[
    (None, Transition::Enqueue, Some(Ready)),
    (None, Transition::Enqueue, Some(Scheduled)),
    (Some(Scheduled), Transition::Promote, Some(Ready)),
    (Some(Ready), Transition::Claim, Some(Leased)),
    (Some(Leased), Transition::Complete, Some(Completed)),
    (Some(Leased), Transition::Complete, None),
    (Some(Leased), Transition::Retry, Some(Scheduled)),
    (Some(Leased), Transition::Retry, Some(Cancelled)),
    (Some(Leased), Transition::Surrender, Some(Ready)),
    (Some(Leased), Transition::Surrender, Some(Scheduled)),
    (Some(Leased), Transition::Surrender, Some(Cancelled)),
    (Some(Leased), Transition::Bury, Some(Dead)),
    (Some(Leased), Transition::Expire, Some(Ready)),
    (Some(Leased), Transition::Expire, Some(Dead)),
    (Some(Leased), Transition::Expire, Some(Cancelled)),
    (Some(Leased), Transition::Revoke, Some(Ready)),
    (Some(Leased), Transition::Revoke, Some(Cancelled)),
    (Some(Scheduled), Transition::Cancel, Some(Cancelled)),
    (Some(Ready), Transition::Cancel, Some(Cancelled)),
    (Some(Leased), Transition::Cancel, Some(Leased)),
    (Some(Dead), Transition::RetryDead, Some(Ready)),
    (Some(Scheduled), Transition::Reschedule, Some(Scheduled)),
    (Some(Scheduled), Transition::Reschedule, Some(Ready)),
    (Some(Ready), Transition::Reschedule, Some(Scheduled)),
    (Some(Ready), Transition::Reschedule, Some(Ready)),
    (Some(Scheduled), Transition::Purge, None),
    (Some(Ready), Transition::Purge, None),
    (Some(Completed), Transition::Purge, None),
    (Some(Dead), Transition::Purge, None),
    (Some(Cancelled), Transition::Purge, None),
    (Some(Completed), Transition::Prune, None),
    (Some(Cancelled), Transition::Prune, None),
];

/// The numbers of the rules, under the names by which scripts and statements know them. Times are
/// in microseconds.
pub fn constants() -> [(&'static str, u64); 10] {
    [
        ("LEAD", issue::Issuer::LEAD),
        ("BELIEF", micros(issue::Issuer::BELIEF)),
        ("DISBELIEVED_DELAY", micros(ends::DISBELIEVED_DELAY)),
        ("CANCELLED_RETENTION", micros(ends::CANCELLED_RETENTION)),
        ("SESSION_IDLE", micros(limits::SESSION_IDLE)),
        ("GRANT_BYTES", limits::GRANT_BYTES as u64),
        ("GRANT_LEASES", limits::GRANT_LEASES as u64),
        ("STEP_JOBS", limits::STEP_JOBS as u64),
        ("HISTORY_LENGTH", limits::HISTORY as u64),
        ("REASON_BYTES", limits::REASON_BYTES as u64),
    ]
}
