//! The rules: what may happen to a job. Pure functions of (job, lease, event, now).
//!
//! ```text
//! enqueue ──► ready ──claim──► leased ──settle(complete)──► completed ──prune──► ∅
//!               ▲                │ │ │
//!  scheduled ───┘ (time)         │ │ └──settle(bury)──────► dead
//!      ▲                         │ ├────settle(surrender)─► ready | scheduled (with delay)
//!      └──────settle(retry)──────┘ ├────expire────────────► ready | dead (too many expiries)
//!                                  └────revoke────────────► ready
//! ```
//!
//! | file | decides |
//! |---|---|
//! | this one | which moves between states exist: [`TRANSITIONS`] |
//! | [`ends`] | what becomes of a job when its lease ends |
//! | [`issue`] | which token the next lease gets |
//! | [`order`] | when a lease ends, and why it expired |
//!
//! The memory and SQLite stores call these functions. Redis and PostgreSQL repeat them in Lua and
//! PL/pgSQL; there, vectors made from these functions run through the scripts in the tests, so that
//! a disagreement is a failed test. A store of your own can call them too. Where a store puts the
//! job is its own affair.

pub mod ends;
pub mod issue;
pub mod order;

use crate::job::JobState;

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

/// Whether the table has this step.
pub fn is_legal(from: Option<JobState>, by: Transition, to: Option<JobState>) -> bool {
    TRANSITIONS.contains(&(from, by, to))
}
