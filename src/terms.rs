//! Lease terms: how long leases last, and the allowances behind that.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::limits::{self, duration, positive};

/// How long leases last, and the allowances behind that.
///
/// [`validate`](Self::validate) asks for a positive margin: `margin = term − (renew interval +
/// 2·clock uncertainty + network allowance + pause allowance)`. That does not make writes safe (a
/// fence does); it refuses terms that are certain to expire under live workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LeaseTerms {
    /// What each claim and renewal grants.
    pub term: Duration,
    /// How often to renew.
    pub renew_every: Duration,
    /// No renewal carries a lease beyond this age.
    pub max_lifetime: Duration,
    /// How far the holder's and the store's clocks may run apart within one term.
    pub clock_uncertainty: Duration,
    /// How long a call to the store may take.
    pub network_allowance: Duration,
    /// How long the holder may be paused without losing its leases.
    pub pause_allowance: Duration,
}

impl LeaseTerms {
    /// 10 s, renewed every 3⅓ s: a dead worker's jobs run again within ten seconds.
    pub const SHORT: Self = Self::of_term(Duration::from_secs(10));
    /// 60 s, renewed every 20 s.
    pub const MEDIUM: Self = Self::of_term(Duration::from_secs(60));
    /// 300 s, renewed every 100 s: for slow stores and long pauses.
    pub const LONG: Self = Self::of_term(Duration::from_secs(300));

    /// Terms for any length: renewed at a third, with allowances in proportion up to those of a
    /// 10 s term.
    pub const fn of_term(term: Duration) -> Self {
        Self {
            term,
            renew_every: Duration::from_micros(term.as_micros() as u64 / 3),
            max_lifetime: Duration::from_secs(24 * 3600),
            clock_uncertainty: shorter(term, 100, Duration::from_millis(100)),
            network_allowance: shorter(term, 20, Duration::from_millis(500)),
            pause_allowance: shorter(term, 10, Duration::from_secs(1)),
        }
    }

    /// How often to renew.
    #[must_use]
    pub const fn renew_every(mut self, interval: Duration) -> Self {
        self.renew_every = interval;
        self
    }

    /// The age beyond which no renewal carries a lease.
    #[must_use]
    pub const fn max_lifetime(mut self, lifetime: Duration) -> Self {
        self.max_lifetime = lifetime;
        self
    }

    /// What to allow for: clocks that run apart, calls that take time, a holder that is paused.
    #[must_use]
    pub const fn allowances(mut self, clock: Duration, network: Duration, pause: Duration) -> Self {
        self.clock_uncertainty = clock;
        self.network_allowance = network;
        self.pause_allowance = pause;
        self
    }

    /// How long before its end a lease is no longer relied on: 2 · clock uncertainty + network
    /// allowance.
    pub const fn guard(&self) -> Duration {
        self.clock_uncertainty
            .saturating_mul(2)
            .saturating_add(self.network_allowance)
    }

    /// What is left of the term after every delay that a live worker is allowed.
    pub fn margin(&self) -> Option<Duration> {
        self.term
            .checked_sub(self.spent())
            .filter(|margin| !margin.is_zero())
    }

    fn spent(&self) -> Duration {
        self.renew_every
            .saturating_add(self.guard())
            .saturating_add(self.pause_allowance)
    }

    /// Refuses terms that cannot work, and says which number to change.
    pub fn validate(&self) -> Result<()> {
        limits::term(self.term)?;
        positive("renew_every", self.renew_every)?;
        duration("max_lifetime", self.max_lifetime)?;
        if self.max_lifetime < self.term {
            let limit = format!("at least the term, {:?}", self.term);
            return Err(Error::invalid(
                "max_lifetime",
                format!("{:?}", self.max_lifetime),
                limit,
            ));
        }
        if self.margin().is_none() {
            let Self {
                term, renew_every, ..
            } = self;
            let rest = term.saturating_sub(self.guard().saturating_add(self.pause_allowance));
            if rest.is_zero() {
                let limit = format!(
                    "more than guard {:?} + pause allowance {:?}",
                    self.guard(),
                    self.pause_allowance
                );
                return Err(Error::invalid("term", format!("{term:?}"), limit));
            }
            let limit = format!(
                "less than {rest:?} (term {term:?} − guard {:?} − pause allowance {:?})",
                self.guard(),
                self.pause_allowance
            );
            return Err(Error::invalid(
                "renew_every",
                format!("{renew_every:?}"),
                limit,
            ));
        }
        Ok(())
    }
}

impl Default for LeaseTerms {
    fn default() -> Self {
        Self::MEDIUM
    }
}

const fn shorter(term: Duration, part: u64, most: Duration) -> Duration {
    let share = term.as_micros() as u64 / part;
    let most_micros = most.as_micros() as u64;
    Duration::from_micros(if share < most_micros {
        share
    } else {
        most_micros
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_name_the_number_to_change() {
        assert!(LeaseTerms::SHORT.validate().is_ok());
        assert!(
            LeaseTerms::of_term(Duration::from_secs(1))
                .validate()
                .is_ok()
        );
        let slow = LeaseTerms {
            renew_every: Duration::from_secs(9),
            ..LeaseTerms::SHORT
        };
        assert_eq!(slow.validate().unwrap_err().field(), Some("renew_every"));
        let short = LeaseTerms {
            term: Duration::from_millis(1),
            ..LeaseTerms::SHORT
        };
        assert_eq!(short.validate().unwrap_err().field(), Some("term"));
        let term = LeaseTerms::SHORT.term;
        assert!(LeaseTerms::SHORT.max_lifetime(term).validate().is_ok());
        let brief = LeaseTerms::SHORT.max_lifetime(term / 2);
        assert_eq!(brief.validate().unwrap_err().field(), Some("max_lifetime"));
        let most = Duration::MAX;
        let doubtful = LeaseTerms::SHORT.allowances(most, most, most);
        assert_eq!(doubtful.validate().unwrap_err().field(), Some("term"));
    }

    #[test]
    fn terms_are_in_proportion_up_to_those_of_ten_seconds() {
        let millis = Duration::from_millis;
        let one = LeaseTerms::of_term(millis(3_000));
        assert_eq!(one.renew_every, millis(1_000));
        assert_eq!(one.max_lifetime, Duration::from_secs(86_400));
        assert_eq!(one.guard(), millis(2 * 30 + 150));
        assert_eq!(one.margin(), Some(millis(3_000 - 1_000 - 210 - 300)));
        let allowed = LeaseTerms::LONG;
        assert_eq!(allowed.guard(), millis(2 * 100 + 500));
        assert_eq!(allowed.pause_allowance, millis(1_000));
        // Nothing left is not enough.
        let rest = millis(3_000 - 210 - 300);
        assert_eq!(one.renew_every(rest).margin(), None);
    }
}
