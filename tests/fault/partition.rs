//! A worker that is cut off from its store, in every way, and can still reach what it writes to.
//!
//! It has read a register and not yet written when its link is cut. Its successor opens the register
//! and reads; then the first is told to write, and then the second. All of it goes by facts: each
//! says when it has read, and waits for a word.

use std::time::Duration;

use leasehold::store::conformance::checker::Rule;

use crate::MACHINE;
use crate::crew::Chore;
use crate::journal::Judgement;
use crate::stage::Stage;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::world::TERM;

const KEYS: usize = 6;
/// A renewal that is held for so long comes after the deadline.
const DELAY: Duration = Duration::from_millis(1_300);

const CASES: [(&str, Mode); 5] = [
    ("partition, both ways", Mode::Drop),
    ("partition, requests lost", Mode::DropRequests),
    ("partition, replies lost", Mode::DropReplies),
    ("partition, link down", Mode::Reset),
    ("delayed renewal", Mode::Delay(DELAY)),
];

async fn cut_off(case: &str, mode: Mode, fenced: bool) -> Judgement {
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let proxy = Proxy::start(server.server.port()).await;
    let mut stage = Stage::at(server.url()).await;
    stage.registers(KEYS).await;
    let adds = (0..KEYS).map(|key| Chore::Add { key, waiting: 2 });
    stage.enqueue(&adds.collect::<Vec<_>>()).await;

    let mut role = stage.role("first");
    role.url = format!("redis://127.0.0.1:{}", proxy.port());
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
    stage.naps(50, 20).await;
    stage.drained().await;
    let judged = stage.finish([second]).await;
    assert!(
        judged.row.takeovers.len() >= KEYS,
        "{case}: nobody was replaced"
    );
    stage.naps(50, 20).await;
    stage.drained().await;
    let judged = stage.finish([first]).await;
    if fenced {
        // Where only the replies are lost, the store hears an owner renew for as long as it still
        // relies on its lease.
        let heard = if mode == Mode::DropReplies { 2 } else { 1 };
        stage.assert_prompt(case, &judged, heard * TERM);
    }
    judged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn partitions_and_delays() {
    let _machine = MACHINE.read().await;
    let runs = CASES.map(|(case, mode)| {
        let arm = |fenced| tokio::spawn(cut_off(case, mode, fenced));
        (case, arm(true), arm(false))
    });
    for (case, fenced, unfenced) in runs {
        let (judged, control) = (fenced.await.unwrap(), unfenced.await.unwrap());
        judged.assert_sound(case);
        assert!(judged.row.refused >= KEYS as u64, "{case}: who was stale?");
        let lost = control.broke(Rule::WriteLost);
        assert!(lost > 0, "{case}: this test cannot fail");
        let row = Row {
            control: format!("{lost} of {} writes lost", 2 * KEYS),
            ..judged.row
        };
        report(case, row);
    }
}
