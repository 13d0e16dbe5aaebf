//! The contract as test cases: what every store must do, verb by verb.
//!
//! A store passes by running all of it. One macro makes a test of every case, so that none can be
//! forgotten:
//!
//! ```
//! use leasehold::clock::ManualClock;
//! use leasehold::store::MemoryStore;
//! use leasehold_conformance::ManualFixture;
//!
//! async fn fixture() -> ManualFixture {
//!     let clock = ManualClock::default();
//!     ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock)
//! }
//!
//! // In `tests/`: expands to `memory::settle::a_receipt_settles_once` and all the others.
//! leasehold_conformance::conformance!(memory, fixture);
//! # fn main() {}
//! ```
//!
//! Your crate needs `tokio` with the features `macros` and `rt`. The fixture is made afresh for
//! each case: an empty store whose clock moves only when a case says so. A store that has its
//! server's clock implements [`Fixture`] itself. No case sleeps.
//!
//! At the end of every case the harness looks at all views of the store and asserts that the ledger
//! of each queue balances (I9) and that the counts are those of the rows.
//!
//! [`history`] and [`checker`] are for tests in which nobody knows the right answer in advance:
//! they record the calls to a store and judge them by the invariants.

#![allow(
    clippy::missing_panics_doc,
    reason = "a case panics when the store fails it: that is what it is for"
)]
#![allow(
    clippy::unchecked_time_subtraction,
    clippy::similar_names,
    reason = "cases subtract constants, and a head is held"
)]

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use leasehold::clock::{Clock, ManualClock};
use leasehold::store::Store;

pub mod checker;
pub mod checkpoint;
pub mod claim;
pub mod control;
mod driver;
pub mod enqueue;
pub mod exclusive;
pub mod expire;
pub mod fence;
mod fences;
pub mod history;
pub mod holding;
pub mod inspect;
mod jobs;
pub mod keys;
mod leases;
mod list;
pub mod prune;
mod recording;
pub mod renew;
pub mod repeat;
pub mod resource;
pub mod settle;
mod snapshot;
pub mod wait;

pub use driver::{Driver, Held, LIFETIME, TERM, job, queue, queue_named};
pub use recording::RecordingStore;
pub use snapshot::Snapshot;

/// An empty store, and the hand on its clock.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// The store under test.
    fn store(&self) -> Arc<dyn Store>;

    /// Moves the store's clock forward.
    async fn advance(&self, by: Duration);

    /// Puts the store's clock back: clocks do that.
    async fn set_back(&self, by: Duration);
}

/// The fixture of a store that runs on a [`ManualClock`].
pub struct ManualFixture {
    store: Arc<dyn Store>,
    clock: ManualClock,
    kept: Vec<Box<dyn Any + Send + Sync>>,
}

impl ManualFixture {
    /// A store that was opened with this clock.
    pub fn new(store: impl Store, clock: ManualClock) -> Self {
        Self {
            store: Arc::new(store),
            clock,
            kept: Vec::new(),
        }
    }

    /// Keeps something (a temporary directory) for as long as the fixture lives.
    #[must_use]
    pub fn keep(mut self, thing: impl Any + Send + Sync) -> Self {
        self.kept.push(Box::new(thing));
        self
    }

    /// The clock.
    pub fn clock(&self) -> &ManualClock {
        &self.clock
    }
}

impl fmt::Debug for ManualFixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManualFixture")
            .field("store", &self.store.name())
            .field("clock", &self.clock)
            .field("kept", &self.kept.len())
            .finish()
    }
}

#[async_trait]
impl Fixture for ManualFixture {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn set_back(&self, by: Duration) {
        self.clock.set(self.clock.now().before(by));
    }
}

/// Runs one case on a fresh fixture, and then looks whether the store's books are in order.
pub async fn run(fixture: impl Fixture, case: impl AsyncFnOnce(&Driver)) {
    let driver = Driver::new(Arc::new(fixture)).await;
    case(&driver).await;
    driver.snapshot().await.assert_in_order();
}

type CaseFn = for<'a> fn(&'a Driver) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One case of the suite, for harnesses that do without the macro.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The verb's file.
    pub verb: &'static str,
    /// The case's name.
    pub name: &'static str,
    body: CaseFn,
}

impl Case {
    /// Runs the case; panics if the store fails it.
    pub async fn run(&self, fixture: impl Fixture) {
        run(fixture, async |driver: &Driver| (self.body)(driver).await).await;
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    crate::__conformance_cases!(__conformance_list [])
}

/// Makes a test of every case of the [conformance suite](crate).
///
/// `conformance!(name, make)`: `make` is an `async fn` without arguments that returns a
/// [`Fixture`](crate::Fixture). The tests are in a module `name`, one module per
/// verb inside. A third argument is an attribute for each of them, such as `ignore = "why"`.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $make:path $(, $attribute:meta)?) => {
        $crate::__conformance_cases!(__conformance_tests [$name $make $(, $attribute)?]);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_tests {
    ([$name:ident $make:path] $($cases:tt)*) => {
        $crate::__conformance_tests!([$name $make, allow()] $($cases)*);
    };
    ([$name:ident $make:path, $attribute:meta] $($verb:ident { $($case:ident)* })*) => {
        mod $name {
            #[allow(unused_imports, clippy::wildcard_imports)]
            use super::*;
            $(mod $verb {
                #[allow(unused_imports, clippy::wildcard_imports)]
                use super::*;
                $crate::__conformance_verb!([$make, $attribute] $verb $($case)*);
            })*
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_verb {
    ([$make:path, $attribute:meta] $verb:ident $($case:ident)*) => {
        $(#[tokio::test]
        #[$attribute]
        async fn $case() {
            let fixture = $make().await;
            $crate::run(fixture, $crate::$verb::$case)
                .await;
        })*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_list {
    ([] $($verb:ident { $($case:ident)* })*) => {
        vec![$($($crate::Case {
            verb: stringify!($verb),
            name: stringify!($case),
            body: |driver| Box::pin($crate::$verb::$case(driver)),
        },)*)*]
    };
}
