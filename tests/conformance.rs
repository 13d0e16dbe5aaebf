//! Every case of the conformance suite on every store.

#[cfg(feature = "postgres")]
#[path = "support/postgres.rs"]
mod server;

use leasehold::clock::ManualClock;
use leasehold::store::MemoryStore;
use leasehold::store::conformance::ManualFixture;
#[cfg(feature = "sqlite")]
use leasehold::store::{SqliteOptions, SqliteStore};

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn memory() -> ManualFixture {
    let clock = ManualClock::default();
    ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock)
}

leasehold::conformance!(memory, memory);

#[cfg(feature = "sqlite")]
#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn sqlite() -> ManualFixture {
    let clock = ManualClock::default();
    let dir = tempfile::tempdir().expect("a directory");
    let options = SqliteOptions::new()
        .clock(clock.clone())
        .synchronous_normal();
    let store = SqliteStore::with(dir.path().join("jobs.db"), options).expect("a store");
    ManualFixture::new(store, clock).keep(dir)
}

#[cfg(feature = "sqlite")]
leasehold::conformance!(sqlite, sqlite);

/// A fresh namespace for each case, on one server for all of them.
#[cfg(feature = "postgres")]
async fn postgres() -> ManualFixture {
    let clock = ManualClock::default();
    let store = server::shared().store(clock.clone()).await;
    ManualFixture::new(store, clock)
}

#[cfg(feature = "postgres")]
leasehold::conformance!(postgres, postgres, ignore = "needs postgresql: ./tests/run");
