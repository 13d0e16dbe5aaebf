//! Wake-ups from other processes: one connection that listens.
//!
//! It must reach the server itself: a pooler in transaction mode forgets who listens. Where it cannot,
//! and while it is down, sleepers still look once a second. Whenever it comes up, everybody looks:
//! nobody knows what was missed.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::{AsyncMessage, Config};

use super::CONNECT_LIMIT;
use super::dial::Dial;
use crate::job::QueueName;
use crate::store::wake::Wakers;

/// How long to wait before the next try to connect: doubles up to the last.
const FIRST_NAP: Duration = Duration::from_millis(50);
const LAST_NAP: Duration = Duration::from_secs(5);

/// The listener of a process, once anybody sleeps.
#[derive(Debug)]
pub(super) struct Listener {
    task: Mutex<Option<AbortHandle>>,
    came_up: watch::Sender<u64>,
}

/// Whose bells are heard.
#[derive(Clone, Debug)]
pub(super) struct Ear {
    pub(super) channel: String,
    pub(super) namespace: String,
    /// The mark of the process's own bells.
    pub(super) from: u64,
}

impl Default for Listener {
    fn default() -> Self {
        Self {
            task: Mutex::default(),
            came_up: watch::channel(0).0,
        }
    }
}

impl Listener {
    /// Changes whenever bells can be heard again.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.came_up.subscribe()
    }

    /// Starts to listen, unless that is being done. To be called once the bell is hung up.
    pub(super) fn start(&self, config: &Config, dial: &Dial, ear: &Ear, wakers: &Arc<Wakers>) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        // A runtime that was shut down took the task with it.
        if task.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (config, dial, wakers) = (config.clone(), dial.clone(), Arc::downgrade(wakers));
        let (ear, came_up) = (ear.clone(), self.came_up.clone());
        let listening =
            tokio::spawn(async move { serve(&config, &dial, &ear, &wakers, &came_up).await });
        *task = Some(listening.abort_handle());
    }

    pub(super) fn stop(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}

async fn serve(
    config: &Config,
    dial: &Dial,
    ear: &Ear,
    wakers: &Weak<Wakers>,
    came_up: &watch::Sender<u64>,
) {
    let mut nap = FIRST_NAP;
    while wakers.strong_count() > 0 {
        let before = *came_up.borrow();
        // Why it ended is of no use: the server's log says so, and sleepers look by themselves.
        let _ = listen(config, dial, ear, wakers, came_up).await;
        let failed = *came_up.borrow() == before;
        nap = if failed {
            (nap * 2).min(LAST_NAP)
        } else {
            FIRST_NAP
        };
        tokio::time::sleep(nap.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

/// Ends when the connection does, or when nobody is left to be woken.
async fn listen(
    config: &Config,
    dial: &Dial,
    ear: &Ear,
    wakers: &Weak<Wakers>,
    came_up: &watch::Sender<u64>,
) -> Option<()> {
    let connecting = timeout(CONNECT_LIMIT, config.connect(dial.clone()));
    let (client, mut connection) = connecting.await.ok()?.ok()?;
    let listen = format!("LISTEN \"{}\"", ear.channel);
    let mut listen = pin!(timeout(CONNECT_LIMIT, client.batch_execute(&listen)));
    let mut listens = false;
    loop {
        tokio::select! {
            done = &mut listen, if !listens => {
                done.ok()?.ok()?;
                listens = true;
                came_up.send_modify(|times| *times += 1);
            }
            message = poll_fn(|cx| connection.poll_message(cx)) => match message {
                Some(Ok(AsyncMessage::Notification(bell))) => {
                    ring(&*wakers.upgrade()?, bell.payload(), ear);
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return None,
            },
        }
    }
}

/// A bell as it is sent: who rings, suspects or not, how many jobs, namespace, queue.
pub(super) fn bell(ear: &Ear, queue: &QueueName, suspect: bool, jobs: usize) -> String {
    let Ear {
        namespace, from, ..
    } = ear;
    format!("{from:x} {} {jobs} {namespace} {queue}", u8::from(suspect))
}

/// Wakes whom it concerns. A process has heard its own bells already.
fn ring(wakers: &Wakers, bell: &str, ear: &Ear) {
    let mut parts = bell.split(' ');
    let mut next = || parts.next().unwrap_or_default();
    let (from, suspect, jobs) = (next(), next(), next());
    let (namespace, queue) = (next(), next());
    if u64::from_str_radix(from, 16) == Ok(ear.from) || namespace != ear.namespace {
        return;
    }
    if let (Ok(jobs), Ok(queue)) = (jobs.parse(), QueueName::new(queue)) {
        wakers.wake(&queue, suspect == "1", jobs);
    }
}
