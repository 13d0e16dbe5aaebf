//! The store beside the user's data: many machines, one transaction with what a job changes.
//!
//! Every call is one statement, on any connection of a pool: a function of the schema, which
//! anybody can call. The verbs are files: `claim.sql` holds the function and `claim.rs` its caller.
//! Nothing is kept in a session of the server, so that a pooler in transaction mode may stand
//! between.
//!
//! **Locks.** A claim holds the row of its queue; claims of other queues do not meet it. Enqueue,
//! renew and settle do not need that row: they hold the rows of their jobs, grants and keys. Counts
//! are appended (`tally.rs`). Where lines start, and why no open transaction of others matters, is
//! in `place.sql`.
//!
//! **Tokens** stay monotonic when the server is replaced by a lagging standby or by an old backup:
//! such a server has an old `last`, but its clock has moved on, and a token is never below the
//! clock. The old server gave none more than 20 ms above *its* clock, so that a replacement that
//! took longer than that, on a clock that is not behind by more, starts above all of them. A queue
//! whose row is missing altogether is made with a floor 20 ms above the clock.
//!
//! **Durability** is the server's: with `synchronous_commit` on, an answered call survives its
//! crash.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{
    Manager, ManagerConfig, Object, Pool, PoolError, QueueMode, RecyclingMethod, Runtime,
    TimeoutType,
};
use tokio_postgres::{Client, Config};
use uuid::Uuid;

use self::dial::{Dial, Trust};
use self::fault::{Done, Fault, explain};
use self::listen::{Listener, Look};
use self::nothing::Nothing;
use self::text::Statements;
use self::tx::{Named, Tx};
use super::wake::Wakers;
use super::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, RequestId, SessionId,
    SettleRequest, Store, bounded,
};
use crate::clock::{Clock, monotonic};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::inspect::{Query, View};
use crate::job::{Namespace, QueueName};
use crate::lease::Verdict;
use crate::limits;
use crate::rules::issue::WhenBehind;

#[cfg(feature = "doctor")]
#[allow(missing_debug_implementations, reason = "hidden: for the command")]
pub(crate) mod bare;
mod checkpoint;
mod claim;
mod control;
mod dial;
#[cfg(feature = "doctor")]
pub(crate) mod doctor;
mod enqueue;
mod fault;
mod inspect;
mod listen;
mod migrate;
mod nothing;
mod prune;
mod reap;
mod record;
mod remove;
mod renew;
mod session;
mod settle;
mod tally;
mod text;
mod tx;
mod url;
mod within;

/// How often a call is done again that the server rolled back for the sake of another.
const TRIES: u32 = 12;
/// A lost wake-up costs at most this.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a process with nothing to do goes without a claim. Wake-ups and looks find what there
/// is.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// The first look after one that met somebody who was putting jobs there: doubles up to the other.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// Of a call where the role has another default. A transaction that others wait for ends soon,
/// whatever happens to this process.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
    SET LOCAL idle_in_transaction_session_timeout = '10s'";
/// How long a server may take to let somebody in. One that is frozen takes for ever.
const CONNECT_LIMIT: Duration = Duration::from_secs(8);
/// Connections of the handle that only renews.
const DEDICATED: usize = 2;

/// How a database is used.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    namespace: Namespace,
    schema: String,
    connections: usize,
    patience: Duration,
    migrates: Migrates,
    trust: Trust,
    clock: Option<Arc<dyn Clock>>,
    when_behind: WhenBehind,
}

impl PostgresOptions {
    /// The default namespace in the schema `leasehold`, 8 connections, on the server's clock.
    pub fn new() -> Self {
        Self {
            namespace: Namespace::default(),
            schema: "leasehold".into(),
            connections: 8,
            patience: Duration::from_secs(5),
            migrates: Migrates::OnFirstWrite,
            trust: Trust::Anybody,
            clock: None,
            when_behind: WhenBehind::GoOn,
        }
    }

    /// The application's share of the schema. Two namespaces never see each other.
    #[must_use]
    pub fn namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// The schema of the tables.
    ///
    /// # Errors
    /// `InvalidInput` unless it is 1 to 48 of `a-z`, `0-9` and `_`, and no digit comes first.
    pub fn schema(mut self, schema: impl Into<String>) -> Result<Self> {
        let schema = schema.into();
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let digit = schema.starts_with(|c: char| c.is_ascii_digit());
        if schema.is_empty() || schema.len() > 48 || digit || !schema.chars().all(good) {
            let allowed = "1 to 48 of a-z, 0-9 and _, not a digit first";
            let got = crate::limits::clip(&schema, 64).to_owned();
            return Err(Error::invalid("schema", format!("{got:?}"), allowed));
        }
        self.schema = schema;
        Ok(self)
    }

    /// How many connections at most. 8 unless changed; one more listens.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections.max(1);
        self
    }

    /// Refuses claims while the clock is behind the tokens given, and so protects against a loss of
    /// data in that time, too. Unless set, claims go on. In a URL: `clock=strict`.
    #[must_use]
    pub fn strict_clock(mut self) -> Self {
        self.when_behind = WhenBehind::Refuse;
        self
    }

    /// How long a call waits for another transaction's lock before it answers
    /// [`Contended`](ErrorKind::Contended). 5 s unless changed.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Makes the tables, or brings them up to date, when the store is opened. In a URL:
    /// `migrate=true`.
    ///
    /// Unless set, opening changes nothing: the first call that writes makes the tables if there
    /// are none, and tables of an earlier version are refused.
    #[must_use]
    pub fn migrate(mut self) -> Self {
        self.migrates = Migrates::OnOpen;
        self
    }

    /// Never makes or changes tables: somebody else runs the migrations, and without them the store
    /// does not open. In a URL: `migrate=false`.
    #[must_use]
    pub fn without_migrations(mut self) -> Self {
        self.migrates = Migrates::Never;
        self
    }

    /// The file of the authority (PEM) that must vouch for the server's certificate and for its
    /// name, whenever the connection is encrypted. Set `ssl_mode` to `Require` so that it is.
    #[must_use]
    pub fn root_certificate(mut self, file: impl Into<PathBuf>) -> Self {
        self.trust = Trust::File(file.into());
        self
    }

    /// Drives the store by a clock of this process instead of the server's. For tests.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }
}

/// When tables are made or changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Migrates {
    /// If there are none.
    OnFirstWrite,
    OnOpen,
    Never,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A store in a `PostgreSQL` database. Clones share the connections.
#[derive(Clone)]
pub struct PostgresStore {
    shared: Arc<Shared>,
}

struct Shared {
    config: Config,
    options: PostgresOptions,
    dial: Dial,
    base: Base,
    pool: Pool,
    wakers: Arc<Wakers>,
    listener: Arc<Listener>,
    nothing: Nothing,
}

/// What every call of a store knows.
struct Base {
    sql: Statements,
    namespace: String,
    /// How long a call waits for a lock, in milliseconds.
    patience: String,
    clock: Option<Arc<dyn Clock>>,
    when_behind: WhenBehind,
    /// The highest token that this process was given, of any queue.
    seen: Arc<AtomicU64>,
    /// Which database this is; known once the store is open.
    whose: OnceLock<Uuid>,
    /// The role's transactions have a stricter isolation than ours need: each call begins its own.
    is_strict: AtomicBool,
}

impl Base {
    fn by_hand(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| tx::time(clock.now()))
    }
}

impl PostgresStore {
    /// Opens a database by its URL, with the settings `namespace`, `schema`, `connections` and
    /// `clock` of ours among those of the server:
    /// `postgres://app@db.example/app?namespace=billing`. With
    /// `sslmode=require` it is encrypted or fails, with `sslmode=verify-full` the server must also
    /// prove who it is, by the authorities in `sslrootcert` or else the system's.
    ///
    /// # Errors
    /// As [`with`](Self::with); `InvalidInput` for a URL that cannot be read.
    pub async fn open(url: &str) -> Result<Self> {
        let (config, options) = url::parsed(url).map_err(|e| at(Verb::Open, e))?;
        Self::with(config, options).await
    }

    /// Opens a database, and changes nothing in it unless the options say so. If there are no
    /// tables yet, the first call that writes makes them, and until then there is nothing to see.
    ///
    /// # Errors
    /// `Unavailable`, `Unsupported`, `TooNew`, `ReadOnly`: each says what to do.
    pub async fn with(config: Config, options: PostgresOptions) -> Result<Self> {
        let opened = Self::start(config, options).await;
        opened.map_err(|fault| at(Verb::Open, fault.into_error()))
    }

    async fn start(mut config: Config, options: PostgresOptions) -> Done<Self> {
        // A server that vanished without a word is noticed within a lease's term.
        config.keepalives_idle(Duration::from_secs(10));
        config.tcp_user_timeout(Duration::from_secs(20));
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(Duration::from_secs(5));
        }
        if config.get_application_name().is_none() {
            config.application_name("leasehold");
        }
        let dial = dial::dial(&options.trust).map_err(Fault::Broken)?;
        let store = Self::assemble(
            config,
            options,
            dial,
            Arc::default(),
            Arc::default(),
            Arc::default(),
        )?;
        if store.shared.options.migrates == Migrates::OnOpen {
            store.make_tables().await?;
        } else if !store.has_tables().await? && store.shared.options.migrates == Migrates::Never {
            return Err(migrate::nothing(&store.shared.options.schema));
        }
        Ok(store)
    }

    fn assemble(
        config: Config,
        options: PostgresOptions,
        dial: Dial,
        wakers: Arc<Wakers>,
        listener: Arc<Listener>,
        seen: Arc<AtomicU64>,
    ) -> Done<Self> {
        let recycling_method = RecyclingMethod::Fast;
        let manager = Manager::from_config(
            config.clone(),
            dial.clone(),
            ManagerConfig { recycling_method },
        );
        let pool = Pool::builder(manager)
            .max_size(options.connections)
            // The one that was used last has its plans at hand. In turn, three cost the server a
            // tenth more for each job, seven a sixth.
            .queue_mode(QueueMode::Lifo)
            .wait_timeout(Some(Duration::from_secs(30)))
            .create_timeout(Some(CONNECT_LIMIT))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| {
                let why = "the pool of connections cannot be made";
                Fault::Broken(Error::new(ErrorKind::Unexpected, why).caused_by(error))
            })?;
        let base = Base {
            sql: Statements::new(&options.schema),
            namespace: options.namespace.as_str().to_owned(),
            patience: options.patience.as_millis().to_string(),
            clock: options.clock.clone(),
            when_behind: options.when_behind,
            seen,
            whose: OnceLock::new(),
            is_strict: AtomicBool::new(false),
        };
        let shared = Shared {
            config,
            options,
            dial,
            base,
            pool,
            wakers,
            listener,
            nothing: Nothing::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Whether the tables are there. Changes nothing.
    ///
    /// # Errors
    /// `Unsupported` or `TooNew` if they are of a version that this program cannot work with.
    pub async fn is_there(&self) -> Result<bool> {
        let found = self.has_tables().await;
        found.map_err(|fault| at(Verb::Inspect, fault.into_error()))
    }

    async fn has_tables(&self) -> Done<bool> {
        let base = &self.shared.base;
        if base.whose.get().is_some() {
            return Ok(true);
        }
        let open = self.connection().await?;
        let is_there = migrate::is_ready(open.client()?, &self.shared.options.schema).await?;
        if is_there {
            let whose = Tx::new(open.client()?, base).whose().await?;
            let _ = base.whose.set(whose);
        }
        open.done();
        Ok(is_there)
    }

    /// Before the first call that writes.
    async fn ready(&self) -> Done<()> {
        if self.has_tables().await? {
            return Ok(());
        }
        if self.shared.options.migrates == Migrates::Never {
            return Err(migrate::nothing(&self.shared.options.schema));
        }
        self.make_tables().await
    }

    async fn make_tables(&self) -> Done<()> {
        let open = self.connection().await?;
        migrate::migrate(open.client()?, &self.shared.options.schema).await?;
        open.done();
        self.has_tables().await.map(drop)
    }

    /// The statements that make the tables in a schema, for those who run their migrations by hand.
    ///
    /// # Errors
    /// As [`PostgresOptions::schema`].
    pub fn migrations(schema: &str) -> Result<String> {
        let options = PostgresOptions::new().schema(schema)?;
        Ok(migrate::text(&options.schema))
    }

    /// The statements that make the roles `leasehold_producer`, `leasehold_worker`,
    /// `leasehold_reader` and
    /// `leasehold_operator`, each with the rights that it needs in a schema and no others.
    ///
    /// # Errors
    /// As [`PostgresOptions::schema`].
    pub fn roles(schema: &str) -> Result<String> {
        let options = PostgresOptions::new().schema(schema)?;
        Ok(migrate::roles(&options.schema))
    }

    async fn connection(&self) -> Done<Open> {
        match self.shared.pool.get().await {
            Ok(client) => Ok(Open(Some(client))),
            Err(PoolError::Backend(error)) => Err(Fault::Broken(explain(&error))),
            Err(error @ PoolError::Timeout(TimeoutType::Create)) => {
                let why = "the server does not answer";
                Err(Fault::Broken(
                    Error::new(ErrorKind::Unavailable, why).caused_by(error),
                ))
            }
            Err(error) => {
                let why = "no connection became free in time";
                Err(Fault::Broken(
                    Error::new(ErrorKind::Contended, why).caused_by(error),
                ))
            }
        }
    }

    /// Looks for work in a task of its own: a sleeper that nobody polls must not keep a connection.
    async fn look(&self, queues: &[QueueName], suspects: bool) -> Result<Look> {
        let (store, queues) = (self.clone(), queues.to_vec());
        let look = async move {
            let open = store.connection().await?;
            let found = Tx::new(open.client()?, &store.shared.base)
                .look(&queues, suspects)
                .await?;
            open.done();
            Ok::<_, Fault>(found)
        };
        let looked = tokio::spawn(look).await.unwrap_or_else(|error| {
            let why = "the look for work did not end";
            Err(Fault::Broken(
                Error::new(ErrorKind::Unexpected, why).caused_by(error),
            ))
        });
        looked.map_err(|fault| at(Verb::Wait, fault.into_error()))
    }

    fn admit(&self, verb: Verb, request: RequestId) -> Result<()> {
        let admitted = self.shared.nothing.admit(request);
        admitted.map_err(|error| at(verb, error))
    }

    /// Where nobody listens, those who sleep in this process are told by hand.
    fn wake<'q>(&self, queues: impl IntoIterator<Item = &'q QueueName>) {
        if !self.shared.listener.is_up() {
            for queue in queues {
                self.shared.wakers.wake(queue, false, 1);
            }
        }
    }
}

/// A connection in use. One that is dropped in the middle of a transaction is closed, so that the
/// server rolls it back; it does not go back to the pool.
struct Open(Option<Object>);

impl Open {
    fn client(&self) -> Done<&Client> {
        let client = self.0.as_ref().map(|object| -> &Client { object });
        client.ok_or_else(given_back)
    }

    /// Gives it back.
    fn done(mut self) {
        drop(self.0.take());
    }

    /// Rolls back and gives it back, if it still works.
    async fn undo(self) {
        let undone = match self.client() {
            Ok(client) => client.batch_execute("ROLLBACK").await.is_ok(),
            Err(_) => false,
        };
        if undone {
            self.done();
        }
    }
}

fn given_back() -> Fault {
    let why = "the connection was given back";
    Fault::Broken(Error::new(ErrorKind::Unexpected, why))
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            drop(Object::take(object));
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The handle for renewals shares the listener with the one it was made from.
        if Arc::strong_count(&self.listener) == 1 {
            self.listener.stop();
        }
        self.wakers.wake_all();
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration may hold a password.
        f.debug_struct("PostgresStore")
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

/// Calls a function, as a transaction of its own; again if the server rolled it back for another's
/// sake.
macro_rules! call {
    ($store:expr, $verb:expr, $tx:ident => $body:expr) => {{
        let mut tries = 0;
        loop {
            let done = async {
                let open = $store.connection().await?;
                let base = &$store.shared.base;
                let is_strict = base.is_strict.load(Ordering::Relaxed);
                let done = async {
                    let db = open.client()?;
                    if is_strict {
                        db.batch_execute(BEGIN).await?;
                    }
                    let $tx = Tx::new(db, base);
                    let answer = $body.await?;
                    if is_strict {
                        db.batch_execute("COMMIT").await?;
                    }
                    Ok(answer)
                }
                .await;
                // A statement that failed leaves nothing open.
                if is_strict && done.is_err() {
                    open.undo().await;
                } else {
                    open.done();
                }
                done
            }
            .await;
            match done {
                Err(Fault::Strict) if tries < TRIES => {
                    tries += 1;
                    $store.shared.base.is_strict.store(true, Ordering::Relaxed);
                }
                Err(Fault::Again(_)) if tries < TRIES => pause(&mut tries).await,
                done => break done.map_err(|fault| at($verb, fault.into_error())),
            }
        }
    }};
}

async fn pause(tries: &mut u32) {
    *tries += 1;
    let most = 2_u64 << (*tries).min(7);
    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..most))).await;
}

#[async_trait]
impl Store for PostgresStore {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn namespace(&self) -> Namespace {
        self.shared.options.namespace.clone()
    }

    fn native(&self) -> Option<&dyn Any> {
        Some(self)
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        // The connections of a pool live on the runtime that made them.
        let shared = &self.shared;
        let store = Self::assemble(
            shared.config.clone(),
            shared.options.clone().connections(DEDICATED),
            shared.dial.clone(),
            Arc::clone(&shared.wakers),
            Arc::clone(&shared.listener),
            Arc::clone(&shared.base.seen),
        );
        let store = store.map_err(|fault| at(Verb::Open, fault.into_error()))?;
        Ok(Arc::new(store))
    }

    async fn open_session(&self) -> Result<SessionId> {
        let ready = self.ready().await;
        ready.map_err(|fault| at(Verb::Open, fault.into_error()))?;
        call!(self, Verb::Open, tx => tx.open_session())
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.validate().map_err(|e| at(Verb::Enqueue, e))?;
        self.admit(Verb::Enqueue, request.request)?;
        let named = Named::from(request.request);
        let done = call!(self, Verb::Enqueue, tx => tx.enqueue(named, &request.jobs))?;
        self.wake(request.jobs.iter().map(|(_, job)| &job.queue));
        Ok(done)
    }

    async fn claim(&self, mut request: ClaimRequest) -> Result<Claimed> {
        request.validate().map_err(|e| at(Verb::Claim, e))?;
        self.admit(Verb::Claim, request.request)?;
        let nothing = &self.shared.nothing;
        request.max = nothing.most(request.request, request.max);
        let is_repeat = nothing.send(request.request);
        let (claimed, is_full) = call!(self, Verb::Claim, tx => tx.claim(&request, is_repeat))?;
        nothing.answered(request.request);
        if claimed.grants.is_empty() && claimed.expired.is_empty() {
            nothing.note(request.request);
        }
        let queues = request.queues.iter().map(|wanted| &wanted.queue);
        if is_full {
            self.shared.listener.is_full(queues);
        }
        self.wake(claimed.expired.iter().map(|expiry| &expiry.queue));
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        Beat::validate_all(&beats).map_err(|e| at(Verb::Renew, e))?;
        let done = call!(self, Verb::Renew, tx => tx.renew(&beats))?;
        let lapsed = beats.iter().filter(|beat| !beat.lapse.is_empty());
        self.wake(lapsed.map(|beat| &beat.queue));
        Ok(done)
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        request.validate().map_err(|e| at(Verb::Settle, e))?;
        self.admit(Verb::Settle, request.request)?;
        let (named, settlements) = (Named::from(request.request), &request.settlements);
        let done = call!(self, Verb::Settle, tx => tx.settle(named, settlements))?;
        self.wake(settlements.iter().map(|one| &one.receipt.queue));
        Ok(done)
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        request.validate().map_err(|e| at(Verb::Checkpoint, e))?;
        self.admit(Verb::Checkpoint, request.request)?;
        let (named, states) = (Named::from(request.request), &request.checkpoints);
        call!(self, Verb::Checkpoint, tx => tx.checkpoint(named, states))
    }

    async fn reap(&self, mut request: ReapRequest) -> Result<Vec<Expiry>> {
        bounded("max", request.max, limits::STEP_JOBS).map_err(|e| at(Verb::Reap, e))?;
        self.admit(Verb::Reap, request.request)?;
        let nothing = &self.shared.nothing;
        request.max = nothing.most(request.request, request.max);
        let expired = call!(self, Verb::Reap, tx => tx.reap(&request))?;
        if expired.is_empty() {
            nothing.note(request.request);
        }
        self.wake(expired.iter().map(|expiry| &expiry.queue));
        Ok(expired)
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        request.validate().map_err(|e| at(Verb::Control, e))?;
        self.admit(Verb::Control, request.request)?;
        let done = call!(self, Verb::Control, tx => tx.control(&request));
        if !self.shared.listener.is_up() {
            self.shared.wakers.wake_all();
        }
        done
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        if !self.is_there().await? {
            return Ok(inspect::nothing(&query));
        }
        call!(self, Verb::Inspect, tx => tx.inspect(&query))
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        let shared = &self.shared;
        // Asleep before the look, so that no job slips in between.
        let mut woken = shared.wakers.sleep(queues, suspects);
        let until = monotonic() + limit;
        let mut came_up = shared.listener.subscribe();
        shared.listener.start(shared);
        shared.listener.has_room(queues).await;
        let mut first = None;
        let mut again = LOOK_AGAIN;
        loop {
            let look = self.look(queues, suspects).await?;
            // A lease that had ended before this began, and is still there, is in somebody's hand.
            let is_over = look.ends.is_some_and(|ends| ends <= 0);
            let (known, was_over) = *first.get_or_insert((look.due, is_over));
            let earlier = look
                .due
                .is_some_and(|due| known.is_none_or(|known| due < known));
            let ended = is_over && !was_over;
            if look.is_work || earlier || ended || monotonic() >= until {
                return Ok(());
            }
            // Whoever is putting jobs there may have looked for sleepers before there was this one.
            let next = if look.is_busy { again } else { LOOK_EVERY };
            again = (again * 2).min(LOOK_EVERY);
            let ends = look.ends.filter(|ends| *ends > 0);
            let ends = ends.map(|ends| Duration::from_micros(ends.cast_unsigned()));
            let next = ends.map_or(next, |ends| next.min(ends));
            tokio::select! {
                _ = &mut woken => return Ok(()),
                _ = came_up.changed() => {}
                () = tokio::time::sleep_until(until.min(monotonic() + next)) => {}
            }
        }
    }

    fn longest_wait(&self) -> Duration {
        LONGEST_WAIT
    }

    async fn prune(&self, mut request: PruneRequest) -> Result<u64> {
        bounded("max", request.max, limits::CALL_ITEMS).map_err(|e| at(Verb::Prune, e))?;
        self.admit(Verb::Prune, request.request)?;
        let keys = request.keys();
        let nothing = &self.shared.nothing;
        request.max = nothing.most(request.request, request.max);
        let (pruned, mut more) = call!(self, Verb::Prune, tx => tx.prune(&request))?;
        if pruned == 0 {
            nothing.note(request.request);
        }
        // In transactions of their own, so that nobody waits long for a key. What one of them
        // leaves behind, the next prune finds.
        while more && let Ok(left) = call!(self, Verb::Prune, tx => tx.prune_keys(&keys)) {
            more = left;
        }
        let mut after = 0;
        while let Ok(Some(next)) = call!(self, Verb::Prune, tx => tx.add_up(after)) {
            after = next;
        }
        Ok(pruned)
    }
}

/// Names the verb and the store in an error.
fn at(verb: Verb, error: Error) -> Error {
    error.during(verb).in_store("postgres")
}
