//! A job's row as a record.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use super::fault::{Done, corrupt};
use super::tx::{job_id, moment};
use crate::clock::Timestamp;
use crate::history::{Cause, EndedLease, LeaseEnd, Progress};
use crate::job::{Headers, JobOptions, JobRecord, Key, Kind, SavedCheckpoint, UniqueKey};
use crate::lease::FencingToken;
use crate::retry::RetryPolicy;

/// A value in a column of `jsonb`.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Json<T>(pub(super) T);

/// The version of the format, its first byte.
const FORMAT: u8 = 1;

impl<'a, T: DeserializeOwned> FromSql<'a> for Json<T> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        let text = raw
            .strip_prefix(&[FORMAT])
            .ok_or("jsonb of another format")?;
        Ok(Self(serde_json::from_slice(text)?))
    }

    fn accepts(of: &Type) -> bool {
        *of == Type::JSONB
    }
}

impl<T: Serialize + std::fmt::Debug> ToSql for Json<T> {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        out.put_u8(FORMAT);
        serde_json::to_writer(out.writer(), &self.0)?;
        Ok(IsNull::No)
    }

    fn accepts(of: &Type) -> bool {
        *of == Type::JSONB
    }

    to_sql_checked!();
}

/// What `job.options` holds. Durations are nanoseconds.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Rare {
    unique_window: Option<u64>,
    term: Option<u64>,
    max_lifetime: Option<u64>,
    retention: Option<u64>,
    timeout: Option<u64>,
    stall_limit: Option<u64>,
    max_failures: Option<u32>,
    retry: Option<RetryPolicy>,
}

/// One of `job.history`. Times are microseconds.
#[derive(Deserialize)]
#[expect(clippy::struct_field_names, reason = "the words of the stored history")]
struct Ended {
    token: u64,
    owner: Arc<str>,
    task: Arc<str>,
    granted_at: u64,
    ended_at: u64,
    renewals: u32,
    end: String,
    cause: Option<Cause>,
    reason: Option<String>,
    progress: Option<Progress>,
}

impl Ended {
    fn lease(self) -> Done<EndedLease> {
        let end = match (&*self.end, self.cause) {
            ("completed", _) => LeaseEnd::Completed,
            ("retried", _) => LeaseEnd::Retried,
            ("surrendered", _) => LeaseEnd::Surrendered,
            ("buried", _) => LeaseEnd::Buried,
            ("cancelled", _) => LeaseEnd::Cancelled,
            ("revoked", _) => LeaseEnd::Revoked,
            ("expired", Some(cause)) => LeaseEnd::Expired(cause),
            _ => return Err(corrupt("a job's history cannot be read")),
        };
        Ok(EndedLease {
            token: FencingToken::new(self.token),
            owner: self.owner,
            task: self.task,
            granted_at: Timestamp::from_micros(self.granted_at),
            ended_at: Timestamp::from_micros(self.ended_at),
            renewals: self.renewals,
            end,
            reason: self.reason,
            progress: self.progress,
        })
    }
}

pub(super) fn key(bytes: &[u8]) -> Done<Key> {
    let text = std::str::from_utf8(bytes).ok();
    let key = text.and_then(|text| Key::new(text).ok());
    key.ok_or_else(|| corrupt("a key is no key"))
}

/// Reads the columns `id, kind, version, enqueued_at, run_at, line, failures, expiries,
/// max_expiries, declined_since, checkpoint_seq, checkpoint_token, unique_key, exclusive_key,
/// options, headers, history, payload, checkpoint, result`, which begin at `from`.
pub(super) fn record(row: &Row, from: usize) -> Done<JobRecord> {
    let count =
        |at: usize| Ok::<u32, super::fault::Fault>(row.try_get::<_, i32>(at)?.cast_unsigned());
    let bytes = |at: usize| -> Done<Option<Bytes>> {
        let bytes: Option<&[u8]> = row.try_get(at)?;
        Ok(bytes.map(Bytes::copy_from_slice))
    };
    let id: Uuid = row.try_get(from)?;
    let kind: &str = row.try_get(from + 1)?;
    let rare: Option<Json<Rare>> = row.try_get(from + 14)?;
    let rare = rare.map_or_else(Rare::default, |Json(rare)| rare);
    let span = |nanos: Option<u64>| nanos.map(Duration::from_nanos);
    let priority: i16 = row.try_get::<_, i16>(from + 5)? / 2;
    let mut options = JobOptions::default()
        .priority(priority as u8)
        .max_expiries(count(from + 8)?);
    options.term = span(rare.term);
    options.max_lifetime = span(rare.max_lifetime);
    options.retention = span(rare.retention);
    options.runs.timeout = span(rare.timeout);
    options.runs.stall_limit = span(rare.stall_limit);
    options.runs.max_failures = rare.max_failures;
    options.runs.retry = rare.retry;
    let unique: Option<&[u8]> = row.try_get(from + 12)?;
    let unique = unique.map(|of| {
        let window = span(rare.unique_window);
        Ok::<_, super::fault::Fault>(Box::new(UniqueKey {
            key: key(of)?,
            window,
        }))
    });
    let exclusive: Option<&[u8]> = row.try_get(from + 13)?;
    let headers: Option<Json<Headers>> = row.try_get(from + 15)?;
    let history: Option<Json<Vec<Ended>>> = row.try_get(from + 16)?;
    let history = history.map_or_else(Vec::new, |Json(history)| history);
    let declined_since: Option<i64> = row.try_get(from + 9)?;
    let (seq, token): (Option<i64>, Option<i64>) =
        (row.try_get(from + 10)?, row.try_get(from + 11)?);
    let state = bytes(from + 18)?;
    let checkpoint = state.zip(seq).zip(token).map(|((bytes, seq), token)| {
        Box::new(SavedCheckpoint {
            token: FencingToken::new(token.cast_unsigned()),
            seq: seq.cast_unsigned(),
            bytes,
        })
    });
    Ok(JobRecord {
        id: job_id(id),
        kind: Kind::new(kind).map_err(|_| corrupt("a job's kind is not a name"))?,
        payload: bytes(from + 17)?.unwrap_or_default(),
        version: count(from + 2)?,
        headers: headers.map_or_else(Vec::new, |Json(headers)| headers),
        enqueued_at: moment(row.try_get(from + 3)?),
        run_at: moment(row.try_get(from + 4)?),
        unique: unique.transpose()?,
        exclusive: exclusive.map(key).transpose()?,
        options: options.into(),
        failures: count(from + 6)?,
        expiries: count(from + 7)?,
        declined_since: declined_since.map(moment),
        checkpoint,
        history: history.into_iter().map(Ended::lease).collect::<Done<_>>()?,
        result: bytes(from + 19)?,
    })
}
