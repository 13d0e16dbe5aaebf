//! What can go wrong in a step, and what it is called outside.

use std::error::Error as StdError;
use std::time::Duration;

use tokio_postgres::error::SqlState;

use crate::driver::meaning;
use crate::error::{Error, ErrorKind};
use crate::rules::issue::tokens_ahead;
use crate::store::InHand;

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Fault {
    /// The call is not applied.
    Refused(Error),
    /// The server rolled the transaction back for the sake of another: do it again.
    Again(Error),
    /// The transaction has a stricter isolation than the store's calls need.
    Strict,
    /// The transaction is rolled back, or its end is not known.
    Broken(Error),
}

pub(super) type Done<T> = Result<T, Fault>;

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Self {
        // The codes from LH on are those that our functions raise.
        let told = error.as_db_error();
        match error.code().map_or("", SqlState::code) {
            "40001" | "40P01" => Self::Again(explain(&error)),
            "LH002" => {
                let ahead = told.and_then(|told| told.detail()?.parse().ok());
                let ahead = Duration::from_micros(ahead.unwrap_or_default());
                Self::Refused(tokens_ahead(ahead))
            }
            "LH003" => {
                let why = told.map_or("", |told| told.message());
                Self::Refused(Error::new(ErrorKind::SessionLost, why.to_owned()))
            }
            "LH004" => Self::Refused(Error::invalid(
                "request id",
                "the id of another verb's call",
                "one call per id",
            )),
            "LH005" => Self::Strict,
            "LH006" => {
                let items = told.and_then(|told| told.detail()).unwrap_or_default();
                let items = items.split(',').filter_map(|nth| nth.parse::<usize>().ok());
                let in_hand = InHand(items.filter_map(|nth| nth.checked_sub(1)).collect());
                let (kind, why) = meaning("55P03");
                Self::Refused(Error::new(kind, why).caused_by(in_hand))
            }
            _ => Self::Broken(explain(&error)),
        }
    }
}

impl Fault {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Again(error) | Self::Broken(error) => error,
            Self::Strict => Error::new(
                ErrorKind::Unexpected,
                "a transaction that was begun as read committed is not",
            ),
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
        None if error.to_string().starts_with("error deserializing") => (
            ErrorKind::Corrupt,
            "what is stored cannot be read; restore the database from a backup",
        ),
        None => (
            ErrorKind::Unavailable,
            "the connection to the server was lost or refused",
        ),
        Some(code) => meaning(code.code()),
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
