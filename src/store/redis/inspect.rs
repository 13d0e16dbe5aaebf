//! inspect: look, and change nothing.

use std::sync::Arc;

use redis::Value;

use super::RedisStore;
use super::control::{Entry, letter};
use super::queue::{Partition, Queue};
use super::wire::{In, garbled};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::inspect::{
    AuditView, JobView, LeaseFilter, LeaseView, Ledger, Page, Paged, ParkedView, Query, QueueView,
    View,
};
use crate::job::{JobState, Key, QueueName};
use crate::lease::FencingToken;
use crate::limits;
use crate::rules::issue::Issuer;
use crate::store::bounded;
use crate::store::codec::{self, Kinds};

/// Counters of a partition, by name: the ledger, and what was lost.
pub(super) const LEDGER: [&str; LEDGER_LENGTH] = [
    "enqueued",
    "granted",
    "completed",
    "retried",
    "surrendered",
    "buried",
    "cancelled",
    "expired_deadline",
    "expired_stalled",
    "expired_lifetime",
    "revoked",
    "late",
    "fenced",
    "pruned",
    "purged",
    "dead_by_expiry",
    "lost_jobs",
    "lost_grants",
    "lost_books",
    "lost_notes",
    "lost_keys",
];
const LEDGER_LENGTH: usize = 16 + LOSSES;
/// How many of them, the last, say what was lost.
pub(super) const LOSSES: usize = 5;
/// Those of them that say how leases ended, in the order of their codes in a record.
pub(super) const ENDINGS: std::ops::Range<usize> = 2..11;

fn no_cursor(cursor: &str) -> Error {
    let found = format!("{} bytes of text", cursor.len());
    Error::invalid("page", found, "a cursor of this store")
}

/// A lease's view with its place in the order of all.
type Row = ((Timestamp, FencingToken, usize), JobView);

impl RedisStore {
    pub(super) async fn view(&self, query: &Query) -> Result<View> {
        Ok(match query {
            Query::Queues => View::Queues(self.queue_views().await?),
            Query::Leases { filter, page } => View::Leases(self.leases(filter, page).await?),
            Query::Jobs { queue, state, page } => View::Jobs(self.jobs(queue, *state, page).await?),
            Query::Parked { queue, page } => View::Parked(self.parked(queue, page).await?),
            Query::Job(id) => {
                let found = match self.find(*id).await? {
                    Some((partition, mut body)) => {
                        let now = self.now().await?;
                        let row = row(&mut body, &partition.queue, now, &mut Kinds::default())?;
                        Some(Box::new(row.1))
                    }
                    None => None,
                };
                View::Job(found)
            }
            Query::Audit { page } => View::Audit(self.audit(page).await?),
        })
    }

    pub(super) async fn ask(
        &self,
        partition: &Partition,
        question: &str,
        after: &str,
        rows: usize,
        more: [&str; 2],
    ) -> Result<(Timestamp, In)> {
        let rows = rows.to_string();
        let args = [question, after, &rows, more[0], more[1]].map(str::as_bytes);
        let function = &self.functions().inspect;
        let reply = self.look(function, partition.keys(), &args).await?;
        Ok((reply.now, reply.body))
    }

    pub(super) async fn queue_views(&self) -> Result<Vec<QueueView>> {
        let mut views = Vec::new();
        for queue in self.all_queues().await? {
            let partitions: Vec<_> = queue.all(0).collect();
            let partitions: Vec<_> = partitions.iter().collect();
            let (view, is_there) = self.view_of(&queue.name, &partitions).await?;
            // A queue is put on the list before its first job is stored.
            if is_there {
                views.push(view);
            }
        }
        Ok(views)
    }

    /// What some partitions of a queue say together, and whether one of them is there.
    pub(super) async fn view_of(
        &self,
        name: &QueueName,
        partitions: &[&Partition],
    ) -> Result<(QueueView, bool)> {
        let (mut view, mut is_there) = (QueueView::new(name.clone()), false);
        for partition in partitions {
            let (now, mut body) = self.ask(partition, "queue", "", 0, ["", ""]).await?;
            if !body.is_empty() {
                is_there = true;
                add_partition(&mut view, &mut body, now)?;
            }
        }
        Ok((view, is_there))
    }

    async fn jobs(
        &self,
        queue: &QueueName,
        state: JobState,
        page: &Page,
    ) -> Result<Paged<JobView>> {
        bounded("rows", page.rows, limits::PAGE_ROWS)?;
        let (mut number, mut after) = match &page.after {
            None => (0, String::new()),
            Some(cursor) => jobs_cursor(cursor)?,
        };
        let mut rows = Vec::new();
        let Some(queue) = self.queue(queue).await? else {
            return Ok(Paged { rows, next: None });
        };
        let mut kinds = Kinds::default();
        while let Some(partition) = queue.partition(number) {
            // One more than asked for tells whether there is a next page.
            let wanted = page.rows - rows.len();
            let ask = self.ask(&partition, letter(state), &after, wanted, ["", ""]);
            let (now, mut body) = ask.await?;
            after = String::new();
            if !body.is_empty() {
                for _ in 0..body.u32()? {
                    rows.push(row(&mut body, &queue, now, &mut kinds)?.1);
                }
                after.push_str(&body.text()?);
            }
            if after.is_empty() {
                number += 1;
            }
            if rows.len() == page.rows {
                break;
            }
        }
        let next = self.more_jobs(&queue, state, number, &after).await?;
        Ok(Paged { rows, next })
    }

    /// Where a full page goes on, if there is anything behind it.
    async fn more_jobs(
        &self,
        queue: &Arc<Queue>,
        state: JobState,
        number: u16,
        after: &str,
    ) -> Result<Option<String>> {
        let (mut number, mut after) = (number, after.to_owned());
        while let Some(partition) = queue.partition(number) {
            let ask = self.ask(&partition, letter(state), &after, 1, ["", ""]);
            let (_, mut body) = ask.await?;
            let mut further = String::new();
            if !body.is_empty() {
                if body.u32()? > 0 {
                    return Ok(Some(format!("{number}/{after}")));
                }
                // A step passes by so many stale places at most.
                further.push_str(&body.text()?);
            }
            if further.is_empty() {
                number += 1;
            }
            after = further;
        }
        Ok(None)
    }

    async fn parked(&self, queue: &QueueName, page: &Page) -> Result<Paged<ParkedView>> {
        bounded("rows", page.rows, limits::PAGE_ROWS)?;
        let (mut number, mut after) = match &page.after {
            None => (0, String::new()),
            Some(cursor) => {
                let parts = cursor.split_once('/');
                let (number, key) = parts.ok_or_else(|| no_cursor(cursor))?;
                let number = number.parse().map_err(|_| no_cursor(cursor))?;
                (number, format!("={key}"))
            }
        };
        let mut rows = Vec::new();
        let Some(queue) = self.queue(queue).await? else {
            return Ok(Paged { rows, next: None });
        };
        let mut next = None;
        while let Some(partition) = queue.partition(number) {
            // One more than asked for tells whether there is a next page.
            let wanted = (page.rows + 1 - rows.len()).to_string();
            let args = [after.as_bytes(), wanted.as_bytes()];
            let function = &self.functions().parked;
            let mut body = self.look(function, partition.keys(), &args).await?.body;
            while !body.is_empty() {
                let key = Key::new(body.text()?).map_err(|_| garbled())?;
                let jobs = body.u64()?.min(ParkedView::MOST);
                if rows.len() == page.rows {
                    return Ok(Paged { rows, next });
                }
                next = Some(format!("{number}/{key}"));
                rows.push(ParkedView { key, jobs });
            }
            number += 1;
            after.clear();
        }
        Ok(Paged { rows, next: None })
    }

    async fn leases(&self, filter: &LeaseFilter, page: &Page) -> Result<Paged<LeaseView>> {
        bounded("rows", page.rows, limits::PAGE_ROWS)?;
        let after = page.after.as_deref().map(leases_cursor).transpose()?;
        let partitions = match &filter.queue {
            None => self.all_partitions().await?,
            Some(name) => {
                let queue = self.queue(name).await?;
                queue.iter().flat_map(|queue| queue.all(0)).collect()
            }
        };
        let wanted = |name: &Option<Arc<str>>| {
            let name = name.as_ref();
            name.map_or(String::new(), |name| format!("={name}"))
        };
        let more = [wanted(&filter.owner), wanted(&filter.task)];
        let mut kinds = Kinds::default();
        let mut rows: Vec<Row> = Vec::new();
        for (at, partition) in partitions.iter().enumerate() {
            // Two issuers can give one number: the partition decides.
            let from = after.map_or(String::new(), |(deadline, token, last)| {
                let token = token - u64::from(at > last);
                format!("{deadline}:{token}")
            });
            let more = [more[0].as_str(), &more[1]];
            let (mut from, mut wanted) = (from, page.rows + 1);
            // A step looks at so many grants, whether or not they are asked for.
            while wanted > 0 {
                let ask = self.ask(partition, "leases", &from, wanted, more);
                let (now, mut body) = ask.await?;
                let count = body.u32()?;
                for _ in 0..count {
                    let (deadline, view) = row(&mut body, &partition.queue, now, &mut kinds)?;
                    let token = view.lease.as_ref().map(|lease| lease.token);
                    let token = token.ok_or_else(garbled)?;
                    rows.push(((deadline, token, at), view));
                }
                wanted = wanted.saturating_sub(count);
                from = body.text()?.to_string();
                if from.is_empty() {
                    break;
                }
            }
        }
        rows.sort_by_key(|(place, _)| *place);
        let is_more = rows.len() > page.rows;
        rows.truncate(page.rows);
        let last = rows.last().filter(|_| is_more);
        let next =
            last.map(|((deadline, token, at), _)| format!("{}:{token}:{at}", deadline.as_micros()));
        let views = rows.into_iter().filter_map(|(_, view)| view.lease);
        Ok(Paged {
            rows: views.collect(),
            next,
        })
    }

    async fn audit(&self, page: &Page) -> Result<Paged<AuditView>> {
        bounded("rows", page.rows, limits::PAGE_ROWS)?;
        let key = &self.shared.home.named("audit");
        let end: i64 = if let Some(cursor) = &page.after {
            cursor.parse().map_err(|_| no_cursor(cursor))?
        } else {
            let mut length = redis::cmd("LLEN");
            length.arg(key);
            match self.link.run(key, length).await? {
                Value::Int(length) => length,
                _ => return Err(garbled()),
            }
        };
        let start = end.saturating_sub(page.rows as i64).max(0);
        if end <= 0 {
            return Ok(Paged {
                rows: Vec::new(),
                next: None,
            });
        }
        let mut range = redis::cmd("LRANGE");
        range.arg(key).arg(start).arg(end - 1);
        let answer = self.link.run(key, range).await?;
        let entries: Vec<Vec<u8>> = redis::from_redis_value(answer).map_err(|_| garbled())?;
        let mut rows = Vec::with_capacity(entries.len());
        for entry in entries.iter().rev() {
            let (at, entry) = entry.split_first_chunk().ok_or_else(garbled)?;
            let entry: Entry = serde_json::from_slice(entry).map_err(|_| garbled())?;
            rows.push(AuditView {
                at: Timestamp::from_micros(u64::from_le_bytes(*at)),
                actor: entry.0,
                reason: entry.1,
                command: entry.2,
                done: entry.3,
                tokens: entry.4,
            });
        }
        let next = (start > 0).then(|| start.to_string());
        Ok(Paged { rows, next })
    }
}

/// The partition, and where to go on in it.
fn jobs_cursor(cursor: &str) -> Result<(u16, String)> {
    let parts = cursor.split_once('/');
    let (number, after) = parts.ok_or_else(|| no_cursor(cursor))?;
    let number = number.parse().map_err(|_| no_cursor(cursor))?;
    if !after.bytes().all(|c| c.is_ascii_digit() || c == b':') {
        return Err(no_cursor(cursor));
    }
    Ok((number, after.to_owned()))
}

/// Deadline, token, and the partition's place among those that were asked.
fn leases_cursor(cursor: &str) -> Result<(u64, u64, usize)> {
    let mut parts = cursor.split(':').map(str::parse::<u64>);
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(Ok(deadline)), Some(Ok(token)), Some(Ok(at)), None) if token > 0 => {
            Ok((deadline, token, at as usize))
        }
        _ => Err(no_cursor(cursor)),
    }
}

pub(super) fn add_partition(view: &mut QueueView, body: &mut In, now: Timestamp) -> Result<()> {
    let (paused, relaxed) = (body.u64()?, body.u64()?);
    view.paused |= paused == 1;
    view.relaxed |= relaxed == 1;
    let (last, floor) = (body.u64()?, body.u64()?);
    let mut ledger = [0; LEDGER.len()];
    for field in &mut ledger {
        *field = body.u64()?;
    }
    let mut counts = [0; 7];
    for count in &mut counts {
        *count = body.u64()?;
    }
    let [scheduled, ready, parked, live, completed, dead, cancelled] = counts;
    let sum = &mut view.counts;
    for (sum, part) in [
        (&mut sum.scheduled, scheduled),
        (&mut sum.ready, ready),
        (&mut sum.parked, parked),
        (&mut sum.leased, live),
        (&mut sum.completed, completed),
        (&mut sum.dead, dead),
        (&mut sum.cancelled, cancelled),
    ] {
        *sum = sum.saturating_add(part);
    }
    view.ledger = view.ledger.plus(&Ledger {
        enqueued: ledger[0],
        granted: ledger[1],
        completed: ledger[2],
        retried: ledger[3],
        surrendered: ledger[4],
        buried: ledger[5],
        cancelled: ledger[6],
        expired_deadline: ledger[7],
        expired_stalled: ledger[8],
        expired_lifetime: ledger[9],
        revoked: ledger[10],
        live,
        late: ledger[11],
        fenced: ledger[12],
        pruned: ledger[13],
        purged: ledger[14],
        dead_by_expiry: ledger[15],
    });
    let is_ready = body.u8()? == 1;
    let oldest = now.since(body.time()?);
    if is_ready {
        view.oldest_ready = view.oldest_ready.max(Some(oldest));
    }
    let issuer = Issuer { last, floor };
    view.clock_behind = view.clock_behind.max(issuer.clock_behind(now));
    Ok(())
}

/// Reads a job, and the deadline of its lease.
pub(super) fn row(
    body: &mut In,
    queue: &Queue,
    now: Timestamp,
    kinds: &mut Kinds,
) -> Result<(Timestamp, JobView)> {
    let letter = body.u8()?;
    let state = match letter {
        b's' => JobState::Scheduled,
        b'r' | b'p' => JobState::Ready,
        b'l' => JobState::Leased,
        b'c' => JobState::Completed,
        b'd' => JobState::Dead,
        b'x' => JobState::Cancelled,
        _ => return Err(garbled()),
    };
    let settled_at = body.time()?;
    let job = Arc::new(codec::decode(&body.bytes()?, kinds)?);
    let mut deadline = Timestamp::ZERO;
    let mut lease = None;
    if body.u8()? == 1 {
        let token = FencingToken::new(body.u64()?);
        let (owner, task) = (body.text()?, body.text()?);
        let granted_at = body.time()?;
        deadline = body.time()?;
        let term = body.exact()?;
        let renewals = body.u32()? as u32;
        let cancel = body.u8()? == 1;
        let progress = body.bytes()?;
        let progress = (!progress.is_empty()).then(|| codec::progress(&progress));
        lease = Some(LeaseView {
            queue: queue.name.clone(),
            job: job.id,
            kind: job.kind.clone(),
            token,
            owner,
            task,
            attempt: job.attempt(),
            granted_at,
            time_left: deadline.since(now),
            term,
            renewals,
            cancel,
            progress: progress.transpose()?,
        });
    }
    let view = JobView {
        queue: queue.name.clone(),
        state,
        parked: letter == b'p',
        job,
        lease,
        settled_at: state.is_settled().then_some(settled_at),
    };
    Ok((deadline, view))
}
