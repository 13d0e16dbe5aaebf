//! A server that forgets.

use std::time::{Duration, Instant};

use leasehold_conformance::checker::Rule;

use crate::MACHINE;
use crate::crew::Chore;
use crate::process::PATIENCE;
use crate::server::{KEYS, work};
use crate::stage::Stage;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis::{RDB_ONLY, Standalone};
use crate::table::{Row, report};

/// A counter on the server: what a token must not be.
fn count(server: &Standalone) -> u64 {
    server.server.ask(&["INCR", "counter"]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn token_across_issuer_rollback() {
    const CASE: &str = "token across issuer rollback";
    let _machine = MACHINE.read().await;
    let mut server = tokio::task::block_in_place(|| Standalone::start(RDB_ONLY));
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
