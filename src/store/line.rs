//! Where SQL stores put jobs, and how they show them and page through them.

use std::sync::Arc;

use super::bounded;
use super::held::Held;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::inspect::{JobView, LeaseView, Page, Paged, ParkedView};
use crate::job::{JobRecord, JobState, Key, QueueName};
use crate::limits;
use crate::rules::ends::LeaseFacts;

pub(crate) const SCHEDULED: i64 = 0;
pub(crate) const PARKED: i64 = 1;

/// The line of a ready job: suspects wait in a line of their own, ahead of the others of their
/// priority.
pub(crate) fn line_of(job: &JobRecord) -> usize {
    usize::from(job.options.priority) * 2 + usize::from(!job.is_suspect())
}

/// A state as a column's value.
pub(crate) fn state_code(state: JobState) -> i64 {
    match state {
        JobState::Scheduled => SCHEDULED,
        JobState::Ready => PARKED,
        JobState::Leased => 2,
        JobState::Completed => 3,
        JobState::Dead => 4,
        JobState::Cancelled => 5,
    }
}

/// A cursor's bytes as text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    let bytes = bytes.iter();
    bytes
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

/// The bytes of such text.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

/// Cuts the row too many, and makes the last row's key the cursor if there was one.
pub(crate) fn paged<T>(mut rows: Vec<(String, T)>, most: usize) -> Paged<T> {
    let more = rows.len() > most;
    rows.truncate(most);
    let next = rows.last().filter(|_| more).map(|(key, _)| key.clone());
    Paged {
        rows: rows.into_iter().map(|(_, row)| row).collect(),
        next,
    }
}

/// How many rows a page has.
pub(crate) fn rows(page: &Page) -> Result<usize> {
    bounded("rows", page.rows, limits::PAGE_ROWS)?;
    Ok(page.rows)
}

/// The refusal of a cursor.
pub(crate) fn foreign(cursor: &str) -> Error {
    let found = format!("{} bytes of text", cursor.len());
    Error::invalid("page", found, "a cursor of this store")
}

/// A cursor of two numbers.
pub(crate) fn pair(cursor: &str) -> Result<(i64, i64)> {
    let parts = cursor.split_once('.');
    let parts = parts.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parts.ok_or_else(|| foreign(cursor))
}

/// A cursor of one number.
pub(crate) fn single(cursor: Option<&str>, first: i64) -> Result<i64> {
    cursor.map_or(Ok(first), |cursor| {
        cursor.parse().map_err(|_| foreign(cursor))
    })
}

/// The cursor of a job that is parked behind its key.
pub(crate) fn parked(cursor: &str) -> Result<(Vec<u8>, i64)> {
    let parts = cursor.split_once('.');
    let parts = parts.and_then(|(seq, key)| Some((unhex(key)?, seq.parse().ok()?)));
    parts.ok_or_else(|| foreign(cursor))
}

/// A job without a lease.
pub(crate) fn waiting(queue: &QueueName, state: JobState, job: JobRecord) -> JobView {
    JobView {
        queue: queue.clone(),
        state,
        parked: false,
        job: Arc::new(job),
        lease: None,
        settled_at: None,
    }
}

/// A lease of a live grant.
pub(crate) fn lease_view(
    queue: &QueueName,
    held: &Held,
    facts: &LeaseFacts,
    job: &JobRecord,
    now: Timestamp,
) -> LeaseView {
    LeaseView {
        queue: queue.clone(),
        job: job.id,
        kind: job.kind.clone(),
        token: facts.token,
        owner: Arc::clone(&facts.owner),
        task: Arc::clone(&facts.task),
        attempt: job.attempt(),
        granted_at: facts.granted_at,
        time_left: held.deadline.since(now),
        term: held.term,
        renewals: facts.renewals,
        cancel: facts.cancel,
        progress: facts.progress.clone(),
    }
}

/// The first key of a page of keys: the one right after the cursor's.
pub(crate) fn after_key(page: &Page) -> Vec<u8> {
    let after = page.after.as_ref().map(|after| format!("{after}\0"));
    after.unwrap_or_default().into_bytes()
}

/// A row of such a page, under its cursor.
pub(crate) fn parked_view(key: Vec<u8>, jobs: u64) -> Option<(String, ParkedView)> {
    let text = String::from_utf8(key).ok()?;
    let key = Key::new(&text).ok()?;
    Some((text, ParkedView { key, jobs }))
}
