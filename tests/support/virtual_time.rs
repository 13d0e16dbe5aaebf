//! A store's clock that goes with Tokio's, for tests that have stopped it (`start_paused`).
//!
//! A worker on such a store takes `SameRuntime` as its executor: its own threads would go by real
//! time.

use std::sync::Arc;

use leasehold::Store;
use leasehold::clock::{Clock, Timestamp};
use leasehold::store::MemoryStore;
use tokio::time::Instant;

#[derive(Debug)]
pub struct Virtual(Instant);

impl Virtual {
    /// A clock that starts now.
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for Virtual {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for Virtual {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000).after(self.0.elapsed())
    }
}

/// A memory store on virtual time.
pub fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::with_clock(Virtual::new()))
}
