//! Opening a file: settings, and the tables at the version that this crate knows.
//!
//! The version is kept in a row of our own (`leasehold_meta.version`), because the file may belong
//! to the user's application, whose migrations `PRAGMA user_version` then counts. In a file that
//! was empty, `user_version` and `application_id` are set as well, so that tools recognise it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, params};

use super::boot::{Boot, boot};
use super::fault::{Done, Fault, corrupt, explain};
use super::turn::Turn;
use super::writer::LOG_BYTES;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::rules::issue::Issuer;

/// More than there are statements: none is ever prepared twice by one connection.
pub(super) const CACHED: usize = 128;

/// Each brings the tables from the version of its place in the list to the next.
const MIGRATIONS: [&str; 1] = [include_str!("schema.sql")];
/// The version that this crate writes.
pub(super) const VERSION: i64 = MIGRATIONS.len() as i64;
/// "LsHd": marks a file that is ours alone.
const APPLICATION_ID: i64 = 0x4c73_4864;

/// Pages written to the log before they are moved into the file.
const CHECKPOINT_PAGES: i64 = 4_000;

/// A file that belongs to the database file: its name with an ending.
pub(super) fn beside(db: &Path, ending: &str) -> PathBuf {
    let mut path = db.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Opens a connection. Only a writer may make the file.
pub(super) fn connect(path: &Path, writes: bool, full: bool) -> Done<Connection> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    if writes {
        flags |= OpenFlags::SQLITE_OPEN_CREATE;
    }
    let db = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, error))?;
    if writes && db.is_readonly(rusqlite::MAIN_DB)? {
        return Err(Fault::Broken(read_only()));
    }
    db.set_prepared_statement_cache_capacity(CACHED);
    // Reading waits only while somebody turns the log on, or recovers it after a crash.
    db.busy_timeout(Duration::from_secs(5))?;
    let synchronous = if full { "FULL" } else { "NORMAL" };
    // Not larger: after a commit that split a page the engine walks all of its cache's hash table,
    // and claims need only the ends of the lines.
    let cache_kib = if writes { 16 * 1024 } else { 4 * 1024 };
    db.execute_batch(&format!(
        "PRAGMA synchronous = {synchronous}; PRAGMA cache_size = -{cache_kib}; \
         PRAGMA temp_store = MEMORY; PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}; \
         PRAGMA journal_size_limit = {LOG_BYTES};"
    ))?;
    Ok(db)
}

fn cannot_open(path: &Path, error: rusqlite::Error) -> Fault {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let has_parent = parent.is_none_or(Path::is_dir);
    match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen) if path.is_dir() => {
            let detail = "the path is a directory; name a file in it";
            Fault::Broken(Error::new(ErrorKind::InvalidInput, detail).caused_by(error))
        }
        // The directory is there, so what is missing is the right to make or open the file.
        Some(ErrorCode::CannotOpen) if has_parent => Fault::Broken(read_only().caused_by(error)),
        _ => Fault::Broken(explain(error)),
    }
}

fn read_only() -> Error {
    Error::new(
        ErrorKind::ReadOnly,
        "the file, or the directory it is in, cannot be written; \
         give this process the right to write both",
    )
}

/// Turns the log on, brings the tables up to date, and raises the issuer's floor.
pub(super) fn prepare(
    db: &Connection,
    turn: &mut Turn,
    limit: Duration,
    now: impl Fn() -> Timestamp,
) -> Done<()> {
    write_ahead(db, limit)?;
    // From here on the writer takes turns in its own way.
    db.busy_timeout(Duration::ZERO)?;
    turn.begin(db, limit, || false)?;
    let done = migrate(db, now).and_then(|()| Ok(db.execute_batch("COMMIT")?));
    if done.is_err() {
        // What failed is the answer; a failing rollback changes nothing about it.
        let _ = db.execute_batch("ROLLBACK");
    }
    done
}

/// Whether a file that could not be prepared, for want of room, can be read as it is.
pub(super) fn is_readable(db: &Connection) -> bool {
    let version = db.query_row("SELECT version FROM leasehold_meta", [], |row| row.get(0));
    version == Ok(VERSION)
}

fn write_ahead(db: &Connection, limit: Duration) -> Done<()> {
    let pause = Duration::from_millis(2);
    let mut waited = Duration::ZERO;
    loop {
        match db.query_row("PRAGMA journal_mode = WAL", [], |row| {
            row.get::<_, String>(0)
        }) {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(_) => {
                let why = "the file cannot have a write-ahead log; \
                           put it on a local disk, not on a network share";
                return Err(Fault::Broken(Error::new(ErrorKind::Unsupported, why)));
            }
            Err(error) if super::fault::is_busy(&error) && waited < limit => {
                std::thread::sleep(pause);
                waited += pause;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// To be called inside a write transaction.
pub(super) fn migrate(db: &Connection, now: impl Fn() -> Timestamp) -> Done<()> {
    let number = |pragma: &str| db.query_row(pragma, [], |row| row.get::<_, i64>(0));
    let application = number("PRAGMA application_id")?;
    let user_version = number("PRAGMA user_version")?;
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    let there = number("SELECT count(*) FROM sqlite_schema WHERE name = 'leasehold_meta'")? > 0;
    let ours =
        application == APPLICATION_ID || (tables == 0 && application == 0 && user_version == 0);
    let version = if there {
        db.query_row("SELECT version FROM leasehold_meta", [], |row| row.get(0))
            .optional()?
            .ok_or_else(|| corrupt("leasehold_meta has no row"))?
    } else {
        0
    };
    let highest = if application == APPLICATION_ID {
        user_version.max(version)
    } else {
        version
    };
    if highest > VERSION {
        return Err(Fault::Broken(Error::new(
            ErrorKind::TooNew,
            format!(
                "the file has version {highest} and this program knows {VERSION}; \
                 run the newer version of the program, or restore an older file"
            ),
        )));
    }
    for migration in MIGRATIONS.iter().skip(version as usize) {
        db.execute_batch(migration)?;
    }
    // Read inside the transaction: nobody can have been granted a token in between.
    let now = now();
    let fresh = Issuer::without_memory(now);
    let (boot, boot_at) = boot(now)
        .map(|Boot { id, at }| (id, at.as_micros() as i64))
        .unzip();
    if there {
        // A file that was copied back remembers too little; the floor makes up for it.
        db.execute(
            "UPDATE leasehold_meta SET version = ?1, floor = max(floor, ?2),
                 boot_at = CASE WHEN boot IS ?3 THEN boot_at ELSE ?4 END, boot = ?3",
            params![VERSION, fresh.floor as i64, boot, boot_at],
        )?;
    } else {
        db.execute(
            "INSERT INTO leasehold_meta (one, version, last, floor, boot, boot_at)
             VALUES (1, ?1, ?2, ?3, ?4, ?5)",
            params![
                VERSION,
                fresh.last as i64,
                fresh.floor as i64,
                boot,
                boot_at
            ],
        )?;
    }
    if ours && version < VERSION {
        db.execute_batch(&format!(
            "PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION};"
        ))?;
    }
    Ok(())
}
