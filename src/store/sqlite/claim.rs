//! claim: expire what is overdue, promote what is due, grant.
//!
//! One range is read, one range deleted and one grant written, however many jobs there are. The
//! fencing tokens of a grant's leases are consecutive numbers of the file's one
//! [issuer](crate::rules::issue::Issuer); the first is also the id of the grant.

use std::sync::Arc;

use rusqlite::{OptionalExtension, params};

use super::answer::{read_claim, written_claim};
use super::fault::{Done, Fault};
use super::place::{first_position, tier_of_position};
use super::stored_grant::Selection;
use super::tx::{Tx, moment, time};
use super::view::SCHEDULED;
use crate::clock::Timestamp;
use crate::clock::nanos;
use crate::error::Verb;
use crate::lease::{Grant, Lease};
use crate::limits;
use crate::rules::issue::{WhenBehind, tokens_ahead};
use crate::rules::order::{GrantSpan, TIERS, earliest, is_suspects};
use crate::store::{ClaimRequest, Claimed, RequestId, codec};

statements! {
    DUE_PAGE = "
        SELECT row, record FROM leasehold_aside WHERE queue = ?1 AND state = 0 AND at <= ?2
        ORDER BY at, seq LIMIT ?3";
    READY_PAGE = "
        SELECT position, record FROM leasehold_ready WHERE position >= ?1 AND position < ?2
        ORDER BY position LIMIT ?3";
    GRANT_NEW = "
        INSERT INTO leasehold_grants
            (id, queue, deadline, nonce, owner, task, granted_at, term, max_lifetime,
             renewals, leases, live, noted, ended, first_job, last_job)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0, ?10, ?10, 0, ?11, ?12, ?13)";
    RECORDS_NEW = "INSERT INTO leasehold_records (id, heads, records) VALUES (?1, ?2, ?3)";
    FIRST_DEADLINE = "
        SELECT deadline FROM leasehold_grants WHERE queue = ?1 ORDER BY deadline LIMIT 1";
}

impl Tx<'_> {
    pub(super) fn claim(
        &mut self,
        request: &ClaimRequest,
        when_behind: WhenBehind,
        now: Timestamp,
    ) -> Done<Claimed> {
        match self.recall(request.request, Verb::Claim, now)? {
            Some(first) => self.claim_again(&first, request, now),
            None => self.claim_once(request, when_behind, now),
        }
    }

    fn claim_once(
        &mut self,
        request: &ClaimRequest,
        when_behind: WhenBehind,
        now: Timestamp,
    ) -> Done<Claimed> {
        let issuer = self.issuer()?;
        let room = usize::try_from(issuer.room(now, when_behind)).unwrap_or(usize::MAX);
        if room == 0 && self.has_work_for(request, now)? {
            return Err(Fault::Refused(tokens_ahead(issuer.ahead(now))));
        }
        let mut claimed = Claimed {
            clock_behind: issuer.clock_behind(now),
            ..Claimed::default()
        };
        let mut left = request.max.min(room);
        let mut suspect = request.admit_suspect;
        let mut bytes = 0;
        self.save_grants()?;
        for wanted in &request.queues {
            if left == 0 && room > 0 {
                break;
            }
            let Some(queue) = self.known(&wanted.queue)? else {
                continue;
            };
            let expired = self.expire_overdue(queue, limits::STEP_JOBS, now)?;
            claimed.expired.extend(expired);
            self.promote(queue, now)?;
            let selection = self.select(queue, left, &mut suspect, &mut bytes)?;
            left -= selection.len();
            for span in selection.spans(wanted) {
                let grant = self.grant(queue, &selection, &span, request, now)?;
                claimed.grants.push(grant);
            }
            self.hints(queue, now, &mut claimed)?;
        }
        self.remember(request.request, Verb::Claim, &written_claim(&claimed)?)?;
        Ok(claimed)
    }

    /// Whether a claim might need a token. One that would find nothing needs none, and is answered
    /// also while the clock is behind the last token.
    fn has_work_for(&mut self, request: &ClaimRequest, now: Timestamp) -> Done<bool> {
        self.save_grants()?;
        let mut next = Claimed::default();
        for wanted in &request.queues {
            let Some(queue) = self.known(&wanted.queue)? else {
                continue;
            };
            let at = &self.queues[queue];
            if at.paused {
                continue;
            }
            if at.counts.ready > at.counts.parked {
                return Ok(true);
            }
            self.hints(queue, now, &mut next)?;
        }
        let next = next.next_due.into_iter().chain(next.next_deadline).min();
        Ok(next.is_some_and(|next| next.is_zero()))
    }

    /// The answer to a claim that would find nothing, from reading alone. None: it must be applied.
    pub(super) fn claim_in_vain(
        &mut self,
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Done<Option<Claimed>> {
        if !self.is_fresh(request.request.session, now)?
            || self.recall(request.request, Verb::Claim, now)?.is_some()
        {
            return Ok(None);
        }
        let mut claimed = Claimed {
            clock_behind: self.issuer()?.clock_behind(now),
            ..Claimed::default()
        };
        for wanted in &request.queues {
            let Some(queue) = self.known(&wanted.queue)? else {
                continue;
            };
            let at = &self.queues[queue];
            if !at.paused && at.counts.ready > at.counts.parked {
                return Ok(None);
            }
            self.hints(queue, now, &mut claimed)?;
        }
        let next = claimed.next_due.into_iter().chain(claimed.next_deadline);
        Ok(next
            .min()
            .is_none_or(|next| !next.is_zero())
            .then_some(claimed))
    }

    /// Writes down that a claim has been answered with nothing.
    pub(super) fn remember_vain(&mut self, request: RequestId) -> Done<()> {
        self.remember(request, Verb::Claim, &written_claim(&Claimed::default())?)
    }

    /// Answers a repeated claim: what is left of its grants, with the time originally granted.
    fn claim_again(
        &mut self,
        first: &[u8],
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Done<Claimed> {
        let (grants, expired) = read_claim(first)?;
        let mut claimed = Claimed {
            expired,
            clock_behind: self.issuer()?.clock_behind(now),
            ..Claimed::default()
        };
        for (id, granted) in grants {
            let Some(held) = self.held(id)?.filter(|held| held.deadline > now) else {
                continue;
            };
            let (queue, nonce, term) = (held.queue, held.nonce, held.term);
            let granted_at = held.granted_at;
            let living: Vec<usize> = held.living().collect();
            let mut leases = Vec::with_capacity(living.len());
            for at in living {
                if let Some((facts, job)) = self.leased(id, at)? {
                    leases.push(Lease {
                        token: facts.token,
                        job: Arc::new(job),
                    });
                }
            }
            claimed.grants.push(Grant {
                queue: self.queues[queue].name.clone(),
                partition: 0,
                id,
                nonce,
                granted_at,
                term,
                granted,
                leases,
            });
        }
        self.save_grants()?;
        for wanted in &request.queues {
            if let Some(queue) = self.known(&wanted.queue)? {
                self.hints(queue, now, &mut claimed)?;
            }
        }
        Ok(claimed)
    }

    /// Scheduled jobs whose time has come fall due, the earliest first.
    fn promote(&mut self, queue: usize, now: Timestamp) -> Done<()> {
        if self.queues[queue].counts.scheduled == 0 {
            return Ok(());
        }
        let mut due: Vec<(i64, Vec<u8>)> = Vec::new();
        {
            let mut select = self.sql(DUE_PAGE)?;
            let of = self.queues[queue].id;
            let mut rows = select.query(params![of, time(now), limits::STEP_JOBS as i64])?;
            while let Some(row) = rows.next()? {
                due.push((row.get(0)?, row.get(1)?));
            }
        }
        for (row, record) in due {
            self.take_aside(queue, row, SCHEDULED)?;
            let job = self.decode(record)?;
            self.join(queue, &job)?;
        }
        Ok(())
    }

    /// Takes up to `max` ready jobs by (priority, position), at most one of them a suspect.
    fn select(
        &mut self,
        queue: usize,
        max: usize,
        suspect: &mut bool,
        bytes: &mut usize,
    ) -> Done<Selection> {
        let at = &self.queues[queue];
        if at.paused || at.counts.ready == at.counts.parked {
            return Ok(Selection::default());
        }
        let end = first_position(at.id + 1, 0);
        let mut from = first_position(at.id, 0);
        let mut records = Vec::new();
        let mut offsets = Vec::new();
        // A page offsets early where suspects must be passed over: then the next tier starts a new
        // one.
        while offsets.len() < max && *bytes < limits::CALL_BYTES && from < end {
            let mut taken = None;
            let mut passed = None;
            {
                let mut select = self.sql(READY_PAGE)?;
                let mut rows = select.query([from, end, (max - offsets.len()) as i64])?;
                while *bytes < limits::CALL_BYTES
                    && let Some(row) = rows.next()?
                {
                    let position: i64 = row.get(0)?;
                    let tier = tier_of_position(position);
                    if is_suspects(tier) {
                        if !*suspect {
                            passed = Some(tier + 1);
                            break;
                        }
                        *suspect = false;
                    }
                    let record = row.get_ref(1)?.as_blob().unwrap_or_default();
                    *bytes += codec::weight_of(record);
                    records.extend_from_slice(record);
                    offsets.push(records.len());
                    let (first, _) = taken.unwrap_or((position, position));
                    taken = Some((first, position));
                }
            }
            if let Some((first, last)) = taken {
                self.take_ready(first, last)?;
            }
            let Some(tier) = passed else { break };
            from = first_position(self.queues[queue].id, tier.min(TIERS));
        }
        self.at(queue).counts.ready -= offsets.len() as u64;
        Selection::unpack(records.into(), &offsets, self.kinds).map_err(Fault::Broken)
    }

    /// Grants leases on the jobs of a span.
    fn grant(
        &mut self,
        queue: usize,
        selection: &Selection,
        span: &GrantSpan,
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Done<Grant> {
        let mut issuer = self.issuer()?;
        let id = issuer.issue(span.jobs.len() as u64, now);
        self.set_issuer(issuer)?;
        let mut heads = std::mem::take(&mut self.scratch);
        heads.clear();
        let name = self.queues[queue].name.clone();
        let new = selection.grant(span, name, id, request, now, &mut heads);
        let (lowest, highest) = new.bounds;
        self.sql(GRANT_NEW)?.execute(params![
            id.get() as i64,
            self.queues[queue].id,
            time(new.deadline),
            request.nonce.as_bytes(),
            request.owner,
            request.task,
            time(now),
            nanos(span.term),
            nanos(span.max_lifetime),
            span.jobs.len() as i64,
            vec![0_u8; span.jobs.len().div_ceil(8)],
            lowest.as_bytes(),
            highest.as_bytes()
        ])?;
        self.sql(RECORDS_NEW)?
            .execute(params![id.get() as i64, heads, new.records])?;
        self.scratch = heads;
        let queue = self.at(queue);
        queue.ledger.granted += span.jobs.len() as u64;
        queue.ledger.live += span.jobs.len() as u64;
        queue.counts.leased += span.jobs.len() as u64;
        Ok(new.grant)
    }

    /// When this queue is worth a claim again.
    fn hints(&mut self, queue: usize, now: Timestamp, claimed: &mut Claimed) -> Done<()> {
        let due = self.first_due(queue)?.map(|due| due.since(now));
        let at = &self.queues[queue];
        let deadline = if at.counts.leased == 0 {
            None
        } else {
            self.sql(FIRST_DEADLINE)?
                .query_row([at.id], |row| row.get(0))
                .optional()?
                .map(|deadline| moment(deadline).since(now))
        };
        claimed.next_due = earliest(claimed.next_due, due);
        claimed.next_deadline = earliest(claimed.next_deadline, deadline);
        Ok(())
    }
}
