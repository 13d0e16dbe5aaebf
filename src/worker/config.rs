//! Describing a worker: its handlers, queues and settings. Settings that cannot work are refused
//! before anything runs.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::deaths::{DeathHook, Deaths};
use super::executor::{Executor, OwnThread};
use super::pool::{Plan, Pool, PoolKind, PoolQueue};
use super::{Death, DrainReport, WorkerHandle, run_pool, shutdown_signal};
use crate::calls::checkpoint::SaveCheckpoints;
use crate::calls::merge::Merger;
use crate::client::Client;
use crate::error::{Error, Result, Verb};
use crate::handler::{AnyHandler, Handler, IntoHandler, Typed};
use crate::job::{Job, Kind, QueueName, RunSettings};
use crate::layer::{Layer, Layered};
use crate::lease::LeaseTerms;
use crate::limits::{self, at_most, duration, without_zero};
use crate::observe::metrics::{KindMeter, QueueMeter};
use crate::observe::{Observer, Observers};
use crate::settings::run_setters;
use crate::state::{StateMap, StateType};

/// One queue that a worker claims from, and the settings for its jobs.
#[derive(Clone, Debug)]
#[must_use]
pub struct QueueConfig {
    name: String,
    slots: Option<usize>,
    weight: f64,
    terms: Option<LeaseTerms>,
    runs: RunSettings,
    decode_grace: Option<Duration>,
}

impl QueueConfig {
    /// A queue with the worker's settings.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            slots: None,
            weight: 1.0,
            terms: None,
            runs: RunSettings::default(),
            decode_grace: None,
        }
    }

    /// How many of its handlers may run at once in this worker, so that a queue whose handlers are
    /// stuck leaves the other slots to the other queues. Its leases are claimed one by one as its
    /// slots become free, none ahead. By default it may use all slots of the worker.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Its share of the claims, relative to the worker's other queues. 1 by default.
    pub fn weight(mut self, weight: f64) -> Self {
        self.weight = weight;
        self
    }

    /// Its lease terms, where a job sets none of its own.
    pub fn terms(mut self, terms: LeaseTerms) -> Self {
        self.terms = Some(terms);
        self
    }

    /// For how long a payload that cannot be decoded is left to others: see
    /// [`Worker::decode_grace`].
    pub fn decode_grace(mut self, grace: Duration) -> Self {
        self.decode_grace = Some(grace);
        self
    }

    run_setters!();
}

/// A worker that is checked, and has not started.
type Prepared = (Arc<Pool>, Arc<dyn Executor>, Option<Deaths>);

/// A kind of job that a worker handles.
struct Handled {
    kind: &'static str,
    /// Where its jobs are.
    queue: String,
    /// What it takes of the worker's shared state.
    needs: Vec<StateType>,
    handler: Box<dyn AnyHandler>,
}

/// A worker, described and then run. Made by [`Client::worker`].
///
/// [`run`](Self::run) works until the process is asked to end, [`run_until`](Self::run_until) until
/// a future of yours resolves, and [`start`](Self::start) in the background, with a
/// [`WorkerHandle`] to drain it, to pause it, and to check its health.
#[must_use = "a worker does nothing until it is run"]
pub struct Worker {
    client: Client,
    handlers: Vec<Handled>,
    layers: Vec<Arc<dyn Layer>>,
    state: StateMap,
    death_hooks: Vec<DeathHook>,
    queues: Vec<QueueConfig>,
    slots: usize,
    prefetch: usize,
    terms: LeaseTerms,
    runs: RunSettings,
    decode_grace: Duration,
    grace: Duration,
    drain_grace: Duration,
    owner: Option<String>,
    task: Option<String>,
    observers: Observers,
    executor: Arc<dyn Executor>,
}

impl Worker {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            observers: client.observers.clone(),
            client,
            handlers: Vec::new(),
            layers: Vec::new(),
            state: StateMap::default(),
            death_hooks: Vec::new(),
            queues: Vec::new(),
            slots: 16,
            prefetch: limits::PREFETCH,
            terms: LeaseTerms::default(),
            runs: RunSettings::default(),
            decode_grace: Duration::from_secs(600),
            grace: Duration::from_secs(1),
            drain_grace: Duration::from_secs(25),
            owner: None,
            task: None,
            executor: Arc::new(OwnThread),
        }
    }

    /// Works jobs of type `J` with this handler: a plain `async fn`, or a type that implements
    /// [`Handler`]. One handler per kind.
    pub fn handle<J: Job, M>(self, handler: impl IntoHandler<J, M, Handler: Handler<J>>) -> Self {
        self.handle_in(J::QUEUE, handler)
    }

    /// Works jobs of type `J` that are enqueued to another queue than [`Job::QUEUE`].
    pub fn handle_in<J: Job, M>(
        mut self,
        queue: impl Into<String>,
        handler: impl IntoHandler<J, M, Handler: Handler<J>>,
    ) -> Self {
        const { assert!(J::VERSION > 0, "versions of a payload count from 1") };
        let handler = handler.into_handler();
        self.handlers.push(Handled {
            kind: J::KIND,
            queue: queue.into(),
            needs: handler.needs(),
            handler: Box::new(Typed::<J, _>::new(handler)),
        });
        self
    }

    /// Wraps every run of every handler. The layer that is added first is the outermost.
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }

    /// Gives all handlers and layers something to share: a connection pool, a configuration. A
    /// function takes it as an argument, [`State`](crate::State); other handlers and layers look it
    /// up by its type with [`Context::state`](crate::Context::state). A second one of the same type
    /// replaces the first.
    pub fn state<T: Send + Sync + 'static>(mut self, state: T) -> Self {
        self.state.insert(state);
        self
    }

    /// Calls this for every job that this worker sees die: buried by its handler or by its retry
    /// policy, or dead because its leases expired too often.
    ///
    /// The worker that finds an expired lease sees the death, and that may be another one: set the
    /// same hook on all workers. A worker that dies right after the store recorded the death calls
    /// nothing, so if none may be missed, also look at the dead jobs themselves
    /// ([`Client::jobs`]). Hooks run alongside the worker's other work; a drain waits for them,
    /// within its grace.
    ///
    /// ```
    /// # use leasehold::{Client, Context, Failure};
    /// # async fn example(client: Client) {
    /// let worker = client.worker().on_dead(|death| async move {
    ///     eprintln!("{} {} is dead: {}", death.kind, death.job, death.reason);
    /// });
    /// # }
    /// ```
    pub fn on_dead<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(Death) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        self.death_hooks
            .push(Box::new(move |death| Box::pin(hook(death))));
        self
    }

    /// Claims from this queue. If no queue is named, the worker serves the queues of its handlers'
    /// job types. Naming one replaces that default, and the queue of every handler must be named.
    pub fn queue(self, name: impl Into<String>) -> Self {
        self.queue_with(QueueConfig::new(name))
    }

    /// Claims from a queue with settings of its own. As with [`queue`](Self::queue), name the other
    /// queues too.
    pub fn queue_with(mut self, queue: QueueConfig) -> Self {
        self.queues.push(queue);
        self
    }

    /// How many handlers may run at once. 16 by default, at most 100,000.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// The most leases to hold ahead of free slots; how many are really held follows the pace of
    /// the work. 0 holds none. At most 4,000, which is the default.
    pub fn prefetch(mut self, leases: usize) -> Self {
        self.prefetch = leases;
        self
    }

    /// Lease terms, where neither the job nor its queue sets others. 60 s by default.
    pub fn terms(mut self, terms: LeaseTerms) -> Self {
        self.terms = terms;
        self
    }

    run_setters!();

    /// For how long a payload that cannot be decoded is left to others, as in a rolling deploy:
    /// this worker declines the job, and nothing is counted. A job that has been declined for this
    /// long is dead, with the decoder's error as its reason. 10 minutes by default; with zero it is
    /// dead at once.
    pub fn decode_grace(mut self, grace: Duration) -> Self {
        self.decode_grace = grace;
        self
    }

    /// How long a handler that was told to stop may go on before it is dropped. 1 s by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How long a drain may take in all, whatever the store does: from the signal to the end of the
    /// worker. Handlers may go on until a quarter of it is left, or 5 s if that is less. What has
    /// not ended by then is dropped, and handed back in the time that is left.
    ///
    /// 25 s by default, which fits into the 30 s that Kubernetes gives a pod. Keep it below the
    /// time that your supervisor waits before it kills the process.
    pub fn drain_grace(mut self, grace: Duration) -> Self {
        self.drain_grace = grace;
        self
    }

    /// Who holds the leases, for people to read. Host, process and pool by default.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// What the worker belongs to, for people to read: a deploy, a batch. A new id by default.
    pub fn task(mut self, task: impl Into<String>) -> Self {
        self.task = Some(task.into());
        self
    }

    /// Adds an observer of this worker's events.
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observers = self.observers.with(Arc::new(observer));
        self
    }

    /// Where the renewer runs. A thread of its own by default.
    #[doc(hidden)]
    pub fn executor(mut self, executor: impl Executor) -> Self {
        self.executor = Arc::new(executor);
        self
    }

    /// Works until SIGTERM or Ctrl-C, then drains.
    ///
    /// # Errors
    /// As [`run_until`](Self::run_until).
    pub async fn run(self) -> Result<DrainReport> {
        self.run_until(shutdown_signal()).await
    }

    /// Works until `stop` resolves, then drains: claims no more, hands back what has not started,
    /// lets handlers end, drops what has not ended after the grace and hands it back too.
    ///
    /// A surrendered job has a gap until its next owner, never two owners at once.
    ///
    /// # Errors
    /// If the worker cannot start: a typed error that names the setting to change, or the store's.
    /// `Unexpected` if a part of it panicked (a store, a metrics recorder, a `tracing` subscriber):
    /// it has drained then, as far as it could.
    ///
    /// # Panics
    /// If the runtime has no timers (`enable_time`).
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send) -> Result<DrainReport> {
        let (pool, executor, deaths) = self.prepare()?;
        run_pool(&pool, &*executor, deaths, stop).await
    }

    /// Works in the background, in tasks of the current runtime, until its handle is told to
    /// [drain](WorkerHandle::drain).
    ///
    /// # Errors
    /// If the worker cannot start: a typed error that names the setting to change.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn start(self) -> Result<WorkerHandle> {
        let (pool, executor, deaths) = self.prepare()?;
        let own = Arc::clone(&pool);
        let worker =
            async move { run_pool(&own, &*executor, deaths, std::future::pending()).await };
        Ok(WorkerHandle::spawn(pool, worker))
    }

    /// Checks the description, and makes of it what runs.
    fn prepare(mut self) -> Result<Prepared> {
        let executor = Arc::clone(&self.executor);
        let deaths = Deaths::told_to(std::mem::take(&mut self.death_hooks));
        if let Some(deaths) = &deaths {
            self.observers = self.observers.with(deaths.observer());
        }
        let pool = self.build().map_err(|e| e.during(Verb::Run))?;
        Ok((pool, executor, deaths))
    }

    pub(crate) fn build(self) -> Result<Arc<Pool>> {
        if self.slots == 0 {
            return Err(Error::invalid("slots", 0, "at least 1"));
        }
        at_most("slots", self.slots, limits::SLOTS, "slots")?;
        at_most("prefetch", self.prefetch, limits::PREFETCH, "leases")?;
        if self.handlers.is_empty() {
            return Err(Error::invalid("handlers", "none", "at least 1"));
        }
        let queues = self.pool_queues()?;
        let mut kinds: Vec<PoolKind> = Vec::with_capacity(self.handlers.len());
        let layers: Arc<[Arc<dyn Layer>]> = self.layers.into();
        for Handled {
            kind,
            needs,
            handler,
            ..
        } in self.handlers
        {
            if let Some(missing) = needs.into_iter().find(|needed| !self.state.has(*needed)) {
                let name = missing.name;
                let found = format!("no {name}, which the handler of {kind:?} takes");
                let allowed = "a worker with every state that its handlers take: add `.state(…)`";
                return Err(Error::invalid("state", found, allowed));
            }
            let handler = Layered::around(handler, &layers);
            let name = Kind::new(kind)?;
            if kinds.iter().any(|kind| kind.name == name) {
                let found = format!("two for kind {kind:?}");
                return Err(Error::invalid("handlers", found, "one per kind"));
            }
            let meters = queues
                .iter()
                .map(|queue| KindMeter::new(&queue.name, kind))
                .collect();
            kinds.push(PoolKind {
                name,
                handler,
                meters,
            });
        }
        let owner: Arc<str> = self.owner.unwrap_or_else(default_owner).into();
        let task: Arc<str> = self
            .task
            .unwrap_or_else(|| format!("run-{}", crate::JobId::generate()))
            .into();
        for (field, name) in [("owner", &owner), ("task", &task)] {
            if !(1..=limits::OWNER_BYTES).contains(&name.len()) {
                let found = format!("{} bytes", name.len());
                let allowed = format!("1 to {} bytes", limits::OWNER_BYTES);
                return Err(Error::invalid(field, found, allowed));
            }
            without_zero(field, name)?;
        }
        duration("grace", self.grace)?;
        duration("drain_grace", self.drain_grace)?;
        let plan = Plan {
            owner,
            task,
            queues,
            kinds,
            slots: self.slots,
            prefetch: self.prefetch,
            grace: self.grace,
            drain_grace: self.drain_grace,
            observers: self.observers,
            state: self.state,
        };
        let session = Arc::clone(self.client.enqueuer.session());
        let checkpoints = Merger::new(SaveCheckpoints, session);
        Ok(Pool::new(
            plan,
            self.client.enqueuer,
            checkpoints,
            self.client.suspects,
        ))
    }

    fn pool_queues(&self) -> Result<Vec<PoolQueue>> {
        let mut configs = self.queues.clone();
        if configs.is_empty() {
            for Handled { queue, .. } in &self.handlers {
                if !configs.iter().any(|config| config.name == *queue) {
                    configs.push(QueueConfig::new(queue));
                }
            }
        }
        at_most("queues", configs.len(), limits::QUEUES, "queues")?;
        let mut queues: Vec<PoolQueue> = Vec::with_capacity(configs.len());
        for config in configs {
            let name = QueueName::new(&config.name)?;
            if queues.iter().any(|queue| queue.name == name) {
                let found = format!("{name:?} twice");
                return Err(Error::invalid("queue", found, "each queue once"));
            }
            if !(config.weight.is_finite() && config.weight > 0.0) {
                return Err(Error::invalid("weight", config.weight, "a number above 0"));
            }
            if let Some(slots) = config.slots
                && !(1..=self.slots).contains(&slots)
            {
                let found = format!("{slots} for queue {name:?}");
                let allowed = format!("1 to the worker's {}", self.slots);
                return Err(Error::invalid("slots", found, allowed));
            }
            let terms = config.terms.unwrap_or(self.terms);
            terms.validate()?;
            let runs = config.runs.or(self.runs);
            runs.validate()?;
            let decode_grace = config.decode_grace.unwrap_or(self.decode_grace);
            duration("decode_grace", decode_grace)?;
            queues.push(PoolQueue {
                busy: AtomicU64::new(0),
                meter: QueueMeter::new(&name),
                name,
                weight: config.weight,
                terms,
                runs,
                slots: config.slots,
                decode_grace,
            });
        }
        let is_claimed = |name: &str| queues.iter().any(|queue| queue.name.as_str() == name);
        for Handled { kind, queue, .. } in &self.handlers {
            if !is_claimed(queue) {
                let found = format!("kind {kind:?} in queue {queue:?}, which is not claimed");
                let allowed = "handlers of claimed queues: claim this one too, or name the queue of \
                               the jobs with `handle_in`";
                return Err(Error::invalid("handlers", found, allowed));
            }
        }
        Ok(queues)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds: Vec<_> = self.handlers.iter().map(|handled| handled.kind).collect();
        f.debug_struct("Worker")
            .field("kinds", &kinds)
            .field("queues", &self.queues)
            .field("slots", &self.slots)
            .field("terms", &self.terms)
            .finish_non_exhaustive()
    }
}

fn default_owner() -> String {
    static POOLS: AtomicU64 = AtomicU64::new(1);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = host
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_default();
    let host = crate::limits::clip(host.trim(), 64);
    let host = if host.is_empty() { "host" } else { host };
    let pool = POOLS.fetch_add(1, Ordering::Relaxed);
    format!("{host}/{}/{pool}", std::process::id())
}
