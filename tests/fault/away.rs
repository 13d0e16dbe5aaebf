//! Being asked to stop while the store is away: a worker ends in time, whatever the store does.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::MACHINE;
use crate::crew::Chore;
use crate::engine::Engine;
use crate::process::Process;
use crate::roles::Role;
use crate::stage::Stage;
use crate::support::machine::judged;
use crate::world::figures;

/// From the signal to the end, at most.
const GRACE: Duration = Duration::from_secs(8);
/// What of it a handler has that does not listen.
const FOR_HANDLERS: Duration = Duration::from_secs(6);
/// For the last call to come to nothing, and the client to be dropped.
const SLACK: Duration = Duration::from_millis(500);
/// A worker that holds nothing, whatever the store does.
const IDLE: Duration = Duration::from_secs(2);
/// Longer than all of a case, so that nothing is lost before it is handed back.
const TERM: Duration = Duration::from_secs(60);

/// A worker that holds one lease, with a handler that does not listen, or none.
async fn worker(stage: &mut Stage, busy: bool) -> Process {
    let mut role = stage.role("worker");
    (role.drain_grace, role.term) = (GRACE, TERM);
    let mut worker = Stage::hire(role).await;
    if busy {
        stage.enqueue(&[Chore::Stuck]).await;
        worker.hears("stuck").await;
    } else {
        // It has a session, and a connection to lose.
        stage.waits(1, 0).await;
        stage.drained().await;
    }
    worker
}

/// How a worker ended.
struct Ended {
    /// As it says itself: from the signal until its client was dropped.
    took: Duration,
    /// As a supervisor sees it: the process is gone.
    gone: Duration,
    unsettled: usize,
}

/// SIGTERM.
async fn stopped(mut worker: Process) -> Ended {
    // A worker asks for work once a second at least: a claim is under way.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let start = Instant::now();
    worker.signal(Signal::TERM);
    assert!(worker.ends().await.success());
    let gone = start.elapsed();
    let report = worker.hears("unsettled").await;
    let mut numbers = report.split(' ').skip(1).map(|n| n.parse().unwrap());
    let mut next = || numbers.next().unwrap();
    let (unsettled, took) = (next() as usize, Duration::from_millis(next()));
    Ended {
        took,
        gone,
        unsettled,
    }
}

fn judge(case: &str, busy: bool, is_away: bool, ended: &Ended) -> Result<(), String> {
    let Ended {
        took,
        gone,
        unsettled,
    } = ended;
    let does = if busy { "busy" } else { "idle" };
    figures(&format!(
        "away: {case}, {does}: done after {took:.1?}, gone after {gone:.1?}, {unsettled} unsettled",
    ));
    assert_eq!(*unsettled, usize::from(busy && is_away), "{case}");
    let limits = if busy {
        FOR_HANDLERS..GRACE + SLACK
    } else {
        Duration::ZERO..IDLE
    };
    // The process has the runtime's threads to end besides, and nothing to wait for.
    if limits.contains(took) && *gone < limits.end + SLACK {
        return Ok(());
    }
    Err(format!(
        "{case}, {does}: done after {took:?}, gone after {gone:?}"
    ))
}

/// A server that is there, as the other arm, one that is gone, and one that stands still.
async fn server_away(engine: Engine) {
    for busy in [false, true] {
        for away in ["there", "killed", "frozen"] {
            judged(|| one_server_away(engine, busy, away)).await;
        }
    }
}

async fn one_server_away(engine: Engine, busy: bool, away: &str) -> Result<(), String> {
    let mut host = engine.own();
    let mut stage = Stage::at(host.url()).await;
    let worker = worker(&mut stage, busy).await;
    match away {
        "killed" => host.kill(),
        "frozen" => host.pause(),
        _ => {}
    }
    let ended = stopped(worker).await;
    if away == "frozen" {
        host.resume();
    }
    judge(away, busy, away != "there", &ended)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_worker_ends_in_time_though_redis_is_away() {
    let _machine = MACHINE.read().await;
    server_away(Engine::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_worker_ends_in_time_though_postgres_is_away() {
    let _machine = MACHINE.read().await;
    server_away(Engine::Postgres).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_ends_in_time_though_another_process_has_the_file() {
    let _machine = MACHINE.read().await;
    for (busy, locked) in [(false, false), (false, true), (true, true)] {
        judged(|| file_away(busy, locked)).await;
    }
}

async fn file_away(busy: bool, locked: bool) -> Result<(), String> {
    let mut stage = Stage::sqlite().await;
    let worker = worker(&mut stage, busy).await;
    let lock = locked.then(|| {
        let db = stage.world.db().to_owned();
        let holder = Process::start(&Role::LockHolder { db });
        holder.hear("holding");
        holder
    });
    let ended = stopped(worker).await;
    drop(lock);
    judge("locked file", busy, locked, &ended)
}
