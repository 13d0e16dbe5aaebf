//! Grants as SQL stores keep them: a small row, and beside it the records of its jobs, end to end.
//!
//! *Heads* are 24 bytes for each record: job id, index in the grant, flags, end of the record. They
//! are enough to tell whose receipt is current, and for PostgreSQL to settle a job that leaves
//! nothing behind, without reading its record.

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

pub(crate) const HEAD: usize = 24;

/// One live grant.
pub(crate) struct StoredGrant {
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

pub(crate) fn index_in(head: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([head[16], head[17]]))
}

fn end_in(head: &[u8]) -> usize {
    u32::from_le_bytes([head[20], head[21], head[22], head[23]]) as usize
}

impl StoredGrant {
    pub(crate) fn is_live(&self, at: usize) -> bool {
        at < self.leases
            && self
                .ended
                .get(at / 8)
                .is_some_and(|byte| byte & (1 << (at % 8)) == 0)
    }

    /// The indices of its live leases.
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

impl StoredGrant {
    /// The record of a lease. Heads and records must have been read.
    pub(crate) fn record(&self, at: usize) -> std::result::Result<Bytes, Misfit> {
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
    pub(crate) fn compact(&mut self) -> std::result::Result<(), Misfit> {
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
pub(crate) fn offset(grant: FencingToken, token: FencingToken) -> Option<usize> {
    usize::try_from(token.get().checked_sub(grant.get())?).ok()
}

/// A job that was taken out of its line, and where its record ends among those taken with it.
struct Selected {
    job: Arc<JobRecord>,
    flags: u16,
    end: usize,
}

/// Jobs taken out of their lines, and their records end to end.
#[derive(Default)]
pub(crate) struct Selection {
    jobs: Vec<Selected>,
    records: Bytes,
}

/// A grant that is about to be stored.
pub(crate) struct NewGrant<'s> {
    pub(crate) grant: Grant,
    pub(crate) deadline: Timestamp,
    pub(crate) records: &'s [u8],
    /// The lowest and the highest of the jobs' ids.
    pub(crate) bounds: (JobId, JobId),
}

impl Selection {
    /// Reads records that lie end to end.
    pub(crate) fn unpack(records: Bytes, ends: &[usize], kinds: &mut Kinds) -> Result<Self> {
        let mut jobs = Vec::with_capacity(ends.len());
        let mut start = 0;
        for &end in ends {
            let record = records.slice(start..end);
            jobs.push(Selected {
                job: Arc::new(codec::decode(&record, kinds)?),
                flags: codec::flags_of(&record),
                end,
            });
            start = end;
        }
        Ok(Self { jobs, records })
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// How the jobs are cut into grants.
    pub(crate) fn spans(&self, wanted: &ClaimQueue) -> Vec<GrantSpan> {
        let jobs = self.jobs.iter().map(|selected| &*selected.job);
        grant_spans(jobs, (wanted.term, wanted.max_lifetime))
    }

    /// The grant of a span, under tokens from `id` on. Its heads are appended to `heads`.
    pub(crate) fn grant(
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

/// A time span as a column's value.
pub(crate) fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}
