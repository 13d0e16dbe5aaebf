//! `/api/scale`: what an autoscaler asks.

use leasehold_web::Dashboard;
use serde_json::{Value, json};

use crate::dashboard::http::{get, send};
use crate::dashboard::redis_server::Standalone;
use crate::dashboard::scene::{job, memory, serve};

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
    let unknown = ask("?queue=nowhere").await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.body.contains("nowhere"), "{}", unknown.body);
    assert_eq!(ask("?queue=not%20a%20name").await.status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn without_a_store_it_says_so_in_time() {
    let store = Standalone::start(&[]);
    let client = leasehold::Client::open(store.url()).await.unwrap();
    client.enqueue(job("mail", "send", "{}")).await.unwrap();
    let at = serve(Dashboard::new(client), "/").await;
    assert_eq!(get(at, "/api/scale").await.status, 200);
    store.server.pause();
    let begun = std::time::Instant::now();
    let answer = get(at, "/api/scale").await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
    assert!(answer.body.contains("\"error\""), "{}", answer.body);
    store.server.resume();
}
