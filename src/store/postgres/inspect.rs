//! inspect: look, and change nothing.
//!
//! A page's cursor is the key of its last row. All of an answer is read from one snapshot.

use tokio_postgres::GenericClient;

use super::fault::{Done, Fault, corrupt};
use super::place::Place;
use super::tally::Tally;
use super::tx::{GrantKey, Tx, args, moment};
use crate::clock::Timestamp;
use crate::inspect::{
    AuditView, JobView, LeaseFilter, LeaseView, Page, Paged, ParkedView, Query, QueueView, View,
};
use crate::job::{JobId, JobRecord, JobState, QueueName};
use crate::lease::FencingToken;
use crate::limits;
use crate::rules::ends::LeaseFacts;
use crate::rules::issue::Issuer;
use crate::store::codec;
use crate::store::sql::cursor::{after_key, foreign, hex, paged, pair, parked, rows, single};
use crate::store::sql::view::{lease_view, parked_view, state_code, waiting};

const SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; \
    SET LOCAL statement_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '10s'";

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn inspect(&mut self, query: &Query) -> Done<View> {
        self.reads = true;
        let begin = async { Ok(self.db.batch_execute(SNAPSHOT).await?) };
        let ((), now) = tokio::try_join!(biased; begin, self.clock())?;
        self.now = now;
        Ok(match query {
            Query::Queues => View::Queues(self.queue_views().await?),
            Query::Leases { filter, page } => View::Leases(self.leases(filter, page).await?),
            Query::Jobs { queue, state, page } => View::Jobs(self.jobs(queue, *state, page).await?),
            Query::Parked { queue, page } => View::Parked(self.parked(queue, page).await?),
            Query::Job(id) => View::Job(self.job_view(*id).await?.map(Box::new)),
            Query::Audit { page } => View::Audit(self.audit(page).await?),
        })
    }

    async fn queue_views(&mut self) -> Done<Vec<QueueView>> {
        let rows = self
            .rows("queues", args![self.base.namespace => TEXT])
            .await?;
        let mut views = Vec::with_capacity(rows.len());
        for row in rows {
            let id: i32 = row.try_get(0)?;
            let name: String = row.try_get(1)?;
            let tally: Option<Vec<i64>> = row.try_get(4)?;
            let (counts, ledger) = Tally::read(&tally.unwrap_or_default());
            let issuer = Issuer {
                last: row.try_get::<_, i64>(5)? as u64,
                floor: row.try_get::<_, i64>(6)? as u64,
            };
            let heads = self.rows("ready_heads", args![id => INT4]).await?;
            let mut oldest: Option<Timestamp> = None;
            for head in heads {
                let run_at = codec::run_at_of(head.try_get(0)?);
                oldest = oldest.into_iter().chain(run_at).min();
            }
            views.push(QueueView {
                queue: QueueName::new(name).map_err(|_| corrupt("a queue's name is not a name"))?,
                paused: row.try_get(2)?,
                relaxed: row.try_get(3)?,
                counts,
                ledger,
                oldest_ready: oldest.map(|oldest| self.now.since(oldest)),
                clock_behind: issuer.clock_behind(self.now),
            });
        }
        Ok(views)
    }

    async fn leases(&mut self, filter: &LeaseFilter, page: &Page) -> Done<Paged<LeaseView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let (from, after) = match &page.after {
            None => (0, -1),
            Some(cursor) => pair(cursor).map_err(Fault::Refused)?,
        };
        let queues: Vec<i32> = if let Some(name) = &filter.queue {
            let found = self.named(&[name.as_str()]).await?;
            self.keep(&found)?;
            let queue = self.known(name).map(|queue| self.queues[queue].id);
            queue.into_iter().collect()
        } else {
            let args = args![self.base.namespace => TEXT];
            let found = self.rows("queue_ids", args).await?;
            let ids = found.iter().map(|row| Ok(row.try_get(0)?));
            ids.collect::<Done<_>>()?
        };
        // One more than the page and its end: of the grant in which the last page ended, all may be
        // over.
        let most = rows as i64 + 2;
        let mut grants: Vec<(i64, i64, usize)> = Vec::new();
        for queue in queues {
            let args = args![queue => INT4, from => INT8, after + 1 => INT8,
                             filter.owner.as_deref() => TEXT, filter.task.as_deref() => TEXT,
                             most => INT8];
            let found = self.rows("grants_by_deadline", args).await?;
            for row in found {
                if let Some(at) = self.queue_of_row(row.try_get(0)?).await? {
                    grants.push((row.try_get(2)?, row.try_get(1)?, at));
                }
            }
        }
        grants.sort_unstable();
        let mut views = Vec::new();
        'page: for (deadline, id, queue) in grants {
            let grant = (queue, FencingToken::new(id as u64));
            self.fetch(&[grant]).await?;
            let Some(held) = self.held(grant) else {
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
                        self.lease_view(grant, &facts, &job),
                    ));
                }
                if views.len() > rows {
                    break 'page;
                }
            }
        }
        Ok(paged(views, rows))
    }

    fn lease_view(&self, grant: GrantKey, facts: &LeaseFacts, job: &JobRecord) -> LeaseView {
        let queue = &self.queues[grant.0].name;
        lease_view(queue, &self.grants[&grant], facts, job, self.now)
    }

    async fn job_view(&mut self, id: JobId) -> Done<Option<JobView>> {
        let Some(place) = self.find(id).await? else {
            return Ok(None);
        };
        let Some(job) = self.read(&place)? else {
            let Place::Leased { grant, at } = place else {
                return Ok(None);
            };
            return self.leased_view(grant, at).await;
        };
        Ok(match place {
            Place::Line { queue, .. } => Some(self.waiting(queue, JobState::Ready, job)),
            Place::Aside {
                queue, state, at, ..
            } => {
                let known = JobState::ALL.into_iter().find(|s| state_code(*s) == state);
                let known = known.ok_or_else(|| corrupt("a job is in no known state"))?;
                let mut view = self.waiting(queue, known, job);
                view.parked = known == JobState::Ready;
                view.settled_at = known.is_settled().then_some(at);
                Some(view)
            }
            Place::Leased { .. } => None,
        })
    }

    async fn leased_view(&mut self, grant: GrantKey, at: usize) -> Done<Option<JobView>> {
        self.fetch(&[grant]).await?;
        let Some((facts, job)) = self.leased(grant, at)? else {
            return Ok(None);
        };
        let lease = self.lease_view(grant, &facts, &job);
        let mut view = self.waiting(grant.0, JobState::Leased, job);
        view.lease = Some(lease);
        Ok(Some(view))
    }

    fn waiting(&self, queue: usize, state: JobState, job: JobRecord) -> JobView {
        waiting(&self.queues[queue].name, state, job)
    }

    async fn jobs(
        &mut self,
        queue: &QueueName,
        state: JobState,
        page: &Page,
    ) -> Done<Paged<JobView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let found = self.named(&[queue.as_str()]).await?;
        self.keep(&found)?;
        let Some(queue) = self.known(queue) else {
            return Ok(paged(Vec::new(), rows));
        };
        let views = match state {
            JobState::Ready => self.ready(queue, page, rows).await?,
            JobState::Leased => self.held_jobs(queue, page, rows).await?,
            state => self.aside(queue, state, page, rows).await?,
        };
        Ok(paged(views, rows))
    }

    /// Those in line first, then those parked behind their keys.
    async fn ready(
        &mut self,
        queue: usize,
        page: &Page,
        rows: usize,
    ) -> Done<Vec<(String, JobView)>> {
        let of = self.queues[queue].id;
        let mut views = Vec::new();
        let mut parked_after = (Vec::new(), -1_i64);
        let mut from = Some((-1_i16, 0_i64));
        if let Some(cursor) = &page.after {
            match cursor.split_at_checked(1) {
                Some(("s", at)) => {
                    let (line, place) = pair(at).map_err(Fault::Refused)?;
                    from = Some((line as i16, place));
                }
                Some(("p", rest)) => {
                    parked_after = parked(rest).map_err(Fault::Refused)?;
                    from = None;
                }
                _ => return Err(Fault::Refused(foreign(cursor))),
            }
        }
        if let Some((line, place)) = from {
            let args = args![of => INT4, line => INT2, place => INT8, rows as i64 + 1 => INT8];
            for row in self.rows("ready_page", args).await? {
                let (line, place): (i16, i64) = (row.try_get(0)?, row.try_get(1)?);
                let job = self.decode(row.try_get(2)?)?;
                views.push((
                    format!("s{line}.{place}"),
                    self.waiting(queue, JobState::Ready, job),
                ));
            }
        }
        let left = (rows + 1 - views.len().min(rows + 1)) as i64;
        let (key, seq) = parked_after;
        let args = args![of => INT4, key => BYTEA, seq => INT8, left => INT8];
        for row in self.rows("parked_page", args).await? {
            let (key, seq): (Vec<u8>, i64) = (row.try_get(0)?, row.try_get(1)?);
            let job = self.decode(row.try_get(2)?)?;
            let mut view = self.waiting(queue, JobState::Ready, job);
            view.parked = true;
            views.push((format!("p{seq}.{}", hex(&key)), view));
        }
        Ok(views)
    }

    async fn parked(&mut self, queue: &QueueName, page: &Page) -> Done<Paged<ParkedView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let found = self.named(&[queue.as_str()]).await?;
        self.keep(&found)?;
        let Some(queue) = self.known(queue) else {
            return Ok(paged(Vec::new(), rows));
        };
        let of = self.queues[queue].id;
        let (from, most) = (after_key(page), ParkedView::MOST as i64);
        let args = args![of => INT4, from => BYTEA, rows as i64 + 1 => INT8, most => INT8];
        let mut views = Vec::new();
        for row in self.rows("parked_keys", args).await? {
            let jobs = row.try_get::<_, i64>(1)? as u64;
            let view = parked_view(row.try_get(0)?, jobs);
            views.push(view.ok_or_else(|| corrupt("a key is no key"))?);
        }
        Ok(paged(views, rows))
    }

    async fn held_jobs(
        &mut self,
        queue: usize,
        page: &Page,
        rows: usize,
    ) -> Done<Vec<(String, JobView)>> {
        let after = single(page.after.as_deref(), -1).map_err(Fault::Refused)?;
        let of = self.queues[queue].id;
        let least = after.saturating_sub(limits::GRANT_LEASES as i64);
        let args = args![of => INT4, after + 1 => INT8, least => INT8, rows as i64 + 2 => INT8];
        let found = self.rows("grants_by_token", args).await?;
        let mut views = Vec::new();
        'page: for row in found {
            let id: i64 = row.try_get(0)?;
            let grant = (queue, FencingToken::new(id as u64));
            self.fetch(&[grant]).await?;
            let Some(held) = self.held(grant) else {
                continue;
            };
            let living = held.living().filter(|at| id + *at as i64 > after);
            for at in living.collect::<Vec<_>>() {
                if let Some(view) = self.leased_view(grant, at).await? {
                    views.push(((id + at as i64).to_string(), view));
                }
                if views.len() > rows {
                    break 'page;
                }
            }
        }
        Ok(views)
    }

    async fn aside(
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
        let code = state_code(state) as i16;
        let args = args![of => INT4, code => INT2, after => INT8, seq => INT8,
                         rows as i64 + 1 => INT8];
        let found = self.rows("aside_page", args).await?;
        let mut views = Vec::with_capacity(found.len());
        for row in found {
            let (at, seq): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            let job = self.decode(row.try_get(2)?)?;
            let mut view = self.waiting(queue, state, job);
            view.settled_at = state.is_settled().then(|| moment(at));
            views.push((format!("{at}.{seq}"), view));
        }
        Ok(views)
    }

    async fn audit(&mut self, page: &Page) -> Done<Paged<AuditView>> {
        let rows = rows(page).map_err(Fault::Refused)?;
        let before = single(page.after.as_deref(), i64::MAX).map_err(Fault::Refused)?;
        let args = args![self.base.namespace => TEXT, before => INT8, rows as i64 + 1 => INT8];
        let mut views = Vec::new();
        for row in self.rows("audit_page", args).await? {
            let tokens: String = row.try_get(6)?;
            let view = AuditView {
                at: moment(row.try_get(1)?),
                actor: row.try_get(2)?,
                reason: row.try_get(3)?,
                command: row.try_get(4)?,
                done: row.try_get::<_, i64>(5)? as u64,
                tokens: serde_json::from_str(&tokens)
                    .map_err(|_| corrupt("an audit record cannot be read"))?,
            };
            views.push((row.try_get::<_, i64>(0)?.to_string(), view));
        }
        Ok(paged(views, rows))
    }

    /// Whether one of the queues has a job in line, and when the first of their scheduled jobs is due.
    pub(super) async fn look(
        &self,
        queues: &[QueueName],
        suspects: bool,
    ) -> Done<(bool, Option<i64>)> {
        let names: Vec<&str> = queues.iter().map(QueueName::as_str).collect();
        let args = args![self.base.namespace => TEXT, names => TEXT_ARRAY, suspects => BOOL];
        let rows = self.rows("look", args).await?;
        let row = rows.first().ok_or_else(|| corrupt("no answer"))?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }
}
