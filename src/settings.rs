//! The settings of runs, which a job, a queue and a worker can each have.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::limits::positive;
use crate::retry::RetryPolicy;

/// How often and how long a job may run. A setting that the job leaves open is taken from its
/// queue, and one that the queue leaves open from the worker.
///
/// Set by [`JobOptions`](crate::job::JobOptions), [`QueueConfig`](crate::QueueConfig) and
/// [`Worker`](crate::Worker), with setters of the same names.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunSettings {
    /// How long to wait between failures. By default half a second to a second after the first,
    /// twice as long each time, up to 10 minutes.
    pub retry: Option<RetryPolicy>,
    /// Failures after which the job is dead. 10 by default.
    pub max_failures: Option<u32>,
    /// How long one run of the handler may take. Unlimited by default: the lease of a dead worker
    /// ends by itself, and a stall limit catches one that hangs.
    pub timeout: Option<Duration>,
    /// How long a run may go without [`Context::progress`](crate::Context::progress) or a
    /// checkpoint before its lease lapses. Unlimited by default.
    pub stall_limit: Option<Duration>,
}

impl RunSettings {
    /// Failures after which a job is dead, unless another limit is set.
    pub const DEFAULT_MAX_FAILURES: u32 = 10;

    /// All settings left open.
    pub(crate) const OPEN: Self = Self {
        retry: None,
        max_failures: None,
        timeout: None,
        stall_limit: None,
    };

    /// These settings, with those left open taken from `others`.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            retry: self.retry.or(others.retry),
            max_failures: self.max_failures.or(others.max_failures),
            timeout: self.timeout.or(others.timeout),
            stall_limit: self.stall_limit.or(others.stall_limit),
        }
    }

    /// Refuses settings with which no job could run, by name.
    pub(crate) fn validate(&self) -> Result<()> {
        if let Some(retry) = &self.retry {
            retry.validate()?;
        }
        if self.max_failures == Some(0) {
            return Err(Error::invalid("max_failures", 0, "at least 1"));
        }
        for (field, limit) in [("timeout", self.timeout), ("stall_limit", self.stall_limit)] {
            if let Some(limit) = limit {
                positive(field, limit)?;
            }
        }
        Ok(())
    }
}

/// The setters of what has [`RunSettings`] in a field `runs`.
macro_rules! run_setters {
    () => {
        /// How long to wait between failures:
        /// [`RunSettings::retry`](crate::job::RunSettings::retry).
        pub fn retry(mut self, retry: crate::retry::RetryPolicy) -> Self {
            self.runs.retry = Some(retry);
            self
        }

        /// Failures after which a job is dead:
        /// [`RunSettings::max_failures`](crate::job::RunSettings::max_failures).
        pub fn max_failures(mut self, failures: u32) -> Self {
            self.runs.max_failures = Some(failures);
            self
        }

        /// How long one run of the handler may take:
        /// [`RunSettings::timeout`](crate::job::RunSettings::timeout).
        pub fn timeout(mut self, timeout: std::time::Duration) -> Self {
            self.runs.timeout = Some(timeout);
            self
        }

        /// How long a run may go without progress before its lease lapses:
        /// [`RunSettings::stall_limit`](crate::job::RunSettings::stall_limit).
        pub fn stall_limit(mut self, limit: std::time::Duration) -> Self {
            self.runs.stall_limit = Some(limit);
            self
        }
    };
}

pub(crate) use run_setters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_counts() {
        let job = RunSettings {
            timeout: Some(Duration::from_secs(1)),
            ..RunSettings::OPEN
        };
        let queue = RunSettings {
            timeout: Some(Duration::from_secs(2)),
            max_failures: Some(3),
            ..RunSettings::OPEN
        };
        let worker = RunSettings {
            retry: Some(RetryPolicy::default()),
            max_failures: Some(4),
            timeout: Some(Duration::from_secs(3)),
            stall_limit: Some(Duration::from_secs(5)),
        };
        let said = job.or(queue).or(worker);
        let expected = RunSettings {
            timeout: job.timeout,
            max_failures: queue.max_failures,
            ..worker
        };
        assert_eq!(said, expected);
        assert_eq!(RunSettings::OPEN, RunSettings::default());
    }
}
