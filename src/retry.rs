//! How long a failed job waits before its next run. Pure: the jitter's randomness is an argument.
//!
//! Whether there is a next run is decided in `worker/outcome.rs`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::limits::duration;

/// How long to wait after the n-th failure.
///
/// The bound grows by the factor with each failure, up to the cap. The wait is a random time
/// between half of the bound and the bound: jobs that failed together do not come back together and
/// knock over a dependency that has just recovered, and no retry comes at once. A policy whose
/// factor is 1 is constant, and waits for the whole bound.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// The longest wait after the first failure.
    pub base: Duration,
    /// The longest wait after any failure.
    pub cap: Duration,
    /// By how much the bound is multiplied at each further failure.
    pub factor: f64,
}

impl RetryPolicy {
    /// Waits between half of `base · 2^(failures − 1)` and all of it, at most `cap`.
    pub const fn exponential(base: Duration, cap: Duration) -> Self {
        Self {
            base,
            cap,
            factor: 2.0,
        }
    }

    /// Waits exactly `delay` after each failure.
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

    /// The shortest that the wait after the `failures`-th failure can be.
    pub fn floor(&self, failures: u32) -> Duration {
        let bound = self.bound(failures);
        if self.is_constant() { bound } else { bound / 2 }
    }

    fn is_constant(&self) -> bool {
        self.factor.to_bits() == 1.0_f64.to_bits()
    }

    /// The wait after the `failures`-th failure; `jitter` is a random number from 0 to 1.
    pub fn delay(&self, failures: u32, jitter: f64) -> Duration {
        let (floor, bound) = (self.floor(failures), self.bound(failures));
        // The longest durations are rounded up to one that does not fit.
        let seconds = bound.saturating_sub(floor).as_secs_f64() * jitter.clamp(0.0, 1.0);
        Duration::try_from_secs_f64(seconds)
            .map_or(bound, |more| floor.saturating_add(more))
            .min(bound)
    }

    /// Refuses a policy that cannot work, and names the number to change.
    pub fn validate(&self) -> Result<()> {
        if !(self.factor.is_finite() && self.factor >= 1.0) {
            return Err(Error::invalid("factor", self.factor, "a number from 1"));
        }
        duration("base", self.base)?;
        duration("cap", self.cap)?;
        if self.cap < self.base {
            let least = format!("at least the base, {:?}", self.base);
            return Err(Error::invalid("cap", format!("{:?}", self.cap), least));
        }
        Ok(())
    }
}

impl Default for RetryPolicy {
    /// ½ to 1 s, 1 to 2 s, 2 to 4 s … 5 to 10 minutes.
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
        assert_eq!(policy.delay(3, 0.25), Duration::from_millis(2_500));
        let forever = RetryPolicy::constant(Duration::MAX);
        assert_eq!(forever.delay(1, 1.0), Duration::MAX);
    }

    #[test]
    fn constant_waits_are_constant_and_others_have_a_floor() {
        let ten = Duration::from_secs(10);
        let constant = RetryPolicy::constant(ten);
        let waits = [0.0, 0.1, 1.0].map(|jitter| constant.delay(7, jitter));
        assert_eq!(waits, [ten; 3]);
        let policy = RetryPolicy::exponential(ten, 4 * ten);
        let shortest: Vec<Duration> = (1..=4).map(|n| policy.delay(n, 0.0)).collect();
        assert_eq!(shortest, [ten / 2, ten, 2 * ten, 2 * ten]);
        assert_eq!(policy.delay(1, 1.0), ten);
    }

    #[test]
    fn a_policy_that_cannot_work_names_its_number() {
        let mut policy = RetryPolicy::default();
        assert!(policy.validate().is_ok());
        policy.factor = f64::NAN;
        assert_eq!(policy.validate().unwrap_err().field(), Some("factor"));
        let endless = RetryPolicy::constant(Duration::MAX);
        assert_eq!(endless.validate().unwrap_err().field(), Some("base"));
        let swapped = RetryPolicy::exponential(Duration::from_secs(10), Duration::from_secs(1));
        assert_eq!(swapped.validate().unwrap_err().field(), Some("cap"));
    }
}
