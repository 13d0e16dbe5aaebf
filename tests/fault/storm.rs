//! Many at once: leases to renew, and workers that come back from an outage.

use std::time::{Duration, Instant};

use leasehold::inspect::QueueView;

use crate::broken::Flaw;
use crate::crew::Chore;
use crate::process::Process;
use crate::stage::Stage;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::{MACHINE, in_campaign};

/// One worker with so many leases, on a server that stands still for half a term.
async fn hold(leases: usize, term: Duration, flaw: Option<Flaw>) -> (Stage, QueueView, Process) {
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let mut stage = Stage::at(server.url()).await;
    let mut role = stage.role("first");
    (role.slots, role.term, role.flaw) = (leases, term, flaw);
    let nap = Chore::Nap {
        millis: 2 * term.as_millis() as u64,
    };
    for part in vec![nap; leases].chunks(5_000) {
        stage.enqueue(part).await;
    }
    let worker = Stage::hire(role).await;
    let all = |view: &QueueView| view.counts.leased == leases as u64;
    if flaw.is_none() {
        stage.world.until("every lease", all).await;
        tokio::task::block_in_place(|| server.server.pause());
        tokio::time::sleep(term / 2).await;
        server.server.resume();
    }
    let over = |view: &QueueView| {
        view.counts.completed == leases as u64 || (flaw.is_some() && view.ledger.expired() > 0)
    };
    let view = stage.world.until("their end", over).await;
    (stage, view, worker)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn renewal_storm() {
    const CASE: &str = "renewal storm";
    let _machine = MACHINE.read().await;
    let leases = if in_campaign() { 50_000 } else { 10_000 };
    let term = Duration::from_secs(8);
    let (stage, view, worker) = hold(leases, term, None).await;
    let judged = stage.finish([worker]).await;
    judged.assert_sound(CASE);
    stage.assert_none_expired(CASE, &view, term);
    let short = Duration::from_secs(1);
    let (_, view, _) = hold(100, short, Some(Flaw::NeverRenews)).await;
    let control = format!("{} of 100 expired", view.ledger.expired_deadline);
    report(
        CASE,
        Row {
            control,
            ..judged.row
        },
    );
}

const WORKERS: usize = 8;
const OUTAGE: Duration = Duration::from_secs(2);
/// A process has a connection for calls, one for renewals and one to be woken.
const CONNECTIONS: usize = 3;

/// Requests that the server is sent in a while.
async fn requests(proxy: &Proxy, during: Duration) -> usize {
    let before = proxy.requests();
    tokio::time::sleep(during).await;
    proxy.requests() - before
}

/// What an outage brought: attempts to connect while it lasted, and requests after it for each
/// before it.
struct Storm {
    attempts: usize,
    surge: f64,
}

async fn outage(flaw: Option<Flaw>, times: usize) -> (Stage, Vec<Process>, Vec<Storm>) {
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let proxy = Proxy::start(server.server.port()).await;
    let mut stage = Stage::at(server.url()).await;
    let mut crew = Vec::new();
    for number in 0..WORKERS {
        let mut role = stage.role(&format!("worker-{number}"));
        role.url = format!("redis://127.0.0.1:{}", proxy.port());
        role.term = Duration::from_secs(10);
        role.flaw = flaw;
        crew.push(Stage::hire(role).await);
    }
    // More than they get done: everybody is always busy.
    stage
        .enqueue(&vec![Chore::Nap { millis: 150 }; 4_000])
        .await;
    let mut storms = Vec::new();
    for _ in 0..times {
        let window = Duration::from_secs(2);
        let steady = requests(&proxy, window).await;
        let before = proxy.connections();
        proxy.set(Mode::Reset);
        tokio::time::sleep(OUTAGE).await;
        let attempts = proxy.connections() - before;
        proxy.set(Mode::Pass);
        let after = requests(&proxy, window).await;
        storms.push(Storm {
            attempts,
            surge: after as f64 / steady as f64,
        });
        let start = Instant::now();
        while requests(&proxy, window).await * 2 < steady {
            assert!(
                start.elapsed() < crate::process::PATIENCE,
                "nobody came back"
            );
        }
    }
    (stage, crew, storms)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn retry_storm() {
    const CASE: &str = "retry storm";
    // Both sides of a ratio are measured: the machine must not change meanwhile.
    let _machine = MACHINE.write().await;
    let (stage, crew, storms) = outage(None, 3).await;
    stage.drained().await;
    let judged = stage.finish(crew).await;
    judged.assert_sound(CASE);
    let attempts = storms.iter().map(|storm| storm.attempts).max().unwrap();
    // What the machine adds to one it does not add to all.
    let surge = storms
        .iter()
        .map(|storm| storm.surge)
        .fold(f64::MAX, f64::min);
    let (_stage, _crew, control) = outage(Some(Flaw::RepeatsAtOnce), 1).await;
    let row = Row {
        control: format!(
            "{attempts} attempts in {OUTAGE:?}, then {surge:.2} x; {} if repeated at once",
            control[0].attempts
        ),
        ..judged.row
    };
    // A few at once from what was saved up, then about two a second each.
    let bound = WORKERS * CONNECTIONS * 12;
    assert!(attempts <= bound, "{attempts} attempts, allowed {bound}");
    assert!(control[0].attempts > bound, "this test cannot fail");
    assert!(surge <= 1.5, "{surge} times the steady load");
    report(CASE, row);
}
