//! Where a job that is not leased goes, and how it is found again.
//!
//! A ready job's *slot* is one number: queue, line, place. A line's places start in the middle of
//! their range and grow both ways, so that a job can be put ahead of all others.

use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault, corrupt};
use super::tx::{Tx, moment, time};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::inspect::Counts;
use crate::job::{JobId, JobRecord, JobState};
use crate::lease::FencingToken;
use crate::store::line::{PARKED, SCHEDULED, line_of, state_code};
use crate::store::record;

/// Bits of a place: at 200,000 jobs a second into a line that is never empty, 127 days each way.
const PLACE_BITS: u32 = 42;
const LINE_BITS: u32 = 4;
/// What is left of a positive number for the queue.
pub(super) const QUEUES_MAX: i64 = (1 << (63 - PLACE_BITS - LINE_BITS)) - 1;

/// Where a job is.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Line {
        queue: usize,
        slot: i64,
    },
    Aside {
        queue: usize,
        row: i64,
        state: i64,
        at: Timestamp,
    },
    Leased {
        grant: FencingToken,
        at: usize,
    },
}

/// The first slot of a line, or with line 0 of a queue.
pub(super) fn first_slot(queue: i64, line: usize) -> i64 {
    (queue << (PLACE_BITS + LINE_BITS)) + ((line as i64) << PLACE_BITS)
}

/// The line of a slot.
pub(super) fn line_of_slot(slot: i64) -> usize {
    (slot >> PLACE_BITS) as usize & ((1 << LINE_BITS) - 1)
}

/// The queue of a slot.
pub(super) fn queue_of_slot(slot: i64) -> i64 {
    slot >> (PLACE_BITS + LINE_BITS)
}

pub(super) fn count_of(counts: &mut Counts, state: i64) -> &mut u64 {
    match state {
        SCHEDULED => &mut counts.scheduled,
        3 => &mut counts.completed,
        4 => &mut counts.dead,
        5 => &mut counts.cancelled,
        _ => &mut counts.ready,
    }
}

impl Tx<'_> {
    /// A job falls due: it goes to the back of its line, or behind the others of its exclusive key.
    pub(super) fn join(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        if let Some(key) = &job.exclusive {
            let seq = self.next_seq(queue);
            let of = self.queues[queue].id;
            let key = key.as_str().as_bytes();
            let head = self
                .sql("exclusive_head")?
                .query_row(params![of, key], |row| row.get::<_, [u8; 16]>(0))
                .optional()?;
            match head {
                Some(head) if head != *job.id.as_bytes() => {
                    self.insert_aside(queue, job, PARKED, Timestamp::ZERO, seq, None)?;
                    let counts = &mut self.at(queue).counts;
                    counts.ready += 1;
                    counts.parked += 1;
                    return Ok(());
                }
                Some(_) => {}
                None => {
                    self.sql("exclusive_set")?
                        .execute(params![of, key, job.id.as_bytes()])?;
                }
            }
        }
        self.put_back(queue, job)
    }

    pub(super) fn put_back(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        let line = line_of(job);
        let (first, last) = self.ends(queue, line)?;
        self.at(queue).ends[line] = Some((first, last + 1));
        self.put(queue, line, last + 1, job)
    }

    /// Puts jobs ahead of everything in their lines, in token order.
    pub(super) fn put_front(
        &mut self,
        queue: usize,
        mut jobs: Vec<(FencingToken, JobRecord)>,
    ) -> Done<()> {
        jobs.sort_by_key(|(token, _)| *token);
        for (_, job) in jobs.iter().rev() {
            let line = line_of(job);
            let (first, last) = self.ends(queue, line)?;
            self.at(queue).ends[line] = Some((first - 1, last));
            self.put(queue, line, first - 1, job)?;
        }
        Ok(())
    }

    /// The outermost slots of a line. Of an empty one: a pair that both ends can grow from.
    fn ends(&mut self, queue: usize, line: usize) -> Done<(i64, i64)> {
        let at = &self.queues[queue];
        if let Some(ends) = at.ends[line] {
            return Ok(ends);
        }
        let start = first_slot(at.id, line);
        let end = start + (1 << PLACE_BITS);
        let (first, last): (Option<i64>, Option<i64>) = self
            .sql("line_ends")?
            .query_row([start, end], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let middle = start + (1 << (PLACE_BITS - 1));
        Ok((first.unwrap_or(middle), last.unwrap_or(middle - 1)))
    }

    fn put(&mut self, queue: usize, line: usize, slot: i64, job: &JobRecord) -> Done<()> {
        if line_of_slot(slot) != line || queue_of_slot(slot) != self.queues[queue].id {
            let why = "a line of the queue has no places left; let it run empty once";
            return Err(Fault::Broken(Error::new(ErrorKind::Full, why)));
        }
        self.scratch.clear();
        record::encode(job, &mut self.scratch);
        self.sql("put_ready")?
            .execute(params![slot, job.id.as_bytes(), self.scratch])?;
        let at = self.at(queue);
        at.counts.ready += 1;
        let suspect = line.is_multiple_of(2);
        let name = &self.queues[queue].name;
        match self.bells.last_mut() {
            Some((last, same, jobs)) if last == name && *same == suspect => *jobs += 1,
            _ => self.bells.push((name.clone(), suspect, 1)),
        }
        Ok(())
    }

    pub(super) fn put_scheduled(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        let seq = self.next_seq(queue);
        let first = self.first_due(queue)?;
        self.insert_aside(queue, job, SCHEDULED, job.run_at, seq, None)?;
        let at = self.at(queue);
        at.counts.scheduled += 1;
        if first.is_none_or(|first| job.run_at < first) {
            let name = at.name.clone();
            self.bells.push((name, false, 1));
        }
        Ok(())
    }

    /// When the next scheduled job of a queue falls due.
    pub(super) fn first_due(&mut self, queue: usize) -> Done<Option<Timestamp>> {
        let at = &self.queues[queue];
        if at.counts.scheduled == 0 {
            return Ok(None);
        }
        let first = self
            .sql("first_due")?
            .query_row([at.id], |row| row.get(0))
            .optional()?;
        Ok(first.map(moment))
    }

    /// A job's life is over: its keys are free, and the next of its exclusive key is ready.
    pub(super) fn put_settled(
        &mut self,
        queue: usize,
        job: &JobRecord,
        state: JobState,
        keep_until: Option<Timestamp>,
        now: Timestamp,
    ) -> Done<()> {
        self.free_unique(queue, job)?;
        self.free_exclusive(queue, job)?;
        let Some(keep_until) = keep_until else {
            return Ok(());
        };
        let seq = self.next_seq(queue);
        let code = state_code(state);
        let keep_until = Some(time(keep_until)).filter(|until| *until != i64::MAX);
        self.insert_aside(queue, job, code, now, seq, keep_until)?;
        *count_of(&mut self.at(queue).counts, code) += 1;
        Ok(())
    }

    fn insert_aside(
        &mut self,
        queue: usize,
        job: &JobRecord,
        state: i64,
        at: Timestamp,
        seq: i64,
        keep_until: Option<i64>,
    ) -> Done<()> {
        self.scratch.clear();
        record::encode(job, &mut self.scratch);
        let key = job.exclusive.as_ref().filter(|_| state == PARKED);
        self.sql("put_aside")?.execute(params![
            job.id.as_bytes(),
            self.queues[queue].id,
            state,
            time(at),
            seq,
            key.map(|key| key.as_str().as_bytes()),
            keep_until,
            self.scratch
        ])?;
        Ok(())
    }

    pub(super) fn free_unique(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        if let Some(unique) = &job.unique {
            self.sql("unique_free")?.execute(params![
                self.queues[queue].id,
                unique.key.as_str().as_bytes(),
                job.id.as_bytes()
            ])?;
        }
        Ok(())
    }

    /// If the job is the head of its exclusive key, the next one takes its place.
    pub(super) fn free_exclusive(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        let Some(key) = &job.exclusive else {
            return Ok(());
        };
        let key = key.as_str().as_bytes();
        let of = self.queues[queue].id;
        let head = self
            .sql("exclusive_head")?
            .query_row(params![of, key], |row| row.get::<_, [u8; 16]>(0))
            .optional()?;
        if head.as_ref() != Some(job.id.as_bytes()) {
            return Ok(());
        }
        let next = self
            .sql("next_parked")?
            .query_row(params![of, key], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?))
            })
            .optional()?;
        let Some((row, record)) = next else {
            self.sql("exclusive_free")?.execute(params![of, key])?;
            return Ok(());
        };
        let next = self.decode(record)?;
        self.sql("take_aside")?.execute([row])?;
        self.sql("exclusive_set")?
            .execute(params![of, key, next.id.as_bytes()])?;
        let counts = &mut self.at(queue).counts;
        counts.ready -= 1;
        counts.parked -= 1;
        self.put_back(queue, &next)
    }

    pub(super) fn decode(&mut self, record: Vec<u8>) -> Done<JobRecord> {
        record::decode(&record.into(), self.kinds).map_err(Fault::Broken)
    }

    /// Finds a job by its id.
    pub(super) fn find(&mut self, id: JobId) -> Done<Option<Place>> {
        // Another namespace may have a job of the same id.
        let mut select = self.sql("ready_by_id")?;
        let mut rows = select.query([id.as_bytes()])?;
        while let Some(row) = rows.next()? {
            let slot = row.get(0)?;
            if let Some(queue) = self.queue_of(queue_of_slot(slot))? {
                return Ok(Some(Place::Line { queue, slot }));
            }
        }
        let mut select = self.sql("aside_by_id")?;
        let mut rows = select.query([id.as_bytes()])?;
        while let Some(row) = rows.next()? {
            if let Some(queue) = self.queue_of(row.get(1)?)? {
                return Ok(Some(Place::Aside {
                    queue,
                    row: row.get(0)?,
                    state: row.get(2)?,
                    at: moment(row.get(3)?),
                }));
            }
        }
        self.find_leased(id)
    }

    /// Reads the record of a job that is not leased.
    pub(super) fn read(&mut self, place: Place) -> Done<Option<JobRecord>> {
        let (name, row) = match place {
            Place::Line { slot, .. } => ("ready_record", slot),
            Place::Aside { row, .. } => ("aside_record", row),
            Place::Leased { .. } => return Ok(None),
        };
        let record = self.sql(name)?.query_row([row], |row| row.get(0));
        self.decode(record?).map(Some)
    }

    /// Takes a pending or settled job out of where it is. Its keys stay as they are.
    pub(super) fn take(&mut self, place: Place) -> Done<Option<(usize, JobRecord)>> {
        let Some(job) = self.read(place)? else {
            return Ok(None);
        };
        match place {
            Place::Line { queue, slot } => {
                self.sql("take_ready")?.execute([slot, slot])?;
                self.at(queue).counts.ready -= 1;
                Ok(Some((queue, job)))
            }
            Place::Aside {
                queue, row, state, ..
            } => {
                self.sql("take_aside")?.execute([row])?;
                let counts = &mut self.at(queue).counts;
                *count_of(counts, state) -= 1;
                counts.parked -= u64::from(state == PARKED);
                Ok(Some((queue, job)))
            }
            Place::Leased { .. } => Err(corrupt("a leased job was to be taken")),
        }
    }
}
