//! Workers whose file is taken from under them: they say so within a term, and stop.

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use leasehold::{Client, Context, Failure, Job, LeaseTerms};
use serde::{Deserialize, Serialize};

use crate::sqlite::machine;
use crate::sqlite::processes::{ready, say, spawn};

const TERM: Duration = Duration::from_secs(2);

/// Runs until it is told to stop.
#[derive(Serialize, Deserialize)]
struct Vigil;

impl Job for Vigil {
    const KIND: &'static str = "vigil";
}

/// Nobody enqueues it.
#[derive(Serialize, Deserialize)]
struct Never;

impl Job for Never {
    const KIND: &'static str = "never";
    const QUEUE: &'static str = "empty";
}

async fn never(_: Never, _: Context) -> Result<(), Failure> {
    Ok(())
}

/// Two workers in a process that logs to where it speaks: one holds a job, one waits for work.
pub(crate) async fn workers(path: &Path) {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .init();
    let url = format!("sqlite://{}", path.display());
    let client = Client::open(&url).await.unwrap();
    client.enqueue(&Vigil).await.unwrap();
    let vigil = |_: Vigil, ctx: Context| async move {
        say(format_args!("ready"));
        ctx.cancelled().await;
        say(format_args!("told to stop"));
        Ok::<(), Failure>(())
    };
    let terms = LeaseTerms::of_term(TERM);
    let busy = client.worker().handle(vigil).slots(1).terms(terms);
    let idle = client.worker().handle(never).terms(terms);
    let [busy, idle] = [busy, idle].map(|worker| worker.start().unwrap());
    while idle.health().is_ready() || busy.health().is_ready() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    say(format_args!("neither is ready"));
    std::future::pending::<()>().await;
}

/// The control arm is the time before: as long as the file is there, nothing is said.
#[tokio::test]
async fn workers_whose_file_is_removed_or_replaced_say_so_within_a_term() {
    for replace in [false, true] {
        machine::judged(|| async move { taken_away(replace) }).await;
    }
}

fn taken_away(replace: bool) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let mut child = spawn("workers", &path);
    let said = ready(&mut child);
    let (heard, lines) = mpsc::channel();
    std::thread::spawn(move || {
        said.map(|line| heard.send((Instant::now(), line)))
            .all(|sent| sent.is_ok())
    });
    std::thread::sleep(2 * TERM);
    let taken = Instant::now();
    if replace {
        let copy = dir.path().join("backup.db");
        let into = format!("VACUUM INTO '{}'", copy.display());
        let db = rusqlite::Connection::open(&path).unwrap();
        db.execute_batch(&into).unwrap();
        std::fs::rename(&copy, &path).unwrap();
    } else {
        std::fs::remove_file(&path).unwrap();
    }
    let mut late = None;
    let mut missing = vec![
        "was removed or replaced while it was open",
        "told to stop",
        "neither is ready",
    ];
    while let Ok((at, line)) = lines.recv_timeout(5 * TERM) {
        let Some(words) = missing.iter().position(|words| line.contains(words)) else {
            continue;
        };
        assert!(at > taken, "the file was there: {line}");
        let after = at - taken;
        println!("after {after:.1?}: {}", missing.remove(words));
        // Ready is who has had an answer within a term, so that comes a look later.
        let limit = if missing.is_empty() {
            TERM * 3 / 2
        } else {
            TERM
        };
        if after >= limit {
            late.get_or_insert(format!("after {after:?}: {line}"));
        }
        if missing.is_empty() {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(missing.is_empty(), "never said: {missing:?}");
    late.map_or(Ok(()), Err)
}
