//! The locks and atomics of what a worker's threads share. `tests/shuttle` builds `held.rs` with
//! shuttle's, from a module of the same name, and explores the orders in which threads can run.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic};
