//! Many at once: workers that come back from an outage.

use std::time::Duration;

use crate::MACHINE;
use crate::broken::Flaw;
use crate::crew::Chore;
use crate::journal::Judgement;
use crate::stage::Stage;
use crate::support::proxy::Proxy;
use crate::support::redis::Standalone;
use crate::table::{Row, report};

const WORKERS: usize = 8;
/// What an outage may bring, for each request of good days.
const SURGE: f64 = 1.5;

/// Requests that the server is sent in a while.
async fn requests(proxy: &Proxy, during: Duration) -> usize {
    let before = proxy.requests();
    tokio::time::sleep(during).await;
    proxy.requests() - before
}

/// Requests while an outage lasted and right after it, for each request of good days.
struct Storm {
    during: f64,
    after: f64,
}

/// Workers on their way through a proxy, and so many outages at most, until one of them is calm.
async fn outages(most: usize, flaw: Option<Flaw>) -> (Judgement, Vec<Storm>) {
    const WINDOW: Duration = Duration::from_secs(2);
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
    let mut storms: Vec<Storm> = Vec::new();
    while storms.len() < most && storms.last().is_none_or(|storm| storm.after > SURGE) {
        // More than they get done: everybody is always busy.
        stage
            .enqueue(&vec![Chore::Wait { millis: 150 }; 2_500])
            .await;
        let steady = requests(&proxy, WINDOW).await as f64;
        // The server answers, and does nothing.
        server
            .server
            .tell::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
        let during = requests(&proxy, WINDOW).await as f64 / steady;
        server
            .server
            .tell::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        let after = requests(&proxy, WINDOW).await as f64 / steady;
        storms.push(Storm { during, after });
    }
    stage.drained().await;
    (stage.finish(crew).await, storms)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn retry_storm() {
    const CASE: &str = "retry storm";
    let _machine = MACHINE.read().await;
    // What the machine adds to one it does not add to all.
    let (judged, storms) = outages(3, None).await;
    judged.assert_sound(CASE);
    let least = |of: fn(&Storm) -> f64| storms.iter().map(of).fold(f64::MAX, f64::min);
    let (during, after) = (least(|storm| storm.during), least(|storm| storm.after));
    let (_, control) = outages(1, Some(Flaw::RepeatsAtOnce)).await;
    let control = control[0].during;
    let row = Row {
        control: format!("load {during:.2} x, then {after:.2} x; repeated at once {control:.0} x"),
        ..judged.row
    };
    assert!(control > SURGE, "{control}: this test cannot fail");
    assert!(during <= SURGE && after <= SURGE, "{CASE}: {}", row.control);
    report(CASE, row);
}
