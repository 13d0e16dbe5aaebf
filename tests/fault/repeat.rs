//! Calls that arrive twice, and calls whose answers never arrive.

use std::time::Duration;

use crate::broken::Flaw;
use crate::crew::Chore;
use crate::engine::Engine;
use crate::process::Process;
use crate::stage::Stage;
use crate::support::proxy::Proxy;
use crate::table::{Row, report};
use crate::{MACHINE, in_campaign};

/// Longer than any answer takes: what expires was forgotten by somebody.
const TERM: Duration = Duration::from_secs(10);
const KEYS: usize = 4;

/// Two workers with a flaw, and their work.
async fn staff(stage: &mut Stage, url: &str, term: Duration, flaw: Option<Flaw>) -> [Process; 2] {
    let mut crew = Vec::new();
    for owner in ["first", "second"] {
        let mut role = stage.role(owner);
        url.clone_into(&mut role.url);
        role.term = term;
        role.flaw = flaw;
        crew.push(Stage::hire(role).await);
    }
    crew.try_into().ok().unwrap()
}

async fn work(stage: &Stage, rounds: usize) {
    let adds = (0..rounds * KEYS).map(|n| Chore::Add {
        key: n % KEYS,
        waiting: 0,
    });
    let pages = (0..rounds).map(|_| Chore::Page { waiting: 0 });
    stage.enqueue(&adds.chain(pages).collect::<Vec<_>>()).await;
    stage.waits(rounds * 20, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn duplicate_request() {
    let _machine = MACHINE.read().await;
    every_call_twice(Engine::Redis, "duplicate request").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn duplicate_request_on_postgres() {
    let _machine = MACHINE.read().await;
    every_call_twice(Engine::Postgres, "duplicate request, PostgreSQL").await;
}

async fn every_call_twice(engine: Engine, case: &'static str) {
    let host = engine.share();
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let crew = staff(&mut stage, &host.url(), TERM, Some(Flaw::SendsTwice)).await;
    let mut producer = stage.role("producer");
    producer.flaw = Some(Flaw::SendsTwice);
    stage.world.client = leasehold::Client::new(producer.open().await);
    for _ in 0..if in_campaign() { 50 } else { 10 } {
        work(&stage, 2).await;
        stage.drained().await;
    }
    let view = stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(case);
    stage.assert_none_expired(case, &view, TERM);

    // The control arm: a claim that is not known again gives its leases to nobody.
    let host = engine.share();
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let term = TERM / 10;
    let _crew = staff(&mut stage, &host.url(), term, Some(Flaw::SendsTwiceUnnamed)).await;
    work(&stage, 1).await;
    let harm = |view: &leasehold::inspect::QueueView| view.ledger.expired_deadline > 0;
    let control = stage.world.until("leases that nobody knows of", harm).await;
    let control = format!("{} leases forgotten", control.ledger.expired_deadline);
    report(
        case,
        Row {
            control,
            ..judged.row
        },
    );
}

/// Loses one answer after another while there is work, until so many are lost.
async fn lose_answers(stage: &Stage, proxy: &Proxy, most: usize) {
    while proxy.lost() < most {
        let lost = proxy.lost();
        work(stage, 1).await;
        let mut looks = 0;
        while proxy.lost() == lost {
            // A request to be woken some time is not answered soon: another is chosen then. So
            // seldom that repeats get through at once.
            if looks % 200 == 0 {
                proxy.lose_replies(fastrand::usize(10..60), 1);
            }
            looks += 1;
            if stage.world.look().await.counts.ready == 0 {
                work(stage, 1).await;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    proxy.lose_replies(0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn ambiguous_settle() {
    let _machine = MACHINE.read().await;
    answers_lost(Engine::Redis, "ambiguous settle").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn ambiguous_settle_on_postgres() {
    let _machine = MACHINE.read().await;
    answers_lost(Engine::Postgres, "ambiguous settle, PostgreSQL").await;
}

async fn answers_lost(engine: Engine, case: &'static str) {
    let host = engine.share();
    let proxy = host.proxy().await;
    let url = host.url_by(proxy.port());
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let crew = staff(&mut stage, &url, TERM, None).await;
    lose_answers(&stage, &proxy, if in_campaign() { 500 } else { 30 }).await;
    let view = stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(case);
    stage.assert_none_expired(case, &view, TERM);

    let host = engine.share();
    let proxy = host.proxy().await;
    let url = host.url_by(proxy.port());
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let _crew = staff(&mut stage, &url, TERM / 10, Some(Flaw::RepeatsUnnamed)).await;
    // Not every answer that is lost is a claim's.
    let mut lost = 0;
    let control = loop {
        lost += 10;
        lose_answers(&stage, &proxy, lost).await;
        let view = stage.drained().await;
        if view.ledger.expired_deadline > 0 {
            break view;
        }
        assert!(lost < 300, "this test cannot fail");
    };
    let control = control.ledger.expired_deadline;
    let control = format!("{control} leases forgotten, of {lost} answers lost");
    report(
        case,
        Row {
            control,
            ..judged.row
        },
    );
}
