//! Work that fails is seen: on every screen, in a colour of its own, in both themes.

use std::time::Duration;

use leasehold::inspect::{Ledger, Page};
use leasehold::job::{JobState, QueueName};
use leasehold::{Client, Context, Failure, Job, RetryPolicy};
use leasehold_web::Dashboard;
use serde::{Deserialize, Serialize};

use crate::browser::Browser;
use crate::scene::{memory, serve, until};

const JOBS: u64 = 120;

#[derive(Serialize, Deserialize)]
struct Charge;

impl Job for Charge {
    const KIND: &'static str = "charge_card";
    const QUEUE: &'static str = "billing";
}

/// A dashboard of a store in which every run has ended in this way, three for each job that fails.
async fn ended(well: bool) -> (Client, std::net::SocketAddr) {
    let client = memory();
    let dashboard = Dashboard::new(client.clone())
        .metrics(crate::exporter())
        .refresh(Duration::from_millis(200));
    let at = serve(dashboard, "/").await;
    let handler = move |_: Charge, _: Context| async move {
        if well {
            return Ok(());
        }
        Err(Failure::from("the bank does not answer"))
    };
    let worker = client.worker().handle(handler).slots(4).max_failures(3);
    let worker = worker.retry(RetryPolicy::constant(Duration::from_millis(1)));
    let is_done = move |ledger: &Ledger| ledger.completed + ledger.buried == JOBS;
    let watched = client.clone();
    let produced = client.clone();
    let done = async move {
        // Over some of the dashboard's samples, so that its charts have something to show.
        for _ in 0..JOBS / 20 {
            let jobs = (0..20).map(|_| leasehold::NewJob::of(&Charge).unwrap());
            produced.enqueue_many(jobs).await.unwrap();
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        until(&watched, is_done).await;
    };
    worker.run_until(done).await.unwrap();
    (client, at)
}

/// The contrast of an element's colour with what is behind it, by WCAG.
async fn contrast(browser: &Browser, selector: &str, property: &str) -> f64 {
    let script = r"(() => {
        const canvas = document.createElement('canvas').getContext('2d');
        const paint = color => { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); };
        const light = () => {
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(byte => {
                const share = byte / 255;
                return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const element = document.querySelector(SELECTOR);
        const behind = [];
        for (let at = element; at; at = at.parentElement) behind.unshift(at);
        for (const at of behind) paint(getComputedStyle(at).backgroundColor);
        const back = light();
        paint(getComputedStyle(element)[PROPERTY]);
        const front = light();
        return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    })()";
    let script = script
        .replace("SELECTOR", &serde_json::json!(selector).to_string())
        .replace("PROPERTY", &serde_json::json!(property).to_string());
    browser.value(&script).await.as_f64().unwrap()
}

async fn themed(browser: &Browser, theme: &str) {
    let scheme = serde_json::json!({
        "features": [{ "name": "prefers-color-scheme", "value": theme }],
    });
    browser
        .devtools("Emulation.setEmulatedMedia", &scheme)
        .await;
}

/// Shows a screen, and waits until it is kept current.
async fn look(browser: &Browser, url: &str) {
    browser.go(url).await;
    browser
        .until("Number(document.getElementById('live').dataset.updates) > 0")
        .await;
}

/// How many elements there are.
async fn number(browser: &Browser, selector: &str) -> u64 {
    let script = format!(
        "document.querySelectorAll({}).length",
        serde_json::json!(selector)
    );
    browser.value(&script).await.as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn three_hundred_and_sixty_failed_runs_are_not_green() {
    let (client, at) = ended(false).await;
    let ledger = client.ledger().await.unwrap();
    assert_eq!((ledger.retried, ledger.buried), (2 * JOBS, JOBS));
    let queue = QueueName::new("billing").unwrap();
    let dead = client.jobs(queue, JobState::Dead, Page::first(1)).await;
    let job = format!("/jobs/{}", dead.unwrap().rows[0].job.id);
    let browser = Browser::open().await;
    for theme in ["light", "dark"] {
        themed(&browser, theme).await;
        look(&browser, &format!("http://{at}/?window=1m")).await;
        assert_eq!(browser.text("[data-share=failed]").await, "100 %");
        assert_eq!(browser.text("[data-share=released]").await, "100 %");
        browser.until_shown("360 of 360 runs failed").await;
        browser.until_shown("Every run failed.").await;
        browser.until_shown("Failures by kind").await;
        assert_eq!(number(&browser, ".is-well").await, 0, "it is green");
        let color = "getComputedStyle(document.querySelector('[data-share=released]')).color";
        let text = "getComputedStyle(document.body).color";
        assert_eq!(browser.value(color).await, browser.value(text).await);
        for picture in [".hero .split", ".chart"] {
            let of = |end: &str| format!("{picture} .f-{end}");
            assert!(number(&browser, &of("retried")).await > 0, "{picture}");
            assert!(number(&browser, &of("buried")).await > 0, "{picture}");
            assert_eq!(number(&browser, &of("released")).await, 0, "{picture}");
        }
        let texts = [(".hero .is-failed", "color", 4.5)];
        let pictures = [
            (".chart .f-retried", "fill", 3.0),
            (".chart .f-buried", "fill", 3.0),
        ];
        for (selector, property, least) in texts.into_iter().chain(pictures) {
            let found = contrast(&browser, selector, property).await;
            assert!(found >= least, "{theme} {selector}: {found:.2}");
        }
        // The control arm: what is meant to stay in the background does not pass.
        let faint = contrast(&browser, ".hero .f-none", "fill").await;
        assert!(faint < 3.0, "{faint:.2}");

        look(&browser, &format!("http://{at}/queues")).await;
        assert_eq!(
            browser.text("[data-key=billing] [data-label=Failed]").await,
            "100 %"
        );
        assert_eq!(number(&browser, ".spark .f-released").await, 0);
        assert!(number(&browser, ".spark .f-retried").await > 0);
        browser.until_shown("Failures by kind").await;
        browser.until_shown("charge_card").await;
        let shares = [
            (".num .k-retried", "color", 4.5),
            (".spark .f-retried", "fill", 3.0),
        ];
        for (selector, property, least) in shares {
            let found = contrast(&browser, selector, property).await;
            assert!(found >= least, "{theme} {selector}: {found:.2}");
        }

        look(&browser, &format!("http://{at}{job}")).await;
        assert_eq!(number(&browser, ".timeline .f-retried").await, 2);
        assert_eq!(number(&browser, ".timeline .f-buried").await, 1);
        assert_eq!(number(&browser, ".timeline .f-released").await, 0);
        for (selector, property, least) in [
            (".chip.s-retried", "color", 4.5),
            (".chip.s-buried", "color", 4.5),
            (".timeline .f-retried", "fill", 3.0),
        ] {
            let found = contrast(&browser, selector, property).await;
            assert!(found >= least, "{theme} {selector}: {found:.2}");
        }
    }
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn work_that_goes_well_is_green() {
    let (_client, at) = ended(true).await;
    let browser = Browser::open().await;
    look(&browser, &format!("http://{at}/?window=1m")).await;
    assert_eq!(browser.text("[data-share=failed]").await, "0 %");
    browser.until_shown("No run failed.").await;
    assert_eq!(number(&browser, ".hero .is-well").await, 1);
    assert_eq!(number(&browser, ".hero .is-failed").await, 0);
    assert!(number(&browser, ".chart .f-released").await > 0);
    browser.close().await;
}
