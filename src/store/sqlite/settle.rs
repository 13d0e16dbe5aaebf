//! settle: end held leases; refuse every other receipt.

use std::collections::BTreeMap;

use super::fault::Done;
use super::tx::Tx;
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::lease::{LeaseEnd, Verdict};
use crate::rules::ends;
use crate::store::answer::{read_verdict, written_verdict};
use crate::store::record::flag;
use crate::store::{Outcome, SettleRequest, Settlement};

/// A completed job without any of these leaves nothing behind: its record need not be read.
const LEAVES: u16 = flag::UNIQUE | flag::EXCLUSIVE | flag::RETENTION;

impl Tx<'_> {
    pub(super) fn settle(&mut self, request: &SettleRequest, now: Timestamp) -> Done<Vec<Verdict>> {
        if let Some(first) = self.recall(request.request, Verb::Settle, now)? {
            let first = first.into_iter().map(read_verdict);
            return Ok(first.collect::<Result<_, _>>()?);
        }
        let verdicts = self.settle_all(&request.settlements, now)?;
        let answer: Vec<u8> = verdicts
            .iter()
            .map(|verdict| written_verdict(*verdict))
            .collect();
        self.remember(request.request, Verb::Settle, &answer)?;
        Ok(verdicts)
    }

    /// Settles under no request id: what the receipts decide cannot be applied twice.
    pub(super) fn settle_all(
        &mut self,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Done<Vec<Verdict>> {
        let mut front = BTreeMap::<usize, Vec<_>>::new();
        let mut verdicts = Vec::with_capacity(settlements.len());
        for Settlement { receipt, outcome } in settlements {
            let Some(current) = self.current(receipt, now)? else {
                self.fenced(&receipt.queue, 1)?;
                verdicts.push(Verdict::Fenced);
                continue;
            };
            let (queue, late, cancel) = (current.queue, current.late, current.cancel);
            self.at(queue).ledger.late += u64::from(late);
            verdicts.push(Verdict::Held { late, cancel });
            if matches!(outcome, Outcome::Complete { .. }) && current.flags & LEAVES == 0 {
                self.take_lease(receipt.grant, current.at)?;
                self.at(queue).ledger.count(LeaseEnd::Completed);
                continue;
            }
            let Some((facts, job)) = self.leased(receipt.grant, current.at)? else {
                continue;
            };
            let believed = match outcome {
                Outcome::Surrender {
                    mark: Some(mark), ..
                } => {
                    let mut issuer = self.issuer()?;
                    let believed = issuer.raise(*mark, now);
                    self.set_issuer(issuer)?;
                    believed
                }
                _ => true,
            };
            let relaxed = self.queues[queue].relaxed;
            let step = ends::settle(&job, outcome, cancel, believed, relaxed, now);
            if let Some(job) = self.end(queue, receipt.grant, &facts, job, step, now)? {
                front.entry(queue).or_default().push(job);
            }
        }
        for (queue, jobs) in front {
            self.put_front(queue, jobs)?;
        }
        Ok(verdicts)
    }
}
