//! Pages of the SQL stores: a page's cursor is the key of its last row.

use crate::error::{Error, Result};
use crate::inspect::{Page, Paged};
use crate::limits;
use crate::store::bounded;

/// A cursor's bytes as text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    let bytes = bytes.iter();
    bytes
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

/// The bytes that a hexadecimal text stands for.
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

/// The first key of a page of keys: the one right after the cursor's.
pub(crate) fn after_key(page: &Page) -> Vec<u8> {
    let after = page.after.as_ref().map(|after| format!("{after}\0"));
    after.unwrap_or_default().into_bytes()
}
