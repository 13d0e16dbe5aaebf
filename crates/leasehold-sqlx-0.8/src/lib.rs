//! leasehold in the PostgreSQL transactions of sqlx.
//!
//! Name this crate once, and the calls of [`Client`](leasehold::Client) and
//! [`Context`](leasehold::Context) take transactions of sqlx:
//!
//! | call | takes |
//! |---|---|
//! | [`client.enqueue_in`](leasehold::Client::enqueue_in), [`ctx.enqueue_in`](leasehold::Context::enqueue_in), [`ctx.save_checkpoint_in`](leasehold::Context::save_checkpoint_in), [`ctx.fence`](leasehold::Context::fence) | `&mut` a `Transaction`, a `PgConnection` or a `PoolConnection` that is in a transaction |
//! | [`ctx.begin`](leasehold::Context::begin) | `&PgPool`, or `&mut` a connection |
//! | [`ctx.complete_in`](leasehold::Context::complete_in) | a `Transaction`, which it commits |
//!
//! ```no_run
//! use leasehold::{Client, Context, Failure, Job};
//! use leasehold_sqlx as _; // the calls take sqlx's transactions
//! use sqlx::PgPool;
//! # #[derive(serde::Serialize, serde::Deserialize)]
//! struct Charge { order: i64 }
//! # impl Job for Charge { const KIND: &'static str = "charge"; }
//!
//! /// The order and its job, or neither.
//! async fn place(pool: &PgPool, client: &Client, cents: i64) -> anyhow::Result<()> {
//!     let mut tx = pool.begin().await?;
//!     let insert = "INSERT INTO orders (cents) VALUES ($1) RETURNING id";
//!     let order: i64 = sqlx::query_scalar(insert).bind(cents).fetch_one(&mut *tx).await?;
//!     client.enqueue_in(&mut tx, Charge { order }).await?;
//!     tx.commit().await?;
//!     Ok(())
//! }
//!
//! /// The effect and the end of the job, or neither.
//! async fn charge(job: Charge, ctx: Context) -> Result<(), Failure> {
//!     let pool: &PgPool = ctx.state()?;
//!     let mut tx = ctx.begin(pool).await?; // its limits follow the lease
//!     sqlx::query("UPDATE orders SET paid = true WHERE id = $1")
//!         .bind(job.order)
//!         .execute(&mut *tx)
//!         .await?;
//!     ctx.complete_in(tx).await
//! }
//! ```
//!
//! The pool may be built from the URL that the store was opened with, settings of leasehold's
//! included: [`leasehold::store::PostgresOptions::server_url`] takes them out.
//!
//! The minor version of this crate is that of sqlx: 0.9 for sqlx 0.9, 0.8 for sqlx 0.8.
//!
//! **Not for SQLite.** A program links one SQLite, and leasehold's own connections to a file are of
//! `rusqlite`: the transaction for `enqueue_in` and `complete_in` on a SQLite file is `rusqlite`'s.

use async_trait::async_trait;
use leasehold::driver::{SqlArg, SqlBegin, SqlError, SqlRow, SqlRunner, SqlTransaction};
use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres, Row as _, Transaction};

mod statement;

/// The driver's name in the traits of leasehold.
#[derive(Debug)]
pub enum Sqlx {}

fn refused(error: &sqlx::Error) -> SqlError {
    match error {
        sqlx::Error::Database(told) => SqlError::new(told.code().as_deref(), told.message()),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
            SqlError::unreadable(error.to_string())
        }
        _ => SqlError::new(None, error.to_string()),
    }
}

async fn rows(
    db: &mut PgConnection,
    sql: &str,
    args: &[SqlArg<'_>],
) -> Result<Vec<SqlRow>, SqlError> {
    let done = statement::of(sql, args)?.fetch_all(db).await;
    let rows = done.map_err(|error| refused(&error))?;
    let answers = rows.iter().map(|row| row.try_get(0));
    answers
        .collect::<Result<_, _>>()
        .map_err(|error| refused(&error))
}

macro_rules! runner {
    ($($connection:ty),*) => {$(
        #[async_trait]
        impl SqlRunner<Sqlx> for &mut $connection {
            async fn run(&mut self, sql: &str, args: &[SqlArg<'_>]) -> Result<Vec<SqlRow>, SqlError> {
                rows(self, sql, args).await
            }
        }
    )*};
}

runner!(
    PgConnection,
    PoolConnection<Postgres>,
    Transaction<'_, Postgres>
);

#[async_trait]
impl SqlTransaction<Sqlx> for Transaction<'_, Postgres> {
    fn runner(&mut self) -> impl SqlRunner<Sqlx> {
        &mut **self
    }

    async fn commit(self) -> Result<(), SqlError> {
        let done = Transaction::commit(self).await;
        done.map_err(|error| refused(&error))
    }

    async fn rollback(self) -> Result<(), SqlError> {
        let done = Transaction::rollback(self).await;
        done.map_err(|error| refused(&error))
    }
}

macro_rules! begin {
    ($($from:ty => $transaction:ty),*) => {$(
        #[async_trait]
        impl<'c> SqlBegin<Sqlx> for $from {
            type Transaction = $transaction;

            async fn begin(self) -> Result<Self::Transaction, SqlError> {
                let begun = sqlx::Acquire::begin(self).await;
                begun.map_err(|error| refused(&error))
            }
        }
    )*};
}

begin!(
    &'c PgPool => Transaction<'static, Postgres>,
    &'c mut PgConnection => Transaction<'c, Postgres>,
    &'c mut PoolConnection<Postgres> => Transaction<'c, Postgres>
);
