//! The events: one for each verb, in the past tense.

use std::time::Duration;

use crate::error::{Error, Verb};
use crate::job::{JobId, JobRecord, JobState, Kind, NewJob, QueueName};
use crate::lease::{Cause, DeclineCause, FencingToken, Grant};
use crate::store::{Controlled, Enqueued, Expiry, Outcome};

/// A job that died, as this process saw it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Death {
    /// The queue.
    pub queue: QueueName,
    /// The job's type.
    pub kind: Kind,
    /// The job.
    pub job: JobId,
    /// The token of its last lease.
    pub token: FencingToken,
    /// Why its last lease expired; none if the job was buried.
    pub expired: Option<Cause>,
    /// Why, in words: what the last failure said, or how often its leases expired.
    pub reason: String,
}

impl Death {
    /// The death of a job whose leases expired too often.
    pub(crate) fn by_expiry(
        queue: &QueueName,
        (job, kind): (JobId, &Kind),
        token: FencingToken,
        cause: Cause,
        expiries: u32,
    ) -> Self {
        Self {
            queue: queue.clone(),
            kind: kind.clone(),
            job,
            token,
            expired: Some(cause),
            reason: format!("{expiries} leases expired, the last by {}", cause.as_str()),
        }
    }
}

/// Something that happened in this process.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Jobs were stored, or found to be there already.
    Enqueued {
        /// What was asked for.
        jobs: &'a [(JobId, NewJob)],
        /// What became of each.
        enqueued: &'a [Enqueued],
    },
    /// Leases were granted to this process.
    Claimed {
        /// The leases.
        grant: &'a Grant,
    },
    /// A handler began.
    Started {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: &'a JobRecord,
        /// The token of its lease.
        token: FencingToken,
    },
    /// A handler ended, of itself or not.
    Finished {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: &'a JobRecord,
        /// The token of its lease.
        token: FencingToken,
        /// How long it ran.
        run: Duration,
        /// How its lease will be settled; none if it was lost.
        outcome: Option<&'a Outcome>,
    },
    /// Grants were renewed in one call.
    Renewed {
        /// How many grants.
        grants: usize,
        /// How many leases they hold.
        leases: usize,
        /// How long the call took.
        took: Duration,
    },
    /// A renewal call failed.
    RenewalFailed {
        /// Why.
        error: &'a Error,
        /// How many leases it was for.
        leases: usize,
    },
    /// A lease was settled.
    Settled {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: &'a JobRecord,
        /// The token of its lease.
        token: FencingToken,
        /// How it was settled.
        outcome: &'a Outcome,
        /// After its deadline, though nobody else had been granted the job.
        late: bool,
        /// The job was to be cancelled.
        cancel: bool,
    },
    /// The store refused this process as stale.
    Fenced {
        /// What it tried.
        verb: Verb,
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: JobId,
        /// The token that is no longer the newest.
        token: FencingToken,
    },
    /// A settlement was refused, and an earlier copy of it, whose answer is lost for good, may have
    /// been applied. The job is as this process left it, or somebody else's: this process is not
    /// known to be stale.
    InDoubt {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: JobId,
        /// The token of the lease.
        token: FencingToken,
    },
    /// A lease was lost: its handler is told to stop, and nothing of it is settled.
    Lost {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: &'a JobRecord,
        /// The token of the lease.
        token: FencingToken,
        /// Because the handler showed no progress.
        stalled: bool,
    },
    /// A claim or a reap of this process found that a lease had expired.
    Expired {
        /// The crash report.
        expiry: &'a Expiry,
    },
    /// A job died: it was buried, or its leases expired too often. Follows the [`Settled`] or
    /// [`Expired`] event that tells how.
    ///
    /// [`Settled`]: Self::Settled
    /// [`Expired`]: Self::Expired
    Dead {
        /// Which job, and why.
        death: &'a Death,
    },
    /// A handler saved its state.
    Checkpointed {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: JobId,
        /// The token under which it was saved.
        token: FencingToken,
        /// The handler's count.
        seq: u64,
    },
    /// A job that this worker cannot work will be handed back, for workers of another version.
    Declined {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: &'a JobRecord,
        /// What is in the way.
        cause: DeclineCause,
        /// The same in words.
        why: &'a str,
        /// When the job falls due again.
        delay: Duration,
    },
    /// A command was carried out.
    Controlled {
        /// The command's word.
        command: &'a str,
        /// Who gave it.
        actor: &'a str,
        /// What it did.
        done: &'a Controlled,
    },
    /// Settled jobs past their retention were deleted.
    Pruned {
        /// How many.
        jobs: u64,
    },
}

impl Event<'_> {
    /// The death that a settlement or an expiry means.
    pub(super) fn death(&self) -> Option<Death> {
        match self {
            Event::Settled {
                queue,
                job,
                token,
                outcome: Outcome::Bury { reason },
                cancel: false,
                ..
            } => Some(Death {
                queue: (*queue).clone(),
                kind: job.kind.clone(),
                job: job.id,
                token: *token,
                expired: None,
                reason: reason.clone(),
            }),
            Event::Expired { expiry } if expiry.state == JobState::Dead => Some(Death::by_expiry(
                &expiry.queue,
                (expiry.job, &expiry.kind),
                expiry.token,
                expiry.cause,
                expiry.expiries,
            )),
            _ => None,
        }
    }
}
