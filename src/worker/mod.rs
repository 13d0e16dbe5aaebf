//! Workers: the one place that wires the parts together.
//!
//! ```text
//!            ┌─ claimer ──► buffer ──► slots (run handlers) ──► outbox ──► settler ─┐
//!   store ◄──┤                             ▲ stop                                   │
//!            └─ renewer (own thread) ──────┘                                        │
//!   store ◄─────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Several pools can run in one process; nothing is global.

pub(crate) mod claimer;
mod deaths;
#[doc(hidden)]
pub mod executor;
mod handle;
pub(crate) mod held;
pub(crate) mod lost;
pub(crate) mod outcome;
pub(crate) mod pool;
mod pruner;
mod reaper;
mod renewer;
pub(crate) mod settler;
pub(crate) mod slots;
pub(crate) mod suspects;
mod sync;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::executor::{Executor, OwnThread};
use crate::calls::checkpoint::SaveCheckpoints;
use crate::calls::merge::Merger;
use crate::client::Client;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::handler::{AnyHandler, Handler, Typed};
use crate::job::{Job, Kind, QueueName};
use crate::layer::{Layer, Layered, StateMap};
use crate::lease::LeaseTerms;
use crate::limits::{self, at_most, duration, positive, without_zero};
use crate::observe::metrics::{KindMeter, QueueMeter};
use crate::observe::{Observer, Observers};
use crate::retry::RetryPolicy;
use crate::worker::deaths::{DeathHook, Deaths};
use crate::worker::pool::{Plan, Pool, PoolKind, PoolQueue, part};

pub use self::handle::{DrainReport, QueueStats, WorkerHandle, WorkerHealth, WorkerStats};
pub use crate::observe::Death;

/// One queue that a worker claims from, and what holds for its jobs.
#[derive(Clone, Debug)]
#[must_use]
pub struct QueueConfig {
    name: String,
    slots: Option<usize>,
    weight: f64,
    terms: Option<LeaseTerms>,
    retry: Option<RetryPolicy>,
    max_failures: Option<u32>,
    timeout: Option<Duration>,
    stall_limit: Option<Duration>,
}

impl QueueConfig {
    /// A queue with the worker's settings.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            slots: None,
            weight: 1.0,
            terms: None,
            retry: None,
            max_failures: None,
            timeout: None,
            stall_limit: None,
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

    /// Its lease terms, where a job names none.
    pub fn terms(mut self, terms: LeaseTerms) -> Self {
        self.terms = Some(terms);
        self
    }

    /// The wait between failures, where a job names none.
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = Some(retry);
        self
    }

    /// Failures after which a job is dead, where the job names none. (`max_expiries` is stored with
    /// each job, because the store counts expiries while no worker is there: see
    /// [`JobOptions`](crate::job::JobOptions).)
    pub fn max_failures(mut self, failures: u32) -> Self {
        self.max_failures = Some(failures);
        self
    }

    /// How long one run may take, where a job names nothing.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long a run may go without progress, where a job names nothing.
    pub fn stall_limit(mut self, limit: Duration) -> Self {
        self.stall_limit = Some(limit);
        self
    }
}

/// A worker that is checked, and has not started.
type Prepared = (Arc<Pool>, Arc<dyn Executor>, Option<Deaths>);

/// A kind of job that a worker handles.
struct Handled {
    kind: &'static str,
    /// Where its jobs are.
    queue: String,
    handler: Box<dyn AnyHandler>,
}

/// A worker, described and then run. Made by [`Client::worker`].
///
/// [`run`](Self::run) works until the process is asked to end, [`run_until`](Self::run_until) until
/// a future of yours resolves, and [`start`](Self::start) in the background, with a
/// [`WorkerHandle`] to drain it, to pause it, and to ask how it is.
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
    retry: RetryPolicy,
    max_failures: u32,
    timeout: Option<Duration>,
    stall_limit: Option<Duration>,
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
            retry: RetryPolicy::default(),
            max_failures: 10,
            timeout: None,
            stall_limit: None,
            grace: Duration::from_secs(1),
            drain_grace: Duration::from_secs(20),
            owner: None,
            task: None,
            executor: Arc::new(OwnThread),
        }
    }

    /// Works jobs of type `J` with this handler. One handler per kind.
    pub fn handle<J: Job, H: Handler<J>>(self, handler: H) -> Self {
        self.handle_in(J::QUEUE, handler)
    }

    /// Works jobs of type `J` that are enqueued to another queue than [`Job::QUEUE`].
    pub fn handle_in<J: Job, H: Handler<J>>(
        mut self,
        queue: impl Into<String>,
        handler: H,
    ) -> Self {
        self.handlers.push(Handled {
            kind: J::KIND,
            queue: queue.into(),
            handler: Box::new(Typed::<J, H>::new(handler)),
        });
        self
    }

    /// Wraps every run of every handler. The layer that is added first is the outermost.
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }

    /// Gives all handlers and layers something to share: a connection pool, a configuration. They
    /// find it by its type, with [`Context::state`](crate::Context::state). A second one of the
    /// same type replaces the first.
    pub fn state<T: Send + Sync + 'static>(mut self, state: T) -> Self {
        self.state.insert(state);
        self
    }

    /// Calls this for every job that this worker sees die: buried by its handler or by its retry
    /// policy, or dead because its leases expired too often.
    ///
    /// Whoever finds that a lease has expired sees the death, and that may be another worker: set
    /// the same hook on all workers. A worker that dies right after the store has stored the death
    /// calls nothing, so for what must not be missed look at the dead jobs themselves, too
    /// ([`Client::jobs`]). The calls of a worker run beside its work; a drain waits for them.
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

    /// Claims from this queue. Without any, the queues of the handled jobs are used; once one is
    /// named, only those that are named, and the queue of every handler must be among them.
    pub fn queue(self, name: impl Into<String>) -> Self {
        self.queue_with(QueueConfig::new(name))
    }

    /// Claims from a queue with settings of its own. As [`queue`](Self::queue): name the others,
    /// too.
    pub fn queue_with(mut self, queue: QueueConfig) -> Self {
        self.queues.push(queue);
        self
    }

    /// How many handlers may run at once. 16 by default, at most 100,000.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// How many leases may at most be held ahead of free slots. How many are held follows the pace
    /// of the work; 0 holds none. At most 4,000, which is the default.
    pub fn prefetch(mut self, leases: usize) -> Self {
        self.prefetch = leases;
        self
    }

    /// Lease terms, where neither job nor queue says otherwise. 60 s by default.
    pub fn terms(mut self, terms: LeaseTerms) -> Self {
        self.terms = terms;
        self
    }

    /// The wait between failures, where neither job nor queue says otherwise.
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// Failures after which a job is dead, where neither job nor queue says otherwise. 10 by
    /// default.
    pub fn max_failures(mut self, failures: u32) -> Self {
        self.max_failures = failures;
        self
    }

    /// How long one run may take, where neither job nor queue says otherwise. Unlimited by default:
    /// the lease of a dead worker ends by itself, and a stall limit catches one that hangs.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long a run may go without [`Context::progress`](crate::Context::progress) or a
    /// checkpoint before its lease lapses. Unlimited by default.
    pub fn stall_limit(mut self, limit: Duration) -> Self {
        self.stall_limit = Some(limit);
        self
    }

    /// How long a handler that was told to stop may go on before it is dropped. 1 s by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How long handlers may go on once the worker drains. 20 s by default.
    pub fn drain_grace(mut self, grace: Duration) -> Self {
        self.drain_grace = grace;
        self
    }

    /// Who holds the leases, for people. Host, process and pool by default.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// The run that the leases serve, for people: a deploy, a batch. A new id by default.
    pub fn task(mut self, task: impl Into<String>) -> Self {
        self.task = Some(task.into());
        self
    }

    /// Adds somebody who watches this worker's events.
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
            return Err(Error::invalid("slots", 0, "at least 1").during(Verb::Run));
        }
        at_most("slots", self.slots, limits::SLOTS, "slots")?;
        at_most("prefetch", self.prefetch, limits::PREFETCH, "leases")?;
        if self.handlers.is_empty() {
            return Err(Error::invalid("handlers", "none", "at least 1").during(Verb::Run));
        }
        let queues = self.pool_queues()?;
        let mut kinds: Vec<PoolKind> = Vec::with_capacity(self.handlers.len());
        let layers: Arc<[Arc<dyn Layer>]> = self.layers.into();
        for Handled { kind, handler, .. } in self.handlers {
            let handler = Layered::around(handler, &layers);
            let name = Kind::new(kind)?;
            if kinds.iter().any(|kind| kind.name == name) {
                let found = format!("two for kind {kind:?}");
                return Err(Error::invalid("handlers", found, "one per kind").during(Verb::Run));
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
        duration("grace", self.grace)
            .and_then(|()| duration("drain_grace", self.drain_grace))
            .map_err(|e| e.during(Verb::Run))?;
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
                return Err(Error::invalid("queue", found, "each queue once").during(Verb::Run));
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
            let max_failures = config.max_failures.unwrap_or(self.max_failures);
            if max_failures == 0 {
                return Err(Error::invalid("max_failures", 0, "at least 1"));
            }
            let retry = config.retry.unwrap_or(self.retry);
            retry.validate()?;
            let terms = config.terms.unwrap_or(self.terms);
            terms.validate().map_err(|e| e.during(Verb::Run))?;
            let timeout = config.timeout.or(self.timeout);
            let stall_limit = config.stall_limit.or(self.stall_limit);
            for (field, limit) in [("timeout", timeout), ("stall_limit", stall_limit)] {
                let limit = limit.map_or(Ok(()), |limit| positive(field, limit));
                limit.map_err(|e| e.during(Verb::Run))?;
            }
            if config.slots == Some(0) {
                return Err(Error::invalid("slots", 0, "at least 1").during(Verb::Run));
            }
            queues.push(PoolQueue {
                meter: QueueMeter::new(&name),
                name,
                weight: config.weight,
                terms,
                retry,
                max_failures,
                timeout,
                stall_limit,
                slots: config.slots,
                busy: AtomicU64::new(0),
            });
        }
        let is_claimed = |name: &str| queues.iter().any(|queue| queue.name.as_str() == name);
        for Handled { kind, queue, .. } in &self.handlers {
            if !is_claimed(queue) {
                let found = format!("kind {kind:?} in queue {queue:?}, which is not claimed");
                let allowed = "kinds of the named queues: name this one, too, or say where else the \
                               jobs are with `handle_in`";
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

/// How long after the last handler the store may take to answer.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

async fn run_pool(
    pool: &Arc<Pool>,
    executor: &dyn Executor,
    deaths: Option<Deaths>,
    stop: impl Future<Output = ()> + Send,
) -> Result<DrainReport> {
    // Panics here, where it is seen, if the runtime has no timers: each part would, unseen.
    drop(tokio::time::sleep(Duration::ZERO));
    let own = || Arc::clone(pool);
    let renewer = part(own(), "renewer", renewer::renewer(own()));
    let renewing = executor::start(executor, "leasehold-renew", renewer).map_err(|e| {
        Error::new(ErrorKind::Unavailable, "the renewer's thread did not start")
            .caused_by(e)
            .during(Verb::Run)
    })?;

    let mut slots = JoinSet::new();
    for _ in 0..pool.slots {
        slots.spawn(part(own(), "slot", slots::slot(own())));
    }
    let mut parts = JoinSet::new();
    parts.spawn(part(own(), "settler", settler::settler(own())));
    parts.spawn(part(own(), "reaper", reaper::reaper(own())));
    parts.spawn(part(own(), "pruner", pruner::pruner(own())));
    parts.spawn(part(own(), "meter", measure(own())));
    let mut hooks = JoinSet::new();
    let no_more_deaths = CancellationToken::new();
    if let Some(deaths) = deaths {
        hooks.spawn(part(own(), "on_dead", deaths.call(no_more_deaths.clone())));
    }
    let mut claimers = JoinSet::new();
    claimers.spawn(part(own(), "claimer", claimer::claimer(own())));
    // Whoever drops this future half way takes everything down with it; the leases expire.
    let _ending = Ending(pool);

    tokio::select! {
        biased;
        () = stop => {}
        () = pool.drain.cancelled() => {}
    }
    pool.begin_drain();
    // At once: the answer to a claim may take as long as the drain.
    claimer::give_back(pool);
    let limit = pool.drain_deadline() + pool.grace + SETTLE_LIMIT;
    let drained = tokio::time::timeout_at(limit, async {
        // An unanswered claim is repeated until it is known; what it brings goes back.
        claimers.join_next().await;
        claimer::give_back(pool);
        let mut dropped = tokio::time::interval(Duration::from_millis(50));
        while !slots.is_empty() {
            tokio::select! {
                biased;
                _ = slots.join_next() => {}
                _ = dropped.tick() => {
                    pool.wake_all();
                    if monotonic() > pool.drain_deadline() + pool.grace {
                        break;
                    }
                }
            }
        }
        while pool.board.leases() > 0 && settling(pool) {
            pool.outbox.flush_all();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        no_more_deaths.cancel();
        hooks.join_next().await;
    });
    let _ = drained.await;
    drop(renewing);
    if let Some(error) = pool.failure() {
        tracing::error!(%error, "the worker could not go on");
        return Err(error.duplicate());
    }
    let report = DrainReport {
        finished: pool.finished(),
        unsettled: pool.board.leases(),
    };
    Ok(report)
}

/// Abandons what is left when a pool ends.
struct Ending<'a>(&'a Pool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Whether any lease waits for its verdict.
fn settling(pool: &Pool) -> bool {
    let grants = pool.board.grants();
    grants
        .iter()
        .flat_map(|held| &held.leases)
        .any(|lease| lease.is_handed_in() && !lease.has_ended())
}

/// Measures the utilisation ρ = λ · hold ÷ slots of each queue.
async fn measure(pool: Arc<Pool>) {
    const EVERY: Duration = Duration::from_secs(5);
    loop {
        tokio::time::sleep(EVERY).await;
        let (before, now) = pool.measure();
        let capacity = (now - before) as f64 * pool.slots as f64;
        for (number, queue) in pool.queues.iter().enumerate() {
            // A run of an hour is busy for an hour, not at its end.
            let running = pool.board.running(number, before, now);
            let busy = queue.busy.swap(0, Ordering::Relaxed) + running;
            queue.meter.utilization(busy as f64 / capacity);
        }
        pool.meter
            .slots(pool.busy.load(Ordering::Relaxed), pool.slots);
        pool.meter.held(pool.board.leases());
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

/// Done when the process is asked to end: by Ctrl-C, or by SIGTERM as a supervisor sends it.
pub async fn shutdown_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
