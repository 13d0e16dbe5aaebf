//! enqueue: store jobs, all of a call together.

use std::sync::Arc;

use bytes::Bytes;

use super::State;
use crate::clock::Timestamp;
use crate::job::{JobId, JobRecord, NewJob};
use crate::store::Enqueued;

impl State {
    pub(super) fn enqueue(&mut self, jobs: Vec<(JobId, NewJob)>, now: Timestamp) -> Vec<Enqueued> {
        jobs.into_iter()
            .map(|(id, job)| self.enqueue_one(id, job, now))
            .collect()
    }

    fn enqueue_one(&mut self, id: JobId, mut new: NewJob, now: Timestamp) -> Enqueued {
        // The client's id is the job: what is there already is not stored a second time.
        if self.places.contains(&id) {
            return Enqueued::Duplicate(id);
        }
        let queue = self.queue(&new.queue);
        // The caller keeps his own, to repeat the call with.
        new.payload = Bytes::copy_from_slice(&new.payload);
        let job = JobRecord::new(id, new, now);
        if let Some(existing) = self.take_unique(queue, &job, now) {
            return Enqueued::Duplicate(existing);
        }
        self.queues[queue].ledger.enqueued += 1;
        let job = Arc::new(job);
        if job.run_at <= now {
            self.join(queue, job);
        } else {
            self.put_scheduled(queue, job);
        }
        Enqueued::New(id)
    }

    /// Takes the job's unique key, or names the job that holds it.
    pub(super) fn take_unique(
        &mut self,
        queue: usize,
        job: &JobRecord,
        now: Timestamp,
    ) -> Option<JobId> {
        let unique = job.unique.as_ref()?;
        let held = &mut self.queues[queue].unique;
        match held.get(&unique.key) {
            Some((holder, until)) if *holder != job.id && until.is_none_or(|until| until > now) => {
                Some(*holder)
            }
            _ => {
                let until = unique.window.map(|window| now.after(window));
                held.insert(unique.key.clone(), (job.id, until));
                None
            }
        }
    }
}
