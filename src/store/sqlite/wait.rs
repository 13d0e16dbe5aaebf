//! wait: sleep until one of the queues may have work.
//!
//! Commits of this handle wake its sleepers directly. The engine has no way to tell one process
//! what another did, but a connection can ask cheaply whether anything was committed. One thread
//! asks, only while somebody sleeps, and the sleepers then look for work with a read.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::OptionalExtension;
use tokio::sync::watch;

use super::SqliteStore;
use super::fault::Done;
use super::migrate::connect;
use super::place::{first_position, queue_of_position, tier_of_position};
use super::turn::version;
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

/// How often to ask: half of it passes on average until a sleeper knows.
const EVERY: Duration = Duration::from_millis(10);
/// How often to ask after [`QUIET`] rounds in which nothing happened.
const SELDOM: Duration = Duration::from_millis(20);
const QUIET: u32 = 100;
/// Rounds without a sleeper after which the thread ends.
const LINGER: u32 = 100;

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

/// Watches the file for commits of others.
#[derive(Debug)]
pub(super) struct Poll {
    changed: watch::Sender<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    thread: Option<JoinHandle<()>>,
    running: bool,
    stopped: bool,
}

impl Default for Poll {
    fn default() -> Self {
        Self {
            changed: watch::channel(0).0,
            state: Mutex::default(),
        }
    }
}

impl Poll {
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
            std::thread::sleep(if quiet > QUIET { SELDOM } else { EVERY });
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
