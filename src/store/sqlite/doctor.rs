//! The check-up of a file: what can be lost, and what to set.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use super::boot::{Boot, boot};
use super::fault::explain;
use super::migrate::{VERSION, beside};
use super::writer::LOG_BYTES;
use crate::clock::{Clock as _, SystemClock, Timestamp};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::rules::issue::Issuer;
use crate::store::health::Finding;

/// With less room than this a busy queue can fill the disk within minutes.
const ROOM: u64 = 512 << 20;
/// A clock that was moved by more than this is worth a look: no leap second is.
const CLOCK_MOVED: Duration = Duration::from_secs(2);

/// Examines a file without changing it. `full` is what the URL says about `synchronous`.
///
/// # Errors
/// `Unavailable` if it is not there; any that opening can give.
pub fn examine(path: &Path, full: bool) -> Result<Vec<Finding>> {
    let at = |error: rusqlite::Error| explain(error).during(Verb::Open).in_store("sqlite");
    if !path.exists() {
        let why = format!("no store at {}", path.display());
        return Err(Error::new(ErrorKind::Unavailable, why).during(Verb::Open));
    }
    let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(at)?;
    let number = |sql: &str| db.query_row(sql, [], |row| row.get::<_, i64>(0));
    // In a file that is somebody else's `user_version` is not ours.
    let is_there = "SELECT count(*) FROM sqlite_schema WHERE name = 'leasehold_meta'";
    let version = match number(is_there).map_err(at)? {
        0 => 0,
        _ => number("SELECT version FROM leasehold_meta").map_err(at)?,
    };
    let journal: String = db
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .map_err(at)?;

    let mut findings = vec![
        schema(version),
        if journal == "wal" {
            Finding::fine("journal", "wal")
        } else {
            let advice = "another program has changed it; opening the store sets it to wal again";
            Finding::risk("journal", journal, advice)
        },
        if full {
            Finding::fine(
                "synchronous",
                "full: an answered call survives the loss of power",
            )
        } else {
            let advice = "the loss of power may take the last calls with it: leave out \
                          `synchronous=normal` where that matters";
            Finding::note("synchronous", "normal", advice)
        },
        wal(path),
    ];
    findings.extend(system::room(path));
    if version == VERSION {
        let now = SystemClock.now();
        findings.push(clock(&db, boot(now)).map_err(at)?);
        findings.extend(books(&db, now).map_err(at)?);
    }
    Ok(findings)
}

/// Whether the wall clock was set while the machine ran: there is no second clock to ask, but for
/// the one that counts how long it is up.
fn clock(db: &Connection, boot: Option<Boot>) -> rusqlite::Result<Finding> {
    const CHECK: &str = "clock";
    let Some(Boot { id, at }) = boot else {
        let found = "not known: this system does not tell when it was started";
        let advice = "`tokens` still shows a clock that was set back; for one that was set ahead, \
                      ask the system's time service";
        return Ok(Finding::note(CHECK, found, advice));
    };
    let sql = "SELECT boot_at FROM leasehold_meta WHERE boot = ?1";
    let then = db
        .query_row(sql, [id], |row| row.get::<_, i64>(0))
        .optional()?;
    let Some(then) = then.map(|then| Timestamp::from_micros(then as u64)) else {
        let found = "not known: nobody has opened the file since the machine was started";
        let advice = "ask again once a worker or a client has opened it";
        return Ok(Finding::note(CHECK, found, advice));
    };
    let apart = at.since(then).max(then.since(at));
    if apart <= CLOCK_MOVED {
        let found = "not set since the file was first opened after the machine's start";
        return Ok(Finding::fine(CHECK, found));
    }
    let which = if at > then { "ahead of" } else { "behind" };
    let found = format!(
        "{apart:.1?} {which} what it was when the file was first opened after the machine's start"
    );
    let advice = "the clock was set, or the whole machine stood still: leases ended that much too \
                  early, or last that much longer. If the clock is right now, all is well; if not, \
                  set it right, and then see `tokens`";
    Ok(Finding::note(CHECK, found, advice))
}

/// What the tokens say of the clock, and the ledger of the leases.
fn books(db: &Connection, now: Timestamp) -> rusqlite::Result<[Finding; 2]> {
    // One statement, so that no grant comes in between.
    let sql = "SELECT last, floor, (SELECT coalesce(sum(live), 0) FROM leasehold_queues),
                      (SELECT coalesce(sum(live), 0) FROM leasehold_grants)
               FROM leasehold_meta";
    let [last, floor, counted, leases] = db.query_row(sql, [], |row| {
        let number = |at: usize| row.get::<_, i64>(at).map(|n| n as u64);
        Ok([number(0)?, number(1)?, number(2)?, number(3)?])
    })?;
    let behind = Issuer { last, floor }.clock_behind(now);
    Ok([Finding::tokens(behind), Finding::ledger(counted, leases)])
}

fn schema(version: i64) -> Finding {
    let engine = rusqlite::version();
    let found = format!("schema {version}, engine {engine}");
    if version > VERSION {
        let advice = format!("this program knows schema {VERSION}: upgrade it");
        return Finding::risk("version", found, advice);
    }
    Finding::fine("version", found)
}

/// A log that is larger than what writers cut it back to cannot be emptied.
fn wal(path: &Path) -> Finding {
    let bytes = std::fs::metadata(beside(path, "-wal")).map_or(0, |file| file.len());
    let found = format!("{} MiB", bytes >> 20);
    if bytes <= LOG_BYTES {
        return Finding::fine("log", found);
    }
    let bound = LOG_BYTES >> 20;
    let who = match &system::readers(path)[..] {
        [] => "find the process that holds a long transaction".to_owned(),
        pids => format!("end the transaction of process {}", pids.join(", ")),
    };
    let advice = format!(
        "writers cut it back to {bound} MiB unless a reader that never ends keeps them from it, \
         and then it grows until the disk is full: {who}"
    );
    Finding::risk("log", found, advice)
}

#[cfg(unix)]
mod system {
    use super::{Finding, Path, ROOM, beside};

    pub(super) fn room(path: &Path) -> Vec<Finding> {
        let mut findings = vec![match rustix::fs::statvfs(path) {
            Ok(disk) => free(disk.f_bavail.saturating_mul(disk.f_frsize)),
            Err(_) => Finding::unseen("disk", "the right to look at the file system"),
        }];
        findings.extend(network(path));
        findings
    }

    fn free(bytes: u64) -> Finding {
        let found = format!("{} MiB free", bytes >> 20);
        if bytes < ROOM {
            let advice = "once it is full, calls are refused until there is room: free some space";
            return Finding::risk("disk", found, advice);
        }
        Finding::fine("disk", found)
    }

    /// Processes that keep reading one state of the file: the marks that they lock say how much of
    /// the log is still needed.
    #[cfg(target_os = "linux")]
    pub(super) fn readers(path: &Path) -> Vec<String> {
        /// The bytes of the shared file that are locked to read from the log.
        const MARKS: std::ops::RangeInclusive<u64> = 124..=127;
        const LOOKS: usize = 5;
        const MOMENT: std::time::Duration = std::time::Duration::from_millis(20);
        let Ok(shared) = std::fs::metadata(beside(path, "-shm")) else {
            return Vec::new();
        };
        let inode = format!(":{}", std::os::unix::fs::MetadataExt::ino(&shared));
        let locked = || -> Vec<String> {
            let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
            let reads = locks.lines().filter_map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                let [.., "READ", pid, file, start, _] = words[..] else {
                    return None;
                };
                let is_mark = start.parse().is_ok_and(|start| MARKS.contains(&start));
                (file.ends_with(&inode) && is_mark).then(|| pid.to_owned())
            });
            reads.collect()
        };
        let mut still = locked();
        for _ in 0..LOOKS {
            std::thread::sleep(MOMENT);
            let now = locked();
            still.retain(|pid| now.contains(pid));
        }
        still.dedup();
        still
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn readers(_: &Path) -> Vec<String> {
        Vec::new()
    }

    /// File systems of other machines, by the numbers that Linux gives them.
    #[cfg(target_os = "linux")]
    fn network(path: &Path) -> Option<Finding> {
        const REMOTE: [(u32, &str); 6] = [
            (0x6969, "NFS"),
            (0xff53_4d42, "CIFS"),
            (0xfe53_4d42, "SMB2"),
            (0x0102_1997, "9P"),
            (0x00c3_6400, "Ceph"),
            (0x5346_414f, "AFS"),
        ];
        let number = rustix::fs::statfs(path).ok()?.f_type as u32;
        let found = REMOTE.iter().find(|(remote, _)| *remote == number);
        Some(match found {
            None => Finding::fine("file system", "local"),
            Some((_, name)) => {
                let advice = "locks and shared memory do not hold across machines: jobs may be \
                              corrupted. Move the file to a local disk";
                Finding::risk("file system", *name, advice)
            }
        })
    }

    #[cfg(not(target_os = "linux"))]
    fn network(_: &Path) -> Option<Finding> {
        None
    }
}

#[cfg(not(unix))]
mod system {
    use super::{Finding, Path};

    pub(super) fn readers(_: &Path) -> Vec<String> {
        Vec::new()
    }

    pub(super) fn room(_: &Path) -> Vec<Finding> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqliteStore;
    use crate::store::health::Level;

    /// The control arm is the same log once its reader is gone.
    #[test]
    fn a_clock_that_cannot_be_looked_at_is_a_note() {
        let db = Connection::open_in_memory().unwrap();
        let finding = clock(&db, None).unwrap();
        assert_eq!((finding.check, finding.level), ("clock", Level::Note));
    }

    #[test]
    fn a_log_that_a_reader_keeps_is_told_with_its_bound_and_the_reader() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("jobs.db");
        let store = SqliteStore::open(&path).unwrap();
        let log = || format!("{:?}", wal(&path));
        assert!(log().contains("Fine"), "{}", log());
        let reader = Connection::open(&path).unwrap();
        reader.execute_batch("BEGIN").unwrap();
        let count = "SELECT count(*) FROM leasehold_ready";
        reader.query_row(count, [], |_| Ok(())).unwrap();
        let writer = Connection::open(&path).unwrap();
        writer
            .execute_batch("PRAGMA synchronous = OFF; CREATE TABLE ballast (x)")
            .unwrap();
        let ballast = "INSERT INTO ballast VALUES (zeroblob(1 << 20))";
        for _ in 0..=LOG_BYTES >> 20 {
            writer.execute(ballast, []).unwrap();
        }
        let told = log();
        assert!(told.contains("Risk") && told.contains("64 MiB"), "{told}");
        if cfg!(target_os = "linux") {
            let me = format!("process {}", std::process::id());
            assert!(told.contains(&me), "{told}");
        }
        reader.execute_batch("COMMIT").unwrap();
        // As the writers do.
        let limit = format!("PRAGMA journal_size_limit = {LOG_BYTES}");
        writer.execute_batch(&limit).unwrap();
        writer
            .query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()))
            .unwrap();
        writer.execute("DELETE FROM ballast WHERE 0", []).unwrap();
        writer
            .execute("INSERT INTO ballast VALUES (1)", [])
            .unwrap();
        assert!(log().contains("Fine"), "{}", log());
        drop(store);
    }
}
