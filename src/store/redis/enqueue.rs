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
use crate::store::{EnqueueRequest, Enqueued, RequestId};

/// Bytes in one segment, about: one of them fills a node of the server's lists. Each segment costs a
/// claim by itself: of twice as many, each half as long, claims by the hundred cost a sixth more. But one
/// that wants a single job has a whole segment to cut.
const SEGMENT_BYTES: usize = 8_000;

/// Jobs in one segment, where they are more than a few: what claims by round numbers take whole.
const ROUND: [usize; 9] = [1, 2, 4, 5, 10, 20, 25, 50, 100];

/// Bytes of an entry: [0][priority][12 head] of a segment.
pub(super) const ENTRY: usize = 14;

/// Bytes of the start of a segment: its head and the time.
pub(super) const START: usize = 20;

/// So many jobs of one form are not mixed with others.
const ALIKE: usize = 4;

/// A job of a call, with the id that it was given.
type Named = (JobId, NewJob);

/// What the script is to store: an entry for each argument.
pub(super) struct Items {
    pub(super) entries: Out,
    pub(super) args: Vec<Vec<u8>>,
    /// In all segments.
    pub(super) jobs: usize,
    /// The last argument takes more jobs.
    is_open: bool,
    /// There are segments only.
    is_plain: bool,
}

impl Items {
    /// Packs the jobs of one partition.
    fn pack<'a>(jobs: impl Iterator<Item = &'a Named>) -> Self {
        let mut items = Self {
            entries: Out::default(),
            args: Vec::new(),
            jobs: 0,
            is_open: false,
            is_plain: true,
        };
        let mut segment = Segment::default();
        for named in jobs {
            if is_plain(&named.1) {
                segment.add(named, &mut items);
            } else {
                segment.close(&mut items);
                items.add(named);
            }
        }
        segment.close(&mut items);
        items
    }

    /// Adds a job that the store has to look at.
    fn add(&mut self, named: &Named) {
        self.is_plain = false;
        if !self.is_open {
            self.entries.u8(1).raw(&[0; ENTRY - 1]);
            self.args.push(Vec::new());
            self.is_open = true;
        }
        if let Some(jobs) = self.args.last_mut() {
            jobs.extend_from_slice(&micros(named.1.delay).to_le_bytes());
            encode(named, jobs);
        }
    }

    /// The priority of all jobs, if they are segments of no other.
    fn priority(&self) -> Option<u8> {
        let mut all = self.entries.0.chunks(ENTRY).map(|entry| entry[1]);
        let first = all.next().filter(|_| self.is_plain)?;
        all.all(|other| other == first).then_some(first)
    }

    fn bytes(&self) -> usize {
        self.args.iter().map(Vec::len).sum()
    }
}

fn is_plain(job: &NewJob) -> bool {
    job.unique.is_none() && job.exclusive.is_none() && micros(job.delay) == 0
}

/// Appends the record of a job whose times the store will fill in.
fn encode((id, job): &Named, out: &mut Vec<u8>) {
    let mut job = JobRecord::new(*id, job.clone(), Timestamp::ZERO);
    job.run_at = Timestamp::ZERO;
    record::encode(&job, out);
}

/// The start of a job's record up to the length of its payload, without length, id, times and what
/// the payload weighs.
fn form_of(job: &NewJob) -> Vec<u8> {
    let mut bare = job.clone();
    bare.payload = bytes::Bytes::new();
    let mut form = Vec::new();
    encode(&(JobId::from_bytes([0; 16]), bare), &mut form);
    form.truncate(form.len() - 4);
    form[..4].fill(0);
    form
}

/// Plain jobs of one priority: the store need not look at them one by one.
///
/// Jobs that differ in nothing but id and payload are stored as such behind their common form: the
/// server's Lua reads every byte of a string, so that bytes are time.
#[derive(Default)]
struct Segment<'a> {
    jobs: Vec<&'a Named>,
    /// The form of the first job, and of the others unless they are mixed. Kept for the next segment.
    form: Vec<u8>,
    is_mixed: bool,
    weight: usize,
    /// What it comes to if it is not mixed, and if it is.
    bytes: [usize; 2],
}

impl<'a> Segment<'a> {
    fn add(&mut self, named: &'a Named, items: &mut Items) {
        let job = &named.1;
        let is_alike = !self.is_mixed && self.has_form_of(job);
        let form = (!is_alike).then(|| form_of(job));
        let length = form.as_ref().map_or(self.form.len(), Vec::len);
        let thin = 16 + 4 + job.payload.len();
        let is_apart = !is_alike && !self.is_mixed && self.jobs.len() >= ALIKE;
        let more = if is_alike {
            self.bytes[0]
        } else {
            self.bytes[1] + length
        };
        let is_full = more + thin > SEGMENT_BYTES;
        let is_other = |first: &&Named| first.1.options.priority != job.options.priority;
        if is_full || is_apart || self.jobs.first().is_some_and(is_other) {
            self.close(items);
        }
        if self.jobs.is_empty() {
            self.form = form.unwrap_or_else(|| std::mem::take(&mut self.form));
            self.is_mixed = u16::try_from(length).is_err();
            self.bytes[0] = length;
        } else {
            self.is_mixed |= !is_alike;
        }
        self.jobs.push(named);
        self.weight += job.weight();
        self.bytes[0] += thin;
        self.bytes[1] += length + thin;
        if self.is_round() {
            self.close(items);
        }
    }

    /// Whether a job has all but id and payload in common with the first.
    fn has_form_of(&self, job: &NewJob) -> bool {
        self.jobs.first().is_some_and(|(_, first)| {
            first.kind == job.kind && first.options == job.options && first.headers == job.headers
        })
    }

    /// Whether it has a round number of jobs, and no room for the next.
    fn is_round(&self) -> bool {
        let count = self.jobs.len();
        let bytes = self.bytes[usize::from(self.is_mixed)];
        let next = ROUND.iter().find(|round| **round > count);
        ROUND.contains(&count) && next.is_none_or(|next| bytes / count * next > SEGMENT_BYTES)
    }

    fn close(&mut self, items: &mut Items) {
        let Some((_, first)) = self.jobs.first() else {
            return;
        };
        let (count, priority) = (self.jobs.len(), first.options.priority);
        let mut body = Out(Vec::with_capacity(
            2 + self.bytes[usize::from(self.is_mixed)],
        ));
        let mut flags = record::flags_of(&self.form);
        body.u16(if self.is_mixed { 0 } else { self.form.len() });
        if !self.is_mixed {
            body.raw(&self.form);
        }
        for (id, _) in &self.jobs {
            body.raw(id.as_bytes());
        }
        for named in &self.jobs {
            if self.is_mixed {
                let start = body.0.len();
                encode(named, &mut body.0);
                flags |= record::flags_of(&body.0[start..]);
            } else {
                body.text(&named.1.payload);
            }
        }
        items.entries.u8(0).u8(priority);
        items.entries.u32(START + body.0.len()).u16(count);
        items.entries.u16(flags.into()).u32(self.weight);
        items.args.push(body.0);
        items.jobs += count;
        items.is_open = false;
        self.jobs.clear();
        (self.is_mixed, self.weight, self.bytes) = (false, 0, [0; 2]);
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
        let jobs = &request.jobs;
        // The places of the jobs in the call, by queue and partition.
        let mut queues = BTreeMap::<&QueueName, (Arc<Queue>, Vec<Vec<usize>>)>::new();
        let mut from = 0;
        for run in jobs.chunk_by(|(_, one), (_, next)| one.queue == next.queue) {
            let name = &run[0].1.queue;
            if !queues.contains_key(name) {
                let queue = self.make_queue(name).await?;
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
                let items = Items::pack(places.iter().map(|place| &jobs[*place]));
                let mut reply = self.store_batch(&partition, &items, id).await?;
                read_duplicates(&mut reply.body, places, &mut answers)?;
            }
        }
        Ok(answers)
    }

    async fn store_batch(
        &self,
        partition: &Partition,
        items: &Items,
        id: RequestId,
    ) -> Result<Reply> {
        let queue = &partition.queue;
        let script = &self.scripts().enqueue;
        let mut args: Vec<&[u8]> = vec![if queue.index { b"1" } else { b"0" }];
        args.push(&items.entries.0);
        args.extend(items.args.iter().map(Vec::as_slice));
        if items.is_plain && queue.tries_plain(Verb::Enqueue) {
            let mut answer = None;
            if items.bytes() >= self.shared.options.bulk
                && self.link.takes_transactions()
                && let Some(priority) = items.priority()
            {
                answer = self.store_bulk(partition, priority, items, id).await?;
            }
            let plain = match answer {
                Some(answer) => self.read_plainly(partition, id, Verb::Enqueue, answer)?,
                None => {
                    self.request_plainly(&script.plain, partition, id, Verb::Enqueue, &args[1..])
                        .await?
                }
            };
            if let Some(reply) = plain {
                return Ok(reply);
            }
        }
        let reply = self.request(&script.full, partition.keys(), id, Verb::Enqueue, &args);
        let reply = reply.await?;
        if reply.created {
            queue.may_be_plain(Verb::Enqueue);
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

    /// Packs jobs, lays the segments out as the script does, and reads them back. Also returns how
    /// many jobs each segment has.
    fn stored(jobs: &[Named]) -> (Vec<u16>, Vec<JobRecord>) {
        let items = Items::pack(jobs.iter());
        assert!(items.is_plain);
        let (mut blob, mut counts) = (Vec::new(), Vec::new());
        for (entry, rest) in items.entries.0.chunks(ENTRY).zip(&items.args) {
            counts.push(u16::from_le_bytes([entry[6], entry[7]]));
            blob.extend_from_slice(&entry[2..]);
            blob.extend_from_slice(&7_u64.to_le_bytes());
            blob.extend_from_slice(rest);
        }
        let mut out = Out::default();
        out.text(&blob);
        let mut answer = In::new(out.0.into());
        (counts, answer.segments(&mut Kinds::default()).unwrap())
    }

    fn job(kind: &str, headers: usize, bytes: usize) -> Named {
        let kind = crate::job::Kind::new(kind).unwrap();
        let mut job = NewJob::raw(QueueName::default(), kind, vec![b'x'; bytes]);
        for n in 0..headers {
            job = job.header(format!("h{n}"), "value");
        }
        (JobId::generate(), job)
    }

    #[test]
    fn segments_are_read_as_they_were_written() {
        let alike: Vec<_> = (0..100).map(|_| job("a", 1, 90)).collect();
        let mixed: Vec<_> = (0..60).map(|n| job(["a", "b"][n % 2], 0, n)).collect();
        let apart: Vec<_> = (0..60).map(|n| job(["a", "b"][n / 30], 1, 10)).collect();
        let large: Vec<_> = (0..3).map(|n| job("a", 0, n * 10_000)).collect();
        let heavy: Vec<_> = (0..3).map(|n| job("a", 40, n * 1_000)).collect();
        let changing: Vec<_> = (0..20).map(|n| job(["a", "b"][n / 2 % 2], 0, 9)).collect();
        for (jobs, most) in [
            (alike, 4),
            (mixed, 3),
            (apart, 2),
            (large, 3),
            (heavy, 3),
            (changing, 1),
        ] {
            let (segments, read) = stored(&jobs);
            assert!(segments.len() <= most, "segments of {segments:?}");
            assert_eq!(read.len(), jobs.len());
            for ((id, job), read) in jobs.into_iter().zip(read) {
                let mut job = JobRecord::new(id, job, Timestamp::from_micros(7));
                job.run_at = Timestamp::from_micros(7);
                assert_eq!(job, read);
            }
        }
    }

    #[test]
    fn a_claim_of_a_round_number_cuts_no_segment() {
        for (bytes, size) in [(10, 100), (100, 50), (300, 20), (1_000, 5), (5_000, 1)] {
            let jobs: Vec<_> = (0..400).map(|_| job("a", 0, bytes)).collect();
            let (segments, _) = stored(&jobs);
            assert!(segments.iter().all(|count| *count == size), "{segments:?}");
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
