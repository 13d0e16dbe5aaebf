//! A worker that is cut off from its store, in every way, and can still reach what it writes to.
//!
//! It has read a register and not yet written when its link is cut. Its successor opens the
//! register and reads; then the first is told to write, and then the second. All of it goes by
//! facts: each says when it has read, and waits for a word.

use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect::QueueView;
use leasehold_conformance::checker::Rule;
use tokio::sync::Semaphore;

use crate::MACHINE;
use crate::crew::Chore;
use crate::engine::Engine;
use crate::journal::Judgement;
use crate::stage::Stage;
use crate::support::proxy::Mode;
use crate::table::{Row, report};
use crate::world::TERM;

const KEYS: usize = 6;
/// A renewal that is held for so long comes after the deadline.
const DELAY: Duration = Duration::from_millis(1_300);

const MODES: [Mode; 5] = [
    Mode::Drop,
    Mode::DropRequests,
    Mode::DropReplies,
    Mode::Reset,
    Mode::Delay(DELAY),
];

async fn cut_off(engine: Engine, case: &str, mode: Mode, fenced: bool) -> Judgement {
    let host = engine.share();
    let proxy = host.proxy().await;
    let mut stage = Stage::at(host.url()).await;
    stage.registers(KEYS).await;
    let adds = (0..KEYS).map(|key| Chore::Add { key, waiting: 2 });
    stage.enqueue(&adds.collect::<Vec<_>>()).await;

    let mut role = stage.role("first");
    role.url = host.url_by(proxy.port());
    role.fenced = fenced;
    // It has no room for what would be granted to it unheard.
    role.slots = KEYS;
    let mut first = Stage::hire(role).await;
    for _ in 0..KEYS {
        first.hears("open").await;
    }
    let mut role = stage.role("second");
    role.fenced = fenced;
    let mut second = Stage::hire(role).await;
    // What is measured is a takeover, not a start: the first has no slot for this.
    stage.waits(1, 0).await;
    let at_work = |view: &QueueView| view.counts.completed == 1;
    stage.world.until("the second at work", at_work).await;
    proxy.set(mode);
    for _ in 0..KEYS {
        second.hears("open").await;
    }
    for process in [&mut first, &mut second] {
        process.tell(KEYS);
        for _ in 0..KEYS {
            process.hears("wrote").await;
        }
    }
    // The link heals, and the first is of use again, alone.
    proxy.set(Mode::Pass);
    stage.waits(50, 20).await;
    stage.drained().await;
    let judged = stage.finish([second]).await;
    assert!(
        judged.row.takeovers.len() >= KEYS,
        "{case}: nobody was replaced"
    );
    stage.waits(50, 20).await;
    stage.drained().await;
    let judged = stage.finish([first]).await;
    if fenced {
        // Where only the replies are lost, the store hears an owner renew for as long as it still
        // relies on its lease.
        let terms = if mode == Mode::DropReplies { 2 } else { 1 };
        stage.assert_prompt(case, &judged, terms * TERM);
    }
    judged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn partitions_and_delays() {
    let _machine = MACHINE.write().await;
    let cases = [
        "partition, both ways",
        "partition, requests lost",
        "partition, replies lost",
        "partition, link down",
        "delayed renewal",
    ];
    all_cut_off(Engine::Redis, cases, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn partitions_and_delays_on_postgres() {
    let _machine = MACHINE.write().await;
    let cases = [
        "partition, both ways, PostgreSQL",
        "partition, requests lost, PostgreSQL",
        "partition, replies lost, PostgreSQL",
        "partition, link down, PostgreSQL",
        "delayed renewal, PostgreSQL",
    ];
    // What a register without a fence loses does not depend on where the queue is: one arm is
    // enough to see it.
    all_cut_off(Engine::Postgres, cases, 1).await;
}

/// In every way, and in so many of them again, with registers that are not fenced.
async fn all_cut_off(engine: Engine, cases: [&'static str; 5], controls: usize) {
    // A server of PostgreSQL is many processes: more than three of them keep a small machine so
    // busy that it is the machine which is judged.
    let at_once = match engine {
        Engine::Postgres => 3,
        Engine::Redis => 2 * cases.len(),
    };
    let room = Arc::new(Semaphore::new(at_once));
    let arm = |case, mode, fenced| {
        let room = room.clone();
        tokio::spawn(async move {
            let _place = room.acquire().await;
            cut_off(engine, case, mode, fenced).await
        })
    };
    let runs: Vec<_> = cases
        .into_iter()
        .zip(MODES)
        .enumerate()
        .map(|(nth, (case, mode))| {
            let control = (nth < controls).then(|| arm(case, mode, false));
            (case, arm(case, mode, true), control)
        })
        .collect();
    for (case, fenced, unfenced) in runs {
        let judged = fenced.await.unwrap();
        judged.assert_sound(case);
        assert!(judged.row.refused >= KEYS as u64, "{case}: who was stale?");
        let mut control = "as on Redis".to_owned();
        if let Some(unfenced) = unfenced {
            let lost = unfenced.await.unwrap().broke(Rule::WriteLost);
            assert!(lost > 0, "{case}: this test cannot fail");
            control = format!("{lost} of {} writes lost", 2 * KEYS);
        }
        report(
            case,
            Row {
                control,
                ..judged.row
            },
        );
    }
}
