//! The tables, functions and views at the version that this crate knows.
//!
//! Nothing but [`migrate`] makes or changes anything. It runs when somebody asks for it, and by
//! itself only where there is nothing yet, at the first call that writes: who only looks changes
//! nothing, and a newer program does not change the schema under older ones.
//!
//! Functions and columns of a released version stay when a later one comes, under the same names:
//! programs of both versions work side by side. `meta.oldest` says which programs still can. A
//! column that is added to `head` must be nullable, and have no default: functions of the earlier
//! version copy its rows whole, and of a row that was there before the server gives them no
//! default.
//!
//! A release that changes the functions and not the tables replaces them, and an earlier one leaves
//! those of a later one alone, whichever migrates last.
//!
//! Many processes may start at once: whoever finds something to do takes a lock that ends with its
//! transaction, looks again, and does it. The others find it done.

use tokio_postgres::Client;

use super::fault::{Done, Fault};
use super::text::{functions, in_schema};
use super::tx::args;
use crate::error::{Error, ErrorKind};

/// Each brings the tables from the version of its place in the list to the next.
const TABLES: [&str; 1] = [include_str!("schema.sql")];
/// The version that this crate writes.
pub(super) const VERSION: i32 = TABLES.len() as i32;

/// Which release this program is, as a number that grows: whoever finds functions of a later one
/// leaves them as they are.
pub(super) const EDITION: i32 = edition([
    env!("CARGO_PKG_VERSION_MAJOR"),
    env!("CARGO_PKG_VERSION_MINOR"),
    env!("CARGO_PKG_VERSION_PATCH"),
]);

const fn edition(parts: [&str; 3]) -> i32 {
    let mut number = 0;
    let mut at = 0;
    while at < parts.len() {
        let (digits, mut part, mut nth) = (parts[at].as_bytes(), 0, 0);
        while nth < digits.len() {
            part = part * 10 + (digits[nth] - b'0') as i32;
            nth += 1;
        }
        assert!(
            part < 1_000,
            "it would be taken for the next of the part before"
        );
        number = number * 1_000 + part;
        at += 1;
    }
    number
}

/// What is there, as this program sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Nothing,
    /// Of an earlier version.
    Older(i32),
    /// Of this version, or of a later one with which this program works.
    Fit {
        version: i32,
        /// Its functions are this program's, or those of a later one.
        needs_nothing: bool,
    },
    /// Of a version that no longer has what this program calls.
    TooNew(i32),
}

/// All of it, for those who run their migrations by hand.
pub(super) fn text(schema: &str) -> String {
    let mut text = format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\";\n\n");
    for tables in TABLES {
        text.push_str(&in_schema(tables, schema));
        text.push('\n');
    }
    text.push_str(&code(schema));
    text
}

/// Rights for producers, workers, readers and operators.
pub(super) fn roles(schema: &str) -> String {
    in_schema(include_str!("roles.sql"), schema)
        .replace("ON SCHEMA leasehold", &format!("ON SCHEMA \"{schema}\""))
}

/// The functions, and the note that they are there.
fn code(schema: &str) -> String {
    let functions = functions(schema);
    let mark = mark(&functions);
    let noted = format!(
        "UPDATE leasehold.meta SET code = '{mark}', edition = {EDITION} WHERE version = {VERSION};\n"
    );
    let noted = in_schema(&noted, schema);
    functions + &noted
}

/// Tells this text from others: FNV-1a.
fn mark(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Looks, and changes nothing.
pub(super) async fn found(db: &Client, schema: &str) -> Done<Found> {
    // Of the catalog's tables, which are read anew: a name that was not found is remembered as
    // such.
    let rows = db
        .query_typed(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n \
             ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'meta')",
            args![schema => TEXT],
        )
        .await?;
    let is_there: bool = rows.first().map_or(Ok(false), |row| row.try_get(0))?;
    if !is_there {
        return Ok(Found::Nothing);
    }
    let sql = "SELECT version, oldest, code, edition FROM leasehold.meta";
    let sql = in_schema(sql, schema);
    let rows = db.query_typed(&sql, &[]).await?;
    let Some(row) = rows.first() else {
        return Ok(Found::Nothing);
    };
    let (version, oldest): (i32, i32) = (row.try_get(0)?, row.try_get(1)?);
    let code: &str = row.try_get(2)?;
    let later = version > VERSION || row.try_get::<_, i32>(3)? > EDITION;
    Ok(if version < VERSION {
        Found::Older(version)
    } else if oldest > VERSION {
        Found::TooNew(version)
    } else {
        let needs_nothing = later || code == mark(&functions(schema));
        Found::Fit {
            version,
            needs_nothing,
        }
    })
}

/// Whether this program can work with what is there. False: nothing is there yet.
pub(super) async fn is_ready(db: &Client, schema: &str) -> Done<bool> {
    let (kind, why) = match found(db, schema).await? {
        Found::Nothing => return Ok(false),
        Found::Fit { .. } => return Ok(true),
        Found::Older(version) => (
            ErrorKind::Unsupported,
            format!(
                "the schema {schema} has version {version} and this program needs {VERSION}; run \
                 `leasehold migrate`, or add migrate=true to the URL"
            ),
        ),
        Found::TooNew(version) => (
            ErrorKind::TooNew,
            format!(
                "the schema {schema} has version {version} and this program knows {VERSION}; run \
                 the newer version of the program"
            ),
        ),
    };
    Err(Fault::Broken(Error::new(kind, why)))
}

/// The answer where nothing is and nothing may be made.
pub(super) fn nothing(schema: &str) -> Fault {
    let why = format!("there is no schema {schema} here; run `leasehold migrate`");
    Fault::Broken(Error::new(ErrorKind::Unsupported, why))
}

/// Makes what is not there, and brings what is older up to date.
pub(super) async fn migrate(db: &Client, schema: &str) -> Done<()> {
    if needs_nothing(found(db, schema).await?) {
        return is_ready(db, schema).await.map(drop);
    }
    // Whoever waited for the lock must see what the one before it did, whatever the role's default
    // is.
    db.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '60s'")
        .await?;
    let done = locked(db, schema).await;
    let end = if done.is_ok() { "COMMIT" } else { "ROLLBACK" };
    let ended = db.batch_execute(end).await;
    done?;
    Ok(ended?)
}

fn needs_nothing(found: Found) -> bool {
    matches!(
        found,
        Found::Fit {
            needs_nothing: true,
            ..
        } | Found::TooNew(_)
    )
}

async fn locked(db: &Client, schema: &str) -> Done<()> {
    db.query_typed(
        "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
        args![format!("leasehold migration of {schema}") => TEXT],
    )
    .await?;
    let found = found(db, schema).await?;
    if needs_nothing(found) {
        return Ok(());
    }
    let from = match found {
        Found::Older(version) | Found::Fit { version, .. } => version,
        _ => 0,
    };
    if from == 0 {
        db.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\""))
            .await?;
    }
    for tables in TABLES.iter().skip(from as usize) {
        db.batch_execute(&in_schema(tables, schema)).await?;
    }
    Ok(db.batch_execute(&code(schema)).await?)
}
