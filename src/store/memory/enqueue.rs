//! enqueue: store jobs, all of a call together.

use std::sync::Arc;

use bytes::Bytes;

use super::State;
use crate::clock::Timestamp;
use crate::job::{JobId, JobRecord, NewJob};
use crate::store::Enqueued;

/// Bytes of payloads that share memory. A job that outlives the others keeps no more than this.
const SHARED_BYTES: usize = 4 * 1024;

/// Copies payloads into memory of the store's own: the caller keeps his, to repeat the call with.
/// Neighbours share it, because they mostly leave together too.
pub(super) fn own_payloads(jobs: &mut [(JobId, NewJob)]) {
    let mut rest = jobs;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(_, job): &&(JobId, NewJob)| {
            bytes += job.payload.len();
            bytes <= SHARED_BYTES
        };
        let together = rest.iter().take_while(fits).count().max(1);
        let (group, others) = rest.split_at_mut(together);
        rest = others;
        if let [(_, alone)] = group {
            alone.payload = Bytes::copy_from_slice(&alone.payload);
            continue;
        }
        let payloads: Vec<_> = group.iter().map(|(_, job)| &*job.payload).collect();
        let mut shared = Bytes::from(payloads.concat());
        for (_, job) in group {
            job.payload = shared.split_to(job.payload.len());
        }
    }
}

impl State {
    pub(super) fn enqueue(&mut self, jobs: Vec<(JobId, NewJob)>, now: Timestamp) -> Vec<Enqueued> {
        jobs.into_iter()
            .map(|(id, job)| self.enqueue_one(id, job, now))
            .collect()
    }

    fn enqueue_one(&mut self, id: JobId, new: NewJob, now: Timestamp) -> Enqueued {
        // The client's id is the job: what is there already is not stored a second time.
        if self.places.contains(&id) {
            return Enqueued::Duplicate(id);
        }
        let queue = self.queue(&new.queue);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Kind, QueueName};

    #[test]
    fn payloads_become_the_stores_own_and_stay_as_they_were() {
        let sizes = [
            0, 1, 100, 4_000, 96, 0, 5_000, 4_096, 1, 0, 0, 4_095, 1, 10_000,
        ];
        let mut jobs: Vec<_> = sizes
            .iter()
            .zip(1..)
            .map(|(size, fill)| {
                let kind = Kind::new("k").unwrap();
                let payload = vec![fill; *size];
                (
                    JobId::generate(),
                    NewJob::raw(QueueName::default(), kind, payload),
                )
            })
            .collect();
        let given = jobs.clone();
        own_payloads(&mut jobs);
        assert_eq!(jobs, given);
        for ((_, own), (_, given)) in jobs.iter().zip(&given) {
            let is_own = own.payload.as_ptr() != given.payload.as_ptr();
            assert!(own.payload.is_empty() || is_own, "the caller's memory");
        }
        own_payloads(&mut []);
    }
}
