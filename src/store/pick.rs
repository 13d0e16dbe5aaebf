//! Jobs that a claim of a SQL store has taken out of their lines, on their way into grants.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::held::put_head;
use super::record::{self, Kinds};
use super::{ClaimQueue, ClaimRequest};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::job::{JobId, JobRecord, QueueName};
use crate::lease::{FencingToken, Grant, Lease};
use crate::limits;
use crate::rules::order::deadline;

/// A job that was taken out of its line, and where its record ends among those taken with it.
struct Picked {
    job: Arc<JobRecord>,
    flags: u16,
    end: usize,
}

/// Jobs taken out of their lines, and their records end to end.
#[derive(Default)]
pub(crate) struct Pick {
    jobs: Vec<Picked>,
    records: Bytes,
}

/// Jobs that go into one grant.
pub(crate) struct Run {
    jobs: Range<usize>,
    pub(crate) term: Duration,
    pub(crate) max_lifetime: Duration,
}

/// A grant as it is stored.
pub(crate) struct Draft<'p> {
    pub(crate) grant: Grant,
    pub(crate) deadline: Timestamp,
    pub(crate) records: &'p [u8],
    /// The lowest and the highest of the jobs' ids.
    pub(crate) bounds: (JobId, JobId),
}

impl Pick {
    /// Reads records that lie end to end.
    pub(crate) fn unpack(records: Bytes, ends: &[usize], kinds: &mut Kinds) -> Result<Self> {
        let mut jobs = Vec::with_capacity(ends.len());
        let mut start = 0;
        for &end in ends {
            let record = records.slice(start..end);
            jobs.push(Picked {
                job: Arc::new(record::decode(&record, kinds)?),
                flags: record::flags_of(&record),
                end,
            });
            start = end;
        }
        Ok(Self { jobs, records })
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// One grant for each run of jobs with the same terms, as many as it may weigh.
    pub(crate) fn runs(&self, wanted: &ClaimQueue) -> Vec<Run> {
        let terms_of = |job: &JobRecord| {
            (
                job.options.term.unwrap_or(wanted.term),
                job.options.max_lifetime.unwrap_or(wanted.max_lifetime),
            )
        };
        let mut runs = Vec::new();
        let mut start = 0;
        while let Some(first) = self.jobs.get(start) {
            let terms = terms_of(&first.job);
            let mut bytes = 0;
            let run = self.jobs[start..].iter().take_while(|picked| {
                let fits = bytes == 0 || bytes + picked.job.weight() <= limits::GRANT_BYTES;
                bytes += picked.job.weight();
                fits && terms_of(&picked.job) == terms
            });
            let jobs = start..start + run.count();
            start = jobs.end;
            let (term, max_lifetime) = terms;
            runs.push(Run {
                jobs,
                term,
                max_lifetime,
            });
        }
        runs
    }

    /// The grant of a run, under tokens from `id` on. Its heads are appended to `heads`.
    pub(crate) fn draft(
        &self,
        run: &Run,
        queue: QueueName,
        id: FencingToken,
        request: &ClaimRequest,
        now: Timestamp,
        heads: &mut Vec<u8>,
    ) -> Draft<'_> {
        let before = run.jobs.start.checked_sub(1);
        let from = before.map_or(0, |at| self.jobs[at].end);
        let jobs = &self.jobs[run.jobs.clone()];
        let first = jobs[0].job.id;
        let (mut lowest, mut highest, mut end) = (first, first, from);
        let mut leases = Vec::with_capacity(jobs.len());
        for (picked, at) in jobs.iter().zip(0_usize..) {
            let job = &picked.job;
            lowest = lowest.min(job.id);
            highest = highest.max(job.id);
            end = picked.end;
            put_head(heads, job.id.as_bytes(), at, picked.flags, end - from);
            leases.push(Lease {
                token: id.plus(at as u64),
                job: Arc::clone(job),
            });
        }
        let deadline = deadline(now, run.term, now, run.max_lifetime);
        Draft {
            grant: Grant {
                queue,
                partition: 0,
                id,
                nonce: request.nonce,
                granted_at: now,
                term: run.term,
                granted: deadline.since(now),
                leases,
            },
            deadline,
            records: &self.records[from..end],
            bounds: (lowest, highest),
        }
    }
}

impl Run {
    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }
}

/// A time span as a column's value.
pub(crate) fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

/// Of two times from now, if there are any, the first.
pub(crate) fn earliest(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}
