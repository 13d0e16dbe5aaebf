//! The embedded store: one file, several processes of one machine.
//!
//! Every call is a message to the one [writer](writer) of the handle, which merges what waits into
//! one transaction ([`tx`]) and answers after the commit. Each verb is a file, with its statements
//! at the top. Reads have connections of their own and never wait for the writer.
//!
//! **Durability.** With `synchronous = FULL`, the default, an answered call survives the loss of
//! power. With [`SqliteOptions::synchronous_normal`] it survives the death of the process; the loss
//! of power may take the last calls with it, in order, without damage.
//!
//! **Limits.** A process that is frozen *inside* a transaction delays the others until it is thawed
//! or killed; nothing is lost. The file belongs on a local disk.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::Connection;
use tokio::sync::oneshot;

use self::fault::{Done, Fault};
use self::file::{Reserve, SameFile};
use self::sleepers::Sleepers;
use self::turn::Turn;
use self::tx::Tx;
use self::wait::Poll;
use self::writer::{Call, Reply, Work, Writer, at};
use super::codec::Kinds;
use super::wake::Wakers;
use super::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, SessionId, SettleRequest,
    Store, bounded,
};
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::inspect::{Query, View};
use crate::job::{Namespace, QueueName};
use crate::lease::Verdict;
use crate::limits;
use crate::rules::issue::WhenBehind;

/// Declares the statements of a file. No other file can use them, and one that its own does not use
/// is an error.
macro_rules! statements {
    ($($name:ident = $sql:expr;)*) => {
        $(const $name: &str = $sql;)*
        #[cfg(test)]
        pub(super) const STATEMENTS: &[(&str, &str)] = &[$((stringify!($name), $name)),*];
    };
}

mod answer;
mod boot;
mod checkpoint;
mod claim;
mod control;
#[cfg(feature = "doctor")]
pub(crate) mod doctor;
mod enqueue;
pub(crate) mod fault;
mod file;
mod grant;
mod in_tx;
mod inspect;
mod migrate;
mod place;
mod prune;
mod reap;
mod renew;
mod settle;
mod sleepers;
mod stored_grant;
#[cfg(test)]
mod tests;
mod turn;
mod tx;
mod view;
mod wait;
mod writer;

/// Idle connections for reading that are kept open.
const READERS: usize = 4;
/// How often a handle that is dropped looks whether its writer is kept waiting, and for how long: a
/// second in all.
const LOOK: Duration = Duration::from_millis(10);
const LOOKS: u32 = 100;

/// How a file is used.
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    namespace: Namespace,
    clock: Arc<dyn Clock>,
    when_behind: WhenBehind,
    full: bool,
    inline: bool,
    patience: Duration,
}

impl SqliteOptions {
    /// The default namespace, on the host's clock, `synchronous = FULL`.
    pub fn new() -> Self {
        Self {
            namespace: Namespace::default(),
            clock: Arc::new(SystemClock),
            when_behind: WhenBehind::GoOn,
            full: true,
            inline: false,
            patience: Duration::from_secs(30),
        }
    }

    /// The application's share of the file. Two namespaces never see each other.
    #[must_use]
    pub fn namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// The store's clock.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Refuses claims while the clock is behind the tokens given, and so protects against a file
    /// that is lost and restored in that time, too. Unless set, claims go on. In a URL:
    /// `clock=strict`.
    #[must_use]
    pub fn strict_clock(mut self) -> Self {
        self.when_behind = WhenBehind::Refuse;
        self
    }

    /// Does not wait for the disk at each commit: answered calls survive the death of the process,
    /// but not the loss of power.
    #[must_use]
    pub fn synchronous_normal(mut self) -> Self {
        self.full = false;
        self
    }

    /// No writer thread: each call runs at once on the caller's. For simulations on virtual time.
    #[must_use]
    pub fn inline(mut self) -> Self {
        self.inline = true;
        self
    }

    /// How long a call waits for another process's transaction before it answers
    /// [`Contended`](ErrorKind::Contended). 30 s unless changed.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A store in one `SQLite` file. Clones share the writer; the last one to go stops it.
#[derive(Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

struct Shared {
    path: PathBuf,
    file: SameFile,
    options: SqliteOptions,
    engine: Engine,
    wakers: Arc<Wakers>,
    poll: Arc<Poll>,
    readers: Mutex<Vec<Connection>>,
    /// Read-locked by every read; closing takes the write lock, and so waits for them.
    reading: RwLock<()>,
    commits: Arc<AtomicU64>,
}

enum Engine {
    Thread {
        calls: Mutex<Option<mpsc::Sender<Call>>>,
        /// Closed when the writer has ended.
        ended: Mutex<mpsc::Receiver<()>>,
        /// Whether another process keeps the writer waiting.
        stuck: Arc<AtomicBool>,
    },
    Inline(Box<Mutex<Option<Writer>>>),
}

impl SqliteStore {
    /// Opens a file, which is made if it is not there.
    ///
    /// # Errors
    /// `Contended`, `Corrupt`, `TooNew`, `ReadOnly`, `Full`, `Unavailable`: each says what to do.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::with(path, SqliteOptions::new())
    }

    /// Opens a file with options. Blocks while another process has the write lock.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn with(path: impl AsRef<Path>, options: SqliteOptions) -> Result<Self> {
        Self::start(path.as_ref(), options).map_err(|fault| at(Verb::Open, fault.into_error()))
    }

    fn start(path: &Path, options: SqliteOptions) -> Done<Self> {
        // A process may change its directory; the file does not move with it.
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let db = migrate::connect(path, true, options.full)?;
        let mut turn = Turn::new(path);
        let prepared = migrate::prepare(&db, &mut turn, options.patience, || options.clock.now());
        // On a full disk one can still look, and end work. The first commit makes up for it.
        let unprepared = matches!(
            &prepared,
            Err(Fault::Broken(error)) if error.kind() == ErrorKind::Full
        ) && migrate::is_readable(&db);
        if !unprepared {
            prepared?;
        }
        let commits = Arc::new(AtomicU64::new(0));
        let file = SameFile::at(path);
        let sleepers = Sleepers::of(path, &options.namespace);
        let writer = Writer {
            db,
            turn,
            path: path.to_owned(),
            namespace: options.namespace.as_str().to_owned(),
            clock: Arc::clone(&options.clock),
            when_behind: options.when_behind,
            patience: options.patience,
            commits: Arc::clone(&commits),
            sleepers: sleepers.clone(),
            file: file.clone(),
            reserve: (!options.inline).then(|| Reserve::of(path)),
            unprepared,
            vain: HashMap::new(),
            kinds: Kinds::default(),
        };
        let wakers = Arc::new(Wakers::default());
        let engine = if options.inline {
            Engine::Inline(Box::new(Mutex::new(Some(writer))))
        } else {
            let (calls, received) = mpsc::channel();
            let wakers = Arc::clone(&wakers);
            let (ending, ended) = mpsc::channel();
            let stuck = Arc::clone(&writer.turn.stuck);
            std::thread::Builder::new()
                .name("leasehold-sqlite".into())
                .spawn(move || {
                    let _ending: mpsc::Sender<()> = ending;
                    writer.serve(&received, &wakers);
                })
                .map_err(|error| {
                    let why = "the writer's thread could not be started";
                    Fault::Broken(Error::new(ErrorKind::Unavailable, why).caused_by(error))
                })?;
            Engine::Thread {
                calls: Mutex::new(Some(calls)),
                ended: Mutex::new(ended),
                stuck,
            }
        };
        let shared = Shared {
            path: path.to_owned(),
            file,
            options,
            engine,
            wakers,
            poll: Arc::new(Poll::new(sleepers)),
            readers: Mutex::default(),
            reading: RwLock::default(),
            commits,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Transactions that this handle and its clones have committed: with merging, fewer than calls.
    pub fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Answers the calls that wait, then stops. Later calls on any clone answer
    /// [`Closed`](ErrorKind::Closed). When it returns, this handle no longer has the file open: you
    /// may move it, or replace it with a copy.
    ///
    /// Dropping the last clone does the same, but does not wait for a file that another process
    /// keeps locked, and waits no longer than a second for anything else: there is no caller left
    /// to get the answers.
    pub fn close(&self) {
        self.shared.close(true);
    }

    async fn call(&self, work: Work) -> Result<Reply> {
        let verb = work.verb();
        match &self.shared.engine {
            Engine::Thread { calls, .. } => {
                let (reply, answer) = oneshot::channel();
                let sent = lock(calls).as_ref().is_some_and(|calls| {
                    calls
                        .send(Call {
                            work,
                            left_over: false,
                            reply,
                        })
                        .is_ok()
                });
                if !sent {
                    return Err(at(verb, closed()));
                }
                answer.await.unwrap_or_else(|_| Err(at(verb, closed())))
            }
            Engine::Inline(writer) => {
                let mut writer = lock(writer);
                let Some(writer) = writer.as_mut() else {
                    return Err(at(verb, closed()));
                };
                let (mut answers, wakeups) = writer.run(&[&work]);
                writer::wake_sleepers(&self.shared.wakers, &writer.sleepers, wakeups);
                let answer = answers.pop().unwrap_or_else(|| Err(strange()));
                answer.map_err(|error| at(verb, error))
            }
        }
    }

    /// Runs a read on a connection of its own, where it blocks no runtime.
    async fn read<T: Send + 'static>(
        &self,
        verb: Verb,
        read: impl FnOnce(&mut Tx<'_>, Timestamp) -> Done<T> + Send + 'static,
    ) -> Result<T> {
        let shared = Arc::clone(&self.shared);
        if shared.options.inline {
            return shared.read(read).map_err(|error| at(verb, error));
        }
        let done = tokio::task::spawn_blocking(move || shared.read(read)).await;
        done.unwrap_or_else(|_| Err(strange()))
            .map_err(|error| at(verb, error))
    }
}

impl Shared {
    fn read<T>(&self, read: impl FnOnce(&mut Tx<'_>, Timestamp) -> Done<T>) -> Result<T> {
        let _reading = self.reading.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed() {
            return Err(closed());
        }
        self.file.check()?;
        let idle = lock(&self.readers).pop();
        let db = match idle {
            Some(db) => db,
            None => {
                migrate::connect(&self.path, false, self.options.full).map_err(Fault::into_error)?
            }
        };
        let answer = self.snapshot(&db, read);
        let mut readers = lock(&self.readers);
        if readers.len() < READERS && db.is_autocommit() {
            readers.push(db);
        }
        answer.map_err(Fault::into_error)
    }

    fn snapshot<T>(
        &self,
        db: &Connection,
        read: impl FnOnce(&mut Tx<'_>, Timestamp) -> Done<T>,
    ) -> Done<T> {
        db.execute_batch("BEGIN")?;
        let mut kinds = Kinds::default();
        let mut tx = Tx::new(db, self.options.namespace.as_str(), &mut kinds);
        let answer = read(&mut tx, self.options.clock.now());
        db.execute_batch("COMMIT")?;
        answer
    }

    fn is_closed(&self) -> bool {
        match &self.engine {
            Engine::Thread { calls, .. } => lock(calls).is_none(),
            Engine::Inline(writer) => lock(writer).is_none(),
        }
    }

    /// Waits for the writer to end: if not `patient`, only while it is not kept waiting itself, and
    /// for a second.
    fn close(&self, patient: bool) {
        match &self.engine {
            Engine::Thread {
                calls,
                ended,
                stuck,
            } => {
                drop(lock(calls).take());
                let ended = lock(ended);
                let mut looks = 0;
                // Nothing is ever sent: the writer's end closes the channel.
                while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout)
                    && (patient || (looks < LOOKS && !stuck.load(Ordering::Acquire)))
                {
                    looks += 1;
                }
            }
            Engine::Inline(writer) => drop(lock(writer).take()),
        }
        self.poll.stop();
        // A connection that is closed last takes the log with it, even the log of a file that has
        // replaced ours.
        let _no_read = self.reading.write().unwrap_or_else(PoisonError::into_inner);
        lock(&self.readers).clear();
        self.wakers.wake_all();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.close(false);
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("path", &self.shared.path)
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for SqliteStore {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn namespace(&self) -> Namespace {
        self.shared.options.namespace.clone()
    }

    fn native(&self) -> Option<&dyn Any> {
        Some(self)
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        // The writer has a thread of its own already.
        Ok(Arc::new(self.clone()))
    }

    async fn open_session(&self) -> Result<SessionId> {
        match self.call(Work::OpenSession).await? {
            Reply::Opened(session) => Ok(session),
            _ => Err(strange()),
        }
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.validate().map_err(|e| at(Verb::Enqueue, e))?;
        match self.call(Work::Enqueue(request)).await? {
            Reply::Enqueued(answers) => Ok(answers),
            _ => Err(strange()),
        }
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        request.validate().map_err(|e| at(Verb::Claim, e))?;
        match self.call(Work::Claim(request)).await? {
            Reply::Claimed(claimed) => Ok(claimed),
            _ => Err(strange()),
        }
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        Beat::validate_all(&beats).map_err(|e| at(Verb::Renew, e))?;
        match self.call(Work::Renew(beats)).await? {
            Reply::Renewed(renewals) => Ok(renewals),
            _ => Err(strange()),
        }
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        request.validate().map_err(|e| at(Verb::Settle, e))?;
        match self.call(Work::Settle(request)).await? {
            Reply::Settled(verdicts) => Ok(verdicts),
            _ => Err(strange()),
        }
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        request.validate().map_err(|e| at(Verb::Checkpoint, e))?;
        match self.call(Work::Checkpoint(request)).await? {
            Reply::Checkpointed(answers) => Ok(answers),
            _ => Err(strange()),
        }
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        bounded("max", request.max, limits::STEP_JOBS).map_err(|e| at(Verb::Reap, e))?;
        match self.call(Work::Reap(request)).await? {
            Reply::Expired(expired) => Ok(expired),
            _ => Err(strange()),
        }
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        request.validate().map_err(|e| at(Verb::Control, e))?;
        match self.call(Work::Control(request)).await? {
            Reply::Controlled(answer) => Ok(answer),
            _ => Err(strange()),
        }
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.read(Verb::Inspect, move |tx, now| tx.inspect(&query, now))
            .await
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        self.until_work(queues, suspects, limit).await
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        bounded("max", request.max, limits::CALL_ITEMS).map_err(|e| at(Verb::Prune, e))?;
        let keys = request.keys();
        let Reply::Pruned(pruned, mut more) = self.call(Work::Prune(request)).await? else {
            return Err(strange());
        };
        // In transactions of their own, so that others have their turn between. What one of them
        // leaves behind, the next prune finds.
        while more && let Ok(Reply::Pruned(_, left)) = self.call(Work::PruneKeys(keys)).await {
            more = left;
        }
        Ok(pruned)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is locked here stays whole whatever panics: the file is only changed by commits.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store handle was closed")
}

fn strange() -> Error {
    Error::new(
        ErrorKind::Unexpected,
        "the writer answered another question",
    )
}
