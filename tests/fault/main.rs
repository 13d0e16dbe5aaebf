//! Real processes on one file: killed, frozen, shut down and starved of disk at any moment.
//!
//! The test binary is its own child (`roles`); `process` starts it, stops it and listens to it;
//! `world` has the file and reads the verdict from the store's own records. Every case prints one
//! line of figures, and goes with an arm in which the protection is missing, and which must fail.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

mod broken;
#[cfg(feature = "postgres")]
#[path = "../support/postgres.rs"]
mod postgres_server;
mod process;
#[cfg(feature = "redis")]
#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
#[allow(
    clippy::unused_self,
    clippy::format_push_string,
    reason = "it is not this test's"
)]
#[path = "../support/redis/mod.rs"]
mod redis_server;
mod register;
mod roles;
mod world;

mod drain;
mod freeze;
mod full;
mod kill;
mod lockset;
#[cfg(feature = "redis")]
mod one_step;
mod poison;
mod produce;
mod together;

use tokio::sync::RwLock;

/// The case with a bound on time has the machine for itself; the others share it.
static MACHINE: RwLock<()> = RwLock::const_new(());
