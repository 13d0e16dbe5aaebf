//! Turns a statement of leasehold into one of sqlx. Only this file differs between versions.

use leasehold::driver::{SqlArg, SqlError};
use sqlx::Postgres;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;

/// Not kept on the connection: behind a pooler the next statement may be on another one.
pub(crate) fn of<'q>(
    sql: &'q str,
    args: &'q [SqlArg<'_>],
) -> Result<Query<'q, Postgres, PgArguments>, SqlError> {
    let mut query = sqlx::query(sql).persistent(false);
    for arg in args {
        query = match arg {
            SqlArg::Int(value) => query.bind(*value),
            SqlArg::Text(value) => query.bind(*value),
            SqlArg::Bytes(value) => query.bind(*value),
            SqlArg::Ints(values) => query.bind(values.as_deref()),
            SqlArg::Texts(values) => query.bind(values.as_deref()),
            SqlArg::Blobs(values) => query.bind(values.as_deref()),
            _ => return Err(SqlError::unreadable("a kind of argument that is not known")),
        };
    }
    Ok(query)
}
