//! Calls that found nothing to do, and wrote nothing: idle workers claim, reap and prune too.
//!
//! The answer to such a call is not stored in the database, so a repeat cannot be answered from
//! there. Instead, the process that got the answer remembers the request, and a repeat of it does
//! nothing. This is enough because a lane belongs to one process and has one request at a time. If
//! the answer was lost on the way, the repeat runs as a new call, and its answer is the first one.
//!
//! A claim is different once it is repeated: the copy whose answer was lost may still be under way,
//! and must not grant leases that nobody waits for. So a repeated claim does store that it found
//! nothing. A claim that was answered at the first try has no other copy.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::store::{RequestId, SessionId};

#[derive(Debug, Default)]
pub(super) struct Nothing(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The last request of each lane that found nothing.
    lanes: HashMap<(SessionId, u32), u64>,
    /// Claims of which a copy was sent and not answered.
    in_doubt: HashSet<RequestId>,
}

impl Nothing {
    /// A process has a few lanes; sessions that are over are forgotten.
    const MOST: usize = 1_000;

    pub(super) fn note(&self, request: RequestId) {
        let lanes = &mut self.known().lanes;
        if lanes.len() >= Self::MOST {
            lanes.clear();
        }
        lanes.insert((request.session, request.lane), request.seq);
    }

    /// A claim is sent. Tells whether a copy of it was sent before, and not answered.
    pub(super) fn send(&self, request: RequestId) -> bool {
        let in_doubt = &mut self.known().in_doubt;
        if in_doubt.len() >= Self::MOST {
            in_doubt.clear();
        }
        !in_doubt.insert(request)
    }

    pub(super) fn answered(&self, request: RequestId) {
        self.known().in_doubt.remove(&request);
    }

    /// Refuses a request if a later one of its lane has found nothing. The server refuses all other
    /// late requests, but it does not know of that one.
    pub(super) fn admit(&self, request: RequestId) -> Result<()> {
        if self.last(request).is_some_and(|last| request.seq < last) {
            let why = "a later request of the same lane has been answered";
            return Err(Error::new(ErrorKind::SessionLost, why));
        }
        Ok(())
    }

    /// How many jobs a request may touch: none if it repeats a request that found nothing.
    pub(super) fn most(&self, request: RequestId, max: usize) -> usize {
        if self.last(request) == Some(request.seq) {
            0
        } else {
            max
        }
    }

    fn last(&self, request: RequestId) -> Option<u64> {
        let known = self.known();
        known.lanes.get(&(request.session, request.lane)).copied()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
