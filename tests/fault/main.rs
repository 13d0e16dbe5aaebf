//! The fault campaign: real processes and real servers, killed, frozen, cut off, flooded and lied
//! to.
//!
//! The test binary is its own child (`roles`, `crew`); `process` starts it, stops it and listens to
//! it. `world` reads the verdict from the store's own records. On a `stage` every process also
//! notes its calls in one `journal`, which the checker of all tests judges. Every case is a line of
//! the `table`, and goes with an arm in which the protection is missing, and which must fail.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]
#![cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "most of the campaign needs a server")
)]

mod broken;
mod crew;
mod engine;
mod journal;
use leasehold_support::postgres as postgres_server;
mod process;
mod register;
mod roles;
mod stage;
use leasehold_support as support;
mod table;
mod world;

mod away;
mod deploy;
mod drain;
mod failover;
mod freeze;
mod full;
mod kill;
mod lockset;
mod memory;
mod one_step;
mod operator;
mod outage;
mod partition;
mod poison;
mod produce;
mod race;
mod repeat;
mod rollback;
mod server;
mod skew;
mod storm;
mod together;

use std::time::Duration;

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, Semaphore, SemaphorePermit};

static MACHINE: Machine = Machine {
    cases: Semaphore::const_new(4),
    alone: RwLock::const_new(()),
};

/// A case with a bound on time has the machine for itself; the others share it, four at a time:
/// they wait for terms to pass.
struct Machine {
    cases: Semaphore,
    alone: RwLock<()>,
}

impl Machine {
    async fn read(&self) -> (SemaphorePermit<'_>, RwLockReadGuard<'_, ()>) {
        let permit = self.cases.acquire().await.expect("nobody closes it");
        (permit, self.alone.read().await)
    }

    /// Waits until all others have had their turn: whoever stands in line here would keep them
    /// waiting for the longest of those that run.
    async fn write(&self) -> RwLockWriteGuard<'_, ()> {
        loop {
            if let Ok(alone) = self.alone.try_write() {
                return alone;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Whether the long run was asked for.
fn in_campaign() -> bool {
    std::env::var_os("LEASEHOLD_CAMPAIGN").is_some_and(|value| value == "1")
}
