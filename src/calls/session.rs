//! The session of one process with one store: the name under which its calls can be repeated.
//!
//! A session hands out [`Lane`]s and takes them back when they are dropped. The store remembers the
//! last answer of each lane, so a lane that nobody uses any longer is given to the next caller.
//! This is the only pool of lanes in a process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use tokio::sync::Mutex;

use super::lane::Lane;
use crate::error::Result;
use crate::store::{SessionId, Store};

/// The session of one process with one store. Opened on first use, and again whenever it is lost.
pub(crate) struct Session {
    pub(crate) store: Arc<dyn Store>,
    open: Mutex<Option<SessionId>>,
    /// How many lanes have ever been handed out under new numbers.
    lanes: AtomicU32,
    /// Lanes that nobody uses at the moment: number and last sequence number.
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

/// How many quick repeats a process can afford: each call earns half of one, and ten can be saved
/// up. Once they are spent, repeats wait as long as they would at the end of a long outage, so that
/// a store that is half down never sees more than one and a half times its usual number of calls.
pub(super) struct RepeatBudget {
    /// In halves of a repeat.
    saved: AtomicU32,
}

impl RepeatBudget {
    const MOST: u32 = 20;

    /// A call is made.
    pub(super) fn earn(&self) {
        let more = |saved: u32| (saved < Self::MOST).then_some(saved + 1);
        let _ = self
            .saved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Whether a quick repeat is affordable. If so, it is paid for.
    pub(super) fn spend(&self) -> bool {
        let less = |saved: u32| saved.checked_sub(2);
        self.saved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    }
}

impl Default for RepeatBudget {
    fn default() -> Self {
        Self {
            saved: AtomicU32::new(Self::MOST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_are_at_most_half_of_the_calls_once_the_savings_are_spent() {
        let budget = RepeatBudget::default();
        let saved = (0..1_000).filter(|_| budget.spend()).count();
        assert_eq!(saved, 10);
        let calls = 1_000;
        let repeats = (0..calls).filter(|_| {
            budget.earn();
            budget.spend()
        });
        assert_eq!(repeats.count(), calls / 2);
    }
}
