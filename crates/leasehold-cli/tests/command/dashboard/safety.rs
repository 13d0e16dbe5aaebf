//! Who may see, who may act, and what a page may do.

use std::net::SocketAddr;

use leasehold::ErrorKind;
use leasehold_web::Dashboard;
use leasehold_web::prometheus::{self, Exporter};

use crate::dashboard::http::{Events, Port, get, post, send};
use crate::dashboard::scene::{job, memory, serve};

const ALL: [&str; 12] = [
    "/",
    "/leases",
    "/queues",
    "/jobs?queue=q",
    "/dead",
    "/workers",
    "/expiry",
    "/audit",
    "/metrics",
    "/api/scale",
    "/assets/app.js",
    "/nowhere",
];

#[tokio::test]
async fn a_public_address_needs_authentication() {
    let public = SocketAddr::from(([0, 0, 0, 0], 0));
    let never = std::future::pending;
    let open = Dashboard::new(memory()).serve(public, "/", |_| panic!("it listens"), never());
    let error = open.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("listen"), "{error}");

    let (listens, address) = tokio::sync::oneshot::channel();
    let guarded = Dashboard::new(memory()).token("s3cret");
    let ready = move |at: SocketAddr| listens.send(at).unwrap();
    tokio::spawn(async move { guarded.serve(public, "/", ready, never()).await });
    let at = SocketAddr::from(([127, 0, 0, 1], address.await.unwrap().port()));
    assert_eq!(get(at, "/").await.status, 401);

    let exporter = Exporter::of_the_store();
    let error = prometheus::serve_metrics(public, memory(), exporter, None)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[tokio::test]
async fn nothing_is_shown_without_the_right_credentials() {
    let client = memory();
    client
        .enqueue(job("hidden-queue", "step", "{}"))
        .await
        .unwrap();
    let exporter = Exporter::of_the_store();
    let dashboard = Dashboard::new(client).metrics(exporter).allow_actions();
    let token = serve(dashboard.clone().token("s3cret"), "/").await;
    let basic = serve(dashboard.basic("ada", "s3cret"), "/").await;
    for path in ALL {
        for wrong in [
            "X-Nothing: 1",
            "Authorization: Bearer wrong",
            "Authorization: Bearer",
            "Authorization: Bearer s3cretx",
            "Authorization: Basic d3Jvbmc6d3Jvbmc=",
            "Authorization: Basic \u{fffd}",
            "Authorization: Digest s3cret",
        ] {
            for at in [token, basic] {
                let answer = send(at, "GET", path, &[wrong], "").await;
                assert_eq!(answer.status, 401, "{path} {wrong}");
                assert!(!answer.body.contains("hidden-queue"));
                assert!(
                    answer
                        .header("www-authenticate")
                        .unwrap()
                        .starts_with("Basic")
                );
            }
        }
    }
    // ada:s3cret
    let right = "Authorization: Basic YWRhOnMzY3JldA==";
    for (at, header) in [
        (token, "Authorization: Bearer s3cret"),
        (token, right),
        (basic, right),
    ] {
        let answer = send(at, "GET", "/queues", &[header], "").await;
        assert_eq!(answer.status, 200);
        assert!(answer.body.contains("hidden-queue"));
        assert!(!answer.body.contains("s3cret"));
        let scrape = send(at, "GET", "/metrics", &[header], "").await;
        assert!(
            scrape
                .body
                .contains("leasehold_queue_jobs{store=\"leasehold\",queue=\"hidden-queue\""),
            "{}",
            scrape.body
        );
    }
    assert_eq!(
        send(basic, "GET", "/", &["Authorization: Bearer s3cret"], "")
            .await
            .status,
        401
    );
}

#[tokio::test]
async fn an_open_dashboard_answers_to_its_own_names_only() {
    let at = serve(Dashboard::new(memory()), "/").await;
    for (host, status) in [
        ("localhost", 200),
        ("127.0.0.1:80", 200),
        ("[::1]", 200),
        ("rebound.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
    ] {
        let host = format!("Host: {host}");
        assert_eq!(
            send(at, "GET", "/", &[&host], "").await.status,
            status,
            "{host}"
        );
    }
}

#[tokio::test]
async fn it_is_read_only_unless_told_otherwise() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    let at = serve(Dashboard::new(client.clone()), "/").await;
    let form = "do=pause&queue=q&reason=test";
    assert_eq!(post(at, "/act", form).await.status, 403);
    assert_eq!(get(at, "/confirm?do=pause&queue=q").await.status, 400);
    assert!(!client.queues().await.unwrap()[0].paused);

    // The control arm: the same request where it is allowed.
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    assert_eq!(post(at, "/act", form).await.status, 303);
    assert!(client.queues().await.unwrap()[0].paused);
}

#[tokio::test]
async fn commands_from_other_sites_are_refused() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    let form = "Content-Type: application/x-www-form-urlencoded";
    let body = "do=pause&queue=q&reason=test";
    for foreign in [
        &["Sec-Fetch-Site: cross-site"][..],
        &["Sec-Fetch-Site: same-site"],
        &["Origin: https://evil.example"],
        &["Origin: null"],
        &["Sec-Fetch-Site: cross-site", "X-Leasehold-Action: 1"],
        &["Origin: https://evil.example", "X-Leasehold-Action: 1"],
        &[
            "Sec-Fetch-Site: same-origin",
            "Origin: https://evil.example",
        ],
        &[],
    ] {
        let headers: Vec<&str> = foreign.iter().copied().chain([form]).collect();
        let answer = send(at, "POST", "/act", &headers, body).await;
        assert_eq!(answer.status, 403, "{foreign:?}");
    }
    // Nothing changes on GET.
    assert_eq!(get(at, &format!("/act?{body}")).await.status, 405);
    assert!(!client.queues().await.unwrap()[0].paused);
    assert!(
        client
            .audit(leasehold::inspect::Page::first(5))
            .await
            .unwrap()
            .rows
            .is_empty()
    );

    let own = [form, "X-Leasehold-Action: 1"];
    assert_eq!(send(at, "POST", "/act", &own, body).await.status, 303);
    assert!(client.queues().await.unwrap()[0].paused);
}

#[tokio::test]
async fn every_answer_carries_the_strict_headers_and_nothing_is_inline() {
    let at = serve(Dashboard::new(memory()).allow_actions(), "/").await;
    for path in ALL {
        let answer = get(at, path).await;
        let csp = answer.header("content-security-policy").unwrap_or_default();
        assert!(
            csp.contains("default-src 'none'") && csp.contains("frame-ancestors 'none'"),
            "{path}: {csp}"
        );
        assert!(!csp.contains("unsafe"), "{csp}");
        assert_eq!(
            answer.header("x-content-type-options"),
            Some("nosniff"),
            "{path}"
        );
        assert_eq!(answer.header("x-frame-options"), Some("DENY"), "{path}");
        if answer.body.starts_with("<!doctype") {
            assert!(
                !answer.body.contains(" style=") && !answer.body.contains("<style"),
                "{path}"
            );
            assert!(
                !answer.body.contains("<script>") && !answer.body.contains(" onclick"),
                "{path}"
            );
            assert_eq!(answer.header("cache-control"), Some("no-store"), "{path}");
            // Offline: nothing from elsewhere.
            assert!(
                !answer.body.contains("http://") && !answer.body.contains("https://"),
                "{path}"
            );
        }
    }
}

#[tokio::test]
async fn the_way_back_leads_nowhere_else() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    let at = serve(Dashboard::new(client).allow_actions(), "/").await;
    for back in [
        "https%3A%2F%2Fevil.example",
        "%2F%2Fevil.example",
        "%2F%5Cevil.example",
    ] {
        let form = format!("do=pause&queue=q&reason=test&back={back}");
        let answer = post(at, "/act", &form).await;
        assert_eq!(
            answer.header("location"),
            Some("/?done=pause&n=1&skipped=0"),
            "{back}"
        );
    }
}

#[tokio::test]
async fn a_worker_serves_its_metrics_alone() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    let port = Port::keep();
    let at = port.at;
    let exporter = Exporter::of_the_store();
    let secret = Some("s3cret".to_owned());
    let serving = tokio::spawn(prometheus::serve_metrics(at, client, exporter, secret));
    while tokio::net::TcpStream::connect(at).await.is_err() {
        assert!(!serving.is_finished(), "{:?}", serving.await);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(get(at, "/metrics").await.status, 401);
    let answer = send(at, "GET", "/metrics", &["Authorization: Bearer s3cret"], "").await;
    assert_eq!(answer.status, 200);
    assert!(
        answer
            .body
            .contains("leasehold_ledger_enqueued_total{store=\"leasehold\",queue=\"q\"} 1"),
        "{}",
        answer.body
    );
    // Only the one path.
    assert_eq!(get(at, "/").await.status, 404);
}

#[tokio::test]
async fn a_stream_needs_credentials_too() {
    let at = serve(Dashboard::new(memory()).token("s3cret"), "/").await;
    let mut events = Events::open(at, "/").await;
    let seen = events.until("\r\n\r\n").await;
    assert!(seen.starts_with("HTTP/1.1 401"), "{seen}");
}
