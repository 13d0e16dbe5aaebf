//! The Redis store on real servers that fail: killed, cut off, rolled back, full, silent.
//!
//! The cases need `redis-server`; `./tests/run` installs it and runs them.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "cli")]
mod doctor;
mod idle;
#[path = "../support/issuer.rs"]
mod issuer;
mod proxy;
mod replies;
mod restart;
mod servers;
mod steps;
mod store;
mod tokens;

/// Whether the long run was asked for.
fn in_campaign() -> bool {
    std::env::var_os("LEASEHOLD_CAMPAIGN").is_some_and(|value| value == "1")
}
