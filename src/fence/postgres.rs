//! A fence in the caller's PostgreSQL transaction (`tokio-postgres`).
//!
//! Opening writes the scope's row, in one round trip, and so locks it until the transaction ends:
//! an older owner waits for it and is then refused, a newer one waits and then sees what was
//! written. The mark and the effect commit together. `READ COMMITTED`, the default, is enough;
//! under `REPEATABLE READ` and `SERIALIZABLE` opening fails as contended where it would have to act
//! on an old picture.
//!
//! ```no_run
//! # use leasehold::{Context, Failure};
//! # struct Debit { amount: i64 }
//! # async fn connect() -> Result<tokio_postgres::Client, tokio_postgres::Error> { unreachable!() }
//! async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
//!     let mut db = connect().await?;
//!     let tx = db.transaction().await?;
//!     let fenced = ctx.fence(&tx).await?;
//!     let booking = ctx.job_id().to_string(); // the same in every run of this job
//!     let sql = "INSERT INTO booking (job, amount) VALUES ($1, $2) ON CONFLICT DO NOTHING";
//!     fenced.execute(sql, &[&booking, &-job.amount]).await?;
//!     tx.commit().await?;
//!     Ok(())
//! }
//! ```
//!
//! A fence stops earlier owners, not a repeat by the next one: a run that commits and dies before
//! its lease is settled is followed by another, under a larger token. So the effect above is the
//! same the second time. [`is_first`](OpenTransaction::is_first) is for repeats within one run.
//!
//! A pool's transaction that derefs to [`Transaction`] is passed as `&*tx`.
//!
//! **Several scopes.** [`open_all`] locks them in one order whatever the order in which they are
//! given, so that transactions which open all their scopes at once never wait for each other in a
//! circle. If you open scopes one by one, do it in the order of their texts. Otherwise two
//! transactions may wait for each other; the server ends one of them after its `deadlock_timeout`,
//! which is [`Contended`](ErrorKind::Contended) here, and nothing of it is applied.
//!
//! The tables `leasehold_fence` and `leasehold_fence_done` are made by [`migrate`].

use std::ops::Deref;

use async_trait::async_trait;
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use super::{Fence, FenceError, Op, Scope, Stale, operation_name};
use crate::error::{Error, ErrorKind};
use crate::lease::FencingToken;

/// The floor is the mark of the empty scope, which is no scope's text. Two that make the tables at
/// once would get in each other's way, hence the lock.
const TABLES: &str = "
    BEGIN;
    SELECT pg_advisory_xact_lock(7811887394538777444);
    CREATE TABLE IF NOT EXISTS leasehold_fence (
        scope TEXT COLLATE \"C\" PRIMARY KEY, mark BIGINT NOT NULL
    );
    CREATE TABLE IF NOT EXISTS leasehold_fence_done (
        scope TEXT COLLATE \"C\" NOT NULL, operation TEXT COLLATE \"C\" NOT NULL,
        token BIGINT NOT NULL, PRIMARY KEY (scope, operation)
    );
    COMMIT;";

/// Updates the row in any case: that is what locks it, and what makes an old picture fail.
const OPEN: &str = "
    INSERT INTO leasehold_fence AS f (scope, mark)
    SELECT s, $2 FROM unnest($1) AS s
    WHERE $2 >= coalesce((SELECT mark FROM leasehold_fence WHERE scope = ''), 0)
    ORDER BY s COLLATE \"C\"
    ON CONFLICT (scope) DO UPDATE SET mark = greatest(f.mark, excluded.mark)
    RETURNING scope, mark";

const MARK: &str = "SELECT max(mark) FROM leasehold_fence WHERE scope IN ($1, '')";

const FIRST: &str = "
    INSERT INTO leasehold_fence_done AS d (scope, operation, token) VALUES ($1, $2, $3)
    ON CONFLICT (scope, operation) DO UPDATE SET token = excluded.token
    WHERE excluded.token > d.token";

const RAISE_FLOOR: &str = "
    INSERT INTO leasehold_fence AS f (scope, mark) VALUES ('', $1)
    ON CONFLICT (scope) DO UPDATE SET mark = greatest(f.mark, excluded.mark)";

/// Makes the tables that marks are kept in, if they are not there. Not inside a transaction.
///
/// # Errors
/// If the server refuses.
pub async fn migrate(client: &tokio_postgres::Client) -> Result<(), FenceError> {
    client.batch_execute(TABLES).await.map_err(trouble)
}

/// Opens several scopes for one token, all or none, without regard to their order.
///
/// # Errors
/// If one of the marks is above the token; then roll back.
pub async fn open_all<'t>(
    tx: &'t Transaction<'_>,
    scopes: &[Scope],
    token: FencingToken,
) -> Result<Vec<OpenTransaction<'t>>, FenceError> {
    let number = token.get() as i64;
    let mut texts: Vec<&str> = scopes.iter().map(Scope::as_str).collect();
    texts.sort_unstable();
    texts.dedup();
    let params: [(&(dyn ToSql + Sync), Type); 2] =
        [(&texts, Type::TEXT_ARRAY), (&number, Type::INT8)];
    let rows = tx.query_typed(OPEN, &params).await.map_err(trouble)?;
    if rows.is_empty()
        && let Some(scope) = scopes.first()
    {
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&scope.as_str(), Type::TEXT)];
        let mark = tx.query_typed_one(MARK, &params).await.map_err(trouble)?;
        let mark: Option<i64> = mark.get(0);
        let mark = FencingToken::new(mark.unwrap_or_default() as u64);
        return Err(Stale::refuse(scope, token, mark, Op::Open).into());
    }
    for row in &rows {
        let (text, mark): (&str, i64) = (row.get(0), row.get(1));
        let scope = scopes.iter().find(|scope| scope.as_str() == text);
        if let Some(scope) = scope.filter(|_| mark > number) {
            let mark = FencingToken::new(mark as u64);
            return Err(Stale::refuse(scope, token, mark, Op::Open).into());
        }
    }
    let fenced = |scope: &Scope| OpenTransaction {
        tx,
        scope: scope.clone(),
        token,
    };
    Ok(scopes.iter().map(fenced).collect())
}

/// Forgets the marks below `below`, and lets nobody below it in from the commit on.
///
/// # Errors
/// If the server refuses.
pub async fn prune(tx: &Transaction<'_>, below: FencingToken) -> Result<(), FenceError> {
    let below = below.get() as i64;
    for statement in [
        RAISE_FLOOR,
        "DELETE FROM leasehold_fence WHERE mark < $1 AND scope <> ''",
        "DELETE FROM leasehold_fence_done WHERE token < $1",
    ] {
        let done = tx.execute_typed(statement, &[(&below, Type::INT8)]).await;
        done.map_err(trouble)?;
    }
    Ok(())
}

#[async_trait]
impl<'t> Fence for &'t Transaction<'_> {
    type Opened = OpenTransaction<'t>;

    async fn open(
        &self,
        scope: &Scope,
        token: FencingToken,
    ) -> Result<OpenTransaction<'t>, FenceError> {
        let mut opened = open_all(*self, std::slice::from_ref(scope), token).await?;
        Ok(opened.remove(0))
    }
}

/// A transaction that was opened: reads and writes as the transaction does.
#[expect(missing_debug_implementations, reason = "a transaction has none")]
pub struct OpenTransaction<'t> {
    tx: &'t Transaction<'t>,
    scope: Scope,
    token: FencingToken,
}

impl OpenTransaction<'_> {
    /// Notes a named operation. True the first time under this token: then do it, in this
    /// transaction. The job's next run has another token, and is the first again.
    ///
    /// # Errors
    /// If the name is too long, or the server refuses.
    pub async fn is_first(&self, operation: &str) -> Result<bool, FenceError> {
        operation_name(operation)?;
        let (scope, token) = (self.scope.as_str(), self.token.get() as i64);
        let params: [(&(dyn ToSql + Sync), Type); 3] = [
            (&scope, Type::TEXT),
            (&operation, Type::TEXT),
            (&token, Type::INT8),
        ];
        let noted = self.tx.execute_typed(FIRST, &params).await;
        noted.map(|rows| rows == 1).map_err(trouble)
    }
}

impl<'t> Deref for OpenTransaction<'t> {
    type Target = Transaction<'t>;

    fn deref(&self) -> &Transaction<'t> {
        self.tx
    }
}

fn trouble(error: tokio_postgres::Error) -> FenceError {
    let (kind, detail) = match error.code() {
        None => (ErrorKind::Unavailable, "the server did not answer"),
        Some(&SqlState::UNDEFINED_TABLE) => (
            ErrorKind::Unsupported,
            "there are no tables for marks; call fence::postgres::migrate once",
        ),
        Some(
            &SqlState::T_R_SERIALIZATION_FAILURE
            | &SqlState::T_R_DEADLOCK_DETECTED
            | &SqlState::LOCK_NOT_AVAILABLE,
        ) => (
            ErrorKind::Contended,
            "another transaction was in the way; roll back and begin again",
        ),
        Some(&SqlState::DISK_FULL) => (ErrorKind::Full, "the server's disk is full"),
        Some(&SqlState::READ_ONLY_SQL_TRANSACTION | &SqlState::INSUFFICIENT_PRIVILEGE) => {
            (ErrorKind::ReadOnly, "marks cannot be written")
        }
        Some(_) => (ErrorKind::Unexpected, "the server refused a statement"),
    };
    Error::new(kind, detail)
        .caused_by(error)
        .in_store("postgres")
        .into()
}
