//! The tables at the version that this crate knows.
//!
//! Many processes may start at once: whoever finds an older version takes a lock that ends with its
//! transaction, looks again, and brings the schema up to date. The others find it done.

use tokio_postgres::Client;

use super::fault::{Done, Fault};
use super::sql::in_schema;
use super::tx::args;
use crate::error::{Error, ErrorKind};

/// Each brings the tables from the version of its place in the list to the next.
const MIGRATIONS: [&str; 2] = [include_str!("schema.sql"), include_str!("plain.sql")];
/// The version that this crate writes.
pub(super) const VERSION: i32 = MIGRATIONS.len() as i32;

/// All of it, for those who run their migrations by hand.
pub(super) fn text(schema: &str) -> String {
    let mut text = format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\";\n\n");
    for migration in MIGRATIONS {
        text.push_str(&in_schema(migration, schema));
    }
    text
}

/// Whether the tables are there, and of this version.
pub(super) async fn is_current(db: &Client, schema: &str) -> Done<bool> {
    let version = version(db, schema).await?;
    if version > VERSION {
        return Err(Fault::Broken(Error::new(
            ErrorKind::TooNew,
            format!(
                "the schema has version {version} and this program knows {VERSION}; \
                 run the newer version of the program"
            ),
        )));
    }
    Ok(version == VERSION)
}

async fn version(db: &Client, schema: &str) -> Done<i32> {
    // Of the catalog's tables, which are read anew: a name that was not found is remembered as such.
    let rows = db
        .query_typed(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n \
             ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'meta')",
            args![schema => TEXT],
        )
        .await?;
    let there: bool = rows.first().map_or(Ok(false), |row| row.try_get(0))?;
    if !there {
        return Ok(0);
    }
    let sql = in_schema("SELECT version FROM leasehold.meta", schema);
    let rows = db.query_typed(&sql, &[]).await?;
    Ok(rows.first().map_or(Ok(0), |row| row.try_get(0))?)
}

/// Brings the schema up to date.
pub(super) async fn migrate(db: &Client, schema: &str) -> Done<()> {
    if is_current(db, schema).await? {
        return Ok(());
    }
    // Whoever waited for the lock must see what the one before it did, whatever the role's default is.
    db.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '60s'")
        .await?;
    let done = locked(db, schema).await;
    let end = if done.is_ok() { "COMMIT" } else { "ROLLBACK" };
    let ended = db.batch_execute(end).await;
    done?;
    Ok(ended?)
}

async fn locked(db: &Client, schema: &str) -> Done<()> {
    db.query_typed(
        "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
        args![format!("leasehold migration of {schema}") => TEXT],
    )
    .await?;
    if is_current(db, schema).await? {
        return Ok(());
    }
    let from = version(db, schema).await?;
    if from == 0 {
        db.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\""))
            .await?;
    }
    for migration in MIGRATIONS.iter().skip(from as usize) {
        db.batch_execute(&in_schema(migration, schema)).await?;
    }
    Ok(())
}
