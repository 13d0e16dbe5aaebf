//! Plain calls: each is one statement, a transaction by itself (`plain.sql`).
//!
//! Most calls of a busy queue are plain: new jobs without keys, a claim that finds nothing overdue,
//! completions that leave nothing behind, and renewals in which no lease lapses. They need no rule of
//! `rules`, so the server does them alone, and a queue's row is locked for as long as it works and not
//! for round trips. A call that turns out not to be plain has changed nothing, and goes the long way,
//! through [`Tx`].

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio_postgres::Row;
use uuid::Uuid;

use super::fault::{Done, Fault, corrupt};
use super::tx::{Arg, Bell, Tx, args, moment, uuid};
use super::{Open, PostgresStore};
use crate::clock::{Timestamp, micros};
use crate::job::{JobId, JobRecord, NewJob, QueueName};
use crate::lease::{FencingToken, Verdict};
use crate::rules::order::deadline;
use crate::rules::order::earliest;
use crate::rules::order::tier_of;
use crate::store::codec::{self, Kinds};
use crate::store::sql::answer::{written_enqueue, written_verdict};
use crate::store::sql::grant::{Selection, nanos};
use crate::store::{
    ClaimQueue, ClaimRequest, Claimed, EnqueueRequest, Enqueued, Outcome, RequestId, SettleRequest,
    Settlement,
};

/// The verdict on every settlement of a plain call.
const HELD: Verdict = Verdict::Held {
    late: false,
    cancel: false,
};
/// A call that is hardly ever plain is tried once in so many, as a power of two.
const SELDOM: u32 = 4;

/// Whether it is worth while to try: a try that fails costs a call.
#[derive(Default)]
pub(super) struct Luck {
    misses: AtomicU32,
    rest: AtomicU32,
}

impl Luck {
    pub(super) fn may_try(&self) -> bool {
        let rest = &self.rest;
        let one_less = |rest: u32| rest.checked_sub(1);
        rest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
            .is_err()
    }

    pub(super) fn had(&self, luck: bool) {
        let misses = if luck {
            0
        } else {
            (self.misses.load(Ordering::Relaxed) + 1).min(SELDOM + 1)
        };
        self.misses.store(misses, Ordering::Relaxed);
        // One miss says nothing: once a minute a session wants to be touched.
        let rest = (1 << misses.saturating_sub(1)) - 1;
        self.rest.store(rest, Ordering::Relaxed);
    }
}

impl PostgresStore {
    /// None: the call is not plain.
    pub(super) async fn enqueue_plain(
        &self,
        request: &EnqueueRequest,
    ) -> Done<Option<Vec<Enqueued>>> {
        let Some(fresh) = Fresh::of(&request.jobs) else {
            return Ok(None);
        };
        let answers: Vec<Enqueued> = request
            .jobs
            .iter()
            .map(|(id, _)| Enqueued::New(*id))
            .collect();
        let given = written_enqueue(&answers);
        let open = self.connection().await?;
        let (stored, bells) = {
            let tx = Tx::new(open.client()?, &self.shared.base, false);
            let bells = fresh.bells();
            let (stored, rung) = tokio::join!(biased;
                async {
                    let args = args![
                        fresh.names => TEXT_ARRAY, fresh.of_queue => INT4_ARRAY,
                        fresh.lines => INT2_ARRAY, fresh.ids => UUID_ARRAY, fresh.lowest => UUID,
                        fresh.highest => UUID, fresh.weights => INT4_ARRAY,
                        fresh.records => BYTEA_ARRAY, given => BYTEA];
                    self.plainly(&tx, "enqueue_plain", request.request, args).await
                },
                // Behind the jobs on the same connection, and not in their transaction: those that ring
                // wait for each other until they are committed.
                tx.ring(&bells)
            );
            // A bell that was not heard costs a second.
            drop(rung);
            (stored, bells)
        };
        let stored = is_done(&kept(open, stored).await?)?;
        if stored {
            self.ring(bells);
            self.fold(&fresh.names).await;
        }
        Ok(stored.then_some(answers))
    }

    /// None: the call is not plain.
    pub(super) async fn settle_plain(&self, request: &SettleRequest) -> Done<Option<Vec<Verdict>>> {
        let Some(ends) = Ends::of(&request.settlements).filter(|ends| !ends.ids.is_empty()) else {
            return Ok(None);
        };
        if !self.shared.base.settlements.may_try() {
            return Ok(None);
        }
        let given = ends.answer();
        let open = self.connection().await?;
        let settled = {
            let tx = Tx::new(open.client()?, &self.shared.base, false);
            self.plainly(
                &tx,
                "settle_plain",
                request.request,
                args![
                ends.names => TEXT_ARRAY, ends.ids => INT8_ARRAY, ends.nonces => BYTEA_ARRAY,
                ends.upto => INT4_ARRAY, ends.tokens => INT8_ARRAY, ends.jobs => UUID_ARRAY,
                given => BYTEA],
            )
            .await
        };
        let settled = is_done(&kept(open, settled).await?)?;
        self.shared.base.settlements.had(settled);
        if settled {
            self.fold(&ends.names).await;
        }
        Ok(settled.then(|| vec![HELD; request.settlements.len()]))
    }

    /// None: the call is not plain.
    pub(super) async fn claim_plain(&self, request: &ClaimRequest) -> Done<Option<Claimed>> {
        let names: Vec<&str> = request.queues.iter().map(|q| q.queue.as_str()).collect();
        if has_twins(&names) || !self.shared.base.claims.may_try() {
            return Ok(None);
        }
        let column =
            |of: fn(&ClaimQueue) -> i64| request.queues.iter().map(of).collect::<Vec<i64>>();
        let terms = column(|queue| nanos(queue.term));
        let lifetimes = column(|queue| nanos(queue.max_lifetime));
        let spans = column(|queue| micros(span(queue)) as i64);
        let seen = self.shared.base.seen.load(Ordering::Relaxed) as i64;
        let open = self.connection().await?;
        let rows = {
            let tx = Tx::new(open.client()?, &self.shared.base, false);
            self.plainly(
                &tx,
                "claim_plain",
                request.request,
                args![
                names => TEXT_ARRAY, terms => INT8_ARRAY, lifetimes => INT8_ARRAY,
                spans => INT8_ARRAY, request.max as i32 => INT4, seen => INT8,
                &request.nonce.as_bytes()[..] => BYTEA, &*request.owner => TEXT,
                &*request.task => TEXT],
            )
            .await
        };
        let rows = kept(open, rows).await?;
        self.shared.base.claims.had(!rows.is_empty());
        let Some((first, rows)) = rows.split_first() else {
            return Ok(None);
        };
        let claimed = self.granted(request, moment(first.try_get(1)?), rows)?;
        self.fold(&names).await;
        self.seal(request, &claimed);
        Ok(Some(claimed))
    }

    /// Reads what `claim_plain` has granted.
    fn granted(&self, request: &ClaimRequest, now: Timestamp, rows: &[Row]) -> Done<Claimed> {
        let mut claimed = Claimed::default();
        let mut kinds = Kinds::default();
        for row in rows {
            let nth = row.try_get::<_, i32>(0)? as usize;
            let wanted = nth.checked_sub(1).and_then(|at| request.queues.get(at));
            let wanted = wanted.ok_or_else(|| corrupt("a claim has served another queue"))?;
            let first: Option<i64> = row.try_get(1)?;
            let records: Option<&[u8]> = row.try_get(2)?;
            if let Some((first, records)) = first.zip(records) {
                let id = FencingToken::new(first as u64);
                let pick = unpacked(records, &mut kinds)?;
                let [run] = &pick.spans(wanted)[..] else {
                    return Err(corrupt("jobs of one grant have several terms"));
                };
                let queue = wanted.queue.clone();
                let mut heads = Vec::new();
                let draft = pick.grant(run, queue, id, request, now, &mut heads);
                let last = id.plus(run.jobs.len() as u64 - 1);
                self.shared
                    .base
                    .seen
                    .fetch_max(last.get(), Ordering::Relaxed);
                claimed.grants.push(draft.grant);
            }
            let from_now = |at: Option<i64>| at.map(|at| moment(at).since(now));
            claimed.next_due = earliest(claimed.next_due, from_now(row.try_get(3)?));
            claimed.next_deadline = earliest(claimed.next_deadline, from_now(row.try_get(4)?));
        }
        Ok(claimed)
    }

    /// Sends a plain call.
    async fn plainly<C: tokio_postgres::GenericClient + Sync>(
        &self,
        tx: &Tx<'_, C>,
        name: &'static str,
        request: RequestId,
        rest: &[Arg<'_>],
    ) -> Done<Vec<Row>> {
        let base = &self.shared.base;
        let patience = self.shared.options.patience.as_millis().to_string();
        let session = Uuid::from_bytes(*request.session.as_bytes());
        let (lane, seq) = (i64::from(request.lane), request.seq as i64);
        let first: &[Arg<'_>] = args![base.namespace => TEXT, patience => TEXT, tx.by_hand => INT8,
                                      session => UUID, lane => INT8, seq => INT8];
        tx.rows(name, &[first, rest].concat()).await
    }
}

/// Gives the connection back, if it still works.
pub(super) async fn kept<T>(open: Open, done: Done<T>) -> Done<T> {
    if done.is_ok() {
        open.done();
    } else {
        open.undo().await;
    }
    done
}

fn is_done(rows: &[Row]) -> Done<bool> {
    let row = rows
        .first()
        .ok_or_else(|| corrupt("a call without an answer"))?;
    Ok(row.try_get(0)?)
}

/// The time that a new lease of a queue has.
fn span(queue: &ClaimQueue) -> Duration {
    let then = Timestamp::ZERO;
    deadline(then, queue.term, then, queue.max_lifetime).since(then)
}

fn has_twins(names: &[&str]) -> bool {
    (1..names.len()).any(|at| names[..at].contains(&names[at]))
}

/// Reads records that lie end to end, each with its length in front.
fn unpacked(records: &[u8], kinds: &mut Kinds) -> Done<Selection> {
    let mut ends = Vec::new();
    let mut end = 0;
    while end < records.len() {
        end += codec::length(&records[end..]).map_err(Fault::Broken)?;
        ends.push(end);
    }
    Selection::unpack(Bytes::copy_from_slice(records), &ends, kinds).map_err(Fault::Broken)
}

/// Jobs that go straight into their lines.
struct Fresh<'j> {
    names: Vec<&'j str>,
    of_queue: Vec<i32>,
    lines: Vec<i16>,
    ids: Vec<Uuid>,
    lowest: Uuid,
    highest: Uuid,
    weights: Vec<i32>,
    records: Vec<Vec<u8>>,
}

impl<'j> Fresh<'j> {
    fn of(jobs: &'j [(JobId, NewJob)]) -> Option<Self> {
        let plain =
            |job: &NewJob| job.unique.is_none() && job.exclusive.is_none() && job.delay.is_zero();
        let ids: Vec<Uuid> = jobs.iter().map(|(id, _)| uuid(*id)).collect();
        let mut in_order = ids.clone();
        in_order.sort_unstable();
        in_order.dedup();
        if in_order.len() < jobs.len() || !jobs.iter().all(|(_, job)| plain(job)) {
            return None;
        }
        let names = super::enqueue::names(jobs);
        let mut fresh = Self {
            of_queue: Vec::with_capacity(jobs.len()),
            lines: Vec::with_capacity(jobs.len()),
            lowest: *in_order.first()?,
            highest: *in_order.last()?,
            weights: Vec::with_capacity(jobs.len()),
            records: Vec::with_capacity(jobs.len()),
            names,
            ids,
        };
        for (id, new) in jobs {
            let of = |name: &&str| *name == new.queue.as_str();
            fresh
                .of_queue
                .push(fresh.names.iter().position(of)? as i32 + 1);
            // The server puts in its time.
            let job = JobRecord::new(*id, new.clone(), Timestamp::ZERO);
            fresh.lines.push(tier_of(&job) as i16);
            fresh.weights.push(job.weight() as i32);
            let mut record = Vec::new();
            codec::encode(&job, &mut record);
            fresh.records.push(record);
        }
        Some(fresh)
    }

    fn bells(&self) -> Vec<Bell> {
        let count = |nth: i32| self.of_queue.iter().filter(|of| **of == nth).count();
        let bells = self.names.iter().zip(1..);
        bells
            .filter_map(|(name, nth)| Some((QueueName::new(*name).ok()?, false, count(nth))))
            .collect()
    }
}

/// Completions, by grant and token.
#[derive(Default)]
struct Ends<'s> {
    names: Vec<&'s str>,
    ids: Vec<i64>,
    nonces: Vec<&'s [u8]>,
    upto: Vec<i32>,
    tokens: Vec<i64>,
    jobs: Vec<Uuid>,
}

impl<'s> Ends<'s> {
    fn of(settlements: &'s [Settlement]) -> Option<Self> {
        let plain = |s: &Settlement| {
            matches!(s.outcome, Outcome::Complete { .. }) && s.receipt.partition == 0
        };
        if !settlements.iter().all(plain) {
            return None;
        }
        let mut receipts: Vec<_> = settlements.iter().map(|s| &s.receipt).collect();
        receipts.sort_unstable_by_key(|receipt| (&receipt.queue, receipt.grant, receipt.token));
        let mut ends = Self::default();
        for (at, receipt) in receipts.iter().enumerate() {
            let before = at.checked_sub(1).map(|at| receipts[at]);
            let same = before
                .filter(|before| before.queue == receipt.queue && before.grant == receipt.grant);
            match same {
                Some(before) if before.token == receipt.token || before.nonce != receipt.nonce => {
                    return None;
                }
                Some(_) => *ends.upto.last_mut()? += 1,
                None => {
                    ends.names.push(receipt.queue.as_str());
                    ends.ids.push(i64::try_from(receipt.grant.get()).ok()?);
                    ends.nonces.push(receipt.nonce.as_bytes());
                    ends.upto.push(at as i32 + 1);
                }
            }
            ends.tokens.push(i64::try_from(receipt.token.get()).ok()?);
            ends.jobs.push(uuid(receipt.job));
        }
        Some(ends)
    }

    fn answer(&self) -> Vec<u8> {
        vec![written_verdict(HELD); self.tokens.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::Luck;

    #[test]
    fn what_is_hardly_ever_plain_is_tried_once_in_sixteen() {
        let luck = Luck::default();
        assert!(luck.may_try());
        let untried_after = |was_plain: bool| {
            luck.had(was_plain);
            (0..100).take_while(|_| !luck.may_try()).count()
        };
        let untried: Vec<usize> = (0..7).map(|_| untried_after(false)).collect();
        assert_eq!(untried, [0, 1, 3, 7, 15, 15, 15]);
        assert_eq!((untried_after(true), untried_after(false)), (0, 0));
    }
}
