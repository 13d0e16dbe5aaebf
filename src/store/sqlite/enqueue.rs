//! enqueue: store jobs, all of a call together.

use rusqlite::{OptionalExtension, params};

use super::fault::Done;
use super::session::{garbled, mixed_up};
use super::tx::{Tx, moment, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::{JobId, JobRecord, NewJob};
use crate::store::{EnqueueRequest, Enqueued};

impl Tx<'_> {
    pub(super) fn enqueue(
        &mut self,
        request: &EnqueueRequest,
        now: Timestamp,
    ) -> Done<Vec<Enqueued>> {
        if let Some(first) = self.recall(request.request, Verb::Enqueue, now)? {
            return again(&first, &request.jobs);
        }
        let answers = self.enqueue_all(&request.jobs, now)?;
        self.remember(request.request, Verb::Enqueue, &written(&answers))?;
        Ok(answers)
    }

    pub(super) fn enqueue_all(
        &mut self,
        jobs: &[(JobId, NewJob)],
        now: Timestamp,
    ) -> Done<Vec<Enqueued>> {
        let mut answers = Vec::with_capacity(jobs.len());
        let fresh = self.are_fresh(jobs)?;
        for (id, job) in jobs {
            // The client's id is the job: what is there already is not stored a second time.
            if !fresh && self.find(*id)?.is_some() {
                answers.push(Enqueued::Duplicate(*id));
            } else {
                answers.push(self.enqueue_one(*id, job, now)?);
            }
        }
        Ok(answers)
    }

    /// Whether no id of the call can be there already. New ids of one client are later than the
    /// others and in order, so that one look at their range will do for all of them.
    fn are_fresh(&mut self, jobs: &[(JobId, NewJob)]) -> Done<bool> {
        let (Some((first, _)), Some((last, _))) = (jobs.first(), jobs.last()) else {
            return Ok(true);
        };
        if !jobs.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Ok(false);
        }
        let range = [first.as_bytes(), last.as_bytes()];
        let taken: bool = self.sql("ids_taken")?.query_row(range, |row| row.get(0))?;
        Ok(!taken)
    }

    fn enqueue_one(&mut self, id: JobId, new: &NewJob, now: Timestamp) -> Done<Enqueued> {
        let queue = self.queue(&new.queue)?;
        let job = JobRecord::new(id, new.clone(), now);
        if let Some(existing) = self.take_unique(queue, &job, now)? {
            return Ok(Enqueued::Duplicate(existing));
        }
        self.at(queue).ledger.enqueued += 1;
        if job.run_at <= now {
            self.join(queue, &job)?;
        } else {
            self.put_scheduled(queue, &job)?;
        }
        Ok(Enqueued::New(id))
    }

    /// Takes the job's unique key, or names the job that holds it.
    pub(super) fn take_unique(
        &mut self,
        queue: usize,
        job: &JobRecord,
        now: Timestamp,
    ) -> Done<Option<JobId>> {
        let Some(unique) = &job.unique else {
            return Ok(None);
        };
        let of = self.queues[queue].id;
        let key = unique.key.as_str().as_bytes();
        let held = self
            .sql("unique_holder")?
            .query_row(params![of, key], |row| {
                Ok((row.get::<_, [u8; 16]>(0)?, row.get::<_, Option<i64>>(1)?))
            })
            .optional()?;
        if let Some((holder, until)) = held {
            let holder = JobId::from_bytes(holder);
            if holder != job.id && until.is_none_or(|until| moment(until) > now) {
                return Ok(Some(holder));
            }
        }
        let until = unique.window.map(|window| time(now.after(window)));
        self.sql("unique_take")?
            .execute(params![of, key, job.id.as_bytes(), until])?;
        Ok(None)
    }
}

/// Up to this many answers are remembered in full. Of a larger call only the duplicates are: the ids
/// of the new jobs are in the repeated request, which is the same, and need not be stored twice.
const IN_FULL: usize = 64;

fn written(answers: &[Enqueued]) -> Vec<u8> {
    let mut out = (answers.len() as u32).to_le_bytes().to_vec();
    for (at, answer) in answers.iter().enumerate() {
        let new = matches!(answer, Enqueued::New(_));
        if answers.len() <= IN_FULL || !new {
            // The highest bit: new.
            out.extend_from_slice(&(at as u32 | u32::from(new) << 31).to_le_bytes());
            out.extend_from_slice(answer.id().as_bytes());
        }
    }
    out
}

fn again(first: &[u8], jobs: &[(JobId, NewJob)]) -> Done<Vec<Enqueued>> {
    let (count, listed) = first.split_first_chunk::<4>().ok_or_else(garbled)?;
    let count = u32::from_le_bytes(*count) as usize;
    let mut answers: Vec<Enqueued> = jobs.iter().map(|(id, _)| Enqueued::New(*id)).collect();
    if count <= IN_FULL {
        answers = vec![Enqueued::New(JobId::from_bytes([0; 16])); count];
    } else if count != jobs.len() {
        return Err(mixed_up());
    }
    for entry in listed.chunks(20) {
        let (at, id) = entry.split_first_chunk::<4>().ok_or_else(garbled)?;
        let id = JobId::from_bytes(*id.first_chunk::<16>().ok_or_else(garbled)?);
        let at = u32::from_le_bytes(*at);
        let new = at >> 31 == 1;
        let answer = answers.get_mut((at & (u32::MAX >> 1)) as usize);
        *answer.ok_or_else(garbled)? = if new {
            Enqueued::New(id)
        } else {
            Enqueued::Duplicate(id)
        };
    }
    Ok(answers)
}
