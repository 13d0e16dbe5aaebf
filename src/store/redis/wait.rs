//! wait: sleep until work may exist.
//!
//! A handle has one channel of its own. A claim that finds less than it wants is entered in the
//! partition as a sleeper, in the same step; a function that makes jobs ready takes out as many
//! sleepers and publishes on the channel of each. So one sleeper wakes per job. A sleeper
//! listens, and looks once a second.
//!
//! A message can be lost, and a process that was woken can be gone. So once a second a sleeper
//! looks whether the lines have jobs to claim, which job is due next and which deadline is next.
//! What it would oversleep costs a second at most, and an idle worker claims only when its sleep
//! ends.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::Value;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::RedisStore;
use super::keys::{Keys, LINES, channel, line};
use super::queue::Partition;
use super::wire::garbled;
use crate::clock::{Timestamp, monotonic};
use crate::error::Result;
use crate::job::{Namespace, QueueName};
use crate::rules::order;
use crate::store::RequestId;
use crate::store::wake::Wakers;

/// How long a sleeper is on the list: slightly longer than it sleeps. A sleeper that has died
/// swallows wake-ups for no longer than this, and each costs the others a second at most.
pub(super) const SLEEP: Duration = Duration::from_secs(6);
/// How long a sleep is at most.
pub(super) const LONGEST: Duration = Duration::from_secs(5);
/// A lost wake-up costs at most this.
const LOOK: Duration = Duration::from_secs(1);

/// The sleepers of a handle, and how it hears of work.
pub(super) struct Sleepers {
    channel: String,
    wakers: Arc<Wakers>,
    hears: Arc<AtomicBool>,
    /// Held while the channel is opened.
    door: tokio::sync::Mutex<()>,
    listener: Mutex<Option<AbortHandle>>,
    numbers: AtomicU64,
    /// Those whose claim lay down, and who have not come to wait yet.
    down: Mutex<Vec<Down>>,
    /// On which lists a name still is, and since when at the latest.
    listed: Mutex<HashMap<String, Listed>>,
}

/// Since when a name is on lists, and the keys of those.
type Listed = (Instant, HashSet<Vec<u8>>);

/// A sleeper that is on the list of some partitions.
pub(super) struct Down {
    queues: Vec<QueueName>,
    pub(super) suspects: bool,
    woken: oneshot::Receiver<()>,
    since: Instant,
    /// The partitions, and what each has said of itself.
    partitions: Vec<Seen>,
    name: String,
    /// Whether it came to wait without having claimed.
    is_guest: bool,
}

/// What a sleeper knows of a partition: what is no news to it.
pub(super) struct Seen {
    partition: Partition,
    /// Before these moments, by the partition's clock, no job fell due and no lease ended when the
    /// sleeper lay down.
    due: Timestamp,
    deadline: Timestamp,
}

impl Seen {
    pub(super) fn of(partition: &Partition, now: Timestamp, (due, deadline): Next) -> Self {
        let moment = |next: Option<Duration>| now.after(next.map_or(SLEEP, |next| next.min(SLEEP)));
        Self {
            partition: partition.clone(),
            due: moment(due),
            deadline: moment(deadline),
        }
    }
}

fn sleep_key(partition: &Partition) -> Vec<u8> {
    partition.keys().named("sleep")
}

impl Sleepers {
    pub(super) fn new(namespace: &Namespace) -> Self {
        Self {
            channel: channel(namespace),
            wakers: Arc::default(),
            hears: Arc::default(),
            door: tokio::sync::Mutex::default(),
            listener: Mutex::default(),
            numbers: AtomicU64::new(0),
            down: Mutex::default(),
            listed: Mutex::default(),
        }
    }

    /// Gets ready to sleep with a claim: from here on a wake-up is heard. None while nobody
    /// listens.
    pub(super) fn prepare(
        &self,
        request: RequestId,
        mut queues: Vec<QueueName>,
        suspects: bool,
    ) -> Option<Down> {
        if !self.hears.load(Ordering::Acquire) {
            return None;
        }
        queues.sort();
        let session = request.session.as_bytes();
        let name = format!(
            "{} {:02x}{:02x}{:02x}{}",
            self.channel, session[0], session[1], session[2], request.lane
        );
        // Whoever lay down before under this name has got up.
        self.lock().retain(|down| down.name != name);
        Some(Down {
            woken: self.wakers.sleep(&queues, suspects),
            queues,
            suspects,
            since: monotonic(),
            partitions: Vec::new(),
            name,
            is_guest: false,
        })
    }

    /// The claim lay down everywhere.
    pub(super) fn lie_down(&self, down: Down) {
        self.lock().push(down);
    }

    /// Notes whether a name is on the list of a partition.
    pub(super) fn note(&self, name: &str, partition: &Partition, lies: bool) {
        let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        if lies {
            listed.retain(|_, (since, _)| since.elapsed() < SLEEP);
            let (since, lists) = listed
                .entry(name.to_owned())
                .or_insert_with(|| (monotonic(), HashSet::new()));
            *since = monotonic();
            lists.insert(sleep_key(partition));
        } else if let Some((_, lists)) = listed.get_mut(name) {
            lists.remove(&sleep_key(partition));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Down>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who lay down for just these queues, if that is not too long ago.
    fn take(&self, queues: &[QueueName], suspects: bool) -> Option<Down> {
        let mut wanted = queues.to_vec();
        wanted.sort();
        let mut all = self.lock();
        all.retain(|down| down.since.elapsed() < LONGEST);
        let is_it = |down: &Down| down.queues == wanted && down.suspects == suspects;
        let at = all.iter().position(is_it)?;
        Some(all.remove(at))
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        let listener = self.listener.get_mut();
        if let Some(listener) = listener.unwrap_or_else(PoisonError::into_inner) {
            listener.abort();
        }
    }
}

impl Down {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn add(&mut self, seen: Seen, lies: bool) {
        self.partitions.extend(lies.then_some(seen));
    }
}

impl RedisStore {
    /// Listens, if nobody does.
    async fn listen(&self) -> Result<()> {
        let sleepers = &self.shared.sleepers;
        if sleepers.hears.load(Ordering::Acquire) {
            return Ok(());
        }
        let _door = sleepers.door.lock().await;
        if sleepers.hears.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut listener = self.link.listen(&sleepers.channel).await?;
        sleepers.hears.store(true, Ordering::Release);
        let (wakers, hears) = (Arc::clone(&sleepers.wakers), Arc::clone(&sleepers.hears));
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
        let slot = sleepers.listener.lock();
        *slot.unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
        Ok(())
    }

    pub(super) async fn wait_for(
        &self,
        queues: &[QueueName],
        suspects: bool,
        limit: Duration,
    ) -> Result<()> {
        let until = monotonic() + limit.min(LONGEST);
        self.listen().await?;
        let down = match self.shared.sleepers.take(queues, suspects) {
            Some(down) => Some(down),
            None => self.lie_down(queues, suspects).await?,
        };
        let Some(mut down) = down else {
            return Ok(());
        };
        let until = until.min(down.since + LONGEST);
        let is_woken = loop {
            let next = until.min(monotonic() + LOOK);
            if tokio::time::timeout_at(next, &mut down.woken).await.is_ok() {
                break true;
            }
            if next == until || self.sees_work(&down).await? {
                break false;
            }
        };
        // A claim lies down under another name: what is left of this one would swallow wake-ups.
        if down.is_guest && !(is_woken && down.partitions.len() == 1) {
            self.get_up(&down).await?;
        }
        Ok(())
    }

    /// Leaves all lists: whoever has what it wanted must not be woken in the place of others.
    pub(super) async fn get_up(&self, down: &Down) -> Result<()> {
        let lists = {
            let listed = self.shared.sleepers.listed.lock();
            let mut listed = listed.unwrap_or_else(PoisonError::into_inner);
            listed.remove(&down.name).map(|(_, lists)| lists)
        };
        for sleep in lists.unwrap_or_default() {
            let mut get_up = redis::cmd("ZREM");
            get_up.arg(&sleep);
            get_up
                .arg(format!("s{}", down.name))
                .arg(format!("n{}", down.name));
            self.link.run(&sleep, get_up).await?;
        }
        Ok(())
    }

    /// Looks and sleeps for somebody who has not claimed. None if there is work.
    async fn lie_down(&self, queues: &[QueueName], suspects: bool) -> Result<Option<Down>> {
        let sleepers = &self.shared.sleepers;
        let number = sleepers.numbers.fetch_add(1, Ordering::Relaxed);
        let mut down = Down {
            queues: queues.to_vec(),
            suspects,
            woken: sleepers.wakers.sleep(queues, suspects),
            since: monotonic(),
            partitions: Vec::new(),
            name: format!("{} w{number}", sleepers.channel),
            is_guest: true,
        };
        for name in queues {
            let queue = self.queue(name).await?;
            let queue = queue.unwrap_or_else(|| self.default_queue(name));
            for partition in queue.all(0) {
                let seen = self.lie_in(&partition, suspects, down.name.as_bytes());
                let Some((now, next)) = seen.await? else {
                    self.get_up(&down).await?;
                    return Ok(None);
                };
                sleepers.note(&down.name, &partition, true);
                down.add(Seen::of(&partition, now, next), true);
            }
        }
        Ok(Some(down))
    }

    /// Whether there is something to claim, to promote or to expire earlier than there was, of
    /// which nobody told.
    async fn sees_work(&self, down: &Down) -> Result<bool> {
        for seen in &down.partitions {
            if self.has_ready(seen.partition.keys(), down.suspects).await?
                || self.begins_before("due", seen, seen.due).await?
                || self.begins_before("ends", seen, seen.deadline).await?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether there is a job in one of the lines, and they are not paused.
    async fn has_ready(&self, keys: &Keys, suspects: bool) -> Result<bool> {
        let lines = (0..LINES).filter(|at| suspects || !order::is_suspects(*at));
        let mut exists = redis::cmd("EXISTS");
        for at in lines {
            exists.arg(keys.named(&line(at)));
        }
        match self.link.run(&keys.meta, exists).await? {
            Value::Int(0) => return Ok(false),
            Value::Int(_) => {}
            _ => return Err(garbled()),
        }
        let mut paused = redis::cmd("HGET");
        paused.arg(&keys.meta).arg("paused");
        let paused = self.link.run(&keys.meta, paused).await?;
        Ok(!matches!(&paused, Value::BulkString(is) if is == b"1"))
    }

    /// Whether the first in a list by time is earlier than that.
    async fn begins_before(&self, list: &str, seen: &Seen, known: Timestamp) -> Result<bool> {
        let list = seen.partition.keys().named(list);
        let mut first = redis::cmd("ZRANGE");
        first.arg(&list).arg(0).arg(0).arg("WITHSCORES");
        let pair = self.link.run(&list, first).await?;
        let pair: Vec<Vec<u8>> = redis::from_redis_value(pair).map_err(|_| garbled())?;
        let score = pair.get(1).and_then(|score| str::from_utf8(score).ok());
        let micros = score.and_then(|score| score.parse::<f64>().ok());
        Ok(micros.is_some_and(|micros| micros < known.as_micros() as f64))
    }

    /// Lies down in a partition: its time, its next due job and its next deadline. None if there is
    /// work.
    async fn lie_in(
        &self,
        partition: &Partition,
        suspects: bool,
        sleeper: &[u8],
    ) -> Result<Option<(Timestamp, Next)>> {
        let args = [if suspects { b"1" } else { b"0" }, sleeper];
        let mut reply = self
            .look(&self.functions().wait, partition.keys(), &args)
            .await?;
        if reply.body.u8()? == 1 {
            return Ok(None);
        }
        let next = (reply.body.maybe_micros()?, reply.body.maybe_micros()?);
        Ok(Some((reply.now, next)))
    }
}

/// How far off the next due job and the next deadline are.
pub(super) type Next = (Option<Duration>, Option<Duration>);

/// Tells that nobody listens any longer.
struct Deaf {
    hears: Arc<AtomicBool>,
}

impl Drop for Deaf {
    fn drop(&mut self) {
        self.hears.store(false, Ordering::Release);
    }
}
