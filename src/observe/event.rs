//! The events: one for each verb, in the past tense.

use std::time::Duration;

use crate::error::{Error, Verb};
use crate::job::{JobId, JobRecord, NewJob, QueueName};
use crate::lease::{FencingToken, Grant};
use crate::store::{Controlled, Enqueued, Expiry, Outcome};

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
    /// A job of a kind that no handler of this pool knows was handed back.
    UnknownKind {
        /// The queue.
        queue: &'a QueueName,
        /// The job.
        job: &'a JobRecord,
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
