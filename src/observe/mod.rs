//! Observing: events, and what is made of them.
//!
//! Every verb emits its [`Event`], in the past tense. The crate itself turns events into `tracing`
//! records (`log`) and metrics ([`metrics`]); an [`Observer`] of your own sees the same events.
//! Only this folder knows metric names; the one exception is a counter of the fences.

use std::fmt;
use std::sync::Arc;

pub(crate) mod clock_watch;
mod event;
mod log;
pub mod metrics;
pub(crate) mod trace;

pub use event::{Death, Event};

use crate::panics::caught;

/// Receives every event.
///
/// Called on the path of the work: be quick, and do not block. A panic in it is contained.
pub trait Observer: Send + Sync + 'static {
    /// Something happened.
    fn observe(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> Observer for F {
    fn observe(&self, event: &Event<'_>) {
        self(event);
    }
}

/// All observers of a client.
#[derive(Clone, Default)]
pub(crate) struct Observers(Arc<[Arc<dyn Observer>]>);

impl Observers {
    pub(crate) fn with(&self, observer: Arc<dyn Observer>) -> Self {
        Self(self.0.iter().cloned().chain([observer]).collect())
    }

    /// Tells all observers. The event is built only if there is one, or a log.
    pub(crate) fn emit<'a>(&self, event: impl FnOnce() -> Event<'a>) {
        if self.0.is_empty() && !log::is_on() {
            return;
        }
        let event = event();
        log::record(&event);
        self.tell(&event);
        if let Some(death) = event.death() {
            let event = Event::Dead { death: &death };
            log::record(&event);
            self.tell(&event);
        }
    }

    fn tell(&self, event: &Event<'_>) {
        for observer in &*self.0 {
            // An observer must not stop what it observes. The panic hook has reported the panic.
            let _ = caught(|| observer.observe(event));
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} observers", self.0.len())
    }
}
