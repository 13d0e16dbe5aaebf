//! Room for work at hand on a full disk.
//!
//! Beside the file lies another that holds nothing but room (`<db>-reserve`). When the disk is full
//! and a renewal, a settlement or a checkpoint finds no room for its commit, it is removed, and the
//! call goes again. From then on, until there is room for it once more, nothing is enqueued or
//! claimed: what was given up is there to end the work that runs.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use super::migrate::beside;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind};

/// Enough for hundreds of pages in the log, which begins anew once it is written back.
const BYTES: usize = 1 << 20;
/// How often to try to put it back.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    tried: Option<Instant>,
}

impl Reserve {
    pub(super) fn of(db: &Path) -> Self {
        Self {
            path: beside(db, "-reserve"),
            tried: None,
        }
    }

    /// Whether it is given up and there is no room to put it back.
    pub(super) fn is_missing(&mut self) -> bool {
        if fs::metadata(&self.path).is_ok() {
            return false;
        }
        let now = monotonic();
        if self.tried.is_some_and(|tried| now - tried < EVERY) {
            return true;
        }
        let is_full = self.put_back().is_err_and(|error| {
            // Where it cannot be for another reason, all goes on without.
            matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            )
        });
        self.tried = is_full.then_some(now);
        is_full
    }

    /// Gives the room to whoever needs it. Whether there was any.
    pub(super) fn give_up(&mut self) -> bool {
        self.tried = Some(monotonic());
        fs::remove_file(&self.path).is_ok()
    }

    fn put_back(&self) -> io::Result<()> {
        let mut file = match File::create_new(&self.path) {
            // Another process was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            file => file?,
        };
        // Not zeros: some file systems keep those in no room at all.
        let mut room = vec![0; BYTES];
        fastrand::Rng::new().fill(&mut room);
        file.write_all(&room).inspect_err(|_| {
            // Half of it is of no use to anybody, and would look whole.
            let _ = fs::remove_file(&self.path);
        })
    }
}

/// The refusal of what would take the room that running work needs.
pub(super) fn no_room() -> Error {
    let why = "the disk is full, and what was in reserve is kept for work that runs; free some";
    Error::new(ErrorKind::Full, why)
}
