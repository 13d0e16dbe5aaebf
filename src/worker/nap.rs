//! Sleeping between settlements: no lease is left lying while the settler sleeps.
//!
//! A slot leaves a lease and then looks whether the settler sleeps; the settler says that it sleeps
//! and then looks for what was left. Whichever comes second sees the other.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the settler sleeps.
pub(crate) struct Nap {
    asleep: AtomicBool,
}

impl Nap {
    /// It sleeps until the first lease is left.
    pub(crate) fn begun() -> Self {
        Self {
            asleep: AtomicBool::new(true),
        }
    }

    /// Something was left. True if the settler must be woken for it; only one is told to.
    pub(crate) fn end(&self) -> bool {
        self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Takes what was left. If there is nothing, the settler sleeps.
    pub(crate) fn unless<T>(&self, left: impl FnOnce() -> Option<T>) -> Option<T> {
        // First this, then the look: whoever is not seen here sees this, and rings.
        self.asleep.store(true, Ordering::SeqCst);
        let left = left()?;
        self.asleep.store(false, Ordering::SeqCst);
        Some(left)
    }
}
