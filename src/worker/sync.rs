//! The locks and atomics of what a worker's threads share. `tests/shuttle` builds `held.rs` with a
//! module of the same name that has shuttle's, and explores the orders in which threads meet.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic};
