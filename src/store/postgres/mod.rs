//! The store beside the user's data: many machines, one transaction with what a job changes.
//!
//! Every call is one short transaction, on any connection of a pool: one statement if it is [`plain`],
//! else a few round trips ([`tx`]). The verbs are files: `claim.rs` holds the logic and `claim.sql` the statements. Nothing is kept in a
//! session of the server, so that a pooler in transaction mode may stand between.
//!
//! **Locks.** A claim holds the row of its queue, which also issues the tokens; claims of other queues
//! do not meet it. Enqueue, renew and settle do not need that row: they hold the rows of their jobs,
//! grants and keys, in one order. Counts are appended ([`tally`]). Where lines start is kept beside
//! ([`seal`]).
//!
//! **Tokens** stay monotonic when the server is replaced by a lagging standby or by an old backup: such
//! a server has an old `last`, but its clock has moved on, and a token is never below the clock. The
//! old server gave none more than 20 ms above *its* clock, so that a replacement that took longer than
//! that, on a clock that is not behind by more, starts above all of them. A queue whose row is missing
//! altogether is made with a floor 20 ms above the clock.
//!
//! **Durability** is the server's: with `synchronous_commit` on, an answered call survives its crash.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{
    Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime, TimeoutType,
};
use tokio_postgres::{Client, Config};
use uuid::Uuid;

use self::dial::{Dial, Trust};
use self::fault::{Done, Fault, explain};
use self::listen::{Ear, Listener};
use self::plain::Luck;
use self::sql::Statements;
use self::tx::{Bell, Tx, args};
use super::wake::Wakers;
use super::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, SessionId, SettleRequest,
    Store, bounded,
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
mod grant;
mod inspect;
mod listen;
mod migrate;
mod place;
mod plain;
mod prune;
mod reap;
mod renew;
mod seal;
mod session;
mod settle;
mod sql;
mod tally;
mod tx;
mod url;
mod within;

/// How often a call is done again that the server rolled back for the sake of another.
const TRIES: u32 = 12;
/// After so many of 256 calls the counts are added up.
const FOLDS_OF_256: u8 = 8;
/// A lost wake-up costs at most this.
const LOOK_EVERY: Duration = Duration::from_secs(1);
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
    migrates: bool,
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
            migrates: true,
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

    /// Leaves the schema alone when the store is opened; somebody else runs the migrations.
    #[must_use]
    pub fn without_migrations(mut self) -> Self {
        self.migrates = false;
        self
    }

    /// The file of the authority (PEM) that must vouch for the server's certificate and for its name,
    /// whenever the connection is encrypted. Set `ssl_mode` to `Require` so that it is.
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
}

/// What every step of a store knows.
struct Base {
    sql: Statements,
    namespace: String,
    ear: Ear,
    begin: String,
    clock: Option<Arc<dyn Clock>>,
    when_behind: WhenBehind,
    /// The highest token that this process was given, of any queue.
    seen: Arc<AtomicU64>,
    /// Which database this is; known once the store is open.
    whose: OnceLock<Uuid>,
    /// Whether claims, and settlements, have been plain of late.
    claims: Luck,
    settlements: Luck,
    /// Somebody moves up the starts of lines.
    sealing: AtomicBool,
}

impl Base {
    fn by_hand(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| tx::time(clock.now()))
    }

    fn bell(&self, queue: &QueueName, suspect: bool, jobs: usize) -> String {
        listen::bell(&self.ear, queue, suspect, jobs)
    }
}

impl PostgresStore {
    /// Opens a database by its URL, with the settings `namespace`, `schema`, `connections` and `clock`
    /// of ours among those of the server: `postgres://app@db.example/app?namespace=billing`. With
    /// `sslmode=require` it is encrypted or fails, with `sslmode=verify-full` the server must also
    /// prove who it is, by the authorities in `sslrootcert` or else the system's.
    ///
    /// # Errors
    /// As [`with`](Self::with); `InvalidInput` for a URL that cannot be read.
    pub async fn open(url: &str) -> Result<Self> {
        let (config, options) = url::parsed(url).map_err(|e| at(Verb::Open, e))?;
        Self::with(config, options).await
    }

    /// Opens a database, and brings the schema up to date.
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
            fastrand::u64(..),
            Arc::default(),
        )?;
        let open = store.connection().await?;
        let schema = &store.shared.options.schema;
        if store.shared.options.migrates {
            migrate::migrate(open.client()?, schema).await?;
        } else if !migrate::is_current(open.client()?, schema).await? {
            let why = "the schema is not there or older than this program; run the migrations";
            return Err(Fault::Broken(Error::new(ErrorKind::Unsupported, why)));
        }
        let whose = Tx::new(open.client()?, &store.shared.base, false)
            .whose()
            .await?;
        let _ = store.shared.base.whose.set(whose);
        open.done();
        Ok(store)
    }

    fn assemble(
        config: Config,
        options: PostgresOptions,
        dial: Dial,
        wakers: Arc<Wakers>,
        listener: Arc<Listener>,
        from: u64,
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
            .wait_timeout(Some(Duration::from_secs(30)))
            .create_timeout(Some(CONNECT_LIMIT))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| {
                let why = "the pool of connections cannot be made";
                Fault::Broken(Error::new(ErrorKind::Unexpected, why).caused_by(error))
            })?;
        let patience = options.patience.as_millis();
        let base = Base {
            sql: Statements::new(&options.schema),
            namespace: options.namespace.as_str().to_owned(),
            ear: Ear {
                channel: format!("leasehold_{}", options.schema),
                namespace: options.namespace.as_str().to_owned(),
                from,
            },
            // A transaction that others wait for ends soon, whatever happens to this process.
            begin: format!(
                "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {patience}; \
                 SET LOCAL statement_timeout = '30s'; \
                 SET LOCAL idle_in_transaction_session_timeout = '10s'"
            ),
            clock: options.clock.clone(),
            when_behind: options.when_behind,
            seen,
            whose: OnceLock::new(),
            claims: Luck::default(),
            settlements: Luck::default(),
            sealing: AtomicBool::new(false),
        };
        let shared = Shared {
            config,
            options,
            dial,
            base,
            pool,
            wakers,
            listener,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The statements that make the tables in a schema, for those who run their migrations by hand.
    ///
    /// # Errors
    /// As [`PostgresOptions::schema`].
    pub fn migrations(schema: &str) -> Result<String> {
        let options = PostgresOptions::new().schema(schema)?;
        Ok(migrate::text(&options.schema))
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

    fn ring(&self, bells: Vec<Bell>) {
        for (queue, suspect, jobs) in bells {
            self.shared.wakers.wake(&queue, suspect, jobs);
        }
    }

    /// Now and then adds up the counts of queues, so that their rows stay few. That is a transaction of
    /// its own: the call it follows is done, whatever becomes of it.
    async fn fold(&self, queues: &[impl AsRef<str>]) {
        if fastrand::u8(..) >= FOLDS_OF_256 {
            return;
        }
        let names: Vec<&str> = queues.iter().map(AsRef::as_ref).collect();
        let Ok(open) = self.connection().await else {
            return;
        };
        let folded = async {
            let tx = Tx::new(open.client()?, &self.shared.base, false);
            for queue in tx.named(&names).await? {
                let id: i32 = queue.try_get(0)?;
                tx.run("fold", args![id => INT4]).await?;
            }
            Ok::<_, Fault>(())
        };
        if folded.await.is_ok() {
            open.done();
        }
    }

    /// Looks for work in a task of its own: a sleeper that nobody polls must not keep a connection.
    async fn look(&self, queues: &[QueueName], suspects: bool) -> Result<(bool, Option<i64>)> {
        let (store, queues) = (self.clone(), queues.to_vec());
        let look = async move {
            let open = store.connection().await?;
            let found = {
                let tx = Tx::new(open.client()?, &store.shared.base, false);
                tx.look(&queues, suspects).await?
            };
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

/// Runs a step in a transaction of its own; again if the server rolled it back for another's sake.
macro_rules! step {
    ($store:expr, $verb:expr, $tx:ident => $body:expr) => {{
        let mut tries = 0;
        loop {
            let done = async {
                let open = $store.connection().await?;
                let done = {
                    let mut $tx = Tx::new(open.client()?, &$store.shared.base, false);
                    match $body.await {
                        Ok(answer) => {
                            let bells = $tx.commit().await;
                            bells.map(|bells| (answer, bells, $tx.tallied()))
                        }
                        Err(fault) => Err(fault),
                    }
                };
                if done.is_ok() {
                    open.done();
                } else {
                    open.undo().await;
                }
                done
            }
            .await;
            match done {
                Ok((answer, bells, tallied)) => {
                    $store.ring(bells);
                    $store.fold(&tallied).await;
                    break Ok(answer);
                }
                Err(Fault::Again(_)) if tries < TRIES => nap(&mut tries).await,
                Err(fault) => break Err(at($verb, fault.into_error())),
            }
        }
    }};
}

/// Answers a call that is plain; again if the server rolled it back for another's sake.
macro_rules! plain {
    ($verb:expr, $call:expr) => {{
        let mut tries = 0;
        loop {
            match $call.await {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => break,
                Err(Fault::Again(_)) if tries < TRIES => nap(&mut tries).await,
                Err(fault) => return Err(at($verb, fault.into_error())),
            }
        }
    }};
}

async fn nap(tries: &mut u32) {
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
            shared.base.ear.from,
            Arc::clone(&shared.base.seen),
        );
        let store = store.map_err(|fault| at(Verb::Open, fault.into_error()))?;
        Ok(Arc::new(store))
    }

    async fn open_session(&self) -> Result<SessionId> {
        step!(self, Verb::Open, tx => tx.open_session())
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.validate().map_err(|e| at(Verb::Enqueue, e))?;
        plain!(Verb::Enqueue, self.enqueue_plain(&request));
        step!(self, Verb::Enqueue, tx => tx.enqueue(&request))
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        request.validate().map_err(|e| at(Verb::Claim, e))?;
        plain!(Verb::Claim, self.claim_plain(&request));
        let claimed = step!(self, Verb::Claim, tx => tx.claim(&request));
        if let Ok(claimed) = &claimed {
            self.seal(&request, claimed);
        }
        claimed
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        Beat::validate_all(&beats).map_err(|e| at(Verb::Renew, e))?;
        plain!(Verb::Renew, self.renew_plain(&beats));
        step!(self, Verb::Renew, tx => tx.renew(&beats))
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        request.validate().map_err(|e| at(Verb::Settle, e))?;
        plain!(Verb::Settle, self.settle_plain(&request));
        step!(self, Verb::Settle, tx => tx.settle(&request))
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        request.validate().map_err(|e| at(Verb::Checkpoint, e))?;
        step!(self, Verb::Checkpoint, tx => tx.checkpoint(&request))
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        bounded("max", request.max, limits::STEP_JOBS).map_err(|e| at(Verb::Reap, e))?;
        step!(self, Verb::Reap, tx => tx.reap(&request))
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        request.validate().map_err(|e| at(Verb::Control, e))?;
        step!(self, Verb::Control, tx => tx.control(&request))
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        step!(self, Verb::Inspect, tx => tx.inspect(&query))
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        let shared = &self.shared;
        // The bell is hung up before the look, so that no job slips in between.
        let mut bell = shared.wakers.sleep(queues, suspects);
        let mut came_up = shared.listener.subscribe();
        shared.listener.start(
            &shared.config,
            &shared.dial,
            &shared.base.ear,
            &shared.wakers,
        );
        let until = monotonic() + limit;
        let mut first_due = None;
        loop {
            let (work, due) = self.look(queues, suspects).await?;
            let known = *first_due.get_or_insert(due);
            let earlier = due.is_some_and(|due| known.is_none_or(|known| due < known));
            if work || earlier || monotonic() >= until {
                return Ok(());
            }
            let next = until.min(monotonic() + LOOK_EVERY);
            tokio::select! {
                _ = &mut bell => return Ok(()),
                _ = came_up.changed() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        bounded("max", request.max, limits::CALL_ITEMS).map_err(|e| at(Verb::Prune, e))?;
        let keys = request.keys();
        let (pruned, mut more) = step!(self, Verb::Prune, tx => tx.prune(&request))?;
        // In transactions of their own, so that nobody waits long for a key. What one of them leaves
        // behind, the next prune finds.
        while more && let Ok(left) = step!(self, Verb::Prune, tx => tx.prune_keys(&keys)) {
            more = left;
        }
        Ok(pruned)
    }
}

/// Names the verb and the store in an error.
fn at(verb: Verb, error: Error) -> Error {
    error.during(verb).in_store("postgres")
}
