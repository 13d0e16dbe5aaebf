//! Taking turns: several processes write to one file, none starves, and renewals do not queue.
//!
//! SQLite gives the write lock to the first process that asks after a commit, which usually is the
//! one that just had it. So writers stand in line: the first in line holds a side file
//! (`<db>-turn`) and asks for the write lock; the others ask for the side file. A process that has
//! just committed thus finds another one ahead of it. Only the first in line asks often, so a crowd
//! that waits leaves the processor to the one that works. A process with renewals to write walks
//! past the line, and waits only for the turn under way, the first in line, and other renewals.
//!
//! Locks die with their process. A process that steps up changes the length of the side file, so
//! the others see that the line moves. If the first in line is frozen, it keeps the side file and
//! the line stands still: the others then walk past it, sooner each time. Without the side file
//! everything still works, only less fairly.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rusqlite::Connection;
use tokio::time::Instant;

use super::fault::{Done, Fault, explain, is_busy};
use super::migrate::beside;
use crate::clock::monotonic;

/// Between two attempts of the first in line, and of those that walk past it.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
/// Between two attempts of a process further back: an eighth of its usual wait, so that a crowd of
/// any size asks about equally often, and less once it has waited longer than that: whoever has
/// waited longest asks most often, and none is passed over again and again. Within these bounds.
const LINE_PAUSE: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(8));
/// How long to stand in a line that does not move: longer than a slow disk takes for a turn, and
/// far less than a lease.
const STAND: Duration = Duration::from_millis(250);
/// How often the first in line shows that the line moves.
const TELL: Duration = Duration::from_millis(5);
/// The side file's length counts the steps, up to this: it is never written, and takes no room.
const STEPS: u64 = 1 << 10;
/// After this long the log says so: it is a handler's own transaction, or a frozen process.
const LONG: Duration = Duration::from_secs(1);
const LONG_PAUSE: Duration = Duration::from_millis(2);

/// One process's part in taking turns.
#[derive(Debug)]
pub(super) struct Turn {
    side: Option<File>,
    /// How long to stand in a line that does not move: halved when it did not in that time.
    stand: Duration,
    /// When this process last showed that it had stepped up.
    told: Option<Instant>,
    /// How long it waited of late.
    usual_wait: Duration,
    /// Whether it has waited longer than any turn of this crate takes.
    pub(super) stuck: Arc<AtomicBool>,
}

/// The first in line, until dropped.
struct First<'a>(&'a File);

impl Drop for First<'_> {
    fn drop(&mut self) {
        // If this failed, the lock would go with the process; meanwhile others walk past us.
        let _ = self.0.unlock();
    }
}

impl Turn {
    pub(super) fn new(db: &Path) -> Self {
        let side = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(beside(db, "-turn"));
        Self {
            side: side.ok(),
            stand: STAND,
            told: None,
            usual_wait: Duration::ZERO,
            stuck: Arc::default(),
        }
    }

    /// Begins a write transaction, in turn, or past the line from when on it is `urgent`. Gives up
    /// after `limit`.
    pub(super) fn begin(
        &mut self,
        db: &Connection,
        limit: Duration,
        urgent: impl FnMut() -> bool,
    ) -> Done<()> {
        let begun = self.wait(db, limit, urgent);
        self.stuck.store(false, Ordering::Release);
        begun
    }

    fn wait(
        &mut self,
        db: &Connection,
        limit: Duration,
        mut urgent: impl FnMut() -> bool,
    ) -> Done<()> {
        let side = self.side.as_ref();
        let start = monotonic();
        let (mut paused, mut warned) = (Duration::ZERO, false);
        let mut first = None;
        let (mut seen, mut seen_at) = (side.and_then(steps), Duration::ZERO);
        loop {
            // Under a virtual clock no time passes here, so the paused count too.
            let waited = (monotonic() - start).max(paused);
            first = first.or_else(|| step_up(side, &mut self.told));
            let ahead = first.is_some() || side.is_none() || urgent();
            let now = side.filter(|_| !ahead).and_then(steps);
            if !ahead && now != seen {
                (seen, seen_at) = (now, waited);
                self.stand = STAND;
            }
            if ahead || waited >= seen_at + self.stand {
                match begin(db) {
                    Err(error) if is_busy(&error) && waited < limit => {}
                    Err(error) => return Err(Fault::Broken(explain(error))),
                    Ok(()) => {
                        self.stand = if ahead { STAND } else { self.stand / 2 };
                        self.usual_wait = (self.usual_wait * 3 + waited) / 4;
                        return Ok(());
                    }
                }
            }
            if waited > STAND {
                self.stuck.store(true, Ordering::Release);
            }
            if waited > LONG && !warned {
                warned = true;
                tracing::warn!(
                    "another transaction on the file keeps renewals and all other calls waiting"
                );
            }
            let pause = match ahead {
                true if waited > LONG => LONG_PAUSE,
                true => FIRST_PAUSE,
                false => in_line(self.usual_wait, waited, waited.saturating_sub(seen_at)),
            };
            std::thread::sleep(pause);
            paused += pause;
        }
    }
}

/// How long a process further back pauses: at least an eighth of the time for which the line has
/// not moved, since asking behind a frozen process helps nobody.
fn in_line(usual: Duration, waited: Duration, still: Duration) -> Duration {
    let beyond = waited.as_secs_f64() / usual.as_secs_f64().max(1e-6);
    (usual.div_f64(beyond.max(1.0)).max(still) / 8)
        .clamp(LINE_PAUSE.0, LINE_PAUSE.1)
        .mul_f64(0.5 + fastrand::f64())
}

/// Steps up to the head of the line if it is free, and now and then lets the others know.
fn step_up<'a>(side: Option<&'a File>, told: &mut Option<Instant>) -> Option<First<'a>> {
    let side = side.filter(|side| side.try_lock().is_ok())?;
    let now = monotonic();
    if told.is_none_or(|told| now - told >= TELL) {
        *told = Some(now);
        // If this fails, the others only walk past sooner.
        let _ = side.set_len((steps(side).unwrap_or(0) + 1) % STEPS);
    }
    Some(First(side))
}

/// Changes when a process steps up.
fn steps(side: &File) -> Option<u64> {
    side.metadata().ok().map(|side| side.len())
}

fn begin(db: &Connection) -> rusqlite::Result<()> {
    db.prepare_cached("BEGIN IMMEDIATE")?
        .execute([])
        .map(|_| ())
}
