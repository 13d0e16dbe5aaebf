//! Being asked to stop while the store is away: a worker ends in time, whatever the store does.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::MACHINE;
use crate::crew::Chore;
use crate::engine::Engine;
use crate::process::Process;
use crate::roles::Role;
use crate::stage::Stage;
use crate::world::figures;

/// From the signal to the end, at most.
const GRACE: Duration = Duration::from_secs(8);
/// What of it a handler has that does not listen.
const FOR_HANDLERS: Duration = Duration::from_secs(6);
/// A worker that holds nothing needs one second. The rest is for a busy machine to end a process.
const IDLE: Duration = Duration::from_secs(4);
/// For a busy machine to end a process.
const SLACK: Duration = Duration::from_secs(3);
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

/// SIGTERM. Returns how long the worker took to end, and how many leases it left.
async fn stopped(mut worker: Process) -> (Duration, usize) {
    // A worker asks for work once a second at least: a claim is under way.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let start = Instant::now();
    worker.signal(Signal::TERM);
    assert!(worker.ends().await.success());
    let took = start.elapsed();
    let report = worker.hears("unsettled").await;
    let (_, left) = report.split_once(' ').unwrap();
    (took, left.parse().unwrap())
}

fn judge(case: &str, busy: bool, is_away: bool, (took, unsettled): (Duration, usize)) {
    figures(&format!(
        "away: {case}, {}: gone after {took:.1?}, {unsettled} unsettled",
        if busy { "busy" } else { "idle" },
    ));
    assert_eq!(unsettled, usize::from(busy && is_away), "{case}");
    let limits = if busy {
        FOR_HANDLERS..GRACE + SLACK
    } else {
        Duration::ZERO..IDLE
    };
    assert!(limits.contains(&took), "{case}: {took:?}");
}

/// A server that is there, as the other arm, one that is gone, and one that stands still.
async fn server_away(engine: Engine) {
    for busy in [false, true] {
        for away in ["there", "killed", "frozen"] {
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
            judge(away, busy, away != "there", ended);
        }
    }
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
        judge("locked file", busy, locked, ended);
    }
}
