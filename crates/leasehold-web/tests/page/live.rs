//! A page that is open: it counts down, follows, pauses when hidden, and comes back by itself.

use std::time::Duration;

use leasehold_web::Dashboard;
use serde_json::json;

use crate::browser::Browser;
use crate::http::Port;
use crate::scene::{abandon, job, memory, serve, serve_at};

const UPDATES: &str = "Number(document.getElementById('live').dataset.updates || 0)";
const STATE: &str = "document.getElementById('pulse').dataset.state";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn the_countdown_moves_between_events_and_a_silent_holder_is_marked() {
    let client = memory();
    client.enqueue(job("q", "step", "{}")).await.unwrap();
    abandon(
        &**client.store(),
        "worker-1",
        "q",
        Duration::from_secs(90),
        1,
    )
    .await;
    let at = serve(Dashboard::new(client.clone()), "/").await;
    let browser = Browser::open().await;
    browser.go(&format!("http://{at}/leases")).await;
    browser.until(&format!("{STATE} === 'on'")).await;
    // No more events: what moves now, the page moves itself.
    browser.click("#pulse").await;
    browser.until(&format!("{STATE} === 'off'")).await;
    let updates = browser.value(UPDATES).await;
    let left = "parseFloat(document.querySelector('time[data-left]').textContent)";
    let before = browser.value(left).await.as_f64().unwrap();
    browser.until(&format!("{left} <= {before} - 1.5")).await;
    let bar = browser
        .value("document.querySelector('progress').value")
        .await
        .as_f64()
        .unwrap();
    assert!(bar < before, "the bar stands at {bar}");
    assert_eq!(browser.value(UPDATES).await, updates);
    // And again with events.
    browser.click("#pulse").await;
    browser.until(&format!("{UPDATES} > {updates}")).await;

    // A lease that nobody renews turns late, then silent, then it is gone and the job is ready.
    client.enqueue(job("short", "step", "{}")).await.unwrap();
    abandon(
        &**client.store(),
        "worker-2",
        "short",
        Duration::from_secs(4),
        1,
    )
    .await;
    browser.go(&format!("http://{at}/leases?queue=short")).await;
    browser
        .until("document.querySelector('tr.is-silent')")
        .await;
    browser.until_shown("overdue").await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn the_page_comes_back_after_the_server_was_restarted() {
    let client = memory();
    client.enqueue(job("before", "step", "{}")).await.unwrap();
    let dashboard = Dashboard::new(client.clone()).refresh(Duration::from_millis(200));
    let port = Port::keep();
    let (at, first) = serve_at(dashboard.clone(), "/", port.at.port()).await;
    let browser = Browser::open().await;
    browser.go(&format!("http://{at}/queues")).await;
    browser.until(&format!("{STATE} === 'on'")).await;
    first.abort();
    let _ = first.await;
    browser.until(&format!("{STATE} === 'waiting'")).await;
    client
        .enqueue(job("meanwhile", "step", "{}"))
        .await
        .unwrap();
    let (_, _second) = serve_at(dashboard, "/", at.port()).await;
    browser.until_shown("meanwhile").await;
    browser.until(&format!("{STATE} === 'on'")).await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn a_hidden_page_asks_for_nothing() {
    let client = memory();
    let dashboard = Dashboard::new(client.clone()).refresh(Duration::from_millis(200));
    let at = serve(dashboard, "/").await;
    let browser = Browser::open().await;
    browser.go(&format!("http://{at}/queues")).await;
    browser.until(&format!("{STATE} === 'on'")).await;
    let hide = |hidden: bool| {
        format!(
            "(() => {{ Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }}); document.dispatchEvent(new Event('visibilitychange')); return true; }})()"
        )
    };
    browser.value(&hide(true)).await;
    assert_eq!(browser.value(STATE).await, json!("off"));
    client.enqueue(job("unseen", "step", "{}")).await.unwrap();
    let updates = browser.value(UPDATES).await;
    // Another page sees it: so this one could have.
    let mut other = crate::http::Events::open(at, "/queues").await;
    other.until("unseen").await;
    assert_eq!(browser.value(UPDATES).await, updates);
    browser.value(&hide(false)).await;
    browser.until_shown("unseen").await;
    browser.close().await;
}

/// Nested in a server that waits for open requests when it ends, a page keeps none open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn a_page_in_the_server_of_another_application_asks_again_and_stays_live() {
    let client = memory();
    client.enqueue(job("before", "step", "{}")).await.unwrap();
    let dashboard = Dashboard::new(client.clone()).refresh(Duration::from_millis(200));
    let app = axum::Router::new().nest("/ops", dashboard.router());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let browser = Browser::open().await;
    browser.go(&format!("http://{at}/ops/queues")).await;
    browser.until(&format!("{STATE} === 'on'")).await;
    let watch = "(() => { window.states = []; const pulse = document.getElementById('pulse'); \
        new MutationObserver(() => window.states.push(pulse.dataset.state)).observe(pulse, \
        { attributes: true, attributeFilter: ['data-state'] }); return true; })()";
    browser.value(watch).await;
    client.enqueue(job("later", "step", "{}")).await.unwrap();
    browser.until_shown("later").await;
    let updates = browser.value(UPDATES).await;
    browser.until(&format!("{UPDATES} > {updates} + 5")).await;
    // Between two requests it is as live as within one.
    let wavered = "window.states.filter((state) => state !== 'on').length";
    assert_eq!(browser.value(wavered).await, json!(0));
    server.abort();
    browser.until(&format!("{STATE} === 'waiting'")).await;
    browser.close().await;
}
