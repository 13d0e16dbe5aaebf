//! Grants as they are read and written: see [`held`](crate::store::sql::grant).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio_postgres::{GenericClient, Row};

use super::fault::{Done, Fault, corrupt};
use super::place::Place;
use super::tally::Count;
use super::tx::{GrantKey, Tx, args, moment, time};
use crate::job::{JobId, JobRecord, QueueName, SavedCheckpoint};
use crate::lease::{FencingToken, Nonce, Receipt};
use crate::rules::ends::{End, LeaseFacts, Next};
use crate::store::codec;
use crate::store::sql::grant::{HEAD, Head, Note, StoredGrant, index_in, offset};

/// What a receipt turned out to be.
pub(super) struct Current {
    pub(super) grant: GrantKey,
    pub(super) at: usize,
    pub(super) late: bool,
    pub(super) cancel: bool,
    pub(super) flags: u16,
}

fn number(grant: FencingToken) -> i64 {
    i64::try_from(grant.get()).unwrap_or(i64::MAX)
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// The rows of grants, locked. To be kept with [`hold`](Self::hold).
    pub(super) async fn lock_grants(
        &self,
        wanted: &[(&QueueName, FencingToken)],
    ) -> Done<Vec<Row>> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<&str> = wanted.iter().map(|(queue, _)| queue.as_str()).collect();
        let ids: Vec<i64> = wanted.iter().map(|(_, grant)| number(*grant)).collect();
        self.rows(
            "grants_lock",
            args![self.base.namespace => TEXT, names => TEXT_ARRAY, ids => INT8_ARRAY],
        )
        .await
    }

    /// Keeps grants as they were read, and reads what is noted of their leases.
    pub(super) async fn hold(&mut self, rows: &[Row]) -> Done<Vec<GrantKey>> {
        let mut keys = Vec::with_capacity(rows.len());
        let (mut queues, mut ids, mut leases) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let (of, id): (i32, i64) = (row.try_get(0)?, row.try_get(1)?);
            let Some(queue) = self.queue_of_row(of).await? else {
                continue;
            };
            let key = (queue, FencingToken::new(id as u64));
            if let Entry::Vacant(place) = self.grants.entry(key) {
                let held = place.insert(read(row, queue)?);
                if held.noted {
                    queues.push(of);
                    ids.push(id);
                    leases.push(held.leases as i32);
                }
            }
            keys.push(key);
        }
        if !ids.is_empty() {
            let notes = self
                .rows(
                    "notes",
                    args![queues => INT4_ARRAY, ids => INT8_ARRAY, leases => INT4_ARRAY],
                )
                .await?;
            self.take_notes(&notes)?;
        }
        Ok(keys)
    }

    fn take_notes(&mut self, rows: &[Row]) -> Done<()> {
        for row in rows {
            let (id, token): (i64, i64) = (row.try_get(1)?, row.try_get(2)?);
            let progress: Option<Vec<u8>> = row.try_get(4)?;
            let progress = progress.map(|bytes| codec::progress(&bytes.into()));
            let seq: Option<i64> = row.try_get(5)?;
            let bytes: Option<Vec<u8>> = row.try_get(6)?;
            let note = Note {
                cancel: row.try_get(3)?,
                progress: progress.transpose().map_err(Fault::Broken)?,
                checkpoint: seq
                    .zip(bytes)
                    .map(|(seq, bytes)| (seq as u64, bytes.into())),
            };
            let queue = self.queue_of(row.try_get(0)?);
            let key = queue.map(|queue| (queue, FencingToken::new(id as u64)));
            if let Some(held) = key.and_then(|key| self.grants.get_mut(&key)) {
                let notes = held.notes.get_or_insert_with(BTreeMap::new);
                notes.insert((token - id) as usize, note);
            }
        }
        Ok(())
    }

    /// Reads the records of grants that are kept.
    pub(super) async fn open(&mut self, keys: &[GrantKey]) -> Done<()> {
        let closed = keys.iter().filter(|key| {
            let held = self.grants.get(key);
            held.is_some_and(|held| held.records.is_none())
        });
        let (queues, ids): (Vec<i32>, Vec<i64>) = closed
            .map(|(queue, grant)| (self.queues[*queue].id, number(*grant)))
            .unzip();
        if ids.is_empty() {
            return Ok(());
        }
        let rows = self
            .rows("records", args![queues => INT4_ARRAY, ids => INT8_ARRAY])
            .await?;
        for row in rows {
            let id: i64 = row.try_get(1)?;
            let heads: Vec<u8> = row.try_get(2)?;
            let records: Vec<u8> = row.try_get(3)?;
            let queue = self.queue_of(row.try_get(0)?);
            let key = queue.map(|queue| (queue, FencingToken::new(id as u64)));
            if let Some(held) = key.and_then(|key| self.grants.get_mut(&key)) {
                // Of one row: the heads that were read with the grant may be those before a compaction.
                held.heads = Some(heads);
                held.records = Some(records.into());
            }
        }
        Ok(())
    }

    /// A live grant that is kept.
    pub(super) fn held(&mut self, key: GrantKey) -> Option<&mut StoredGrant> {
        self.grants.get_mut(&key).filter(|held| held.live > 0)
    }

    /// The holder's lease, if the receipt is the current one. Its grant must have been sought.
    pub(super) fn current(&self, receipt: &Receipt) -> Done<Option<Current>> {
        let key = self.known(&receipt.queue).map(|at| (at, receipt.grant));
        let Some((grant, held)) = key.and_then(|key| Some((key, self.grants.get(&key)?))) else {
            return Ok(None);
        };
        let Some(at) = offset(receipt.grant, receipt.token).filter(|at| held.is_live(*at)) else {
            return Ok(None);
        };
        let Head { id, flags, .. } = held
            .head(at)
            .ok_or_else(|| corrupt("a lease has no record"))?;
        let current = receipt.partition == 0
            && held.nonce.matches(&receipt.nonce)
            && id == *receipt.job.as_bytes();
        Ok(current.then(|| Current {
            grant,
            at,
            late: held.deadline <= self.now,
            cancel: held.cancel(at),
            flags,
        }))
    }

    /// A leased job as it stands, with what its lease has saved, and the facts of the lease. The
    /// grant's records must have been read.
    pub(super) fn leased(
        &mut self,
        key: GrantKey,
        at: usize,
    ) -> Done<Option<(LeaseFacts, JobRecord)>> {
        let Some(held) = self.grants.get(&key).filter(|held| held.is_live(at)) else {
            return Ok(None);
        };
        let token = key.1.plus(at as u64);
        let record = held.record(at)?;
        let mut job = codec::decode(&record, &mut self.kinds).map_err(Fault::Broken)?;
        if let Some((seq, bytes)) = held.note(at).and_then(|note| note.checkpoint.clone()) {
            job.checkpoint = Some(Box::new(SavedCheckpoint { token, seq, bytes }));
        }
        Ok(Some((held.facts(token, at), job)))
    }

    /// Finds a leased job by its id, among the grants whose bounds admit it.
    pub(super) async fn find_leased(&mut self, id: JobId, rows: &[Row]) -> Done<Option<Place>> {
        for row in rows {
            let heads: &[u8] = row.try_get(2)?;
            let mut ids = heads.chunks_exact(HEAD);
            let Some(head) = ids.find(|head| head.starts_with(id.as_bytes())) else {
                continue;
            };
            let at = index_in(head);
            let grant: i64 = row.try_get(1)?;
            let Some(queue) = self.queue_of_row(row.try_get(0)?).await? else {
                continue;
            };
            let grant = FencingToken::new(grant as u64);
            self.fetch(&[(queue, grant)]).await?;
            let key = (queue, grant);
            if self.held(key).is_some_and(|held| held.is_live(at)) {
                return Ok(Some(Place::Leased { grant: key, at }));
            }
        }
        Ok(None)
    }

    /// Reads grants that are not kept yet, with their records.
    pub(super) async fn fetch(&mut self, keys: &[GrantKey]) -> Done<()> {
        let missing: Vec<GrantKey> = keys
            .iter()
            .filter(|key| !self.grants.contains_key(key))
            .copied()
            .collect();
        if !missing.is_empty() {
            let (queues, ids): (Vec<i32>, Vec<i64>) = missing
                .iter()
                .map(|(queue, grant)| (self.queues[*queue].id, number(*grant)))
                .unzip();
            let name = if self.reads {
                "grants_read"
            } else {
                "grants_relock"
            };
            let rows = self
                .rows(name, args![queues => INT4_ARRAY, ids => INT8_ARRAY])
                .await?;
            self.hold(&rows).await?;
        }
        self.open(keys).await
    }

    /// Changes what is known of a live lease.
    pub(super) fn note(&mut self, key: GrantKey, at: usize, change: impl FnOnce(&mut Note)) {
        if let Some(held) = self.grants.get_mut(&key) {
            held.dirty |= !held.noted;
            held.noted = true;
            change(held.notes.get_or_insert_default().entry(at).or_default());
            self.noted.insert((key, at));
        }
    }

    /// Takes a lease out of its grant, and what is noted of it with it.
    pub(super) fn take_lease(&mut self, key: GrantKey, at: usize) {
        let Some(held) = self.grants.get_mut(&key).filter(|held| held.is_live(at)) else {
            return;
        };
        if held.end(at) {
            let of = self.queues[key.0].id;
            self.notes_over.push((of, number(key.1.plus(at as u64))));
        }
        self.count(key.0, Count::Live, -1);
        self.count(key.0, Count::Leased, -1);
    }

    /// Ends a lease: counts it, and puts the job where it goes. A job that goes to the front is
    /// returned, to be put there with the others of the step.
    pub(super) fn end_lease(
        &mut self,
        key: GrantKey,
        facts: &LeaseFacts,
        mut job: JobRecord,
        end: End,
    ) -> Option<(FencingToken, JobRecord)> {
        let queue = key.0;
        self.take_lease(key, offset(key.1, facts.token)?);
        self.count(queue, Count::end(end.counts_as), 1);
        self.count(
            queue,
            Count::DeadByExpiry,
            i64::from(end.is_death_by_expiry()),
        );
        let next = end.next;
        if !next.is_gone() {
            end.apply(&mut job, facts, self.now);
        }
        match next {
            Next::Front => return Some((facts.token, job)),
            Next::Back => self.put_back(queue, &job),
            Next::Scheduled { keeps_key } => {
                if !keeps_key {
                    self.free_exclusive(queue, &job);
                }
                self.put_scheduled(queue, &job);
            }
            Next::Settled { state, keep_until } => {
                self.put_settled(queue, &job, state, keep_until);
            }
        }
        None
    }

    /// The grants that are over, or with `live` those that changed and live on.
    fn changed(&self, live: bool) -> impl Iterator<Item = (i32, i64, &StoredGrant)> {
        let changed = self.grants.iter();
        changed
            .filter(move |(_, held)| held.dirty && (held.live > 0) == live)
            .map(|((queue, grant), held)| (self.queues[*queue].id, number(*grant), held))
    }

    pub(super) async fn end_grants(&self) -> Done<()> {
        let (queues, ids): (Vec<i32>, Vec<i64>) = self
            .changed(false)
            .map(|(queue, id, _)| (queue, id))
            .unzip();
        if ids.is_empty() {
            return Ok(());
        }
        self.run("grants_end", args![queues => INT4_ARRAY, ids => INT8_ARRAY])
            .await
    }

    pub(super) async fn save_grants(&self) -> Done<()> {
        let (mut queues, mut ids, mut deadlines) = (Vec::new(), Vec::new(), Vec::new());
        let (mut renewals, mut lives, mut noted) = (Vec::new(), Vec::new(), Vec::new());
        let mut ended = Vec::new();
        for (queue, id, held) in self.changed(true) {
            queues.push(queue);
            ids.push(id);
            deadlines.push(time(held.deadline));
            renewals.push(held.renewals as i32);
            lives.push(held.live as i32);
            noted.push(held.noted);
            ended.push(&held.ended[..]);
        }
        if ids.is_empty() {
            return Ok(());
        }
        let args = args![queues => INT4_ARRAY, ids => INT8_ARRAY, deadlines => INT8_ARRAY,
                         renewals => INT4_ARRAY, lives => INT4_ARRAY, noted => BOOL_ARRAY,
                         ended => BYTEA_ARRAY];
        self.run("grants_save", args).await
    }

    /// Drops the records of ended leases, in grants where they are half of what is stored.
    pub(super) async fn compact(&mut self) -> Done<()> {
        let keys: Vec<GrantKey> = self
            .grants
            .iter()
            .filter(|(_, held)| held.dirty && held.live > 0 && held.wants_compaction())
            .map(|(key, _)| *key)
            .collect();
        self.open(&keys).await?;
        for key in keys {
            if let Some(held) = self.grants.get_mut(&key) {
                held.compact()?;
                self.compacted.insert(key);
            }
        }
        Ok(())
    }

    pub(super) async fn save_compacted(&self) -> Done<()> {
        let (mut queues, mut ids) = (Vec::new(), Vec::new());
        let (mut heads, mut records) = (Vec::new(), Vec::new());
        for key in &self.compacted {
            let Some(held) = self.grants.get(key) else {
                continue;
            };
            queues.push(self.queues[key.0].id);
            ids.push(number(key.1));
            heads.push(held.heads.as_deref());
            records.push(held.records.as_deref());
        }
        if ids.is_empty() {
            return Ok(());
        }
        let args = args![queues => INT4_ARRAY, ids => INT8_ARRAY, heads => BYTEA_ARRAY,
                         records => BYTEA_ARRAY];
        self.run("records_compact", args).await
    }

    pub(super) async fn end_notes(&self) -> Done<()> {
        if self.notes_over.is_empty() {
            return Ok(());
        }
        let (queues, tokens): (Vec<i32>, Vec<i64>) = self.notes_over.iter().copied().unzip();
        let args = args![queues => INT4_ARRAY, tokens => INT8_ARRAY];
        self.run("notes_end", args).await
    }

    pub(super) async fn save_notes(&self) -> Done<()> {
        let (mut queues, mut tokens, mut cancels) = (Vec::new(), Vec::new(), Vec::new());
        let (mut progress, mut seqs, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for ((key, at), held) in self
            .noted
            .iter()
            .filter_map(|noted| Some((*noted, self.grants.get(&noted.0)?)))
        {
            let Some(note) = held.note(at) else {
                continue;
            };
            queues.push(self.queues[key.0].id);
            tokens.push(number(key.1.plus(at as u64)));
            cancels.push(note.cancel);
            progress.push(note.progress.as_ref().map(|progress| {
                let mut out = Vec::new();
                codec::put_progress(&mut out, progress);
                out
            }));
            seqs.push(note.checkpoint.as_ref().map(|(seq, _)| *seq as i64));
            bytes.push(note.checkpoint.as_ref().map(|(_, bytes)| &bytes[..]));
        }
        if tokens.is_empty() {
            return Ok(());
        }
        let args = args![queues => INT4_ARRAY, tokens => INT8_ARRAY, cancels => BOOL_ARRAY,
                         progress => BYTEA_ARRAY, seqs => INT8_ARRAY, bytes => BYTEA_ARRAY];
        self.run("notes_save", args).await
    }
}

/// Reads the columns of `grants_lock`, and the records if they come along.
fn read(row: &Row, queue: usize) -> Done<StoredGrant> {
    let nonce: Vec<u8> = row.try_get(3)?;
    let nonce: [u8; 16] = nonce
        .try_into()
        .map_err(|_| corrupt("a grant's nonce is cut"))?;
    let heads: Vec<u8> = row.try_get(14)?;
    if !heads.len().is_multiple_of(HEAD) {
        return Err(corrupt("the heads of a grant are cut"));
    }
    let records: Option<Vec<u8>> = match row.columns().get(15) {
        Some(_) => Some(row.try_get(15)?),
        None => None,
    };
    let held = StoredGrant {
        queue,
        nonce: Nonce::from_bytes(nonce),
        owner: Arc::from(row.try_get::<_, &str>(4)?),
        task: Arc::from(row.try_get::<_, &str>(5)?),
        granted_at: moment(row.try_get(6)?),
        deadline: moment(row.try_get(2)?),
        term: Duration::from_nanos(row.try_get::<_, i64>(7)? as u64),
        max_lifetime: Duration::from_nanos(row.try_get::<_, i64>(8)? as u64),
        renewals: row.try_get::<_, i32>(9)? as u32,
        leases: row.try_get::<_, i32>(10)? as usize,
        live: row.try_get::<_, i32>(11)? as usize,
        noted: row.try_get(12)?,
        ended: row.try_get(13)?,
        heads: Some(heads),
        records: records.map(Bytes::from),
        notes: None,
        dirty: false,
        moved: false,
    };
    if held.living().count() != held.live {
        return Err(corrupt("a grant's count does not fit its leases"));
    }
    Ok(held)
}
