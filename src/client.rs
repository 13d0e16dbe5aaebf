//! The entry point: open a store, enqueue jobs, start workers, inspect and intervene.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tracing::Instrument as _;

use crate::calls::enqueue::Enqueuer;
use crate::calls::lane::Answer;
use crate::calls::session::Session;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::inspect::{
    self, AuditView, JobView, LeaseFilter, LeaseView, Ledger, Page, Paged, ParkedView, QueueView,
};
use crate::job::{IntoJob, JobId, JobState, QueueName, into_jobs};
use crate::observe::{Event, Observer, Observers};
use crate::operator::Operator;
use crate::store::open::open;
use crate::store::{ControlCommand, ControlRequest, Controlled, Enqueued, Store};
use crate::worker::Worker;
use crate::worker::suspects::SuspectGate;

/// How long an operator's command is repeated before the result is called unknown.
const CONTROL_LIMIT: Duration = Duration::from_secs(30);

/// A handle to a store. Clones share it.
///
/// ```
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)] struct Greet { name: String }
/// # impl leasehold::Job for Greet { const KIND: &'static str = "greet"; }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let client = leasehold::Client::open("memory:").await?;
/// client.enqueue(&Greet { name: "world".into() }).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) enqueuer: Enqueuer,
    pub(crate) suspects: Arc<SuspectGate>,
    pub(crate) observers: Observers,
}

impl Client {
    /// Opens the store that a URL names: `memory:`, `sqlite://jobs.db` (relative),
    /// `sqlite:///var/lib/app/jobs.db` (absolute), `postgres://user:password@host/database`.
    /// `?namespace=NAME` selects one application's part of it. `&synchronous=normal` is faster, and
    /// a power cut may then lose the last moments. Each `memory:` is a store of its own; clones of
    /// the client share it. `redis://`, `rediss://`, `redis+cluster://` and `redis+sentinel://`
    /// take `namespace` and `partitions=N`. With `clock=strict` a durable store refuses claims
    /// after its clock was set back, until it has caught up.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that names no store of this build, or any error from opening it.
    pub async fn open(url: &str) -> Result<Self> {
        Ok(Self::new(open(url).await?))
    }

    /// A client for a store that is already open.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with_observers(Session::new(store), Observers::default())
    }

    fn with_observers(session: Arc<Session>, observers: Observers) -> Self {
        let enqueuer = Enqueuer::new(session, observers.clone());
        Self {
            enqueuer,
            suspects: Arc::default(),
            observers,
        }
    }

    /// Adds an observer of the events of this client and of the workers made from it.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        let observers = self.observers.with(Arc::new(observer));
        let enqueuer = Enqueuer::new(Arc::clone(self.session()), observers.clone());
        Self {
            enqueuer,
            suspects: self.suspects,
            observers,
        }
    }

    fn session(&self) -> &Arc<Session> {
        self.enqueuer.session()
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.session().store
    }

    /// Stores a job, given by value or by reference, or described as a
    /// [`NewJob`](crate::NewJob). Concurrent calls share one round trip.
    ///
    /// Once polled, the call goes on without its caller. Dropping the future, as a `timeout` does,
    /// does not take the job back: it is stored anyway, unless the store cannot be reached.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use leasehold::{Client, NewJob};
    /// # #[derive(serde::Serialize, serde::Deserialize)] struct Greet { name: String }
    /// # impl leasehold::Job for Greet { const KIND: &'static str = "greet"; }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> leasehold::Result<()> {
    /// # let client = Client::open("memory:").await?;
    /// let greet = Greet { name: "world".into() };
    /// client.enqueue(&greet).await?;
    /// let later = NewJob::of(&greet)?.delay(Duration::from_secs(60)).unique("world")?;
    /// client.enqueue(later).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` names the field and the limit; nothing is stored. `Unknown`: it may or may
    /// not have been stored; use a unique key if storing it twice would be wrong.
    pub fn enqueue<M>(
        &self,
        job: impl IntoJob<M>,
    ) -> impl Future<Output = Result<Enqueued>> + Send {
        self.enqueuer.enqueue_one(job.into_job())
    }

    /// Stores up to 10,000 jobs: for each queue, all of them or none. One answer per job, in order.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn enqueue_many<M>(
        &self,
        jobs: impl IntoIterator<Item: IntoJob<M>>,
    ) -> impl Future<Output = Result<Vec<Enqueued>>> + Send {
        self.enqueuer.enqueue_many(into_jobs(jobs))
    }

    /// A new worker, to be described and then run.
    pub fn worker(&self) -> Worker {
        Worker::new(self.clone())
    }

    /// An operator with this name, who can pause queues, cancel jobs and end leases.
    pub fn operator(&self, actor: impl Into<String>) -> Operator {
        Operator::new(self.clone(), actor.into())
    }

    pub(crate) async fn control(
        &self,
        command: ControlCommand,
        actor: &str,
        reason: &str,
    ) -> Result<Controlled> {
        let mut lane = self.session().lane();
        let answer = lane
            .call(CONTROL_LIMIT, |store, request| {
                let request = ControlRequest {
                    request,
                    actor: actor.to_owned(),
                    reason: reason.to_owned(),
                    command: command.clone(),
                };
                let span = tracing::debug_span!("store.control", command = command.as_str());
                async move { store.control(request).await }.instrument(span)
            })
            .await;
        let unknown = || {
            Error::new(
                ErrorKind::Unknown,
                "the command may or may not have been carried out",
            )
        };
        match answer {
            Answer::Known(done) => {
                let command = command.as_str();
                self.observers.emit(|| Event::Controlled {
                    command,
                    actor,
                    done: &done,
                });
                Ok(done)
            }
            Answer::Refused(error) => Err(error),
            Answer::Lost => Err(unknown().during(Verb::Control)),
            Answer::GaveUp(error) => Err(unknown().during(Verb::Control).caused_by(error)),
        }
    }

    /// All queues, with their counts and ledgers.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn queues(&self) -> Result<Vec<QueueView>> {
        inspect::queues(&**self.store()).await
    }

    /// One queue, with its counts and ledger. `None` if nothing was ever enqueued there.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn queue(&self, name: &QueueName) -> Result<Option<QueueView>> {
        inspect::queue(&**self.store(), name).await
    }

    /// The ledger of all queues together.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn ledger(&self) -> Result<Ledger> {
        inspect::ledger(&**self.store()).await
    }

    /// A page of the live leases, by deadline.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn leases(&self, filter: LeaseFilter, page: Page) -> Result<Paged<LeaseView>> {
        inspect::leases(&**self.store(), filter, page).await
    }

    /// A page of a queue's jobs in one state.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn jobs(
        &self,
        queue: QueueName,
        state: JobState,
        page: Page,
    ) -> Result<Paged<JobView>> {
        inspect::jobs(&**self.store(), queue, state, page).await
    }

    /// A page of the exclusive keys that jobs of a queue are parked behind.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn parked(&self, queue: QueueName, page: Page) -> Result<Paged<ParkedView>> {
        inspect::parked(&**self.store(), queue, page).await
    }

    /// A page of the commands on record, newest first.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn audit(&self, page: Page) -> Result<Paged<AuditView>> {
        inspect::audit(&**self.store(), page).await
    }

    /// The result that a completed job left by
    /// [`Context::set_result`](crate::Context::set_result). `None` if the job is not completed,
    /// left no result, or is no longer retained.
    ///
    /// # Errors
    /// As [`Store::inspect`]; `InvalidInput` if it cannot be decoded as `T`.
    pub async fn result<T: DeserializeOwned>(&self, id: JobId) -> Result<Option<T>> {
        let job = self.job(id).await?;
        let Some(bytes) = job.and_then(|view| view.job.result.clone()) else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| {
            let found = format!("{} bytes of another shape", bytes.len());
            Error::invalid("result", found, "what the type decodes").caused_by(e)
        })
    }

    /// One job, if the store still has it. A completed job without retention is gone.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn job(&self, id: JobId) -> Result<Option<Box<JobView>>> {
        inspect::job(&**self.store(), id).await
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("store", &self.store().name())
            .finish_non_exhaustive()
    }
}
