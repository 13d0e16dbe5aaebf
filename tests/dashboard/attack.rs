//! Hostile clients: what they get, and that the others are still served.

use std::time::Duration;

use leasehold::dashboard::Dashboard;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::http::{Events, LONG, get, post, raw, send};
use crate::scene::{job, memory, serve};

#[tokio::test]
async fn huge_paths_heads_and_bodies_are_refused() {
    let at = serve(Dashboard::new(memory()).allow_actions(), "/").await;
    let long = "a".repeat(5_000);
    assert_eq!(get(at, &format!("/{long}")).await.status, 414);
    assert_eq!(get(at, &format!("/leases?owner={long}")).await.status, 414);
    let longer = "a".repeat(64 * 1024);
    assert!(matches!(
        get(at, &format!("/{longer}")).await.status,
        0 | 400 | 414 | 431
    ));
    let header = format!("X-Long: {longer}");
    assert!(matches!(
        send(at, "GET", "/", &[&header], "").await.status,
        0 | 400 | 431
    ));
    let many: Vec<String> = (0..200).map(|n| format!("X-{n}: 1")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(matches!(
        send(at, "GET", "/", &many, "").await.status,
        0 | 400 | 431
    ));
    let body = format!("do=pause&queue=q&reason={longer}");
    assert!(matches!(
        post(at, "/act", &body).await.status,
        0 | 400 | 413
    ));
    // A reason within the form's limit and beyond the store's is refused as what it is.
    let reason = "a".repeat(8_000);
    assert_eq!(
        post(at, "/act", &format!("do=pause&queue=q&reason={reason}"))
            .await
            .status,
        400
    );
    assert_eq!(get(at, "/").await.status, 200);
}

#[tokio::test]
async fn nonsense_is_refused_and_harms_nobody() {
    let at = serve(Dashboard::new(memory()), "/").await;
    for bytes in [
        &b"\0\0\0\0\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /assets/..%2f..%2fCargo.toml HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /%00%ff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /leases?after=%ff&queue=%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"DELETE / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ] {
        let answer = raw(at, bytes).await;
        let shown = String::from_utf8_lossy(bytes);
        assert!(answer.status == 0 || (400..500).contains(&answer.status), "{shown} got {}", answer.status);
        assert!(!answer.body.contains("root:") && !answer.body.contains("[package]"), "{shown}");
    }
    assert_eq!(get(at, "/").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_connections_keep_nobody_out() {
    let at = serve(Dashboard::new(memory()), "/").await;
    let mut idle = Vec::new();
    for n in 0..1_000 {
        let mut stream = TcpStream::connect(at).await.unwrap();
        // Some say nothing, some begin and stop.
        if n % 2 == 0 {
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: local").await;
        }
        idle.push(stream);
        if n % 100 == 99 {
            assert_eq!(get(at, "/").await.status, 200, "after {n}");
        }
    }
    assert_eq!(get(at, "/leases").await.status, 200);
    // The oldest made room; it was not the server that kept a thousand open.
    let mut first = idle.remove(0);
    let closed = async {
        let mut byte = [0; 256];
        while let Ok(1..) = first.read(&mut byte).await {}
    };
    tokio::time::timeout(LONG, closed)
        .await
        .expect("the oldest idle connection is still open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_are_bounded_and_those_who_leave_make_room() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    let dashboard = Dashboard::new(client).refresh(Duration::from_millis(100));
    let at = serve(dashboard, "/").await;
    let mut streams = Vec::new();
    for _ in 0..64 {
        let mut events = Events::open(at, "/queues").await;
        events.until("event: live").await;
        streams.push(events);
    }
    let one_more = send(at, "GET", "/queues", &["Accept: text/event-stream"], "").await;
    assert_eq!(one_more.status, 503);
    assert_eq!(one_more.header("retry-after"), Some("10"));
    // Pages are not streams.
    assert_eq!(get(at, "/queues").await.status, 200);
    drop(streams);
    let room = async {
        loop {
            let mut events = Events::open(at, "/queues").await;
            if events.until("HTTP/1.1 ").await.contains("200 OK") {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, room)
        .await
        .expect("those who left still take room");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_not_read_holds_up_nobody() {
    let client = memory();
    let jobs = (0..60).map(|_| job("q", "step", "{}"));
    client.enqueue_many(jobs).await.unwrap();
    let dashboard = Dashboard::new(client).refresh(Duration::from_millis(100));
    let at = serve(dashboard, "/").await;
    let deaf: Vec<Events> = {
        let mut deaf = Vec::new();
        for _ in 0..20 {
            deaf.push(Events::open(at, "/jobs?queue=q").await);
        }
        deaf
    };
    let mut listening = Events::open(at, "/jobs?queue=q").await;
    listening.until("event: live").await;
    assert_eq!(get(at, "/jobs?queue=q").await.status, 200);
    drop(deaf);
}

#[tokio::test]
async fn malformed_streams_are_answered_like_any_request() {
    let at = serve(Dashboard::new(memory()), "/").await;
    for head in [
        "GET /leases?after=garbage HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n",
        "GET /jobs/garbage HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\nLast-Event-ID: \u{1}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\nLast-Event-ID: -99999999999999999999\r\nConnection: close\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        let read = tokio::time::timeout(LONG, stream.read_exact(&mut answer))
            .await
            .unwrap();
        assert!(read.is_ok() && answer.starts_with(b"HTTP/1.1 "), "{head}");
    }
    // HEAD asks for no stream.
    let head = "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(raw(at, head.as_bytes()).await.status, 200);
    assert_eq!(get(at, "/").await.status, 200);
}
