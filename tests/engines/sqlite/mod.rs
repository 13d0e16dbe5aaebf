//! The `SQLite` store as a file: what survives, what is refused, and how processes share it.
//!
//! What the verbs mean is tested for every store elsewhere; here is what only a file can do wrong.

mod client;
mod crowd;
use leasehold_support::disk;
mod errors;
mod file;
use leasehold_support::machine;
mod processes;
mod replaced;
