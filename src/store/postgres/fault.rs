//! What can go wrong in a step, and what it is called outside.

use std::error::Error as StdError;

use tokio_postgres::error::SqlState;

use crate::error::{Error, ErrorKind};
use crate::store::sql::answer::Unread;
use crate::store::sql::grant::Misfit;

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Fault {
    /// The call is not applied.
    Refused(Error),
    /// The server rolled the transaction back for the sake of another: do it again.
    Again(Error),
    /// The transaction is rolled back, or its end is not known.
    Broken(Error),
}

pub(super) type Done<T> = Result<T, Fault>;

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Self {
        let again = [
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
        ];
        if error.code().is_some_and(|code| again.contains(code)) {
            Self::Again(explain(&error))
        } else {
            Self::Broken(explain(&error))
        }
    }
}

impl From<Misfit> for Fault {
    fn from(Misfit(what): Misfit) -> Self {
        corrupt(what)
    }
}

impl From<Unread> for Fault {
    fn from(unread: Unread) -> Self {
        match unread {
            Unread::Garbled => garbled(),
            Unread::MixedUp => mixed_up(),
        }
    }
}

impl Fault {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Again(error) | Self::Broken(error) => error,
        }
    }
}

/// What is stored makes no sense.
pub(super) fn corrupt(what: &str) -> Fault {
    Fault::Broken(Error::new(
        ErrorKind::Corrupt,
        format!("{what}; restore the database from a backup"),
    ))
}

/// A remembered answer cannot be read.
pub(super) fn garbled() -> Fault {
    corrupt("a remembered answer cannot be read")
}

/// The refusal of an id that was another call's.
pub(super) fn mixed_up() -> Fault {
    Fault::Refused(Error::invalid(
        "request id",
        "the id of another verb's call",
        "one call per id",
    ))
}

/// An engine's error in the words of the crate.
pub(super) fn explain(error: &tokio_postgres::Error) -> Error {
    let (kind, detail) = match error.code() {
        None if is_tls(error) => (
            ErrorKind::Unsupported,
            "no encrypted connection: the server offers none, or cannot prove who it is; see sslmode \
             and sslrootcert",
        ),
        None if is_address(error) => (
            ErrorKind::InvalidInput,
            "the address has no host, or what does not fit together; \
             postgres://USER:PASSWORD@HOST:PORT/DATABASE",
        ),
        None => (
            ErrorKind::Unavailable,
            "the connection to the server was lost or refused",
        ),
        Some(code) => meaning(code),
    };
    let explained = Error::new(kind, detail);
    // What the server says in one line; what else it tells may show what is stored.
    match error.as_db_error() {
        Some(told) => explained.caused_by(told.message().to_owned()),
        // Whether nobody listens there or nobody knows the host is only said further below.
        None => explained.caused_by(match root(error) {
            Some(root) => format!("{error}: {root}"),
            None => error.to_string(),
        }),
    }
}

fn root(error: &tokio_postgres::Error) -> Option<&dyn StdError> {
    std::iter::successors(error.source(), |&error| error.source()).last()
}

/// The crate below tells it by its text alone.
fn is_tls(error: &tokio_postgres::Error) -> bool {
    error
        .to_string()
        .starts_with("error performing TLS handshake")
}

fn is_address(error: &tokio_postgres::Error) -> bool {
    error.to_string().starts_with("invalid configuration")
}

fn meaning(code: &SqlState) -> (ErrorKind, &'static str) {
    match code.code() {
        "40001" | "40P01" => (
            ErrorKind::Contended,
            "the server rolled the call back for the sake of another, again and again",
        ),
        "55P03" => (
            ErrorKind::Contended,
            "another transaction holds a lock for too long; look for one that is frozen or long",
        ),
        "57014" => (
            ErrorKind::Contended,
            "the statement took too long and was cancelled; the server may be overloaded",
        ),
        "53100" | "53200" => (
            ErrorKind::Full,
            "the server has no room left, on disk or in memory; free some and repeat",
        ),
        "25006" => (
            ErrorKind::Unavailable,
            "the server is a standby or read-only; it may be promoted, or the address point to it by \
             mistake",
        ),
        "42501" => (
            ErrorKind::ReadOnly,
            "the role may not do this; grant it the schema, its tables and its sequence",
        ),
        "42P01" | "42883" | "3F000" | "42703" => (
            ErrorKind::Unsupported,
            "the schema is not there or of another version; run the migrations",
        ),
        "28000" | "28P01" | "3D000" => (
            ErrorKind::Unsupported,
            "the server refused the role, the password or the database",
        ),
        // Shutting down, starting up, too many connections, killed by an operator, broken pipe.
        code if ["57", "53", "08"].contains(&&code[..2]) || code == "25P03" => (
            ErrorKind::Unavailable,
            "the server ended the connection or takes no more",
        ),
        code if code.starts_with("XX") => (
            ErrorKind::Corrupt,
            "the server found damage; look at its log",
        ),
        _ => (ErrorKind::Unexpected, "the server refused a statement"),
    }
}
