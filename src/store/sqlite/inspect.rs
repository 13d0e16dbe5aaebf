//! inspect: look, and change nothing.
//!
//! A page's cursor is the key of its last row, never a number of rows to skip. Counts are kept up
//! to date by the writes, not computed here. Leases are found among the live grants, which are few:
//! one row for each claim.

use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault, corrupt};
use super::place::{Location, first_position, queue_of_position, tier_of_position};
use super::tx::{Queue, Tx, moment};
use super::view::{lease_view, parked_view, state_code, waiting};
use crate::clock::Timestamp;
use crate::inspect::{
    AuditView, JobView, LeaseFilter, LeaseView, Page, Paged, ParkedView, Query, QueueView, View,
};
use crate::job::{JobId, JobRecord, JobState, QueueName};
use crate::lease::FencingToken;
use crate::limits;
use crate::rules::ends::LeaseFacts;
use crate::rules::order::TIERS;
use crate::store::codec;
use crate::store::cursor::{after_key, foreign, hex, paged, pair, parked, rows, single};

statements! {
    READY_HEAD = "
        SELECT position, record FROM leasehold_ready WHERE position >= ?1 AND position < ?2
        ORDER BY position LIMIT 1";
    READY_ROWS = "
        SELECT position, record FROM leasehold_ready WHERE position >= ?1 AND position < ?2
        ORDER BY position LIMIT ?3";
    GRANTS_BY_DEADLINE = "
        SELECT id, deadline FROM leasehold_grants WHERE queue = ?1 AND deadline >= ?2
          AND (deadline > ?2 OR id + leases > ?3)
          AND (?4 IS NULL OR owner = ?4) AND (?5 IS NULL OR task = ?5)
        ORDER BY deadline, id LIMIT ?6";
    GRANTS_BY_TOKEN = "
        SELECT id FROM leasehold_grants
        WHERE queue = ?1 AND id + leases > ?2 AND id > ?3 ORDER BY id LIMIT ?4";
    PARKED_PAGE = "
        SELECT key, seq, record FROM leasehold_aside
        WHERE queue = ?1 AND state = 1 AND (key, seq) > (?2, ?3)
        ORDER BY key, seq LIMIT ?4";
    PARKED_KEYS = "
        WITH RECURSIVE keys (key) AS (
            SELECT min(key) FROM leasehold_aside
            WHERE queue = ?1 AND state = 1 AND key >= ?2
            UNION ALL
            SELECT (SELECT min(key) FROM leasehold_aside
                    WHERE queue = ?1 AND state = 1 AND key > keys.key)
            FROM keys WHERE keys.key IS NOT NULL LIMIT ?3
        )
        SELECT key, (
            SELECT count(*) FROM (
                SELECT 1 FROM leasehold_aside
                WHERE queue = ?1 AND state = 1 AND key = keys.key LIMIT ?4
            )
        ) FROM keys WHERE key IS NOT NULL";
    ASIDE_PAGE = "
        SELECT at, seq, record FROM leasehold_aside
        WHERE queue = ?1 AND state = ?2 AND (at, seq) > (?3, ?4)
        ORDER BY at, seq LIMIT ?5";
    AUDIT_PAGE = "
        SELECT id, at, actor, reason, command, done, tokens FROM leasehold_audit
        WHERE namespace = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3";
}

impl Tx<'_> {
    pub(super) fn inspect(&mut self, query: &Query, now: Timestamp) -> Done<View> {
        Ok(match query {
            Query::Queues => View::Queues(self.queue_views(now)?),
            Query::Leases { filter, page } => View::Leases(self.leases(filter, page, now)?),
            Query::Jobs { queue, state, page } => View::Jobs(self.jobs(queue, *state, page, now)?),
            Query::Parked { queue, page } => View::Parked(self.parked(queue, page)?),
            Query::Job(id) => View::Job(self.job_view(*id, now)?.map(Box::new)),
            Query::Audit { page } => View::Audit(self.audit(page)?),
        })
    }

    fn queue_views(&mut self, now: Timestamp) -> Done<Vec<QueueView>> {
        let clock_behind = self.issuer()?.clock_behind(now);
        let mut views = Vec::new();
        for queue in self.all_queues()? {
            let oldest = self.oldest(&queue)?;
            views.push(QueueView {
                queue: queue.name,
                paused: queue.paused,
                relaxed: queue.relaxed,
                counts: queue.counts,
                ledger: queue.ledger,
                oldest_ready: oldest.map(|oldest| now.since(oldest)),
                clock_behind,
            });
        }
        Ok(views)
    }

    /// When the longest due of the jobs at the heads of the tiers fell due.
    fn oldest(&mut self, queue: &Queue) -> Done<Option<Timestamp>> {
        let mut oldest: Option<Timestamp> = None;
        let end = first_position(queue.id + 1, 0);
        let mut tier = 0;
        while tier < TIERS && queue.counts.ready > queue.counts.parked {
            let head = self
                .sql(READY_HEAD)?
                .query_row([first_position(queue.id, tier), end], |row| {
                    let run_at = codec::run_at_of(row.get_ref(1)?.as_blob().unwrap_or_default());
                    Ok((row.get::<_, i64>(0)?, run_at))
                })
                .optional()?;
            let Some((position, run_at)) = head else {
                break;
            };
            oldest = oldest.into_iter().chain(run_at).min();
            tier = tier_of_position(position) + 1;
        }
        Ok(oldest)
    }

    fn leases(
        &mut self,
        filter: &LeaseFilter,
        page: &Page,
        now: Timestamp,
    ) -> Done<Paged<LeaseView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let (from, after) = match &page.after {
            None => (0, -1),
            Some(cursor) => pair(cursor).map_err(Fault::Refused)?,
        };
        let queues: Vec<i64> = match &filter.queue {
            Some(name) => match self.known(name)? {
                Some(queue) => vec![self.queues[queue].id],
                None => Vec::new(),
            },
            None => self.queue_ids()?,
        };
        // One more than the page and its end: of the grant in which the last page ended, all may be
        // over.
        let mut grants: Vec<(i64, i64)> = Vec::new();
        for queue in queues {
            let mut select = self.sql(GRANTS_BY_DEADLINE)?;
            let found = select.query_map(
                params![
                    queue,
                    from,
                    after + 1,
                    filter.owner,
                    filter.task,
                    rows as i64 + 2
                ],
                |row| Ok((row.get(1)?, row.get(0)?)),
            )?;
            for grant in found {
                grants.push(grant?);
            }
        }
        grants.sort_unstable();
        let mut views = Vec::new();
        'page: for (deadline, id) in grants {
            let grant = FencingToken::new(id as u64);
            let Some(held) = self.held(grant)? else {
                continue;
            };
            let living: Vec<usize> = held.living().collect();
            for at in living {
                if deadline == from && id + at as i64 <= after {
                    continue;
                }
                if let Some((facts, job)) = self.leased(grant, at)? {
                    views.push((
                        format!("{deadline}.{}", facts.token),
                        self.lease_view(grant, &facts, &job, now),
                    ));
                }
                if views.len() > rows {
                    break 'page;
                }
            }
        }
        Ok(paged(views, rows))
    }

    fn lease_view(
        &self,
        grant: FencingToken,
        facts: &LeaseFacts,
        job: &JobRecord,
        now: Timestamp,
    ) -> LeaseView {
        let held = &self.grants[&grant];
        lease_view(&self.queues[held.queue].name, held, facts, job, now)
    }

    fn job_view(&mut self, id: JobId, now: Timestamp) -> Done<Option<JobView>> {
        let Some(location) = self.find(id)? else {
            return Ok(None);
        };
        if let Location::Leased { grant, at } = location {
            return self.leased_view(grant, at, now);
        }
        let Some(job) = self.read(location)? else {
            return Ok(None);
        };
        Ok(match location {
            Location::Ready { queue, .. } => Some(self.waiting(queue, JobState::Ready, job)),
            Location::Aside {
                queue, state, at, ..
            } => {
                let known = JobState::ALL.into_iter().find(|s| state_code(*s) == state);
                let known = known.ok_or_else(|| corrupt("a job is in no known state"))?;
                let mut view = self.waiting(queue, known, job);
                view.parked = known == JobState::Ready;
                view.settled_at = known.is_settled().then_some(at);
                Some(view)
            }
            Location::Leased { .. } => None,
        })
    }

    fn leased_view(
        &mut self,
        grant: FencingToken,
        at: usize,
        now: Timestamp,
    ) -> Done<Option<JobView>> {
        let Some((facts, job)) = self.leased(grant, at)? else {
            return Ok(None);
        };
        let lease = self.lease_view(grant, &facts, &job, now);
        let queue = self.grants[&grant].queue;
        let mut view = self.waiting(queue, JobState::Leased, job);
        view.lease = Some(lease);
        Ok(Some(view))
    }

    fn waiting(&self, queue: usize, state: JobState, job: JobRecord) -> JobView {
        waiting(&self.queues[queue].name, state, job)
    }

    fn jobs(
        &mut self,
        queue: &QueueName,
        state: JobState,
        page: &Page,
        now: Timestamp,
    ) -> Done<Paged<JobView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let Some(queue) = self.known(queue)? else {
            return Ok(paged(Vec::new(), rows));
        };
        let views = match state {
            JobState::Ready => self.ready(queue, page, rows)?,
            JobState::Leased => self.held_jobs(queue, page, rows, now)?,
            state => self.aside(queue, state, page, rows)?,
        };
        Ok(paged(views, rows))
    }

    /// Those in tier first, then those parked behind their keys.
    fn ready(&mut self, queue: usize, page: &Page, rows: usize) -> Done<Vec<(String, JobView)>> {
        let of = self.queues[queue].id;
        let mut views = Vec::new();
        let mut parked_after = (Vec::new(), -1);
        let mut from = Some(first_position(of, 0));
        if let Some(cursor) = &page.after {
            match cursor.split_at_checked(1) {
                Some(("s", position)) => {
                    let position = single(Some(position), 0).map_err(Fault::Refused)?;
                    from = Some(position + 1);
                }
                Some(("p", rest)) => {
                    parked_after = parked(rest).map_err(Fault::Refused)?;
                    from = None;
                }
                _ => return Err(Fault::Refused(foreign(cursor))),
            }
        }
        if let Some(from) = from.filter(|from| queue_of_position(*from) == of) {
            let mut found: Vec<(i64, Vec<u8>)> = Vec::new();
            {
                let mut select = self.sql(READY_ROWS)?;
                let mut found_rows =
                    select.query([from, first_position(of + 1, 0), rows as i64 + 1])?;
                while let Some(row) = found_rows.next()? {
                    found.push((row.get(0)?, row.get(1)?));
                }
            }
            for (position, record) in found {
                let job = self.decode(record)?;
                views.push((
                    format!("s{position}"),
                    self.waiting(queue, JobState::Ready, job),
                ));
            }
        }
        let left = rows + 1 - views.len().min(rows + 1);
        let mut parked: Vec<(Vec<u8>, i64, Vec<u8>)> = Vec::new();
        {
            let mut select = self.sql(PARKED_PAGE)?;
            let (key, seq) = parked_after;
            let mut found = select.query(params![of, key, seq, left as i64])?;
            while let Some(row) = found.next()? {
                parked.push((row.get(0)?, row.get(1)?, row.get(2)?));
            }
        }
        for (key, seq, record) in parked {
            let job = self.decode(record)?;
            let mut view = self.waiting(queue, JobState::Ready, job);
            view.parked = true;
            views.push((format!("p{seq}.{}", hex(&key)), view));
        }
        Ok(views)
    }

    fn parked(&mut self, queue: &QueueName, page: &Page) -> Done<Paged<ParkedView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let Some(queue) = self.known(queue)? else {
            return Ok(paged(Vec::new(), rows));
        };
        let of = self.queues[queue].id;
        let mut select = self.sql(PARKED_KEYS)?;
        let (from, most) = (after_key(page), ParkedView::MOST as i64);
        let mut found = select.query(params![of, from, rows as i64 + 1, most])?;
        let mut views = Vec::new();
        while let Some(row) = found.next()? {
            let jobs = row.get::<_, i64>(1)? as u64;
            views.push(parked_view(row.get(0)?, jobs).ok_or_else(|| corrupt("a key is no key"))?);
        }
        Ok(paged(views, rows))
    }

    fn held_jobs(
        &mut self,
        queue: usize,
        page: &Page,
        rows: usize,
        now: Timestamp,
    ) -> Done<Vec<(String, JobView)>> {
        let after = single(page.after.as_deref(), -1).map_err(Fault::Refused)?;
        let of = self.queues[queue].id;
        let least = after.saturating_sub(limits::GRANT_LEASES as i64);
        let grants: Vec<i64> = self
            .sql(GRANTS_BY_TOKEN)?
            .query_map(params![of, after + 1, least, rows as i64 + 2], |row| {
                row.get(0)
            })?
            .collect::<Result<_, _>>()?;
        let mut views = Vec::new();
        'page: for id in grants {
            let grant = FencingToken::new(id as u64);
            let Some(held) = self.held(grant)? else {
                continue;
            };
            let living = held.living().filter(|at| id + *at as i64 > after);
            for at in living.collect::<Vec<_>>() {
                if let Some(view) = self.leased_view(grant, at, now)? {
                    views.push(((id + at as i64).to_string(), view));
                }
                if views.len() > rows {
                    break 'page;
                }
            }
        }
        Ok(views)
    }

    fn aside(
        &mut self,
        queue: usize,
        state: JobState,
        page: &Page,
        rows: usize,
    ) -> Done<Vec<(String, JobView)>> {
        let (after, seq) = match &page.after {
            None => (-1, -1),
            Some(cursor) => pair(cursor).map_err(Fault::Refused)?,
        };
        let of = self.queues[queue].id;
        let mut found: Vec<(i64, i64, Vec<u8>)> = Vec::new();
        {
            let mut select = self.sql(ASIDE_PAGE)?;
            let code = state_code(state);
            let mut found_rows = select.query(params![of, code, after, seq, rows as i64 + 1])?;
            while let Some(row) = found_rows.next()? {
                found.push((row.get(0)?, row.get(1)?, row.get(2)?));
            }
        }
        let mut views = Vec::with_capacity(found.len());
        for (at, seq, record) in found {
            let job = self.decode(record)?;
            let mut view = self.waiting(queue, state, job);
            view.settled_at = state.is_settled().then(|| moment(at));
            views.push((format!("{at}.{seq}"), view));
        }
        Ok(views)
    }

    fn audit(&mut self, page: &Page) -> Done<Paged<AuditView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let before = single(page.after.as_deref(), i64::MAX).map_err(Fault::Refused)?;
        let mut select = self.sql(AUDIT_PAGE)?;
        let mut found = select.query(params![self.namespace, before, rows as i64 + 1])?;
        let mut views = Vec::new();
        while let Some(row) = found.next()? {
            let tokens: String = row.get(6)?;
            let view = AuditView {
                at: moment(row.get(1)?),
                actor: row.get(2)?,
                reason: row.get(3)?,
                command: row.get(4)?,
                done: row.get::<_, i64>(5)? as u64,
                tokens: serde_json::from_str(&tokens)
                    .map_err(|_| corrupt("an audit record cannot be read"))?,
            };
            views.push((row.get::<_, i64>(0)?.to_string(), view));
        }
        Ok(paged(views, rows))
    }
}
