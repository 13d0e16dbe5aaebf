//! How a job is stored: as one compact, self-delimiting record.
//!
//! ```text
//! 0  u32  length of the whole record      16  [16] id
//! 4  u8   format                          32  u64  enqueued at, µs
//! 5  u8   priority                        40  u64  run at, µs
//! 6  u16  which optional parts follow     48  u32  expiry limit
//! 8  u32  failures                        52  u32  weight: bytes against a grant's limit
//! 12 u32  expiries                        56  u8   length of the kind, then the kind,
//!                                             then the parts, in the order of their flags
//! ```
//! All numbers are little-endian. The counters stand at fixed places, so that a script inside a
//! store can read and raise them without understanding the rest. Records can be laid end to end.
//! Payload, checkpoint and result are not copied when a record is read: they share its bytes.

use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::job::{
    FIRST_VERSION, JobId, JobOptions, JobRecord, Key, Kind, SavedCheckpoint, UniqueKey,
};
use crate::lease::{Cause, EndedLease, FencingToken, LeaseEnd, Progress};
use crate::retry::RetryPolicy;

const FORMAT: u8 = 1;
/// Bytes before the kind's name.
const RECORD_HEADER: usize = 57;

/// Which optional parts a record has: bits of the number at byte 6, and the order of the parts.
pub(crate) mod flag {
    pub(crate) const UNIQUE: u16 = 1;
    pub(crate) const WINDOW: u16 = 1 << 1;
    pub(crate) const EXCLUSIVE: u16 = 1 << 2;
    pub(crate) const TERM: u16 = 1 << 3;
    pub(crate) const MAX_LIFETIME: u16 = 1 << 4;
    pub(crate) const TIMEOUT: u16 = 1 << 5;
    pub(crate) const STALL_LIMIT: u16 = 1 << 6;
    pub(crate) const RETENTION: u16 = 1 << 7;
    pub(crate) const MAX_FAILURES: u16 = 1 << 8;
    pub(crate) const RETRY: u16 = 1 << 9;
    pub(crate) const VERSION: u16 = 1 << 10;
    pub(crate) const HEADERS: u16 = 1 << 11;
    pub(crate) const CHECKPOINT: u16 = 1 << 12;
    pub(crate) const RESULT: u16 = 1 << 13;
    pub(crate) const HISTORY: u16 = 1 << 14;
    pub(crate) const DECLINED: u16 = 1 << 15;

    /// By name, for engines that read records in a language of their own.
    #[cfg(feature = "redis")]
    pub(crate) const ALL: [(&str, u16); 16] = [
        ("UNIQUE", UNIQUE),
        ("WINDOW", WINDOW),
        ("EXCLUSIVE", EXCLUSIVE),
        ("TERM", TERM),
        ("MAX_LIFETIME", MAX_LIFETIME),
        ("TIMEOUT", TIMEOUT),
        ("STALL_LIMIT", STALL_LIMIT),
        ("RETENTION", RETENTION),
        ("MAX_FAILURES", MAX_FAILURES),
        ("RETRY", RETRY),
        ("VERSION", VERSION),
        ("HEADERS", HEADERS),
        ("CHECKPOINT", CHECKPOINT),
        ("RESULT", RESULT),
        ("HISTORY", HISTORY),
        ("DECLINED", DECLINED),
    ];
}

/// Where the fields of a record begin, by name, counted from 1: for the functions of Redis.
#[cfg(feature = "redis")]
pub(crate) const PLACES: [(&str, u64); 10] = [
    ("PRIORITY_AT", 6),
    ("FLAGS_AT", 7),
    ("FAILURES_AT", 9),
    ("EXPIRIES_AT", 13),
    ("ID_AT", 17),
    ("ENQUEUED_AT", 33),
    ("RUN_AT", 41),
    ("LIMIT_AT", 49),
    ("WEIGHT_AT", 53),
    ("KIND_AT", RECORD_HEADER as u64),
];

/// Appends the record of `job`.
pub(crate) fn encode(job: &JobRecord, out: &mut Vec<u8>) {
    let start = out.len();
    let options = &job.options;
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&[FORMAT, options.priority]);
    out.extend_from_slice(&flags(job).to_le_bytes());
    out.extend_from_slice(&job.failures.to_le_bytes());
    out.extend_from_slice(&job.expiries.to_le_bytes());
    out.extend_from_slice(job.id.as_bytes());
    out.extend_from_slice(&job.enqueued_at.as_micros().to_le_bytes());
    out.extend_from_slice(&job.run_at.as_micros().to_le_bytes());
    out.extend_from_slice(&options.max_expiries.to_le_bytes());
    out.extend_from_slice(&(job.weight() as u32).to_le_bytes());
    out.push(job.kind.as_str().len() as u8);
    out.extend_from_slice(job.kind.as_str().as_bytes());
    if let Some(unique) = &job.unique {
        put_bytes(out, unique.key.as_str().as_bytes());
        put_duration(out, unique.window);
    }
    if let Some(key) = &job.exclusive {
        put_bytes(out, key.as_str().as_bytes());
    }
    for duration in [
        options.term,
        options.max_lifetime,
        options.runs.timeout,
        options.runs.stall_limit,
        options.retention,
    ] {
        put_duration(out, duration);
    }
    if let Some(limit) = options.runs.max_failures {
        out.extend_from_slice(&limit.to_le_bytes());
    }
    if let Some(retry) = options.runs.retry {
        put_duration(out, Some(retry.base));
        put_duration(out, Some(retry.cap));
        out.extend_from_slice(&retry.factor.to_bits().to_le_bytes());
    }
    if has_version(job) {
        out.extend_from_slice(&job.version.to_le_bytes());
    }
    if !job.headers.is_empty() {
        out.extend_from_slice(&(job.headers.len() as u32).to_le_bytes());
        for (name, value) in &job.headers {
            put_bytes(out, name.as_bytes());
            put_bytes(out, value.as_bytes());
        }
    }
    put_bytes(out, &job.payload);
    if let Some(checkpoint) = &job.checkpoint {
        out.extend_from_slice(&checkpoint.token.get().to_le_bytes());
        out.extend_from_slice(&checkpoint.seq.to_le_bytes());
        put_bytes(out, &checkpoint.bytes);
    }
    if let Some(result) = &job.result {
        put_bytes(out, result);
    }
    if !job.history.is_empty() {
        out.extend_from_slice(&(job.history.len() as u32).to_le_bytes());
        for ended in &job.history {
            put_ended(out, ended);
        }
    }
    if let Some(since) = job.declined_since {
        out.extend_from_slice(&since.as_micros().to_le_bytes());
    }
    let length = (out.len() - start) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

fn flags(job: &JobRecord) -> u16 {
    let options = &job.options;
    let window = job.unique.as_ref().is_some_and(|u| u.window.is_some());
    [
        (job.unique.is_some(), flag::UNIQUE),
        (window, flag::WINDOW),
        (job.exclusive.is_some(), flag::EXCLUSIVE),
        (options.term.is_some(), flag::TERM),
        (options.max_lifetime.is_some(), flag::MAX_LIFETIME),
        (options.runs.timeout.is_some(), flag::TIMEOUT),
        (options.runs.stall_limit.is_some(), flag::STALL_LIMIT),
        (options.retention.is_some(), flag::RETENTION),
        (options.runs.max_failures.is_some(), flag::MAX_FAILURES),
        (options.runs.retry.is_some(), flag::RETRY),
        (has_version(job), flag::VERSION),
        (!job.headers.is_empty(), flag::HEADERS),
        (job.checkpoint.is_some(), flag::CHECKPOINT),
        (job.result.is_some(), flag::RESULT),
        (!job.history.is_empty(), flag::HISTORY),
        (job.declined_since.is_some(), flag::DECLINED),
    ]
    .into_iter()
    .filter(|(there, _)| *there)
    .fold(0, |flags, (_, flag)| flags | flag)
}

/// The first version is not written.
const fn has_version(job: &JobRecord) -> bool {
    job.version != FIRST_VERSION
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn put_duration(out: &mut Vec<u8>, duration: Option<Duration>) {
    if let Some(duration) = duration {
        out.extend_from_slice(&duration.as_secs().to_le_bytes());
        out.extend_from_slice(&duration.subsec_nanos().to_le_bytes());
    }
}

fn put_ended(out: &mut Vec<u8>, ended: &EndedLease) {
    out.extend_from_slice(&ended.token.get().to_le_bytes());
    out.extend_from_slice(&ended.granted_at.as_micros().to_le_bytes());
    out.extend_from_slice(&ended.ended_at.as_micros().to_le_bytes());
    out.extend_from_slice(&ended.renewals.to_le_bytes());
    out.push(end_code(ended.end));
    out.push(u8::from(ended.reason.is_some()) | u8::from(ended.progress.is_some()) << 1);
    put_bytes(out, ended.owner.as_bytes());
    put_bytes(out, ended.task.as_bytes());
    if let Some(reason) = &ended.reason {
        put_bytes(out, reason.as_bytes());
    }
    if let Some(progress) = &ended.progress {
        put_progress(out, progress);
    }
}

/// Appends a progress.
pub(crate) fn put_progress(out: &mut Vec<u8>, progress: &Progress) {
    out.extend_from_slice(&progress.done.to_le_bytes());
    out.push(u8::from(progress.total.is_some()));
    out.extend_from_slice(&progress.total.unwrap_or(0).to_le_bytes());
    put_bytes(out, progress.note.as_bytes());
}

/// Reads a progress.
pub(crate) fn progress(bytes: &Bytes) -> Result<Progress> {
    let mut input = Input { bytes, at: 0 };
    let progress = input.progress()?;
    input.end()?;
    Ok(progress)
}

const ENDS: [LeaseEnd; 9] = [
    LeaseEnd::Completed,
    LeaseEnd::Retried,
    LeaseEnd::Surrendered,
    LeaseEnd::Buried,
    LeaseEnd::Cancelled,
    LeaseEnd::Expired(Cause::Deadline),
    LeaseEnd::Expired(Cause::Stalled),
    LeaseEnd::Expired(Cause::Lifetime),
    LeaseEnd::Revoked,
];

fn end_code(end: LeaseEnd) -> u8 {
    ENDS.iter().position(|known| *known == end).unwrap_or(0) as u8
}

/// The names of kinds met so far: a store reads the same few again and again, and need not allocate
/// one for each job.
#[derive(Debug, Default)]
pub(crate) struct Kinds(Vec<Kind>);

impl Kinds {
    /// More than these are not remembered: a linear search stays cheaper than an allocation.
    const MOST: usize = 16;

    pub(crate) fn get(&mut self, name: &[u8]) -> Result<Kind> {
        if let Some(kind) = self.0.iter().find(|kind| kind.as_str().as_bytes() == name) {
            return Ok(kind.clone());
        }
        let name = std::str::from_utf8(name).map_err(|_| corrupt("a kind is not text"))?;
        let kind = Kind::new(name).map_err(|_| corrupt("a kind is not a name"))?;
        if self.0.len() == Self::MOST {
            self.0.remove(0);
        }
        self.0.push(kind.clone());
        Ok(kind)
    }
}

/// The bytes of the first record in `bytes`.
pub(crate) fn length(bytes: &[u8]) -> Result<usize> {
    let head = bytes.first_chunk().ok_or_else(|| corrupt("it is cut"))?;
    let length = u32::from_le_bytes(*head) as usize;
    if length < RECORD_HEADER || length > bytes.len() {
        return Err(corrupt("its length is wrong"));
    }
    Ok(length)
}

/// The flags of a record, without reading the rest.
#[cfg(any(feature = "sqlite", test))]
pub(crate) fn flags_of(record: &[u8]) -> u16 {
    match record.get(6..8) {
        Some(&[low, high]) => u16::from_le_bytes([low, high]),
        _ => 0,
    }
}

/// When a record's job falls due, without reading the rest.
#[cfg(any(feature = "sqlite", test))]
pub(crate) fn run_at_of(record: &[u8]) -> Option<Timestamp> {
    let micros = record.get(40..48)?.first_chunk()?;
    Some(Timestamp::from_micros(u64::from_le_bytes(*micros)))
}

/// What a record counts against the limit of a grant, without reading the rest.
#[cfg(any(feature = "sqlite", test))]
pub(crate) fn weight_of(record: &[u8]) -> usize {
    let weight = record.get(52..56).and_then(<[u8]>::first_chunk);
    weight.map_or(0, |weight| u32::from_le_bytes(*weight) as usize)
}

/// Reads one record, which must be all of `bytes`.
pub(crate) fn decode(bytes: &Bytes, kinds: &mut Kinds) -> Result<JobRecord> {
    if length(bytes)? != bytes.len() {
        return Err(corrupt("its length is wrong"));
    }
    let mut input = Input { bytes, at: 4 };
    if input.u8()? != FORMAT {
        return Err(corrupt("its format is unknown"));
    }
    let priority = input.u8()?;
    let flags = input.u16()?;
    let has = |flag: u16| flags & flag != 0;
    let failures = input.u32()?;
    let expiries = input.u32()?;
    let id = JobId::from_bytes(input.array()?);
    let enqueued_at = input.time()?;
    let run_at = input.time()?;
    let max_expiries = input.u32()?;
    let weight = input.u32()?;
    let kind_length = input.u8()?;
    let kind = kinds.get(input.slice(kind_length.into())?)?;
    let unique = input.part(has(flag::UNIQUE), |input| {
        Ok(UniqueKey {
            key: input.key()?,
            window: input.part(has(flag::WINDOW), Input::duration)?,
        })
    })?;
    let exclusive = input.part(has(flag::EXCLUSIVE), Input::key)?;
    // In the order in which they were written.
    let mut options = JobOptions {
        priority,
        max_expiries,
        term: input.part(has(flag::TERM), Input::duration)?,
        max_lifetime: input.part(has(flag::MAX_LIFETIME), Input::duration)?,
        ..JobOptions::default()
    };
    options.runs.timeout = input.part(has(flag::TIMEOUT), Input::duration)?;
    options.runs.stall_limit = input.part(has(flag::STALL_LIMIT), Input::duration)?;
    options.retention = input.part(has(flag::RETENTION), Input::duration)?;
    options.runs.max_failures = input.part(has(flag::MAX_FAILURES), Input::u32)?;
    options.runs.retry = input.part(has(flag::RETRY), Input::retry)?;
    let version = input.part(has(flag::VERSION), Input::version)?;
    let headers = input.part(has(flag::HEADERS), |input| {
        input.many(|input| Ok((input.text()?, input.text()?)))
    })?;
    let payload = input.bytes()?;
    let checkpoint = input.part(has(flag::CHECKPOINT), |input| {
        Ok(SavedCheckpoint {
            token: FencingToken::new(input.u64()?),
            seq: input.u64()?,
            bytes: input.bytes()?,
        })
    })?;
    let result = input.part(has(flag::RESULT), Input::bytes)?;
    let history = input.part(has(flag::HISTORY), |input| input.many(Input::ended))?;
    let declined_since = input.part(has(flag::DECLINED), Input::time)?;
    input.end()?;
    let job = JobRecord {
        id,
        kind,
        payload,
        version: version.unwrap_or(FIRST_VERSION),
        headers: headers.unwrap_or_default(),
        enqueued_at,
        run_at,
        unique: unique.map(Box::new),
        exclusive,
        options: options.into(),
        failures,
        expiries,
        declined_since,
        checkpoint: checkpoint.map(Box::new),
        history: history.unwrap_or_default(),
        result,
    };
    if job.weight() != weight as usize {
        return Err(corrupt("its weight is wrong"));
    }
    Ok(job)
}

struct Input<'a> {
    bytes: &'a Bytes,
    at: usize,
}

impl<'a> Input<'a> {
    fn slice(&mut self, length: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(length);
        let slice = end.and_then(|end| self.bytes.get(self.at..end));
        let slice = slice.ok_or_else(|| corrupt("it is cut"))?;
        self.at += length;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let slice = self.slice(N)?;
        slice.try_into().map_err(|_| corrupt("it is cut"))
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn time(&mut self) -> Result<Timestamp> {
        Ok(Timestamp::from_micros(self.u64()?))
    }

    /// A version that is written down is not the first.
    fn version(&mut self) -> Result<u32> {
        let version = self.u32()?;
        if version <= FIRST_VERSION {
            return Err(corrupt("a payload's version is wrong"));
        }
        Ok(version)
    }

    fn duration(&mut self) -> Result<Duration> {
        let (seconds, nanos) = (self.u64()?, self.u32()?);
        if nanos >= 1_000_000_000 {
            return Err(corrupt("a duration is wrong"));
        }
        Ok(Duration::new(seconds, nanos))
    }

    /// A part that shares the record's bytes.
    fn bytes(&mut self) -> Result<Bytes> {
        let length = self.u32()? as usize;
        let start = self.at;
        self.slice(length)?;
        Ok(self.bytes.slice(start..start + length))
    }

    fn str(&mut self) -> Result<&'a str> {
        let length = self.u32()? as usize;
        std::str::from_utf8(self.slice(length)?).map_err(|_| corrupt("a text is not UTF-8"))
    }

    fn text(&mut self) -> Result<String> {
        Ok(self.str()?.to_owned())
    }

    fn key(&mut self) -> Result<Key> {
        Key::new(self.str()?).map_err(|_| corrupt("a key is too long"))
    }

    fn retry(&mut self) -> Result<RetryPolicy> {
        let mut retry = RetryPolicy::exponential(self.duration()?, self.duration()?);
        retry.factor = f64::from_bits(self.u64()?);
        Ok(retry)
    }

    fn progress(&mut self) -> Result<Progress> {
        let done = self.u64()?;
        let has_total = self.u8()? != 0;
        let total = self.u64()?;
        Ok(Progress {
            done,
            total: has_total.then_some(total),
            note: self.text()?,
        })
    }

    fn ended(&mut self) -> Result<EndedLease> {
        let token = FencingToken::new(self.u64()?);
        let (granted_at, ended_at) = (self.time()?, self.time()?);
        let renewals = self.u32()?;
        let end = ENDS.get(usize::from(self.u8()?)).copied();
        let parts = self.u8()?;
        Ok(EndedLease {
            token,
            granted_at,
            ended_at,
            renewals,
            end: end.ok_or_else(|| corrupt("a lease ended in no known way"))?,
            owner: self.str()?.into(),
            task: self.str()?.into(),
            reason: self.part(parts & 1 != 0, Self::text)?,
            progress: self.part(parts & 2 != 0, Self::progress)?,
        })
    }

    fn part<T>(
        &mut self,
        there: bool,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        there.then(|| read(self)).transpose()
    }

    fn many<T>(&mut self, mut read: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.u32()?;
        // Each takes at least a byte: a wrong count runs into the end, it does not reserve memory.
        (0..count).map(|_| read(self)).collect()
    }

    fn end(&self) -> Result<()> {
        if self.at == self.bytes.len() {
            return Ok(());
        }
        Err(corrupt("it has bytes left over"))
    }
}

fn corrupt(why: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("a stored job cannot be read: {why}; restore the store from a backup"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{NewJob, QueueName, RunSettings};
    use proptest::prelude::*;

    fn text() -> impl Strategy<Value = String> {
        proptest::collection::vec(any::<char>(), 0..20)
            .prop_map(|chars| chars.into_iter().collect())
    }

    fn blob() -> impl Strategy<Value = Bytes> {
        proptest::collection::vec(any::<u8>(), 0..200).prop_map(Bytes::from)
    }

    fn long() -> impl Strategy<Value = Duration> {
        (0..400_000_000_u64, 0..1_000_000_000_u32).prop_map(|(s, n)| Duration::new(s, n))
    }

    fn maybe<T: Clone + std::fmt::Debug>(
        of: impl Strategy<Value = T>,
    ) -> impl Strategy<Value = Option<T>> {
        proptest::option::of(of)
    }

    fn shown() -> impl Strategy<Value = Progress> {
        (any::<u64>(), any::<Option<u64>>(), text()).prop_map(|(done, total, note)| Progress {
            done,
            total,
            note,
        })
    }

    fn ended() -> impl Strategy<Value = EndedLease> {
        let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
        (
            numbers,
            0..ENDS.len(),
            text(),
            maybe(text()),
            maybe(shown()),
        )
            .prop_map(
                |((token, granted, ended, renewals), end, owner, reason, progress)| EndedLease {
                    token: FencingToken::new(token),
                    task: owner.as_str().into(),
                    owner: owner.into(),
                    granted_at: Timestamp::from_micros(granted),
                    ended_at: Timestamp::from_micros(ended),
                    renewals,
                    end: ENDS[end],
                    reason,
                    progress,
                },
            )
    }

    prop_compose! {
        fn options()(
            priority in 0..8_u8,
            durations in [maybe(long()), maybe(long()), maybe(long()), maybe(long()), maybe(long())],
            max_failures in any::<Option<u32>>(),
            max_expiries in any::<u32>(),
            retry in maybe((long(), long(), 0.0..10.0_f64)),
        ) -> JobOptions {
            let [term, max_lifetime, timeout, stall_limit, retention] = durations;
            let retry = retry.map(|(base, cap, factor)| {
                let mut policy = RetryPolicy::exponential(base, cap);
                policy.factor = factor;
                policy
            });
            let runs = RunSettings { retry, max_failures, timeout, stall_limit };
            JobOptions { priority, term, max_lifetime, runs, max_expiries, retention }
        }
    }

    prop_compose! {
        fn job()(
            kind in "[A-Za-z0-9_.-]{1,20}",
            parts in (blob(), proptest::collection::vec((text(), text()), 0..4), options()),
            keys in (maybe(("(?s).{1,20}", maybe(long()))), maybe("(?s).{1,20}")),
            numbers in (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>()),
            checkpoint in maybe((any::<u64>(), any::<u64>(), blob())),
            history in proptest::collection::vec(ended(), 0..4),
            result in maybe(blob()),
            versions in (1..=u32::MAX, maybe(any::<u64>())),
        ) -> JobRecord {
            let (payload, headers, options) = parts;
            let new = NewJob::raw(QueueName::default(), Kind::new(kind).unwrap(), payload);
            let mut job = JobRecord::new(JobId::generate(), new, Timestamp::from_micros(numbers.0));
            job.headers = headers;
            job.options = options.into();
            job.unique = keys.0.map(|(key, window)| Box::new(UniqueKey { key: Key::new(key).unwrap(), window }));
            job.exclusive = keys.1.map(|key| Key::new(key).unwrap());
            job.run_at = Timestamp::from_micros(numbers.1);
            job.failures = numbers.2;
            job.expiries = numbers.3;
            job.checkpoint = checkpoint.map(|(token, seq, bytes)| Box::new(SavedCheckpoint {
                token: FencingToken::new(token), seq, bytes,
            }));
            job.history = history;
            job.result = result;
            job.version = versions.0;
            job.declined_since = versions.1.map(Timestamp::from_micros);
            job
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(jobs in proptest::collection::vec(job(), 1..4)) {
            let mut out = Vec::new();
            for job in &jobs {
                encode(job, &mut out);
            }
            let mut rest = Bytes::from(out);
            for job in jobs {
                let record = rest.split_to(length(&rest).unwrap());
                prop_assert_eq!(run_at_of(&record), Some(job.run_at));
                prop_assert_eq!(flags_of(&record), flags(&job));
                prop_assert_eq!(weight_of(&record), job.weight());
                prop_assert_eq!(decode(&record, &mut Kinds::default()).unwrap(), job);
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn garbage_is_corrupt_and_never_a_panic(
            job in job(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(),
        ) {
            let mut out = Vec::new();
            encode(&job, &mut out);
            let at = at.index(out.len());
            if cut { out.truncate(at) } else { out[at] = byte }
            if let Err(error) = decode(&Bytes::from(out), &mut Kinds::default()) {
                prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn no_part_of_a_record_and_nothing_longer_passes_for_it(job in job(), more in 1..9_usize) {
            let mut out = Vec::new();
            encode(&job, &mut out);
            let whole = Bytes::from(out.clone());
            for cut in 0..whole.len() {
                let error = decode(&whole.slice(..cut), &mut Kinds::default()).unwrap_err();
                prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
                // Neither with a length that hides the cut.
                let mut hidden = out[..cut].to_vec();
                if let Some(length) = hidden.first_chunk_mut() {
                    *length = (cut as u32).to_le_bytes();
                }
                let read = decode(&Bytes::from(hidden), &mut Kinds::default());
                prop_assert!(read.is_err(), "cut to {} of {}", cut, whole.len());
            }
            out.resize(out.len() + more, 0);
            prop_assert!(decode(&Bytes::from(out.clone()), &mut Kinds::default()).is_err());
            let length = (out.len() as u32).to_le_bytes();
            out[..4].copy_from_slice(&length);
            prop_assert!(decode(&Bytes::from(out), &mut Kinds::default()).is_err());
        }
    }

    #[test]
    fn a_payload_is_not_copied_and_a_kind_is_kept_once() {
        let new = NewJob::raw(
            QueueName::default(),
            Kind::new("resize").unwrap(),
            vec![7; 100],
        );
        let job = JobRecord::new(JobId::generate(), new, Timestamp::from_micros(5));
        let mut out = Vec::new();
        encode(&job, &mut out);
        assert_eq!(out.len(), RECORD_HEADER + "resize".len() + 4 + 100);
        let bytes = Bytes::from(out);
        let mut kinds = Kinds::default();
        let (a, b) = (
            decode(&bytes, &mut kinds).unwrap(),
            decode(&bytes, &mut kinds).unwrap(),
        );
        assert_eq!(a.payload.as_ptr(), bytes[bytes.len() - 100..].as_ptr());
        assert_eq!(a.kind.as_str().as_ptr(), b.kind.as_str().as_ptr());
    }
}
