//! Looking without touching: counts, the ledger, live leases, jobs, the audit trail.
//!
//! The command line and the dashboard are built on these views. Each is paged, and none scans. Ask
//! for them with the methods of [`Client`](crate::Client).

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::Instrument as _;

use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::job::{JobId, JobRecord, JobState, Key, Kind, QueueName};
use crate::lease::{Cause, FencingToken, LeaseEnd, Progress};
use crate::store::Store;

/// A question for a store.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Query {
    /// All queues of the namespace: [`View::Queues`].
    Queues,
    /// The live leases, by deadline: [`View::Leases`].
    Leases {
        /// Which.
        filter: LeaseFilter,
        /// Which part of them.
        page: Page,
    },
    /// The jobs of a queue in a state, in the order in which they will be served (ready, scheduled,
    /// leased) or were settled (completed, dead, cancelled): [`View::Jobs`].
    Jobs {
        /// The queue.
        queue: QueueName,
        /// Their state.
        state: JobState,
        /// Which part of them.
        page: Page,
    },
    /// The exclusive keys of a queue that jobs are parked behind: [`View::Parked`].
    Parked {
        /// The queue.
        queue: QueueName,
        /// Which part of them.
        page: Page,
    },
    /// One job: [`View::Job`].
    Job(JobId),
    /// The commands on record, newest first: [`View::Audit`].
    Audit {
        /// Which part of them.
        page: Page,
    },
}

/// Which live leases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LeaseFilter {
    /// Of this queue.
    pub queue: Option<QueueName>,
    /// Of this owner.
    pub owner: Option<Arc<str>>,
    /// For this task.
    pub task: Option<Arc<str>>,
}

/// A part of a long answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Page {
    /// Where the last page ended. Opaque, and good for the same query only.
    pub after: Option<String>,
    /// How many rows at most. 1 to 1,000.
    pub rows: usize,
}

impl Page {
    /// The first `rows` rows.
    pub fn first(rows: usize) -> Self {
        Self { after: None, rows }
    }
}

/// The answer to a [`Query`], of the same name.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum View {
    /// One row per queue, by name.
    Queues(Vec<QueueView>),
    /// A page of live leases.
    Leases(Paged<LeaseView>),
    /// A page of jobs.
    Jobs(Paged<JobView>),
    /// A page of keys, each once; by key within a partition of the queue.
    Parked(Paged<ParkedView>),
    /// One job, if the store still has it.
    Job(Option<Box<JobView>>),
    /// A page of the audit trail.
    Audit(Paged<AuditView>),
}

/// Rows, and where the next page starts.
#[derive(Clone, PartialEq, Debug)]
pub struct Paged<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// For [`Page::after`]; none at the end.
    pub next: Option<String>,
}

/// One queue at a glance.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QueueView {
    /// Its name.
    pub queue: QueueName,
    /// Whether it grants nothing.
    pub paused: bool,
    /// Whether a job that waits for its retry lets the next job of its exclusive key run.
    pub relaxed: bool,
    /// Jobs by state.
    pub counts: Counts,
    /// What became of its leases.
    pub ledger: Ledger,
    /// How long the job that is next in line has been due.
    pub oldest_ready: Option<Duration>,
    /// How far the store's clock is behind the tokens that this queue's leases were given, if by
    /// more than speed can explain: it was ahead, and has been set back.
    pub clock_behind: Option<Duration>,
}

impl QueueView {
    /// A queue of which only the name is known, for stores to fill in.
    pub fn new(queue: QueueName) -> Self {
        Self {
            queue,
            paused: false,
            relaxed: false,
            counts: Counts::default(),
            ledger: Ledger::default(),
            oldest_ready: None,
            clock_behind: None,
        }
    }
}

/// Jobs by state. Completed ones only while they are retained.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Counts {
    /// Waiting for their time.
    pub scheduled: u64,
    /// Waiting for a claim, those parked behind their exclusive key included.
    pub ready: u64,
    /// Of the ready ones: waiting behind another job of their exclusive key.
    pub parked: u64,
    /// Held by workers.
    pub leased: u64,
    /// Done and retained.
    pub completed: u64,
    /// Given up.
    pub dead: u64,
    /// Called off and retained.
    pub cancelled: u64,
}

impl Counts {
    /// The count of one state.
    pub const fn of(&self, state: JobState) -> u64 {
        match state {
            JobState::Scheduled => self.scheduled,
            JobState::Ready => self.ready,
            JobState::Leased => self.leased,
            JobState::Completed => self.completed,
            JobState::Dead => self.dead,
            JobState::Cancelled => self.cancelled,
        }
    }
}

/// The ledger of a queue: every lease ends exactly once, and is counted where it ended.
///
/// Kept by the store in the same step as the change, so that a killed worker loses no count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Ledger {
    /// Jobs stored.
    pub enqueued: u64,
    /// Leases granted.
    pub granted: u64,
    /// Released: done.
    pub completed: u64,
    /// Released: again later.
    pub retried: u64,
    /// Released: handed back.
    pub surrendered: u64,
    /// Released: given up.
    pub buried: u64,
    /// Released after a cancel.
    pub cancelled: u64,
    /// Expired because they were not renewed.
    pub expired_deadline: u64,
    /// Expired because the handler showed no progress.
    pub expired_stalled: u64,
    /// Expired because they reached their maximum lifetime.
    pub expired_lifetime: u64,
    /// Of the expired ones: the last straw, after which the job was dead.
    pub dead_by_expiry: u64,
    /// Ended by an operator.
    pub revoked: u64,
    /// Live leases, as the store counted them when it granted and ended them. `leasehold doctor`
    /// compares this with the leases that are there.
    pub live: u64,
    /// Settlements that came after the deadline, and before anybody else was granted the job.
    pub late: u64,
    /// Settlements and checkpoints refused as stale: what a holder tried that had been replaced. A
    /// refused renewal is not one of them: it changes nothing, and may have been under way when its
    /// own settlement came, which only the worker can know. The worker counts those that tell it of
    /// a lost lease, as `leasehold_calls_fenced_total`. A store that has forgotten a session cannot
    /// tell a settlement that is sent again from a stale holder's; the worker can, and counts it as
    /// `leasehold_settlements_in_doubt_total`.
    pub fenced: u64,
    /// Settled jobs deleted past their retention.
    pub pruned: u64,
    /// Jobs deleted by an operator.
    pub purged: u64,
}

impl Ledger {
    /// Ended by their holders.
    pub const fn released(&self) -> u64 {
        self.completed + self.retried + self.surrendered + self.buried + self.cancelled
    }

    /// Expired, whatever the cause.
    pub const fn expired(&self) -> u64 {
        self.expired_deadline + self.expired_stalled + self.expired_lifetime
    }

    /// Ended by a holder that had failed: retried or buried. A failure that a cancel overtook
    /// counts as cancelled.
    pub const fn failed(&self) -> u64 {
        self.retried + self.buried
    }

    /// The share of the runs that failed, of those that were completed or failed. None before the
    /// first.
    pub fn failed_share(&self) -> Option<f64> {
        let runs = self.completed + self.failed();
        (runs > 0).then(|| self.failed() as f64 / runs as f64)
    }

    /// Jobs that died, by their holder's word or by expiry. It only grows, unlike [`Counts::dead`]:
    /// one that is retried or purged has died all the same.
    pub const fn died(&self) -> u64 {
        self.buried + self.dead_by_expiry
    }

    /// Invariant I9: granted = released + expired + revoked + live.
    pub const fn balances(&self) -> bool {
        self.granted == self.released() + self.expired() + self.revoked + self.live
    }

    /// Counts one end.
    pub(crate) fn count(&mut self, end: LeaseEnd) {
        *match end {
            LeaseEnd::Completed => &mut self.completed,
            LeaseEnd::Retried => &mut self.retried,
            LeaseEnd::Surrendered => &mut self.surrendered,
            LeaseEnd::Buried => &mut self.buried,
            LeaseEnd::Cancelled => &mut self.cancelled,
            LeaseEnd::Expired(Cause::Deadline) => &mut self.expired_deadline,
            LeaseEnd::Expired(Cause::Stalled) => &mut self.expired_stalled,
            LeaseEnd::Expired(Cause::Lifetime) => &mut self.expired_lifetime,
            LeaseEnd::Revoked => &mut self.revoked,
        } += 1;
    }

    /// The sum of two ledgers.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            enqueued: self.enqueued.saturating_add(other.enqueued),
            granted: self.granted.saturating_add(other.granted),
            completed: self.completed.saturating_add(other.completed),
            retried: self.retried.saturating_add(other.retried),
            surrendered: self.surrendered.saturating_add(other.surrendered),
            buried: self.buried.saturating_add(other.buried),
            cancelled: self.cancelled.saturating_add(other.cancelled),
            expired_deadline: self.expired_deadline.saturating_add(other.expired_deadline),
            expired_stalled: self.expired_stalled.saturating_add(other.expired_stalled),
            expired_lifetime: self.expired_lifetime.saturating_add(other.expired_lifetime),
            dead_by_expiry: self.dead_by_expiry.saturating_add(other.dead_by_expiry),
            revoked: self.revoked.saturating_add(other.revoked),
            live: self.live.saturating_add(other.live),
            late: self.late.saturating_add(other.late),
            fenced: self.fenced.saturating_add(other.fenced),
            pruned: self.pruned.saturating_add(other.pruned),
            purged: self.purged.saturating_add(other.purged),
        }
    }
}

/// One live lease.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeaseView {
    /// Its queue.
    pub queue: QueueName,
    /// Its job.
    pub job: JobId,
    /// The job's type.
    pub kind: Kind,
    /// Its token.
    pub token: FencingToken,
    /// The worker that may renew it.
    pub owner: Arc<str>,
    /// What the worker belongs to: a deploy, a batch.
    pub task: Arc<str>,
    /// The job's attempt.
    pub attempt: u32,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// Until it expires; zero if it is overdue.
    pub time_left: Duration,
    /// What each renewal extends it by.
    pub term: Duration,
    /// How often it was renewed.
    pub renewals: u32,
    /// Whether its holder is asked to stop.
    pub cancel: bool,
    /// The last progress shown.
    pub progress: Option<Progress>,
}

impl LeaseView {
    /// A lease of which nothing is known but whose it is, for stores to fill.
    pub fn new(
        queue: QueueName,
        job: &JobRecord,
        token: FencingToken,
        owner: Arc<str>,
        task: Arc<str>,
    ) -> Self {
        Self {
            queue,
            job: job.id,
            kind: job.kind.clone(),
            token,
            owner,
            task,
            attempt: job.attempt(),
            granted_at: Timestamp::ZERO,
            time_left: Duration::ZERO,
            term: Duration::ZERO,
            renewals: 0,
            cancel: false,
            progress: None,
        }
    }
}

/// A live lease with less than this share of its term left is late: renewed at a third of the term,
/// one that is well has two thirds.
pub const LATE: f64 = 1.0 / 2.0;
/// With less than this, its holder has not been heard from.
pub const SILENT: f64 = 1.0 / 6.0;

/// One job, with everything known about it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct JobView {
    /// Its queue.
    pub queue: QueueName,
    /// Where it stands.
    pub state: JobState,
    /// Whether it waits behind another job of its exclusive key.
    pub parked: bool,
    /// The job as it is stored.
    pub job: Arc<JobRecord>,
    /// Its live lease.
    pub lease: Option<LeaseView>,
    /// When it was settled.
    pub settled_at: Option<Timestamp>,
}

impl JobView {
    /// A job without a lease, for stores to fill.
    pub fn new(queue: QueueName, state: JobState, job: Arc<JobRecord>) -> Self {
        Self {
            queue,
            state,
            parked: false,
            job,
            lease: None,
            settled_at: None,
        }
    }

    /// The attempt that people ask for: of a job that is settled, how often it has run; of another,
    /// the number of the run that is under way or comes next. What was handed back does not count.
    pub fn attempt(&self) -> u32 {
        let job = &self.job;
        let failed = job.failures.saturating_add(job.expiries);
        let was_stopped = || {
            let last = job.history.last();
            // With a reason it has failed as well, and is counted as that.
            last.is_some_and(|last| last.end == LeaseEnd::Cancelled && last.reason.is_none())
        };
        match self.state {
            JobState::Dead => failed,
            JobState::Cancelled => failed.saturating_add(was_stopped().into()),
            _ => job.attempt(),
        }
    }
}

/// One exclusive key, and how many jobs wait behind the one that has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParkedView {
    /// The key.
    pub key: Key,
    /// How many are parked behind it; [`MOST`](Self::MOST) stands for that many or more.
    pub jobs: u64,
}

impl ParkedView {
    /// Jobs behind a key are counted up to this many: looking must stay cheap.
    pub const MOST: u64 = 10_000;

    /// A key, and how many jobs are parked behind it.
    pub fn new(key: Key, jobs: u64) -> Self {
        Self { key, jobs }
    }
}

/// One command on record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditView {
    /// When.
    pub at: Timestamp,
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// What, in words.
    pub command: String,
    /// How many jobs, leases or queues it changed.
    pub done: u64,
    /// The leases that it ended, up to a hundred, by token.
    pub tokens: Vec<FencingToken>,
}

impl AuditView {
    /// A command that changed nothing, for stores to fill.
    pub fn new(at: Timestamp, actor: String, reason: String, command: String) -> Self {
        Self {
            at,
            actor,
            reason,
            command,
            done: 0,
            tokens: Vec::new(),
        }
    }
}

async fn ask(store: &dyn Store, query: Query) -> Result<View> {
    let span = tracing::debug_span!("store.inspect");
    store.inspect(query).instrument(span).await
}

/// All queues.
#[doc(hidden)]
pub async fn queues(store: &dyn Store) -> Result<Vec<QueueView>> {
    match ask(store, Query::Queues).await? {
        View::Queues(queues) => Ok(queues),
        other => Err(mismatch(&other)),
    }
}

/// One queue; none if nothing was ever enqueued there.
#[doc(hidden)]
pub async fn queue(store: &dyn Store, name: &QueueName) -> Result<Option<QueueView>> {
    Ok(queues(store)
        .await?
        .into_iter()
        .find(|view| view.queue == *name))
}

/// The ledger of all queues together.
#[doc(hidden)]
pub async fn ledger(store: &dyn Store) -> Result<Ledger> {
    let queues = queues(store).await?;
    Ok(queues
        .iter()
        .fold(Ledger::default(), |sum, view| sum.plus(&view.ledger)))
}

/// A page of live leases.
#[doc(hidden)]
pub async fn leases(
    store: &dyn Store,
    filter: LeaseFilter,
    page: Page,
) -> Result<Paged<LeaseView>> {
    match ask(store, Query::Leases { filter, page }).await? {
        View::Leases(leases) => Ok(leases),
        other => Err(mismatch(&other)),
    }
}

/// A page of jobs.
#[doc(hidden)]
pub async fn jobs(
    store: &dyn Store,
    queue: QueueName,
    state: JobState,
    page: Page,
) -> Result<Paged<JobView>> {
    match ask(store, Query::Jobs { queue, state, page }).await? {
        View::Jobs(jobs) => Ok(jobs),
        other => Err(mismatch(&other)),
    }
}

/// A page of the exclusive keys that jobs of a queue are parked behind.
#[doc(hidden)]
pub async fn parked(store: &dyn Store, queue: QueueName, page: Page) -> Result<Paged<ParkedView>> {
    match ask(store, Query::Parked { queue, page }).await? {
        View::Parked(keys) => Ok(keys),
        other => Err(mismatch(&other)),
    }
}

/// One job.
#[doc(hidden)]
pub async fn job(store: &dyn Store, id: JobId) -> Result<Option<Box<JobView>>> {
    match ask(store, Query::Job(id)).await? {
        View::Job(job) => Ok(job),
        other => Err(mismatch(&other)),
    }
}

/// A page of the audit trail.
#[doc(hidden)]
pub async fn audit(store: &dyn Store, page: Page) -> Result<Paged<AuditView>> {
    match ask(store, Query::Audit { page }).await? {
        View::Audit(audit) => Ok(audit),
        other => Err(mismatch(&other)),
    }
}

fn mismatch(view: &View) -> Error {
    let got = match view {
        View::Queues(_) => "queues",
        View::Leases(_) => "leases",
        View::Jobs(_) => "jobs",
        View::Parked(_) => "parked",
        View::Job(_) => "job",
        View::Audit(_) => "audit",
    };
    Error::new(
        ErrorKind::Unexpected,
        format!("the store answered with {got}, which was not asked for"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::NewJob;
    use crate::lease::EndedLease;

    #[test]
    fn a_settled_job_has_as_many_attempts_as_runs() {
        let view = |state, failures, expiries, last: Option<(LeaseEnd, Option<&str>)>| {
            let kind = Kind::new("work").expect("a good name");
            let new = NewJob::raw(QueueName::default(), kind, "{}");
            let mut job = JobRecord::new(JobId::generate(), new, Timestamp::ZERO);
            (job.failures, job.expiries) = (failures, expiries);
            job.history.extend(last.map(|(end, reason)| {
                let (token, at) = (FencingToken::new(1), Timestamp::ZERO);
                let mut ended = EndedLease::new(token, "w".into(), "t".into(), at, at, end);
                ended.reason = reason.map(Into::into);
                ended
            }));
            JobView::new(QueueName::default(), state, Arc::new(job)).attempt()
        };
        assert_eq!(view(JobState::Dead, 2, 1, None), 3);
        assert_eq!(
            view(JobState::Dead, 1, 0, None),
            1,
            "buried by its first run"
        );
        assert_eq!(view(JobState::Completed, 2, 0, None), 3);
        for state in [JobState::Ready, JobState::Scheduled, JobState::Leased] {
            assert_eq!(view(state, 2, 0, None), 3, "{state}: the run that comes");
        }
        assert_eq!(view(JobState::Cancelled, 0, 0, None), 0, "it never ran");
        let stopped = Some((LeaseEnd::Cancelled, None));
        assert_eq!(view(JobState::Cancelled, 1, 0, stopped), 2);
        let failed = Some((LeaseEnd::Cancelled, Some("broken")));
        assert_eq!(view(JobState::Cancelled, 1, 0, failed), 1);
    }
}
