//! inspect: look, and change nothing.
//!
//! Each answer is one statement without a transaction around it. A page's cursor is the key of its
//! last row.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{GenericClient, Row};

use super::fault::{Done, Fault, corrupt};
use super::record::{Json, key, record};
use super::tally::Tally;
use super::tx::{Arg, Tx, args, moment, uuid};
use crate::clock::Timestamp;
use crate::history::Progress;
use crate::inspect::{
    AuditView, JobView, LeaseFilter, LeaseView, Page, Paged, ParkedView, Query, QueueView, View,
};
use crate::job::{JobId, JobRecord, JobState, QueueName};
use crate::rules::issue::Issuer;
use crate::store::cursor::{after_key, foreign, hex, paged, pair, parked, rows, single};
use crate::token::FencingToken;

/// The column `state`: its codes are the positions here, beside the names that the functions know
/// (`state.READY`) and the states they stand for. A job that is parked is ready, too.
pub(super) const STATES: [(&str, JobState); 7] = [
    ("SCHEDULED", JobState::Scheduled),
    ("PARKED", JobState::Ready),
    ("READY", JobState::Ready),
    ("COMPLETED", JobState::Completed),
    ("DEAD", JobState::Dead),
    ("CANCELLED", JobState::Cancelled),
    ("LEASED", JobState::Leased),
];

/// What [`Query`] is answered with where nothing is stored yet.
pub(super) fn nothing(query: &Query) -> View {
    match query {
        Query::Queues => View::Queues(Vec::new()),
        Query::Leases { .. } => View::Leases(none()),
        Query::Jobs { .. } => View::Jobs(none()),
        Query::Parked { .. } => View::Parked(none()),
        Query::Job(_) => View::Job(None),
        Query::Audit { .. } => View::Audit(none()),
    }
}

fn none<T>() -> Paged<T> {
    Paged {
        rows: Vec::new(),
        next: None,
    }
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn inspect(&self, query: &Query) -> Done<View> {
        Ok(match query {
            Query::Queues => View::Queues(self.queues().await?),
            Query::Leases { filter, page } => View::Leases(self.leases(filter, page).await?),
            Query::Jobs { queue, state, page } => View::Jobs(self.jobs(queue, *state, page).await?),
            Query::Parked { queue, page } => View::Parked(self.parked(queue, page).await?),
            Query::Job(id) => View::Job(self.job(*id).await?.map(Box::new)),
            Query::Audit { page } => View::Audit(self.audit(page).await?),
        })
    }

    async fn queues(&self) -> Done<Vec<QueueView>> {
        let args = args![self.base.namespace => TEXT, self.base.by_hand() => INT8];
        let mut views = Vec::new();
        for row in self.rows("queues", args).await? {
            let counts: Option<Vec<i64>> = column(&row, "counts")?;
            let (counts, ledger) = Tally::read(&counts.unwrap_or_default());
            let issuer = Issuer {
                last: column::<i64>(&row, "last")? as u64,
                floor: column::<i64>(&row, "floor")? as u64,
            };
            let now = moment(column(&row, "now_")?);
            let oldest: Option<i64> = column(&row, "oldest")?;
            views.push(QueueView {
                queue: queue_name(column(&row, "name")?)?,
                paused: column(&row, "paused")?,
                relaxed: column(&row, "relaxed")?,
                counts,
                ledger,
                oldest_ready: oldest.map(|oldest| now.since(moment(oldest))),
                clock_behind: issuer.clock_behind(now),
            });
        }
        Ok(views)
    }

    async fn leases(&self, filter: &LeaseFilter, page: &Page) -> Done<Paged<LeaseView>> {
        let most = rows(page).map_err(Fault::Refused)?;
        let (from, after) = match &page.after {
            None => (0, -1),
            Some(cursor) => pair(cursor).map_err(Fault::Refused)?,
        };
        let queue = filter.queue.as_ref().map(QueueName::as_str);
        let args = args![self.base.namespace => TEXT, self.base.by_hand() => INT8, from => INT8,
                         after => INT8, filter.owner.as_deref() => TEXT,
                         filter.task.as_deref() => TEXT, most as i64 + 1 => INT8, queue => TEXT];
        let mut views = Vec::new();
        for row in self.rows("leases", args).await? {
            let queue = queue_name(column(&row, "of_queue")?)?;
            let view = lease(&row, &queue, &record(&row, 0)?)?;
            let deadline: i64 = column(&row, "deadline")?;
            views.push((format!("{deadline}.{}", view.token), view));
        }
        Ok(paged(views, most))
    }

    async fn job(&self, id: JobId) -> Done<Option<JobView>> {
        let args =
            args![self.base.namespace => TEXT, self.base.by_hand() => INT8, uuid(id) => UUID];
        let rows = self.rows("job", args).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let queue = queue_name(column(row, "of_queue")?)?;
        view(row, &queue).map(Some)
    }

    async fn jobs(&self, queue: &QueueName, state: JobState, page: &Page) -> Done<Paged<JobView>> {
        let most = rows(page).map_err(Fault::Refused)?;
        let mut views = Vec::new();
        match (state, &page.after) {
            (JobState::Ready, None) => {
                self.ready(queue, (-1, 0), most, &mut views).await?;
                self.behind_keys(queue, (Vec::new(), -1), most, &mut views)
                    .await?;
            }
            (JobState::Ready, Some(cursor)) => match cursor.split_at_checked(1) {
                Some(("s", at)) => {
                    let after = pair(at).map_err(Fault::Refused)?;
                    self.ready(queue, after, most, &mut views).await?;
                    self.behind_keys(queue, (Vec::new(), -1), most, &mut views)
                        .await?;
                }
                Some(("p", at)) => {
                    let after = parked(at).map_err(Fault::Refused)?;
                    self.behind_keys(queue, after, most, &mut views).await?;
                }
                _ => return Err(Fault::Refused(foreign(cursor))),
            },
            (JobState::Leased, after) => {
                let after = single(after.as_deref(), -1).map_err(Fault::Refused)?;
                let at = |row: &Row| Ok(column::<i64>(row, "token")?.to_string());
                let clock = self.base.by_hand();
                let more: &[Arg<'_>] = args![clock => INT8];
                let page = ("leased_page", (after, 0), more);
                self.page(queue, page, most, at, &mut views).await?;
            }
            (state, after) => {
                let after = match after {
                    None => (-1, -1),
                    Some(cursor) => pair(cursor).map_err(Fault::Refused)?,
                };
                let by = if state.is_settled() {
                    "settled_at"
                } else {
                    "run_at"
                };
                let at = |row: &Row| {
                    let (at, seq): (i64, i64) = (column(row, by)?, column(row, "seq")?);
                    Ok(format!("{at}.{seq}"))
                };
                let code = STATES.iter().position(|(_, known)| *known == state);
                let code = code.unwrap_or_default() as i16;
                let more: &[Arg<'_>] = args![code => INT2];
                let page = if state.is_settled() {
                    ("settled_page", after, more)
                } else {
                    ("scheduled_page", after, &[][..])
                };
                self.page(queue, page, most, at, &mut views).await?;
            }
        }
        Ok(paged(views, most))
    }

    /// Those in line, in the order of service.
    async fn ready(
        &self,
        queue: &QueueName,
        (line, place): (i64, i64),
        most: usize,
        views: &mut Vec<(String, JobView)>,
    ) -> Done<()> {
        let at = |row: &Row| {
            let (line, place): (i16, i64) = (column(row, "line")?, column(row, "place")?);
            Ok(format!("s{line}.{place}"))
        };
        let page = ("ready_page", (line, place), &[][..]);
        self.page(queue, page, most, at, views).await
    }

    async fn page(
        &self,
        queue: &QueueName,
        (name, (a, b), more): (&'static str, (i64, i64), &[Arg<'_>]),
        most: usize,
        at: impl Fn(&Row) -> Done<String>,
        views: &mut Vec<(String, JobView)>,
    ) -> Done<()> {
        let (line, most) = (a as i16, most as i64 + 1);
        let name_ = queue.as_str();
        let mut args = args![self.base.namespace => TEXT, name_ => TEXT, a => INT8,
                             b => INT8, most => INT8]
        .to_vec();
        if name == "ready_page" {
            args[2] = (&line, Type::INT2);
        }
        args.extend_from_slice(more);
        for row in self.rows(name, &args).await? {
            views.push((at(&row)?, view(&row, queue)?));
        }
        Ok(())
    }

    /// Those parked behind their keys, as far as there is room left.
    async fn behind_keys(
        &self,
        queue: &QueueName,
        (key, seq): (Vec<u8>, i64),
        most: usize,
        views: &mut Vec<(String, JobView)>,
    ) -> Done<()> {
        let left = (most + 1).saturating_sub(views.len()) as i64;
        let args = args![self.base.namespace => TEXT, queue.as_str() => TEXT, key => BYTEA,
                         seq => INT8, left => INT8];
        for row in self.rows("parked_page", args).await? {
            let (key, seq): (Vec<u8>, i64) = (column(&row, "exclusive_key")?, column(&row, "seq")?);
            let view = view(&row, queue)?;
            views.push((format!("p{seq}.{}", hex(&key)), view));
        }
        Ok(())
    }

    async fn parked(&self, queue: &QueueName, page: &Page) -> Done<Paged<ParkedView>> {
        let most = rows(page).map_err(Fault::Refused)?;
        let args = args![self.base.namespace => TEXT, queue.as_str() => TEXT,
                         after_key(page) => BYTEA, most as i64 + 1 => INT8,
                         ParkedView::MOST as i64 => INT8];
        let mut views = Vec::new();
        for row in self.rows("parked_keys", args).await? {
            let key = key(column(&row, "key")?)?;
            let jobs = column::<i64>(&row, "jobs")? as u64;
            views.push((key.as_str().to_owned(), ParkedView::new(key, jobs)));
        }
        Ok(paged(views, most))
    }

    async fn audit(&self, page: &Page) -> Done<Paged<AuditView>> {
        let most = rows(page).map_err(Fault::Refused)?;
        let before = single(page.after.as_deref(), i64::MAX).map_err(Fault::Refused)?;
        let args = args![self.base.namespace => TEXT, before => INT8, most as i64 + 1 => INT8];
        let mut views = Vec::new();
        for row in self.rows("audit_page", args).await? {
            let tokens: &str = column(&row, "tokens")?;
            let view = AuditView {
                at: moment(column(&row, "at")?),
                actor: column(&row, "actor")?,
                reason: column(&row, "reason")?,
                command: column(&row, "command")?,
                done: column::<i64>(&row, "done")? as u64,
                tokens: serde_json::from_str(tokens)
                    .map_err(|_| corrupt("an audit record cannot be read"))?,
            };
            views.push((column::<i64>(&row, "id")?.to_string(), view));
        }
        Ok(paged(views, most))
    }
}

fn queue_name(name: &str) -> Done<QueueName> {
    QueueName::new(name).map_err(|_| corrupt("a queue's name is not a name"))
}

fn view(row: &Row, queue: &QueueName) -> Done<JobView> {
    let job = record(row, 0)?;
    let code: i16 = column(row, "state")?;
    let state = usize::try_from(code).ok().and_then(|code| STATES.get(code));
    let (name, state) = *state.ok_or_else(|| corrupt("a job is in no known state"))?;
    let held = match state {
        JobState::Leased => Some(lease(row, queue, &job)?),
        _ => None,
    };
    let mut view = JobView::new(queue.clone(), state, Arc::new(job));
    view.parked = name == "PARKED";
    view.settled_at = column::<Option<i64>>(row, "settled_at")?.map(moment);
    view.lease = held;
    Ok(view)
}

fn lease(row: &Row, queue: &QueueName, job: &JobRecord) -> Done<LeaseView> {
    let (owner, task): (&str, &str) = (column(row, "owner")?, column(row, "task")?);
    let token = FencingToken::new(column::<i64>(row, "token")? as u64);
    let (now, deadline): (i64, i64) = (column(row, "now_")?, column(row, "deadline")?);
    let (now, deadline): (Timestamp, Timestamp) = (moment(now), moment(deadline));
    let progress: Option<Json<Progress>> = column(row, "progress")?;
    let mut view = LeaseView::new(queue.clone(), job, token, owner.into(), task.into());
    view.granted_at = moment(column(row, "granted_at")?);
    view.time_left = deadline.since(now);
    view.term = Duration::from_nanos(column::<i64>(row, "term")? as u64);
    view.renewals = column::<i32>(row, "renewals")?.unsigned_abs();
    view.cancel = column(row, "cancel")?;
    view.progress = progress.map(|Json(progress)| progress);
    Ok(view)
}

/// The value of a column by its name.
fn column<'r, T: FromSql<'r>>(row: &'r Row, name: &str) -> Done<T> {
    Ok(row.try_get(name)?)
}
