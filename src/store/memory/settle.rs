//! settle: end held leases; refuse every other receipt.

use std::collections::BTreeMap;

use super::State;
use crate::clock::Timestamp;
use crate::lease::Verdict;
use crate::lifecycle;
use crate::store::{Outcome, Settlement};

impl State {
    pub(super) fn settle(&mut self, settlements: &[Settlement], now: Timestamp) -> Vec<Verdict> {
        let mut front = BTreeMap::<usize, Vec<_>>::new();
        let mut verdicts = Vec::with_capacity(settlements.len());
        for Settlement { receipt, outcome } in settlements {
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
            let step = lifecycle::settle(&lease.job, outcome, cancel, believed, relaxed, now);
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
}
