//! Grants in the hands of a SQL store: a small row, and beside it the records of its jobs.
//!
//! *Heads* are 24 bytes for each record: job id, place in the grant, flags, end of the record. They
//! are enough to settle a plain job, so that its record is not even read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::lease::{FencingToken, Nonce, Progress};
use crate::rules::ends::LeaseFacts;

pub(crate) const HEAD: usize = 24;

/// One live grant.
pub(crate) struct Held {
    #[cfg_attr(
        not(feature = "sqlite"),
        expect(dead_code, reason = "the other store has it in the grant's key")
    )]
    pub(crate) queue: usize,
    pub(crate) nonce: Nonce,
    pub(crate) owner: Arc<str>,
    pub(crate) task: Arc<str>,
    pub(crate) granted_at: Timestamp,
    pub(crate) deadline: Timestamp,
    pub(crate) term: Duration,
    pub(crate) max_lifetime: Duration,
    pub(crate) renewals: u32,
    /// How many leases it began with.
    pub(crate) leases: usize,
    pub(crate) live: usize,
    pub(crate) ended: Vec<u8>,
    pub(crate) noted: bool,
    pub(crate) heads: Option<Vec<u8>>,
    pub(crate) records: Option<Bytes>,
    pub(crate) notes: Option<BTreeMap<usize, Note>>,
    pub(crate) dirty: bool,
    pub(crate) moved: bool,
}

/// What is known of a single lease beyond its grant.
#[derive(Clone, Default)]
pub(crate) struct Note {
    pub(crate) cancel: bool,
    pub(crate) progress: Option<Progress>,
    pub(crate) checkpoint: Option<(u64, Bytes)>,
}

/// One head.
pub(crate) struct Head {
    pub(crate) id: [u8; 16],
    pub(crate) flags: u16,
    pub(crate) record: Range<usize>,
}

/// Appends a head.
pub(crate) fn put_head(heads: &mut Vec<u8>, id: &[u8; 16], at: usize, flags: u16, end: usize) {
    heads.extend_from_slice(id);
    heads.extend_from_slice(&(at as u16).to_le_bytes());
    heads.extend_from_slice(&flags.to_le_bytes());
    heads.extend_from_slice(&(end as u32).to_le_bytes());
}

pub(crate) fn place_in(head: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([head[16], head[17]]))
}

fn end_in(head: &[u8]) -> usize {
    u32::from_le_bytes([head[20], head[21], head[22], head[23]]) as usize
}

impl Held {
    pub(crate) fn is_live(&self, at: usize) -> bool {
        at < self.leases
            && self
                .ended
                .get(at / 8)
                .is_some_and(|byte| byte & (1 << (at % 8)) == 0)
    }

    /// The places of its live leases.
    pub(crate) fn living(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.leases).filter(|at| self.is_live(*at))
    }

    /// Ends a live lease, and tells whether something was noted of it.
    pub(crate) fn end(&mut self, at: usize) -> bool {
        self.ended[at / 8] |= 1 << (at % 8);
        self.live -= 1;
        self.dirty = true;
        let notes = self.notes.as_mut();
        notes.is_some_and(|notes| notes.remove(&at).is_some())
    }

    pub(crate) fn renew(&mut self, deadline: Timestamp) {
        self.deadline = deadline;
        self.renewals += 1;
        self.dirty = true;
        self.moved = true;
    }

    pub(crate) fn head(&self, at: usize) -> Option<Head> {
        let heads = self.heads.as_deref()?;
        let nth = |n: usize| heads.get(n * HEAD..(n + 1) * HEAD);
        let stored = heads.len() / HEAD;
        let n = if stored == self.leases {
            at
        } else {
            let (mut low, mut high) = (0, stored);
            while low < high {
                let middle = usize::midpoint(low, high);
                if place_in(nth(middle)?) < at {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            low
        };
        let head = nth(n).filter(|head| place_in(head) == at)?;
        let start = if n == 0 { 0 } else { end_in(nth(n - 1)?) };
        Some(Head {
            id: *head.first_chunk()?,
            flags: u16::from_le_bytes([head[18], head[19]]),
            record: start..end_in(head),
        })
    }

    pub(crate) fn note(&self, at: usize) -> Option<&Note> {
        self.notes.as_ref()?.get(&at)
    }

    pub(crate) fn cancel(&self, at: usize) -> bool {
        self.note(at).is_some_and(|note| note.cancel)
    }

    pub(crate) fn facts(&self, token: FencingToken, at: usize) -> LeaseFacts {
        let note = self.note(at);
        LeaseFacts {
            token,
            owner: Arc::clone(&self.owner),
            task: Arc::clone(&self.task),
            granted_at: self.granted_at,
            renewals: self.renewals,
            progress: note.and_then(|note| note.progress.clone()),
            cancel: note.is_some_and(|note| note.cancel),
        }
    }
}

/// Something that is stored does not fit together.
#[derive(Debug)]
pub(crate) struct Misfit(pub(crate) &'static str);

impl Held {
    /// The record of a lease. Heads and records must have been read.
    pub(crate) fn record(&self, at: usize) -> Result<Bytes, Misfit> {
        let record = self.head(at).and_then(|head| {
            let records = self.records.as_ref()?;
            (head.record.start <= head.record.end && head.record.end <= records.len())
                .then(|| records.slice(head.record))
        });
        record.ok_or(Misfit("a lease has no record"))
    }

    /// Whether the records of ended leases are at least half of what is stored.
    pub(crate) fn wants_compaction(&self) -> bool {
        let stored = self.heads.as_ref().map_or(0, |heads| heads.len() / HEAD);
        stored >= 2 && self.live * 2 <= stored
    }

    /// Drops the records of ended leases. Heads and records must have been read.
    pub(crate) fn compact(&mut self) -> Result<(), Misfit> {
        let (mut heads, mut kept) = (Vec::new(), Vec::new());
        for at in self.living() {
            let Head { id, flags, .. } = self.head(at).ok_or(Misfit("a lease has no record"))?;
            kept.extend_from_slice(&self.record(at)?);
            put_head(&mut heads, &id, at, flags, kept.len());
        }
        self.heads = Some(heads);
        self.records = Some(kept.into());
        Ok(())
    }
}

/// The place of a token in its grant.
pub(crate) fn offset(grant: FencingToken, token: FencingToken) -> Option<usize> {
    usize::try_from(token.get().checked_sub(grant.get())?).ok()
}
