//! A server without room in memory: no new jobs, and nobody who holds one loses it.

use std::time::{Duration, Instant};

use leasehold::ErrorKind;
use leasehold::NewJob;
use leasehold::inspect::QueueView;

use crate::MACHINE;
use crate::crew::Chore;
use crate::process::PATIENCE;
use crate::stage::Stage;
use crate::support::redis::Standalone;
use crate::table::{Row, report};

const HELD: usize = 12;
/// The term of those who hold on: longer than a busy machine keeps somebody waiting.
const HOLD: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn redis_out_of_memory() {
    const CASE: &str = "Redis out of memory";
    let _machine = MACHINE.read().await;
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let memory = |limit: &str| {
        let words = ["CONFIG", "SET", "maxmemory", limit];
        tokio::task::block_in_place(|| server.server.tell::<()>(&words));
    };
    let mut stage = Stage::at(server.url()).await;
    let mut crew = Vec::new();
    for owner in ["first", "second"] {
        let mut role = stage.role(owner);
        role.term = HOLD;
        crew.push(Stage::hire(role).await);
    }
    // Some that save their place and end while there is no room, some that only hold on.
    let pages = vec![Chore::Page { waiting: 1 }; HELD / 2];
    let millis = 3 * HOLD.as_millis() as u64 / 2;
    let waits = vec![Chore::Wait { millis }; HELD / 2];
    stage.enqueue(&[pages, waits].concat()).await;
    let all = |view: &QueueView| view.counts.leased == HELD as u64;
    stage.world.until("every lease", all).await;
    memory("1");
    let before = stage.world.look().await.ledger.completed;

    let (mut refused, mut plain, start) = (0, 0, Instant::now());
    let mut told = false;
    // A term without room, and then until those who may end have ended, all without room.
    let mut ended = 0;
    // A lease that ran out all the same cannot be granted again without room; it is judged below.
    while ended < HELD as u64 / 2 {
        let wait = NewJob::of(&Chore::Wait { millis: 0 }).unwrap();
        let full = stage.world.client.enqueue(wait).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Full, "{full}");
        refused += 1;
        // The control arm: a deadline that is kept by a plain command cannot be moved.
        let words = ["ZADD", "deadlines", "1", "lease"];
        let moved = tokio::task::block_in_place(|| server.server.ask::<u64>(&words));
        plain += usize::from(moved.is_err());
        if !told && start.elapsed() > HOLD {
            told = true;
            for process in &mut crew {
                process.tell(HELD);
            }
        }
        let view = stage.world.look().await;
        ended = view.ledger.completed + view.ledger.expired() - before;
        assert!(
            start.elapsed() < PATIENCE,
            "{CASE}: {ended} ended: {view:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    memory("0");
    let view = stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(CASE);
    stage.assert_none_expired(CASE, &view, HOLD);
    assert_eq!(plain, refused, "this test cannot fail");
    let row = Row {
        refused: judged.row.refused + refused as u64,
        control: format!("renewed by a plain command: {plain} of {refused} refused"),
        ..judged.row
    };
    report(CASE, row);
}
