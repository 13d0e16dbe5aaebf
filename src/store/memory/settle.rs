//! settle: end held leases; refuse every other receipt.

use std::sync::Arc;

use super::place::Stored;
use super::{GrantState, LeaseState, State};
use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::lease::{FencingToken, Receipt, Verdict};
use crate::rules::ends::{self, End, LeaseFacts, Next, Settling};
use crate::store::Settlement;

/// A lease that ends, with its job: neither is anywhere in the store.
pub(super) struct Ended {
    pub(super) queue: usize,
    pub(super) job: Arc<JobRecord>,
    pub(super) lease: LeaseFacts,
}

impl State {
    pub(super) fn settle(&mut self, settlements: &[Settlement], now: Timestamp) -> Vec<Verdict> {
        self.begin_step();
        settlements
            .iter()
            .map(|settlement| self.settle_one(settlement, now))
            .collect()
    }

    fn settle_one(&mut self, settlement: &Settlement, now: Timestamp) -> Verdict {
        let Settlement { receipt, outcome } = settlement;
        let held = self.held(receipt).map(|(grant, _)| grant.deadline <= now);
        let taken = |late| Some((late, self.take_leased(receipt.grant, receipt.token)?));
        let Some((late, ended)) = held.and_then(taken) else {
            self.fenced(&receipt.queue, 1);
            return Verdict::Fenced;
        };
        let at = &mut self.queues[ended.queue];
        at.ledger.late += u64::from(late);
        let mark = outcome.mark();
        let cancel = ended.lease.cancel;
        let settling = Settling {
            outcome,
            cancel,
            believed: mark.is_none_or(|mark| self.issuer.raise(mark, now)),
            relaxed: at.relaxed,
            now,
        };
        let end = ends::settle(&ended.job, &settling);
        self.end(ended, end, now);
        Verdict::Held { late, cancel }
    }

    /// The holder's lease, if the receipt is the current one.
    pub(super) fn held(&self, receipt: &Receipt) -> Option<(&GrantState, &LeaseState)> {
        let grant = self.grants.get(&receipt.grant)?;
        let lease = grant.leases.get(&receipt.token)?;
        let is_proof = self.queues[grant.queue].name == receipt.queue
            && receipt.partition == 0
            && grant.nonce.matches(&receipt.nonce)
            && lease.job == receipt.job;
        is_proof.then_some((grant, lease))
    }

    /// Takes a lease out of its grant, and its job out of the jobs. [`State::end`] puts it back.
    pub(super) fn take_leased(&mut self, id: FencingToken, token: FencingToken) -> Option<Ended> {
        let grant = self.grants.get_mut(&id)?;
        let lease = grant.leases.remove(&token)?;
        let Stored { queue, job, .. } = self.jobs.remove(&lease.job)?;
        let lease = LeaseFacts {
            token,
            owner: Arc::clone(&grant.owner),
            task: Arc::clone(&grant.task),
            granted_at: grant.granted_at,
            renewals: grant.renewals,
            progress: lease.progress,
            cancel: lease.cancel,
        };
        let at = &mut self.queues[queue];
        at.ledger.live -= 1;
        if grant.leases.is_empty() {
            at.deadlines.remove(&(grant.deadline, id));
            self.grants.remove(&id);
        }
        Some(Ended { queue, job, lease })
    }

    /// Counts the end of a lease, and puts the job where it goes.
    pub(super) fn end(&mut self, ended: Ended, end: End, now: Timestamp) {
        let Ended {
            queue,
            mut job,
            lease,
        } = ended;
        let ledger = &mut self.queues[queue].ledger;
        ledger.count(end.counts_as);
        ledger.dead_by_expiry += u64::from(end.is_death_by_expiry());
        let next = end.next;
        if !next.is_gone() {
            end.apply(Arc::make_mut(&mut job), &lease, now);
        }
        match next {
            Next::Front => self.put_front(queue, job, lease.token),
            Next::Back => self.put_back(queue, job),
            Next::Scheduled { keeps_key } => {
                if !keeps_key {
                    self.free_exclusive(queue, &job);
                }
                self.put_scheduled(queue, job);
            }
            Next::Settled { state, keep_until } => {
                self.put_settled(queue, job, state, keep_until, now);
            }
        }
    }
}
