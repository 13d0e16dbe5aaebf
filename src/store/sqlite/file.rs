//! The state of the file: whether it is still the one that was opened, and whether there is room.
//!
//! A process that has a file open does not notice when it is removed or replaced. It could go on
//! with the old file, and everything that it acknowledged there would be lost with it. So
//! [`SameFile`] compares the two.
//!
//! Next to the database is a file that only takes up room, the [`Reserve`] (`<db>-reserve`). When
//! the disk is full and a renewal, a settlement or a checkpoint cannot be committed, the reserve is
//! removed and the call is made again. From then on, until the reserve can be put back, nothing is
//! enqueued or claimed: the freed room is for ending the work that runs.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use super::migrate::beside;
use crate::clock::monotonic;
use crate::error::{Error, ErrorKind};

/// A file, as it was when it was opened.
#[derive(Debug, Clone)]
pub(super) struct SameFile {
    path: PathBuf,
    number: Option<(u64, u64)>,
}

impl SameFile {
    pub(super) fn at(path: &Path) -> Self {
        Self {
            number: number(path),
            path: path.to_owned(),
        }
    }

    /// # Errors
    /// `Replaced`, if another file or none is there now.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.number.is_none() || number(&self.path) == self.number {
            return Ok(());
        }
        let why = format!(
            "{} was removed or replaced while it was open; nothing is written to the old file any \
             more: restart this process",
            self.path.display()
        );
        Err(Error::new(ErrorKind::Replaced, why))
    }
}

/// What tells a file from all others, where the system says.
#[cfg(unix)]
fn number(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

#[cfg(not(unix))]
fn number(_: &Path) -> Option<(u64, u64)> {
    None
}

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

    /// Whether it was given up and there is no room to put it back.
    pub(super) fn is_missing(&mut self) -> bool {
        if fs::metadata(&self.path).is_ok() {
            return false;
        }
        let now = monotonic();
        if self.tried.is_some_and(|tried| now - tried < EVERY) {
            return true;
        }
        let is_full = self.put_back().is_err_and(|error| {
            // If it cannot be put back for another reason, the store works without it.
            matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            )
        });
        self.tried = is_full.then_some(now);
        is_full
    }

    /// Frees the room. Returns whether there was any.
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
        // Not zeros: some file systems take no room for those.
        let mut room = vec![0; BYTES];
        fastrand::Rng::new().fill(&mut room);
        file.write_all(&room).inspect_err(|_| {
            // Half a reserve is of no use, and would look like a whole one.
            let _ = fs::remove_file(&self.path);
        })
    }
}

/// The refusal of a call that would take the room that running work needs.
pub(super) fn no_room() -> Error {
    let why = "the disk is full, and the reserve is kept for running work; free some space";
    Error::new(ErrorKind::Full, why)
}
