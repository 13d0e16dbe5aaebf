//! Grants of a transaction: read when first asked for, written once before the commit. Their form
//! is that of [`StoredGrant`].

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault, corrupt};
use super::place::Location;
use super::stored_grant::{HEAD, Misfit, Note, StoredGrant, index_in};
use super::tx::{Tx, moment, time};
use crate::job::{JobId, JobRecord, SavedCheckpoint};
use crate::lease::{FencingToken, Nonce};
use crate::rules::ends::LeaseFacts;
use crate::store::codec;

statements! {
    GRANT = "
        SELECT queue, deadline, nonce, owner, task, granted_at, term, max_lifetime, renewals,
            leases, live, noted, ended
        FROM leasehold_grants WHERE id = ?1";
    GRANT_SAVE = "
        UPDATE leasehold_grants
        SET deadline = ?2, renewals = ?3, live = ?4, noted = ?5, ended = ?6 WHERE id = ?1";
    GRANT_SAVE_KEPT = "
        UPDATE leasehold_grants SET renewals = ?2, live = ?3, noted = ?4, ended = ?5
        WHERE id = ?1";
    NOTES = "
        SELECT token, cancel, progress, seq, checkpoint FROM leasehold_notes
        WHERE token >= ?1 AND token < ?2";
    NOTE_SAVE = "
        INSERT OR REPLACE INTO leasehold_notes (token, cancel, progress, seq, checkpoint)
        VALUES (?1, ?2, ?3, ?4, ?5)";
    HEADS = "SELECT heads FROM leasehold_records WHERE id = ?1";
    RECORDS = "SELECT records FROM leasehold_records WHERE id = ?1";
    GRANT_END = "DELETE FROM leasehold_grants WHERE id = ?1";
    RECORDS_END = "DELETE FROM leasehold_records WHERE id = ?1";
    RECORDS_COMPACT = "UPDATE leasehold_records SET heads = ?2, records = ?3 WHERE id = ?1";
    GRANTS_BY_JOB = "
        SELECT g.id, r.heads FROM leasehold_grants g JOIN leasehold_records r ON r.id = g.id
        WHERE g.first_job <= ?1 AND g.last_job >= ?1 ORDER BY g.id";
}

impl Tx<'_> {
    /// A live grant, read if it has not been.
    pub(super) fn held(&mut self, id: FencingToken) -> Done<Option<&mut StoredGrant>> {
        if !self.grants.contains_key(&id) {
            let Some(held) = self.load(id)? else {
                return Ok(None);
            };
            self.grants.insert(id, held);
        }
        Ok(self.grants.get_mut(&id).filter(|held| held.live > 0))
    }

    fn load(&mut self, id: FencingToken) -> Done<Option<StoredGrant>> {
        let Ok(number) = i64::try_from(id.get()) else {
            return Ok(None);
        };
        let mut select = self.sql(GRANT)?;
        let mut rows = select.query([number])?;
        let Some(row) = rows.next()? else {
            return Ok(None);
        };
        let Some(queue) = self.queue_of(row.get(0)?)? else {
            return Ok(None);
        };
        let noted: bool = row.get(11)?;
        let mut held = StoredGrant {
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
        let mut select = self.sql(NOTES)?;
        let mut rows = select.query([first, first + leases as i64])?;
        let mut notes = BTreeMap::new();
        while let Some(row) = rows.next()? {
            let progress: Option<Vec<u8>> = row.get(2)?;
            let progress = progress.map(|bytes| codec::progress(&bytes.into()));
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
            let heads: Vec<u8> = self.sql(HEADS)?.query_row([number], |row| row.get(0))?;
            if !heads.len().is_multiple_of(HEAD) {
                return Err(corrupt("the heads of a grant are cut"));
            }
            self.grants
                .entry(id)
                .and_modify(|held| held.heads = Some(heads));
        }
        if need_records {
            let records: Vec<u8> = self.sql(RECORDS)?.query_row([number], |row| row.get(0))?;
            self.grants
                .entry(id)
                .and_modify(|held| held.records = Some(records.into()));
        }
        Ok(())
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
        let mut job = codec::decode(&record, self.kinds).map_err(Fault::Broken)?;
        if let Some((seq, bytes)) = held.note(at).and_then(|note| note.checkpoint.clone()) {
            job.checkpoint = Some(Box::new(SavedCheckpoint { token, seq, bytes }));
        }
        Ok(Some((held.facts(token, at), job)))
    }

    /// Finds a leased job by its id, among the grants whose bounds admit it.
    pub(super) fn find_leased(&mut self, id: JobId) -> Done<Option<Location>> {
        self.save_grants()?;
        let mut found = Vec::new();
        {
            let mut select = self.sql(GRANTS_BY_JOB)?;
            let mut rows = select.query([id.as_bytes()])?;
            while let Some(row) = rows.next()? {
                let heads = row.get_ref(1)?.as_blob().unwrap_or_default();
                let mut ids = heads.chunks_exact(HEAD);
                if let Some(head) = ids.find(|head| head.starts_with(id.as_bytes())) {
                    let grant = FencingToken::new(row.get::<_, i64>(0)? as u64);
                    found.push((grant, index_in(head)));
                }
            }
        }
        for (grant, at) in found {
            if self.held(grant)?.is_some_and(|held| held.is_live(at)) {
                return Ok(Some(Location::Leased { grant, at }));
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
            codec::put_progress(&mut out, progress);
            out
        });
        let note = note.clone();
        self.sql(NOTE_SAVE)?.execute(params![
            (grant.get() + at as u64) as i64,
            note.cancel,
            progress,
            note.checkpoint.as_ref().map(|(seq, _)| *seq as i64),
            note.checkpoint.as_ref().map(|(_, bytes)| &bytes[..])
        ])?;
        Ok(())
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
            self.sql(GRANT_END)?.execute([first])?;
            self.sql(RECORDS_END)?.execute([first])?;
        }
        Ok(())
    }
}

fn save(db: &rusqlite::Connection, id: FencingToken, held: &mut StoredGrant) -> Done<()> {
    let number = id.get() as i64;
    if std::mem::take(&mut held.moved) {
        db.prepare_cached(GRANT_SAVE)?.execute(params![
            number,
            time(held.deadline),
            held.renewals,
            held.live as i64,
            held.noted,
            held.ended
        ])?;
    } else {
        db.prepare_cached(GRANT_SAVE_KEPT)?.execute(params![
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
fn compact(db: &rusqlite::Connection, number: i64, held: &mut StoredGrant) -> Done<()> {
    if !held.wants_compaction() {
        return Ok(());
    }
    if held.records.is_none() {
        let records: Option<Vec<u8>> = db
            .prepare_cached(RECORDS)?
            .query_row([number], |row| row.get(0))
            .optional()?;
        held.records = records.map(Bytes::from);
    }
    held.compact()?;
    db.prepare_cached(RECORDS_COMPACT)?.execute(params![
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
