//! settle: end held leases; refuse every other receipt.
//!
//! A settled grant is two deletes before the commit (`grant.rs`); a half-settled one is compacted,
//! so that one slow job does not pin a megabyte.

use std::collections::BTreeMap;

use super::answer::{read_verdict, written_verdict};
use super::fault::{Done, corrupt};
use super::stored_grant::{Head, offset};
use super::tx::Tx;
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::JobRecord;
use crate::lease::{FencingToken, Receipt, Verdict};
use crate::rules::ends::{self, End, LeaseFacts, Next, Settling};
use crate::store::{SettleRequest, Settlement};

statements! {
    NOTE_END = "DELETE FROM leasehold_notes WHERE token = ?1";
}

/// What a receipt turned out to be.
pub(super) struct Current {
    pub(super) at: usize,
    pub(super) queue: usize,
    pub(super) late: bool,
    pub(super) cancel: bool,
}

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
            let Some((facts, job)) = self.leased(receipt.grant, current.at)? else {
                continue;
            };
            let settling = Settling {
                outcome,
                cancel,
                believed: self.believes(outcome.mark(), now)?,
                relaxed: self.queues[queue].relaxed,
                now,
            };
            let end = ends::settle(&job, &settling);
            if let Some(job) = self.end(queue, receipt.grant, &facts, job, end, now)? {
                front.entry(queue).or_default().push(job);
            }
        }
        for (queue, jobs) in front {
            self.put_front(queue, jobs)?;
        }
        Ok(verdicts)
    }

    /// Rises above the mark of a fence, if there is one and it can be believed.
    fn believes(&mut self, mark: Option<FencingToken>, now: Timestamp) -> Done<bool> {
        let Some(mark) = mark else { return Ok(true) };
        let mut issuer = self.issuer()?;
        let believed = issuer.raise(mark, now);
        self.set_issuer(issuer)?;
        Ok(believed)
    }

    /// The holder's lease, if the receipt is the current one.
    pub(super) fn current(&mut self, receipt: &Receipt, now: Timestamp) -> Done<Option<Current>> {
        if self.held(receipt.grant)?.is_none() {
            return Ok(None);
        }
        self.open(receipt.grant, false)?;
        let Some(held) = self.grants.get(&receipt.grant) else {
            return Ok(None);
        };
        let Some(at) = offset(receipt.grant, receipt.token).filter(|at| held.is_live(*at)) else {
            return Ok(None);
        };
        let Head { id, .. } = held
            .head(at)
            .ok_or_else(|| corrupt("a lease has no record"))?;
        let current = self.queues[held.queue].name == receipt.queue
            && receipt.partition == 0
            && held.nonce.matches(&receipt.nonce)
            && id == *receipt.job.as_bytes();
        Ok(current.then(|| Current {
            at,
            queue: held.queue,
            late: held.deadline <= now,
            cancel: held.cancel(at),
        }))
    }

    /// Takes a lease out of its grant, and what is noted of it with it.
    pub(super) fn take_lease(&mut self, grant: FencingToken, at: usize) -> Done<()> {
        let Some(held) = self.grants.get_mut(&grant).filter(|held| held.is_live(at)) else {
            return Ok(());
        };
        let noted = held.end(at);
        let queue = held.queue;
        let queue = self.at(queue);
        queue.ledger.live -= 1;
        queue.counts.leased -= 1;
        if noted {
            let token = (grant.get() + at as u64) as i64;
            self.sql(NOTE_END)?.execute([token])?;
        }
        Ok(())
    }

    /// Ends a lease: counts it, and puts the job where it goes. A job that goes to the front is
    /// returned, to be put there with the others of the step.
    pub(super) fn end(
        &mut self,
        queue: usize,
        grant: FencingToken,
        facts: &LeaseFacts,
        mut job: JobRecord,
        end: End,
        now: Timestamp,
    ) -> Done<Option<(FencingToken, JobRecord)>> {
        let Some(at) = offset(grant, facts.token) else {
            return Ok(None);
        };
        self.take_lease(grant, at)?;
        let ledger = &mut self.at(queue).ledger;
        ledger.count(end.counts_as);
        ledger.dead_by_expiry += u64::from(end.is_death_by_expiry());
        let next = end.next;
        if !next.is_gone() {
            end.apply(&mut job, facts, now);
        }
        match next {
            Next::Front => return Ok(Some((facts.token, job))),
            Next::Back => self.put_back(queue, &job)?,
            Next::Scheduled { keeps_key } => {
                if !keeps_key {
                    self.free_exclusive(queue, &job)?;
                }
                self.put_scheduled(queue, &job)?;
            }
            Next::Settled { state, keep_until } => {
                self.put_settled(queue, &job, state, keep_until, now)?;
            }
        }
        Ok(None)
    }
}
