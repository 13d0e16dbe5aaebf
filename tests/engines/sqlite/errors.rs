//! Trouble with the file has a kind and says what to do.

use std::process::Command;
use std::time::Duration;

use leasehold::store::{SqliteOptions, SqliteStore};
use leasehold::{ErrorKind, Store};

use crate::sqlite::client::{Client, beat, job};
use crate::sqlite::disk::SmallDisk;
use crate::sqlite::processes::child;

fn kind_of_open(path: &std::path::Path) -> ErrorKind {
    let error = SqliteStore::open(path).expect_err("this file must not open");
    assert!(error.to_string().len() > 30, "says what to do: {error}");
    error.kind()
}

#[tokio::test]
async fn a_lock_that_is_held_too_long_is_contended_and_nothing_was_done() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let options = SqliteOptions::new().patience(Duration::from_millis(150));
    let mut client = Client::new(SqliteStore::with(&path, options.clone()).unwrap()).await;
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = client.enqueue(vec![job("q")]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended);
    assert!(error.is_transient() && error.kind().is_certain());
    let error = SqliteStore::with(&path, options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended);
    // Reading goes on meanwhile.
    let queues = leasehold::inspect::queues(&*client.store).await.unwrap();
    assert!(queues.is_empty());
    other.execute_batch("COMMIT").unwrap();
    client.enqueue(vec![job("q")]).await.unwrap();
}

#[test]
fn a_file_that_is_no_database_or_is_damaged_is_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.db");
    std::fs::write(&path, "this is not a database, but a letter".repeat(100)).unwrap();
    assert_eq!(kind_of_open(&path), ErrorKind::Corrupt);

    let path = dir.path().join("damaged.db");
    drop(SqliteStore::open(&path).unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4096 - 600..4096].fill(0xa5);
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(kind_of_open(&path), ErrorKind::Corrupt);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_corrupt_and_hurts_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store.clone()).await;
    client.enqueue(vec![job("bad")]).await.unwrap();
    client.enqueue(vec![job("good")]).await.unwrap();
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute(
        "UPDATE leasehold_ready SET record = x'00010203' WHERE position < 1 << 47",
        [],
    )
    .unwrap();
    let mut other = Client::new(store.clone()).await;
    let (bad, good) = tokio::join!(client.claim("bad", 1), other.claim("good", 1));
    assert_eq!(bad.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(good.unwrap().grants.len(), 1);
}

#[test]
fn a_newer_file_is_too_new_whoever_owns_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    drop(SqliteStore::open(&path).unwrap());
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute_batch("PRAGMA user_version = 99").unwrap();
    assert_eq!(kind_of_open(&path), ErrorKind::TooNew);
    db.execute_batch("PRAGMA user_version = 1; UPDATE leasehold_meta SET version = 99")
        .unwrap();
    assert_eq!(kind_of_open(&path), ErrorKind::TooNew);
}

#[test]
fn a_missing_directory_is_said_to_be_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("no/such/jobs.db");
    assert_eq!(kind_of_open(&path), ErrorKind::Unavailable);
}

#[test]
fn a_directory_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(kind_of_open(dir.path()), ErrorKind::InvalidInput);
}

/// Permissions do not bind root, so root asks a child that is nobody.
#[test]
fn a_file_that_cannot_be_written_is_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    drop(SqliteStore::open(&path).unwrap());
    let fresh = dir.path().join("fresh.db");
    let mode = |path: &std::path::Path, mode: &str| {
        assert!(
            Command::new("chmod")
                .arg(mode)
                .arg(path)
                .status()
                .unwrap()
                .success()
        );
    };
    mode(&path, "444");
    mode(dir.path(), "555");
    for path in [&path, &fresh] {
        if std::fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join("jobs.db"))
            .is_err()
        {
            assert_eq!(kind_of_open(path), ErrorKind::ReadOnly);
            continue;
        }
        let exe = tempfile::tempdir().unwrap();
        let copy = exe.path().join("child");
        // By another process: a program that this one has open for writing, or a child it starts at
        // the same time, cannot be run.
        let mut cp = Command::new("cp");
        cp.arg(std::env::current_exe().unwrap()).arg(&copy);
        assert!(cp.status().unwrap().success());
        mode(exe.path(), "755");
        let mut nobody = Command::new("setpriv");
        nobody
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&copy);
        let Ok(out) = child(nobody, "open", path).output() else {
            eprintln!("not run: root, and no setpriv to become nobody with");
            break;
        };
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(text.contains("kind read_only"), "{out:?}");
    }
    mode(dir.path(), "755");
}

/// Needs a small disk: root makes one in memory.
#[tokio::test]
async fn a_full_disk_is_full_and_after_freeing_some_all_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::for_case(
        "a_full_disk_is_full_and_after_freeing_some_all_goes_on",
        dir.path(),
        "3m",
    ) else {
        return;
    };
    let path = dir.path().join("jobs.db");
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store.clone()).await;
    let mut stored = 0;
    let error = loop {
        match client.enqueue((0..1_000).map(|_| job("q")).collect()).await {
            Ok(jobs) => stored += jobs.len() as u64,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    disk.grow("30m");
    client.enqueue(vec![job("q")]).await.unwrap();
    let view = leasehold::inspect::queues(&store).await.unwrap();
    assert_eq!(view[0].counts.ready, stored + 1);
}

/// What is in reserve is enough to keep and to end the work at hand, and one can look. The control
/// arm has had its reserve taken away before.
#[tokio::test]
async fn on_a_full_disk_work_at_hand_can_end_and_one_can_look() {
    for reserve in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::for_case(
            "on_a_full_disk_work_at_hand_can_end_and_one_can_look",
            dir.path(),
            "6m",
        ) else {
            return;
        };
        let path = dir.path().join("jobs.db");
        let store = SqliteStore::open(&path).unwrap();
        let mut client = Client::new(store.clone()).await;
        client.enqueue(vec![job("q"); 200]).await.unwrap();
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(client.claim("q", 10).await.unwrap().grants);
        }
        let side = dir.path().join("jobs.db-reserve");
        assert!(side.exists());
        if !reserve {
            std::fs::remove_file(&side).unwrap();
        }
        let ballast = disk.fill(0);
        let error = client.enqueue(vec![job("q"); 40]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");

        let mut ended = 0;
        for grants in &held {
            let beats = grants.iter().map(beat).collect();
            let renewed = client.store.renew(beats).await.is_ok();
            ended += usize::from(renewed && client.complete(grants).await.is_ok());
        }
        let other = SqliteStore::open(&path).unwrap();
        let view = leasehold::inspect::queues(&other).await.unwrap();
        println!(
            "reserve {reserve}: {ended} of 10 grants ended, {:?}",
            view[0].counts
        );
        assert_eq!(view[0].ledger.completed, 10 * ended as u64);
        assert_eq!(ended == 10, reserve, "{ended} of 10 ended");
        let error = client.enqueue(vec![job("q"); 40]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");

        ballast.drop_all();
        let start = std::time::Instant::now();
        while client.enqueue(vec![job("q")]).await.is_err() {
            assert!(start.elapsed() < Duration::from_secs(10));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(side.exists(), "what was given up is put back");
    }
}

/// How many jobs a process finds that opens the file as it is on disk, after all others have died.
async fn recovered(path: &std::path::Path) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("jobs.db");
    for log in ["", "-wal"] {
        let name = |path: &std::path::Path| format!("{}{log}", path.display());
        std::fs::copy(name(path), name(&copy)).unwrap();
    }
    let store = SqliteStore::open(&copy).unwrap();
    let view = leasehold::inspect::queues(&store).await.unwrap();
    view[0].counts.ready
}

/// `Full` is certain: wherever in a commit the disk runs full, what was refused is not there,
/// neither for those who live nor for those who find the log as it was left.
#[tokio::test]
async fn a_commit_on_a_full_disk_is_undone_wherever_it_fails() {
    let mut refused = Vec::new();
    for pages in 0..24 {
        // A fresh disk each time: what a refused commit wrote to the log is room for the next, and
        // what is removed takes room for as long as a process that another test starts has it open.
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::for_case(
            "a_commit_on_a_full_disk_is_undone_wherever_it_fails",
            dir.path(),
            "4m",
        ) else {
            return;
        };
        let path = dir.path().join("jobs.db");
        let store = SqliteStore::open(&path).unwrap();
        let mut client = Client::new(store.clone()).await;
        client.enqueue(vec![job("q"); 40]).await.unwrap();
        let _ballast = disk.fill(pages);
        let stored = match client.enqueue(vec![job("q"); 40]).await {
            // Control arm: what was not refused is found.
            Ok(_) => 80,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                refused.push(pages);
                40
            }
        };
        assert_eq!(recovered(&path).await, stored, "{pages} pages were free");
        let view = leasehold::inspect::queues(&store).await.unwrap();
        assert_eq!(view[0].counts.ready, stored);
    }
    let each: Vec<usize> = (0..refused.len()).collect();
    assert_eq!(refused, each, "one page more each time until it fits");
    assert!((4..24).contains(&each.len()), "{each:?}");
}

#[tokio::test]
async fn a_closed_store_says_so() {
    let dir = tempfile::tempdir().unwrap();
    for options in [SqliteOptions::new(), SqliteOptions::new().inline()] {
        let store = SqliteStore::with(dir.path().join("jobs.db"), options).unwrap();
        let clone = store.dedicated().await.unwrap();
        store.close();
        let error = clone.open_session().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        let error = leasehold::inspect::queues(&*clone).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
}

/// The engine removes its log when the last connection goes. One that a read still has would remove
/// it later, and then perhaps the log of a file that has come in this one's place.
#[tokio::test(flavor = "multi_thread")]
async fn a_closed_store_has_nothing_open_whatever_was_being_read() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..40 {
        let path = dir.path().join(format!("{round}.db"));
        let store = SqliteStore::open(&path).unwrap();
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(
                    async move { while leasehold::inspect::queues(&store).await.is_ok() {} },
                )
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(1)).await;
        let log = dir.path().join(format!("{round}.db-wal"));
        assert!(log.exists(), "control arm: there is a log while it is open");
        store.close();
        assert!(!log.exists(), "round {round}: a read has the file open");
        for reader in readers {
            reader.await.unwrap();
        }
    }
}
