//! Clocks that jump and drift: the server's, and one holder's.
//!
//! A Redis store takes its time from the server; here from a file that every process reads, so that
//! it can be set. A SQLite store takes it from the host, so that one process with a clock of its own
//! is a holder, and an issuer, whose clock is off. (A worker asks no wall clock: on a server, a
//! holder's clock cannot be off.)
//!
//! What a clock decides is when a lease ends. It decides neither the order of tokens nor who may
//! write: leases may end early, and then their holders are refused.

use std::time::Duration;

use leasehold::store::conformance::checker::Rule;

use crate::MACHINE;
use crate::crew::Chore;
use crate::journal::Judgement;
use crate::process::Process;
use crate::stage::Stage;
#[cfg(feature = "redis")]
use crate::support::redis::Standalone;
use crate::table::{Row, report};

const KEYS: usize = 4;
/// Long enough to end every lease at once, short enough to be waited for.
const JUMP: i64 = 3_000_000;
/// A twentieth.
const DRIFT: i64 = 50;
/// Nobody's lease ends by itself meanwhile.
const TERM: Duration = Duration::from_secs(2);

/// Registers that are read by `first`; its successor reads them too, and then both write.
async fn replaced(first: &mut Process, second: &mut Process) {
    for _ in 0..KEYS {
        second.hears("open").await;
    }
    for process in [first, second] {
        process.tell(KEYS);
        for _ in 0..KEYS {
            process.hears("wrote").await;
        }
    }
}

async fn hold(stage: &mut Stage) {
    stage.registers(KEYS).await;
    let adds = (0..KEYS).map(|key| Chore::Add { key, waiting: 2 });
    stage.enqueue(&adds.collect::<Vec<_>>()).await;
}

/// Work for two, at least this long.
async fn load(stage: &Stage, millis: u64) {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(millis) {
        let adds = (0..KEYS).map(|key| Chore::Add { key, waiting: 0 });
        stage.enqueue(&adds.collect::<Vec<_>>()).await;
        stage.naps(20, 40).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn assert_control(case: &str, control: &Judgement) -> String {
    let lost = control.broke(Rule::WriteLost);
    assert!(lost > 0, "{case}: this test cannot fail");
    format!("{lost} of {} writes lost", 2 * KEYS)
}

#[cfg(feature = "redis")]
mod server {
    use super::*;

    /// The clock jumps ahead while a lease is held: it ends early.
    async fn forward(fenced: bool) -> Judgement {
        let server = tokio::task::block_in_place(|| Standalone::start(&[]));
        let (mut stage, clock) = Stage::with_clock(server.url()).await;
        hold(&mut stage).await;
        let mut crew = Vec::new();
        for owner in ["first", "second"] {
            let mut role = stage.role(owner);
            (role.slots, role.fenced, role.term) = (KEYS, fenced, 10 * TERM);
            crew.push(Stage::hire(role).await);
            if owner == "first" {
                for _ in 0..KEYS {
                    crew[0].hears("open").await;
                }
            }
        }
        let [first, second] = &mut crew[..] else {
            unreachable!()
        };
        clock.set(60_000_000, 0);
        replaced(first, second).await;
        stage.naps(50, 20).await;
        stage.drained().await;
        stage.finish(crew).await
    }

    /// The clock goes back, or wrong, amid the work.
    async fn amid(ahead: i64, gains: i64, then: i64) -> (Stage, Judgement) {
        let server = tokio::task::block_in_place(|| Standalone::start(&[]));
        let (mut stage, clock) = Stage::with_clock(server.url()).await;
        stage.registers(KEYS).await;
        let mut crew = Vec::new();
        for owner in ["first", "second"] {
            let mut role = stage.role(owner);
            role.term = TERM;
            crew.push(Stage::hire(role).await);
        }
        load(&stage, 500).await;
        clock.set(ahead, gains);
        load(&stage, 3_000).await;
        clock.set(ahead + then, -gains);
        load(&stage, 1_000).await;
        stage.drained().await;
        let judged = stage.finish(crew).await;
        (stage, judged)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "needs redis-server: ./tests/run"]
    async fn server_clock() {
        let _machine = MACHINE.read().await;
        let (fenced, unfenced) = (tokio::spawn(forward(true)), tokio::spawn(forward(false)));
        let back = tokio::spawn(amid(-JUMP, 0, 0));
        let drift = tokio::spawn(amid(0, DRIFT, 3_000 * DRIFT));

        let case = "server clock forward";
        let judged = fenced.await.unwrap();
        judged.assert_sound(case);
        assert!(judged.row.refused >= KEYS as u64, "{case}: who was stale?");
        let control = assert_control(case, &unfenced.await.unwrap());
        report(
            case,
            Row {
                control,
                ..judged.row
            },
        );
        for (case, run) in [("server clock back", back), ("server clock drifts", drift)] {
            let (_stage, judged) = run.await.unwrap();
            judged.assert_sound(case);
            report(case, judged.row);
        }
    }
}

/// The owner whose clock is `ahead` holds, and another replaces it; or, where the clock is ahead, it
/// replaces the other.
async fn one_off(ahead: i64, fenced: bool) -> Judgement {
    let mut stage = Stage::sqlite().await;
    hold(&mut stage).await;
    let clock = stage.clock_of_its_own();
    clock.set(ahead, 0);
    let mut right = stage.role("right");
    right.clock = None;
    let mut off = stage.role("off");
    for role in [&mut right, &mut off] {
        (role.slots, role.fenced, role.term) = (KEYS, fenced, TERM);
    }
    let roles = if ahead > 0 {
        [right, off]
    } else {
        [off, right]
    };
    let mut crew = Vec::new();
    for role in roles {
        crew.push(Stage::hire(role).await);
        if crew.len() == 1 {
            for _ in 0..KEYS {
                crew[0].hears("open").await;
            }
        }
    }
    let [first, second] = &mut crew[..] else {
        unreachable!()
    };
    replaced(first, second).await;
    stage.naps(50, 20).await;
    stage.drained().await;
    stage.finish(crew).await
}

async fn drifts() -> Judgement {
    let mut stage = Stage::sqlite().await;
    stage.registers(KEYS).await;
    let clock = stage.clock_of_its_own();
    clock.set(0, 0);
    let mut right = stage.role("right");
    right.clock = None;
    let mut crew = Vec::new();
    for mut role in [right, stage.role("off")] {
        role.term = TERM;
        crew.push(Stage::hire(role).await);
    }
    clock.set(0, DRIFT);
    load(&stage, 3_000).await;
    stage.drained().await;
    stage.finish(crew).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_clock() {
    let _machine = MACHINE.read().await;
    let drift = tokio::spawn(drifts());
    let jumps = [("holder clock forward", JUMP), ("holder clock back", -JUMP)];
    let jumps = jumps.map(|(case, ahead)| {
        let arm = |fenced| tokio::spawn(one_off(ahead, fenced));
        (case, arm(true), arm(false))
    });
    for (case, fenced, unfenced) in jumps {
        let judged = fenced.await.unwrap();
        judged.assert_sound(case);
        assert!(judged.row.refused >= KEYS as u64, "{case}: who was stale?");
        let control = assert_control(case, &unfenced.await.unwrap());
        report(
            case,
            Row {
                control,
                ..judged.row
            },
        );
    }
    let (case, judged) = ("holder clock drifts", drift.await.unwrap());
    judged.assert_sound(case);
    report(case, judged.row);
}
