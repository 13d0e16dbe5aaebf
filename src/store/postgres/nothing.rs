//! Calls that found nothing to do, and wrote nothing: idle workers reap and prune, too.
//!
//! Whoever has the answer to such a call repeats it in vain, and the repeat must do as little. So
//! this process remembers it, for a lane has one request at a time and belongs to one process.
//! Where the answer was lost, the repeat finds what there is by then: that is its first answer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::store::{RequestId, SessionId};

/// The last such request of each lane.
#[derive(Debug, Default)]
pub(super) struct Nothing(Mutex<HashMap<(SessionId, u32), u64>>);

impl Nothing {
    /// A process has a few lanes that reap and prune; sessions that are over are forgotten.
    const MOST: usize = 1_000;

    pub(super) fn note(&self, request: RequestId) {
        let mut lanes = self.lanes();
        if lanes.len() >= Self::MOST {
            lanes.clear();
        }
        lanes.insert((request.session, request.lane), request.seq);
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
        let lanes = self.lanes();
        lanes.get(&(request.session, request.lane)).copied()
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<(SessionId, u32), u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
