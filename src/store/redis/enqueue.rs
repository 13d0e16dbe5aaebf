//! enqueue: store jobs, those of a partition together.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::queue::{Partition, Queue};
use super::wire::{In, Out, garbled};
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
struct Items {
    entries: Out,
    args: Vec<Vec<u8>>,
    /// The last argument takes more jobs.
    is_open: bool,
    /// There are segments only.
    is_plain: bool,
}

impl Items {
    /// Where a job that is not plain goes.
    fn jobs(&mut self) -> &mut Vec<u8> {
        self.is_plain = false;
        if !self.is_open {
            self.entries.u8(1).raw(&[0; 13]);
            self.args.push(Vec::new());
            self.is_open = true;
        }
        let last = self.args.len() - 1;
        &mut self.args[last]
    }
}

impl Default for Items {
    fn default() -> Self {
        Self {
            entries: Out::default(),
            args: Vec::new(),
            is_open: false,
            is_plain: true,
        }
    }
}

/// Plain jobs of one priority: the store need not look at them one by one.
///
/// Jobs that differ in nothing but id and payload are stored as such behind their common form: the
/// server's Lua reads every byte of a string, so that bytes are time.
#[derive(Default)]
struct Segment {
    priority: u8,
    flags: u16,
    weight: usize,
    ids: Vec<u8>,
    records: Vec<u8>,
    /// Where each record ends, and where the length of its payload stands.
    ends: Vec<(usize, usize)>,
    is_mixed: bool,
    /// The last record, while it is looked at.
    next: Vec<u8>,
}

/// So many jobs of one form are not mixed with others.
const ALIKE: usize = 4;

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
        let mut next = std::mem::take(&mut self.next);
        next.clear();
        record::encode(job, &mut next);
        let form = next.len() - 4 - job.payload.len();
        let fits = u16::try_from(form).is_ok();
        let is_alike = fits && self.is_alike(&next[..form]);
        let is_apart = !is_alike && !self.is_mixed && self.ends.len() >= ALIKE;
        let is_full =
            self.bytes() + 16 + next.len() - if is_alike { form } else { 0 } > SEGMENT_BYTES;
        if is_full || is_apart || self.priority != job.options.priority {
            self.close(items);
            self.is_mixed = !fits;
        } else {
            self.is_mixed |= !is_alike;
        }
        self.priority = job.options.priority;
        self.flags |= record::flags_of(&next);
        self.weight += job.weight();
        self.ids.extend_from_slice(job.id.as_bytes());
        let payload = self.records.len() + form;
        self.records.extend_from_slice(&next);
        self.ends.push((self.records.len(), payload));
        self.next = next;
    }

    /// The start of the first record, up to the length of its payload.
    fn form(&self) -> &[u8] {
        let (_, payload) = self.ends.first().copied().unwrap_or_default();
        &self.records[..payload]
    }

    /// Whether a record that starts like this differs from the others in length, id and weight only.
    fn is_alike(&self, start: &[u8]) -> bool {
        let form = self.form();
        self.ends.is_empty()
            || !self.is_mixed
                && form.len() == start.len()
                && form[4..16] == start[4..16]
                && form[32..52] == start[32..52]
                && form[56..] == start[56..]
    }

    /// What it comes to, about.
    fn bytes(&self) -> usize {
        let forms = self.form().len() * self.ends.len().saturating_sub(1);
        self.ids.len() + self.records.len() - if self.is_mixed { 0 } else { forms }
    }

    fn close(&mut self, items: &mut Items) {
        if self.ends.is_empty() {
            return;
        }
        let count = self.ends.len();
        let mut body = Out(Vec::with_capacity(2 + self.bytes()));
        if self.is_mixed {
            body.u16(0).raw(&self.ids).raw(&self.records);
        } else {
            let mut form = self.form().to_vec();
            let payload = self.ends[0].0 - form.len() - 4;
            let rest = record::weight_of(&form) - payload;
            form[..4].fill(0);
            form[16..32].fill(0);
            form[52..56].copy_from_slice(&(rest as u32).to_le_bytes());
            body.u16(form.len()).raw(&form).raw(&self.ids);
            for (end, payload) in &self.ends {
                body.raw(&self.records[*payload..*end]);
            }
        }
        items.entries.u8(0).u8(self.priority);
        items.entries.u32(20 + body.0.len()).u16(count);
        items.entries.u16(self.flags.into()).u32(self.weight);
        items.args.push(body.0);
        items.is_open = false;
        *self = Self {
            next: std::mem::take(&mut self.next),
            ..Self::default()
        };
    }
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
            let mut reply = self.store_batch(&batch, id).await?;
            read_duplicates(&mut reply.body, &batch.places, &mut answers)?;
        }
        Ok(answers)
    }

    async fn store_batch(&self, batch: &Batch, id: crate::store::RequestId) -> Result<Reply> {
        let queue = &batch.partition.queue;
        let index: &[u8] = if queue.index { b"1" } else { b"0" };
        let script = &self.scripts().enqueue;
        let mut args: Vec<&[u8]> = vec![index, &batch.items.entries.0];
        args.extend(batch.items.args.iter().map(Vec::as_slice));
        if batch.items.is_plain && queue.tries_plain(Verb::Enqueue) {
            let partition = &batch.partition;
            let plain =
                self.request_plainly(&script.plain, partition, id, Verb::Enqueue, &args[1..]);
            if let Some(reply) = plain.await? {
                return Ok(reply);
            }
        }
        let keys = batch.partition.keys();
        let reply = self.request(&script.full, keys, id, Verb::Enqueue, &args);
        let reply = reply.await?;
        if reply.created {
            // A server that lost everything has forgotten its list of queues, too.
            self.write_queue(&queue.name, queue).await?;
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::In;
    use super::*;
    use crate::store::record::{Kinds, flag};

    /// Flags of jobs that leave something behind when they complete.
    const LASTING: u16 = flag::UNIQUE | flag::EXCLUSIVE | flag::RETENTION;

    /// Packs jobs, lays the segments out as the script does, and reads them back.
    fn stored(jobs: &[JobRecord]) -> (usize, Vec<JobRecord>) {
        let (mut items, mut segment) = (Items::default(), Segment::default());
        for job in jobs {
            segment.add(job, &mut items);
        }
        segment.close(&mut items);
        assert!(items.is_plain);
        let mut blob = Vec::new();
        for (entry, rest) in items.entries.0.chunks(14).zip(&items.args) {
            blob.extend_from_slice(&entry[2..]);
            blob.extend_from_slice(&7_u64.to_le_bytes());
            blob.extend_from_slice(rest);
        }
        let mut out = Out::default();
        out.text(&blob);
        let mut answer = In::new(out.0.into());
        let read = answer.segments(&mut Kinds::default()).unwrap();
        (items.args.len(), read)
    }

    fn job(kind: &str, headers: usize, bytes: usize) -> JobRecord {
        let kind = crate::job::Kind::new(kind).unwrap();
        let mut job = NewJob::raw(QueueName::default(), kind, vec![b'x'; bytes]);
        for n in 0..headers {
            job = job.header(format!("h{n}"), "value");
        }
        let mut job = JobRecord::new(JobId::generate(), job, Timestamp::from_micros(0));
        job.run_at = Timestamp::ZERO;
        job
    }

    #[test]
    fn segments_are_read_as_they_were_written() {
        let alike: Vec<_> = (0..60).map(|_| job("a", 1, 90)).collect();
        let mixed: Vec<_> = (0..60).map(|n| job(["a", "b"][n % 2], 0, n)).collect();
        let apart: Vec<_> = (0..60).map(|n| job(["a", "b"][n / 30], 1, 10)).collect();
        let large: Vec<_> = (0..3).map(|n| job("a", 0, n * 10_000)).collect();
        for (jobs, most) in [(alike, 2), (mixed, 3), (apart, 2), (large, 3)] {
            let (segments, read) = stored(&jobs);
            assert!(segments <= most, "{segments} segments");
            assert_eq!(read.len(), jobs.len());
            for (mut job, read) in jobs.into_iter().zip(read) {
                (job.enqueued_at, job.run_at) =
                    (Timestamp::from_micros(7), Timestamp::from_micros(7));
                assert_eq!(job, read);
            }
        }
    }

    #[test]
    fn the_scripts_know_the_flags() {
        let lines = [include_str!("words.lua"), include_str!("record.lua")].concat();
        for (name, value) in [
            ("UNIQUE", flag::UNIQUE),
            ("WINDOW", flag::WINDOW),
            ("EXCLUSIVE", flag::EXCLUSIVE),
            ("TERM", flag::TERM),
            ("LIFETIME", flag::MAX_LIFETIME),
            ("TIMEOUT", flag::TIMEOUT),
            ("STALL", flag::STALL_LIMIT),
            ("RETENTION", flag::RETENTION),
            ("FAILURES", flag::MAX_FAILURES),
            ("RETRY", flag::RETRY),
            ("HEADERS", flag::HEADERS),
            ("CHECKPOINT", flag::CHECKPOINT),
            ("RESULT", flag::RESULT),
            ("HISTORY", flag::HISTORY),
        ] {
            let found = lines.lines().find_map(|line| {
                let (names, values) = line.trim().strip_prefix("local ")?.split_once(" = ")?;
                let at = names.split(", ").position(|other| other == name)?;
                values.split(", ").nth(at)
            });
            assert_eq!(found.expect(name).parse(), Ok(value), "{name}");
        }
        assert_eq!(LASTING, 1 + 4 + 128);
    }
}
