//! Taking turns: several processes write to one file, none starves, and renewals stand in no line.
//!
//! The engine lets whoever asks first after a commit have the write lock, and that is the process
//! that just had it. So writers stand in line: the first of them holds a side file (`<db>-turn`)
//! and asks for the write lock, the others ask for the side file. Who has just committed finds
//! somebody before it, and only the first asks often: a crowd that waits leaves the processor to
//! the one that works. Who has renewals to write walks past the line and waits for no more than
//! the turn under way, the first in line, and other renewals.
//!
//! Locks die with their process. Who steps up changes the length of the side file, so the others
//! see that the line moves. A first in line that is frozen keeps the side file, and the line stands
//! still: then they walk past it, and each time sooner. Without the side file everything works,
//! only less fairly.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;
use tokio::time::Instant;

use super::fault::{Done, Fault, explain, is_busy};
use super::migrate::beside;
use crate::clock::monotonic;

/// Between two questions of the first in line, and of those who walk past it.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
/// Between two questions of somebody in line: an eighth of its last wait or of this one, within
/// these. So a crowd of any size asks about as often.
const LINE_PAUSE: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(8));
/// How long to stand in a line that does not move: longer than a slow disk takes for a turn, and
/// far less than a lease.
const STAND: Duration = Duration::from_millis(250);
/// How often the first in line tells that the line moves.
const TELL: Duration = Duration::from_millis(5);
/// The side file's length counts the steps, up to this: it is never written, and takes no room.
const STEPS: u64 = 1 << 10;
/// From here on somebody should know: a handler's own transaction, or a frozen process.
const LONG: Duration = Duration::from_secs(1);
const LONG_PAUSE: Duration = Duration::from_millis(2);

/// One process's part in taking turns.
#[derive(Debug)]
pub(super) struct Turn {
    side: Option<File>,
    /// How long to stand in a line that does not move: halved when it did not in that time.
    stand: Duration,
    /// When this process last told that it had stepped up.
    told: Option<Instant>,
    last_wait: Duration,
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
            last_wait: Duration::ZERO,
        }
    }

    /// Begins a write transaction, in turn, or past the line from when on it is `urgent`. Gives up
    /// after `limit`.
    pub(super) fn begin(
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
                        self.last_wait = waited;
                        return Ok(());
                    }
                }
            }
            if waited > LONG && !warned {
                warned = true;
                tracing::warn!(
                    "a transaction of somebody else keeps renewals and all other calls waiting"
                );
            }
            let pause = match ahead {
                true if waited > LONG => LONG_PAUSE,
                true => FIRST_PAUSE,
                false => (self.last_wait.max(waited) / 8)
                    .clamp(LINE_PAUSE.0, LINE_PAUSE.1)
                    .mul_f64(0.5 + fastrand::f64()),
            };
            std::thread::sleep(pause);
            paused += pause;
        }
    }
}

/// Steps up to the head of the line, if nobody is there, and now and then tells the others.
fn step_up<'a>(side: Option<&'a File>, told: &mut Option<Instant>) -> Option<First<'a>> {
    let side = side.filter(|side| side.try_lock().is_ok())?;
    let now = monotonic();
    if told.is_none_or(|told| now - told >= TELL) {
        *told = Some(now);
        // Who cannot tell is walked past by the others sooner.
        let _ = side.set_len((steps(side).unwrap_or(0) + 1) % STEPS);
    }
    Some(First(side))
}

/// Changes when somebody steps up.
fn steps(side: &File) -> Option<u64> {
    side.metadata().ok().map(|side| side.len())
}

fn begin(db: &Connection) -> rusqlite::Result<()> {
    db.prepare_cached("BEGIN IMMEDIATE")?
        .execute([])
        .map(|_| ())
}
