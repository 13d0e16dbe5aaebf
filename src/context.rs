//! What a handler knows about the lease it works under.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::clock::monotonic;
use crate::error::{Result, Verb};
use crate::fence::{Fence, FenceError, Scope};
use crate::handler::Failure;
use crate::job::{IntoJob, JobId, JobRecord, QueueName, SavedCheckpoint, into_jobs};
use crate::lease::{FencingToken, Progress, Receipt};
use crate::limits::{self, at_most};
use crate::observe::Event;
use crate::store::{Checkpoint, Checkpointed, Enqueued};
use crate::worker::held::{HeldGrant, HeldLease, Stop};
use crate::worker::lost;
use crate::worker::pool::Pool;

/// What [`Context::fence`] opens: anything that is a [`Fence`], and a PostgreSQL transaction of any
/// driver. `By` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "a fence cannot be opened in `{Self}`",
    label = "a `Fence`, or a reference to a PostgreSQL transaction",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
pub trait Resource<By>: Sized {
    /// A future of what can read and write.
    type Opening;

    #[doc(hidden)]
    fn open_for(self, ctx: &Context) -> Self::Opening;
}

/// What [`Context::fence`] returns, to be awaited.
pub(crate) type Opening<'f, T> = Pin<Box<dyn Future<Output = Result<T, FenceError>> + Send + 'f>>;

/// A resource that is a [`Fence`] itself.
#[derive(Debug)]
pub struct ItsOwn<'f>(PhantomData<&'f ()>);

impl<'f, F: Fence + 'f> Resource<ItsOwn<'f>> for F {
    type Opening = Opening<'f, F::Opened>;

    fn open_for(self, ctx: &Context) -> Self::Opening {
        let (scope, token) = (ctx.scope(), ctx.token());
        Box::pin(watched(async move { self.open(&scope, token).await }))
    }
}

/// Opens, where a test can freeze it before and after.
pub(crate) async fn watched<T>(
    opening: impl Future<Output = Result<T, FenceError>>,
) -> Result<T, FenceError> {
    #[cfg(feature = "testing")]
    crate::point::await_point().await;
    let opened = opening.await?;
    #[cfg(feature = "testing")]
    {
        crate::point::opened();
        crate::point::await_point().await;
    }
    Ok(opened)
}

/// The lease that a handler works under. Clones are the same lease.
#[derive(Clone)]
pub struct Context {
    pub(crate) held: Arc<HeldGrant>,
    pub(crate) index: usize,
}

impl Context {
    pub(crate) fn new(held: Arc<HeldGrant>, index: usize) -> Self {
        Self { held, index }
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.held.pool
    }

    pub(crate) fn lease(&self) -> &HeldLease {
        &self.held.leases[self.index]
    }

    /// The fencing token: larger than that of any earlier claim. Pass it to whatever you
    /// write to.
    pub fn token(&self) -> FencingToken {
        self.lease().token
    }

    /// The proof of the lease, for settling it from elsewhere. Keep it secret.
    pub fn receipt(&self) -> Receipt {
        self.held.receipt(self.index)
    }

    /// The job, as the store keeps it.
    pub fn job(&self) -> &JobRecord {
        &self.lease().job
    }

    /// The job's id.
    pub fn job_id(&self) -> JobId {
        self.job().id
    }

    /// The job's queue.
    pub fn queue(&self) -> &QueueName {
        &self.held.grant.queue
    }

    /// 1 + failures + expiries. For people; it is not a fence.
    pub fn attempt(&self) -> u32 {
        self.job().attempt()
    }

    /// The worker that holds the lease.
    pub fn owner(&self) -> &str {
        &self.pool().owner
    }

    /// What the worker belongs to: a deploy, a batch.
    pub fn task(&self) -> &str {
        &self.pool().task
    }

    /// A value that the worker's handlers share, found by its type. A function can take it as an
    /// argument instead: [`State`](crate::State).
    ///
    /// # Errors
    /// If the worker was given nothing of that type: [`Worker::state`](crate::Worker::state).
    pub fn state<T: Send + Sync + 'static>(&self) -> Result<&T, Failure> {
        self.pool().state.get().ok_or_else(|| {
            let name = std::any::type_name::<T>();
            let why = format!("no state of type {name}: give it to the worker with `.state(…)`");
            Failure::from(why)
        })
    }

    /// How long the lease can still be relied on, on the monotonic clock. Grows with each renewal.
    pub fn time_left(&self) -> Duration {
        self.held.until().saturating_duration_since(monotonic())
    }

    /// Resolves when the handler should stop: the lease is lost, the job cancelled, or the worker
    /// drains. After the worker's grace the handler is dropped at its current await point.
    pub async fn cancelled(&self) {
        self.lease().stop_signal().token.cancelled().await;
    }

    /// Whether the handler should stop.
    pub fn is_cancelled(&self) -> bool {
        self.lease().stopped().is_some()
    }

    /// Whether the lease is lost: nothing is settled, whatever the handler returns.
    pub fn is_lost(&self) -> bool {
        self.lease().stopped().is_some_and(Stop::is_lost)
    }

    /// Whether the worker is draining.
    pub fn is_draining(&self) -> bool {
        self.lease().stopped() == Some(Stop::Drain)
    }

    /// Reports progress: `done` of `total`, in your own unit. A handler that has a stall limit and
    /// reports nothing for that long loses its lease.
    ///
    /// It reaches the store with the next renewal, at a third of the term: every 20 s by default.
    pub fn progress(&self, done: u64, total: impl Into<Option<u64>>, note: impl Into<String>) {
        let mut note = note.into();
        note.truncate(crate::limits::clip(&note, limits::REASON_BYTES).len());
        let progress = Progress {
            done,
            total: total.into(),
            note,
        };
        self.held.progress(self.index, progress, monotonic());
    }

    /// What the previous run saved, as bytes, with the token under which it was saved.
    pub fn saved_checkpoint(&self) -> Option<&SavedCheckpoint> {
        self.job().checkpoint.as_deref()
    }

    /// What the previous run saved by [`save_checkpoint`](Self::save_checkpoint). It does not
    /// change when this run saves.
    ///
    /// # Errors
    /// If it cannot be decoded as `T`.
    pub fn last_checkpoint<T: DeserializeOwned>(&self) -> Result<Option<T>, Failure> {
        let Some(saved) = self.saved_checkpoint() else {
            return Ok(None);
        };
        let state = serde_json::from_slice(&saved.bytes)
            .map_err(|e| Failure::from(format!("undecodable checkpoint {}: {e}", saved.seq)))?;
        Ok(Some(state))
    }

    /// Saves state under the lease, encoded as JSON: the next run starts from it. Counts as
    /// progress.
    ///
    /// # Errors
    /// If the lease is lost; `?` then ends the handler. Nothing was saved.
    pub async fn save_checkpoint<T: Serialize + Sync>(&self, state: &T) -> Result<(), Failure> {
        let bytes = serde_json::to_vec(state)?;
        at_most("checkpoint", bytes.len(), limits::CHECKPOINT_BYTES, "bytes")?;
        let weight = bytes.len();
        let seq = self.lease().next_seq();
        let receipt = self.receipt();
        let checkpoint = Checkpoint {
            receipt,
            seq,
            bytes: bytes.into(),
        };
        let answers = self
            .pool()
            .checkpoints
            .submit(vec![checkpoint], weight)
            .await?;
        match answers.first() {
            Some(Checkpointed::Saved { cancel, .. }) => {
                self.was_saved(seq, *cancel);
                Ok(())
            }
            // A later one of this handler's own got there first.
            Some(Checkpointed::Behind { .. }) => Ok(()),
            Some(Checkpointed::Fenced) | None => Err(self.refused(Verb::Checkpoint)),
        }
    }

    /// A checkpoint is in the store.
    pub(crate) fn was_saved(&self, seq: u64, cancel: bool) {
        if cancel {
            self.lease().stop(Stop::Cancel);
        }
        self.held.touch(self.index, monotonic());
        let (queue, job, token) = (self.queue(), self.job_id(), self.token());
        self.pool().observers.emit(|| Event::Checkpointed {
            queue,
            job,
            token,
            seq,
        });
    }

    /// The store refused a call of the handler: the lease belongs to another holder.
    pub(crate) fn refused(&self, verb: Verb) -> Failure {
        lost::call_refused(self.pool(), &self.held, self.index, verb)
    }

    /// The scope under which this lease is fenced: the job's exclusive key if it has one, else the
    /// job alone.
    pub fn scope(&self) -> Scope {
        let (namespace, job) = (self.pool().store().namespace(), self.job());
        match &job.exclusive {
            Some(key) => Scope::of_key(&namespace, self.queue(), key),
            None => Scope::of_job(&namespace, self.queue(), job.id),
        }
    }

    /// Adds this lease's scope and token to the headers of an HTTP request, and the operation if it
    /// has a name. The server checks them with a [`FenceLayer`](crate::fence::http::FenceLayer).
    ///
    /// # Errors
    /// If the operation's name is too long.
    #[cfg(feature = "http")]
    pub fn stamp(&self, headers: &mut ::http::HeaderMap, operation: Option<&str>) -> Result<()> {
        crate::fence::http::stamp(headers, &self.scope(), self.token(), operation)
    }

    /// Opens a resource under this lease's [scope](Self::scope) and token: from here on it refuses
    /// every earlier owner. Open it before you read from it; what is returned reads and writes.
    ///
    /// # Errors
    /// To be returned by `?`. It ends the handler as lost if the resource has been opened for a
    /// later owner, and as a failure if the resource could not be reached.
    pub fn fence<R: Resource<By>, By>(&self, resource: R) -> R::Opening {
        resource.open_for(self)
    }

    /// Leaves a result with the job, if it has a retention. The last call wins.
    ///
    /// # Errors
    /// If it cannot be encoded, or is larger than a payload may be.
    pub fn set_result<T: Serialize>(&self, result: &T) -> Result<(), Failure> {
        let bytes = Bytes::from(serde_json::to_vec(result)?);
        at_most("result", bytes.len(), limits::CHECKPOINT_BYTES, "bytes")?;
        self.lease().set_result(bytes);
        Ok(())
    }

    /// Enqueues another job, given by value or by reference, or described as a
    /// [`NewJob`](crate::NewJob).
    ///
    /// It is stored whether or not this handler then completes; give it a unique key if a second
    /// run must not enqueue it again.
    ///
    /// # Errors
    /// As [`Client::enqueue`](crate::Client::enqueue).
    pub fn enqueue<M>(
        &self,
        job: impl IntoJob<M>,
    ) -> impl Future<Output = Result<Enqueued>> + Send {
        self.pool().enqueuer.enqueue_one(job.into_job())
    }

    /// Enqueues up to 10,000 other jobs: for each queue, all of them or none.
    ///
    /// # Errors
    /// As [`Client::enqueue`](crate::Client::enqueue).
    pub fn enqueue_many<M>(
        &self,
        jobs: impl IntoIterator<Item: IntoJob<M>>,
    ) -> impl Future<Output = Result<Vec<Enqueued>>> + Send {
        self.pool().enqueuer.enqueue_many(into_jobs(jobs))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("queue", self.queue())
            .field("job", &self.job_id())
            .field("token", &self.token())
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}
