//! The `SQLite` store as a file: what survives, what is refused, and how processes share it.
//!
//! What the verbs mean is tested for every store elsewhere; here is what only a file can do wrong.

#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

mod client;
#[path = "../support/disk.rs"]
mod disk;
mod errors;
mod file;
#[path = "../support/machine.rs"]
mod machine;
mod processes;
