//! A temporary directory, and a namespace of its own, for data that must not stay.

use std::path::{Path, PathBuf};

use super::{Done, Trouble};
use leasehold::Client;
use leasehold::job::{JobId, JobState, Namespace};
use leasehold::limits;
use leasehold::store::{ControlCommand, Select};

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

/// The URL of the same store, in a namespace that nobody else has.
pub(super) fn apart(url: &str, word: &str) -> Result<(String, Namespace), Trouble> {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let kept = query.split('&').filter(|pair| !pair.is_empty());
    let kept = kept.filter(|pair| !pair.starts_with("namespace="));
    let name = format!("{word}-{}", JobId::generate());
    let namespace = format!("namespace={name}");
    let query: Vec<&str> = kept.chain([namespace.as_str()]).collect();
    Ok((
        format!("{address}?{}", query.join("&")),
        Namespace::new(name)?,
    ))
}

/// Deletes whatever is left in the namespace.
pub(super) async fn purge(client: &Client, word: &str) -> Done {
    for view in client.queues().await? {
        for state in JobState::ALL {
            while view.counts.of(state) > 0 && state != JobState::Leased {
                let purge = ControlCommand::Purge(Select::State {
                    queue: view.queue.clone(),
                    state,
                    max: limits::CALL_ITEMS,
                });
                if client
                    .operator(word)
                    .because("over")
                    .command(purge)
                    .await?
                    .done
                    == 0
                {
                    break;
                }
            }
        }
    }
    Ok(())
}
