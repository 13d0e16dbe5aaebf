//! `kill -9` of workers whose handlers change data in the queue's own file.
//!
//! With effect and settlement in one transaction each effect is there exactly once, counted in the
//! data. With two transactions there is a moment between them, and the control arm must find it.

use std::time::{Duration, Instant};

use rusqlite::Connection;
use rustix::process::Signal;

use crate::MACHINE;
use crate::process::Process;
use crate::roles::Errand;
use crate::table::{Row, report};
use crate::world::{World, figures};

const WORKERS: usize = 3;
const SLOTS: usize = 4;

struct Aftermath {
    jobs: u64,
    kills: usize,
    expired: u64,
    /// Jobs that were paid for, and those that were paid for more than once.
    paid: u64,
    twice: u64,
}

fn count(db: &Connection, sql: &str) -> u64 {
    let count: i64 = db.query_row(sql, [], |row| row.get(0)).unwrap();
    count.cast_unsigned()
}

const TWICE: &str = "SELECT count(*) FROM (SELECT 1 FROM paid GROUP BY job HAVING count(*) > 1)";

/// Kills workers at random moments while they pay; stops early if that is `enough`.
async fn kill_payers(
    together: bool,
    kills: usize,
    enough: impl Fn(&Connection) -> bool,
) -> Aftermath {
    let mut world = World::new();
    let db = Connection::open(world.db()).unwrap();
    db.busy_timeout(Duration::from_secs(60)).unwrap();
    db.execute_batch("CREATE TABLE paid (job TEXT NOT NULL, token INTEGER NOT NULL)")
        .unwrap();
    let jobs: Vec<_> = (0..200).map(|_| Errand::Pay { together }).collect();
    world.enqueue(&jobs).await;
    let mut fleet: Vec<Process> = (0..WORKERS).map(|_| world.worker(SLOTS)).collect();
    let mut killed = 0;
    while killed < kills && !enough(&db) {
        if world.look().await.counts.ready < 100 {
            world.enqueue(&jobs).await;
        }
        let mut victim = fleet.remove(0);
        // It is at work: from here on any moment is as good as any other.
        victim.hear("paid");
        let until = Instant::now() + Duration::from_micros(fastrand::u64(..15_000));
        tokio::time::sleep_until(until.into()).await;
        victim.kill();
        killed += 1;
        fleet.push(world.worker(SLOTS));
    }
    let settled = |view: &leasehold::inspect::QueueView| {
        view.counts.completed + view.counts.dead == view.ledger.enqueued
    };
    let view = world.until("everything to be settled", settled).await;
    for process in &mut fleet {
        process.signal(Signal::TERM);
        assert!(process.ends().await.success());
    }
    assert!(view.ledger.balances(), "{:?}", view.ledger);
    assert_eq!(view.counts.dead, 0);
    world.assert_sound();
    Aftermath {
        jobs: view.ledger.enqueued,
        kills: killed,
        expired: view.ledger.expired(),
        paid: count(&db, "SELECT count(DISTINCT job) FROM paid"),
        twice: count(&db, TWICE),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_with_effect_and_settlement_in_one_transaction_pays_exactly_once() {
    let _shared = MACHINE.read().await;
    let seen = kill_payers(true, 200, |_| false).await;
    figures(&format!(
        "kill9_in_one_transaction: {} jobs, {} kills, {} expiries, {} paid, {} paid twice",
        seen.jobs, seen.kills, seen.expired, seen.paid, seen.twice
    ));
    assert_eq!(seen.kills, 200);
    assert!(seen.expired > 0, "nobody was killed at work");
    assert_eq!((seen.paid, seen.twice), (seen.jobs, 0));
    let row = Row {
        acknowledged: seen.jobs,
        lost: seen.jobs - seen.paid,
        duplicated: seen.twice,
        control: "two transactions: in a test of its own".into(),
        ..Row::default()
    };
    report("kill -9 in commit", row);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_with_two_transactions_pays_twice() {
    let _shared = MACHINE.read().await;
    let seen = kill_payers(false, 200, |db| count(db, TWICE) > 0).await;
    figures(&format!(
        "kill9_in_two_transactions: {} of {} jobs paid twice after {} kills",
        seen.twice, seen.jobs, seen.kills
    ));
    assert_eq!(seen.paid, seen.jobs);
    assert!(seen.twice > 0, "this test cannot fail");
}
