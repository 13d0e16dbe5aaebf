//! enqueue: store jobs, all of a call together. Where a job goes is in `place.rs`.

use rusqlite::{OptionalExtension, params};

use super::answer::{read_enqueue, written_enqueue};
use super::fault::Done;
use super::tx::{Tx, moment, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::{JobId, JobRecord, NewJob};
use crate::rules::order::is_duplicate;
use crate::store::{EnqueueRequest, Enqueued};

statements! {
    IDS_TAKEN = "
        SELECT EXISTS (SELECT 1 FROM leasehold_ready WHERE id BETWEEN ?1 AND ?2)
            OR EXISTS (SELECT 1 FROM leasehold_aside WHERE id BETWEEN ?1 AND ?2)
            OR EXISTS (SELECT 1 FROM leasehold_grants
            WHERE last_job >= ?1 AND first_job <= ?2)";
    UNIQUE_HOLDER = "SELECT job, until FROM leasehold_unique WHERE queue = ?1 AND key = ?2";
    UNIQUE_TAKE = "
        INSERT OR REPLACE INTO leasehold_unique (queue, key, job, until)
        VALUES (?1, ?2, ?3, ?4)";
}

impl Tx<'_> {
    pub(super) fn enqueue(
        &mut self,
        request: &EnqueueRequest,
        now: Timestamp,
    ) -> Done<Vec<Enqueued>> {
        if let Some(first) = self.recall(request.request, Verb::Enqueue, now)? {
            return Ok(read_enqueue(&first, &request.jobs)?);
        }
        let answers = self.enqueue_all(&request.jobs, now)?;
        self.remember(request.request, Verb::Enqueue, &written_enqueue(&answers))?;
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
        let taken: bool = self.sql(IDS_TAKEN)?.query_row(range, |row| row.get(0))?;
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
            .sql(UNIQUE_HOLDER)?
            .query_row(params![of, key], |row| {
                Ok((row.get::<_, [u8; 16]>(0)?, row.get::<_, Option<i64>>(1)?))
            })
            .optional()?;
        if let Some((holder, until)) = held {
            let holder = JobId::from_bytes(holder);
            if is_duplicate(job.id, holder, until.map(moment), now) {
                return Ok(Some(holder));
            }
        }
        let until = unique.window.map(|window| time(now.after(window)));
        self.sql(UNIQUE_TAKE)?
            .execute(params![of, key, job.id.as_bytes(), until])?;
        Ok(None)
    }
}
