//! Losing a lease: everything that happens once another worker may hold it.
//!
//! ```text
//!  who notices                                        reason     calls
//!  the renewer's watch: the deadline is near            Deadline   lose_all
//!  the renewer: no progress within the stall limit      Stalled    lose
//!  the store refuses a renewal                          Fenced     lose, lose_all
//!  the store refuses a call of the handler              Fenced     call_refused
//!  the pool, when it is dropped with leases in hand     Deadline   abandon
//! ```
//!
//! What follows is the same in each case:
//!
//! 1. The reason is set on the [held lease](super::held), and the handler's stop signal is raised.
//! 2. A lease that still waits for a slot is never started ([`slots`](super::slots)).
//! 3. A handler that has not returned after the grace is dropped ([`slots`](super::slots)). One
//!    that blocks its thread cannot be dropped; it keeps its slot.
//! 4. Nothing is settled, whatever the handler returns ([`outcome`](super::outcome)). Only a lease
//!    that ran out before its handler started is handed back.
//! 5. In the store a lease that was refused is already gone, and any other expires at its deadline;
//!    a stalled one with the next renewal of its grant, which names it as lapsed until the store
//!    has answered ([`renewer`](super::renewer)).
//!
//! Once its handler has ended, a lease can no longer be lost. It waits for the verdict on its
//! settlement: the store decides.

use super::held::{HeldGrant, Stop};
use super::pool::Pool;
use crate::error::Verb;
use crate::handler::Failure;
use crate::observe::Event;

/// A lease is not ours any longer, or may not be: its handler stops and settles nothing. Returns
/// true only for a loss that is new and that no settlement of our own can explain.
pub(crate) fn lose(pool: &Pool, held: &HeldGrant, index: usize, why: Stop) -> bool {
    let lease = &held.leases[index];
    let is_known = lease.stopped().is_some_and(Stop::is_lost);
    if lease.is_handed_in() || lease.has_ended() || is_known || !lease.stop(why) {
        return false;
    }
    if why == Stop::Stalled {
        lease.let_lapse();
    }
    if let (Some(kind), Some(why)) = (lease.kind(), why.lost()) {
        pool.kinds[kind].meters[held.queue].lost(why);
    }
    if why == Stop::Fenced {
        refused(pool, held, index, Verb::Renew);
    }
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    pool.observers.emit(|| Event::Lost {
        queue,
        job,
        token,
        stalled: why == Stop::Stalled,
    });
    !lease.is_in_doubt()
}

/// All leases of a grant are lost. Returns how many of them were newly lost: see [`lose`].
pub(crate) fn lose_all(pool: &Pool, held: &HeldGrant, why: Stop) -> usize {
    let leases = 0..held.leases.len();
    leases.filter(|index| lose(pool, held, *index, why)).count()
}

/// The store refused a call of the handler: this is no longer the current lease. Returns what ends
/// the handler.
pub(crate) fn call_refused(pool: &Pool, held: &HeldGrant, index: usize, verb: Verb) -> Failure {
    refused(pool, held, index, verb);
    held.leases[index].stop(Stop::Fenced);
    Failure::lost()
}

/// The pool is gone: its handlers are told, and the grant is left to expire.
pub(crate) fn abandon(pool: &Pool, held: &HeldGrant) {
    for lease in &held.leases {
        lease.stop(Stop::Deadline);
    }
    pool.end_all(held, 0..held.leases.len());
}

/// The store refused a call under this lease: counts it, and tells the observers. A refusal is a
/// stale holder's, unless it can be this process's own settlement that ended the lease.
pub(crate) fn refused(pool: &Pool, held: &HeldGrant, index: usize, verb: Verb) {
    let (lease, queue) = (&held.leases[index], &held.grant.queue);
    let (job, token) = (lease.job.id, lease.token);
    let meter = &pool.queues[held.queue].meter;
    if lease.is_in_doubt() {
        meter.in_doubt();
        return pool.observers.emit(|| Event::InDoubt { queue, job, token });
    }
    meter.fenced(verb);
    pool.observers.emit(|| Event::Fenced {
        verb,
        queue,
        job,
        token,
    });
}
