//! Clocks that jump and drift: the server's, and one holder's.
//!
//! A Redis store takes its time from the server; here from a file that every process reads, so that
//! it can be set. A SQLite store takes it from the host, so that one process with a clock of its
//! own is a holder, and an issuer, whose clock is off. (A worker asks no wall clock: on a server, a
//! holder's clock cannot be off.)
//!
//! What a clock decides is when a lease ends. It decides neither the order of tokens nor who may
//! write: leases may end early, and then their holders are refused. So there are two kinds of arms
//! that must fail: the same without the fence, and an issuer beside ours whose tokens are the
//! clock.

use std::time::Duration;

use leasehold::clock::{Clock, SystemClock, Timestamp};
use leasehold_conformance::checker::Rule;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::MACHINE;
use crate::crew::Chore;
use crate::journal::Judgement;
use crate::process::Process;
use crate::stage::Stage;
use crate::support::redis::Standalone;
use crate::table::{Row, report};

const KEYS: usize = 4;
/// Long enough to end every lease at once, short enough to be waited for.
const JUMP: i64 = 3_000_000;
/// A twentieth.
const DRIFT: i64 = 50;
/// Tenfold: beyond what any margin allows for.
const RACE: i64 = 9_000;
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
        stage.waits(20, 40).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// An issuer whose tokens are its clock and nothing else, beside the real one: what a token must
/// not be. It has one clock, or two that take turns.
struct ByTheClock {
    clocks: Vec<Box<dyn Clock>>,
    begun: CancellationToken,
    over: CancellationToken,
}

impl ByTheClock {
    /// Begins, and has given a token when it returns.
    async fn begin(clocks: Vec<Box<dyn Clock>>) -> (CancellationToken, JoinHandle<(usize, usize)>) {
        let (begun, over) = (CancellationToken::new(), CancellationToken::new());
        let issuer = Self {
            clocks,
            begun: begun.clone(),
            over: over.clone(),
        };
        let issuing = tokio::spawn(issuer.issue());
        begun.cancelled().await;
        (over, issuing)
    }

    /// How many of its tokens went back, of how many.
    async fn issue(self) -> (usize, usize) {
        let (mut top, mut back, mut all) = (Timestamp::from_micros(0), 0, 0);
        while !self.over.is_cancelled() {
            for clock in &self.clocks {
                let token = clock.now();
                back += usize::from(token < top);
                all += 1;
                top = top.max(token);
            }
            self.begun.cancel();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        (back, all)
    }
}

fn assert_gone_back(case: &str, (back, all): (usize, usize)) -> String {
    assert!(back > 0, "{case}: this test cannot fail");
    format!("the clock as token: {back} of {all} go back")
}

fn assert_control(case: &str, control: &Judgement) -> String {
    let lost = control.broke(Rule::WriteLost);
    assert!(lost > 0, "{case}: this test cannot fail");
    format!("{lost} of {} writes lost", 2 * KEYS)
}

mod server {
    use leasehold::inspect::QueueView;

    use super::*;

    /// The clock jumps or runs ahead while a lease is held: it ends early.
    async fn forward(ahead: i64, gains: i64, fenced: bool) -> Judgement {
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
        clock.set(ahead, gains);
        replaced(first, second).await;
        // As it was meant to be, so that it is not the clock that the rest waits for.
        clock.set(ahead.max(60_000_000), 0);
        stage.waits(50, 20).await;
        stage.drained().await;
        stage.finish(crew).await
    }

    /// How work went on under a clock that was set amid it.
    struct Amid {
        stage: Stage,
        view: QueueView,
        judged: Judgement,
        by_the_clock: (usize, usize),
    }

    /// The clock goes back, or wrong, amid the work.
    async fn amid(ahead: i64, gains: i64, then: i64) -> Amid {
        let server = tokio::task::block_in_place(|| Standalone::start(&[]));
        let (mut stage, clock) = Stage::with_clock(server.url()).await;
        stage.registers(KEYS).await;
        let mut crew = Vec::new();
        for owner in ["first", "second"] {
            let mut role = stage.role(owner);
            role.term = TERM;
            crew.push(Stage::hire(role).await);
        }
        let (over, by_the_clock) = ByTheClock::begin(vec![Box::new(clock.clone())]).await;
        load(&stage, 500).await;
        clock.set(ahead, gains);
        load(&stage, 3_000).await;
        clock.set(ahead + then, -gains);
        load(&stage, 1_000).await;
        let view = stage.drained().await;
        let judged = stage.finish(crew).await;
        over.cancel();
        Amid {
            stage,
            view,
            judged,
            by_the_clock: by_the_clock.await.unwrap(),
        }
    }

    /// A lease that a clock ends early, with the fence and without.
    async fn early(case: &'static str, ahead: i64, gains: i64) -> (Judgement, String) {
        let arm = |fenced| tokio::spawn(forward(ahead, gains, fenced));
        let (fenced, unfenced) = (arm(true), arm(false));
        let judged = fenced.await.unwrap();
        judged.assert_sound(case);
        assert!(judged.row.refused >= KEYS as u64, "{case}: who was stale?");
        let control = assert_control(case, &unfenced.await.unwrap());
        (judged, control)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "needs redis-server: ./tests/run"]
    async fn server_clock() {
        let _machine = MACHINE.read().await;
        let jump = tokio::spawn(early("server clock forward", 60_000_000, 0));
        let race = tokio::spawn(early("server clock drifts", 0, RACE));
        let back = tokio::spawn(amid(-JUMP, 0, 0));
        let drift = tokio::spawn(amid(0, DRIFT, 3_000 * DRIFT));

        let (judged, control) = jump.await.unwrap();
        let row = judged.row;
        report("server clock forward", Row { control, ..row });

        let case = "server clock back";
        let back = back.await.unwrap();
        back.judged.assert_sound(case);
        let control = assert_gone_back(case, back.by_the_clock);
        let row = back.judged.row;
        report(case, Row { control, ..row });

        // Within the margin nobody is replaced; beyond it, whoever is replaced is refused.
        let case = "server clock drifts";
        let drift = drift.await.unwrap();
        drift.judged.assert_sound(case);
        drift.stage.assert_none_expired(case, &drift.view, TERM);
        let (_, control) = race.await.unwrap();
        let control = format!("tenfold: {control}");
        let row = drift.judged.row;
        report(case, Row { control, ..row });
    }
}

/// The owner whose clock is `ahead` holds, and another replaces it; or, where the clock is ahead,
/// it replaces the other.
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
    stage.waits(50, 20).await;
    stage.drained().await;
    stage.finish(crew).await
}

/// One of two clocks drifts.
async fn drifts() -> (Judgement, (usize, usize)) {
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
    let clocks: Vec<Box<dyn Clock>> = vec![Box::new(clock), Box::new(SystemClock)];
    let (over, by_the_clock) = ByTheClock::begin(clocks).await;
    load(&stage, 3_000).await;
    stage.drained().await;
    let judged = stage.finish(crew).await;
    over.cancel();
    (judged, by_the_clock.await.unwrap())
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
    let case = "holder clock drifts";
    let (judged, by_the_clock) = drift.await.unwrap();
    judged.assert_sound(case);
    let control = assert_gone_back(case, by_the_clock);
    let row = judged.row;
    report(case, Row { control, ..row });
}
