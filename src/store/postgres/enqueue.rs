//! enqueue: store jobs, all of a call together.

use std::collections::{HashMap, HashSet};

use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::fault::{Done, Fault};
use super::tally::Count;
use super::tx::{Tx, args, job_id, time, uuid};
use crate::error::{Error, ErrorKind, Verb};
use crate::job::{JobId, JobRecord, NewJob};
use crate::store::sql::answer::{read_enqueue, written_enqueue};
use crate::store::sql::grant::HEAD;
use crate::store::{EnqueueRequest, Enqueued};

/// How often a key is sought that others free at the same time.
const KEY_TRIES: usize = 8;

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn enqueue(&mut self, request: &EnqueueRequest) -> Done<Vec<Enqueued>> {
        let names = names(&request.jobs);
        let ((), recalled, queues, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request.request),
            self.named(&names),
            self.clock()
        )?;
        self.now = now;
        self.keep(&queues)?;
        if let Some(first) = self.recalled(request.request, Verb::Enqueue, &recalled)? {
            return Ok(read_enqueue(&first, &request.jobs)?);
        }
        let answers = self.enqueue_all(&request.jobs).await?;
        let answer = written_enqueue(&answers);
        self.remember(request.request, Verb::Enqueue, answer);
        Ok(answers)
    }

    /// Stores jobs under no request id.
    pub(super) async fn enqueue_all(&mut self, jobs: &[(JobId, NewJob)]) -> Done<Vec<Enqueued>> {
        let mut taken = self.taken(jobs).await?;
        let mut answers = Vec::with_capacity(jobs.len());
        let mut fresh = Vec::with_capacity(jobs.len());
        for (id, new) in jobs {
            // The client's id is the job: what is there already is not stored a second time.
            answers.push(Enqueued::Duplicate(*id));
            if taken.insert(*id) {
                let queue = self.queue(&new.queue).await?;
                let job = JobRecord::new(*id, new.clone(), self.now);
                fresh.push((answers.len() - 1, queue, job));
            }
        }
        let held = self.take_uniques(&fresh).await?;
        let mut due = Vec::with_capacity(fresh.len());
        for (at, queue, job) in fresh {
            if let Some(unique) = &job.unique {
                let key = unique.key.as_str().as_bytes().to_vec();
                let holder = held.get(&(self.queues[queue].id, key));
                if let Some(holder) = holder.filter(|holder| **holder != job.id) {
                    answers[at] = Enqueued::Duplicate(*holder);
                    continue;
                }
            }
            answers[at] = Enqueued::New(job.id);
            self.count(queue, Count::Enqueued, 1);
            if job.run_at <= self.now {
                due.push((queue, job));
            } else {
                self.put_scheduled(queue, &job);
            }
        }
        self.join(due).await?;
        Ok(answers)
    }

    /// The ids of the call that are there already.
    async fn taken(&self, jobs: &[(JobId, NewJob)]) -> Done<HashSet<JobId>> {
        let ids: Vec<Uuid> = jobs.iter().map(|(id, _)| uuid(*id)).collect();
        let (Some(first), Some(last)) = (ids.iter().min(), ids.iter().max()) else {
            return Ok(HashSet::new());
        };
        let (waiting, leased) = tokio::try_join!(biased;
            async {
                let args = args![self.base.namespace => TEXT, ids => UUID_ARRAY];
                self.rows("ids_taken", args).await
            },
            async {
                let args = args![self.base.namespace => TEXT, first => UUID, last => UUID];
                self.rows("grants_between", args).await
            }
        )?;
        let mut taken = HashSet::new();
        for row in &waiting {
            taken.insert(job_id(row.try_get(0)?));
        }
        for row in &leased {
            let heads: &[u8] = row.try_get(0)?;
            let places: i32 = row.try_get(1)?;
            let ended: &[u8] = row.try_get(2)?;
            for head in heads.chunks_exact(HEAD) {
                let at = crate::store::sql::grant::index_in(head);
                let live = ended.get(at / 8).is_some_and(|b| b & (1 << (at % 8)) == 0);
                if let Some(id) = head.first_chunk().filter(|_| live && at < places as usize) {
                    taken.insert(JobId::from_bytes(*id));
                }
            }
        }
        // Others of their range are no concern of this call.
        Ok(taken)
    }

    /// Takes the unique keys that are free, and says who holds each.
    pub(super) async fn take_uniques(
        &mut self,
        jobs: &[(usize, usize, JobRecord)],
    ) -> Done<HashMap<(i32, Vec<u8>), JobId>> {
        let (mut queues, mut keys) = (Vec::new(), Vec::new());
        let (mut ids, mut untils) = (Vec::new(), Vec::new());
        for (_, queue, job) in jobs {
            if let Some(unique) = &job.unique {
                queues.push(self.queues[*queue].id);
                keys.push(unique.key.as_str().as_bytes());
                ids.push(uuid(job.id));
                untils.push(unique.window.map(|window| time(self.now.after(window))));
            }
        }
        let mut holders = HashMap::new();
        for _ in 0..KEY_TRIES {
            if keys.is_empty() {
                return Ok(holders);
            }
            // A holder may free its key between the two: then it is there for the taking.
            let ((), (), rows) = tokio::try_join!(biased;
                async {
                    let args = args![queues => INT4_ARRAY, keys => BYTEA_ARRAY,
                                     time(self.now) => INT8];
                    self.run("unique_past_of", args).await
                },
                async {
                    let args = args![queues => INT4_ARRAY, keys => BYTEA_ARRAY, ids => UUID_ARRAY,
                                     untils => INT8_ARRAY];
                    self.run("unique_take", args).await
                },
                async {
                    let args = args![queues => INT4_ARRAY, keys => BYTEA_ARRAY];
                    self.rows("unique_holders", args).await
                }
            )?;
            for row in rows {
                let holder = job_id(row.try_get(2)?);
                holders.insert((row.try_get(0)?, row.try_get(1)?), holder);
            }
            let mut all = queues.iter().zip(&keys);
            if all.all(|(queue, key)| holders.contains_key(&(*queue, key.to_vec()))) {
                return Ok(holders);
            }
        }
        let why = "a unique key was freed again and again";
        Err(Fault::Again(Error::new(ErrorKind::Contended, why)))
    }
}

pub(super) fn names(jobs: &[(JobId, NewJob)]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for (_, job) in jobs {
        if !names.contains(&job.queue.as_str()) {
            names.push(job.queue.as_str());
        }
    }
    names
}
