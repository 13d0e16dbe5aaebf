//! The limits of the contract, and the checks that name them in errors. They are the same in every
//! store, whatever its engine could handle.

use std::time::Duration;

use crate::error::{Error, Result};

/// Bytes in a namespace, queue or kind name.
pub const NAME_BYTES: usize = 128;
/// Bytes in a unique or exclusive key.
pub const KEY_BYTES: usize = 256;
/// Bytes in one payload. Larger things belong in a blob store, with their address in the job.
pub const PAYLOAD_BYTES: usize = 256 * 1024;
/// Bytes in one checkpoint, and in one result.
pub const CHECKPOINT_BYTES: usize = 256 * 1024;
/// Headers on one job.
pub const HEADERS: usize = 64;
/// Bytes in all headers of one job, names and values together.
pub const HEADER_BYTES: usize = 16 * 1024;
/// Bytes kept of a failure's reason: enough for an error chain, not for a core dump.
pub const REASON_BYTES: usize = 4 * 1024;
/// Queues that one worker may claim from: all of them go into one call.
pub const QUEUES: usize = 1_000;
/// Slots of one worker. Each is a task of the runtime: a larger number is a mistake, and would fill
/// the memory before the first job is claimed.
pub const SLOTS: usize = 100_000;
/// Leases that a worker may hold ahead of its slots: a few grants, so that quick handlers have work
/// while the next claim is under way.
pub const PREFETCH: usize = 4_000;
/// Bytes in an owner, a task, an actor.
pub const OWNER_BYTES: usize = 256;
/// Jobs, settlements, beats or checkpoints in one call.
pub const CALL_ITEMS: usize = 10_000;
/// Bytes of payloads in one call.
pub const CALL_BYTES: usize = 16 * 1024 * 1024;
/// Leases in one claim, and so in one grant.
pub const GRANT_LEASES: usize = 1_000;
/// Bytes of jobs in one grant.
pub const GRANT_BYTES: usize = 4 * 1024 * 1024;
/// Overdue leases expired, and due jobs promoted, in one step: bounds how long a step holds the
/// store when a whole fleet died at once.
pub const STEP_JOBS: usize = 1_000;
/// Priorities run from 0, served first, to 7.
pub const PRIORITY_MAX: u8 = 7;
/// A lower expiry limit would bury a job before it could become a suspect.
pub const EXPIRIES_MIN: u32 = 3;
/// Ended leases remembered with a job.
pub const HISTORY: usize = 8;
/// The shortest term of a worker, a queue or a job.
pub const TERM_MIN: Duration = Duration::from_millis(10);
/// The longest term, delay, window, retention or lifetime: ten years.
pub const DURATION_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How long a session lives without a call.
pub const SESSION_IDLE: Duration = Duration::from_secs(600);
/// Tokens listed in one audit record.
pub(crate) const AUDIT_TOKENS: usize = 100;
/// Bytes in a name, a path or a resource that can be held.
pub const SCOPE_BYTES: usize = 256;
/// Components of a path that can be held: each is a look-up when an ancestor is sought.
pub const PATH_COMPONENTS: usize = 32;
/// The end of the longest range: the largest number that a double and a Lua number hold exactly.
pub const OFFSET_MAX: u64 = 1 << 53;
/// Scopes in one ask for a holding.
pub const ASK_SCOPES: usize = 16;
/// Bytes of state under a holding.
pub const STATE_BYTES: usize = 64 * 1024;
/// How long a ticket lives unless its waiter asks again.
pub const TICKET_TERM: Duration = Duration::from_secs(3);
/// Holders that the answer *busy* names.
pub const BUSY_HOLDERS: usize = 8;
/// Tickets that one step wakes: bounds how long a step is when a whole line may go.
pub const STEP_WAKES: usize = 64;
/// Waiting tickets are counted up to this many: asking must stay cheap.
pub const WAITING: u64 = 1_000;
/// Partitions of a family.
pub const PARTITIONS: u16 = 1_024;
/// How long a scope is remembered after its last holding or ticket.
pub const SCOPE_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// The same for a scope with state.
pub const STATE_RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);
/// Scopes in a sample of those that are waited for.
pub const CONTENDED: usize = 100;
/// Rows in one page of an inspection.
pub const PAGE_ROWS: usize = 1_000;

#[inline]
pub(crate) fn at_most(field: &'static str, found: usize, limit: usize, unit: &str) -> Result<()> {
    if found <= limit {
        return Ok(());
    }
    Err(too_much(field, found, limit, unit))
}

#[cold]
fn too_much(field: &'static str, found: usize, limit: usize, unit: &str) -> Error {
    let space = if unit.is_empty() { "" } else { " " };
    Error::invalid(
        field,
        format!("{found}{space}{unit}"),
        format!("at most {limit}{space}{unit}"),
    )
}

/// Names and reasons are text, and no text of `PostgreSQL` holds a zero byte.
pub(crate) fn without_zero(field: &'static str, text: &str) -> Result<()> {
    if text.contains('\0') {
        return Err(Error::invalid(field, "a zero byte", "text without one"));
    }
    Ok(())
}

pub(crate) fn duration(field: &'static str, found: Duration) -> Result<()> {
    if found <= DURATION_MAX {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!("{found:?}"),
        format!("at most {DURATION_MAX:?}"),
    ))
}

/// A lease that is shorter cannot be renewed in time, by any store.
pub(crate) fn term(found: Duration) -> Result<()> {
    if found < TERM_MIN {
        let allowed = format!("at least {TERM_MIN:?}");
        return Err(Error::invalid("term", format!("{found:?}"), allowed));
    }
    duration("term", found)
}

pub(crate) fn positive(field: &'static str, found: Duration) -> Result<()> {
    if found < Duration::from_micros(1) {
        return Err(Error::invalid(field, format!("{found:?}"), "at least 1 µs"));
    }
    duration(field, found)
}

/// Cuts `text` to `limit` bytes at a character boundary.
pub fn clip(text: &str, limit: usize) -> &str {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
