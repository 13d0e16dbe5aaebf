//! enqueue: store jobs, all of a call together.

use std::sync::Arc;

use super::State;
use crate::clock::Timestamp;
use crate::job::{JobId, JobRecord, NewJob};
use crate::rules::order::is_duplicate;
use crate::store::Enqueued;

impl State {
    pub(super) fn enqueue(&mut self, jobs: &[(JobId, NewJob)], now: Timestamp) -> Vec<Enqueued> {
        jobs.iter()
            .map(|(id, job)| self.enqueue_one(*id, job, now))
            .collect()
    }

    fn enqueue_one(&mut self, id: JobId, new: &NewJob, now: Timestamp) -> Enqueued {
        // The client's id is the job: what is there already is not stored a second time.
        if self.jobs.contains_key(&id) {
            return Enqueued::Duplicate(id);
        }
        let queue = self.queue(&new.queue);
        let job = Arc::new(JobRecord::new(id, new.clone(), now));
        if let Some(existing) = self.take_unique(queue, &job, now) {
            return Enqueued::Duplicate(existing);
        }
        self.queues[queue].ledger.enqueued += 1;
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
            Some((holder, until)) if is_duplicate(job.id, *holder, *until, now) => Some(*holder),
            _ => {
                let until = unique.window.map(|window| now.after(window));
                held.insert(unique.key.clone(), (job.id, until));
                None
            }
        }
    }
}
