//! settle: end held leases; refuse every other receipt.

use std::sync::Arc;

use super::place::Stored;
use super::{GrantState, LeaseState, State};
use crate::clock::Timestamp;
use crate::lease::{FencingToken, Verdict};
use crate::rules::ends::{self, End, LeaseFacts, Next, Settling};
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
        let held = self.held(receipt).zip(self.jobs.get(&receipt.job));
        let Some(((grant, lease), Stored { queue, job, .. })) = held else {
            self.fenced(&receipt.queue, 1);
            return Verdict::Fenced;
        };
        let (late, cancel) = (grant.deadline <= now, lease.cancel);
        let at = &mut self.queues[*queue];
        let mark = outcome.mark();
        let settling = Settling {
            outcome,
            cancel,
            believed: mark.is_none_or(|mark| self.issuer.raise(mark, now)),
            relaxed: at.relaxed,
            now,
        };
        let end = ends::settle(job, &settling);
        at.ledger.late += u64::from(late);
        self.end(receipt.grant, receipt.token, end, now);
        Verdict::Held { late, cancel }
    }

    /// Ends a lease: counts it, and puts the job where it goes.
    pub(super) fn end(&mut self, id: FencingToken, token: FencingToken, end: End, now: Timestamp) {
        let Some(grant) = self.grants.get_mut(&id) else {
            return;
        };
        let Some(lease) = grant.leases.remove(&token) else {
            return;
        };
        let facts = grant.facts(token, &lease);
        let at = &mut self.queues[grant.queue];
        at.ledger.live -= 1;
        at.ledger.count(end.counts_as);
        at.ledger.dead_by_expiry += u64::from(end.is_death_by_expiry());
        if grant.leases.is_empty() {
            at.deadlines.remove(&(grant.deadline, id));
            self.grants.remove(&id);
        }
        let Some(Stored { queue, mut job, .. }) = self.jobs.remove(&lease.job) else {
            return;
        };
        let next = end.next;
        if !next.is_gone() {
            end.apply(Arc::make_mut(&mut job), &facts, now);
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

impl GrantState {
    /// What the rules need to know of one of its leases.
    pub(super) fn facts(&self, token: FencingToken, lease: &LeaseState) -> LeaseFacts {
        LeaseFacts {
            token,
            owner: Arc::clone(&self.owner),
            task: Arc::clone(&self.task),
            granted_at: self.granted_at,
            renewals: self.renewals,
            progress: lease.progress.clone(),
            cancel: lease.cancel,
        }
    }
}
