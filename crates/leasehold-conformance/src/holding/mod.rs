//! The contract of holdings as test cases: what every [`HoldingStore`] must do.
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
//! // In `tests/`: expands to `memory::acquire::names_conflict` and all the others.
//! leasehold_conformance::holding_conformance!(memory, fixture);
//! # fn main() {}
//! ```
//!
//! Any [`Fixture`] will do whose store has holdings. A store of holdings alone
//! implements [`HoldingFixture`]. Every call of a case is recorded, and at its end the
//! [`checker`] judges them, with what the store's ledgers say.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::Fixture;
use leasehold::store::HoldingStore;

pub mod acquire;
pub mod checker;
pub mod control;
mod driver;
pub mod ends;
pub mod history;
mod list;
pub mod random;
pub mod repeats;
pub mod tickets;
pub mod units;

pub use driver::{HoldingDriver, HoldingSnapshot};

/// An empty store of holdings, and the hand on its clock.
#[async_trait]
pub trait HoldingFixture: Send + Sync + 'static {
    /// The store under test.
    fn holdings(&self) -> Arc<dyn HoldingStore>;

    /// Moves the store's clock forward.
    async fn advance_holdings(&self, by: Duration);

    /// Puts the store's clock back: clocks do that.
    async fn set_back_holdings(&self, by: Duration);
}

#[async_trait]
impl<F: Fixture> HoldingFixture for F {
    fn holdings(&self) -> Arc<dyn HoldingStore> {
        self.store().holdings().expect("a store with holdings")
    }

    async fn advance_holdings(&self, by: Duration) {
        self.advance(by).await;
    }

    async fn set_back_holdings(&self, by: Duration) {
        self.set_back(by).await;
    }
}

/// Runs one case on a fresh fixture, and then judges what was recorded.
pub async fn run(fixture: impl HoldingFixture, case: impl AsyncFnOnce(&HoldingDriver)) {
    let driver = HoldingDriver::new(Arc::new(fixture)).await;
    case(&driver).await;
    driver.assert_in_order().await;
}

type HoldingCaseFn = for<'a> fn(&'a HoldingDriver) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One case of the suite, for harnesses that do without the macro.
#[derive(Clone, Copy, Debug)]
pub struct HoldingCase {
    /// The file.
    pub group: &'static str,
    /// The case's name.
    pub name: &'static str,
    body: HoldingCaseFn,
}

impl HoldingCase {
    /// Runs the case; panics if the store fails it.
    pub async fn run(&self, fixture: impl HoldingFixture) {
        run(fixture, async |driver: &HoldingDriver| {
            (self.body)(driver).await;
        })
        .await;
    }
}

/// All cases.
pub fn cases() -> Vec<HoldingCase> {
    crate::__holding_cases!(__holding_list [])
}

/// Makes a test of every case of the [suite for holdings](crate::holding).
///
/// As [`conformance!`](crate::conformance).
#[macro_export]
macro_rules! holding_conformance {
    ($name:ident, $make:path $(, $attribute:meta)?) => {
        $crate::__holding_cases!(__holding_tests [$name $make $(, $attribute)?]);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __holding_tests {
    ([$name:ident $make:path] $($cases:tt)*) => {
        $crate::__holding_tests!([$name $make, allow()] $($cases)*);
    };
    ([$name:ident $make:path, $attribute:meta] $($group:ident { $($case:ident)* })*) => {
        mod $name {
            #[allow(unused_imports, clippy::wildcard_imports)]
            use super::*;
            $(mod $group {
                #[allow(unused_imports, clippy::wildcard_imports)]
                use super::*;
                $crate::__holding_group!([$make, $attribute] $group $($case)*);
            })*
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __holding_group {
    ([$make:path, $attribute:meta] $group:ident $($case:ident)*) => {
        $(#[tokio::test]
        #[$attribute]
        async fn $case() {
            let fixture = $make().await;
            $crate::holding::run(fixture, $crate::holding::$group::$case)
                .await;
        })*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __holding_list {
    ([] $($group:ident { $($case:ident)* })*) => {
        vec![$($($crate::holding::HoldingCase {
            group: stringify!($group),
            name: stringify!($case),
            body: |driver| Box::pin($crate::holding::$group::$case(driver)),
        },)*)*]
    };
}
