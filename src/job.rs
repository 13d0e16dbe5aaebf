//! Jobs: what is stored, and what a caller asks to be stored. Data only, no I/O.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::history::EndedLease;
use crate::limits::{self, at_most, duration, positive};
use crate::names::is_name;
use crate::settings::run_setters;
use crate::token::FencingToken;

pub use crate::names::{JobId, Key, Kind, Namespace, QueueName};
pub use crate::settings::RunSettings;

/// Where a job stands. A job is in exactly one of these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobState {
    /// Waits for its time.
    Scheduled,
    /// Waits for a claim (or, behind another job of its exclusive key, for its turn).
    Ready,
    /// A worker holds its lease.
    Leased,
    /// Done.
    Completed,
    /// Given up.
    Dead,
    /// Called off.
    Cancelled,
}

impl JobState {
    /// All states, in the order of a job's life.
    pub const ALL: [Self; 6] = [
        Self::Scheduled,
        Self::Ready,
        Self::Leased,
        Self::Completed,
        Self::Dead,
        Self::Cancelled,
    ];

    /// The state's one spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Ready => "ready",
            Self::Leased => "leased",
            Self::Completed => "completed",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether the job's life is over.
    pub const fn is_settled(self) -> bool {
        matches!(self, Self::Completed | Self::Dead | Self::Cancelled)
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| {
                Error::invalid(
                    "state",
                    format!("{text:?}"),
                    "scheduled ready leased completed dead cancelled",
                )
            })
    }
}

/// A key that only one job of a queue may have at a time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UniqueKey {
    /// The key.
    pub key: Key,
    /// Without a window the key is held until the job is completed, dead, cancelled or purged. With
    /// one it is held for that long from the enqueue, whatever becomes of the job.
    pub window: Option<Duration>,
}

/// The settings of one job. The worker's queue decides what is `None` here.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[must_use]
#[non_exhaustive]
pub struct JobOptions {
    /// The priority: 0, served first, to 7.
    pub priority: u8,
    /// The lease's term, in place of that of the queue's [`LeaseTerms`](crate::LeaseTerms).
    pub term: Option<Duration>,
    /// No renewal carries the lease beyond this age, whatever the queue's terms say.
    pub max_lifetime: Option<Duration>,
    /// How often and how long it may run.
    #[serde(flatten)]
    pub runs: RunSettings,
    /// Expiries after which the store buries the job. At least 3. Stored with each job, because the
    /// store counts expiries while no worker is there.
    pub max_expiries: u32,
    /// How long to keep the job once completed. None: not at all.
    pub retention: Option<Duration>,
}

impl JobOptions {
    /// The priority by default: there is room on both sides.
    pub const DEFAULT_PRIORITY: u8 = 4;
    /// The expiry limit by default: a job is a suspect after two, and then gets three more runs.
    pub const DEFAULT_MAX_EXPIRIES: u32 = 5;

    const USUAL: Self = Self {
        priority: Self::DEFAULT_PRIORITY,
        term: None,
        max_lifetime: None,
        runs: RunSettings::OPEN,
        max_expiries: Self::DEFAULT_MAX_EXPIRIES,
        retention: None,
    };

    run_setters!();

    /// The priority: 0, served first, to 7.
    pub fn priority(mut self, priority: u8) -> Self {
        self.priority = priority;
        self
    }

    /// The lease's term.
    pub fn term(mut self, term: Duration) -> Self {
        self.term = Some(term);
        self
    }

    /// The age beyond which no renewal carries the lease.
    pub fn max_lifetime(mut self, max_lifetime: Duration) -> Self {
        self.max_lifetime = Some(max_lifetime);
        self
    }

    /// Expiries after which the job is dead. At least 3.
    pub fn max_expiries(mut self, max_expiries: u32) -> Self {
        self.max_expiries = max_expiries;
        self
    }

    /// How long to keep the job once it is completed.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }
}

impl Default for JobOptions {
    fn default() -> Self {
        Self::USUAL
    }
}

/// The [`JobOptions`] of one job. Most jobs have the usual ones, and a queue holds many jobs: those
/// take no room.
#[doc(hidden)]
#[derive(Clone, Default)]
pub struct Choices(Option<Box<JobOptions>>);

impl From<JobOptions> for Choices {
    fn from(options: JobOptions) -> Self {
        Self((options != JobOptions::USUAL).then(|| Box::new(options)))
    }
}

impl Deref for Choices {
    type Target = JobOptions;

    fn deref(&self) -> &JobOptions {
        self.0.as_deref().unwrap_or(&JobOptions::USUAL)
    }
}

impl DerefMut for Choices {
    fn deref_mut(&mut self) -> &mut JobOptions {
        self.0.get_or_insert_default()
    }
}

impl PartialEq for Choices {
    fn eq(&self, other: &Self) -> bool {
        (self.0.is_none() && other.0.is_none()) || **self == **other
    }
}

impl fmt::Debug for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Name and value pairs that travel with a job: trace context and the like.
pub type Headers = Vec<(String, String)>;

/// A typed job: the struct you enqueue and your handler receives.
///
/// ```
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize)]
/// struct Resize { image: String, width: u32 }
///
/// impl leasehold::Job for Resize {
///     const KIND: &'static str = "resize";
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a job",
    label = "implement `leasehold::Job` for this type",
    note = "a job names its kind: `impl leasehold::Job for {Self} {{ const KIND: &'static str = \"…\"; }}`",
    note = "and must be `serde::Serialize + serde::Deserialize`"
)]
pub trait Job: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The kind under which it is stored. Rename the struct at will; renaming this orphans the
    /// jobs already stored.
    const KIND: &'static str;

    /// The queue it goes to unless the caller names another.
    const QUEUE: &'static str = "default";

    /// The version of the payload, from 1. Raise it with a change that workers of the old version
    /// cannot read: they decline such jobs and leave them to others. See the guide's page
    /// [`changing`](crate::guide::changing).
    const VERSION: u32 = FIRST_VERSION;

    /// The settings of jobs of this kind.
    fn options(&self) -> JobOptions {
        JobOptions::default()
    }

    /// Makes a payload of version `from` one of version `from + 1`. Called for each version between
    /// the stored one and [`VERSION`](Self::VERSION). By default nothing changes: what
    /// `#[serde(default)]` and `#[serde(alias)]` can read needs no more.
    ///
    /// # Errors
    /// If it cannot. The job is treated as one whose payload cannot be decoded.
    fn upgrade(from: u32, payload: serde_json::Value) -> Result<serde_json::Value, UpgradeError> {
        let _ = from;
        Ok(payload)
    }
}

/// Why a payload could not be [upgraded](Job::upgrade): any error.
pub type UpgradeError = Box<dyn std::error::Error + Send + Sync>;

/// The version of payloads that say nothing of one.
pub(crate) const FIRST_VERSION: u32 = 1;

/// The names of a type of jobs, checked when the program is compiled.
trait Named: Job {
    const IS_NAMED: bool = is_name(Self::QUEUE) && is_name(Self::KIND);
}

impl<J: Job> Named for J {}

/// A job to be stored.
///
/// Built from a typed [`Job`] and adjusted by chaining:
/// ```
/// # use serde::{Deserialize, Serialize};
/// # use std::time::Duration;
/// # #[derive(Serialize, Deserialize)] struct Resize { image: String }
/// # impl leasehold::Job for Resize { const KIND: &'static str = "resize"; }
/// # fn main() -> leasehold::Result<()> {
/// let job = leasehold::NewJob::of(&Resize { image: "cat.png".into() })?
///     .delay(Duration::from_secs(60))
///     .unique("resize cat.png")?;
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct NewJob {
    /// The line it joins.
    pub queue: QueueName,
    /// Its type.
    pub kind: Kind,
    /// What the handler decodes. JSON, unless both sides agree on something else.
    pub payload: Bytes,
    /// The payload's version: [`Job::VERSION`].
    pub version: u32,
    /// Passed on to the handler, unread.
    pub headers: Headers,
    /// How long after the enqueue it falls due, on the store's clock.
    pub delay: Duration,
    /// Only one job of the queue may have this key.
    pub unique: Option<UniqueKey>,
    /// Only one job of the queue with this key is leased at a time.
    pub exclusive: Option<Key>,
    /// Everything else: [`JobOptions`].
    pub options: Choices,
}

impl NewJob {
    /// A job of `kind` in `queue`, with a payload that is already encoded.
    pub fn raw(queue: QueueName, kind: Kind, payload: impl Into<Bytes>) -> Self {
        Self {
            queue,
            kind,
            payload: payload.into(),
            version: FIRST_VERSION,
            headers: Headers::new(),
            delay: Duration::ZERO,
            unique: None,
            exclusive: None,
            options: Choices::default(),
        }
    }

    /// A typed job, encoded as JSON.
    pub fn of<J: Job>(job: &J) -> Result<Self> {
        let payload = encoded(job).map_err(|e| {
            Error::invalid(
                "payload",
                "a value that does not encode",
                "what serde_json can encode",
            )
            .caused_by(e)
        })?;
        let (queue, kind) = if J::IS_NAMED {
            (QueueName::checked(J::QUEUE), Kind::checked(J::KIND))
        } else {
            (QueueName::fixed(J::QUEUE)?, Kind::fixed(J::KIND)?)
        };
        let mut new = Self::raw(queue, kind, payload);
        new.version = J::VERSION;
        new.options = job.options().into();
        Ok(new)
    }

    /// Puts it into another queue.
    pub fn queue(mut self, queue: impl AsRef<str>) -> Result<Self> {
        self.queue = QueueName::new(queue)?;
        Ok(self)
    }

    /// The version of a payload that is already encoded. 1 by default.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Makes it due later.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// The priority: 0, served first, to 7.
    #[must_use]
    pub fn priority(mut self, priority: u8) -> Self {
        self.options.priority = priority;
        self
    }

    /// Refuses a second job with this key while this one lives.
    pub fn unique(mut self, key: impl AsRef<str>) -> Result<Self> {
        self.unique = Some(UniqueKey {
            key: Key::new(key)?,
            window: None,
        });
        Ok(self)
    }

    /// Refuses a second job with this key for `window` from now.
    pub fn unique_for(mut self, key: impl AsRef<str>, window: Duration) -> Result<Self> {
        self.unique = Some(UniqueKey {
            key: Key::new(key)?,
            window: Some(window),
        });
        Ok(self)
    }

    /// Runs the jobs of this key one at a time, in the order in which they fell due.
    pub fn exclusive(mut self, key: impl AsRef<str>) -> Result<Self> {
        self.exclusive = Some(Key::new(key)?);
        Ok(self)
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Replaces the options.
    #[must_use]
    pub fn options(mut self, options: JobOptions) -> Self {
        self.options = options.into();
        self
    }

    /// Keeps the job for this long once it is completed.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.options.retention = Some(retention);
        self
    }

    /// Bytes that count against the limit of a call.
    pub fn weight(&self) -> usize {
        self.payload.len() + header_bytes(&self.headers)
    }

    /// Checks every limit of the contract.
    pub fn validate(&self) -> Result<()> {
        at_most(
            "payload",
            self.payload.len(),
            limits::PAYLOAD_BYTES,
            "bytes",
        )?;
        if self.version < FIRST_VERSION {
            return Err(Error::invalid("version", self.version, "at least 1"));
        }
        at_most("headers", self.headers.len(), limits::HEADERS, "headers")?;
        at_most(
            "headers",
            header_bytes(&self.headers),
            limits::HEADER_BYTES,
            "bytes",
        )?;
        let options = &self.options;
        at_most(
            "priority",
            options.priority.into(),
            limits::PRIORITY_MAX.into(),
            "",
        )?;
        if options.max_expiries < limits::EXPIRIES_MIN {
            let limit = format!("at least {}", limits::EXPIRIES_MIN);
            return Err(Error::invalid("max_expiries", options.max_expiries, limit));
        }
        duration("delay", self.delay)?;
        if let Some(term) = options.term {
            limits::term(term)?;
        }
        options.runs.validate()?;
        for (field, value) in [
            ("max_lifetime", options.max_lifetime),
            (
                "unique window",
                self.unique.as_ref().and_then(|unique| unique.window),
            ),
        ] {
            if let Some(value) = value {
                positive(field, value)?;
            }
        }
        if let Some(retention) = options.retention {
            duration("retention", retention)?;
        }
        Ok(())
    }
}

/// What can be enqueued: a [`Job`], by value or by reference, or a described [`NewJob`], also one
/// whose description may have failed. `M` tells these apart, and is always inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a job",
    label = "neither a `leasehold::Job` nor a `leasehold::NewJob`",
    note = "a job names its kind: `impl leasehold::Job for … {{ const KIND: &'static str = \"…\"; }}`",
    note = "and must be `serde::Serialize + serde::Deserialize`"
)]
pub trait IntoJob<M> {
    /// The job to be stored.
    ///
    /// # Errors
    /// If it cannot be encoded, or its kind or queue is not a valid name.
    fn into_job(self) -> Result<NewJob>;
}

/// How a job was given: see [`IntoJob`].
#[doc(hidden)]
#[derive(Debug)]
pub enum ByValue {}

/// How a job was given: see [`IntoJob`].
#[doc(hidden)]
#[derive(Debug)]
pub enum ByReference {}

/// How a job was given: see [`IntoJob`].
#[doc(hidden)]
#[derive(Debug)]
pub enum Described {}

impl<J: Job> IntoJob<ByValue> for J {
    fn into_job(self) -> Result<NewJob> {
        NewJob::of(&self)
    }
}

impl<J: Job> IntoJob<ByReference> for &J {
    fn into_job(self) -> Result<NewJob> {
        NewJob::of(self)
    }
}

impl IntoJob<Described> for NewJob {
    fn into_job(self) -> Result<NewJob> {
        Ok(self)
    }
}

impl IntoJob<Described> for Result<NewJob> {
    fn into_job(self) -> Result<NewJob> {
        self
    }
}

pub(crate) fn into_jobs<M>(jobs: impl IntoIterator<Item: IntoJob<M>>) -> Result<Vec<NewJob>> {
    jobs.into_iter().map(IntoJob::into_job).collect()
}

/// A job as JSON.
fn encoded<J: Job>(job: &J) -> serde_json::Result<Bytes> {
    serde_json::to_vec(job).map(Bytes::from)
}

fn header_bytes(headers: &Headers) -> usize {
    headers
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum()
}

/// State that a handler saved, bound to the token under which it was saved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedCheckpoint {
    /// The token of the lease that saved it.
    pub token: FencingToken,
    /// The handler's own count.
    pub seq: u64,
    /// The state.
    pub bytes: Bytes,
}

/// One stored job, as a lease hands it to a worker and an inspection shows it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct JobRecord {
    /// Its id.
    pub id: JobId,
    /// Its type.
    pub kind: Kind,
    /// What the handler decodes.
    pub payload: Bytes,
    /// The payload's version: [`Job::VERSION`].
    pub version: u32,
    /// Passed on to the handler.
    pub headers: Headers,
    /// When it was stored.
    pub enqueued_at: Timestamp,
    /// When it last fell due, or will.
    pub run_at: Timestamp,
    /// Its unique key.
    pub unique: Option<Box<UniqueKey>>,
    /// Its exclusive key.
    pub exclusive: Option<Key>,
    /// Its settings: [`JobOptions`].
    pub options: Choices,
    /// Runs that failed.
    pub failures: u32,
    /// Leases that expired.
    pub expiries: u32,
    /// When a worker that cannot work it first declined it. None once a lease ended in another way.
    pub declined_since: Option<Timestamp>,
    /// What the previous run saved.
    pub checkpoint: Option<Box<SavedCheckpoint>>,
    /// The last eight ended leases, oldest first.
    pub history: Vec<EndedLease>,
    /// The result that a completed run left.
    pub result: Option<Bytes>,
}

impl JobRecord {
    /// The record of a job stored at `now`.
    pub fn new(id: JobId, job: NewJob, now: Timestamp) -> Self {
        Self {
            id,
            kind: job.kind,
            payload: job.payload,
            version: job.version,
            headers: job.headers,
            enqueued_at: now,
            run_at: now.after(job.delay),
            unique: job.unique.map(Box::new),
            exclusive: job.exclusive,
            options: job.options,
            failures: 0,
            expiries: 0,
            declined_since: None,
            checkpoint: None,
            history: Vec::new(),
            result: None,
        }
    }

    /// 1 + failures + expiries: for people and retry policy, never a fence.
    pub fn attempt(&self) -> u32 {
        // A stored counter can be any number.
        self.failures
            .saturating_add(self.expiries)
            .saturating_add(1)
    }

    /// A job whose lease has expired twice waits in a line of its own: it may be what kills its
    /// workers.
    pub fn is_suspect(&self) -> bool {
        self.expiries >= Self::SUSPECT
    }

    /// The number of expiries from which on a job is a suspect.
    pub(crate) const SUSPECT: u32 = 2;

    /// Bytes that count against the limit of a grant.
    pub fn weight(&self) -> usize {
        self.payload.len()
            + header_bytes(&self.headers)
            + self
                .checkpoint
                .as_ref()
                .map_or(0, |checkpoint| checkpoint.bytes.len())
            + self.history.iter().map(EndedLease::weight).sum::<usize>()
    }

    /// Remembers how a lease ended, and forgets the oldest of nine.
    pub(crate) fn remember(&mut self, ended: EndedLease) {
        if self.history.len() == limits::HISTORY {
            self.history.remove(0);
        }
        self.history.push(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_is_no_name_is_an_error_by_its_field() {
        #[derive(Serialize, Deserialize)]
        struct Nameless;

        impl Job for Nameless {
            const KIND: &'static str = "no name";
        }

        let error = NewJob::of(&Nameless).unwrap_err();
        assert!(error.to_string().contains("kind"), "{error}");
    }

    #[test]
    fn usual_choices_take_no_room_and_all_others_are_kept() {
        assert_eq!(size_of::<Choices>(), size_of::<usize>());
        let usual = Choices::from(JobOptions::default());
        assert!(usual.0.is_none());
        let mut chosen = usual.clone();
        chosen.priority = 2;
        assert_eq!(*chosen, JobOptions::default().priority(2));
        assert_ne!(chosen, usual);
        // By what they say, however they came to it.
        chosen.priority = JobOptions::DEFAULT_PRIORITY;
        assert!(chosen.0.is_some());
        assert_eq!(chosen, usual);
        let words = format!("{:?}", JobOptions::default());
        assert_eq!(format!("{chosen:?}"), words);
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn a_record_is_four_lines_of_the_cache() {
        // With the two counts of an `Arc`. A queue in memory holds many, and a claim reads each.
        assert!(size_of::<JobRecord>() + 16 <= 256);
    }
}
