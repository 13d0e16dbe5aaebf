//! Wake-ups from other processes: while anybody sleeps, watch whether the file has changed.
//!
//! The engine has no way to tell one process what another did, but a connection can ask cheaply
//! whether anything was committed. One thread asks, only while somebody sleeps, and the sleepers
//! then look for work with a read.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::migrate::connect;
use super::turn::version;

/// How often to ask: about 0.2 % of a core, and half of it on average until a sleeper knows.
const EVERY: Duration = Duration::from_millis(10);
/// Rounds without a sleeper after which the thread ends.
const LINGER: u32 = 100;

#[derive(Debug)]
pub(super) struct Poll {
    changed: watch::Sender<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sleepers: usize,
    running: bool,
}

/// Somebody sleeps until this is dropped.
pub(super) struct Sleeping(Arc<Poll>);

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

    /// Watches the file until the returned value is dropped.
    pub(super) fn start(self: &Arc<Self>, path: &Path) -> Sleeping {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.sleepers += 1;
        if !state.running {
            let (poll, path) = (Arc::clone(self), path.to_owned());
            let thread = std::thread::Builder::new().name("leasehold-poll".into());
            // Without the thread, sleepers still wake by bells and by their limits.
            state.running = thread.spawn(move || poll.watch(&path)).is_ok();
        }
        Sleeping(Arc::clone(self))
    }

    fn watch(&self, path: &Path) {
        let db = connect(path, false, true);
        let mut seen = None;
        let mut alone = 0;
        loop {
            let now = db.as_ref().ok().and_then(|db| version(db).ok());
            // The first look also counts: something may have happened before the thread was up.
            if now.is_none() || now != seen {
                seen = now;
                self.changed.send_modify(|times| *times += 1);
            }
            std::thread::sleep(EVERY);
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            alone = if state.sleepers == 0 { alone + 1 } else { 0 };
            if alone > LINGER {
                state.running = false;
                return;
            }
        }
    }
}

impl Drop for Sleeping {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.sleepers -= 1;
    }
}
