//! Grants as they are stored: a small row, and separately the records of its jobs, end to end.
//!
//! *Heads* are 24 bytes for each record: job id, index in the grant, flags, end of the record. They
//! are enough to tell whether a receipt is the current one without reading the record.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::error::Result;
use crate::job::{JobId, JobRecord, QueueName};
use crate::lease::{FencingToken, Grant, Lease, Nonce, Progress};
use crate::rules::ends::LeaseFacts;
use crate::rules::order::{GrantSpan, deadline, grant_spans};
use crate::store::codec::{self, Kinds};
use crate::store::{ClaimQueue, ClaimRequest};

pub(super) const HEAD: usize = 24;

/// One live grant.
pub(super) struct StoredGrant {
    pub(super) queue: usize,
    pub(super) nonce: Nonce,
    pub(super) owner: Arc<str>,
    pub(super) task: Arc<str>,
    pub(super) granted_at: Timestamp,
    pub(super) deadline: Timestamp,
    pub(super) term: Duration,
    pub(super) max_lifetime: Duration,
    pub(super) renewals: u32,
    /// How many leases it began with.
    pub(super) leases: usize,
    pub(super) live: usize,
    pub(super) ended: Vec<u8>,
    pub(super) noted: bool,
    pub(super) heads: Option<Vec<u8>>,
    pub(super) records: Option<Bytes>,
    pub(super) notes: Option<BTreeMap<usize, Note>>,
    pub(super) dirty: bool,
    pub(super) moved: bool,
}

/// What is known of a single lease beyond its grant.
#[derive(Clone, Default)]
pub(super) struct Note {
    pub(super) cancel: bool,
    pub(super) progress: Option<Progress>,
    pub(super) checkpoint: Option<(u64, Bytes)>,
}

/// One head.
pub(super) struct Head {
    pub(super) id: [u8; 16],
    pub(super) flags: u16,
    pub(super) record: Range<usize>,
}

/// Appends a head.
pub(super) fn put_head(heads: &mut Vec<u8>, id: &[u8; 16], at: usize, flags: u16, end: usize) {
    heads.extend_from_slice(id);
    heads.extend_from_slice(&(at as u16).to_le_bytes());
    heads.extend_from_slice(&flags.to_le_bytes());
    heads.extend_from_slice(&(end as u32).to_le_bytes());
}

pub(super) fn index_in(head: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([head[16], head[17]]))
}

fn end_in(head: &[u8]) -> usize {
    u32::from_le_bytes([head[20], head[21], head[22], head[23]]) as usize
}

impl StoredGrant {
    pub(super) fn is_live(&self, at: usize) -> bool {
        at < self.leases
            && self
                .ended
                .get(at / 8)
                .is_some_and(|byte| byte & (1 << (at % 8)) == 0)
    }

    /// The indices of its live leases.
    pub(super) fn living(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.leases).filter(|at| self.is_live(*at))
    }

    /// Ends a live lease, and tells whether something was noted of it.
    pub(super) fn end(&mut self, at: usize) -> bool {
        self.ended[at / 8] |= 1 << (at % 8);
        self.live -= 1;
        self.dirty = true;
        let notes = self.notes.as_mut();
        notes.is_some_and(|notes| notes.remove(&at).is_some())
    }

    pub(super) fn renew(&mut self, deadline: Timestamp) {
        self.deadline = deadline;
        self.renewals += 1;
        self.dirty = true;
        self.moved = true;
    }

    pub(super) fn head(&self, at: usize) -> Option<Head> {
        let heads = self.heads.as_deref()?;
        let nth = |n: usize| heads.get(n * HEAD..(n + 1) * HEAD);
        let stored = heads.len() / HEAD;
        let n = if stored == self.leases {
            at
        } else {
            let (mut low, mut high) = (0, stored);
            while low < high {
                let middle = usize::midpoint(low, high);
                if index_in(nth(middle)?) < at {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            low
        };
        let head = nth(n).filter(|head| index_in(head) == at)?;
        let start = if n == 0 { 0 } else { end_in(nth(n - 1)?) };
        Some(Head {
            id: *head.first_chunk()?,
            flags: u16::from_le_bytes([head[18], head[19]]),
            record: start..end_in(head),
        })
    }

    pub(super) fn note(&self, at: usize) -> Option<&Note> {
        self.notes.as_ref()?.get(&at)
    }

    pub(super) fn cancel(&self, at: usize) -> bool {
        self.note(at).is_some_and(|note| note.cancel)
    }

    pub(super) fn facts(&self, token: FencingToken, at: usize) -> LeaseFacts {
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
pub(super) struct Misfit(pub(crate) &'static str);

impl StoredGrant {
    /// The record of a lease. Heads and records must have been read.
    pub(super) fn record(&self, at: usize) -> std::result::Result<Bytes, Misfit> {
        let record = self.head(at).and_then(|head| {
            let records = self.records.as_ref()?;
            (head.record.start <= head.record.end && head.record.end <= records.len())
                .then(|| records.slice(head.record))
        });
        record.ok_or(Misfit("a lease has no record"))
    }

    /// Whether the records of ended leases are at least half of what is stored.
    pub(super) fn wants_compaction(&self) -> bool {
        let stored = self.heads.as_ref().map_or(0, |heads| heads.len() / HEAD);
        stored >= 2 && self.live * 2 <= stored
    }

    /// Drops the records of ended leases. Heads and records must have been read.
    pub(super) fn compact(&mut self) -> std::result::Result<(), Misfit> {
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

/// The index of a token in its grant.
pub(super) fn offset(grant: FencingToken, token: FencingToken) -> Option<usize> {
    usize::try_from(token.get().checked_sub(grant.get())?).ok()
}

/// A job that was taken out of its line, and where its record ends among those taken with it.
struct SelectedJob {
    job: Arc<JobRecord>,
    flags: u16,
    end: usize,
}

/// Jobs taken out of their lines, and their records end to end.
#[derive(Default)]
pub(super) struct Selection {
    jobs: Vec<SelectedJob>,
    records: Bytes,
}

/// A grant that is about to be stored.
pub(super) struct NewGrant<'s> {
    pub(super) grant: Grant,
    pub(super) deadline: Timestamp,
    pub(super) records: &'s [u8],
    /// The lowest and the highest of the jobs' ids.
    pub(super) bounds: (JobId, JobId),
}

impl Selection {
    /// Reads records that lie end to end.
    pub(super) fn unpack(records: Bytes, ends: &[usize], kinds: &mut Kinds) -> Result<Self> {
        let mut jobs = Vec::with_capacity(ends.len());
        let mut start = 0;
        for &end in ends {
            let record = records.slice(start..end);
            jobs.push(SelectedJob {
                job: Arc::new(codec::decode(&record, kinds)?),
                flags: codec::flags_of(&record),
                end,
            });
            start = end;
        }
        Ok(Self { jobs, records })
    }

    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// How the jobs are cut into grants.
    pub(super) fn spans(&self, wanted: &ClaimQueue) -> Vec<GrantSpan> {
        let jobs = self.jobs.iter().map(|selected| &*selected.job);
        grant_spans(jobs, (wanted.term, wanted.max_lifetime))
    }

    /// The grant of a span, under tokens from `id` on. Its heads are appended to `heads`.
    pub(super) fn grant(
        &self,
        span: &GrantSpan,
        queue: QueueName,
        id: FencingToken,
        request: &ClaimRequest,
        now: Timestamp,
        heads: &mut Vec<u8>,
    ) -> NewGrant<'_> {
        let before = span.jobs.start.checked_sub(1);
        let from = before.map_or(0, |at| self.jobs[at].end);
        let jobs = &self.jobs[span.jobs.clone()];
        let first = jobs[0].job.id;
        let (mut lowest, mut highest, mut end) = (first, first, from);
        let mut leases = Vec::with_capacity(jobs.len());
        for (selected, at) in jobs.iter().zip(0_usize..) {
            let job = &selected.job;
            lowest = lowest.min(job.id);
            highest = highest.max(job.id);
            end = selected.end;
            put_head(heads, job.id.as_bytes(), at, selected.flags, end - from);
            leases.push(Lease {
                token: id.plus(at as u64),
                job: Arc::clone(job),
            });
        }
        let deadline = deadline(now, span.term, now, span.max_lifetime);
        NewGrant {
            grant: Grant {
                queue,
                partition: 0,
                id,
                nonce: request.nonce,
                granted_at: now,
                term: span.term,
                granted: deadline.since(now),
                leases,
            },
            deadline,
            records: &self.records[from..end],
            bounds: (lowest, highest),
        }
    }
}
