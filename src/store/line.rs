//! Where SQL stores put jobs, and how they page through them.

use crate::inspect::{Page, Paged, ParkedView};
use crate::job::{JobRecord, JobState, Key};

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
