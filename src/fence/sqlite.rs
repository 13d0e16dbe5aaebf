//! A fence in the caller's SQLite transaction.
//!
//! [`open`] writes the mark, so that the transaction has the write lock from then on: what it reads
//! is what it overwrites, and nobody can come between. The mark and the effect commit together.
//! Where the transaction has read before, and the file has changed since, opening fails: no stale
//! read is acted on.
//!
//! ```no_run
//! # use leasehold::{Context, Failure};
//! # struct Debit { amount: i64 }
//! # async fn connect() -> rusqlite::Result<rusqlite::Connection> { unreachable!() }
//! async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
//!     let mut db = connect().await?;
//!     let tx = db.transaction()?;
//!     let fenced = ctx.fence_in(&tx)?; // before the first read
//!     let booking = ctx.job_id().to_string(); // the same in every run of this job
//!     let sql = "INSERT OR IGNORE INTO booking (job, amount) VALUES (?1, ?2)";
//!     fenced.execute(sql, (booking, -job.amount))?;
//!     tx.commit()?;
//!     Ok(())
//! }
//! ```
//!
//! A fence stops earlier owners, not a repeat by the next one: a run that commits and dies before
//! its lease is settled is followed by another, under a larger token. So the effect above is the
//! same the second time. [`is_first`](OpenConnection::is_first) is for repeats within one run.
//!
//! The connection is your own, of `rusqlite` 0.32 to 0.41: the one version in your tree that this
//! crate uses too (`cargo tree -i rusqlite`).
//!
//! Marks are kept in two tables of the caller's file, `leasehold_fence` and `leasehold_fence_done`,
//! which are made when they are first needed. Where the queue is in the same file,
//! [`Context::complete_in`](crate::Context::complete_in) does more.

use std::ops::Deref;

use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::{FenceError, Op, Scope, Stale, operation_name};
use crate::lease::FencingToken;
use crate::sqlite_error::explain;

/// The floor is the mark of the empty scope, which is no scope's text. `done` keeps the largest
/// token that has applied an operation: under an open fence no smaller one can ask.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS leasehold_fence (
        scope TEXT PRIMARY KEY, mark INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS leasehold_fence_done (
        scope TEXT NOT NULL, operation TEXT NOT NULL, token INTEGER NOT NULL,
        PRIMARY KEY (scope, operation)
    ) WITHOUT ROWID;";

/// Takes the write lock, whatever it finds.
const OPEN: &str = "
    INSERT INTO leasehold_fence (scope, mark)
    SELECT ?1, ?2 WHERE ?2 >= coalesce((SELECT mark FROM leasehold_fence WHERE scope = ''), 0)
    ON CONFLICT (scope) DO UPDATE SET mark = excluded.mark WHERE excluded.mark > mark";

const MARK: &str = "SELECT max(mark) FROM leasehold_fence WHERE scope IN (?1, '')";

const FIRST: &str = "
    INSERT INTO leasehold_fence_done (scope, operation, token) VALUES (?1, ?2, ?3)
    ON CONFLICT (scope, operation) DO UPDATE SET token = excluded.token
    WHERE excluded.token > token";

/// A transaction that was opened: reads and writes as the connection does.
#[derive(Debug)]
pub struct OpenConnection<'t> {
    db: &'t Connection,
    scope: Scope,
    token: FencingToken,
}

/// Opens a transaction's fence: the mark of `scope` becomes `token` when it commits, and until then
/// nobody else can write to the file.
///
/// # Errors
/// If the mark is above the token, or the write lock cannot be had.
pub fn open<'t>(
    tx: &'t Transaction<'_>,
    scope: &Scope,
    token: FencingToken,
) -> Result<OpenConnection<'t>, FenceError> {
    let db: &Connection = tx;
    let number = token.get() as i64;
    let raised = with_tables(db, |db| {
        db.prepare_cached(OPEN)?
            .execute(params![scope.as_str(), number])
    })?;
    if raised == 0 {
        let mark: Option<i64> = db
            .prepare_cached(MARK)
            .and_then(|mut mark| {
                mark.query_row([scope.as_str()], |row| row.get(0))
                    .optional()
            })
            .map_err(trouble)?;
        let mark = FencingToken::new(mark.unwrap_or_default() as u64);
        if mark > token {
            return Err(Stale::refuse(scope, token, mark, Op::Open).into());
        }
    }
    Ok(OpenConnection {
        db,
        scope: scope.clone(),
        token,
    })
}

/// Forgets the marks below `below`, and lets nobody below it in from the commit on.
///
/// # Errors
/// If the write lock cannot be had.
pub fn prune(tx: &Transaction<'_>, below: FencingToken) -> Result<(), FenceError> {
    let below = below.get() as i64;
    with_tables(tx, |db| {
        db.execute(
            "INSERT INTO leasehold_fence (scope, mark) VALUES ('', ?1)
             ON CONFLICT (scope) DO UPDATE SET mark = max(mark, excluded.mark)",
            [below],
        )?;
        db.execute(
            "DELETE FROM leasehold_fence WHERE mark < ?1 AND scope != ''",
            [below],
        )?;
        db.execute("DELETE FROM leasehold_fence_done WHERE token < ?1", [below])
    })?;
    Ok(())
}

/// Runs a step; if the tables are not there yet, makes them and runs it again.
fn with_tables<T>(
    db: &Connection,
    step: impl Fn(&Connection) -> rusqlite::Result<T>,
) -> Result<T, FenceError> {
    // Not the other way round: looking for the tables would be a read before the write.
    match step(db) {
        Err(error) if error.to_string().contains("no such table: leasehold_fence") => {
            db.execute_batch(TABLES).map_err(trouble)?;
            step(db).map_err(trouble)
        }
        done => done.map_err(trouble),
    }
}

fn trouble(error: rusqlite::Error) -> FenceError {
    explain(error).in_store("sqlite").into()
}

impl OpenConnection<'_> {
    /// Notes a named operation. True the first time under this token: then do it, in this
    /// transaction. The job's next run has another token, and is the first again.
    ///
    /// # Errors
    /// If the name is too long, or the engine refuses.
    pub fn is_first(&self, operation: &str) -> Result<bool, FenceError> {
        operation_name(operation)?;
        let token = self.token.get() as i64;
        let noted = self
            .db
            .prepare_cached(FIRST)
            .and_then(|mut first| first.execute(params![self.scope.as_str(), operation, token]));
        noted.map(|rows| rows == 1).map_err(trouble)
    }
}

impl Deref for OpenConnection<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.db
    }
}
