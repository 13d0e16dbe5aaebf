//! Each screen, on a desk and on a phone, by keyboard, in both themes.

use leasehold::inspect::Page;
use leasehold::job::{JobState, QueueName};
use leasehold_web::Dashboard;
use serde_json::json;

use crate::browser::Browser;
use crate::scene::{memory, play, serve};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn every_screen_shows_a_live_pool_and_the_browser_complains_of_nothing() {
    let client = memory();
    let playing = play(&client).await;
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/ops").await;
    let dead = client.jobs(
        QueueName::new("imports").unwrap(),
        JobState::Dead,
        Page::first(1),
    );
    let job = format!("/jobs/{}", dead.await.unwrap().rows[0].job.id);
    for (width, height) in [(1280, 860), (390, 844)] {
        let browser = Browser::sized(width, height).await;
        for (path, fact) in [
            ("", "were released by their holders"),
            ("/leases", "render_report"),
            ("/queues", "billing"),
            ("/jobs?queue=mail&state=scheduled", "send_mail"),
            (job.as_str(), "connection to 10.0.0."),
            ("/dead", "import_feed"),
            ("/workers", "worker-1.eu"),
            ("/expiry", "What to change"),
            ("/audit", "the bank is closed"),
        ] {
            browser.go(&format!("http://{at}/ops{path}")).await;
            browser.until_shown(fact).await;
            browser
                .until("document.getElementById('pulse').dataset.state === 'on'")
                .await;
            let overflow = browser
                .value("document.documentElement.scrollWidth - innerWidth")
                .await;
            assert!(
                overflow.as_i64().unwrap() <= 0,
                "{path} is wider than {width}: {overflow}"
            );
        }
        assert_eq!(browser.complaints().await, Vec::<String>::new());
        browser.close().await;
    }
    playing.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn a_payload_and_an_error_that_are_scripts_do_nothing() {
    let client = memory();
    let playing = play(&client).await;
    playing.stop().await;
    let at = serve(Dashboard::new(client.clone()), "/").await;
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
    let browser = Browser::open().await;
    for path in [
        format!("/jobs/{}", evil.job.id),
        "/dead".into(),
        "/jobs?queue=imports&state=dead".into(),
    ] {
        browser.go(&format!("http://{at}{path}")).await;
        browser
            .until_shown("<script>document.title='pwned'</script>")
            .await;
        // Once as a page, and once more as an event.
        browser
            .until("Number(document.getElementById('live').dataset.updates) > 0")
            .await;
        let title = browser.value("document.title").await;
        assert!(
            !title.as_str().unwrap().contains("pwned"),
            "{path}: {title}"
        );
        assert_eq!(
            browser
                .value("document.querySelectorAll('main script, main img').length")
                .await,
            json!(0)
        );
    }
    // The control arm: our own script policy is what a page that does not escape would meet.
    let ran = browser
        .value("(() => { const s = document.createElement('script'); s.textContent = \"document.title='pwned'\"; document.body.append(s); return document.title; })()")
        .await;
    assert!(
        !ran.as_str().unwrap().contains("pwned"),
        "an inline script ran"
    );
    let refused = browser.complaints().await;
    assert!(
        refused
            .iter()
            .any(|line| line.contains("Content Security Policy")),
        "{refused:?}"
    );
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn it_is_usable_by_keyboard_and_in_both_themes() {
    let at = serve(Dashboard::new(memory()), "/").await;
    let browser = Browser::open().await;
    browser.go(&format!("http://{at}/")).await;
    browser.until_shown("No lease has ended yet").await;
    for (keys, path) in [("gl", "/leases"), ("ge", "/expiry"), ("go", "/")] {
        browser.lead(keys, path).await;
    }
    // The first stop is the link past the navigation, and it is seen.
    browser.keys("\u{e004}").await;
    browser
        .until("document.activeElement.className === 'skip'")
        .await;
    browser
        .until("getComputedStyle(document.activeElement).outlineStyle === 'solid'")
        .await;
    browser
        .until("document.activeElement.getBoundingClientRect().left >= 0")
        .await;

    let background = "getComputedStyle(document.body).backgroundColor";
    let before = browser.value(background).await;
    browser.click("#theme").await;
    browser.until(&format!("{background} !== {before}")).await;
    let after = browser.value(background).await;
    browser.go(&format!("http://{at}/leases")).await;
    assert_eq!(
        browser.value(background).await,
        after,
        "the choice is forgotten"
    );
    browser.close().await;
}
