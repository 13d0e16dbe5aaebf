//! enqueue: store jobs, those of a partition together.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RedisStore;
use super::queue::Queue;
use super::wire::{In, garbled};
use crate::clock::{Timestamp, micros};
use crate::error::{Result, Verb};
use crate::job::{JobId, JobRecord, NewJob, QueueName};
use crate::store::codec;
use crate::store::{EnqueueRequest, Enqueued};

/// Packs jobs for the function: the delay of each, and its record, whose times the store fills in.
fn packed<'a>(jobs: impl Iterator<Item = &'a (JobId, NewJob)>) -> Vec<u8> {
    let mut packed = Vec::new();
    for (id, new) in jobs {
        packed.extend_from_slice(&micros(new.delay).to_le_bytes());
        let mut job = JobRecord::new(*id, new.clone(), Timestamp::ZERO);
        job.run_at = Timestamp::ZERO;
        codec::encode(&job, &mut packed);
    }
    packed
}

/// Notes the jobs that were there, or whose unique key another job holds.
pub(super) fn read_duplicates(
    body: &mut In,
    places: &[usize],
    answers: &mut [Enqueued],
) -> Result<()> {
    for _ in 0..body.u32()? {
        let (place, holder) = (body.u32()?, body.id()?);
        let place = places.get(place).ok_or_else(garbled)?;
        answers[*place] = Enqueued::Duplicate(holder);
    }
    Ok(())
}

impl RedisStore {
    pub(super) async fn enqueue_all(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.validate()?;
        let id = request.request;
        self.shared.sessions.begin(id, Verb::Enqueue)?;
        let jobs = &request.jobs;
        // The places of the jobs in the call, by queue and partition.
        let mut queues = BTreeMap::<&QueueName, (Arc<Queue>, Vec<Vec<usize>>)>::new();
        let mut from = 0;
        for run in jobs.chunk_by(|(_, one), (_, next)| one.queue == next.queue) {
            let name = &run[0].1.queue;
            if !queues.contains_key(name) {
                let queue = self.make_queue(name).await?;
                self.check_partitions(&queue)?;
                let share = run.len().div_ceil(queue.partitions.len());
                let places = queue.partitions.iter();
                let places = places.map(|_| Vec::with_capacity(share)).collect();
                queues.insert(name, (queue, places));
            }
            if let Some((queue, places)) = queues.get_mut(name) {
                for (place, (job, new)) in (from..).zip(run) {
                    places[usize::from(queue.place(*job, new))].push(place);
                }
            }
            from += run.len();
        }
        let mut answers: Vec<_> = jobs.iter().map(|(job, _)| Enqueued::New(*job)).collect();
        if jobs.is_empty() {
            return self.nowhere(id).await.map(|()| answers);
        }
        for (queue, places) in queues.values() {
            for (partition, places) in queue.all(0).zip(places) {
                if places.is_empty() {
                    continue;
                }
                let packed = packed(places.iter().map(|place| &jobs[*place]));
                let (function, keys) = (&self.functions().enqueue, partition.keys());
                let mut reply = self
                    .request(function, keys, id, Verb::Enqueue, &[&packed])
                    .await?;
                if reply.created {
                    let noted = self.note_made(&partition).await;
                    noted.inspect_err(|error| self.shared.sessions.leave(id.session, error))?;
                }
                read_duplicates(&mut reply.body, places, &mut answers)?;
            }
        }
        Ok(answers)
    }
}
