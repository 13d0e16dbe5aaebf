//! settle: end held leases; refuse every other receipt.

use std::collections::BTreeMap;

use super::{LeaseState, State, offset};
use crate::clock::Timestamp;
use crate::job::{JobRecord, JobState};
use crate::lease::Verdict;
use crate::rules::ends::{self, Next};
use crate::store::{Outcome, Settlement};

impl State {
    pub(super) fn settle(&mut self, settlements: &[Settlement], now: Timestamp) -> Vec<Verdict> {
        let mut front = BTreeMap::<usize, Vec<_>>::new();
        let mut verdicts = Vec::with_capacity(settlements.len());
        let mut rest = settlements;
        while let [Settlement { receipt, outcome }, others @ ..] = rest {
            let completed = self.complete(rest, now, &mut verdicts);
            if completed > 0 {
                rest = &rest[completed..];
                continue;
            }
            rest = others;
            let Some((grant, lease)) = self.held(receipt) else {
                self.fenced(&receipt.queue, 1);
                verdicts.push(Verdict::Fenced);
                continue;
            };
            let late = grant.deadline <= now;
            let queue = grant.queue;
            let cancel = lease.cancel;
            let mut issuer = self.issuer;
            let believed = match outcome {
                Outcome::Surrender {
                    mark: Some(mark), ..
                } => issuer.raise(*mark, now),
                _ => true,
            };
            let relaxed = self.queues[queue].relaxed;
            let step = ends::settle(&lease.job, outcome, cancel, believed, relaxed, now);
            self.issuer = issuer;
            self.queues[queue].ledger.late += u64::from(late);
            if let Some(job) = self.end(receipt.grant, receipt.token, step, now) {
                front.entry(queue).or_default().push(job);
            }
            verdicts.push(Verdict::Held { late, cancel });
        }
        for (queue, jobs) in front {
            self.put_front(queue, jobs);
        }
        verdicts
    }
    /// Completes the first of these, and those behind it that are leases of the same grant: as many
    /// as are held and leave nothing behind. Returns how many; the next one is not so plain.
    fn complete(
        &mut self,
        settlements: &[Settlement],
        now: Timestamp,
        verdicts: &mut Vec<Verdict>,
    ) -> usize {
        let Some(id) = settlements.first().map(|first| first.receipt.grant) else {
            return 0;
        };
        let Some(grant) = self.grants.get_mut(&id) else {
            return 0;
        };
        let at = &mut self.queues[grant.queue];
        let late = grant.deadline <= now;
        let mut leases = std::mem::take(&mut grant.leases);
        let mut completed = 0;
        for Settlement { receipt, outcome } in settlements {
            let is_plain = |lease: &mut LeaseState| {
                matches!(outcome, Outcome::Complete { .. })
                    && grant.is_proof(receipt, &at.name, lease)
                    && leaves_nothing(&lease.job, now)
            };
            let of_grant = (receipt.grant == id).then(|| offset(id, receipt.token));
            let lease = of_grant.flatten().and_then(|at| leases.get_mut(at));
            let Some(LeaseState { job, cancel, .. }) = lease.and_then(|it| it.take_if(is_plain))
            else {
                break;
            };
            self.places.remove(&job.id);
            self.gone.push(job);
            verdicts.push(Verdict::Held { late, cancel });
            completed += 1;
        }
        grant.leases = leases;
        grant.live -= completed;
        at.ledger.completed += completed as u64;
        at.ledger.late += if late { completed as u64 } else { 0 };
        at.ledger.live -= completed as u64;
        at.counts.leased -= completed as u64;
        if grant.live == 0 {
            at.deadlines.remove(&(grant.deadline, id));
            self.grants.remove(&id);
        }
        completed
    }
}

/// Whether a job is gone once it is completed, and nobody waits for its keys.
fn leaves_nothing(job: &JobRecord, now: Timestamp) -> bool {
    let next = ends::settled(job, JobState::Completed, now);
    let is_gone = matches!(
        next,
        Next::Settled {
            keep_until: None,
            ..
        }
    );
    is_gone && job.unique.is_none() && job.exclusive.is_none()
}
