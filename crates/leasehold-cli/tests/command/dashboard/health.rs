//! What supervisors ask, and what they may end: `/healthz`, `/readyz`, and a graceful shutdown with
//! a page open.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::{Router, routing};
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
    let drains = Some("the worker is draining".to_owned());
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
async fn an_open_page_does_not_hold_up_a_graceful_shutdown_of_the_server_around_it() {
    for stuck in [false, true] {
        let dashboard = Dashboard::new(memory()).refresh(Duration::from_millis(200));
        // The control arm: a request that is kept open.
        let app = Router::new()
            .nest("/leases", dashboard.router())
            .route("/stuck", routing::get(std::future::pending::<()>));
        let signal = Arc::new(Notify::new());
        let asked_to_end = signal.clone();
        let shutdown = async move { asked_to_end.notified().await };
        let (at, mut server) = own_server(app, shutdown).await;
        let page = tokio::spawn(async move {
            // As the browser does: as soon as it is told to ask again, it does.
            loop {
                let mut events = Events::open(at, "/leases").await;
                let seen = events.until("event: again").await;
                assert!(seen.contains("event: live"), "{seen}");
                assert!(seen.contains("data: 200\n"), "{seen}");
            }
        });
        if stuck {
            tokio::spawn(async move { get(at, "/stuck").await });
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!page.is_finished(), "the page cannot be kept current");
        signal.notify_one();
        if stuck {
            let ended = tokio::time::timeout(Duration::from_secs(3), &mut server).await;
            assert!(ended.is_err(), "this test cannot fail");
            server.abort();
        } else {
            let ended = tokio::time::timeout(LONG, &mut server).await;
            ended.expect("an open page holds it up").unwrap();
        }
        page.abort();
    }
}
