//! Where a job that is not leased goes, and how it is found again.
//!
//! A ready job's *position* is one number: queue, tier, index. A tier's indices start in the middle
//! of their range and grow both ways, so that a job can be put ahead of all others. The ends of a
//! tier are found by two seeks; every insert is then an append.

use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault, corrupt};
use super::tx::{Tx, moment, time};
use super::view::{PARKED, SCHEDULED, state_code};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::inspect::Counts;
use crate::job::{JobId, JobRecord, JobState};
use crate::lease::FencingToken;
use crate::rules::order::{is_suspects, tier_of};
use crate::store::codec;

statements! {
    BOUNDS = "
        SELECT (SELECT position FROM leasehold_ready WHERE position >= ?1 AND position < ?2
                ORDER BY position LIMIT 1),
               (SELECT position FROM leasehold_ready WHERE position >= ?1 AND position < ?2
                ORDER BY position DESC LIMIT 1)";
    PUT_READY = "INSERT INTO leasehold_ready (position, id, record) VALUES (?1, ?2, ?3)";
    PUT_ASIDE = "
        INSERT INTO leasehold_aside (id, queue, state, at, seq, key, keep_until, record)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    FIRST_DUE = "
        SELECT at FROM leasehold_aside WHERE queue = ?1 AND state = 0
        ORDER BY at, seq LIMIT 1";
    UNIQUE_FREE = "
        DELETE FROM leasehold_unique
        WHERE queue = ?1 AND key = ?2 AND job = ?3 AND until IS NULL";
    KEY_OWNER = "SELECT head FROM leasehold_exclusive WHERE queue = ?1 AND key = ?2";
    KEY_TAKE = "
        INSERT OR REPLACE INTO leasehold_exclusive (queue, key, head) VALUES (?1, ?2, ?3)";
    KEY_FREE = "DELETE FROM leasehold_exclusive WHERE queue = ?1 AND key = ?2";
    NEXT_PARKED = "
        SELECT row, record FROM leasehold_aside
        WHERE queue = ?1 AND key = ?2 AND state = 1 ORDER BY seq LIMIT 1";
    TAKE_ASIDE = "DELETE FROM leasehold_aside WHERE row = ?1";
    TAKE_READY = "DELETE FROM leasehold_ready WHERE position BETWEEN ?1 AND ?2";
    READY_BY_ID = "SELECT position FROM leasehold_ready WHERE id = ?1";
    READY_RECORD = "SELECT record FROM leasehold_ready WHERE position = ?1";
    ASIDE_BY_ID = "SELECT row, queue, state, at FROM leasehold_aside WHERE id = ?1";
    ASIDE_RECORD = "SELECT record FROM leasehold_aside WHERE row = ?1";
}

/// Bits of an index: at 200,000 jobs a second into a tier that is never empty, 127 days each way.
const INDEX_BITS: u32 = 42;
const TIER_BITS: u32 = 4;
/// What is left of a positive number for the queue.
pub(super) const QUEUES_MAX: i64 = (1 << (63 - INDEX_BITS - TIER_BITS)) - 1;

/// Where a job is.
#[derive(Clone, Copy)]
pub(super) enum Location {
    Ready {
        queue: usize,
        position: i64,
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

/// The first position of a tier, or with tier 0 of a queue.
pub(super) fn first_position(queue: i64, tier: usize) -> i64 {
    (queue << (INDEX_BITS + TIER_BITS)) + ((tier as i64) << INDEX_BITS)
}

/// The tier of a position.
pub(super) fn tier_of_position(position: i64) -> usize {
    (position >> INDEX_BITS) as usize & ((1 << TIER_BITS) - 1)
}

/// The queue of a position.
pub(super) fn queue_of_position(position: i64) -> i64 {
    position >> (INDEX_BITS + TIER_BITS)
}

fn count_of(counts: &mut Counts, state: i64) -> &mut u64 {
    match state {
        SCHEDULED => &mut counts.scheduled,
        3 => &mut counts.completed,
        4 => &mut counts.dead,
        5 => &mut counts.cancelled,
        _ => &mut counts.ready,
    }
}

impl Tx<'_> {
    /// A job falls due: it goes to the back of its tier, or behind the others of its exclusive key.
    pub(super) fn join(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        if let Some(key) = &job.exclusive {
            let seq = self.next_seq(queue);
            let of = self.queues[queue].id;
            let key = key.as_str().as_bytes();
            let owner = self
                .sql(KEY_OWNER)?
                .query_row(params![of, key], |row| row.get::<_, [u8; 16]>(0))
                .optional()?;
            match owner {
                Some(owner) if owner != *job.id.as_bytes() => {
                    self.insert_aside(queue, job, PARKED, Timestamp::ZERO, seq, None)?;
                    let counts = &mut self.at(queue).counts;
                    counts.ready += 1;
                    counts.parked += 1;
                    return Ok(());
                }
                Some(_) => {}
                None => {
                    self.sql(KEY_TAKE)?
                        .execute(params![of, key, job.id.as_bytes()])?;
                }
            }
        }
        self.put_back(queue, job)
    }

    pub(super) fn put_back(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        let tier = tier_of(job);
        let (first, last) = self.bounds(queue, tier)?;
        self.at(queue).bounds[tier] = Some((first, last + 1));
        self.put(queue, tier, last + 1, job)
    }

    /// Puts jobs ahead of everything in their tiers, in token order.
    pub(super) fn put_front(
        &mut self,
        queue: usize,
        mut jobs: Vec<(FencingToken, JobRecord)>,
    ) -> Done<()> {
        jobs.sort_by_key(|(token, _)| *token);
        for (_, job) in jobs.iter().rev() {
            let tier = tier_of(job);
            let (first, last) = self.bounds(queue, tier)?;
            self.at(queue).bounds[tier] = Some((first - 1, last));
            self.put(queue, tier, first - 1, job)?;
        }
        Ok(())
    }

    /// The outermost positions of a tier. Of an empty one: a pair that both ends can grow from.
    fn bounds(&mut self, queue: usize, tier: usize) -> Done<(i64, i64)> {
        let at = &self.queues[queue];
        if let Some(bounds) = at.bounds[tier] {
            return Ok(bounds);
        }
        let start = first_position(at.id, tier);
        let end = start + (1 << INDEX_BITS);
        let (first, last): (Option<i64>, Option<i64>) = self
            .sql(BOUNDS)?
            .query_row([start, end], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let middle = start + (1 << (INDEX_BITS - 1));
        Ok((first.unwrap_or(middle), last.unwrap_or(middle - 1)))
    }

    fn put(&mut self, queue: usize, tier: usize, position: i64, job: &JobRecord) -> Done<()> {
        if tier_of_position(position) != tier
            || queue_of_position(position) != self.queues[queue].id
        {
            let why = "a tier of the queue has no positions left; let it run empty once";
            return Err(Fault::Broken(Error::new(ErrorKind::Full, why)));
        }
        self.scratch.clear();
        codec::encode(job, &mut self.scratch);
        self.sql(PUT_READY)?
            .execute(params![position, job.id.as_bytes(), self.scratch])?;
        let at = self.at(queue);
        at.counts.ready += 1;
        let suspect = is_suspects(tier);
        let name = &self.queues[queue].name;
        match self.wakeups.last_mut() {
            Some((last, same, jobs)) if last == name && *same == suspect => *jobs += 1,
            _ => self.wakeups.push((name.clone(), suspect, 1)),
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
            self.wakeups.push((name, false, 1));
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
            .sql(FIRST_DUE)?
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
        codec::encode(job, &mut self.scratch);
        let key = job.exclusive.as_ref().filter(|_| state == PARKED);
        self.sql(PUT_ASIDE)?.execute(params![
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
            self.sql(UNIQUE_FREE)?.execute(params![
                self.queues[queue].id,
                unique.key.as_str().as_bytes(),
                job.id.as_bytes()
            ])?;
        }
        Ok(())
    }

    /// If the job owns its exclusive key, the next one that waits for the key takes it over.
    pub(super) fn free_exclusive(&mut self, queue: usize, job: &JobRecord) -> Done<()> {
        let Some(key) = &job.exclusive else {
            return Ok(());
        };
        let key = key.as_str().as_bytes();
        let of = self.queues[queue].id;
        let owner = self
            .sql(KEY_OWNER)?
            .query_row(params![of, key], |row| row.get::<_, [u8; 16]>(0))
            .optional()?;
        if owner.as_ref() != Some(job.id.as_bytes()) {
            return Ok(());
        }
        let next = self
            .sql(NEXT_PARKED)?
            .query_row(params![of, key], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?))
            })
            .optional()?;
        let Some((row, record)) = next else {
            self.sql(KEY_FREE)?.execute(params![of, key])?;
            return Ok(());
        };
        let next = self.decode(record)?;
        self.take_aside(queue, row, PARKED)?;
        self.sql(KEY_TAKE)?
            .execute(params![of, key, next.id.as_bytes()])?;
        self.put_back(queue, &next)
    }

    pub(super) fn decode(&mut self, record: Vec<u8>) -> Done<JobRecord> {
        codec::decode(&record.into(), self.kinds).map_err(Fault::Broken)
    }

    /// Finds a job by its id.
    pub(super) fn find(&mut self, id: JobId) -> Done<Option<Location>> {
        // Another namespace may have a job of the same id.
        let mut select = self.sql(READY_BY_ID)?;
        let mut rows = select.query([id.as_bytes()])?;
        while let Some(row) = rows.next()? {
            let position = row.get(0)?;
            if let Some(queue) = self.queue_of(queue_of_position(position))? {
                return Ok(Some(Location::Ready { queue, position }));
            }
        }
        let mut select = self.sql(ASIDE_BY_ID)?;
        let mut rows = select.query([id.as_bytes()])?;
        while let Some(row) = rows.next()? {
            if let Some(queue) = self.queue_of(row.get(1)?)? {
                return Ok(Some(Location::Aside {
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
    pub(super) fn read(&mut self, location: Location) -> Done<Option<JobRecord>> {
        let (name, row) = match location {
            Location::Ready { position, .. } => (READY_RECORD, position),
            Location::Aside { row, .. } => (ASIDE_RECORD, row),
            Location::Leased { .. } => return Ok(None),
        };
        let record = self.sql(name)?.query_row([row], |row| row.get(0));
        self.decode(record?).map(Some)
    }

    /// Takes a pending or settled job out of where it is. Its keys stay as they are.
    pub(super) fn take(&mut self, location: Location) -> Done<Option<(usize, JobRecord)>> {
        let Some(job) = self.read(location)? else {
            return Ok(None);
        };
        match location {
            Location::Ready { queue, position } => {
                self.take_ready(position, position)?;
                self.at(queue).counts.ready -= 1;
                Ok(Some((queue, job)))
            }
            Location::Aside {
                queue, row, state, ..
            } => {
                self.take_aside(queue, row, state)?;
                Ok(Some((queue, job)))
            }
            Location::Leased { .. } => Err(corrupt("a leased job was to be taken")),
        }
    }

    /// Deletes a range of ready jobs. Whoever took them counts them.
    pub(super) fn take_ready(&mut self, first: i64, last: i64) -> Done<()> {
        self.sql(TAKE_READY)?.execute([first, last])?;
        Ok(())
    }

    /// Deletes a scheduled, parked or settled job.
    pub(super) fn take_aside(&mut self, queue: usize, row: i64, state: i64) -> Done<()> {
        self.sql(TAKE_ASIDE)?.execute([row])?;
        let counts = &mut self.at(queue).counts;
        *count_of(counts, state) -= 1;
        counts.parked -= u64::from(state == PARKED);
        Ok(())
    }
}
