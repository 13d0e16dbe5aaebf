//! claim: expire what is overdue, promote what is due, grant.

use std::sync::Arc;

use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault};
use super::place::{count_of, first_slot, line_of_slot};
use super::tx::{LINES, Tx, moment, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::lease::{Grant, Lease};
use crate::limits;
use crate::rules::issue::tokens_ahead;
use crate::store::answer::{read_claim, written_claim};
use crate::store::line::SCHEDULED;
use crate::store::pick::{Pick, Run, earliest, nanos};
use crate::store::{ClaimQueue, ClaimRequest, Claimed, record};

impl Tx<'_> {
    pub(super) fn claim(&mut self, request: &ClaimRequest, now: Timestamp) -> Done<Claimed> {
        if let Some(first) = self.recall(request.request, Verb::Claim, now)? {
            return self.claim_again(&first, request, now);
        }
        let room = usize::try_from(self.issuer()?.room(now)).unwrap_or(usize::MAX);
        if room == 0 && self.has_work_for(request, now)? {
            return Err(Fault::Refused(tokens_ahead()));
        }
        let mut claimed = Claimed::default();
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
            let pick = self.pick(queue, left, &mut suspect, &mut bytes)?;
            left -= pick.len();
            self.grant(queue, &pick, wanted, request, now, &mut claimed.grants)?;
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
            let mut select = self.sql("due_page")?;
            let of = self.queues[queue].id;
            let mut rows = select.query(params![of, time(now), limits::STEP_JOBS as i64])?;
            while let Some(row) = rows.next()? {
                due.push((row.get(0)?, row.get(1)?));
            }
        }
        for (row, record) in due {
            self.sql("take_aside")?.execute([row])?;
            *count_of(&mut self.at(queue).counts, SCHEDULED) -= 1;
            let job = self.decode(record)?;
            self.join(queue, &job)?;
        }
        Ok(())
    }

    /// Takes up to `max` ready jobs by (priority, place), at most one of them a suspect.
    fn pick(
        &mut self,
        queue: usize,
        max: usize,
        suspect: &mut bool,
        bytes: &mut usize,
    ) -> Done<Pick> {
        let at = &self.queues[queue];
        if at.paused || at.counts.ready == at.counts.parked {
            return Ok(Pick::default());
        }
        let end = first_slot(at.id + 1, 0);
        let mut from = first_slot(at.id, 0);
        let mut records = Vec::new();
        let mut ends = Vec::new();
        // A page ends early where suspects must be passed over: then the next line starts a new one.
        while ends.len() < max && *bytes < limits::CALL_BYTES && from < end {
            let mut taken = None;
            let mut passed = None;
            {
                let mut select = self.sql("ready_page")?;
                let mut rows = select.query([from, end, (max - ends.len()) as i64])?;
                while *bytes < limits::CALL_BYTES
                    && let Some(row) = rows.next()?
                {
                    let slot: i64 = row.get(0)?;
                    let line = line_of_slot(slot);
                    if line.is_multiple_of(2) {
                        if !*suspect {
                            passed = Some(line + 1);
                            break;
                        }
                        *suspect = false;
                    }
                    let record = row.get_ref(1)?.as_blob().unwrap_or_default();
                    *bytes += record::weight_of(record);
                    records.extend_from_slice(record);
                    ends.push(records.len());
                    let (first, _) = taken.unwrap_or((slot, slot));
                    taken = Some((first, slot));
                }
            }
            if let Some((first, last)) = taken {
                self.sql("take_ready")?.execute([first, last])?;
            }
            let Some(line) = passed else { break };
            from = first_slot(self.queues[queue].id, line.min(LINES));
        }
        self.at(queue).counts.ready -= ends.len() as u64;
        Pick::unpack(records.into(), &ends, self.kinds).map_err(Fault::Broken)
    }

    /// Grants leases on the jobs.
    fn grant(
        &mut self,
        queue: usize,
        pick: &Pick,
        wanted: &ClaimQueue,
        request: &ClaimRequest,
        now: Timestamp,
        grants: &mut Vec<Grant>,
    ) -> Done<()> {
        for run in pick.runs(wanted) {
            grants.push(self.grant_run(queue, pick, &run, request, now)?);
        }
        Ok(())
    }

    fn grant_run(
        &mut self,
        queue: usize,
        pick: &Pick,
        run: &Run,
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Done<Grant> {
        let mut issuer = self.issuer()?;
        let id = issuer.issue(run.len() as u64, now);
        self.set_issuer(issuer)?;
        let mut heads = std::mem::take(&mut self.scratch);
        heads.clear();
        let name = self.queues[queue].name.clone();
        let draft = pick.draft(run, name, id, request, now, &mut heads);
        let (lowest, highest) = draft.bounds;
        self.sql("grant_new")?.execute(params![
            id.get() as i64,
            self.queues[queue].id,
            time(draft.deadline),
            request.nonce.as_bytes(),
            request.owner,
            request.task,
            time(now),
            nanos(run.term),
            nanos(run.max_lifetime),
            run.len() as i64,
            vec![0_u8; run.len().div_ceil(8)],
            lowest.as_bytes(),
            highest.as_bytes()
        ])?;
        self.sql("records_new")?
            .execute(params![id.get() as i64, heads, draft.records])?;
        self.scratch = heads;
        let queue = self.at(queue);
        queue.ledger.granted += run.len() as u64;
        queue.ledger.live += run.len() as u64;
        queue.counts.leased += run.len() as u64;
        Ok(draft.grant)
    }

    /// When this queue is worth a claim again.
    fn hints(&mut self, queue: usize, now: Timestamp, claimed: &mut Claimed) -> Done<()> {
        let due = self.first_due(queue)?.map(|due| due.since(now));
        let at = &self.queues[queue];
        let deadline = if at.counts.leased == 0 {
            None
        } else {
            self.sql("first_deadline")?
                .query_row([at.id], |row| row.get(0))
                .optional()?
                .map(|deadline| moment(deadline).since(now))
        };
        claimed.next_due = earliest(claimed.next_due, due);
        claimed.next_deadline = earliest(claimed.next_deadline, deadline);
        Ok(())
    }
}
