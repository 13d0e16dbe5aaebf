//! When to try again. Pure: the jitter's randomness is an argument.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long to wait after the n-th failure: exponential, capped, with full jitter.
///
/// Full jitter (anything from zero to the bound) spreads the retries of jobs that failed together,
/// so that a dependency that comes back is not knocked over by everybody at once.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// The bound after the first failure.
    pub base: Duration,
    /// The bound after any failure.
    pub cap: Duration,
    /// What the bound is multiplied with at each failure.
    pub factor: f64,
}

impl RetryPolicy {
    /// Waits between zero and `base · factor^(failures − 1)`, at most `cap`.
    pub const fn exponential(base: Duration, cap: Duration) -> Self {
        Self {
            base,
            cap,
            factor: 2.0,
        }
    }

    /// The same bound after each failure.
    pub const fn constant(delay: Duration) -> Self {
        Self {
            base: delay,
            cap: delay,
            factor: 1.0,
        }
    }

    /// The longest that the wait after the `failures`-th failure can be.
    pub fn bound(&self, failures: u32) -> Duration {
        let exponent = i32::try_from(failures.saturating_sub(1)).unwrap_or(i32::MAX);
        let seconds = self.base.as_secs_f64() * self.factor.powi(exponent);
        Duration::try_from_secs_f64(seconds)
            .unwrap_or(self.cap)
            .min(self.cap)
    }

    /// The wait after the `failures`-th failure; `jitter` is a random number from 0 to 1.
    pub fn delay(&self, failures: u32, jitter: f64) -> Duration {
        let bound = self.bound(failures);
        // The longest durations are rounded up to one that does not fit.
        let seconds = bound.as_secs_f64() * jitter.clamp(0.0, 1.0);
        Duration::try_from_secs_f64(seconds)
            .unwrap_or(bound)
            .min(bound)
    }
}

impl Default for RetryPolicy {
    /// Up to 1 s, 2 s, 4 s … 10 minutes.
    fn default() -> Self {
        Self::exponential(Duration::from_secs(1), Duration::from_secs(600))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_double_up_to_the_cap() {
        let policy = RetryPolicy::exponential(Duration::from_secs(1), Duration::from_secs(10));
        let bounds: Vec<u64> = (1..=6).map(|n| policy.bound(n).as_secs()).collect();
        assert_eq!(bounds, [1, 2, 4, 8, 10, 10]);
        assert_eq!(policy.bound(u32::MAX), policy.cap);
        assert_eq!(policy.delay(3, 0.25), Duration::from_secs(1));
        let forever = RetryPolicy::constant(Duration::MAX);
        assert_eq!(forever.delay(1, 1.0), Duration::MAX);
    }
}
