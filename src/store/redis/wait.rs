//! wait: sleep until work may exist.
//!
//! A handle has one channel of its own. Whoever sleeps is entered in each partition it waits for;
//! a script that makes jobs ready takes out as many sleepers and publishes on the channel of each.
//! So one sleeper wakes per job, and an idle worker sends nothing but its next look.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use super::RedisStore;
use super::keys::channel;
use crate::clock::micros;
use crate::error::Result;
use crate::job::{Namespace, QueueName};
use crate::store::wake::Wakers;

/// A lost wake-up costs at most this.
const LONGEST: Duration = Duration::from_secs(1);

/// The sleepers of a handle, and how it hears of work.
pub(super) struct Bells {
    channel: String,
    wakers: Arc<Wakers>,
    hears: Arc<AtomicBool>,
    /// Held while the channel is opened.
    door: tokio::sync::Mutex<()>,
    ear: Mutex<Option<AbortHandle>>,
    sleepers: AtomicU64,
}

impl Bells {
    pub(super) fn new(namespace: &Namespace) -> Self {
        Self {
            channel: channel(namespace),
            wakers: Arc::default(),
            hears: Arc::default(),
            door: tokio::sync::Mutex::default(),
            ear: Mutex::default(),
            sleepers: AtomicU64::new(0),
        }
    }
}

impl Drop for Bells {
    fn drop(&mut self) {
        let ear = self.ear.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(ear) = ear {
            ear.abort();
        }
    }
}

impl RedisStore {
    /// Listens, if nobody does.
    async fn listen(&self) -> Result<()> {
        let bells = &self.shared.bells;
        if bells.hears.load(Ordering::Acquire) {
            return Ok(());
        }
        let _door = bells.door.lock().await;
        if bells.hears.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut listener = self.link.listen(&bells.channel).await?;
        bells.hears.store(true, Ordering::Release);
        let (wakers, hears) = (Arc::clone(&bells.wakers), Arc::clone(&bells.hears));
        let task = tokio::spawn(async move {
            // Also when the task is dropped with its runtime.
            let _deaf = Deaf { hears };
            while let Some(message) = listener.next().await {
                let suspect = message.first() == Some(&b's');
                let name = message.get(1..).and_then(|name| str::from_utf8(name).ok());
                if let Some(Ok(queue)) = name.map(QueueName::new) {
                    wakers.wake(&queue, suspect, 1);
                }
            }
            wakers.wake_all();
        });
        let mut ear = bells.ear.lock().unwrap_or_else(PoisonError::into_inner);
        *ear = Some(task.abort_handle());
        Ok(())
    }

    pub(super) async fn wait_for(
        &self,
        queues: &[QueueName],
        suspects: bool,
        limit: Duration,
    ) -> Result<()> {
        let limit = limit.min(LONGEST);
        self.listen().await?;
        let bells = &self.shared.bells;
        let bell = bells.wakers.sleep(queues, suspects);
        let number = bells.sleepers.fetch_add(1, Ordering::Relaxed);
        let till = micros(limit).to_string();
        let also: &[u8] = if suspects { b"1" } else { b"0" };
        for name in queues {
            let queue = self.queue(name).await?;
            let queue = queue.unwrap_or_else(|| self.default_queue(name));
            let sleeper = format!("{} {number} {name}", bells.channel);
            for partition in queue.all(0) {
                let script = &self.scripts().wait;
                let args: [&[u8]; 3] = [sleeper.as_bytes(), also, till.as_bytes()];
                let mut reply = self.look(script, partition.keys(), &args).await?;
                if reply.body.u8()? == 1 {
                    return Ok(());
                }
            }
        }
        let _ = tokio::time::timeout(limit, bell).await;
        Ok(())
    }
}

/// Tells that nobody listens any longer.
struct Deaf {
    hears: Arc<AtomicBool>,
}

impl Drop for Deaf {
    fn drop(&mut self) {
        self.hears.store(false, Ordering::Release);
    }
}
