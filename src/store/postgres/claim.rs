//! claim: expire what is overdue, promote what is due, grant.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_postgres::GenericClient;

use super::fault::{Done, Fault};
use super::tally::Count;
use super::tx::{Tx, args, moment, time, uuid};
use crate::error::Verb;
use crate::lease::{Grant, Lease};
use crate::limits;
use crate::rules::issue::tokens_ahead;
use crate::rules::order::{GrantSpan, earliest};
use crate::store::sql::answer::{read_claim, written_claim};
use crate::store::sql::grant::{Selection, nanos};
use crate::store::{ClaimQueue, ClaimRequest, Claimed, codec};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn claim(&mut self, request: &ClaimRequest) -> Done<Claimed> {
        let names: Vec<&str> = request.queues.iter().map(|q| q.queue.as_str()).collect();
        let ((), first, queues, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request.request),
            // As they are once they are locked: the issuers' last tokens are those of the claim before.
            // A queue that is made after this is not among them, and is left alone.
            async {
                let args = args![self.base.namespace => TEXT, names => TEXT_ARRAY];
                self.rows("queues_lock", args).await
            },
            self.clock()
        )?;
        self.now = now;
        self.keep(&queues)?;
        match self.recalled(request.request, Verb::Claim, &first)? {
            Some(first) => self.claim_again(&first, request).await,
            None => self.claim_first(request).await,
        }
    }

    async fn claim_first(&mut self, request: &ClaimRequest) -> Done<Claimed> {
        let mut claimed = Claimed::default();
        let mut left = request.max;
        let mut suspect = request.admit_suspect;
        let mut bytes = 0;
        let mut ahead = None;
        for wanted in &request.queues {
            if left == 0 {
                break;
            }
            let Some(queue) = self.known(&wanted.queue) else {
                continue;
            };
            // Tokens of one process grow across its queues too: a token in a log names one lease.
            let seen = self.base.seen.load(Ordering::Relaxed);
            let issuer = &mut self.queues[queue].issuer;
            issuer.follow(seen, self.now);
            let issuer = *issuer;
            claimed.clock_behind = claimed.clock_behind.max(issuer.clock_behind(self.now));
            let room = issuer.room(self.now, self.base.when_behind);
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            if room == 0 && self.has_work(queue).await? {
                ahead = ahead.max(Some(issuer.ahead(self.now)));
                continue;
            }
            let expired = self.expire_overdue(queue, limits::STEP_JOBS).await?;
            claimed.expired.extend(expired);
            self.promote(queue).await?;
            self.flush().await?;
            let most = left.min(room);
            let pick = self.pick(queue, most, &mut suspect, &mut bytes).await?;
            left -= pick.len();
            self.grant(queue, &pick, wanted, request, &mut claimed.grants)
                .await?;
            self.hints(queue, &mut claimed).await?;
        }
        if let Some(ahead) = ahead.filter(|_| claimed.grants.is_empty()) {
            return Err(Fault::Refused(tokens_ahead(ahead)));
        }
        let answer = written_claim(&claimed)?;
        self.remember(request.request, Verb::Claim, answer);
        Ok(claimed)
    }

    /// Whether a claim might need a token. One that would find nothing needs none, and is answered
    /// also while the clock is behind the last token.
    async fn has_work(&mut self, queue: usize) -> Done<bool> {
        if self.queues[queue].paused {
            return Ok(false);
        }
        let of = self.queues[queue].id;
        let rows = self.rows("has_ready", args![of => INT4]).await?;
        if rows.first().map(|row| row.try_get(0)).transpose()? == Some(true) {
            return Ok(true);
        }
        let mut next = Claimed::default();
        self.hints(queue, &mut next).await?;
        let next = next.next_due.into_iter().chain(next.next_deadline).min();
        Ok(next.is_some_and(|next| next.is_zero()))
    }

    /// Answers a repeated claim: what is left of its grants, with the time originally granted.
    async fn claim_again(&mut self, first: &[u8], request: &ClaimRequest) -> Done<Claimed> {
        let (grants, expired) = read_claim(first)?;
        let mut claimed = Claimed {
            expired,
            ..Claimed::default()
        };
        let queues: Vec<usize> = request
            .queues
            .iter()
            .filter_map(|wanted| self.known(&wanted.queue))
            .collect();
        for (id, granted) in grants {
            // A token names one grant among the queues of a claim, and its nonce says which claim.
            let keys: Vec<_> = queues.iter().map(|queue| (*queue, id)).collect();
            self.fetch(&keys).await?;
            let now = self.now;
            let key = keys.into_iter().find(|key| {
                let held = self.grants.get(key);
                held.is_some_and(|held| held.live > 0 && held.nonce.matches(&request.nonce))
            });
            let Some(key) = key.filter(|key| self.grants[key].deadline > now) else {
                continue;
            };
            let living: Vec<usize> = self.grants[&key].living().collect();
            let mut leases = Vec::with_capacity(living.len());
            for at in living {
                if let Some((facts, job)) = self.leased(key, at)? {
                    leases.push(Lease {
                        token: facts.token,
                        job: Arc::new(job),
                    });
                }
            }
            let held = &self.grants[&key];
            claimed.grants.push(Grant {
                queue: self.queues[key.0].name.clone(),
                partition: 0,
                id,
                nonce: held.nonce,
                granted_at: held.granted_at,
                term: held.term,
                granted,
                leases,
            });
        }
        for queue in queues {
            let behind = self.queues[queue].issuer.clock_behind(self.now);
            claimed.clock_behind = claimed.clock_behind.max(behind);
            self.hints(queue, &mut claimed).await?;
        }
        Ok(claimed)
    }

    /// Scheduled jobs whose time has come fall due, the earliest first.
    async fn promote(&mut self, queue: usize) -> Done<()> {
        let of = self.queues[queue].id;
        let most = limits::STEP_JOBS as i64;
        let rows = self
            .rows(
                "take_due",
                args![of => INT4, time(self.now) => INT8, most => INT8],
            )
            .await?;
        if rows.is_empty() {
            return Ok(());
        }
        self.count(queue, Count::Scheduled, -(rows.len() as i64));
        let mut due = Vec::with_capacity(rows.len());
        for row in rows {
            due.push((queue, self.decode(row.try_get(0)?)?));
        }
        self.join(due).await
    }

    /// Takes up to `max` ready jobs by (priority, place), at most one of them a suspect.
    async fn pick(
        &mut self,
        queue: usize,
        max: usize,
        suspect: &mut bool,
        bytes: &mut usize,
    ) -> Done<Selection> {
        if self.queues[queue].paused || max == 0 || *bytes >= limits::CALL_BYTES {
            return Ok(Selection::default());
        }
        let of = self.queues[queue].id;
        let mut first_suspect: (Option<i16>, Option<i64>) = (None, None);
        if *suspect {
            let rows = self.rows("first_suspect", args![of => INT4]).await?;
            if let Some(row) = rows.first() {
                first_suspect = (row.try_get(0)?, row.try_get(1)?);
            }
        }
        let (line, place) = first_suspect;
        let room = (limits::CALL_BYTES - *bytes) as i64;
        let args = args![of => INT4, max as i64 => INT8, room => INT8, line => INT2, place => INT8];
        let rows = self.rows("take_ready", args).await?;
        let mut records = Vec::new();
        let mut ends = Vec::with_capacity(rows.len());
        for row in &rows {
            let line: i16 = row.try_get(0)?;
            *suspect &= line % 2 == 1;
            let record: &[u8] = row.try_get(1)?;
            *bytes += codec::weight_of(record);
            records.extend_from_slice(record);
            ends.push(records.len());
        }
        self.count(queue, Count::Ready, -(rows.len() as i64));
        Selection::unpack(records.into(), &ends, &mut self.kinds).map_err(Fault::Broken)
    }

    /// Grants leases on the jobs.
    async fn grant(
        &mut self,
        queue: usize,
        pick: &Selection,
        wanted: &ClaimQueue,
        request: &ClaimRequest,
        grants: &mut Vec<Grant>,
    ) -> Done<()> {
        for run in pick.spans(wanted) {
            grants.push(self.grant_run(queue, pick, &run, request).await?);
        }
        Ok(())
    }

    async fn grant_run(
        &mut self,
        queue: usize,
        pick: &Selection,
        run: &GrantSpan,
        request: &ClaimRequest,
    ) -> Done<Grant> {
        let now = self.now;
        let at = &mut self.queues[queue];
        let id = at.issuer.issue(run.jobs.len() as u64, now);
        at.issued = true;
        let of = at.id;
        self.base.seen.fetch_max(at.issuer.last, Ordering::Relaxed);
        let mut heads = Vec::new();
        let draft = pick.grant(run, at.name.clone(), id, request, now, &mut heads);
        let (lowest, highest) = draft.bounds;
        let number = id.get() as i64;
        tokio::try_join!(biased;
            async {
                let args = args![
                    of => INT4,
                    number => INT8,
                    time(draft.deadline) => INT8,
                    &request.nonce.as_bytes()[..] => BYTEA,
                    &*request.owner => TEXT,
                    &*request.task => TEXT,
                    time(now) => INT8,
                    nanos(run.term) => INT8,
                    nanos(run.max_lifetime) => INT8,
                    run.jobs.len() as i32 => INT4,
                    vec![0_u8; run.jobs.len().div_ceil(8)] => BYTEA,
                    uuid(lowest) => UUID,
                    uuid(highest) => UUID,
                ];
                self.run("grant_new", args).await
            },
            async {
                let args = args![of => INT4, number => INT8, heads => BYTEA,
                                 draft.records => BYTEA];
                self.run("records_new", args).await
            }
        )?;
        let granted = run.jobs.len() as i64;
        self.count(queue, Count::Granted, granted);
        self.count(queue, Count::Live, granted);
        self.count(queue, Count::Leased, granted);
        Ok(draft.grant)
    }

    /// When this queue is worth a claim again. Grants of this transaction that ended are still in
    /// their table, and are left out by what is known of them here.
    async fn hints(&mut self, queue: usize, claimed: &mut Claimed) -> Done<()> {
        let of = self.queues[queue].id;
        let ended: Vec<i64> = self
            .grants
            .iter()
            .filter(|((at, _), held)| *at == queue && held.live == 0)
            .map(|((_, grant), _)| grant.get() as i64)
            .collect();
        let (due, deadline) = tokio::try_join!(biased;
            async { self.rows("first_due", args![of => INT4]).await },
            async {
                let args = args![of => INT4, ended => INT8_ARRAY];
                self.rows("first_deadline", args).await
            }
        )?;
        let now = self.now;
        let first = |rows: &[tokio_postgres::Row]| -> Done<Option<Duration>> {
            let at: Option<i64> = rows.first().map(|row| row.try_get(0)).transpose()?;
            Ok(at.map(|at| moment(at).since(now)))
        };
        claimed.next_due = earliest(claimed.next_due, first(&due)?);
        claimed.next_deadline = earliest(claimed.next_deadline, first(&deadline)?);
        Ok(())
    }
}
