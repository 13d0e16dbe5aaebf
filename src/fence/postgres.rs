//! A fence in the caller's PostgreSQL transaction, of any driver.
//!
//! Opening writes the scope's row, in one round trip (two for a scope without a mark), and so
//! locks it until the transaction ends: an older owner waits for it and is then refused, a newer
//! one waits and then sees what was written. The mark and the effect commit together.
//! `READ COMMITTED`, the default, is enough; under `REPEATABLE READ` and `SERIALIZABLE` opening
//! fails as contended where it would have to act on an old picture.
//!
//! ```no_run
//! # use leasehold::{Context, Failure};
//! # struct Debit { amount: i64 }
//! # async fn connect() -> Result<tokio_postgres::Client, tokio_postgres::Error> { unreachable!() }
//! async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
//!     let mut db = connect().await?;
//!     let tx = ctx.begin(&mut db).await?; // its limits follow the lease
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
//! A pool's transaction that derefs to one of the driver's is passed as `&*tx`.
//!
//! **Several scopes.** [`open_all`] locks them in one order whatever the order in which they are
//! given, so that transactions which open all their scopes at once never wait for each other in a
//! circle. If you open scopes one by one, do it in the order of their texts. Otherwise two
//! transactions may wait for each other; the server ends one of them after its `deadlock_timeout`,
//! which is [`Contended`](ErrorKind::Contended) here, and nothing of it is applied.
//!
//! The tables `leasehold.fence` and `leasehold.fence_done` are made by [`migrate`].

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::{FenceError, Op, Scope, Stale, operation_name};
use crate::driver::limit::{Limits, end_stale, is_true, limited};
use crate::driver::{SCHEMA, SqlArg, SqlError, SqlRow, SqlRunner, in_schema};
use crate::error::ErrorKind;
use crate::lease::FencingToken;

/// The floor is the mark of the empty scope, which is no scope's text. Two that make the tables at
/// once would get in each other's way, hence the lock.
const TABLES: &str = "
    BEGIN;
    SELECT pg_advisory_xact_lock(7811887394538777444);
    CREATE SCHEMA IF NOT EXISTS leasehold;
    CREATE TABLE IF NOT EXISTS leasehold.fence (
        scope TEXT COLLATE \"C\" PRIMARY KEY, mark BIGINT NOT NULL
    );
    CREATE TABLE IF NOT EXISTS leasehold.fence_done (
        scope TEXT COLLATE \"C\" NOT NULL, operation TEXT COLLATE \"C\" NOT NULL,
        token BIGINT NOT NULL, PRIMARY KEY (scope, operation)
    );
    COMMIT;";

/// Updates the row in any case: that is what locks it, and what makes an old picture fail. Where
/// somebody else is at the scope, and may stand still, it comes back at once: it would wait for
/// that row.
const OPEN: &str = concat!(
    "WITH ",
    limited!(idle "$3", wait "$4", scopes "$1", token "$2"),
    ", opened AS (
        INSERT INTO leasehold.fence AS f (scope, mark)
        SELECT text, $2::int8 FROM held, unnest($1::text[]) AS text
        WHERE (NOT another OR $5::int8 = 1)
          AND $2::int8 >= coalesce((SELECT mark FROM leasehold.fence WHERE scope = ''), 0)
        ORDER BY text COLLATE \"C\"
        ON CONFLICT (scope) DO UPDATE SET mark = greatest(f.mark, excluded.mark)
        RETURNING scope, mark, f.xmax = 0 AS is_new
    )
    SELECT ARRAY[another::text, scope, mark::text, is_new::text] AS answer FROM held LEFT JOIN opened ON true"
);

/// The floor, in a statement of its own: one that wrote a new row may have waited for the prune
/// that deleted the old one, and has the picture of before. A transaction that has no other picture
/// fails if the floor was raised since.
const FLOOR: &str = "
    SELECT ARRAY[mark::text] AS answer
    FROM (SELECT count(*) FROM (
              SELECT FROM leasehold.fence
              WHERE scope = '' AND current_setting('transaction_isolation') <> 'read committed'
              FOR SHARE) AS locked) AS first, leasehold.fence
    WHERE scope = ''";

const MARK: &str = "SELECT ARRAY[max(mark)::text] AS answer FROM leasehold.fence
    WHERE scope IN ($1::text, '')";

const FIRST: &str = "
    INSERT INTO leasehold.fence_done AS d (scope, operation, token)
    VALUES ($1::text, $2::text, $3::int8)
    ON CONFLICT (scope, operation) DO UPDATE SET token = excluded.token
    WHERE excluded.token > d.token
    RETURNING ARRAY[operation] AS answer";

const PRUNE: &str = "
    WITH floor AS (
        INSERT INTO leasehold.fence AS f (scope, mark) VALUES ('', $1::int8)
        ON CONFLICT (scope) DO UPDATE SET mark = greatest(f.mark, excluded.mark)
    ), marks AS (
        DELETE FROM leasehold.fence WHERE mark < $1::int8 AND scope <> ''
    ), done AS (
        DELETE FROM leasehold.fence_done WHERE token < $1::int8
    )
    SELECT ARRAY[NULL::text] AS answer";

/// Makes the tables that marks are kept in, if they are not there. Not inside a transaction.
///
/// # Errors
/// If the server refuses.
pub async fn migrate(client: &tokio_postgres::Client) -> Result<(), FenceError> {
    client
        .batch_execute(TABLES)
        .await
        .map_err(|error| trouble(error.into()))
}

/// Opens a scope: the transaction's row of it carries the token from now on.
///
/// [`Context::fence`](crate::Context::fence) does this under a lease, and puts limits on the
/// transaction that follow the lease.
///
/// # Errors
/// If the mark is above the token; then roll back.
pub async fn open<T: SqlRunner<D>, D>(
    tx: T,
    scope: &Scope,
    token: FencingToken,
) -> Result<OpenTransaction<T, D>, FenceError> {
    open_all(tx, std::slice::from_ref(scope), token).await
}

/// Opens several scopes for one token, all or none, without regard to their order.
///
/// # Errors
/// If one of the marks is above the token; then roll back.
pub async fn open_all<T: SqlRunner<D>, D>(
    tx: T,
    scopes: &[Scope],
    token: FencingToken,
) -> Result<OpenTransaction<T, D>, FenceError> {
    opened(tx, scopes, token, Limits::default(), SCHEMA).await
}

pub(crate) async fn opened<T: SqlRunner<D>, D>(
    mut tx: T,
    scopes: &[Scope],
    token: FencingToken,
    limits: Limits,
    schema: &str,
) -> Result<OpenTransaction<T, D>, FenceError> {
    let mut texts: Vec<&str> = scopes.iter().map(Scope::as_str).collect();
    texts.sort_unstable();
    texts.dedup();
    let number = SqlArg::Int(Some(token.get() as i64));
    let [idle, wait] = limits.args();
    let named = SqlArg::Texts(Some(texts.iter().map(|text| Some(*text)).collect()));
    // Under a scope of one's own naming an older owner need not have been replaced: one waits for
    // it.
    let waits = limits.idle.is_none();
    let mut args = [named, number, idle, wait, SqlArg::Int(Some(waits.into()))];
    let open = in_schema(OPEN, schema);
    let mut rows = tx.run(&open, &args).await.map_err(trouble)?;
    if !waits && is_true(&rows, 0) {
        let ended = end_stale(&mut tx, &texts, token).await;
        ended.map_err(trouble)?;
        args[4] = SqlArg::Int(Some(1));
        rows = tx.run(&open, &args).await.map_err(trouble)?;
    }
    let mut marks = rows.iter().filter_map(|row| match &row[..] {
        [_, Some(scope), Some(mark), _] => Some((scope, mark.parse::<u64>().ok()?)),
        _ => None,
    });
    let first = marks.next();
    if first.is_none()
        && let Some(scope) = scopes.first()
    {
        let args = [SqlArg::Text(Some(scope.as_str()))];
        let mark = tx
            .run(&in_schema(MARK, schema), &args)
            .await
            .map_err(trouble)?;
        return Err(Stale::refuse(scope, token, mark_of(&mark), Op::Open).into());
    }
    for (text, mark) in first.into_iter().chain(marks) {
        let scope = scopes.iter().find(|scope| scope.as_str() == text);
        if let Some(scope) = scope.filter(|_| mark > token.get()) {
            return Err(Stale::refuse(scope, token, FencingToken::new(mark), Op::Open).into());
        }
    }
    if let Some(scope) = scopes.first()
        && (0..rows.len()).any(|nth| is_true(&rows[nth..], 3))
    {
        let floor = tx.run(&in_schema(FLOOR, schema), &[]).await;
        let floor = mark_of(&floor.map_err(trouble)?);
        if floor > token {
            return Err(Stale::refuse(scope, token, floor, Op::Open).into());
        }
    }
    Ok(OpenTransaction {
        tx,
        scope: scopes.first().cloned(),
        token,
        first: in_schema(FIRST, schema),
        driver: PhantomData,
    })
}

/// Forgets the marks below `below`, and lets nobody below it in from the commit on.
///
/// # Errors
/// If the server refuses.
pub async fn prune<T: SqlRunner<D>, D>(mut tx: T, below: FencingToken) -> Result<(), FenceError> {
    let below = SqlArg::Int(Some(below.get() as i64));
    tx.run(PRUNE, &[below]).await.map_err(trouble)?;
    Ok(())
}

/// A transaction that was opened: reads and writes as the transaction does.
#[expect(missing_debug_implementations, reason = "a transaction has none")]
pub struct OpenTransaction<T, D> {
    tx: T,
    /// The first of those that were opened.
    scope: Option<Scope>,
    token: FencingToken,
    first: Cow<'static, str>,
    driver: PhantomData<fn() -> D>,
}

impl<T: SqlRunner<D>, D> OpenTransaction<T, D> {
    /// Notes a named operation, under the first scope that was opened. True the first time under
    /// this token: then do it, in this transaction. The job's next run has another token, and is
    /// the first again.
    ///
    /// # Errors
    /// If the name is too long, or the server refuses.
    pub async fn is_first(&mut self, operation: &str) -> Result<bool, FenceError> {
        operation_name(operation)?;
        let args = [
            SqlArg::Text(Some(self.scope.as_ref().map_or("", Scope::as_str))),
            SqlArg::Text(Some(operation)),
            SqlArg::Int(Some(self.token.get() as i64)),
        ];
        let noted = self.tx.run(&self.first, &args).await;
        noted.map(|rows| !rows.is_empty()).map_err(trouble)
    }
}

impl<T: Deref, D> Deref for OpenTransaction<T, D> {
    type Target = T::Target;

    fn deref(&self) -> &T::Target {
        &self.tx
    }
}

impl<T: DerefMut, D> DerefMut for OpenTransaction<T, D> {
    fn deref_mut(&mut self) -> &mut T::Target {
        &mut self.tx
    }
}

/// The only number of an answer; none is the smallest.
fn mark_of(rows: &[SqlRow]) -> FencingToken {
    let cell = rows.first().and_then(|row| row.first()?.as_ref());
    FencingToken::new(cell.and_then(|cell| cell.parse().ok()).unwrap_or_default())
}

fn trouble(error: SqlError) -> FenceError {
    let of_marks = |code: &str| match code {
        "42P01" => Some((
            ErrorKind::Unsupported,
            "there are no tables for marks; call fence::postgres::migrate once",
        )),
        "40001" | "40P01" | "55P03" => Some((
            ErrorKind::Contended,
            "another transaction was in the way; roll back and begin again",
        )),
        "25006" | "42501" => Some((ErrorKind::ReadOnly, "marks cannot be written")),
        _ => None,
    };
    error.explained(of_marks).in_store("postgres").into()
}
