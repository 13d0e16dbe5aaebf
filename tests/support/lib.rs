//! What the tests share: private servers that a test can kill, a proxy that cuts, a store that
//! misbehaves on demand, disks that fill up, scenes for pages.

#![allow(
    missing_docs,
    missing_debug_implementations,
    reason = "for the tests of this workspace only"
)]
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    clippy::return_self_not_must_use,
    reason = "trouble here should stop the test"
)]
#![allow(clippy::disallowed_methods, reason = "a server's start is waited for")]

#[cfg(unix)]
pub mod certs;
pub mod disk;
pub mod flaky;
pub mod http;
pub mod issuer;
pub mod machine;
pub mod paying;
#[cfg(unix)]
pub mod postgres;
pub mod proxy;
#[cfg(unix)]
pub mod redis;
pub mod scene;
pub mod virtual_time;

pub use flaky::*;
