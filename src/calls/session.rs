//! The session of one process with one store: the name under which its calls can be repeated.
//!
//! A session hands out [`Lane`]s and takes them back when they are dropped. The store remembers the
//! last answer of each lane, so a lane that is no longer in use is given to the next caller.
//! This is the only pool of lanes in a process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use tokio::sync::Mutex;

use super::lane::{Lane, RepeatBudget};
use crate::error::Result;
use crate::store::{SessionId, Store};

/// The session of one process with one store. Opened on first use, and again whenever it is lost.
pub(crate) struct Session {
    pub(crate) store: Arc<dyn Store>,
    open: Mutex<Option<SessionId>>,
    /// How many lanes have ever been handed out under new numbers.
    lanes: AtomicU32,
    /// Lanes that are not in use at the moment: number and last sequence number.
    spare: std::sync::Mutex<Vec<(u32, u64)>>,
    pub(super) repeats: RepeatBudget,
}

impl Session {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            store,
            open: Mutex::new(None),
            lanes: AtomicU32::new(0),
            spare: std::sync::Mutex::default(),
            repeats: RepeatBudget::default(),
        })
    }

    /// A lane for one component, until it drops it.
    pub(crate) fn lane(self: &Arc<Self>) -> Lane {
        let spare = self.spare().pop();
        let (number, seq) =
            spare.unwrap_or_else(|| (self.lanes.fetch_add(1, Ordering::Relaxed), 0));
        Lane::new(Arc::clone(self), number, seq)
    }

    /// Takes back a lane whose last call had this sequence number.
    pub(super) fn take_back(&self, number: u32, seq: u64) {
        self.spare().push((number, seq));
    }

    fn spare(&self) -> MutexGuard<'_, Vec<(u32, u64)>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open session, or a new one if `lost` is the one that was open.
    pub(super) async fn id(&self, lost: Option<SessionId>) -> Result<SessionId> {
        let mut open = self.open.lock().await;
        match *open {
            Some(id) if Some(id) != lost => Ok(id),
            _ => {
                let id = self.store.open_session().await?;
                *open = Some(id);
                Ok(id)
            }
        }
    }
}
