//! Leases: the exclusive right to work a job until its deadline on the store's clock.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use crate::history::{Cause, DeclineCause, EndedLease, LeaseEnd, Progress};
pub use crate::receipt::{HoldingReceipt, Nonce, Receipt};
pub use crate::terms::LeaseTerms;
pub use crate::token::FencingToken;

use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::names::QueueName;

/// One job under one lease, as a claim returns it.
#[derive(Clone, PartialEq, Debug)]
pub struct Lease {
    /// Larger than any token given before by the same issuer.
    pub token: FencingToken,
    /// The job.
    pub job: Arc<JobRecord>,
}

/// The leases that one claim gives from one queue partition: one deadline, renewed together, each
/// settled on its own.
#[derive(Clone, PartialEq, Debug)]
pub struct Grant {
    /// The queue.
    pub queue: QueueName,
    /// The partition of the queue.
    pub partition: u16,
    /// The first token, which names the grant.
    pub id: FencingToken,
    /// The claim's randomness.
    pub nonce: Nonce,
    /// When it was granted, on the store's clock.
    pub granted_at: Timestamp,
    /// How long each renewal extends it.
    pub term: Duration,
    /// What this claim granted: the holder counts it from its *first* send of the request.
    pub granted: Duration,
    /// The leases, in token order.
    pub leases: Vec<Lease>,
}

impl Grant {
    /// The receipt of one of its leases.
    pub fn receipt(&self, lease: &Lease) -> Receipt {
        Receipt {
            queue: self.queue.clone(),
            partition: self.partition,
            grant: self.id,
            token: lease.token,
            job: lease.job.id,
            nonce: self.nonce,
        }
    }
}

/// What a store says to a holder: this lease is yours, or it is not.
///
/// An answer, not an error: `?` cannot swallow "you are fenced".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a fenced call did nothing"]
pub enum Verdict {
    /// The lease was the caller's, and the call took effect.
    Held {
        /// Its deadline had passed, but nobody else had been granted the job.
        late: bool,
        /// Somebody asked for the job to be cancelled. After a retry or a surrender it *is*
        /// cancelled.
        cancel: bool,
    },
    /// The lease was not the caller's, or no longer. Nothing changed. After a repeat under a new
    /// request id this may be the caller's own earlier success.
    Fenced,
}

impl Verdict {
    /// Whether the call took effect.
    pub const fn is_held(self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Whether the caller was refused as stale.
    pub const fn is_fenced(self) -> bool {
        matches!(self, Self::Fenced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_is_what_its_holder_ended() {
        let held = Verdict::Held {
            late: true,
            cancel: false,
        };
        assert!(held.is_held() && !held.is_fenced());
        assert!(Verdict::Fenced.is_fenced() && !Verdict::Fenced.is_held());
        assert!(LeaseEnd::Completed.is_released() && LeaseEnd::Surrendered.is_released());
        assert!(!LeaseEnd::Expired(Cause::Deadline).is_released());
        assert!(!LeaseEnd::Revoked.is_released());
    }
}
