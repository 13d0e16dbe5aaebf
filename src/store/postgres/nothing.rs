//! Calls that found nothing to do. Idle workers reap and prune too, and should write nothing.
//!
//! The answer to such a call is not stored in the database, so a repeat cannot be answered from
//! there. Instead, the process that got the answer remembers the request, and a repeat of it does
//! nothing. This is enough because a lane belongs to one process and has one request at a time. If
//! the answer was lost on the way, the repeat runs as a new call, and its answer is the first one.

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
        let lanes = self.lanes();
        lanes.get(&(request.session, request.lane)).copied()
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<(SessionId, u32), u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
