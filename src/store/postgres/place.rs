//! Where a job that is not leased goes, and how it is found again.
//!
//! Places are drawn from one sequence: a line grows at its back by +n and at its front by −n. Jobs
//! that share an exclusive key meet at the row of the key, which whoever joins or leaves it locks.

use std::collections::HashMap;

use bytes::Bytes;
use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::fault::{Done, Fault, corrupt};
use super::tally::Count;
use super::tx::{GrantKey, Tx, args, job_id, moment, time, uuid};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::job::{JobId, JobRecord, JobState};
use crate::lease::FencingToken;
use crate::rules::order::tier_of;
use crate::store::codec;
use crate::store::sql::view::{PARKED, SCHEDULED, state_code};

/// How often a key is sought that others free at the same time.
const KEY_TRIES: usize = 8;

/// A job on its way into a line.
pub(super) enum Put {
    Job {
        queue: i32,
        line: i16,
        front: bool,
        id: Uuid,
        weight: i32,
        record: Vec<u8>,
    },
    /// The next job of an exclusive key, if the one that leaves was its head.
    NextOf {
        queue: usize,
        key: Vec<u8>,
        head: Uuid,
    },
}

/// A job on its way aside.
pub(super) struct Aside {
    queue: i32,
    id: Uuid,
    state: i16,
    at: i64,
    key: Option<Vec<u8>>,
    keep_until: Option<i64>,
    record: Vec<u8>,
    /// What to tell the other processes if it is due earlier than all others.
    bell: Option<String>,
}

/// Where a job is.
#[derive(Clone)]
pub(super) enum Place {
    Line {
        queue: usize,
        line: i16,
        place: i64,
        record: Bytes,
    },
    Aside {
        queue: usize,
        seq: i64,
        state: i64,
        at: Timestamp,
        record: Bytes,
    },
    Leased {
        grant: GrantKey,
        at: usize,
    },
}

fn encoded(job: &JobRecord) -> Vec<u8> {
    let mut out = Vec::new();
    codec::encode(job, &mut out);
    out
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// Jobs fall due: each goes to the back of its line, or behind the others of its exclusive key.
    pub(super) async fn join(&mut self, jobs: Vec<(usize, JobRecord)>) -> Done<()> {
        // A key that its head has left in this step must not be joined behind that head.
        let is_left = |put: &Put| matches!(put, Put::NextOf { .. });
        if self.puts.iter().any(is_left) {
            self.flush().await?;
        }
        let heads = self.join_keys(&jobs).await?;
        for (queue, job) in jobs {
            let Some(key) = &job.exclusive else {
                self.put_back(queue, &job);
                continue;
            };
            if self.riding {
                // The key's row would stay locked for as long as the caller likes. The next claim
                // sees the job as just due, and joins it.
                self.put_scheduled(queue, &job);
                continue;
            }
            let key = key.as_str().as_bytes();
            let head = heads.get(&(self.queues[queue].id, key.to_vec()));
            if head == Some(&uuid(job.id)) {
                self.put_back(queue, &job);
            } else {
                let key = Some(key.to_vec());
                self.put_aside(queue, &job, PARKED, Timestamp::ZERO, key, None, None);
                self.count(queue, Count::Ready, 1);
                self.count(queue, Count::Parked, 1);
            }
        }
        Ok(())
    }

    /// The heads of the jobs' keys, locked. Who comes first to a free key is its head.
    async fn join_keys(
        &mut self,
        jobs: &[(usize, JobRecord)],
    ) -> Done<HashMap<(i32, Vec<u8>), Uuid>> {
        let (mut queues, mut keys, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for (queue, job) in jobs {
            if let Some(key) = job.exclusive.as_ref().filter(|_| !self.riding) {
                queues.push(self.queues[*queue].id);
                keys.push(key.as_str().as_bytes());
                ids.push(uuid(job.id));
            }
        }
        let mut heads = HashMap::new();
        for _ in 0..KEY_TRIES {
            if keys.is_empty() {
                return Ok(heads);
            }
            let ((), rows) = tokio::try_join!(biased;
                async {
                    let args = args![queues => INT4_ARRAY, keys => BYTEA_ARRAY, ids => UUID_ARRAY];
                    self.run("exclusive_join", args).await
                },
                async {
                    let args = args![queues => INT4_ARRAY, keys => BYTEA_ARRAY];
                    self.rows("exclusive_heads", args).await
                }
            )?;
            for row in rows {
                heads.insert((row.try_get(0)?, row.try_get(1)?), row.try_get(2)?);
            }
            let all = queues.iter().zip(&keys);
            if all.fold(true, |all, (queue, key)| {
                all && heads.contains_key(&(*queue, key.to_vec()))
            }) {
                return Ok(heads);
            }
        }
        let why = "an exclusive key was freed again and again";
        Err(Fault::Again(Error::new(ErrorKind::Contended, why)))
    }

    pub(super) fn put_back(&mut self, queue: usize, job: &JobRecord) {
        self.put(queue, job, false);
    }

    /// Puts jobs ahead of everything in their lines, in token order.
    pub(super) fn put_front(&mut self, queue: usize, mut jobs: Vec<(FencingToken, JobRecord)>) {
        jobs.sort_by_key(|(token, _)| *token);
        for (_, job) in jobs.iter().rev() {
            self.put(queue, job, true);
        }
    }

    fn put(&mut self, queue: usize, job: &JobRecord, front: bool) {
        let line = tier_of(job);
        let record = encoded(job);
        self.puts.push(Put::Job {
            queue: self.queues[queue].id,
            line: line as i16,
            front,
            id: uuid(job.id),
            weight: codec::weight_of(&record) as i32,
            record,
        });
        self.count(queue, Count::Ready, 1);
        let suspect = line.is_multiple_of(2);
        let name = &self.queues[queue].name;
        match self.bells.last_mut() {
            Some((last, same, jobs)) if last == name && *same == suspect => *jobs += 1,
            _ => self.bells.push((name.clone(), suspect, 1)),
        }
    }

    pub(super) fn put_scheduled(&mut self, queue: usize, job: &JobRecord) {
        let bell = self.base.bell(&self.queues[queue].name, false, 1);
        self.put_aside(queue, job, SCHEDULED, job.run_at, None, None, Some(bell));
        self.count(queue, Count::Scheduled, 1);
    }

    /// A job's life is over: its keys are free, and the next of its exclusive key is ready.
    pub(super) fn put_settled(
        &mut self,
        queue: usize,
        job: &JobRecord,
        state: JobState,
        keep_until: Option<Timestamp>,
    ) {
        self.free_unique(queue, job);
        self.free_exclusive(queue, job);
        let Some(keep_until) = keep_until else { return };
        let code = state_code(state);
        let keep_until = Some(time(keep_until)).filter(|until| *until != i64::MAX);
        self.put_aside(queue, job, code, self.now, None, keep_until, None);
        self.count(queue, Count::aside(code), 1);
    }

    #[expect(clippy::too_many_arguments, reason = "they are the columns of a row")]
    fn put_aside(
        &mut self,
        queue: usize,
        job: &JobRecord,
        state: i64,
        at: Timestamp,
        key: Option<Vec<u8>>,
        keep_until: Option<i64>,
        bell: Option<String>,
    ) {
        self.asides.push(Aside {
            queue: self.queues[queue].id,
            id: uuid(job.id),
            state: state as i16,
            at: time(at),
            key,
            keep_until,
            record: encoded(job),
            bell,
        });
    }

    pub(super) fn free_unique(&mut self, queue: usize, job: &JobRecord) {
        if let Some(unique) = &job.unique {
            let key = unique.key.as_str().as_bytes().to_vec();
            self.freed.push((self.queues[queue].id, key, uuid(job.id)));
        }
    }

    /// If the job is the head of its exclusive key, the next one takes its place.
    pub(super) fn free_exclusive(&mut self, queue: usize, job: &JobRecord) {
        if let Some(key) = &job.exclusive {
            self.puts.push(Put::NextOf {
                queue,
                key: key.as_str().as_bytes().to_vec(),
                head: uuid(job.id),
            });
        }
    }

    /// Gives the exclusive keys that were left to the next of their lines.
    pub(super) async fn pass_keys(&mut self) -> Done<()> {
        let (mut queues, mut keys, mut heads) = (Vec::new(), Vec::new(), Vec::new());
        for put in &self.puts {
            if let Put::NextOf { queue, key, head } = put {
                queues.push(self.queues[*queue].id);
                keys.push(key.clone());
                heads.push(*head);
            }
        }
        if keys.is_empty() {
            return Ok(());
        }
        // The lock is its own statement: what waited for it must be seen by the next.
        let locked = self
            .rows(
                "exclusive_heads",
                args![queues => INT4_ARRAY, keys => BYTEA_ARRAY],
            )
            .await?;
        let mut left = HashMap::new();
        for row in locked {
            let (queue, key, head): (i32, Vec<u8>, Uuid) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            let at = (0..keys.len()).find(|at| queues[*at] == queue && keys[*at] == key);
            if at.is_some_and(|at| heads[at] == head) {
                left.insert((queue, key), None);
            }
        }
        let (queues, keys): (Vec<i32>, Vec<Vec<u8>>) = left.keys().cloned().unzip();
        let next = self
            .rows(
                "take_next_parked",
                args![queues => INT4_ARRAY, keys => BYTEA_ARRAY],
            )
            .await?;
        let (mut passed, mut passed_keys, mut next_heads) = (Vec::new(), Vec::new(), Vec::new());
        for row in next {
            let (queue, key): (i32, Vec<u8>) = (row.try_get(0)?, row.try_get(1)?);
            passed.push(queue);
            passed_keys.push(key.clone());
            next_heads.push(row.try_get::<_, Uuid>(2)?);
            left.insert((queue, key), Some(row.try_get::<_, Vec<u8>>(3)?));
        }
        let over = left.iter().filter(|(_, next)| next.is_none());
        let (over, over_keys): (Vec<i32>, Vec<Vec<u8>>) =
            over.map(|((queue, key), _)| (*queue, key.clone())).unzip();
        tokio::try_join!(biased;
            async {
                let args = args![passed => INT4_ARRAY, passed_keys => BYTEA_ARRAY,
                                 next_heads => UUID_ARRAY];
                self.run("exclusive_set", args).await
            },
            async {
                let args = args![over => INT4_ARRAY, over_keys => BYTEA_ARRAY];
                self.run("exclusive_free", args).await
            }
        )?;
        for put in std::mem::take(&mut self.puts) {
            let Put::NextOf { queue, key, .. } = put else {
                self.puts.push(put);
                continue;
            };
            let next = left.remove(&(self.queues[queue].id, key)).flatten();
            if let Some(record) = next {
                let job = self.decode(record)?;
                self.count(queue, Count::Ready, -1);
                self.count(queue, Count::Parked, -1);
                self.put_back(queue, &job);
            }
        }
        Ok(())
    }

    pub(super) async fn save_puts(&self) -> Done<()> {
        let (mut queues, mut lines, mut fronts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ids, mut weights, mut records) = (Vec::new(), Vec::new(), Vec::new());
        for put in &self.puts {
            if let Put::Job {
                queue,
                line,
                front,
                id,
                weight,
                record,
            } = put
            {
                queues.push(*queue);
                lines.push(*line);
                fronts.push(*front);
                ids.push(*id);
                weights.push(*weight);
                records.push(&record[..]);
            }
        }
        if ids.is_empty() {
            return Ok(());
        }
        let args = args![queues => INT4_ARRAY, lines => INT2_ARRAY, fronts => BOOL_ARRAY,
                         ids => UUID_ARRAY, weights => INT4_ARRAY, records => BYTEA_ARRAY];
        self.run("put_ready", args).await
    }

    pub(super) async fn save_asides(&self) -> Done<()> {
        if self.asides.is_empty() {
            return Ok(());
        }
        let (mut bells, mut of, mut due) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ids, mut queues, mut states) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ats, mut keys, mut keeps) = (Vec::new(), Vec::new(), Vec::new());
        let mut records = Vec::new();
        for aside in &self.asides {
            ids.push(aside.id);
            queues.push(aside.queue);
            states.push(aside.state);
            ats.push(aside.at);
            keys.push(aside.key.as_deref());
            keeps.push(aside.keep_until);
            records.push(&aside.record[..]);
            if let Some(bell) = &aside.bell {
                if let Some(at) = of.iter().position(|queue| *queue == aside.queue) {
                    due[at] = aside.at.min(due[at]);
                } else {
                    bells.push(bell.as_str());
                    of.push(aside.queue);
                    due.push(aside.at);
                }
            }
        }
        tokio::try_join!(biased;
            async {
                if bells.is_empty() {
                    return Ok(());
                }
                let args = args![self.base.ear.channel => TEXT, bells => TEXT_ARRAY, of => INT4_ARRAY,
                                 due => INT8_ARRAY];
                self.run("ring_if_first", args).await
            },
            async {
                let args = args![ids => UUID_ARRAY, queues => INT4_ARRAY, states => INT2_ARRAY,
                                 ats => INT8_ARRAY, keys => BYTEA_ARRAY, keeps => INT8_ARRAY,
                                 records => BYTEA_ARRAY];
                self.run("put_aside", args).await
            }
        )?;
        Ok(())
    }

    pub(super) async fn save_freed(&self) -> Done<()> {
        if self.freed.is_empty() {
            return Ok(());
        }
        let (mut queues, mut keys, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for (queue, key, id) in &self.freed {
            queues.push(*queue);
            keys.push(&key[..]);
            ids.push(*id);
        }
        let args = args![queues => INT4_ARRAY, keys => BYTEA_ARRAY, ids => UUID_ARRAY];
        self.run("unique_free", args).await
    }

    /// Finds a job by its id.
    pub(super) async fn find(&mut self, id: JobId) -> Done<Option<Place>> {
        let found = self.look_for(id).await?;
        if found.is_none() {
            // Its lease may have ended between the look and the lock: now it stands elsewhere.
            return self.look_for(id).await;
        }
        Ok(found)
    }

    async fn look_for(&mut self, id: JobId) -> Done<Option<Place>> {
        let key = uuid(id);
        // Settlements wait for nobody: they move a job out of its grant, and a parked one into its
        // line. Looked for in that order, it is not missed.
        let (grants, aside, ready) = tokio::try_join!(biased;
            async {
                let args = args![self.base.namespace => TEXT, key => UUID];
                self.rows("grants_by_job", args).await
            },
            async {
                let args = args![self.base.namespace => TEXT, key => UUID];
                self.rows("aside_by_id", args).await
            },
            async {
                let args = args![self.base.namespace => TEXT, key => UUID];
                self.rows("ready_by_id", args).await
            }
        )?;
        if let Some(row) = ready.first()
            && let Some(queue) = self.queue_of_row(row.try_get(0)?).await?
        {
            return Ok(Some(Place::Line {
                queue,
                line: row.try_get(1)?,
                place: row.try_get(2)?,
                record: row.try_get::<_, Vec<u8>>(3)?.into(),
            }));
        }
        if let Some(row) = aside.first()
            && let Some(queue) = self.queue_of_row(row.try_get(0)?).await?
        {
            return Ok(Some(Place::Aside {
                queue,
                seq: row.try_get(1)?,
                state: row.try_get::<_, i16>(2)?.into(),
                at: moment(row.try_get(3)?),
                record: row.try_get::<_, Vec<u8>>(4)?.into(),
            }));
        }
        self.find_leased(id, &grants).await
    }

    /// The job of a place that is not leased.
    pub(super) fn read(&mut self, place: &Place) -> Done<Option<JobRecord>> {
        match place {
            Place::Line { record, .. } | Place::Aside { record, .. } => {
                let job = codec::decode(record, &mut self.kinds).map_err(Fault::Broken)?;
                Ok(Some(job))
            }
            Place::Leased { .. } => Ok(None),
        }
    }

    /// Takes a pending or settled job out of where it is. Its keys stay as they are.
    pub(super) async fn take(&mut self, place: &Place) -> Done<Option<(usize, JobRecord)>> {
        let Some(job) = self.read(place)? else {
            return Ok(None);
        };
        let id = job.id;
        if let Some(taken) = self.take_from(place, job).await? {
            return Ok(Some(taken));
        }
        // The head of its key has put a parked job in line meanwhile; a settled one is pruned.
        let Some(place @ Place::Line { .. }) = self.find(id).await? else {
            return Ok(None);
        };
        match self.read(&place)? {
            Some(job) => self.take_from(&place, job).await,
            None => Ok(None),
        }
    }

    async fn take_from(
        &mut self,
        place: &Place,
        job: JobRecord,
    ) -> Done<Option<(usize, JobRecord)>> {
        match place {
            Place::Line {
                queue, line, place, ..
            } => {
                let of = self.queues[*queue].id;
                self.run("take_line", args![of => INT4, line => INT2, place => INT8])
                    .await?;
                self.count(*queue, Count::Ready, -1);
                Ok(Some((*queue, job)))
            }
            Place::Aside {
                queue, seq, state, ..
            } => {
                let args = args![&[*seq][..] => INT8_ARRAY];
                if self.rows("take_aside", args).await?.is_empty() {
                    return Ok(None);
                }
                self.count(*queue, Count::aside(*state), -1);
                self.count(*queue, Count::Parked, -i64::from(*state == PARKED));
                Ok(Some((*queue, job)))
            }
            Place::Leased { .. } => Err(corrupt("a leased job was to be taken")),
        }
    }

    /// Ids of the answer, in order.
    pub(super) fn ids(rows: &[tokio_postgres::Row]) -> Done<Vec<JobId>> {
        let ids = rows.iter().map(|row| Ok(job_id(row.try_get(0)?)));
        ids.collect()
    }
}
