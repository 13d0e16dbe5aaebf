//! Every case of the conformance suite on a private Redis server, each in a namespace of its own.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "a server's start is waited for")]

mod support;

use std::sync::OnceLock;

use leasehold::clock::ManualClock;
use leasehold::job::Namespace;
use leasehold::store::conformance::ManualFixture;
use leasehold::store::{RedisOptions, RedisStore};
use support::redis::Standalone;

/// One server for all cases. Its watchdog ends it with the process.
fn server() -> &'static Standalone {
    static SERVER: OnceLock<Standalone> = OnceLock::new();
    SERVER.get_or_init(|| Standalone::start(&[]))
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn indexed() -> ManualFixture {
    let clock = ManualClock::default();
    let namespace = Namespace::new(format!("case-{:016x}", fastrand::u64(..))).unwrap();
    let options = RedisOptions::new(server().url())
        .namespace(namespace)
        .index(true)
        .clock(clock.clone());
    ManualFixture::new(RedisStore::open(options).unwrap(), clock)
}

leasehold::conformance!(redis, indexed, ignore = "needs redis-server: ./tests/run");
