//! The Redis store on real servers that fail: killed, cut off, rolled back, full, silent.
//!
//! The cases need `redis-server`; `./tests/run` installs it and runs them.

use leasehold_support as support;

mod functions;
mod idle;
mod losses;
use leasehold_support::issuer;
mod proxy;
mod replies;
mod restart;
mod servers;
mod sleep;
mod steps;
mod store;
mod tokens;

/// Whether the long run was asked for.
fn in_campaign() -> bool {
    std::env::var_os("LEASEHOLD_CAMPAIGN").is_some_and(|value| value == "1")
}
