//! Taking turns: several processes write to one file, and none starves.
//!
//! The engine lets whoever asks first after a commit have the write lock, and that is the process
//! that just had it. So a process that waits holds a *shared* lock on a side file (`<db>-turn`),
//! and one that has just committed looks whether anybody does: if so it steps aside until somebody
//! else has committed, or a few milliseconds have passed.
//!
//! Nobody ever waits for the side file, and locks die with their process. A waiter that is frozen
//! looks like one that waits; stepping aside for it brings nothing, and is then tried more and more
//! rarely. Without the side file everything works, only less fairly.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::Connection;

use super::fault::{Done, Fault, explain, is_busy};
use crate::clock::monotonic;

/// How long to step aside at most: a waiter polls several times in this time.
const ASIDE: Duration = Duration::from_millis(4);
const ASIDE_PAUSE: Duration = Duration::from_micros(100);
/// How long not to step aside again after it brought nothing: doubles up to a second.
const USELESS: Duration = Duration::from_millis(8);
const USELESS_MAX: Duration = Duration::from_secs(1);
/// From here on somebody should know: a handler's own transaction, or a frozen process.
const LONG: Duration = Duration::from_secs(1);

/// One process's part in taking turns.
#[derive(Debug)]
pub(super) struct Turn {
    side: Option<File>,
    /// The file's version after our last transaction: changes when somebody else commits.
    seen: i64,
    useless: Duration,
    busy_until: Option<tokio::time::Instant>,
}

impl Turn {
    pub(super) fn new(db: &Path) -> Self {
        let mut path = db.as_os_str().to_owned();
        path.push("-turn");
        let side = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(PathBuf::from(path));
        Self {
            side: side.ok(),
            seen: -1,
            useless: USELESS,
            busy_until: None,
        }
    }

    /// Begins a write transaction, in turn. Gives up after `limit`.
    pub(super) fn begin(&mut self, db: &Connection, limit: Duration) -> Done<()> {
        self.step_aside(db)?;
        match begin(db) {
            Err(error) if is_busy(&error) => {}
            other => return Ok(other?),
        }
        let signal = self.side.as_ref();
        let signal = signal.filter(|side| side.try_lock_shared().is_ok());
        let began = poll(db, limit);
        if let Some(side) = signal {
            // If this failed, the lock would go with the process; meanwhile others are polite to
            // us.
            let _ = side.unlock();
        }
        began
    }

    /// To be called when the transaction is over.
    pub(super) fn done(&mut self, db: &Connection) {
        self.seen = version(db).unwrap_or(-1);
    }

    fn step_aside(&mut self, db: &Connection) -> Done<()> {
        let now = monotonic();
        if self.busy_until.is_some_and(|until| now < until) || !self.somebody_waits() {
            return Ok(());
        }
        let mut aside = Duration::ZERO;
        while version(db)? == self.seen {
            if aside >= ASIDE || monotonic() - now >= ASIDE {
                self.busy_until = Some(monotonic() + self.useless);
                self.useless = (self.useless * 2).min(USELESS_MAX);
                return Ok(());
            }
            std::thread::sleep(ASIDE_PAUSE);
            aside += ASIDE_PAUSE;
        }
        self.useless = USELESS;
        Ok(())
    }

    fn somebody_waits(&self) -> bool {
        let Some(side) = &self.side else { return false };
        match side.try_lock() {
            Ok(()) => {
                let _ = side.unlock();
                false
            }
            Err(_) => true,
        }
    }
}

/// Asks for the write lock again and again, more often the longer it takes.
fn poll(db: &Connection, limit: Duration) -> Done<()> {
    let start = monotonic();
    let mut paused = Duration::ZERO;
    let mut warned = false;
    loop {
        // Under a virtual clock no time passes here, so the pauses count too.
        let waited = (monotonic() - start).max(paused);
        let pause = match waited.as_millis() {
            0..10 => Duration::from_micros(300),
            10..40 => Duration::from_micros(150),
            40..1_000 => Duration::from_micros(60),
            _ => Duration::from_millis(2),
        };
        if waited > LONG && !warned {
            warned = true;
            tracing::warn!(
                "a transaction of somebody else keeps renewals and all other calls waiting"
            );
        }
        std::thread::sleep(pause);
        paused += pause;
        match begin(db) {
            Err(error) if is_busy(&error) && waited < limit => {}
            Err(error) => return Err(Fault::Broken(explain(error))),
            Ok(()) => return Ok(()),
        }
    }
}

fn begin(db: &Connection) -> rusqlite::Result<()> {
    db.prepare_cached("BEGIN IMMEDIATE")?
        .execute([])
        .map(|_| ())
}

/// Changes when another connection has committed.
pub(super) fn version(db: &Connection) -> rusqlite::Result<i64> {
    db.prepare_cached("PRAGMA data_version")?
        .query_row([], |row| row.get(0))
}
