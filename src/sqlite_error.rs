//! Errors of SQLite in the words of the crate, for the store and for the fence.

use rusqlite::ErrorCode;

use crate::error::{Error, ErrorKind};

/// What the engine's error means, and what to do about it.
pub(crate) fn explain(error: rusqlite::Error) -> Error {
    let (kind, detail) = match error.sqlite_error_code() {
        None if is_misfit(&error) => (
            ErrorKind::Corrupt,
            "what is stored does not fit together; restore the file from a backup",
        ),
        Some(ErrorCode::DatabaseBusy) if is_old_snapshot(&error) => (
            ErrorKind::Contended,
            "the transaction read before it wrote, and the file has changed since; \
             open the fence first, or begin the transaction as IMMEDIATE",
        ),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => (
            ErrorKind::Contended,
            "another process holds the file's write lock for too long; \
             look for one that is frozen or has a long transaction",
        ),
        Some(ErrorCode::DatabaseCorrupt) => (
            ErrorKind::Corrupt,
            "the file is damaged; restore it from a backup",
        ),
        Some(ErrorCode::NotADatabase) => (
            ErrorKind::Corrupt,
            "the file is not an SQLite database; check the path",
        ),
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => (
            ErrorKind::ReadOnly,
            "the file, or the directory it is in, cannot be written; \
             give this process the right to write both",
        ),
        Some(ErrorCode::DiskFull) => (
            ErrorKind::Full,
            "the disk has no room left; free some and repeat",
        ),
        Some(ErrorCode::CannotOpen) => (
            ErrorKind::Unavailable,
            "the file cannot be opened; check that its directory exists and may be entered",
        ),
        Some(ErrorCode::SystemIoFailure) => (
            ErrorKind::Unavailable,
            "the disk failed to read or write; look at the system's log",
        ),
        _ => (ErrorKind::Unexpected, "the engine refused a statement"),
    };
    Error::new(kind, detail).caused_by(error)
}

/// Whether a transaction cannot write any more because it sees the file as it no longer is.
fn is_old_snapshot(error: &rusqlite::Error) -> bool {
    error
        .sqlite_error()
        .is_some_and(|e| e.extended_code == rusqlite::ffi::SQLITE_BUSY_SNAPSHOT)
}

/// Whether a row is missing or a column holds what it cannot.
fn is_misfit(error: &rusqlite::Error) -> bool {
    use rusqlite::Error as E;
    matches!(
        error,
        E::QueryReturnedNoRows
            | E::FromSqlConversionFailure(..)
            | E::InvalidColumnType(..)
            | E::IntegralValueOutOfRange(..)
    )
}
