//! Whether the path still leads to the file that is open.
//!
//! A file that is removed or replaced stays as it is for those who have it open. They could go on
//! in a world of their own, and everything that they acknowledge there would be lost with them.

use std::path::{Path, PathBuf};

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
