//! Wake-ups from other processes: while anybody sleeps, listen, and watch whether the file has
//! changed.
//!
//! Another process wakes this [sleeper](super::sleepers) once it has jobs for those here. Not
//! everybody can: a user's own transaction enqueues jobs too, and only the file tells that it is
//! committed. So one thread, only while somebody sleeps, asks the file now and then. After either
//! the sleepers look for work with a read.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::watch;

use super::migrate::connect;
use super::sleepers::{Sleeper, Sleepers};
use crate::store::wake::Wakers;

/// How often to ask: half of it passes on average until one knows that was not woken.
const EVERY: Duration = Duration::from_millis(10);
/// How often to ask after [`QUIET`] rounds in which nothing happened.
const SELDOM: Duration = Duration::from_millis(20);
const QUIET: u32 = 100;
/// Rounds without a sleeper after which the thread ends.
const LINGER: u32 = 100;

#[derive(Debug)]
pub(super) struct Poll {
    changed: watch::Sender<u64>,
    all: Sleepers,
    sleeper: OnceLock<Option<Sleeper>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    thread: Option<JoinHandle<()>>,
    running: bool,
    stopped: bool,
}

impl Poll {
    pub(super) fn new(all: Sleepers) -> Self {
        Self {
            changed: watch::channel(0).0,
            all,
            sleeper: OnceLock::new(),
            state: Mutex::default(),
        }
    }

    /// The processes that sleep on the file.
    pub(super) fn sleepers(&self) -> &Sleepers {
        &self.all
    }

    /// This handle as one of them, from when on anybody sleeps. None: it has to ask.
    pub(super) fn sleeper(&self) -> Option<&Sleeper> {
        self.sleeper.get_or_init(|| self.all.join()).as_ref()
    }

    /// Changes after another connection has committed.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Watches the file for as long as anybody sleeps. To be called once the sleeper is on the
    /// list.
    pub(super) fn start(self: &Arc<Self>, path: &Path, wakers: &Arc<Wakers>) {
        let mut state = self.lock();
        if state.running || state.stopped {
            return;
        }
        let (poll, path, wakers) = (Arc::clone(self), path.to_owned(), Arc::clone(wakers));
        let thread = std::thread::Builder::new().name("leasehold-poll".into());
        // Without the thread, sleepers still wake for this process and by their limits.
        state.thread = thread.spawn(move || poll.watch(&path, &wakers)).ok();
        state.running = state.thread.is_some();
    }

    /// Ends the thread, and lets no other start.
    pub(super) fn stop(&self) {
        let thread = {
            let mut state = self.lock();
            state.stopped = true;
            state.thread.take()
        };
        // It holds nothing that a panic could leave half done.
        let _ = thread.map(JoinHandle::join);
        if let Some(sleeper) = self.sleeper.get().and_then(Option::as_ref) {
            sleeper.remove();
        }
    }

    fn watch(&self, path: &Path, wakers: &Wakers) {
        let db = connect(path, false, true);
        let mut seen = None;
        let (mut alone, mut quiet) = (0, 0);
        loop {
            let now = db.as_ref().ok().and_then(|db| version(db).ok());
            // The first look also counts: something may have happened before the thread was up.
            quiet += 1;
            if now.is_none() || now != seen {
                seen = now;
                quiet = 0;
                self.changed.send_modify(|times| *times += 1);
            }
            let every = if quiet > QUIET { SELDOM } else { EVERY };
            match self.sleeper() {
                None => std::thread::sleep(every),
                Some(sleeper) if sleeper.wait(every) => {
                    self.changed.send_modify(|times| *times += 1);
                }
                Some(_) => {}
            }
            let mut state = self.lock();
            alone = if wakers.is_empty() { alone + 1 } else { 0 };
            if alone > LINGER || state.stopped {
                state.running = false;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes when another connection has committed.
fn version(db: &Connection) -> rusqlite::Result<i64> {
    db.prepare_cached("PRAGMA data_version")?
        .query_row([], |row| row.get(0))
}
