//! What can go wrong in a step, and the error that callers get.

use rusqlite::ErrorCode;

use crate::error::{Error, ErrorKind};
pub(super) use crate::sqlite_error::explain;

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Fault {
    /// The call is not applied, and its neighbours in the transaction stand.
    Refused(Error),
    /// The transaction is rolled back.
    Broken(Error),
}

pub(super) type Done<T> = Result<T, Fault>;

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Broken(explain(error))
    }
}

impl Fault {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Broken(error) => error,
        }
    }
}

/// What is stored makes no sense.
pub(super) fn corrupt(what: &str) -> Fault {
    Fault::Broken(Error::new(
        ErrorKind::Corrupt,
        format!("{what}; restore the file from a backup"),
    ))
}

/// Whether another connection has the write lock.
pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}
