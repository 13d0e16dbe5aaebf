//! Grants as they are read and written: see [`held`](crate::store::held).

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault, corrupt};
use super::place::Place;
use super::tx::{Tx, moment, time};
use crate::clock::Timestamp;
use crate::job::{JobId, JobRecord, JobState, SavedCheckpoint};
use crate::lease::{FencingToken, Nonce, Receipt};
use crate::rules::ends::{LeaseFacts, Next, Step};
use crate::store::held::{HEAD, Head, Held, Misfit, Note, offset, place_in};
use crate::store::record;

/// What a receipt turned out to be.
pub(super) struct Current {
    pub(super) at: usize,
    pub(super) queue: usize,
    pub(super) late: bool,
    pub(super) cancel: bool,
    pub(super) flags: u16,
}

impl Tx<'_> {
    /// A live grant, read if it has not been.
    pub(super) fn held(&mut self, id: FencingToken) -> Done<Option<&mut Held>> {
        if !self.grants.contains_key(&id) {
            let Some(held) = self.load(id)? else {
                return Ok(None);
            };
            self.grants.insert(id, held);
        }
        Ok(self.grants.get_mut(&id).filter(|held| held.live > 0))
    }

    fn load(&mut self, id: FencingToken) -> Done<Option<Held>> {
        let Ok(number) = i64::try_from(id.get()) else {
            return Ok(None);
        };
        let mut select = self.sql("grant")?;
        let mut rows = select.query([number])?;
        let Some(row) = rows.next()? else {
            return Ok(None);
        };
        let Some(queue) = self.queue_of(row.get(0)?)? else {
            return Ok(None);
        };
        let noted: bool = row.get(11)?;
        let mut held = Held {
            queue,
            deadline: moment(row.get(1)?),
            nonce: Nonce::from_bytes(row.get(2)?),
            owner: row.get(3)?,
            task: row.get(4)?,
            granted_at: moment(row.get(5)?),
            term: Duration::from_nanos(row.get::<_, i64>(6)? as u64),
            max_lifetime: Duration::from_nanos(row.get::<_, i64>(7)? as u64),
            renewals: row.get(8)?,
            leases: row.get::<_, i64>(9)? as usize,
            live: row.get::<_, i64>(10)? as usize,
            ended: row.get(12)?,
            noted,
            heads: None,
            records: None,
            notes: None,
            dirty: false,
            moved: false,
        };
        if held.live != held.living().count() {
            return Err(corrupt("a grant's count does not fit its leases"));
        }
        if noted {
            held.notes = Some(self.load_notes(id, held.leases)?);
        }
        Ok(Some(held))
    }

    fn load_notes(&mut self, id: FencingToken, leases: usize) -> Done<BTreeMap<usize, Note>> {
        let first = id.get() as i64;
        let mut select = self.sql("notes")?;
        let mut rows = select.query([first, first + leases as i64])?;
        let mut notes = BTreeMap::new();
        while let Some(row) = rows.next()? {
            let progress: Option<Vec<u8>> = row.get(2)?;
            let progress = progress.map(|bytes| record::progress(&bytes.into()));
            let seq: Option<i64> = row.get(3)?;
            let bytes: Option<Vec<u8>> = row.get(4)?;
            let note = Note {
                cancel: row.get(1)?,
                progress: progress.transpose().map_err(Fault::Broken)?,
                checkpoint: seq
                    .zip(bytes)
                    .map(|(seq, bytes)| (seq as u64, bytes.into())),
            };
            notes.insert((row.get::<_, i64>(0)? - first) as usize, note);
        }
        Ok(notes)
    }

    /// Reads a grant's heads; with `whole`, its records too.
    pub(super) fn open(&mut self, id: FencingToken, whole: bool) -> Done<()> {
        let number = id.get() as i64;
        let (need_heads, need_records) = match self.grants.get(&id) {
            Some(held) => (held.heads.is_none(), whole && held.records.is_none()),
            None => (false, false),
        };
        if need_heads {
            let heads: Vec<u8> = self.sql("heads")?.query_row([number], |row| row.get(0))?;
            if !heads.len().is_multiple_of(HEAD) {
                return Err(corrupt("the heads of a grant are cut"));
            }
            self.grants
                .entry(id)
                .and_modify(|held| held.heads = Some(heads));
        }
        if need_records {
            let records: Vec<u8> = self.sql("records")?.query_row([number], |row| row.get(0))?;
            self.grants
                .entry(id)
                .and_modify(|held| held.records = Some(records.into()));
        }
        Ok(())
    }

    /// The holder's lease, if the receipt is the current one.
    pub(super) fn current(&mut self, receipt: &Receipt, now: Timestamp) -> Done<Option<Current>> {
        if self.held(receipt.grant)?.is_none() {
            return Ok(None);
        }
        self.open(receipt.grant, false)?;
        let Some(held) = self.grants.get(&receipt.grant) else {
            return Ok(None);
        };
        let Some(at) = offset(receipt.grant, receipt.token).filter(|at| held.is_live(*at)) else {
            return Ok(None);
        };
        let Head { id, flags, .. } = held
            .head(at)
            .ok_or_else(|| corrupt("a lease has no record"))?;
        let current = self.queues[held.queue].name == receipt.queue
            && receipt.partition == 0
            && held.nonce.matches(&receipt.nonce)
            && id == *receipt.job.as_bytes();
        Ok(current.then(|| Current {
            at,
            queue: held.queue,
            late: held.deadline <= now,
            cancel: held.cancel(at),
            flags,
        }))
    }

    /// A leased job as it stands, with what its lease has saved, and the facts of the lease.
    pub(super) fn leased(
        &mut self,
        grant: FencingToken,
        at: usize,
    ) -> Done<Option<(LeaseFacts, JobRecord)>> {
        if self.held(grant)?.is_none_or(|held| !held.is_live(at)) {
            return Ok(None);
        }
        self.open(grant, true)?;
        let Some(held) = self.grants.get(&grant) else {
            return Ok(None);
        };
        let token = grant.plus(at as u64);
        let record = held.record(at)?;
        let mut job = record::decode(&record, self.kinds).map_err(Fault::Broken)?;
        if let Some((seq, bytes)) = held.note(at).and_then(|note| note.checkpoint.clone()) {
            job.checkpoint = Some(Box::new(SavedCheckpoint { token, seq, bytes }));
        }
        Ok(Some((held.facts(token, at), job)))
    }

    /// Finds a leased job by its id, among the grants whose bounds admit it.
    pub(super) fn find_leased(&mut self, id: JobId) -> Done<Option<Place>> {
        self.save_grants()?;
        let mut found = Vec::new();
        {
            let mut select = self.sql("grants_by_job")?;
            let mut rows = select.query([id.as_bytes()])?;
            while let Some(row) = rows.next()? {
                let heads = row.get_ref(1)?.as_blob().unwrap_or_default();
                let mut ids = heads.chunks_exact(HEAD);
                if let Some(head) = ids.find(|head| head.starts_with(id.as_bytes())) {
                    let grant = FencingToken::new(row.get::<_, i64>(0)? as u64);
                    found.push((grant, place_in(head)));
                }
            }
        }
        for (grant, at) in found {
            if self.held(grant)?.is_some_and(|held| held.is_live(at)) {
                return Ok(Some(Place::Leased { grant, at }));
            }
        }
        Ok(None)
    }

    /// Changes what is known of a live lease.
    pub(super) fn note(
        &mut self,
        grant: FencingToken,
        at: usize,
        change: impl FnOnce(&mut Note),
    ) -> Done<()> {
        let Some(held) = self.grants.get_mut(&grant) else {
            return Ok(());
        };
        held.dirty |= !held.noted;
        held.noted = true;
        let note = held.notes.get_or_insert_default().entry(at).or_default();
        change(note);
        let progress = note.progress.as_ref().map(|progress| {
            let mut out = Vec::new();
            record::put_progress(&mut out, progress);
            out
        });
        let note = note.clone();
        self.sql("note_save")?.execute(params![
            (grant.get() + at as u64) as i64,
            note.cancel,
            progress,
            note.checkpoint.as_ref().map(|(seq, _)| *seq as i64),
            note.checkpoint.as_ref().map(|(_, bytes)| &bytes[..])
        ])?;
        Ok(())
    }

    /// Takes a lease out of its grant, and what is noted of it with it.
    pub(super) fn take_lease(&mut self, grant: FencingToken, at: usize) -> Done<()> {
        let Some(held) = self.grants.get_mut(&grant).filter(|held| held.is_live(at)) else {
            return Ok(());
        };
        let noted = held.end(at);
        let queue = held.queue;
        let queue = self.at(queue);
        queue.ledger.live -= 1;
        queue.counts.leased -= 1;
        if noted {
            let token = (grant.get() + at as u64) as i64;
            self.sql("note_end")?.execute([token])?;
        }
        Ok(())
    }

    /// Ends a lease: counts it, and puts the job where it goes. A job that goes to the front is
    /// returned, to be put there with the others of the step.
    pub(super) fn end(
        &mut self,
        queue: usize,
        grant: FencingToken,
        facts: &LeaseFacts,
        mut job: JobRecord,
        step: Step,
        now: Timestamp,
    ) -> Done<Option<(FencingToken, JobRecord)>> {
        let Some(at) = offset(grant, facts.token) else {
            return Ok(None);
        };
        self.take_lease(grant, at)?;
        self.at(queue).ledger.count(step.end);
        let next = step.next;
        let gone = Next::Settled {
            state: JobState::Completed,
            keep_until: None,
        };
        if next != gone {
            step.apply(&mut job, facts, now);
        }
        match next {
            Next::Front => return Ok(Some((facts.token, job))),
            Next::Back => self.put_back(queue, &job)?,
            Next::Scheduled { keeps_key } => {
                if !keeps_key {
                    self.free_exclusive(queue, &job)?;
                }
                self.put_scheduled(queue, &job)?;
            }
            Next::Settled { state, keep_until } => {
                self.put_settled(queue, &job, state, keep_until, now)?;
            }
        }
        Ok(None)
    }

    /// Writes the grants that changed. Needed before anything looks for grants by their columns.
    pub(super) fn save_grants(&mut self) -> Done<()> {
        let mut over = Vec::new();
        for (&id, held) in &mut self.grants {
            if !held.dirty {
                continue;
            }
            held.dirty = false;
            if held.live == 0 {
                over.push(id);
            } else {
                save(self.db, id, held)?;
            }
        }
        for id in over {
            self.grants.remove(&id);
            let first = id.get() as i64;
            self.sql("grant_end")?.execute([first])?;
            self.sql("records_end")?.execute([first])?;
        }
        Ok(())
    }
}

fn save(db: &rusqlite::Connection, id: FencingToken, held: &mut Held) -> Done<()> {
    let number = id.get() as i64;
    if std::mem::take(&mut held.moved) {
        super::sql::statement(db, "grant_save")?.execute(params![
            number,
            time(held.deadline),
            held.renewals,
            held.live as i64,
            held.noted,
            held.ended
        ])?;
    } else {
        super::sql::statement(db, "grant_save_kept")?.execute(params![
            number,
            held.renewals,
            held.live as i64,
            held.noted,
            held.ended
        ])?;
    }
    compact(db, number, held)
}

/// Drops the records of ended leases once they are at least half of what is stored.
fn compact(db: &rusqlite::Connection, number: i64, held: &mut Held) -> Done<()> {
    if !held.wants_compaction() {
        return Ok(());
    }
    if held.records.is_none() {
        let records: Option<Vec<u8>> = super::sql::statement(db, "records")?
            .query_row([number], |row| row.get(0))
            .optional()?;
        held.records = records.map(Bytes::from);
    }
    held.compact()?;
    super::sql::statement(db, "records_compact")?.execute(params![
        number,
        held.heads,
        held.records.as_deref()
    ])?;
    Ok(())
}

impl From<Misfit> for Fault {
    fn from(Misfit(what): Misfit) -> Self {
        corrupt(what)
    }
}
