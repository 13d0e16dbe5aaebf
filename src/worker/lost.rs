//! Losing a lease: all that happens once a lease may be somebody else's.
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
//! 2. A lease that still waits for a slot is not started any more ([`slots`](super::slots)).
//! 3. A handler that has not returned after the grace is dropped ([`slots`](super::slots)). One
//!    that blocks its thread cannot be dropped; it keeps its slot.
//! 4. Nothing is settled, whatever the handler returns ([`outcome`](super::outcome)). Only a lease
//!    that ran out before its handler started is handed back.
//! 5. In the store the lease expires at its deadline; a stalled one with the next renewal of its
//!    grant, which names it as lapsed until the store has answered ([`renewer`](super::renewer)).
//!
//! A lease whose handler has ended only waits for the verdict on its settlement, and is lost no
//! more: the store decides.

use super::held::{HeldGrant, Stop};
use super::pool::Pool;
use crate::error::Verb;
use crate::handler::Failure;
use crate::observe::Event;

/// A lease is not ours any longer, or may not be: its handler stops and settles nothing.
pub(crate) fn lose(pool: &Pool, held: &HeldGrant, index: usize, why: Stop) {
    let lease = &held.leases[index];
    let is_known = lease.stopped().is_some_and(Stop::is_lost);
    if lease.is_handed_in() || lease.has_ended() || is_known || !lease.stop(why) {
        return;
    }
    if why == Stop::Stalled {
        lease.let_lapse();
    }
    if let (Some(kind), Some(why)) = (lease.kind(), why.lost()) {
        pool.kinds[kind].meters[held.queue].lost(why);
    }
    if why == Stop::Fenced {
        fenced(pool, held, index, Verb::Renew);
    }
    let (queue, job, token) = (&held.grant.queue, &*lease.job, lease.token);
    pool.observers.emit(|| Event::Lost {
        queue,
        job,
        token,
        stalled: why == Stop::Stalled,
    });
}

/// All leases of a grant are lost.
pub(crate) fn lose_all(pool: &Pool, held: &HeldGrant, why: Stop) {
    for index in 0..held.leases.len() {
        lose(pool, held, index, why);
    }
}

/// The store refused a call of the handler: the lease is somebody else's. Returns what ends the
/// handler.
pub(crate) fn call_refused(pool: &Pool, held: &HeldGrant, index: usize, verb: Verb) -> Failure {
    let meter = &pool.queues[held.queue].meter;
    match verb {
        Verb::Checkpoint => meter.checkpoint_fenced(),
        _ => meter.settle_fenced(1),
    }
    fenced(pool, held, index, verb);
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

/// Tells the observers that the store refused a call under this lease.
pub(crate) fn fenced(pool: &Pool, held: &HeldGrant, index: usize, verb: Verb) {
    let lease = &held.leases[index];
    pool.observers.emit(|| Event::Fenced {
        verb,
        queue: &held.grant.queue,
        job: lease.job.id,
        token: lease.token,
    });
}
