//! `tokio-postgres`, and `deadpool-postgres` on top of it.

use async_trait::async_trait;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, GenericClient, Transaction};

use super::{SqlArg, SqlBegin, SqlError, SqlRow, SqlRunner, SqlTransaction};

/// The driver that the library brings along.
#[derive(Debug)]
pub enum TokioPostgres {}

impl From<tokio_postgres::Error> for SqlError {
    fn from(error: tokio_postgres::Error) -> Self {
        let told = error.as_db_error().map(|told| told.message().to_owned());
        let code = error.code().map(|code| code.code().to_owned());
        let message = told.unwrap_or_else(|| error.to_string());
        Self { code, message }
    }
}

fn typed<'s>(arg: &'s SqlArg<'_>) -> (&'s (dyn ToSql + Sync), Type) {
    match arg {
        SqlArg::Int(value) => (value, Type::INT8),
        SqlArg::Text(value) => (value, Type::TEXT),
        SqlArg::Bytes(value) => (value, Type::BYTEA),
        SqlArg::Ints(values) => (values, Type::INT8_ARRAY),
        SqlArg::Texts(values) => (values, Type::TEXT_ARRAY),
        SqlArg::Blobs(values) => (values, Type::BYTEA_ARRAY),
    }
}

async fn rows(
    db: &(impl GenericClient + Sync),
    sql: &str,
    args: &[SqlArg<'_>],
) -> Result<Vec<SqlRow>, SqlError> {
    let args: Vec<_> = args.iter().map(typed).collect();
    let rows = db.query_typed(sql, &args).await?;
    let answers = rows.iter().map(|row| row.try_get(0));
    Ok(answers.collect::<Result<_, _>>()?)
}

// Every `GenericClient` there is, and what derefs to one in a pool.
macro_rules! runner {
    ($($client:ty => |$db:ident| $generic:expr),*) => {$(
        #[async_trait]
        impl SqlRunner<TokioPostgres> for &$client {
            async fn run(&mut self, sql: &str, args: &[SqlArg<'_>]) -> Result<Vec<SqlRow>, SqlError> {
                let $db: &$client = self;
                rows($generic, sql, args).await
            }
        }
    )*};
}

runner!(
    Client => |db| db,
    Transaction<'_> => |db| db,
    deadpool_postgres::Client => |db| &***db,
    deadpool_postgres::Transaction<'_> => |db| &**db
);

macro_rules! transaction {
    ($($transaction:ty),*) => {$(
        #[async_trait]
        impl SqlTransaction<TokioPostgres> for $transaction {
            fn runner(&mut self) -> impl SqlRunner<TokioPostgres> {
                &*self
            }

            async fn commit(self) -> Result<(), SqlError> {
                Ok(self.commit().await?)
            }

            async fn rollback(self) -> Result<(), SqlError> {
                Ok(self.rollback().await?)
            }
        }
    )*};
}

transaction!(Transaction<'_>, deadpool_postgres::Transaction<'_>);

/// In a transaction that was begun by a statement.
#[async_trait]
impl SqlTransaction<TokioPostgres> for &Client {
    fn runner(&mut self) -> impl SqlRunner<TokioPostgres> {
        *self
    }

    async fn commit(self) -> Result<(), SqlError> {
        Ok(self.batch_execute("COMMIT").await?)
    }

    async fn rollback(self) -> Result<(), SqlError> {
        Ok(self.batch_execute("ROLLBACK").await?)
    }
}

#[async_trait]
impl<'c> SqlBegin<TokioPostgres> for &'c mut Client {
    type Transaction = Transaction<'c>;

    async fn begin(self) -> Result<Transaction<'c>, SqlError> {
        Ok(self.transaction().await?)
    }
}

#[async_trait]
impl<'c> SqlBegin<TokioPostgres> for &'c mut deadpool_postgres::Client {
    type Transaction = deadpool_postgres::Transaction<'c>;

    async fn begin(self) -> Result<deadpool_postgres::Transaction<'c>, SqlError> {
        // Inherent methods of what it derefs to know nothing of the pool's cache.
        Ok(deadpool_postgres::ClientWrapper::transaction(self).await?)
    }
}
