//! A directory for what must not stay.

use std::path::{Path, PathBuf};

use super::Trouble;
use crate::job::JobId;

/// A directory that is gone with its guard.
pub(super) struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    pub(super) fn new(parent: &Path, name: &str, keep: bool) -> Result<Self, Trouble> {
        let path = parent.join(format!("{name}-{}", JobId::generate()));
        std::fs::create_dir(&path)
            .map_err(|error| Trouble::Failed(format!("{}: {error}", path.display())))?;
        Ok(Self { path, keep })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
