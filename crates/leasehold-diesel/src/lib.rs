//! leasehold in the PostgreSQL transactions of diesel-async.
//!
//! Name this crate once, and the calls of [`Client`](leasehold::Client) and
//! [`Context`](leasehold::Context) take an [`AsyncPgConnection`] that is in a transaction. Of a
//! pool's connection, pass `&mut *connection`.
//!
//! ```no_run
//! use diesel::sql_types::BigInt;
//! use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};
//! use leasehold::{Client, Context, Failure, Job};
//! use leasehold_diesel as _; // the calls take diesel's connections
//! # #[derive(serde::Serialize, serde::Deserialize)]
//! struct Charge { order: i64 }
//! # impl Job for Charge { const KIND: &'static str = "charge"; }
//! # async fn connect() -> Result<AsyncPgConnection, Failure> { unreachable!() }
//!
//! /// The order and its job, or neither.
//! async fn place(db: &mut AsyncPgConnection, client: &Client, order: i64) -> anyhow::Result<()> {
//!     db.transaction(async |tx| {
//!         let insert = "INSERT INTO orders (id) VALUES ($1)";
//!         diesel::sql_query(insert).bind::<BigInt, _>(order).execute(tx).await?;
//!         client.enqueue_in(&mut *tx, Charge { order }).await?;
//!         anyhow::Ok(())
//!     })
//!     .await
//! }
//!
//! /// The effect and the end of the job, or neither.
//! async fn charge(job: Charge, ctx: Context) -> Result<(), Failure> {
//!     let mut db = connect().await?;
//!     let tx = ctx.begin(&mut db).await?; // its limits follow the lease
//!     let update = "UPDATE orders SET paid = true WHERE id = $1";
//!     diesel::sql_query(update).bind::<BigInt, _>(job.order).execute(tx).await?;
//!     ctx.complete_in(tx).await
//! }
//! ```
//!
//! [`ctx.begin`](leasehold::Context::begin) gives back the connection itself, in a transaction that
//! [`ctx.complete_in`](leasehold::Context::complete_in) commits. It is not for a connection that is
//! in a transaction already: inside `transaction(…)` the commit is diesel's. If a handler gives up
//! in between, let it drop the connection; a pool notices that it is in a transaction, and closes
//! it.

use async_trait::async_trait;
use diesel::pg::Pg;
use diesel::result::{DatabaseErrorKind, Error};
use diesel::sql_types::{Array, BigInt, Binary, Nullable, Text};
use diesel::{QueryableByName, sql_query};
use diesel_async::{
    AnsiTransactionManager, AsyncPgConnection, RunQueryDsl as _, TransactionManager as _,
};
use leasehold::driver::{SqlArg, SqlBegin, SqlError, SqlRow, SqlRunner, SqlTransaction};

/// The driver's name in the traits of leasehold.
#[derive(Debug)]
pub enum Diesel {}

#[derive(QueryableByName)]
struct Answered {
    #[diesel(sql_type = Array<Nullable<Text>>)]
    answer: Vec<Option<String>>,
}

/// diesel keeps the server's SQLSTATE to itself, and gives a few kinds.
fn refused(error: &Error) -> SqlError {
    let Error::DatabaseError(kind, told) = error else {
        return SqlError::unreadable(error.to_string());
    };
    let code = match kind {
        DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand => None,
        DatabaseErrorKind::SerializationFailure => Some("40001"),
        DatabaseErrorKind::ReadOnlyTransaction => Some("25006"),
        _ => Some(""),
    };
    SqlError::new(code, told.message())
}

fn owned<T: ToOwned + ?Sized>(values: Option<&Vec<Option<&T>>>) -> Option<Vec<Option<T::Owned>>> {
    values.map(|values| {
        let values = values.iter();
        values.map(|value| value.map(ToOwned::to_owned)).collect()
    })
}

#[async_trait]
impl SqlRunner<Diesel> for &mut AsyncPgConnection {
    async fn run(&mut self, sql: &str, args: &[SqlArg<'_>]) -> Result<Vec<SqlRow>, SqlError> {
        let mut query = sql_query(sql).into_boxed::<Pg>();
        for arg in args {
            query = match arg {
                SqlArg::Int(value) => query.bind::<Nullable<BigInt>, _>(*value),
                SqlArg::Text(value) => query.bind::<Nullable<Text>, _>(value.map(str::to_owned)),
                SqlArg::Bytes(value) => {
                    query.bind::<Nullable<Binary>, _>(value.map(<[u8]>::to_owned))
                }
                SqlArg::Ints(values) => {
                    query.bind::<Nullable<Array<Nullable<BigInt>>>, _>(values.clone())
                }
                SqlArg::Texts(values) => {
                    query.bind::<Nullable<Array<Nullable<Text>>>, _>(owned(values.as_ref()))
                }
                SqlArg::Blobs(values) => {
                    query.bind::<Nullable<Array<Nullable<Binary>>>, _>(owned(values.as_ref()))
                }
                _ => return Err(SqlError::unreadable("a kind of argument that is not known")),
            };
        }
        let rows = query.load::<Answered>(&mut **self).await;
        let rows = rows.map_err(|error| refused(&error))?;
        Ok(rows.into_iter().map(|row| row.answer).collect())
    }
}

#[async_trait]
impl SqlTransaction<Diesel> for &mut AsyncPgConnection {
    fn runner(&mut self) -> impl SqlRunner<Diesel> {
        &mut **self
    }

    async fn commit(self) -> Result<(), SqlError> {
        let done = AnsiTransactionManager::commit_transaction(self).await;
        done.map_err(|error| refused(&error))
    }

    async fn rollback(self) -> Result<(), SqlError> {
        let done = AnsiTransactionManager::rollback_transaction(self).await;
        done.map_err(|error| refused(&error))
    }
}

#[async_trait]
impl<'c> SqlBegin<Diesel> for &'c mut AsyncPgConnection {
    type Transaction = &'c mut AsyncPgConnection;

    async fn begin(self) -> Result<&'c mut AsyncPgConnection, SqlError> {
        let begun = AnsiTransactionManager::begin_transaction(&mut *self).await;
        begun.map_err(|error| refused(&error))?;
        Ok(self)
    }
}
