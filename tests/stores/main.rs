//! Every case of the contract on every store, and the checker that judges recorded histories.

#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(
    clippy::unchecked_time_subtraction,
    reason = "cases subtract constants"
)]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

mod checker;
mod conformance;
#[cfg(unix)]
mod conformance_redis;
mod holdings;
mod holdings_model;
mod property;
mod vectors;
