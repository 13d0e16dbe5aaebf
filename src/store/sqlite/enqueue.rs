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
        let mut answers = Vec::with_capacity(request.jobs.len());
        for (id, job) in &request.jobs {
            answers.push(self.enqueue_one(*id, job, now)?);
        }
        self.remember(request.request, Verb::Enqueue, &written(&answers))?;
        Ok(answers)
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

/// An answer is remembered as the number of jobs and its duplicates: the ids of the new ones are in
/// the repeated request.
fn written(answers: &[Enqueued]) -> Vec<u8> {
    let mut out = (answers.len() as u32).to_le_bytes().to_vec();
    for (at, answer) in answers.iter().enumerate() {
        if let Enqueued::Duplicate(existing) = answer {
            out.extend_from_slice(&(at as u32).to_le_bytes());
            out.extend_from_slice(existing.as_bytes());
        }
    }
    out
}

fn again(first: &[u8], jobs: &[(JobId, NewJob)]) -> Done<Vec<Enqueued>> {
    let (count, duplicates) = first.split_first_chunk::<4>().ok_or_else(garbled)?;
    if u32::from_le_bytes(*count) as usize != jobs.len() {
        return Err(mixed_up());
    }
    let mut answers: Vec<Enqueued> = jobs.iter().map(|(id, _)| Enqueued::New(*id)).collect();
    for duplicate in duplicates.chunks(20) {
        let (at, existing) = duplicate.split_first_chunk::<4>().ok_or_else(garbled)?;
        let existing = existing.first_chunk::<16>().ok_or_else(garbled)?;
        let answer = answers.get_mut(u32::from_le_bytes(*at) as usize);
        *answer.ok_or_else(garbled)? = Enqueued::Duplicate(JobId::from_bytes(*existing));
    }
    Ok(answers)
}
