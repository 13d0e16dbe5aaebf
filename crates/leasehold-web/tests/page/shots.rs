//! The pictures of the documentation. `contrib/screenshots` writes them; otherwise they are only
//! taken.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect::Page;
use leasehold::job::{JobState, QueueName};
use leasehold::{Client, Context, Failure, Job};
use leasehold_web::Dashboard;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::browser::Browser;
use crate::scene::{abandon, job, memory, play, serve};

/// Bytes in a picture.
const MOST: usize = 300_000;

/// Work that goes on: bursts of mail, and now and then a worker that dies with its leases.
async fn traffic(client: Client) {
    for round in 0_u64.. {
        let wave = 6 + (round % 40).abs_diff(20) / 2;
        let mails = (0..wave).map(|n| job("mail", "send_mail", &format!("{{\"to\":{n}}}")));
        client.enqueue_many(mails).await.unwrap();
        if round % 17 == 5 {
            client
                .enqueue(job("exports", "export_ledger", "{}"))
                .await
                .unwrap();
            let store = Arc::clone(client.store());
            abandon(
                &*store,
                "worker-7.gone",
                "exports",
                Duration::from_millis(900),
                1,
            )
            .await;
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

#[derive(Serialize, Deserialize)]
struct Transcode {
    minutes: u64,
}

impl Job for Transcode {
    const KIND: &'static str = "transcode";
    const QUEUE: &'static str = "video";
}

/// A second worker, with other terms and longer jobs.
async fn transcoding(client: Client, stop: CancellationToken) {
    for minutes in [94, 121, 47] {
        client.enqueue(&Transcode { minutes }).await.unwrap();
    }
    let handler = |job: Transcode, ctx: Context| async move {
        for frame in (0..).step_by(180) {
            ctx.progress(frame, job.minutes * 1_440, "frames");
            tokio::select! {
                () = ctx.cancelled() => break,
                () = tokio::time::sleep(Duration::from_millis(400)) => {}
            }
        }
        Ok::<(), Failure>(())
    };
    let worker = client.worker().handle(handler).slots(4);
    let worker = worker.owner("worker-2.eu").task("release-43");
    worker.run_until(stop.cancelled_owned()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs chromium: ./tests/run"]
async fn screenshots() {
    let into = std::env::var_os("LEASEHOLD_SCREENSHOTS").map(PathBuf::from);
    let client = memory();
    let exporter = crate::exporter();
    let playing = play(&client).await;
    let going_on = tokio::spawn(traffic(client.clone()));
    let stop = CancellationToken::new();
    let transcoding = tokio::spawn(transcoding(client.clone(), stop.clone()));
    let dashboard = Dashboard::new(client.clone())
        .allow_actions()
        .metrics(exporter)
        .refresh(Duration::from_millis(500));
    let at = serve(dashboard, "/").await;
    // Two holders that will not have been heard from for a while.
    let backups = (0..2).map(|n| job("backups", "snapshot", &format!("{{\"disk\":{n}}}")));
    client.enqueue_many(backups).await.unwrap();
    abandon(
        &**client.store(),
        "worker-3.us",
        "backups",
        Duration::from_secs(100),
        2,
    )
    .await;
    // A minute of history makes the charts worth a look.
    let history = if into.is_some() { 70 } else { 1 };
    tokio::time::sleep(Duration::from_secs(history)).await;

    // One that was lost by a dead worker and completed by another.
    let exports = QueueName::new("exports").unwrap();
    let done = client
        .jobs(exports, JobState::Completed, Page::first(1))
        .await
        .unwrap();
    let job = format!("/jobs/{}", done.rows[0].job.id);
    let desk = Browser::sized(1280, 860).await;
    let phone = Browser::sized(390, 844).await;
    for (browser, theme, name, path) in [
        (&desk, "light", "overview", "/?window=1m"),
        (&desk, "dark", "overview-dark", "/?window=1m"),
        (&desk, "light", "leases", "/leases"),
        (&desk, "dark", "leases-dark", "/leases"),
        (&desk, "light", "queues", "/queues"),
        (&desk, "light", "job", job.as_str()),
        (&desk, "light", "dead", "/dead"),
        (&desk, "light", "workers", "/workers"),
        (&desk, "light", "expiry", "/expiry"),
        (&phone, "light", "phone", "/?window=1m"),
        (&phone, "dark", "phone-leases", "/leases"),
    ] {
        let scheme = serde_json::json!({
            "features": [{ "name": "prefers-color-scheme", "value": theme }],
        });
        browser
            .devtools("Emulation.setEmulatedMedia", &scheme)
            .await;
        browser.go(&format!("http://{at}{path}")).await;
        browser
            .until("document.getElementById('pulse').dataset.state === 'on'")
            .await;
        browser
            .until("Number(document.getElementById('live').dataset.updates) > 0")
            .await;
        let picture = browser.picture().await;
        assert!(picture.starts_with(b"\x89PNG"), "{name}");
        assert!(picture.len() < MOST, "{name} has {} bytes", picture.len());
        if let Some(into) = &into {
            std::fs::create_dir_all(into).unwrap();
            std::fs::write(into.join(format!("{name}.png")), picture).unwrap();
        }
    }
    desk.close().await;
    phone.close().await;
    going_on.abort();
    stop.cancel();
    transcoding.await.unwrap();
    playing.stop().await;
}
