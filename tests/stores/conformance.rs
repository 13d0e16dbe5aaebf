//! Every case of the conformance suite on every store.

use leasehold_support::postgres as server;

use leasehold::clock::ManualClock;
use leasehold::store::MemoryStore;
use leasehold::store::{SqliteOptions, SqliteStore};
use leasehold_conformance::ManualFixture;

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn memory() -> ManualFixture {
    let clock = ManualClock::default();
    ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock)
}

leasehold_conformance::conformance!(memory, memory);

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

leasehold_conformance::conformance!(sqlite, sqlite);

/// A fresh namespace for each case, on one server for all of them.
async fn postgres() -> ManualFixture {
    let clock = ManualClock::default();
    let store = server::shared().store(clock.clone()).await;
    ManualFixture::new(store, clock)
}

leasehold_conformance::conformance!(postgres, postgres, ignore = "needs postgresql: ./tests/run");
