//! wait: sleep until one of the queues may have work.
//!
//! Commits of this handle wake its sleepers directly. Other processes wake them through a socket
//! ([`sleepers`](super::sleepers)). Neither happens for jobs that a user's own transaction
//! enqueues: only a change of the file shows that it is committed. So while there are sleepers, one
//! thread polls the file ([`Poll`]). Once woken, a sleeper looks for work with a read.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension};
use tokio::sync::watch;

use super::SqliteStore;
use super::fault::Done;
use super::migrate::connect;
use super::place::{first_position, queue_of_position, tier_of_position};
use super::sleepers::{Sleeper, Sleepers};
use super::tx::Tx;
use crate::clock::{Timestamp, monotonic};
use crate::error::{Result, Verb};
use crate::job::QueueName;
use crate::rules::order::is_suspects;
use crate::store::wake::Wakers;

statements! {
    READY_POSITION = "
        SELECT position FROM leasehold_ready WHERE position >= ?1 AND position < ?2
        ORDER BY position LIMIT 1";
}

impl SqliteStore {
    pub(super) async fn until_work(
        &self,
        queues: &[QueueName],
        suspects: bool,
        limit: Duration,
    ) -> Result<()> {
        // Asleep before the look, so that no job slips in between.
        let mut woken = self.shared.wakers.sleep(queues, suspects);
        let mut elsewhere = self.shared.poll.subscribe();
        let sleeper = self
            .shared
            .poll
            .sleeper()
            .filter(|_| !self.shared.options.inline);
        let asleep = sleeper.map(|sleeper| sleeper.sleep(queues));
        let (work, due) = self.look(queues, suspects).await?;
        if work {
            return Ok(());
        }
        if self.shared.options.inline {
            let _ = tokio::time::timeout(limit, woken).await;
            return Ok(());
        }
        self.shared
            .poll
            .start(&self.shared.path, &self.shared.wakers);
        let until = tokio::time::sleep_until(monotonic() + limit);
        tokio::pin!(until);
        loop {
            tokio::select! {
                _ = &mut woken => return Ok(()),
                () = &mut until => return Ok(()),
                _ = elsewhere.changed() => {
                    if let Some(asleep) = &asleep {
                        asleep.again();
                    }
                    let (work, now_due) = self.look(queues, suspects).await?;
                    let earlier = now_due.is_some_and(|at| due.is_none_or(|due| at < due));
                    if work || earlier {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn look(
        &self,
        queues: &[QueueName],
        suspects: bool,
    ) -> Result<(bool, Option<Timestamp>)> {
        let queues = queues.to_vec();
        self.read(Verb::Wait, move |tx, _| tx.look(&queues, suspects))
            .await
    }
}

impl Tx<'_> {
    /// Whether one of the queues has a job in tier, and when the first of their scheduled jobs is
    /// due.
    fn look(&mut self, queues: &[QueueName], suspects: bool) -> Done<(bool, Option<Timestamp>)> {
        let mut first_due: Option<Timestamp> = None;
        for name in queues {
            let Some(queue) = self.known(name)? else {
                continue;
            };
            first_due = first_due.into_iter().chain(self.first_due(queue)?).min();
            let at = &self.queues[queue];
            if at.paused || at.counts.ready == at.counts.parked {
                continue;
            }
            let end = first_position(at.id + 1, 0);
            let mut from = first_position(at.id, usize::from(!suspects));
            loop {
                let position = self
                    .sql(READY_POSITION)?
                    .query_row([from, end], |row| row.get::<_, i64>(0))
                    .optional()?;
                let Some(position) = position else { break };
                let tier = tier_of_position(position);
                if suspects || !is_suspects(tier) {
                    return Ok((true, first_due));
                }
                from = first_position(queue_of_position(position), tier + 1);
            }
        }
        Ok((false, first_due))
    }
}

/// How often to ask: a sleeper that was not woken notices after half of this on average.
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
    state: Mutex<Watching>,
}

#[derive(Debug, Default)]
struct Watching {
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

    /// This handle as one of them, once it has sleepers. None: it has to ask the file.
    pub(super) fn sleeper(&self) -> Option<&Sleeper> {
        self.sleeper.get_or_init(|| self.all.join()).as_ref()
    }

    /// Changes after another connection has committed.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Watches the file for as long as there are sleepers. Call it once the sleeper is on the list.
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

    fn lock(&self) -> MutexGuard<'_, Watching> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes when another connection has committed.
fn version(db: &Connection) -> rusqlite::Result<i64> {
    db.prepare_cached("PRAGMA data_version")?
        .query_row([], |row| row.get(0))
}
