//! Calls that found nothing to do, and wrote nothing: idle workers claim, reap and prune, too.
//!
//! Whoever has the answer to such a call repeats it in vain, and the repeat must do as little. So
//! this process remembers it, for a lane has one request at a time and belongs to one process.
//! Where the answer was lost, the repeat finds what there is by then: that is its first answer.
//!
//! A claim that is repeated does write that it found nothing. The copy without an answer may still
//! be under way, and must not grant later what nobody waits for. Of one whose first copy was
//! answered there is no other.

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

    /// Refuses a request that is older than one of its lane that found nothing. The server, which
    /// refuses other late ones, does not know of that one.
    pub(super) fn admit(&self, request: RequestId) -> Result<()> {
        if self.last(request).is_some_and(|last| request.seq < last) {
            let why = "a later request of the same lane has been answered";
            return Err(Error::new(ErrorKind::SessionLost, why));
        }
        Ok(())
    }

    /// How much a request may do: a repeat of one that found nothing, nothing.
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
