//! At rest, every number on the Overview is the ledger's, and the scrape's.

use std::collections::BTreeMap;

use leasehold::dashboard::Dashboard;
use leasehold::observe::prometheus::Exporter;
use leasehold::{Client, inspect};

use crate::http::get;
use crate::scene::{memory, play, serve};

/// The figures of the page, by name, as a program reads them.
fn facts(page: &str) -> BTreeMap<String, u64> {
    let parts = page.split("<data data-fact=\"").skip(1);
    parts
        .map(|part| {
            let (name, rest) = part.split_once("\" value=\"").unwrap();
            let (value, _) = rest.split_once('"').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// The sum over the queues of a series with these labels.
fn scraped(text: &str, name: &str, label: &str) -> u64 {
    let lines = text.lines().filter(|line| {
        let labels = line
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('{'));
        labels.is_some_and(|labels| labels.contains(label))
    });
    lines
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap() as u64)
        .sum()
}

#[expect(clippy::too_many_lines, reason = "a table")]
async fn agree(client: Client) {
    let exporter = Exporter::of_the_store().unwrap();
    let at = serve(Dashboard::new(client.clone()).metrics(exporter), "/").await;
    let shown = facts(&get(at, "/").await.body);
    let scrape = get(at, "/metrics").await;
    assert!(
        scrape
            .header("content-type")
            .unwrap()
            .starts_with("text/plain; version=0.0.4")
    );
    let ledger = client.ledger().await.unwrap();
    let counts = inspect::queues(&**client.store()).await.unwrap();
    let sum = |of: fn(&inspect::Counts) -> u64| counts.iter().map(|view| of(&view.counts)).sum();
    let ended = |end: &str| ("leasehold_ledger_ended_total", format!("end=\"{end}\""));
    let jobs = |state: &str| ("leasehold_queue_jobs", format!("state=\"{state}\""));
    let plain = |name| (name, "queue=".to_owned());
    let expected: Vec<(&str, u64, (&str, String))> = vec![
        (
            "ledger.enqueued",
            ledger.enqueued,
            plain("leasehold_ledger_enqueued_total"),
        ),
        (
            "ledger.granted",
            ledger.granted,
            plain("leasehold_ledger_granted_total"),
        ),
        ("ledger.completed", ledger.completed, ended("completed")),
        ("ledger.retried", ledger.retried, ended("retried")),
        (
            "ledger.surrendered",
            ledger.surrendered,
            ended("surrendered"),
        ),
        ("ledger.buried", ledger.buried, ended("buried")),
        ("ledger.cancelled", ledger.cancelled, ended("cancelled")),
        (
            "ledger.expired_deadline",
            ledger.expired_deadline,
            ended("expired_deadline"),
        ),
        (
            "ledger.expired_stalled",
            ledger.expired_stalled,
            ended("expired_stalled"),
        ),
        (
            "ledger.expired_lifetime",
            ledger.expired_lifetime,
            ended("expired_lifetime"),
        ),
        ("ledger.revoked", ledger.revoked, ended("revoked")),
        ("ledger.live", ledger.live, plain("leasehold_ledger_live")),
        (
            "ledger.late",
            ledger.late,
            plain("leasehold_ledger_late_total"),
        ),
        (
            "ledger.fenced",
            ledger.fenced,
            plain("leasehold_ledger_fenced_total"),
        ),
        (
            "ledger.pruned",
            ledger.pruned,
            ("leasehold_ledger_deleted_total", "by=\"retention\"".into()),
        ),
        (
            "ledger.purged",
            ledger.purged,
            ("leasehold_ledger_deleted_total", "by=\"operator\"".into()),
        ),
        ("ready", sum(|counts| counts.ready), jobs("ready")),
        ("leased", sum(|counts| counts.leased), jobs("leased")),
        (
            "scheduled",
            sum(|counts| counts.scheduled),
            jobs("scheduled"),
        ),
        ("dead", sum(|counts| counts.dead), jobs("dead")),
        (
            "expired",
            ledger.expired(),
            ("leasehold_ledger_ended_total", "end=\"expired_".into()),
        ),
        ("revoked", ledger.revoked, ended("revoked")),
    ];
    for (name, number, (series, label)) in &expected {
        assert_eq!(shown.get(*name), Some(number), "{name} on the page");
        assert_eq!(
            scraped(&scrape.body, series, label),
            *number,
            "{name} in the scrape"
        );
    }
    assert_eq!(shown["released"], ledger.released());
    // Every figure has been compared.
    assert_eq!(shown.len(), expected.len() + 1, "{shown:?}");
    // And there was something to compare.
    assert!(
        ledger.expired() >= 6 && ledger.completed >= 46 && ledger.buried == 13,
        "{ledger:?}"
    );
    assert!(ledger.balances());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_overview_is_the_ledger_in_memory() {
    let client = memory();
    play(&client).await.stop().await;
    agree(client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_overview_is_the_ledger_in_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
    let client = Client::open(&url).await.unwrap();
    play(&client).await.stop().await;
    agree(client).await;
}
