//! What supervisors ask, and what they may end: `/healthz`, `/readyz`, and a graceful shutdown with
//! a page open.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use leasehold::store::SqliteStore;
use leasehold::{Client, Context, Failure, Job};
use leasehold_web::{Dashboard, health};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::dashboard::http::{Events, LONG, get};
use crate::dashboard::scene::{memory, serve};

#[derive(Serialize, Deserialize)]
struct Wait;

impl Job for Wait {
    const KIND: &'static str = "wait";
}

/// The user's own server, which ends by itself once `shutdown` is done and all requests are.
async fn own_server(
    app: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let server = axum::serve(listener, app).with_graceful_shutdown(shutdown);
    let server = tokio::spawn(async move { server.await.unwrap() });
    (at, server)
}

async fn asked(at: SocketAddr, path: &str) -> (u16, Option<String>) {
    let answer = get(at, path).await;
    let body: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["ok"], answer.status == 200, "{body}");
    let why = body["why"].as_str().map(str::to_owned);
    (answer.status, why)
}

#[tokio::test]
async fn a_worker_that_drains_is_alive_and_not_ready_and_one_that_has_ended_is_neither() {
    let client = memory();
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let signals = (begun.clone(), go.clone());
    let handler = move |_: Wait, _: Context| {
        let (begun, go) = signals.clone();
        async move {
            begun.notify_one();
            go.notified().await;
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle(handler).start().unwrap();
    let app = Router::new().nest("/jobs", health::router(worker.clone()));
    let (at, server) = own_server(app, std::future::pending()).await;
    client.enqueue(&Wait).await.unwrap();
    begun.notified().await;
    for path in ["/jobs/healthz", "/jobs/readyz"] {
        assert_eq!(asked(at, path).await, (200, None), "{path}");
    }
    worker.drain();
    assert_eq!(asked(at, "/jobs/healthz").await, (200, None));
    let drains = Some("the worker drains".to_owned());
    assert_eq!(asked(at, "/jobs/readyz").await, (503, drains));
    go.notify_one();
    worker.join().await.unwrap();
    let ended = Some("the worker has ended".to_owned());
    for path in ["/jobs/healthz", "/jobs/readyz"] {
        assert_eq!(asked(at, path).await, (503, ended.clone()), "{path}");
    }
    server.abort();
}

#[tokio::test]
async fn a_dashboard_tells_a_supervisor_without_a_password_whether_its_store_answers() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(dir.path().join("private.db")).unwrap());
    let dashboard = Dashboard::new(Client::new(store.clone())).token("s3cret");
    let at = serve(dashboard, "/ops").await;
    assert_eq!(get(at, "/ops/queues").await.status, 401, "the other arm");
    for path in ["/ops/healthz", "/ops/readyz"] {
        assert_eq!(asked(at, path).await, (200, None), "{path}");
    }
    store.close();
    let (status, why) = loop {
        let answer = asked(at, "/ops/readyz").await;
        // What was seen within the last refresh is good enough.
        if answer.0 != 200 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let why = why.unwrap();
    assert_eq!((status, &*why), (503, "the store cannot be reached"));
    assert_eq!(asked(at, "/ops/healthz").await, (200, None));
}

#[tokio::test]
async fn an_open_page_does_not_hold_up_a_graceful_shutdown_once_the_dashboard_is_closed() {
    for closes in [true, false] {
        let dashboard = Dashboard::new(memory());
        let app = Router::new().nest("/leases", dashboard.router());
        let signal = Arc::new(Notify::new());
        let asked_to_end = signal.clone();
        let (at, mut server) = own_server(app, async move {
            asked_to_end.notified().await;
            if closes {
                dashboard.close();
            }
        })
        .await;
        let mut events = Events::open(at, "/leases").await;
        events.until("event: live").await;
        signal.notify_one();
        if closes {
            let ended = tokio::time::timeout(LONG, &mut server).await;
            ended.expect("an open page holds it up").unwrap();
        } else {
            // The control arm.
            let ended = tokio::time::timeout(Duration::from_secs(3), &mut server).await;
            assert!(ended.is_err(), "this test cannot fail");
            server.abort();
        }
    }
}
