//! Many at once: leases to renew.

use std::time::Duration;

use leasehold::inspect::QueueView;

use crate::broken::Flaw;
use crate::crew::Chore;
use crate::engine::{Engine, Host};
use crate::process::Process;
use crate::stage::Stage;
use crate::table::{Row, report};
use crate::{MACHINE, in_campaign};

struct Held {
    stage: Stage,
    view: QueueView,
    worker: Process,
    _host: Host,
}

/// One worker with so many leases, on a server that stands still for a good part of a term, unless
/// the worker has a flaw.
async fn hold(engine: Engine, leases: usize, term: Duration, flaw: Option<Flaw>) -> Held {
    let host = if flaw.is_none() {
        engine.own()
    } else {
        engine.share()
    };
    let mut stage = Stage::at(host.url()).await;
    let mut role = stage.role("first");
    (role.slots, role.term, role.flaw) = (leases, term, flaw);
    let wait = Chore::Wait {
        millis: 2 * term.as_millis() as u64,
    };
    for part in vec![wait; leases].chunks(5_000) {
        stage.enqueue(part).await;
    }
    let worker = Stage::hire(role).await;
    let all = |view: &QueueView| view.counts.leased == leases as u64;
    if flaw.is_none() {
        stage.world.until("every lease", all).await;
        host.pause();
        tokio::time::sleep(term * 3 / 8).await;
        host.resume();
    }
    let over = |view: &QueueView| {
        view.counts.completed == leases as u64 || (flaw.is_some() && view.ledger.expired() > 0)
    };
    let view = stage.world.until("their end", over).await;
    Held {
        stage,
        view,
        worker,
        _host: host,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn renewal_storm() {
    let _machine = MACHINE.read().await;
    let (leases, seconds) = if in_campaign() {
        (50_000, 20)
    } else {
        (10_000, 8)
    };
    all_renewed(Engine::Redis, "renewal storm", leases, seconds).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn renewal_storm_on_postgres() {
    let _machine = MACHINE.read().await;
    let (leases, seconds) = if in_campaign() {
        (50_000, 20)
    } else {
        (3_000, 3)
    };
    all_renewed(
        Engine::Postgres,
        "renewal storm, PostgreSQL",
        leases,
        seconds,
    )
    .await;
}

async fn all_renewed(engine: Engine, case: &'static str, leases: usize, seconds: u64) {
    let term = Duration::from_secs(seconds);
    let held = hold(engine, leases, term, None).await;
    let judged = held.stage.finish([held.worker]).await;
    judged.assert_sound(case);
    held.stage.assert_none_expired(case, &held.view, term);
    let short = Duration::from_secs(1);
    let held = hold(engine, 100, short, Some(Flaw::NeverRenews)).await;
    let control = format!("{} of 100 expired", held.view.ledger.expired_deadline);
    report(
        case,
        Row {
            control,
            ..judged.row
        },
    );
}
