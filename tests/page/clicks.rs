//! What an operator does, by click.

use std::time::Duration;

use leasehold::dashboard::Dashboard;
use leasehold::inspect::Page;

use crate::browser::Browser;
use crate::http::LONG;
use crate::scene::{memory, play, serve};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn a_lease_is_force_released_with_a_reason() {
    let client = memory();
    let playing = play(&client).await;
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    let browser = Browser::open().await;
    browser
        .go(&format!("http://{at}/leases?queue=reports"))
        .await;
    browser.until_shown("Force-release").await;
    browser.click("tbody tr:first-child a[data-modal]").await;
    browser.until("document.getElementById('modal').open").await;
    browser
        .until("document.activeElement.name === 'reason'")
        .await;
    // Without a reason the form is not sent.
    browser.click("dialog button").await;
    browser
        .until("document.querySelector('dialog input[name=reason]').matches(':invalid')")
        .await;
    assert_eq!(client.ledger().await.unwrap().revoked, 0);
    browser
        .type_into("dialog input[name=reason]", "it hangs in <b>page 3</b>")
        .await;
    browser.click("dialog button").await;
    browser.until_shown("1 lease force-released.").await;
    assert_eq!(client.ledger().await.unwrap().revoked, 1);
    // Still the filtered page, and the line is not said again after a reload.
    browser
        .until("location.pathname + location.search === '/leases?queue=reports'")
        .await;
    browser.go(&format!("http://{at}/audit")).await;
    browser.until_shown("it hangs in <b>page 3</b>").await;
    let record = client.audit(Page::first(1)).await.unwrap().rows.remove(0);
    assert_eq!((record.actor.as_str(), record.done), ("dashboard", 1));
    browser.close().await;
    playing.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn dead_letters_of_one_kind_are_retried_together() {
    let client = memory();
    let playing = play(&client).await;
    playing.stop().await;
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    let browser = Browser::open().await;
    browser.go(&format!("http://{at}/dead")).await;
    browser.until_shown("connection to #.#.#.# refused").await;
    // The largest group is on top.
    assert_eq!(browser.text("tbody tr:first-child td").await, "12");
    browser.click("tbody tr:first-child a.good").await;
    browser.until("document.getElementById('modal').open").await;
    browser
        .type_into("dialog input[name=reason]", "the feed is back")
        .await;
    browser.click("dialog button").await;
    browser.until_shown("12 jobs brought back to ready.").await;
    assert!(client.ledger().await.unwrap().balances());
    let imports = client.queues().await.unwrap();
    let imports = imports
        .iter()
        .find(|view| view.queue.as_str() == "imports")
        .unwrap();
    assert_eq!((imports.counts.dead, imports.counts.ready), (1, 12));
    // The page follows.
    browser
        .until("document.querySelectorAll('tbody tr').length === 1")
        .await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn a_queue_is_paused_and_resumed_without_the_script() {
    let client = memory();
    client
        .enqueue(crate::scene::job("q", "step", "{}"))
        .await
        .unwrap();
    let at = serve(Dashboard::new(client.clone()).allow_actions(), "/").await;
    let browser = Browser::open().await;
    let off = serde_json::json!({ "value": true });
    browser
        .devtools("Emulation.setScriptExecutionDisabled", &off)
        .await;
    let is_paused = async |wanted: bool| {
        let fact = async {
            while client.queues().await.unwrap()[0].paused != wanted {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let came = tokio::time::timeout(LONG, fact).await;
        assert!(came.is_ok(), "never paused: {wanted}");
    };
    for (wanted, reason) in [(true, "maintenance"), (false, "done")] {
        browser.go(&format!("http://{at}/queues")).await;
        browser.click("tbody a[data-modal]").await;
        browser.type_into("input[name=reason]", reason).await;
        browser.click("form.confirm button").await;
        // A click does not wait for the answer to the form.
        is_paused(wanted).await;
    }
    browser.close().await;
}
