//! A server that is killed, that stands still, and that forgets.

use std::time::{Duration, Instant};

use leasehold::inspect::QueueView;
use leasehold::store::conformance::checker::Rule;

use crate::crew::Chore;
use crate::journal::Judgement;
use crate::process::PATIENCE;
use crate::stage::Stage;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis::{AOF, RDB_ONLY, Standalone};
use crate::table::{Row, report};
use crate::world::TERM;
use crate::{MACHINE, in_campaign};

const KEYS: usize = 4;

fn start(lines: &[&str]) -> Standalone {
    tokio::task::block_in_place(|| Standalone::start(lines))
}

async fn work(stage: &Stage, rounds: usize) {
    let adds = (0..rounds * KEYS).map(|n| Chore::Add {
        key: n % KEYS,
        waiting: 0,
    });
    stage.enqueue(&adds.collect::<Vec<_>>()).await;
    stage.naps(rounds * 20, 60).await;
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
    const CASE: &str = "service restart";
    let _machine = MACHINE.read().await;
    let mut server = start(AOF);
    let mut stage = Stage::at(server.url()).await;
    stage.registers(KEYS).await;
    let roles = [stage.role("first"), stage.role("second")];
    let mut crew = Vec::new();
    for role in roles {
        crew.push(Stage::hire(role).await);
    }
    for _ in 0..if in_campaign() { 25 } else { 4 } {
        work(&stage, 5).await;
        goes_on(&stage, 30).await;
        tokio::task::block_in_place(|| server.server.restart());
        // Whatever was under way is asked again by itself.
        work(&stage, 1).await;
    }
    stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(CASE);

    // The control arm: it is the disk that keeps them.
    let mut server = start(&[]);
    let stage = Stage::at(server.url()).await;
    stage.naps(100, 0).await;
    tokio::task::block_in_place(|| server.server.restart());
    while stage.world.client.queues().await.is_err() {}
    let lost = stage.finish([]).await.broke(Rule::JobLost);
    assert_eq!(lost, 100, "this test cannot fail");
    let control = format!("{lost} of 100 jobs lost");
    report(
        CASE,
        Row {
            control,
            ..judged.row
        },
    );
}

/// Lets the server stand still for a while, again and again, amid the work.
async fn stalled(times: usize, pause: Duration, term: Duration) -> (Stage, QueueView, Judgement) {
    let server = start(&[]);
    let mut stage = Stage::at(server.url()).await;
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
        tokio::task::block_in_place(|| server.server.pause());
        tokio::time::sleep(pause).await;
        server.server.resume();
        goes_on(&stage, 20).await;
    }
    let view = stage.drained().await;
    let judged = stage.finish(crew).await;
    (stage, view, judged)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn server_stall() {
    const CASE: &str = "server stall";
    let _machine = MACHINE.read().await;
    let times = if in_campaign() { 20 } else { 3 };
    let short = tokio::spawn(stalled(times, 2 * TERM, TERM));
    // The other arm: what is shorter than the margin costs nobody a lease.
    let long = tokio::spawn(stalled(times, 2 * TERM, 8 * TERM));
    let (_, view, judged) = short.await.unwrap();
    judged.assert_sound(CASE);
    let expired = view.ledger.expired_deadline;
    assert!(expired > 0, "nobody held anything: {view:?}");
    let (stage, view, patient) = long.await.unwrap();
    patient.assert_sound(CASE);
    stage.assert_none_expired(CASE, &view, 8 * TERM);
    let control = format!("{expired} expired; with a term of {:?} none", 8 * TERM);
    report(
        CASE,
        Row {
            control,
            ..judged.row
        },
    );
}

/// A counter on the server: what a token must not be.
fn count(server: &Standalone) -> u64 {
    server.server.ask(&["INCR", "counter"]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn token_across_issuer_rollback() {
    const CASE: &str = "token across issuer rollback";
    let _machine = MACHINE.read().await;
    let mut server = start(RDB_ONLY);
    let proxy = Proxy::start(server.server.port()).await;
    let mut stage = Stage::at(server.url()).await;
    stage.registers(KEYS).await;
    // A snapshot from before everything that follows.
    work(&stage, 1).await;
    let _: String = server.server.ask(&["SAVE"]).unwrap();
    let counted = (0..50).fold(0, |_, _| count(&server));

    // One that has read, and is cut off while the server forgets who it was.
    let mut role = stage.role("first");
    role.url = format!("redis://127.0.0.1:{}", proxy.port());
    role.slots = 3 * KEYS;
    let mut first = Stage::hire(role).await;
    stage.drained().await;
    let adds = (0..KEYS).map(|key| Chore::Add { key, waiting: 1 });
    let adds: Vec<_> = adds.collect();
    stage.enqueue(&adds).await;
    for _ in 0..KEYS {
        first.hears("open").await;
    }
    proxy.set(Mode::Drop);
    tokio::task::block_in_place(|| server.server.restart());
    let recounted = count(&server);
    let mut second = Stage::hire(stage.role("second")).await;
    stage.enqueue(&adds).await;
    for _ in 0..KEYS {
        second.hears("open").await;
    }
    // And once more, from nothing at all.
    let () = server.server.ask(&["FLUSHALL"]).unwrap();
    let mut third = Stage::hire(stage.role("third")).await;
    stage.enqueue(&adds).await;
    // The second has free slots, too.
    let mut opened = 0;
    let start = Instant::now();
    while opened < KEYS {
        assert!(start.elapsed() < PATIENCE, "{CASE}: {opened} opened");
        for process in [&mut second, &mut third] {
            while let Some(line) = process.overhear() {
                opened += usize::from(line.starts_with("open"));
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for process in [&mut first, &mut second, &mut third] {
        process.tell(2 * KEYS);
    }
    for _ in 0..KEYS {
        let line = first.hears("wrote").await;
        assert!(line.contains("refused"), "{CASE}: {line}");
    }
    proxy.set(Mode::Pass);
    stage.drained().await;
    let judged = stage.finish([first, second, third]).await;
    let row = judged.row.clone();
    assert_eq!(row.regressions, 0, "{CASE}: {:?}", judged.violations);
    assert_eq!(judged.broke(Rule::WriteLost), 0, "{:?}", judged.violations);
    assert!(
        row.refused >= 2 * KEYS as u64,
        "{CASE}: {} refused",
        row.refused
    );
    assert!(recounted < counted, "this test cannot fail");
    let control = format!("a counter: {counted}, then {recounted}");
    report(CASE, Row { control, ..row });
}
