//! enqueue: store jobs, those of a partition together.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::queue::{Partition, Queue};
use super::wire::Out;
use super::{RedisStore, Reply};
use crate::clock::{Timestamp, micros};
use crate::error::{Result, Verb};
use crate::job::{JobId, JobRecord, NewJob, QueueName};
use crate::store::record;
use crate::store::{EnqueueRequest, Enqueued};

/// Bytes in one segment, about: two of them fill a node of the server's lists, so that next to no
/// memory is lost in rounding, and a claim that wants fewer jobs has little to cut.
const SEGMENT_BYTES: usize = 4_000;

/// The jobs of one partition, packed.
struct Batch {
    partition: Partition,
    /// Where the answers go.
    places: Vec<usize>,
    items: Items,
    segment: Segment,
}

/// What the script is to store: an entry for each argument.
#[derive(Default)]
struct Items {
    entries: Out,
    args: Vec<Vec<u8>>,
    /// The last argument takes more jobs.
    is_open: bool,
}

impl Items {
    /// Where a job that is not plain goes.
    fn jobs(&mut self) -> &mut Vec<u8> {
        if !self.is_open {
            self.entries.u8(1).raw(&[0; 13]);
            self.args.push(Vec::new());
            self.is_open = true;
        }
        let last = self.args.len() - 1;
        &mut self.args[last]
    }
}

/// Plain jobs of one priority: the store need not look at them one by one.
#[derive(Default)]
struct Segment {
    priority: u8,
    flags: u16,
    weight: usize,
    ids: Vec<u8>,
    records: Vec<u8>,
}

impl Batch {
    fn add(&mut self, place: usize, id: JobId, job: NewJob) {
        self.places.push(place);
        let delay = job.delay;
        let is_plain = job.unique.is_none() && job.exclusive.is_none() && micros(delay) == 0;
        let mut job = JobRecord::new(id, job, Timestamp::ZERO);
        job.run_at = Timestamp::ZERO;
        if is_plain {
            self.segment.add(&job, &mut self.items);
            return;
        }
        self.segment.close(&mut self.items);
        let jobs = self.items.jobs();
        jobs.extend_from_slice(&micros(delay).to_le_bytes());
        record::encode(&job, jobs);
    }
}

impl Segment {
    fn add(&mut self, job: &JobRecord, items: &mut Items) {
        let bytes = self.ids.len() + self.records.len();
        let average = bytes / (self.ids.len() / 16).max(1);
        let is_full = bytes + average > SEGMENT_BYTES;
        if is_full || self.priority != job.options.priority {
            self.close(items);
        }
        self.priority = job.options.priority;
        let start = self.records.len();
        record::encode(job, &mut self.records);
        self.flags |= record::flags_of(&self.records[start..]);
        self.weight += job.weight();
        self.ids.extend_from_slice(job.id.as_bytes());
    }

    fn close(&mut self, items: &mut Items) {
        if self.ids.is_empty() {
            return;
        }
        let mut segment = std::mem::take(self);
        let count = segment.ids.len() / 16;
        segment.ids.append(&mut segment.records);
        items.entries.u8(0).u8(segment.priority);
        items.entries.u32(20 + segment.ids.len()).u16(count);
        items.entries.u16(segment.flags.into()).u32(segment.weight);
        items.args.push(segment.ids);
        items.is_open = false;
    }
}

impl RedisStore {
    pub(super) async fn enqueue_all(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.validate()?;
        let id = request.request;
        self.shared.sessions.begin(id, Verb::Enqueue)?;
        let mut queues = BTreeMap::<QueueName, Arc<Queue>>::new();
        let mut batches = BTreeMap::<(QueueName, u16), Batch>::new();
        let mut answers = Vec::with_capacity(request.jobs.len());
        for (place, (job, new)) in request.jobs.into_iter().enumerate() {
            answers.push(Enqueued::New(job));
            if !queues.contains_key(&new.queue) {
                let queue = self.make_queue(&new.queue).await?;
                queues.insert(new.queue.clone(), queue);
            }
            let queue = &queues[&new.queue];
            let number = queue.place(job, &new);
            let batch = batches
                .entry((new.queue.clone(), number))
                .or_insert_with(|| Batch {
                    partition: Partition {
                        queue: Arc::clone(queue),
                        number,
                    },
                    places: Vec::new(),
                    items: Items::default(),
                    segment: Segment::default(),
                });
            batch.add(place, job, new);
        }
        if batches.is_empty() {
            return self.nowhere(id).await.map(|()| answers);
        }
        for mut batch in batches.into_values() {
            batch.segment.close(&mut batch.items);
            let reply = self.store_batch(&batch, id).await?;
            let mut body = reply.body;
            for _ in 0..body.u32()? {
                let place = body.u32()?;
                let holder = body.id()?;
                if let Some(place) = batch.places.get(place) {
                    answers[*place] = Enqueued::Duplicate(holder);
                }
            }
        }
        Ok(answers)
    }

    async fn store_batch(&self, batch: &Batch, id: crate::store::RequestId) -> Result<Reply> {
        let queue = &batch.partition.queue;
        let index: &[u8] = if queue.index { b"1" } else { b"0" };
        let script = &self.scripts().enqueue;
        let keys = batch.partition.keys();
        let mut args: Vec<&[u8]> = vec![index, &batch.items.entries.0];
        args.extend(batch.items.args.iter().map(Vec::as_slice));
        let reply = self.request(script, keys, id, Verb::Enqueue, &args).await?;
        if reply.created {
            // A server that lost everything has forgotten its list of queues, too.
            self.write_queue(&queue.name, queue).await?;
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    use crate::store::record::flag;

    /// Flags of jobs that leave something behind when they complete.
    const LASTING: u16 = flag::UNIQUE | flag::EXCLUSIVE | flag::RETENTION;

    #[test]
    fn the_scripts_know_the_flags() {
        let text = include_str!("names.lua");
        for (name, value) in [
            ("UNIQUE", flag::UNIQUE),
            ("WINDOW", flag::WINDOW),
            ("EXCLUSIVE", flag::EXCLUSIVE),
            ("TERM", flag::TERM),
            ("LIFETIME", flag::MAX_LIFETIME),
            ("TIMEOUT", flag::TIMEOUT),
            ("STALL", flag::STALL_LIMIT),
        ] {
            let first = text.lines().find(|line| line.contains("local UNIQUE"));
            let first = first.expect("the flags");
            let (names, values) = first.split_once(" = ").expect("an assignment");
            let at = names
                .trim_start_matches("local ")
                .split(", ")
                .position(|n| n == name);
            let found = values.split(", ").nth(at.expect(name)).expect(name);
            assert_eq!(found.parse(), Ok(value), "{name}");
        }
        assert_eq!(LASTING, 1 + 4 + 128);
    }
}
