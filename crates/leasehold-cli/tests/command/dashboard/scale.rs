//! `/api/scale`: what an autoscaler asks.

use std::time::{Duration, Instant};

use leasehold_support::machine;
use leasehold_web::Dashboard;
use serde_json::{Value, json};

use crate::dashboard::http::{get, send};
use crate::dashboard::redis_server::Standalone;
use crate::dashboard::scene::{job, memory, serve};

const SCALING: &str = include_str!("../../../../../contrib/deploy/autoscaling-json.yaml");
const POD: &str = include_str!("../../../../../contrib/deploy/kubernetes.yaml");
const UNIT: &str = include_str!("../../../../../contrib/deploy/leasehold-worker.service");

/// The default, in seconds, as the tests of the drain see it.
const DRAIN_GRACE: u64 = 25;

/// What a setting is set to in an example.
fn set_to<'a>(text: &'a str, setting: &str) -> &'a str {
    let lines = text.lines().map(str::trim_start);
    let mut found = lines.filter_map(|line| line.strip_prefix(setting));
    let value = found.next().unwrap().trim();
    assert_eq!(found.next(), None, "{setting} is set twice");
    value
}

/// From SIGTERM to SIGKILL there is time for a drain by the defaults, and some to spare.
#[test]
fn what_runs_a_worker_leaves_it_the_time_that_a_drain_takes() {
    let seconds = |text: &str| text.trim_end_matches('s').parse::<u64>().unwrap();
    for killed in [
        set_to(POD, "terminationGracePeriodSeconds:"),
        set_to(UNIT, "TimeoutStopSec="),
    ] {
        assert_eq!(seconds(killed), 30);
        assert!(DRAIN_GRACE + 3 <= seconds(killed), "{killed}");
    }
    for path in ["/healthz", "/readyz"] {
        assert!(POD.contains(&format!("{{path: {path}, port: http}}")));
    }
}

#[tokio::test]
async fn an_autoscaler_reads_what_waits() {
    let client = memory();
    let at = serve(Dashboard::new(client.clone()).token("s3cret"), "/ops").await;
    let ask = async |path: &str| {
        let token = ["Authorization: Bearer s3cret"];
        send(at, "GET", &format!("/ops/api/scale{path}"), &token, "").await
    };
    assert_eq!(get(at, "/ops/api/scale").await.status, 401);
    let none = ask("").await;
    assert_eq!(
        (none.status, none.header("content-type")),
        (200, Some("application/json"))
    );
    let none: Value = serde_json::from_str(&none.body).unwrap();
    assert_eq!(none, json!({ "store": "leasehold", "queues": [] }));

    for _ in 0..3 {
        let charge = job("billing", "charge", "{}").exclusive("ann").unwrap();
        client.enqueue(charge).await.unwrap();
    }
    client.enqueue(job("mail", "send", "{}")).await.unwrap();
    let ann = client.operator("ann").because("a test");
    ann.pause("mail").await.unwrap();
    let all: Value = serde_json::from_str(&ask("").await.body).unwrap();
    let mut queues = all["queues"].as_array().unwrap().clone();
    for queue in &mut queues {
        let age = queue["oldest_ready_seconds"].take().as_f64().unwrap();
        assert!((0.0..60.0).contains(&age), "{age}");
    }
    let expected = json!([
        { "queue": "billing", "paused": false, "ready": 3, "parked": 2, "waiting": 1,
          "leased": 0, "oldest_ready_seconds": null },
        { "queue": "mail", "paused": true, "ready": 1, "parked": 0, "waiting": 1,
          "leased": 0, "oldest_ready_seconds": null },
    ]);
    assert_eq!(Value::from(queues), expected);

    let one: Value = serde_json::from_str(&ask("?queue=mail").await.body).unwrap();
    assert_eq!(one["queues"].as_array().unwrap().len(), 1);
    assert_eq!(one["queues"][0]["queue"], "mail");
    // What the example asks, and where it looks.
    assert_eq!(
        set_to(SCALING, "url:"),
        "http://dashboard:8080/api/scale?queue=mail"
    );
    let at = format!("/{}", set_to(SCALING, "valueLocation:").replace('.', "/"));
    assert_eq!(one.pointer(&at), Some(&json!(1)), "{at}");
    let unknown = ask("?queue=nowhere").await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.body.contains("nowhere"), "{}", unknown.body);
    assert_eq!(ask("?queue=not%20a%20name").await.status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn without_a_store_it_says_so_in_time() {
    machine::judged(|| async {
        let took = without_a_store().await;
        if took >= Duration::from_secs(5) {
            return Err(format!("{took:?}"));
        }
        Ok(())
    })
    .await;
}

/// How long it takes to say so.
async fn without_a_store() -> Duration {
    let store = Standalone::start(&[]);
    let client = leasehold::Client::open(store.url()).await.unwrap();
    client.enqueue(job("mail", "send", "{}")).await.unwrap();
    let at = serve(Dashboard::new(client), "/").await;
    assert_eq!(get(at, "/api/scale").await.status, 200);
    store.server.pause();
    let begun = Instant::now();
    let answer = get(at, "/api/scale").await;
    let took = begun.elapsed();
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(answer.body.contains("\"error\""), "{}", answer.body);
    store.server.resume();
    took
}
