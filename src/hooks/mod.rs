//! What the other crates of this workspace need from inside the library: the command, the web
//! pages, the conformance suite, the zombie test. It is not part of the public API and may change.

#[cfg(feature = "testing")]
#[allow(missing_debug_implementations, reason = "nobody prints it")]
mod by_hand;

#[cfg(feature = "testing")]
pub use crate::point::{Notes, await_point, is_polled, opened, polling};
#[cfg(feature = "testing")]
pub use by_hand::{HandlerEnd, HeldByHand};

pub use crate::clock::{micros, monotonic};
pub use crate::limits::clip;
pub use crate::worker::shutdown_signal;

#[cfg(feature = "doctor")]
pub use crate::store::health::{Finding, Level};
#[cfg(feature = "doctor")]
pub use crate::store::load::{ProcessStat, ServerLoad};
#[cfg(all(feature = "doctor", feature = "postgres"))]
pub use crate::store::postgres::bare::Table;
#[cfg(all(feature = "doctor", feature = "postgres"))]
pub use crate::store::postgres::doctor::examine as examine_postgres;
#[cfg(all(feature = "doctor", feature = "redis"))]
pub use crate::store::redis::bare::List;
#[cfg(all(feature = "doctor", feature = "redis"))]
pub use crate::store::redis::doctor::examine as examine_redis;
#[cfg(all(feature = "doctor", feature = "redis"))]
pub use crate::store::redis::mend::repair as repair_redis;
#[cfg(all(feature = "doctor", feature = "sqlite"))]
pub use crate::store::sqlite::doctor::examine as examine_sqlite;

/// Reads a stored record, and writes it again: for fuzzing what comes out of a damaged store.
///
/// # Errors
/// `Corrupt` if it is no record.
#[cfg(feature = "sqlite")]
pub fn reread(record: &[u8]) -> crate::Result<Vec<u8>> {
    use crate::store::codec;

    let bytes = bytes::Bytes::copy_from_slice(record);
    let job = codec::decode(&bytes, &mut codec::Kinds::default())?;
    let mut again = Vec::new();
    codec::encode(&job, &mut again);
    Ok(again)
}

/// Reads what a script of the Redis store would have answered, in one of its forms: for fuzzing
/// what comes from a server that is not what it seems.
///
/// # Errors
/// `Corrupt` if no script gives such an answer, or what the answer says.
#[cfg(feature = "redis")]
pub fn read_answer(form: u8, answer: &[u8]) -> crate::Result<()> {
    let readers = crate::store::redis::answers::READERS;
    let (_, read) = readers[usize::from(form) % readers.len()];
    read(answer.to_vec())
}

/// The record of a job, as a store would write it.
#[cfg(feature = "sqlite")]
pub fn record_of(job: &crate::job::JobRecord) -> Vec<u8> {
    let mut record = Vec::new();
    crate::store::codec::encode(job, &mut record);
    record
}
