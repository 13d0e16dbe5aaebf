//! `leasehold doctor` on a clock that is wrong while it looks: its own is set two hours ahead, and
//! the store's is not. The other arm is the same doctor at the right time.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::Client;
use leasehold::clock::{Clock as _, ManualClock, SystemClock};
use leasehold::store::{SqliteOptions, SqliteStore};
use leasehold_support::postgres::Server;
use leasehold_support::redis::Standalone;
use serde_json::Value;

/// Preloaded, this is the C library's `clock_gettime`, with another wall clock.
const TWO_HOURS_AHEAD: &str = r"
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    long done = syscall(SYS_clock_gettime, clock, time);
    if (done == 0 && clock == CLOCK_REALTIME) time->tv_sec += 7200;
    return done;
}
";

fn compiled(dir: &Path) -> PathBuf {
    let (source, library) = (dir.join("ahead.c"), dir.join("ahead.so"));
    std::fs::write(&source, TWO_HOURS_AHEAD).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source);
    assert!(cc.status().unwrap().success());
    library
}

/// What the check of the clock found: how bad it is, and what it says.
fn clock(url: &str, preload: Option<&Path>) -> (String, String) {
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    doctor
        .args(["doctor", url, "--json"])
        .env_remove("LEASEHOLD_URL")
        .stdin(Stdio::null());
    if let Some(library) = preload {
        doctor.env("LD_PRELOAD", library);
    }
    let output = doctor.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|found| found["check"] == "clock");
    let text = |of: &str| found.unwrap()[of].as_str().unwrap().to_owned();
    (text("level"), text("found"))
}

fn sees_the_jump(url: &str, level: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (right, found) = clock(url, None);
    assert_eq!(right, "fine", "{found}");
    let (wrong, found) = clock(url, Some(&compiled(dir.path())));
    assert_eq!(wrong, level, "{found}");
    // About two hours, in seconds or in milliseconds.
    assert!(
        found.starts_with("7199") || found.starts_with("7200"),
        "{found}"
    );
}

/// There is no server that could be right, and the clock may have been set by good reason.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
    drop(Client::open(&url).await.unwrap());
    sees_the_jump(&url, "note");
    // Whoever opens the file later takes nothing back.
    drop(Client::open(&url).await.unwrap());
    sees_the_jump(&url, "note");
}

/// Set back, and a file that holds tables of somebody else under a version of his own.
#[cfg(target_os = "linux")]
#[test]
fn of_a_file_whose_clock_was_set_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute_batch("CREATE TABLE orders (id); PRAGMA user_version = 7")
        .unwrap();
    let ahead = ManualClock::new(SystemClock.now().after(Duration::from_secs(7_200)));
    drop(SqliteStore::with(&path, SqliteOptions::new().clock(ahead)).unwrap());
    let (level, found) = clock(&format!("sqlite://{}", path.display()), None);
    assert_eq!(level, "note", "{found}");
    assert!(found.contains("s behind what it was"), "{found}");
    // In another run of the machine it is not known, and the next who opens the file notes it.
    db.execute("UPDATE leasehold_meta SET boot = 'another'", [])
        .unwrap();
    let (level, found) = clock(&format!("sqlite://{}", path.display()), None);
    assert_eq!(level, "note", "{found}");
    assert!(found.starts_with("not known"), "{found}");
    drop(SqliteStore::open(&path).unwrap());
    let (level, found) = clock(&format!("sqlite://{}", path.display()), None);
    assert_eq!(level, "fine", "{found}");
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn of_redis() {
    let server = Standalone::start(&[]);
    sees_the_jump(server.url(), "risk");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn of_postgres() {
    let server = Server::start(&["fsync=off"]);
    drop(Client::open(&server.url()).await.unwrap());
    sees_the_jump(&server.url(), "risk");
}
