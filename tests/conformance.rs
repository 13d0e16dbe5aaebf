//! Every case of the conformance suite on every store that runs in this process.

use leasehold::clock::ManualClock;
use leasehold::store::MemoryStore;
use leasehold::store::conformance::ManualFixture;

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn memory() -> ManualFixture {
    let clock = ManualClock::default();
    ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock)
}

leasehold::conformance!(memory, memory);
// TODO(lead): enable with the store.
// leasehold::conformance!(sqlite, sqlite);
