//! Await points: where a test can freeze a handler.
//!
//! A fake resource that never waits has no await point where the real one has a round trip. So
//! [`Context::fence`](crate::Context::fence) awaits a point before it opens and one after, while a
//! test polls it, and fakes can add points of their own.

use std::cell::RefCell;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

/// What a test sees of a handler while it polls it.
#[derive(Default, Debug)]
pub struct Notes {
    /// Fences that it has opened.
    opened: AtomicUsize,
}

impl Notes {
    /// How many fences it has opened.
    pub fn opened(&self) -> usize {
        self.opened.load(Ordering::Relaxed)
    }
}

thread_local! {
    /// The handler that a test polls on this thread.
    static POLLED: RefCell<Option<Arc<Notes>>> = const { RefCell::new(None) };
}

/// Runs `poll` as a poll of the handler that these notes are about.
pub fn polling<T>(notes: &Arc<Notes>, poll: impl FnOnce() -> T) -> T {
    struct Reset(Option<Arc<Notes>>);
    impl Drop for Reset {
        fn drop(&mut self) {
            POLLED.set(self.0.take());
        }
    }
    let _reset = Reset(POLLED.replace(Some(Arc::clone(notes))));
    poll()
}

fn polled() -> Option<Arc<Notes>> {
    POLLED.with_borrow(Clone::clone)
}

/// Whether a test polls a handler on this thread.
pub fn is_polled() -> bool {
    POLLED.with_borrow(Option::is_some)
}

/// A place where the handler can be frozen, for fakes: put one where the real thing has a round
/// trip. Outside a test of this module it does nothing.
pub async fn await_point() {
    let mut passed = !is_polled();
    poll_fn(|cx| {
        if std::mem::replace(&mut passed, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A handler has opened a fence.
pub fn opened() {
    if let Some(notes) = polled() {
        notes.opened.fetch_add(1, Ordering::Relaxed);
    }
}
