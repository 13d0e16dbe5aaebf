//! A server that is killed, and that stands still.

use std::time::Duration;

use leasehold::inspect::QueueView;
use leasehold_conformance::checker::Rule;

use crate::crew::Chore;
use crate::engine::Engine;
use crate::journal::Judgement;
use crate::stage::Stage;
use crate::table::{Row, report};
use crate::world::TERM;
use crate::{MACHINE, in_campaign};

pub(crate) const KEYS: usize = 4;

pub(crate) async fn work(stage: &Stage, rounds: usize) {
    let adds = (0..rounds * KEYS).map(|n| Chore::Add {
        key: n % KEYS,
        waiting: 0,
    });
    stage.enqueue(&adds.collect::<Vec<_>>()).await;
    stage.waits(rounds * 20, 60).await;
}

/// Waits until this many more jobs are completed.
async fn goes_on(stage: &Stage, more: u64) {
    let before = stage.world.look().await.ledger.completed;
    let further = |view: &QueueView| view.ledger.completed >= before + more;
    stage.world.until("the workers to go on", further).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn service_restart() {
    let _machine = MACHINE.read().await;
    restarted(Engine::Redis, "service restart", 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn service_restart_on_postgres() {
    let _machine = MACHINE.read().await;
    restarted(Engine::Postgres, "service restart, PostgreSQL", 2).await;
}

async fn restarted(engine: Engine, case: &'static str, daily: usize) {
    let mut host = engine.durable();
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let roles = [stage.role("first"), stage.role("second")];
    let mut crew = Vec::new();
    for role in roles {
        crew.push(Stage::hire(role).await);
    }
    for _ in 0..if in_campaign() { 25 } else { daily } {
        work(&stage, 5).await;
        goes_on(&stage, 30).await;
        host.crash();
        // Whatever was under way is asked again by itself.
        work(&stage, 1).await;
    }
    stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(case);

    // The control arm: it is the disk that keeps them.
    let mut host = engine.forgetful();
    host.keeps_its_tables().await;
    let stage = Stage::at(host.url()).await;
    stage.waits(100, 0).await;
    host.crash();
    while stage.world.client.queues().await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let lost = stage.finish([]).await.broke(Rule::JobLost);
    assert_eq!(lost, 100, "this test cannot fail");
    let control = format!("answered before it is on disk: {lost} of 100 jobs lost");
    report(
        case,
        Row {
            control,
            ..judged.row
        },
    );
}

/// Lets the server stand still for two terms of the shorter kind, again and again, amid the work.
async fn stalled(engine: Engine, times: usize, term: Duration) -> (Stage, QueueView, Judgement) {
    let host = engine.own();
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let mut crew = Vec::new();
    for owner in ["first", "second"] {
        let mut role = stage.role(owner);
        role.term = term;
        crew.push(Stage::hire(role).await);
    }
    for _ in 0..times {
        work(&stage, 6).await;
        goes_on(&stage, 20).await;
        host.pause();
        tokio::time::sleep(2 * TERM).await;
        host.resume();
        goes_on(&stage, 20).await;
    }
    let view = stage.drained().await;
    let judged = stage.finish(crew).await;
    (stage, view, judged)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn server_stall() {
    let _machine = MACHINE.read().await;
    stalls(Engine::Redis, "server stall", 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn server_stall_on_postgres() {
    let _machine = MACHINE.read().await;
    stalls(Engine::Postgres, "server stall, PostgreSQL", 2).await;
}

async fn stalls(engine: Engine, case: &'static str, daily: usize) {
    let times = if in_campaign() { 20 } else { daily };
    let short = tokio::spawn(stalled(engine, times, TERM));
    // The other arm: what is shorter than the margin costs nobody a lease.
    let long = tokio::spawn(stalled(engine, times, 8 * TERM));
    let (_, view, judged) = short.await.unwrap();
    judged.assert_sound(case);
    let (expired, late) = (view.ledger.expired_deadline, view.ledger.late);
    let felt = match engine {
        // What reaches this server while it stands still is done first of all: late, and before any
        // claim.
        Engine::Postgres => expired + late,
        Engine::Redis => expired,
    };
    assert!(felt > 0, "nobody held anything: {view:?}");
    let (stage, view, patient) = long.await.unwrap();
    patient.assert_sound(case);
    stage.assert_none_expired(case, &view, 8 * TERM);
    let long = 8 * TERM;
    let control = format!("{expired} expired, {late} late; with a term of {long:?} none expired");
    report(
        case,
        Row {
            control,
            ..judged.row
        },
    );
}
