//! The seam between the library and the drivers of PostgreSQL, for authors of adapters.
//!
//! What a call in the caller's transaction does is one statement, made here. A driver runs it: an
//! adapter implements [`SqlRunner`] for what its users have in hand inside a transaction,
//! [`SqlTransaction`] for what can be committed, and [`SqlBegin`] for what a transaction can begin
//! on. Its users then write the same words as with `tokio-postgres`.
//!
//! Each trait has the adapter's own type as a parameter, so that it can be implemented for types of
//! another crate: `impl SqlRunner<MyDriver> for &mut theirs::Connection`. The compiler finds it
//! if the user's program names the adapter once (`use my_adapter as _;`).

use std::borrow::Cow;

use async_trait::async_trait;

use crate::error::{Error, ErrorKind};

pub(crate) mod limit;
mod native;

pub use self::native::TokioPostgres;

/// Where the tables are, unless somebody says otherwise.
pub(crate) const SCHEMA: &str = "leasehold";

/// An argument of a statement. Its PostgreSQL type is part of it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum SqlArg<'a> {
    /// `int8`
    Int(Option<i64>),
    /// `text`
    Text(Option<&'a str>),
    /// `bytea`
    Bytes(Option<&'a [u8]>),
    /// `int8[]`
    Ints(Option<Vec<Option<i64>>>),
    /// `text[]`
    Texts(Option<Vec<Option<&'a str>>>),
    /// `bytea[]`
    Blobs(Option<Vec<Option<&'a [u8]>>>),
}

/// A row: every statement of ours returns a single column `answer`, of type `text[]`.
pub type SqlRow = Vec<Option<String>>;

/// What a driver says of a statement that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SqlError {
    code: Option<String>,
    message: String,
}

impl SqlError {
    /// With the server's SQLSTATE, if the server answered, and what it said in one line.
    pub fn new(code: Option<&str>, message: impl Into<String>) -> Self {
        Self {
            code: code.map(Into::into),
            message: message.into(),
        }
    }

    /// The driver's answer could not be decoded.
    pub fn unreadable(message: impl Into<String>) -> Self {
        Self::new(Some("XX000"), message)
    }

    pub(crate) fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }

    /// Converts to the crate's error. `otherwise` overrides the explanation of some codes.
    pub(crate) fn explained(
        self,
        otherwise: impl FnOnce(&str) -> Option<(ErrorKind, &'static str)>,
    ) -> Error {
        let lost = (
            ErrorKind::Unavailable,
            "the connection to the server was lost or refused",
        );
        let explain = |code: &str| otherwise(code).unwrap_or_else(|| meaning(code));
        let (kind, detail) = self.code().map_or(lost, explain);
        Error::new(kind, detail).caused_by(self.message)
    }
}

impl From<SqlError> for Error {
    fn from(error: SqlError) -> Self {
        error.explained(|_| None)
    }
}

/// A connection that is in a transaction.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that the store can take part in",
    label = "a `&rusqlite::Transaction`, a reference to a client or transaction of `tokio-postgres`, or \
             `&mut tx` of a driver with an adapter",
    note = "of a pool's transaction, pass what it derefs to: `&*tx`",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
#[async_trait]
pub trait SqlRunner<Driver>: Send {
    /// Runs one statement, without a name and without remembering it, and returns the column
    /// `answer` of each row.
    ///
    /// # Errors
    /// What the server or the driver says.
    async fn run(&mut self, sql: &str, args: &[SqlArg<'_>]) -> Result<Vec<SqlRow>, SqlError>;
}

/// A transaction that can be committed. If it is dropped, it is rolled back, or its connection
/// ends.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that a job can be completed in",
    label = "a transaction of `rusqlite`, `tokio-postgres` or a driver with an adapter, by value",
    note = "`complete_in` commits: pass `tx`, not `&tx`",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
#[async_trait]
pub trait SqlTransaction<Driver>: Sized + Send {
    /// The connection that is in it.
    fn runner(&mut self) -> impl SqlRunner<Driver>;

    /// Commits.
    ///
    /// # Errors
    /// What the server or the driver says.
    async fn commit(self) -> Result<(), SqlError>;

    /// Rolls back.
    ///
    /// # Errors
    /// What the server or the driver says.
    async fn rollback(self) -> Result<(), SqlError>;
}

/// What a transaction can be begun on: a connection, or a pool of them.
#[diagnostic::on_unimplemented(
    message = "no transaction can be begun on `{Self}`",
    label = "a `&mut` connection of `rusqlite` or `tokio-postgres`, or of a driver with an adapter",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
#[async_trait]
pub trait SqlBegin<Driver>: Sized + Send {
    /// What is begun.
    type Transaction: SqlTransaction<Driver>;

    /// Begins a transaction as the driver does by default.
    ///
    /// # Errors
    /// What the server or the driver says.
    async fn begin(self) -> Result<Self::Transaction, SqlError>;
}

/// A statement of ours for another schema than `leasehold`. Settings of ours keep their names:
/// `'leasehold.` is in quotes.
pub(crate) fn in_schema<'s>(sql: &'s str, schema: &str) -> Cow<'s, str> {
    if schema == SCHEMA {
        return Cow::Borrowed(sql);
    }
    let mut parts = sql.split("leasehold.");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if text.ends_with('\'') {
            text += "leasehold.";
        } else {
            text.extend(["\"", schema, "\"."]);
        }
        text += part;
    }
    Cow::Owned(text)
}

/// What an SQLSTATE means to whoever called.
pub(crate) fn meaning(code: &str) -> (ErrorKind, &'static str) {
    match code {
        "40001" | "40P01" => (
            ErrorKind::Contended,
            "the server kept rolling the call back in favour of other transactions",
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
        "28000" | "28P01" => (
            ErrorKind::Denied,
            "the server refused the role or its password",
        ),
        "3D000" => (
            ErrorKind::Unsupported,
            "the server has no database of that name",
        ),
        // An idle transaction was ended, by its own limit or by its successor.
        "25P03" => (
            ErrorKind::Unavailable,
            "the server ended a transaction that stood still for too long",
        ),
        // Shutting down, starting up, too many connections, killed by an operator, broken pipe.
        code if code.starts_with("57") || code.starts_with("53") || code.starts_with("08") => (
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
