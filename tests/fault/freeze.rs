//! Processes that stand still: past their term, and with the file's write lock in their hands.

use std::time::{Duration, Instant};

use leasehold::clock::{Clock as _, SystemClock};
use leasehold::inspect::QueueView;
use leasehold::job::JobState;
use leasehold::lease::{Cause, LeaseEnd};
use rustix::process::Signal;

use crate::MACHINE;
use crate::process::{Killed, Process};
use crate::roles::{Errand, Role};
use crate::stage::pulse;
use crate::table::{Row, report};
use crate::world::{TERM, World, assert_in_order, figures};

const ZOMBIES: usize = 4;
const JOBS: usize = 300;

fn all_completed(view: &QueueView) -> bool {
    view.counts.completed == view.ledger.enqueued
}

/// Freezes a worker amid the first run of each job. False if that was not the moment: it was inside
/// a transaction, where it would keep its successor from writing, or the machine was too slow for
/// it.
async fn freeze(world: &World, process: &Process, owner: &str) -> bool {
    process.signal(Signal::STOP);
    let writes = world.store().open_session();
    let writes = tokio::time::timeout(2 * TERM, writes).await;
    let leases = world.leases(owner).await;
    let first = leases.iter().filter(|lease| lease.attempt == 1);
    matches!(writes, Ok(Ok(_))) && first.count() == ZOMBIES
}

/// What became of a zombie's calls.
struct Thawed {
    checkpoints: u64,
    refused: u64,
    takeovers: Vec<Duration>,
    stale: usize,
}

/// Freezes a worker in mid-job past its term, and thaws it when its successor has completed
/// everything, or is in the midst of it. None if it could not be frozen, or its successor stood
/// still too, with the machine.
async fn thawed(mut world: World, after_the_end: bool) -> Option<Thawed> {
    pulse::start();
    let began = Instant::now();
    let jobs = world
        .enqueue(&[const { Errand::Zombie { millis: 1_000 } }; ZOMBIES])
        .await;
    let role = world.role(ZOMBIES);
    let owner = role.owner.clone();
    let frozen = Process::start(&Role::Worker(role));
    for _ in &jobs {
        frozen.hear("began");
    }
    if !freeze(&world, &frozen, &owner).await {
        return None;
    }
    let leases = world.leases(&owner).await;
    let looked = SystemClock.now();
    let role = world.role(ZOMBIES);
    let heir = role.owner.clone();
    let mut successor = Process::start(&Role::Worker(role));
    let taken = |view: &QueueView| view.ledger.expired_deadline == 4 && view.ledger.granted == 8;
    world.until("the successor", taken).await;
    if after_the_end {
        world.until("the successor's end", all_completed).await;
    }
    frozen.signal(Signal::CONT);
    let (mut refused, mut fenced) = (0, 0);
    for _ in &jobs {
        let line = frozen.hear("late");
        refused += usize::from(line.contains("refused"));
        fenced += usize::from(line.contains("fenced"));
    }
    world.until("the successor's end", all_completed).await;
    // The handlers of the successor have ended; its settlements are known.
    successor.signal(Signal::TERM);
    assert!(successor.ends().await.success());

    let queue = world.look().await;
    let done = world.jobs(JobState::Completed).await;
    assert_in_order(&queue, &done);
    if done.iter().any(|view| view.job.history.len() != 2) {
        let still = pulse::stood_still(began);
        assert!(still > TERM / 8, "on a calm machine ({still:?}): {done:?}");
        figures(&format!(
            "void: the machine stood still for {still:?}, and so did the successor"
        ));
        return None;
    }
    let mut stale = 0;
    let mut takeovers = Vec::new();
    for view in &done {
        let [first, second] = &view.job.history[..] else {
            panic!("{view:?}");
        };
        assert_eq!(first.end, LeaseEnd::Expired(Cause::Deadline));
        assert_eq!(second.end, LeaseEnd::Completed);
        assert_eq!((&*first.owner, &*second.owner), (&*owner, &*heir));
        // A frozen owner's last sign of life was a term before its deadline.
        let held = leases.iter().find(|lease| lease.token == first.token);
        let alive = looked.after(held.unwrap().time_left).before(TERM);
        takeovers.push(second.granted_at.since(alive));
        let saved = view.job.checkpoint.as_ref().unwrap();
        assert_eq!(saved.token, second.token, "a stale checkpoint");
        let unguarded = world.unguarded(view.job.id);
        stale += usize::from(unguarded == first.token.to_string());
    }
    figures(&format!(
        "frozen_worker: thawed {}; {refused} checkpoints and {fenced} settlements of {ZOMBIES} \
         refused, {} calls fenced; {stale} stale values where nobody guards",
        if after_the_end {
            "when all was done"
        } else {
            "amid its successor's work"
        },
        queue.ledger.fenced,
    ));
    assert_eq!((refused, fenced), (ZOMBIES, ZOMBIES));
    assert_eq!((queue.ledger.completed, queue.ledger.late), (4, 0));
    assert!(queue.ledger.fenced >= 8, "{:?}", queue.ledger);
    if after_the_end {
        // The control arm: what is not fenced keeps what the zombie wrote last.
        assert_eq!(stale, ZOMBIES, "this test cannot fail");
    }
    Some(Thawed {
        checkpoints: refused as u64,
        refused: queue.ledger.fenced,
        takeovers,
        stale,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_worker() {
    let _machine = MACHINE.read().await;
    let cases = ["owner pause, stale owner resume", "stale checkpoint"];
    frozen(cases, async || World::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn frozen_worker_on_postgres() {
    let _machine = MACHINE.read().await;
    let cases = [
        "owner pause, stale owner resume, PostgreSQL",
        "stale checkpoint, PostgreSQL",
    ];
    let fresh = async || {
        let host = crate::engine::Engine::Postgres.share();
        World::on(&host).await
    };
    frozen(cases, fresh).await;
}

/// Each time in a new world: what happens to the leases, and what to the checkpoints.
async fn frozen(cases: [&'static str; 2], fresh: impl AsyncFn() -> World) {
    let (mut pause, mut checkpoint) = (Row::default(), Row::default());
    for after_the_end in [true, false] {
        let mut tries = 0;
        let thawed = loop {
            match thawed(fresh().await, after_the_end).await {
                Some(thawed) => break thawed,
                None => tries += 1,
            }
            assert!(tries < 10, "found no moment to freeze the worker");
        };
        pause.acknowledged += ZOMBIES as u64;
        pause.refused += thawed.refused;
        pause.takeovers.extend(thawed.takeovers);
        checkpoint.acknowledged += ZOMBIES as u64;
        checkpoint.refused += thawed.checkpoints;
        if after_the_end {
            pause.control = format!("{} of {ZOMBIES} values overwritten", thawed.stale);
            checkpoint.control.clone_from(&pause.control);
        }
    }
    let [of_leases, of_checkpoints] = cases;
    report(of_leases, pause);
    report(of_checkpoints, checkpoint);
}

/// Has a process hold the write lock, frozen, for two seconds amid the work; it is then killed.
async fn locked_out(term: Duration) -> (World, Killed, QueueView) {
    let mut world = World::new();
    let waits = (0..JOBS).map(|_| Errand::Wait {
        millis: fastrand::u64(50..150),
    });
    world.enqueue(&waits.collect::<Vec<_>>()).await;
    let mut workers = Vec::new();
    for _ in 0..2 {
        let mut role = world.role(8);
        role.term = term;
        workers.push(Process::start(&Role::Worker(role)));
    }
    let amid = |view: &QueueView| view.ledger.completed > 20;
    world.until("some work", amid).await;
    let mut holder = Process::start(&Role::LockHolder {
        db: world.db().to_owned(),
    });
    holder.hear("holding");
    holder.signal(Signal::STOP);
    let before = world.look().await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let during = world.look().await;
    assert_eq!(before.ledger, during.ledger, "somebody wrote past the lock");
    assert!(before.counts.leased > 0, "nobody was at work: {before:?}");
    let released = holder.kill();
    let end = world.until("the rest", all_completed).await;
    for worker in &mut workers {
        worker.signal(Signal::TERM);
        assert!(worker.ends().await.success());
    }
    assert!(SystemClock.now() > released.not_after);
    (world, released, end)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_inside_a_transaction() {
    let _machine = MACHINE.write().await;
    pulse::start();
    let began = Instant::now();
    let (world, released, _) = locked_out(TERM).await;
    let bound = TERM + pulse::slack(began);
    let short = world.look().await;
    let jobs = world.jobs(JobState::Completed).await;
    assert_in_order(&short, &jobs);
    assert_eq!(jobs.len(), JOBS);
    world.assert_sound();
    let leases = || jobs.iter().flat_map(|view| &view.job.history);
    let first = leases()
        .map(|lease| lease.granted_at)
        .filter(|at| *at >= released.not_before)
        .min()
        .unwrap();
    let mut again = Vec::new();
    for view in &jobs {
        for pair in view.job.history.windows(2) {
            again.push(pair[1].granted_at.since(released.not_before));
        }
    }
    again.sort();
    let last = again.last().copied().unwrap_or_default();

    // The control arm: two seconds are nothing to a lease that has longer to live.
    let (world, ..) = locked_out(6 * TERM).await;
    let long = world.look().await.ledger;
    figures(&format!(
        "frozen_inside_a_transaction: 2 s without a write; with a term of 1 s {} leases expired, \
         {} settled late, first grant {} ms after the release, last job granted again {} ms; \
         with 6 s {} expired",
        short.ledger.expired_deadline,
        short.ledger.late,
        first.since(released.not_before).as_millis(),
        last.as_millis(),
        long.expired_deadline,
    ));
    let row = Row {
        acknowledged: JOBS as u64,
        refused: short.ledger.fenced,
        control: format!(
            "{} expired; with a term of 6 s none",
            short.ledger.expired()
        ),
        ..Row::default()
    };
    report("frozen inside a SQLite transaction", row);
    assert!(last <= bound, "{last:?}, allowed {bound:?}");
    assert_eq!(
        (long.completed, long.expired()),
        (JOBS as u64, 0),
        "{long:?}"
    );
    assert!(long.balances() && long.granted == long.completed + long.surrendered);
}
