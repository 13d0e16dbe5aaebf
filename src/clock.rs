//! The only file that asks the time.
//!
//! Two clocks, never mixed. *Store time* is a [`Timestamp`] from a [`Clock`]: it decides when a
//! lease expires, and belongs to the store. *Holder time* is monotonic: it decides when a handler
//! must stop, and is counted from the moment a call was first sent. A worker's wall clock is
//! never used.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A moment on the store's clock, in microseconds since the Unix epoch.
///
/// Microseconds fit a SQL `BIGINT` and a Lua double (below 2^53) until the year 2255.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The first moment there is.
    pub const ZERO: Self = Self(0);

    /// A moment given in microseconds since the Unix epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// This moment plus `d`, saturating.
    #[must_use]
    pub fn after(self, d: Duration) -> Self {
        Self(self.0.saturating_add(micros(d)))
    }

    /// This moment minus `d`, saturating at the epoch.
    #[must_use]
    pub fn before(self, d: Duration) -> Self {
        Self(self.0.saturating_sub(micros(d)))
    }

    /// How long from `earlier` until this moment; zero if `earlier` is not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

/// A duration in whole microseconds, saturating: the resolution of every store.
pub fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
/// A time span as a column's value.
pub(crate) fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

/// Where a store in this process gets its time from.
///
/// Server stores have their server's clock instead. A test drives any store by a [`ManualClock`].
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// The store's present.
    fn now(&self) -> Timestamp;
}

/// The host's wall clock: right for a store that lives on this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the clock the others ask"
    )]
    fn now(&self) -> Timestamp {
        let since_epoch = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Timestamp(micros(since_epoch))
    }
}

/// A clock that moves only when told to. Clones share one hand.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that shows `start`.
    pub fn new(start: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(start.0)))
    }

    /// Moves the hand forward.
    pub fn advance(&self, d: Duration) {
        self.0.fetch_add(micros(d), Ordering::SeqCst);
    }

    /// Puts the hand anywhere, also back: clocks do that.
    pub fn set(&self, to: Timestamp) {
        self.0.store(to.0, Ordering::SeqCst);
    }
}

impl Default for ManualClock {
    /// Starts at a plausible present (late 2023), so that tokens look like real ones.
    fn default() -> Self {
        Self::new(Timestamp(1_700_000_000_000_000))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

/// Holder time: tokio's monotonic clock, virtual when a test has paused it.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads the monotonic clock"
)]
pub fn monotonic() -> tokio::time::Instant {
    tokio::time::Instant::now()
}
