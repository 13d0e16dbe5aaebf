//! Wake-ups from other processes: one connection that listens.
//!
//! Each process has a slot, and a channel of its own. While it has room for jobs of a queue, it
//! holds a lock that says so (`place.sql`): whoever makes a job ready tells one of those processes,
//! and nobody if there is none. The locks end with the connection.
//!
//! It must reach the server itself: a pooler in transaction mode forgets who listens. Where it
//! cannot, and while it is down, sleepers still look once a second. Whenever it comes up, everybody
//! looks: nobody knows what was missed.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::{AsyncMessage, Client, Config, GenericClient};

use super::dial::Dial;
use super::fault::{Done, corrupt};
use super::text::Statements;
use super::tx::{Tx, args};
use super::{CONNECT_LIMIT, Shared};
use crate::clock::monotonic;
use crate::job::QueueName;
use crate::store::wake::Wakers;

/// How long to wait before the next try to connect: doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// A process that neither sleeps nor claims for so long has no room: it is busy, or wants no more.
const ROOM_LASTS: Duration = Duration::from_millis(500);

/// A pooler does not pass this on, and locks of a session that is not ours would stay for ever.
const DIRECT: &str = "-c leasehold_listener.direct=on";

/// What a look for work finds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) is_work: bool,
    pub(super) due: Option<i64>,
    /// When the first lease ends, in microseconds from now; it may have ended.
    pub(super) ends: Option<i64>,
    pub(super) is_busy: bool,
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn look(&self, queues: &[QueueName], suspects: bool) -> Done<Look> {
        let names: Vec<&str> = queues.iter().map(QueueName::as_str).collect();
        let args = args![self.base.namespace => TEXT, names => TEXT_ARRAY, suspects => BOOL,
            self.base.by_hand() => INT8];
        let row = self.row("look", args).await?;
        Ok(Look {
            is_work: row.try_get(0)?,
            due: row.try_get(1)?,
            ends: row.try_get(2)?,
            is_busy: row.try_get(3)?,
        })
    }
}

/// The listener of a process, once anybody sleeps.
#[derive(Debug)]
pub(super) struct Listener {
    task: Mutex<Option<AbortHandle>>,
    came_up: watch::Sender<u64>,
    rooms: Arc<Rooms>,
}

/// For which queues this process has room, and which of that the server knows.
#[derive(Debug)]
struct Rooms {
    wanted: Mutex<HashMap<QueueName, Instant>>,
    changed: Notify,
    told: watch::Sender<Told>,
}

#[derive(Debug, Default)]
struct Told {
    is_up: bool,
    queues: Vec<QueueName>,
}

impl Rooms {
    fn want(&self, queues: &[QueueName]) {
        let (mut wanted, now) = (self.wanted(), monotonic());
        for queue in queues {
            wanted.insert(queue.clone(), now);
        }
    }

    fn wanted(&self) -> MutexGuard<'_, HashMap<QueueName, Instant>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Listener {
    fn default() -> Self {
        let rooms = Rooms {
            wanted: Mutex::default(),
            changed: Notify::new(),
            told: watch::channel(Told::default()).0,
        };
        Self {
            task: Mutex::default(),
            came_up: watch::channel(0).0,
            rooms: Arc::new(rooms),
        }
    }
}

impl Listener {
    /// Changes whenever wake-ups can be heard again.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.came_up.subscribe()
    }

    /// Whether wake-ups are heard.
    pub(super) fn is_up(&self) -> bool {
        self.rooms.told.borrow().is_up
    }

    /// Starts to listen, unless that is being done. To be called once the sleeper is known.
    pub(super) fn start(&self, shared: &Shared) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        // A runtime that was shut down took the task with it.
        if task.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let schema = &shared.options.schema;
        let connection = Connection {
            config: shared.config.clone(),
            dial: shared.dial.clone(),
            channel: format!("leasehold_{schema}"),
            namespace: shared.options.namespace.as_str().to_owned(),
            sql: Statements::new(schema),
            wakers: Arc::downgrade(&shared.wakers),
            came_up: self.came_up.clone(),
            rooms: Arc::clone(&self.rooms),
        };
        *task = Some(tokio::spawn(async move { connection.serve().await }).abort_handle());
    }

    pub(super) fn stop(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
        self.rooms.told.send_replace(Told::default());
    }

    /// Tells the server that this process has room for jobs of these queues. Returns once it knows,
    /// or if nobody listens.
    pub(super) async fn has_room(&self, queues: &[QueueName]) {
        self.rooms.want(queues);
        let mut told = self.rooms.told.subscribe();
        let knows =
            |told: &Told| !told.is_up || queues.iter().all(|queue| told.queues.contains(queue));
        if knows(&told.borrow_and_update()) {
            return;
        }
        self.rooms.changed.notify_one();
        let _ = timeout(ROOM_LASTS, told.wait_for(knows)).await;
    }

    /// Tells the server that this process has room no more.
    pub(super) fn is_full<'q>(&self, queues: impl IntoIterator<Item = &'q QueueName>) {
        let mut wanted = self.rooms.wanted();
        let mut had = false;
        for queue in queues {
            had |= wanted.remove(queue).is_some();
        }
        drop(wanted);
        if had {
            self.rooms.changed.notify_one();
        }
    }
}

/// Whose wake-ups are heard, and how.
struct Connection {
    config: Config,
    dial: Dial,
    channel: String,
    namespace: String,
    sql: Statements,
    wakers: Weak<Wakers>,
    came_up: watch::Sender<u64>,
    rooms: Arc<Rooms>,
}

impl Connection {
    async fn serve(&self) {
        let mut pause = FIRST_PAUSE;
        while self.wakers.strong_count() > 0 {
            let before = *self.came_up.borrow();
            // Why it ended is of no use: the server's log says so, and sleepers look by themselves.
            let _ = self.listen().await;
            self.rooms.told.send_replace(Told::default());
            let failed = *self.came_up.borrow() == before;
            pause = if failed {
                (pause * 2).min(LAST_PAUSE)
            } else {
                FIRST_PAUSE
            };
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        }
    }

    /// Ends when the connection does, or when nobody is left to be woken.
    async fn listen(&self) -> Option<()> {
        let mut config = self.config.clone();
        let options = config.get_options().unwrap_or_default();
        config.options(format!("{options} {DIRECT}"));
        let connecting = timeout(CONNECT_LIMIT, config.connect(self.dial.clone()));
        let (client, mut connection) = connecting.await.ok()?.ok()?;
        let mut telling = pin!(self.tell(&client));
        loop {
            tokio::select! {
                told = &mut telling => return told.ok(),
                message = poll_fn(|cx| connection.poll_message(cx)) => match message {
                    Some(Ok(AsyncMessage::Notification(note))) => {
                        wake(&*self.wakers.upgrade()?, note.payload(), &self.namespace);
                    }
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return None,
                },
            }
        }
    }

    /// Takes a slot, listens, and tells the server for which queues there is room.
    async fn tell(&self, db: &Client) -> Done<()> {
        let rows = db.query_typed(self.sql.get("slot"), &[]).await?;
        let row = rows.first().ok_or_else(|| corrupt("no slot is free"))?;
        let slot: i32 = row.try_get(0)?;
        db.batch_execute(&format!("LISTEN \"{}_{slot}\"", self.channel))
            .await?;
        let mut held: Vec<QueueName> = Vec::new();
        self.tell_rooms(db, slot, &mut held).await?;
        self.came_up.send_modify(|times| *times += 1);
        loop {
            // One that changed nothing for so long is looked at, too.
            let _ = timeout(ROOM_LASTS, self.rooms.changed.notified()).await;
            self.tell_rooms(db, slot, &mut held).await?;
        }
    }

    async fn tell_rooms(&self, db: &Client, slot: i32, held: &mut Vec<QueueName>) -> Done<()> {
        let is_asleep = |queue: &QueueName| {
            let wakers = self.wakers.upgrade();
            wakers.is_some_and(|wakers| wakers.has_sleeper(queue))
        };
        let wanted: Vec<QueueName> = {
            let mut wanted = self.rooms.wanted();
            let now = monotonic();
            wanted.retain(|queue, since| now < *since + ROOM_LASTS || is_asleep(queue));
            // Before the lock is let go of: who wants room from now on is told that it is not
            // known.
            let told = &self.rooms.told;
            told.send_modify(|told| told.queues.retain(|queue| wanted.contains_key(queue)));
            wanted.keys().cloned().collect()
        };
        let named = |queues: &mut dyn Iterator<Item = &QueueName>| -> Vec<String> {
            queues.map(ToString::to_string).collect()
        };
        let full = named(&mut held.iter().filter(|queue| !wanted.contains(queue)));
        let room = named(&mut wanted.iter().filter(|queue| !held.contains(queue)));
        for (statement, queues) in [("are_full", full), ("have_room", room)] {
            if !queues.is_empty() {
                let args = args![self.namespace => TEXT, queues => TEXT_ARRAY, slot => INT4];
                db.query_typed(self.sql.get(statement), args).await?;
            }
        }
        held.clone_from(&wanted);
        self.rooms.told.send_replace(Told {
            is_up: true,
            queues: wanted,
        });
        Ok(())
    }
}

/// Wakes whom it concerns. A wake-up says: for suspects or not, how many jobs, namespace, queue.
fn wake(wakers: &Wakers, note: &str, ours: &str) {
    let mut parts = note.split(' ');
    let mut next = || parts.next().unwrap_or_default();
    let (suspect, jobs) = (next(), next());
    let (namespace, queue) = (next(), next());
    if namespace != ours {
        return;
    }
    if let (Ok(jobs), Ok(queue)) = (jobs.parse(), QueueName::new(queue)) {
        wakers.wake(&queue, suspect == "1", jobs);
    }
}
