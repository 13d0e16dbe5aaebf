//! settle: end held leases; refuse every other receipt.

use std::sync::Arc;

use super::{GrantState, LeaseState, State, index};
use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::lease::{FencingToken, Receipt, Verdict};
use crate::rules::ends::{self, End, Next, Settling};
use crate::store::Settlement;

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
        let held = self.held(receipt);
        let held = held.map(|(grant, lease)| (grant.queue, grant.deadline <= now, lease.cancel));
        let taken = held.and_then(|held| Some((held, self.jobs.remove(&receipt.job)?.job)));
        let Some(((queue, late, cancel), job)) = taken else {
            self.fenced(&receipt.queue, 1);
            return Verdict::Fenced;
        };
        let at = &mut self.queues[queue];
        at.ledger.late += u64::from(late);
        let mark = outcome.mark();
        let settling = Settling {
            outcome,
            cancel,
            believed: mark.is_none_or(|mark| self.issuer.raise(mark, now)),
            relaxed: at.relaxed,
            now,
        };
        let end = ends::settle(&job, &settling);
        self.end((receipt.grant, receipt.token), job, end, now);
        Verdict::Held { late, cancel }
    }

    /// The holder's lease, if the receipt is the current one.
    pub(super) fn held(&self, receipt: &Receipt) -> Option<(&GrantState, &LeaseState)> {
        let grant = self.grants.get(&receipt.grant)?;
        let lease = grant.lease(receipt.grant, receipt.token)?;
        let is_proof = self.queues[grant.queue].name == receipt.queue
            && receipt.partition == 0
            && grant.nonce.matches(&receipt.nonce)
            && lease.job == receipt.job;
        is_proof.then_some((grant, lease))
    }

    /// Takes the job of a lease out of the jobs, and tells whether it is to be cancelled.
    /// [`State::end`] puts it back.
    pub(super) fn take_leased(
        &mut self,
        id: FencingToken,
        token: FencingToken,
    ) -> Option<(Arc<JobRecord>, bool)> {
        let lease = self.grants.get(&id)?.lease(id, token)?;
        let cancel = lease.cancel;
        Some((self.jobs.remove(&lease.job)?.job, cancel))
    }

    /// Takes a lease out of its grant, counts its end, and puts the job where it goes.
    pub(super) fn end(
        &mut self,
        (id, token): (FencingToken, FencingToken),
        mut job: Arc<JobRecord>,
        end: End,
        now: Timestamp,
    ) {
        let Some(grant) = self.grants.get_mut(&id) else {
            return;
        };
        let at = index(id, token).and_then(|at| grant.leases.get_mut(at));
        let Some(lease) = at.and_then(Option::take) else {
            return;
        };
        let queue = grant.queue;
        let at = &mut self.queues[queue];
        at.ledger.live -= 1;
        at.ledger.count(end.counts_as);
        at.ledger.dead_by_expiry += u64::from(end.is_death_by_expiry());
        let next = end.next;
        if !next.is_gone() {
            end.apply(Arc::make_mut(&mut job), &grant.facts(token, &lease), now);
        }
        grant.live -= 1;
        if grant.live == 0 {
            at.deadlines.remove(&(grant.deadline, id));
            self.grants.remove(&id);
        }
        match next {
            Next::Front => self.put_front(queue, job, token),
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
