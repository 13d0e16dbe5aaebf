//! The arguments and answers of a store's verbs.
//!
//! Most of these are exhaustive on purpose: a store that ignored a new outcome or left out a new
//! part of an answer would break its contract without a word from the compiler. Adding one is a
//! breaking change, and is meant to be.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Error, Result, Verb};
use crate::inspect::Counts;
use crate::job::{JobId, JobRecord, JobState, Kind, NewJob, QueueName};
use crate::lease::{Cause, FencingToken, Grant, Nonce, Progress, Receipt};
use crate::limits::{self, at_most, duration, positive, without_zero};
use crate::rules::ends::{End, LeaseFacts};

pub use crate::rules::ends::Outcome;

/// A session: the name under which one process repeats its calls. Opened by the store, never
/// reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(Uuid);

impl SessionId {
    /// A new session id. Only a store's `open_session` makes it valid.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id as 16 bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// An id from its 16 bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }
}

/// The name of one mutating call: session × lane × sequence number.
///
/// A repeat with the same id is the same call: the store answers it with the first answer and
/// applies it once. One request is in flight per lane, and the store remembers the last answer of
/// each lane. An older sequence number, or a session that is not open, is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct RequestId {
    /// The session.
    pub session: SessionId,
    /// The lane: one line of calls, one in flight.
    pub lane: u32,
    /// Grows by one with each new call of the lane.
    pub seq: u64,
}

pub use crate::limits::SESSION_IDLE;

/// Arguments of [`Store::enqueue`](super::Store::enqueue).
#[derive(Clone, Debug)]
pub struct EnqueueRequest {
    /// The name of this call.
    pub request: RequestId,
    /// The jobs, with ids made by the client. Shared with the caller, who may have to repeat the
    /// call.
    pub jobs: Arc<Vec<(JobId, NewJob)>>,
}

impl EnqueueRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most(
            "jobs",
            self.jobs.len(),
            limits::CALL_ITEMS,
            "jobs in a call",
        )?;
        let mut bytes = 0;
        for (id, job) in &*self.jobs {
            job.validate().map_err(|e| e.for_job(*id))?;
            bytes += job.weight();
        }
        at_most("jobs", bytes, limits::CALL_BYTES, "bytes in a call")
    }
}

/// Checks the jobs of one call against every limit, and gives them their ids.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn named(jobs: Vec<NewJob>) -> Result<Vec<(JobId, NewJob)>> {
    weighed(&jobs)?;
    Ok(JobId::generate_some(jobs.len()).zip(jobs).collect())
}

/// Checks the jobs of one call against every limit, and returns their weight in bytes.
pub(crate) fn weighed(jobs: &[NewJob]) -> Result<usize> {
    let mut weight = 0;
    for job in jobs {
        job.validate().map_err(|e| e.during(Verb::Enqueue))?;
        weight += job.weight();
    }
    at_most("jobs", jobs.len(), limits::CALL_ITEMS, "jobs in a call")
        .and_then(|()| at_most("jobs", weight, limits::CALL_BYTES, "bytes in a call"))
        .map_err(|e| e.during(Verb::Enqueue))?;
    Ok(weight)
}

/// What became of one enqueued job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Enqueued {
    /// Stored.
    New(JobId),
    /// Not stored: this job holds the unique key.
    Duplicate(JobId),
}

impl Enqueued {
    /// The job that now stands for the request: the new one or the one that was there.
    pub const fn id(self) -> JobId {
        match self {
            Self::New(id) | Self::Duplicate(id) => id,
        }
    }
}

/// One queue in a claim, with the terms for jobs that bring none of their own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClaimQueue {
    /// The queue.
    pub queue: QueueName,
    /// The term of the leases.
    pub term: Duration,
    /// The maximum lifetime of the leases.
    pub max_lifetime: Duration,
}

/// Arguments of [`Store::claim`](super::Store::claim).
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The name of this call.
    pub request: RequestId,
    /// The worker that may renew. No zero byte, as in all names and reasons.
    pub owner: Arc<str>,
    /// The run that it serves.
    pub task: Arc<str>,
    /// Fresh randomness: what makes the receipts unguessable.
    pub nonce: Nonce,
    /// The queues, in the order in which they are served, until `max` leases are granted.
    pub queues: Vec<ClaimQueue>,
    /// How many leases at most. 1 to 1,000.
    pub max: usize,
    /// Whether one of them may be a suspect. A process says so only while it holds none.
    pub admit_suspect: bool,
}

impl ClaimRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most("owner", self.owner.len(), limits::OWNER_BYTES, "bytes")?;
        at_most("task", self.task.len(), limits::OWNER_BYTES, "bytes")?;
        without_zero("owner", &self.owner)?;
        without_zero("task", &self.task)?;
        at_most(
            "queues",
            self.queues.len(),
            limits::GRANT_LEASES,
            "queues in a claim",
        )?;
        at_most("max", self.max, limits::GRANT_LEASES, "leases in a claim")?;
        if self.max == 0 {
            return Err(Error::invalid("max", 0, "at least 1 lease in a claim"));
        }
        if self.queues.is_empty() {
            return Err(Error::invalid(
                "queues",
                "none",
                "at least 1 queue in a claim",
            ));
        }
        for queue in &self.queues {
            positive("term", queue.term)?;
            positive("max_lifetime", queue.max_lifetime)?;
        }
        Ok(())
    }
}

/// The answer to a claim. Durations count from the store's now.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Claimed {
    /// The leases.
    pub grants: Vec<Grant>,
    /// The expiries that this claim recorded.
    pub expired: Vec<Expiry>,
    /// When the next scheduled job of the visited queues falls due.
    pub next_due: Option<Duration>,
    /// When the next live lease of the visited queues expires unless it is renewed.
    pub next_deadline: Option<Duration>,
    /// How far the store's clock is behind the tokens that the visited queues had given before, if
    /// by more than speed can explain. A clock that was ahead has been set back.
    pub clock_behind: Option<Duration>,
}

/// One recorded expiry: a crash report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Expiry {
    /// The queue.
    pub queue: QueueName,
    /// The job.
    pub job: JobId,
    /// Its type.
    pub kind: Kind,
    /// The token of the lease.
    pub token: FencingToken,
    /// Who held it.
    pub owner: Arc<str>,
    /// For which run.
    pub task: Arc<str>,
    /// Why it expired.
    pub cause: Cause,
    /// The last progress shown.
    pub progress: Option<Progress>,
    /// The job's expiries, this one included.
    pub expiries: u32,
    /// Where the job went: ready, dead or cancelled.
    pub state: JobState,
}

impl Expiry {
    pub(crate) fn new(
        queue: &QueueName,
        job: &JobRecord,
        facts: &LeaseFacts,
        cause: Cause,
        end: &End,
    ) -> Self {
        Self {
            queue: queue.clone(),
            job: job.id,
            kind: job.kind.clone(),
            token: facts.token,
            owner: Arc::clone(&facts.owner),
            task: Arc::clone(&facts.task),
            cause,
            progress: facts.progress.clone(),
            expiries: job.expiries + 1,
            state: end.next.state(),
        }
    }
}

/// A sign of life for one grant.
#[derive(Clone, PartialEq, Debug)]
pub struct Beat {
    /// The queue.
    pub queue: QueueName,
    /// The partition of the queue.
    pub partition: u16,
    /// The grant's first token.
    pub grant: FencingToken,
    /// The claim's randomness.
    pub nonce: Nonce,
    /// The leases that the holder still works on, in token order.
    pub leases: Vec<FencingToken>,
    /// Leases that expire now: their handlers showed no progress. Not in `leases`.
    pub lapse: Vec<FencingToken>,
    /// Progress shown since the last beat.
    pub progress: Vec<(FencingToken, Progress)>,
}

impl Beat {
    /// A beat that keeps `leases` of `grant`.
    pub fn of(grant: &Grant) -> Self {
        Self {
            queue: grant.queue.clone(),
            partition: grant.partition,
            grant: grant.id,
            nonce: grant.nonce,
            leases: grant.leases.iter().map(|lease| lease.token).collect(),
            lapse: Vec::new(),
            progress: Vec::new(),
        }
    }

    pub(crate) fn validate_all(beats: &[Self]) -> Result<()> {
        at_most("beats", beats.len(), limits::CALL_ITEMS, "beats in a call")?;
        for beat in beats {
            at_most(
                "leases",
                beat.leases.len(),
                limits::GRANT_LEASES,
                "leases in a beat",
            )?;
            at_most(
                "lapse",
                beat.lapse.len(),
                limits::GRANT_LEASES,
                "leases in a beat",
            )?;
            at_most(
                "progress",
                beat.progress.len(),
                limits::GRANT_LEASES,
                "leases in a beat",
            )?;
            for (_, progress) in &beat.progress {
                at_most(
                    "progress note",
                    progress.note.len(),
                    limits::REASON_BYTES,
                    "bytes",
                )?;
            }
        }
        Ok(())
    }
}

/// The answer to one beat.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a fenced holder must stop"]
pub enum Renewal {
    /// The grant lives on.
    Held {
        /// From the store's now; at most the term, cut by the maximum lifetime.
        granted: Duration,
        /// Leases whose jobs are to be cancelled.
        cancel: Vec<FencingToken>,
        /// Leases of the beat that are no longer the holder's.
        fenced: Vec<FencingToken>,
    },
    /// None of its leases is the holder's any longer.
    Fenced,
}

/// The end of one lease.
#[derive(Clone, PartialEq, Debug)]
pub struct Settlement {
    /// The proof of the lease.
    pub receipt: Receipt,
    /// How it ends.
    pub outcome: Outcome,
}

/// Arguments of [`Store::settle`](super::Store::settle).
#[derive(Clone, Debug)]
pub struct SettleRequest {
    /// The name of this call.
    pub request: RequestId,
    /// The settlements.
    pub settlements: Vec<Settlement>,
}

impl SettleRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most(
            "settlements",
            self.settlements.len(),
            limits::CALL_ITEMS,
            "settlements in a call",
        )?;
        for Settlement { receipt, outcome } in &self.settlements {
            let checked = match outcome {
                Outcome::Complete {
                    result: Some(result),
                } => at_most("result", result.len(), limits::CHECKPOINT_BYTES, "bytes"),
                Outcome::Retry { delay, .. }
                | Outcome::Surrender { delay, .. }
                | Outcome::Decline { delay, .. } => duration("delay", *delay),
                Outcome::Complete { result: None } | Outcome::Bury { .. } => Ok(()),
            };
            checked.map_err(|e| e.for_job(receipt.job))?;
        }
        Ok(())
    }
}

/// State to be saved under a lease.
#[derive(Clone, PartialEq, Debug)]
pub struct Checkpoint {
    /// The proof of the lease.
    pub receipt: Receipt,
    /// The handler's own count; under one token it must not fall.
    pub seq: u64,
    /// The state.
    pub bytes: Bytes,
}

/// Arguments of [`Store::checkpoint`](super::Store::checkpoint).
#[derive(Clone, Debug)]
pub struct CheckpointRequest {
    /// The name of this call.
    pub request: RequestId,
    /// What to save.
    pub checkpoints: Vec<Checkpoint>,
}

impl CheckpointRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most(
            "checkpoints",
            self.checkpoints.len(),
            limits::CALL_ITEMS,
            "checkpoints in a call",
        )?;
        let mut total = 0;
        for Checkpoint { receipt, bytes, .. } in &self.checkpoints {
            at_most("checkpoint", bytes.len(), limits::CHECKPOINT_BYTES, "bytes")
                .map_err(|e| e.for_job(receipt.job))?;
            total += bytes.len();
        }
        at_most("checkpoints", total, limits::CALL_BYTES, "bytes in a call")
    }
}

/// The answer to one checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a fenced checkpoint was not saved"]
pub enum Checkpointed {
    /// Saved: the next claim of the job gets it.
    Saved {
        /// The deadline had passed, but nobody else had been granted the job.
        late: bool,
        /// A cancel was requested for the job.
        cancel: bool,
    },
    /// Not saved: this lease has already saved a later one.
    Behind {
        /// The one that is saved.
        seq: u64,
    },
    /// Not saved: the lease was not the caller's, or no longer.
    Fenced,
}

/// Arguments of [`Store::reap`](super::Store::reap).
#[derive(Clone, Debug)]
pub struct ReapRequest {
    /// The name of this call.
    pub request: RequestId,
    /// How many leases at most. 1 to 1,000.
    pub max: usize,
}

/// Arguments of [`Store::prune`](super::Store::prune).
#[derive(Clone, Debug)]
pub struct PruneRequest {
    /// The name of this call.
    pub request: RequestId,
    /// Jobs whose retention ran out at least this long ago.
    pub overdue: Duration,
    /// How many jobs at most. 1 to 10,000.
    pub max: usize,
}

/// Unique keys past their window, of which a step of a prune deletes as many at most as jobs.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PruneKeys {
    pub(crate) overdue: Duration,
    pub(crate) max: usize,
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl PruneRequest {
    pub(crate) fn keys(&self) -> PruneKeys {
        PruneKeys {
            overdue: self.overdue,
            max: self.max,
        }
    }
}

/// Behind an error: the items of a call, by their places, that wait for what another transaction
/// has in hand. Nothing of the call was applied, and without them it can be.
#[derive(Debug)]
pub(crate) struct InHand(pub(crate) Vec<usize>);

impl InHand {
    /// The items that the error names.
    pub(crate) fn of(error: &Error) -> Option<&[usize]> {
        let source = std::error::Error::source(error)?;
        Some(&source.downcast_ref::<Self>()?.0)
    }
}

impl fmt::Display for InHand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another transaction holds the job, or a job with the same key")
    }
}

impl std::error::Error for InHand {}

pub(crate) fn bounded(field: &'static str, max: usize, limit: usize) -> Result<()> {
    if (1..=limit).contains(&max) {
        return Ok(());
    }
    Err(Error::invalid(field, max, format!("1 to {limit}")))
}

/// Refuses to remove a queue that has jobs.
pub(crate) fn check_empty(queue: &QueueName, counts: &Counts) -> Result<()> {
    let left: Vec<String> = JobState::ALL
        .into_iter()
        .filter(|state| counts.of(*state) > 0)
        .map(|state| format!("{} {state}", counts.of(state)))
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    let found = format!("{queue}, which has jobs: {}", left.join(", "));
    Err(Error::invalid("queue", found, "a queue without jobs"))
}

/// Which jobs a command is about.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// One job.
    Job(JobId),
    /// Jobs of a queue that are in a state, in the order of [`Query::Jobs`](crate::inspect::Query).
    State {
        /// The queue.
        queue: QueueName,
        /// Their state.
        state: JobState,
        /// How many at most. 1 to 10,000.
        max: usize,
    },
}

/// Which leases a revoke is about.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseSelect {
    /// The lease of one job.
    Job(JobId),
    /// All leases of an owner.
    Owner(Arc<str>),
    /// All leases that serve a task.
    Task(Arc<str>),
}

/// What an operator can do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ControlCommand {
    /// Grant nothing more from a queue.
    Pause(QueueName),
    /// Grant again.
    Resume(QueueName),
    /// Change how a queue behaves.
    Configure {
        /// The queue.
        queue: QueueName,
        /// While a job of an exclusive key waits for its retry, may the next of its line go?
        relaxed: bool,
    },
    /// Call jobs off. A pending job is cancelled; of a leased one the holder is told.
    Cancel(Select),
    /// End leases now, without their holders. The jobs are ready again; nothing is charged.
    Revoke(LeaseSelect),
    /// Give dead jobs another life: ready, with their counts at zero.
    RetryDead(Select),
    /// Delete jobs. Leased ones are skipped.
    Purge(Select),
    /// Move pending jobs to another time. Leased ones are skipped.
    Reschedule {
        /// Which.
        jobs: Select,
        /// When, from the store's now.
        delay: Duration,
    },
    /// Delete a queue that has no jobs, with its settings, its ledger and its open windows of
    /// unique keys. One that has jobs in any state is left alone: `InvalidInput` says how many.
    Remove(QueueName),
}

impl ControlCommand {
    /// The command's one word.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Pause(_) => "pause",
            Self::Resume(_) => "resume",
            Self::Configure { .. } => "configure",
            Self::Cancel(_) => "cancel",
            Self::Revoke(_) => "revoke",
            Self::RetryDead(_) => "retry_dead",
            Self::Purge(_) => "purge",
            Self::Reschedule { .. } => "reschedule",
            Self::Remove(_) => "remove",
        }
    }
}

impl fmt::Display for ControlCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pause(queue) | Self::Resume(queue) | Self::Remove(queue) => {
                write!(f, "{} queue {queue}", self.as_str())
            }
            Self::Configure { queue, relaxed } => {
                write!(f, "configure queue {queue} relaxed={relaxed}")
            }
            Self::Cancel(jobs) | Self::RetryDead(jobs) | Self::Purge(jobs) => {
                write!(f, "{} {jobs}", self.as_str())
            }
            Self::Reschedule { jobs, delay } => write!(f, "reschedule {jobs} in {delay:?}"),
            Self::Revoke(LeaseSelect::Job(id)) => write!(f, "revoke job {id}"),
            Self::Revoke(LeaseSelect::Owner(owner)) => write!(f, "revoke owner {owner}"),
            Self::Revoke(LeaseSelect::Task(task)) => write!(f, "revoke task {task}"),
        }
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(id) => write!(f, "job {id}"),
            Self::State { queue, state, max } => {
                write!(f, "up to {max} {state} jobs of queue {queue}")
            }
        }
    }
}

/// Arguments of [`Store::control`](super::Store::control).
#[derive(Clone, Debug)]
pub struct ControlRequest {
    /// The name of this call.
    pub request: RequestId,
    /// Who asks.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// For what.
    pub command: ControlCommand,
}

impl ControlRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most("actor", self.actor.len(), limits::OWNER_BYTES, "bytes")?;
        at_most("reason", self.reason.len(), limits::REASON_BYTES, "bytes")?;
        without_zero("actor", &self.actor)?;
        without_zero("reason", &self.reason)?;
        match &self.command {
            ControlCommand::Revoke(LeaseSelect::Owner(owner)) => without_zero("owner", owner)?,
            ControlCommand::Revoke(LeaseSelect::Task(task)) => without_zero("task", task)?,
            _ => {}
        }
        if self.actor.is_empty() {
            return Err(Error::invalid(
                "actor",
                "nothing",
                "a name: every command is on record",
            ));
        }
        if self.reason.is_empty() && matches!(self.command, ControlCommand::Revoke(_)) {
            return Err(Error::invalid(
                "reason",
                "nothing",
                "a reason: a revoke overrides a live holder",
            ));
        }
        if let ControlCommand::Reschedule { delay, .. } = &self.command {
            duration("delay", *delay)?;
        }
        match &self.command {
            ControlCommand::Cancel(Select::State { max, .. })
            | ControlCommand::RetryDead(Select::State { max, .. })
            | ControlCommand::Purge(Select::State { max, .. })
            | ControlCommand::Reschedule {
                jobs: Select::State { max, .. },
                ..
            } => bounded("max", *max, limits::CALL_ITEMS),
            _ => Ok(()),
        }
    }
}

/// What a command did.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Controlled {
    /// Jobs, leases or queues that it changed.
    pub done: u64,
    /// Jobs that it left alone: leased, or in a state in which it means nothing.
    pub skipped: u64,
    /// Dead jobs that stay dead because another job (the second) holds their unique key.
    pub duplicates: Vec<(JobId, JobId)>,
}
