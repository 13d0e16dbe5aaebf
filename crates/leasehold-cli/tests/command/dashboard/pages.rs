//! Each page, empty and full, under a prefix, and as a stream.

use std::time::Duration;

use leasehold::inspect::Page;
use leasehold::job::{JobState, Kind, QueueName};
use leasehold::{Context, Failure, Job, NewJob};
use leasehold_web::Dashboard;

use crate::dashboard::http::{Events, LONG, get, send};
use crate::dashboard::scene::{self, SCRIPT, memory, play, serve};

const PAGES: [&str; 7] = [
    "/", "/leases", "/queues", "/dead", "/workers", "/expiry", "/audit",
];

#[tokio::test]
async fn every_page_of_an_empty_store_says_so() {
    let at = serve(Dashboard::new(memory()), "/").await;
    for page in PAGES {
        let answer = get(at, page).await;
        assert_eq!(answer.status, 200, "{page}");
        assert!(answer.body.contains("<main"), "{page}");
        assert!(
            answer.body.contains("class=\"empty\"") || page == "/",
            "{page}: {}",
            answer.body
        );
    }
    assert_eq!(get(at, "/nowhere").await.status, 404);
    assert_eq!(get(at, "/jobs/nonsense").await.status, 404);
    assert_eq!(get(at, "/jobs?queue=none").await.status, 404);
    assert_eq!(get(at, "/jobs").await.status, 400);
    assert_eq!(get(at, "/leases?queue=no/queue").await.status, 400);
    assert_eq!(get(at, "/leases?after=garbage").await.status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_page_shows_what_there_is() {
    let client = memory();
    let playing = play(&client).await;
    let at = serve(Dashboard::new(client.clone()), "/").await;
    for (page, facts) in [
        (
            "/",
            &[
                "released by their holders",
                "Next to expire",
                "render_report",
                "It balances",
            ][..],
        ),
        (
            "/leases",
            &[
                "worker-1.eu",
                "release-42",
                "render_report",
                "data-left=",
                "of 400",
            ],
        ),
        ("/leases?owner=worker-1.eu&queue=reports", &["worker-1.eu"]),
        ("/leases?owner=nobody", &["No live lease matches"]),
        (
            "/queues",
            &["mail", "reports", "paused", "billing", "5 scheduled"],
        ),
        (
            "/jobs?queue=imports&state=dead",
            &["import_feed", "connection to 10.0.0."],
        ),
        (
            "/dead",
            &["import_feed", "connection to #.#.#.# refused", "sanitize"],
        ),
        ("/workers", &["worker-1.eu", "release-42", "renewing"]),
        (
            "/expiry",
            &[
                "What to change",
                "nobody renewed",
                "never renewed once",
                "Hold against term",
            ],
        ),
        (
            "/audit",
            &["ada", "pause queue billing", "the bank is closed"],
        ),
    ] {
        // Progress is there after the first renewal; everything else at once.
        let shown = async {
            loop {
                let answer = get(at, page).await;
                let missing = facts.iter().find(|fact| !answer.body.contains(**fact));
                match missing {
                    None => return answer,
                    Some(&"of 400") => tokio::time::sleep(Duration::from_millis(50)).await,
                    Some(fact) => panic!("{page} has no {fact:?}:\n{}", answer.body),
                }
            }
        };
        let answer = tokio::time::timeout(LONG, shown)
            .await
            .expect("no progress is shown");
        assert_eq!(answer.status, 200, "{page}");
        // Read-only: nothing invites to act.
        assert!(!answer.body.contains("data-modal"), "{page}");
    }

    let dead = client.jobs(
        QueueName::new("imports").unwrap(),
        JobState::Dead,
        Page::first(20),
    );
    let dead = dead.await.unwrap();
    let job = &dead.rows[0].job;
    let page = get(at, &format!("/jobs/{}", job.id)).await;
    for fact in [
        "import_feed",
        "buried",
        "worker-1.eu",
        "connection to 10.0.0.",
        "feed",
    ] {
        assert!(page.body.contains(fact), "no {fact:?}:\n{}", page.body);
    }
    playing.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_names_and_errors_are_escaped_and_can_be_hidden() {
    let client = memory();
    let playing = play(&client).await;
    playing.stop().await;
    let dead = client.jobs(
        QueueName::new("imports").unwrap(),
        JobState::Dead,
        Page::first(20),
    );
    let dead = dead.await.unwrap();
    let evil = dead
        .rows
        .iter()
        .find(|view| view.job.kind.as_str() == "sanitize")
        .unwrap();
    let job = format!("/jobs/{}", evil.job.id);

    let open = serve(Dashboard::new(client.clone()), "/").await;
    for page in [job.as_str(), "/dead", "/jobs?queue=imports&state=dead"] {
        let answer = get(open, page).await;
        assert_eq!(answer.status, 200);
        assert!(
            !answer.body.contains("<script>document"),
            "{page}: {}",
            answer.body
        );
        assert!(!answer.body.contains("<img src=x"), "{page}");
        assert!(
            answer.body.contains("&lt;script&gt;document.title"),
            "{page}"
        );
        // A stream carries it as well: a carriage return must not end it.
        let mut events = Events::open(open, page).await;
        let seen = events.until("event: live").await;
        assert!(!seen.contains("<script>document"), "{page}");
        events.until("&lt;script&gt;document.title").await;
    }
    assert!(SCRIPT.contains('\r'));
    assert!(get(open, &job).await.body.contains("document.title"));

    let hidden = serve(Dashboard::new(client).hide_payloads(), "/").await;
    let answer = get(hidden, &job).await;
    assert!(
        answer.body.contains("Payloads are hidden"),
        "{}",
        answer.body
    );
    assert!(!answer.body.contains("<pre"), "{}", answer.body);
}

#[tokio::test]
async fn a_queue_shows_the_keys_with_the_most_parked_jobs() {
    let client = memory();
    let mut jobs = Vec::new();
    for (key, count) in [
        ("tenant 1", 3),
        (SCRIPT, 9),
        ("alone", 1),
        ("b", 2),
        ("c", 4),
    ] {
        let job = scene::job("mail", "send_mail", "{}")
            .exclusive(key)
            .unwrap();
        jobs.extend(vec![job; count]);
    }
    client.enqueue_many(jobs).await.unwrap();
    let page = get(serve(Dashboard::new(client), "/").await, "/queues").await;
    let shown: Vec<&str> = page
        .body
        .split(r#"<li class="faint key">"#)
        .skip(1)
        .map(|part| part.split("</li>").next().unwrap())
        .collect();
    assert_eq!(shown.len(), 3, "{shown:?}");
    assert!(shown[0].starts_with("8 behind <b>&lt;script"), "{shown:?}");
    let others = ["3 behind <b>c</b>", "2 behind <b>tenant 1</b>"];
    assert_eq!(shown[1..], others);
    assert!(page.body.contains("14 behind their key"));
}

#[tokio::test]
async fn a_job_is_found_by_its_id_from_every_page() {
    let client = memory();
    let job = scene::job("mail", "send_mail", "{}");
    let id = client.enqueue(job).await.unwrap().id().to_string();
    let at = serve(Dashboard::new(client), "/ops").await;
    for path in ["/ops", "/ops/leases", "/ops/queues", "/ops/nowhere"] {
        let page = get(at, path).await;
        let form = r#"<form class="find" role="search" action="/ops/jobs">"#;
        assert!(page.body.contains(form), "{path}");
    }
    let page = get(at, &format!("/ops/jobs?job=+{id}%0A")).await;
    assert_eq!(page.status, 200);
    assert!(page.body.contains(&format!("<h1>Job {id}</h1>")));
    let unknown = "01920000-0000-7000-8000-000000000000";
    for other in [unknown, "nonsense", "%3Cscript%3Ealert(1)%3C%2Fscript%3E"] {
        let page = get(at, &format!("/ops/jobs?job={other}")).await;
        assert_eq!(page.status, 404, "{other}");
        assert!(page.body.contains("<h1>Not here</h1>"), "{other}");
        assert!(!page.body.contains("alert(1)"), "{other}");
    }
    assert_eq!(get(at, "/ops/jobs?job=").await.status, 400, "no queue");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_under_a_prefix_and_inside_another_application() {
    let client = memory();
    let playing = play(&client).await;
    let at = serve(
        Dashboard::new(client.clone()).allow_actions(),
        "/ops/leasehold",
    )
    .await;
    let page = get(at, "/ops/leasehold/leases").await;
    assert_eq!(page.status, 200);
    for link in [
        "href=\"/ops/leasehold/assets/app.css\"",
        "src=\"/ops/leasehold/assets/app.js\"",
        "href=\"/ops/leasehold/queues\"",
        "href=\"/ops/leasehold/confirm?do=revoke&amp;job=",
        "back=%2Fleases\"",
    ] {
        assert!(page.body.contains(link), "no {link}:\n{}", page.body);
    }
    assert_eq!(get(at, "/ops/leasehold").await.status, 200);
    let slash = get(at, "/ops/leasehold/").await;
    assert_eq!(
        (slash.status, slash.header("location")),
        (303, Some("/ops/leasehold"))
    );
    assert_eq!(get(at, "/leases").await.status, 404);

    let router = axum::Router::new()
        .route("/", axum::routing::get(async || "somebody else's page"))
        .nest("/jobs", Dashboard::new(client).router());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0))
        .await
        .unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    assert_eq!(get(at, "/").await.body, "somebody else's page");
    let page = get(at, "/jobs/leases").await;
    assert!(page.body.contains("href=\"/jobs/queues\""), "{}", page.body);
    let css = get(at, "/jobs/assets/app.css").await;
    assert_eq!(
        (css.status, css.header("content-type")),
        (200, Some("text/css; charset=utf-8"))
    );
    playing.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_sends_what_changes() {
    let client = memory();
    let dashboard = Dashboard::new(client.clone()).refresh(Duration::from_millis(100));
    let at = serve(dashboard, "/").await;
    let mut events = Events::open(at, "/queues").await;
    let seen = events.until("event: live").await;
    assert!(seen.contains("text/event-stream"), "{seen}");
    events.until("No queues yet").await;
    events.forget();
    client
        .enqueue(scene::job("fresh-queue", "step", "{}"))
        .await
        .unwrap();
    events.until("fresh-queue").await;
    // The same address is a page for whoever wants a page.
    let page = send(at, "GET", "/queues", &["Accept: text/html"], "").await;
    assert!(page.body.starts_with("<!doctype html>"));
}

#[tokio::test]
async fn the_page_of_a_declined_job_says_since_when_and_why() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Known;

    impl Job for Known {
        const KIND: &'static str = "known";
    }

    let client = memory();
    let unknown = Kind::new("unknown").unwrap();
    let id = client
        .enqueue(NewJob::raw(QueueName::default(), unknown, "{}"))
        .await
        .unwrap()
        .id();
    let at = serve(Dashboard::new(client.clone()), "/").await;
    let page = format!("/jobs/{id}");
    let before = get(at, &page).await;
    assert!(!before.body.contains("First declined"), "{}", before.body);

    let worker = client
        .worker()
        .handle(|_: Known, _: Context| async { Ok::<(), Failure>(()) })
        .start()
        .unwrap();
    let is_declined = async || {
        let view = client.job(id).await.unwrap().unwrap();
        view.job.declined_since.is_some() && view.state != JobState::Leased
    };
    tokio::time::timeout(LONG, async {
        while !is_declined().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the worker declines it");
    let declined = get(at, &page).await;
    for fact in ["First declined", "no handler for kind"] {
        assert!(declined.body.contains(fact), "{fact}: {}", declined.body);
    }
    worker.drain();
    worker.await.unwrap();
}
