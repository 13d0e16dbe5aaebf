//! Queues and their partitions: which there are, and which job goes where.
//!
//! A queue is made by its first enqueue or command. Its number of partitions is fixed then. A job
//! goes to the partition that its exclusive key names by its hash; without one, its unique key;
//! without that, its id. So both kinds of key stay in one partition each as long as a job does not
//! carry two that disagree: then the exclusive key wins, and the unique key holds among the jobs of
//! that partition.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use redis::Value;

use super::RedisStore;
use super::keys::Keys;
use super::wire::garbled;
use crate::error::{Error, ErrorKind, Result};
use crate::job::{JobId, Namespace, NewJob, QueueName};

/// The version of the layout, as META has it.
pub(super) const LAYOUT: u8 = 3;

/// The field of META with the number of the queue's partitions.
const PARTITIONS: &str = "partitions";

/// How a queue stands on the list of queues.
fn listed(partitions: u16) -> String {
    format!("{partitions} layout={LAYOUT}")
}

pub(super) fn other_layout(what: impl fmt::Display) -> Error {
    let why = format!(
        "{what} has the layout of another version of leasehold, which this one cannot read; use \
         another namespace, or delete its keys"
    );
    Error::new(ErrorKind::Unsupported, why)
}

/// A queue, as it was made.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) name: QueueName,
    pub(super) partitions: Vec<Keys>,
}

/// One partition of a queue.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    pub(super) queue: Arc<Queue>,
    pub(super) number: u16,
}

impl Partition {
    pub(super) fn keys(&self) -> &Keys {
        &self.queue.partitions[usize::from(self.number)]
    }
}

impl Queue {
    pub(super) fn new(namespace: &Namespace, name: &QueueName, partitions: u16) -> Arc<Self> {
        let keys = (0..partitions).map(|number| Keys::of(namespace, name, number, partitions));
        Arc::new(Self {
            name: name.clone(),
            partitions: keys.collect(),
        })
    }

    pub(super) fn partition(self: &Arc<Self>, number: u16) -> Option<Partition> {
        let there = usize::from(number) < self.partitions.len();
        there.then(|| Partition {
            queue: Arc::clone(self),
            number,
        })
    }

    /// All partitions, from one of them on.
    pub(super) fn all(self: &Arc<Self>, first: u64) -> impl Iterator<Item = Partition> {
        let count = self.partitions.len() as u64;
        (0..count).map(move |at| Partition {
            queue: Arc::clone(self),
            number: ((first + at) % count) as u16,
        })
    }

    /// The partition of a job.
    pub(super) fn place(&self, id: JobId, job: &NewJob) -> u16 {
        if self.partitions.len() == 1 {
            return 0;
        }
        let hash = match (&job.exclusive, &job.unique) {
            (Some(key), _) => hash(key.as_str().as_bytes()),
            (None, Some(unique)) => hash(unique.key.as_str().as_bytes()),
            (None, None) => hash(id.as_bytes()),
        };
        (hash % self.partitions.len() as u64) as u16
    }
}

/// FNV-1a: jobs are found where it put them, so it can never change.
fn hash(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix);
    // Its low bits alone are poor for short keys.
    hash ^ (hash >> 32)
}

/// The queues that a handle has met.
#[derive(Default)]
pub(super) struct Queues {
    known: RwLock<HashMap<QueueName, Arc<Queue>>>,
}

impl RedisStore {
    fn known(&self, name: &QueueName) -> Option<Arc<Queue>> {
        let known = self.shared.queues.known.read();
        known
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    fn meet(&self, name: &QueueName, made: &[u8]) -> Result<Arc<Queue>> {
        let text = std::str::from_utf8(made).map_err(|_| garbled())?;
        let partitions = text
            .split(' ')
            .next()
            .and_then(|number| number.parse().ok());
        let Some(partitions) = partitions.filter(|partitions| text == listed(*partitions)) else {
            return Err(other_layout(format_args!("queue {name}")));
        };
        if partitions == 0 {
            return Err(garbled());
        }
        // One that is known with another number was removed and made again.
        let known = self.known(name);
        if let Some(queue) = known.filter(|queue| queue.partitions.len() == usize::from(partitions))
        {
            return Ok(queue);
        }
        let queue = Queue::new(&self.shared.options.namespace, name, partitions);
        let known = self.shared.queues.known.write();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        known.insert(name.clone(), Arc::clone(&queue));
        Ok(queue)
    }

    /// A queue, if it has been made.
    pub(super) async fn queue(&self, name: &QueueName) -> Result<Option<Arc<Queue>>> {
        if let Some(queue) = self.known(name) {
            return Ok(Some(queue));
        }
        let key = self.shared.home.named("queues");
        let mut get = redis::cmd("HGET");
        get.arg(&key).arg(name.as_str());
        match self.link.run(&key, get).await? {
            Value::BulkString(made) => self.meet(name, &made).map(Some),
            _ => Ok(None),
        }
    }

    /// A queue, which is made if it is not there.
    pub(super) async fn make_queue(&self, name: &QueueName) -> Result<Arc<Queue>> {
        if let Some(queue) = self.queue(name).await? {
            return Ok(queue);
        }
        let partitions = self.shared.options.partitions.unwrap_or(1);
        self.write_queue(&(name.clone(), partitions)).await?;
        let queue = self.queue(name).await?;
        queue.ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                "the server forgot a queue that was just made",
            )
        })
    }

    /// Refuses jobs if the queue was made with another number of partitions than this handle asks
    /// for. Everything else goes by the queue as it is.
    pub(super) fn check_partitions(&self, queue: &Queue) -> Result<()> {
        let (made, wanted) = (queue.partitions.len(), self.shared.options.partitions);
        match wanted.filter(|wanted| usize::from(*wanted) != made) {
            None => Ok(()),
            Some(wanted) => {
                let limit = format!("{made}, as queue {} was made", queue.name);
                Err(Error::invalid("partitions", wanted, limit))
            }
        }
    }

    /// The queue as this handle would make it.
    pub(super) fn default_queue(&self, name: &QueueName) -> Arc<Queue> {
        let options = &self.shared.options;
        Queue::new(&options.namespace, name, options.partitions.unwrap_or(1))
    }

    /// Puts a queue on the list, unless it is there.
    pub(super) async fn write_queue(&self, queue: &(QueueName, u16)) -> Result<()> {
        let key = self.shared.home.named("queues");
        let mut set = redis::cmd("HSETNX");
        set.arg(&key).arg(queue.0.as_str()).arg(listed(queue.1));
        self.link.run(&key, set).await.map(drop)
    }

    /// Takes a queue off the list.
    pub(super) async fn forget_queue(&self, name: &QueueName) -> Result<()> {
        let key = self.shared.home.named("queues");
        let mut delete = redis::cmd("HDEL");
        delete.arg(&key).arg(name.as_str());
        self.link.run(&key, delete).await?;
        let known = self.shared.queues.known.write();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        known.remove(name);
        Ok(())
    }

    /// Whether the list still has a queue as this handle knows it. Another process may have removed
    /// it, and it may have been made again with another number of partitions: then the jobs of this
    /// handle would go where nobody looks. A queue that is there and not on the list is put back.
    pub(super) async fn check_listed(
        &self,
        queue: &(QueueName, u16),
        is_there: bool,
    ) -> Result<()> {
        let key = self.shared.home.named("queues");
        let mut get = redis::cmd("HGET");
        get.arg(&key).arg(queue.0.as_str());
        match self.link.run(&key, get).await? {
            Value::BulkString(made) => {
                let made = self.meet(&queue.0, &made)?.partitions.len();
                if made == usize::from(queue.1) {
                    return Ok(());
                }
                let why = format!("queue {} was made again, with {made} partitions", queue.0);
                Err(Error::new(ErrorKind::SessionLost, why))
            }
            _ if is_there => self.write_queue(queue).await,
            _ => Ok(()),
        }
    }

    /// A partition is new: the list of queues may be gone with everything else, and the partition
    /// itself says from here on how many there are.
    pub(super) async fn note_made(&self, partition: &Partition) -> Result<()> {
        let Keys { meta, queue, .. } = partition.keys();
        if let Some(queue) = queue {
            self.check_listed(queue, true).await?;
            let mut set = redis::cmd("HSETNX");
            set.arg(meta).arg(PARTITIONS).arg(queue.1);
            self.link.run(meta, set).await?;
        }
        Ok(())
    }

    /// How many partitions there are, as one of them says; zero if it does not know.
    #[cfg(feature = "doctor")]
    pub(super) async fn made_with(&self, partition: &Partition) -> Result<u16> {
        let meta = &partition.keys().meta;
        let mut get = redis::cmd("HGET");
        get.arg(meta).arg(PARTITIONS);
        let made: Option<u16> =
            redis::from_redis_value(self.link.run(meta, get).await?).map_err(|_| garbled())?;
        Ok(made.unwrap_or(0))
    }

    /// All queues, by name.
    pub(super) async fn all_queues(&self) -> Result<Vec<Arc<Queue>>> {
        let key = self.shared.home.named("queues");
        let mut get = redis::cmd("HGETALL");
        get.arg(&key);
        let answer = self.link.run(&key, get).await?;
        let pairs: Vec<(String, Vec<u8>)> =
            redis::from_redis_value(answer).map_err(|_| garbled())?;
        let mut queues = Vec::with_capacity(pairs.len());
        for (name, made) in pairs {
            let name = QueueName::new(name).map_err(|_| garbled())?;
            queues.push(self.meet(&name, &made)?);
        }
        queues.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(queues)
    }

    /// All partitions of all queues.
    pub(super) async fn all_partitions(&self) -> Result<Vec<Partition>> {
        let queues = self.all_queues().await?;
        Ok(queues.iter().flat_map(|queue| queue.all(0)).collect())
    }
}
