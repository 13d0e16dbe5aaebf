//! settle: end held leases; refuse every other receipt.

use std::collections::BTreeMap;

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::tally::Count;
use super::tx::{GrantKey, Tx, args};
use crate::error::Verb;
use crate::job::QueueName;
use crate::lease::{FencingToken, LeaseEnd, Verdict};
use crate::rules::ends::{self, Settling};
use crate::store::codec::leaves_nothing;
use crate::store::sql::answer::{read_verdict, written_verdict};
use crate::store::{Outcome, RequestId, SettleRequest, Settlement};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn settle(&mut self, request: &SettleRequest) -> Done<Vec<Verdict>> {
        let wanted = wanted(&request.settlements);
        let first = self.start(request.request, Verb::Settle, &wanted).await?;
        if let Some(first) = first {
            let first = first.into_iter().map(read_verdict);
            return Ok(first.collect::<Result<_, _>>()?);
        }
        let verdicts = self.settle_all(&request.settlements).await?;
        let answer = verdicts.iter().map(|verdict| written_verdict(*verdict));
        self.remember(request.request, Verb::Settle, answer.collect());
        Ok(verdicts)
    }

    /// Begins a call that is about grants: answers a repeated one, or holds the grants.
    pub(super) async fn start(
        &mut self,
        request: RequestId,
        verb: Verb,
        wanted: &[(&QueueName, FencingToken)],
    ) -> Done<Option<Vec<u8>>> {
        let names: Vec<&str> = wanted.iter().map(|(queue, _)| queue.as_str()).collect();
        let ((), recalled, queues, grants, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request),
            self.named(&names),
            self.lock_grants(wanted),
            self.clock()
        )?;
        self.now = now;
        self.keep(&queues)?;
        let first = self.recalled(request, verb, &recalled)?;
        if first.is_none() {
            self.hold(&grants).await?;
        }
        Ok(first)
    }

    /// Settles under no request id: what the receipts decide cannot be applied twice. The grants
    /// must have been sought.
    pub(super) async fn settle_all(&mut self, settlements: &[Settlement]) -> Done<Vec<Verdict>> {
        let mut opened: Vec<GrantKey> = Vec::new();
        for Settlement { receipt, outcome } in settlements {
            if let Some(current) = self.current(receipt)?
                && !is_plain(outcome, current.flags)
            {
                opened.push(current.grant);
            }
        }
        self.open(&opened).await?;
        let mut front = BTreeMap::<usize, Vec<_>>::new();
        let mut verdicts = Vec::with_capacity(settlements.len());
        for Settlement { receipt, outcome } in settlements {
            let Some(current) = self.current(receipt)? else {
                self.fenced(&receipt.queue, 1);
                verdicts.push(Verdict::Fenced);
                continue;
            };
            let (grant, late, cancel) = (current.grant, current.late, current.cancel);
            let queue = grant.0;
            self.count(queue, Count::Late, i64::from(late));
            verdicts.push(Verdict::Held { late, cancel });
            if is_plain(outcome, current.flags) {
                self.take_lease(grant, current.at);
                self.count(queue, Count::end(LeaseEnd::Completed), 1);
                continue;
            }
            let Some((facts, job)) = self.leased(grant, current.at)? else {
                continue;
            };
            let believed = match outcome.mark() {
                Some(mark) => self.raise(queue, mark).await?,
                None => true,
            };
            let settling = Settling {
                outcome,
                cancel,
                believed,
                relaxed: self.queues[queue].relaxed,
                now: self.now,
            };
            let end = ends::settle(&job, &settling);
            if let Some(job) = self.end_lease(grant, &facts, job, end) {
                front.entry(queue).or_default().push(job);
            }
        }
        for (queue, jobs) in front {
            self.put_front(queue, jobs);
        }
        Ok(verdicts)
    }

    /// Raises the issuer's floor above a mark that a fence has accepted, if it can be believed.
    async fn raise(&mut self, queue: usize, mark: FencingToken) -> Done<bool> {
        let queue = &mut self.queues[queue];
        if !queue.issuer.raise(mark, self.now) {
            return Ok(false);
        }
        let (id, mark) = (queue.id, mark.get() as i64);
        self.run("floor_raise", args![id => INT4, mark => INT8])
            .await?;
        Ok(true)
    }
}

fn is_plain(outcome: &Outcome, flags: u16) -> bool {
    matches!(outcome, Outcome::Complete { .. }) && leaves_nothing(flags)
}

/// The grants of the receipts, each once.
pub(super) fn wanted(settlements: &[Settlement]) -> Vec<(&QueueName, FencingToken)> {
    let mut wanted: Vec<(&QueueName, FencingToken)> = settlements
        .iter()
        .map(|settlement| (&settlement.receipt.queue, settlement.receipt.grant))
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}
