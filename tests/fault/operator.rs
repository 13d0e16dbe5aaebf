//! Owners that live and get nowhere: frozen ones that an operator takes the lease from, and ones
//! whose handlers make no progress.

use std::time::{Duration, Instant};

use leasehold::JobId;
use leasehold::inspect::QueueView;
use leasehold::store::LeaseSelect;
use rustix::process::Signal;

use crate::MACHINE;
use crate::crew::Chore;
use crate::stage::Stage;
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::world::TERM;

const KEYS: usize = 4;
/// So long that nobody waits for it.
const LONG: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn manual_recovery() {
    const CASE: &str = "manual recovery";
    let _machine = MACHINE.read().await;
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let mut stage = Stage::at(server.url()).await;
    stage.registers(KEYS).await;
    stage.waits(1, 0).await;
    let mut crew = Vec::new();
    for owner in ["first", "second"] {
        let mut role = stage.role(owner);
        (role.slots, role.term) = (KEYS, LONG);
        crew.push(Stage::hire(role).await);
        if owner == "first" {
            stage.drained().await;
            let adds = (0..KEYS).map(|key| Chore::Add { key, waiting: 2 });
            let mut waits: Vec<_> = adds.collect();
            waits.truncate(KEYS);
            stage.enqueue(&waits).await;
            for _ in 0..KEYS {
                crew[0].hears("open").await;
            }
            crew[0].signal(Signal::STOP);
        }
    }
    // The control arm: left alone, the jobs stay where they are.
    let start = Instant::now();
    while start.elapsed() < 2 * TERM {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(crew[1].overhear().is_none(), "{CASE}: nobody was needed");
    }
    let held = stage.world.leases("first").await;
    assert_eq!(held.len(), KEYS);

    // Twice at once, and of what is not there or has ended.
    let ada = stage.world.client.operator("ada").because("it hangs");
    let revoke = |select: LeaseSelect| ada.revoke(select);
    let revoked = Instant::now();
    let owner = || LeaseSelect::Owner("first".into());
    let (one, other) = tokio::join!(revoke(owner()), revoke(owner()));
    assert_eq!(one.unwrap().done + other.unwrap().done, KEYS as u64);
    let mut takeovers = Vec::new();
    for _ in 0..KEYS {
        crew[1].hears("open").await;
        takeovers.push(revoked.elapsed());
    }
    assert_eq!(revoke(owner()).await.unwrap().done, 0);
    let nobody = LeaseSelect::Job(JobId::generate());
    assert_eq!(revoke(nobody).await.unwrap().done, 0);
    for process in &mut crew {
        process.signal(Signal::CONT);
        process.tell(KEYS);
        for _ in 0..KEYS {
            process.hears("wrote").await;
        }
    }
    let view = stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(CASE);
    assert_eq!(view.ledger.revoked, KEYS as u64, "{:?}", view.ledger);
    assert!(judged.row.refused >= KEYS as u64, "{CASE}: who was stale?");
    let row = Row {
        takeovers,
        control: format!("{KEYS} jobs held by a frozen owner"),
        ..judged.row
    };
    report(CASE, row);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn no_progress_zombie() {
    const CASE: &str = "no-progress zombie";
    const LIMIT: Duration = Duration::from_secs(1);
    /// Its leases do not run out: they are renewed all the while.
    const RENEWED: Duration = Duration::from_secs(3);
    let _machine = MACHINE.read().await;
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let run = async |limit: Option<Duration>| {
        let mut stage = Stage::at(server.url()).await;
        let mut role = stage.role("zombie");
        (role.slots, role.stall_limit, role.term) = (2 * KEYS, limit, RENEWED);
        let mut zombie = Stage::hire(role).await;
        stage.enqueue(&[const { Chore::Stuck }; KEYS]).await;
        for _ in 0..KEYS {
            zombie.hears("stuck").await;
        }
        (stage, zombie, Instant::now())
    };
    // The control arm: it lives as long as it renews.
    let (stage, zombie, start) = run(None).await;
    while start.elapsed() < 3 * LIMIT {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let view = stage.world.look().await;
    let alive = stage.lag() > RENEWED / 8 || view.counts.leased == KEYS as u64;
    assert!(alive, "{CASE}: {view:?}");
    drop((stage, zombie));
    let () = server.server.ask(&["FLUSHALL"]).unwrap();

    let (stage, mut zombie, start) = run(Some(LIMIT)).await;
    let mut takeovers = Vec::new();
    for _ in 0..KEYS {
        zombie.hears("stopped").await;
        takeovers.push(start.elapsed());
    }
    stage.waits(20, 10).await;
    let view = stage.drained().await;
    let judged = stage.finish([zombie]).await;
    judged.assert_sound(CASE);
    let stalled = |view: &QueueView| view.ledger.expired() - view.ledger.expired_deadline;
    assert_eq!(stalled(&view), KEYS as u64, "{:?}", view.ledger);
    // The limit, and one interval of renewals.
    let bound = LIMIT + RENEWED / 3 + stage.slack();
    assert!(
        takeovers.iter().all(|time| *time <= bound),
        "{takeovers:?}, allowed {bound:?}"
    );
    let row = Row {
        takeovers,
        control: format!("{KEYS} leased after {:?}", 3 * LIMIT),
        ..judged.row
    };
    report(CASE, row);
}
