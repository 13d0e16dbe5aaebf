//! At rest, every number on the Overview is the ledger's, and the scrape's.

use std::collections::BTreeMap;

use leasehold::Client;
use leasehold::inspect::{self, Counts, Ledger};
use leasehold_web::Dashboard;
use leasehold_web::prometheus::Exporter;

use crate::dashboard::http::get;
use crate::dashboard::postgres_server::Server;
use crate::dashboard::redis_server::Standalone;
use crate::dashboard::scene::{memory, play, serve};

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

/// What the page calls a figure, what it must be, and the series that has it too.
struct Figure {
    name: String,
    number: u64,
    series: String,
    label: String,
}

fn figure(name: impl Into<String>, number: u64, series: &str, label: impl Into<String>) -> Figure {
    Figure {
        name: name.into(),
        number,
        series: format!("leasehold_{series}"),
        label: label.into(),
    }
}

fn figures(ledger: &Ledger, counts: &Counts) -> Vec<Figure> {
    let kept = [
        ("enqueued", "ledger_enqueued_total", ledger.enqueued),
        ("granted", "ledger_granted_total", ledger.granted),
        ("live", "ledger_live", ledger.live),
        ("late", "ledger_late_total", ledger.late),
        ("fenced", "ledger_fenced_total", ledger.fenced),
        ("died", "ledger_deaths_total", ledger.died()),
    ]
    .map(|(name, series, n)| figure(format!("ledger.{name}"), n, series, "queue="));
    let ended = [
        ("completed", ledger.completed),
        ("retried", ledger.retried),
        ("surrendered", ledger.surrendered),
        ("buried", ledger.buried),
        ("cancelled", ledger.cancelled),
        ("expired_deadline", ledger.expired_deadline),
        ("expired_stalled", ledger.expired_stalled),
        ("expired_lifetime", ledger.expired_lifetime),
        ("revoked", ledger.revoked),
    ]
    .map(|(end, n)| {
        let label = format!("end=\"{end}\"");
        figure(format!("ledger.{end}"), n, "ledger_ended_total", label)
    });
    let deleted = [
        ("pruned", "retention", ledger.pruned),
        ("purged", "operator", ledger.purged),
    ]
    .map(|(name, by, n)| {
        let label = format!("by=\"{by}\"");
        figure(format!("ledger.{name}"), n, "ledger_deleted_total", label)
    });
    let jobs = [
        ("ready", counts.ready),
        ("leased", counts.leased),
        ("scheduled", counts.scheduled),
        ("dead", counts.dead),
    ]
    .map(|(state, n)| figure(state, n, "queue_jobs", format!("state=\"{state}\"")));
    let hero = [
        ("retried", "end=\"retried\"", ledger.retried),
        ("buried", "end=\"buried\"", ledger.buried),
        ("expired", "end=\"expired_", ledger.expired()),
        ("revoked", "end=\"revoked\"", ledger.revoked),
    ]
    .map(|(name, label, n)| figure(name, n, "ledger_ended_total", label));
    let all = kept.into_iter().chain(ended).chain(deleted);
    all.chain(jobs).chain(hero).collect()
}

async fn agree(client: Client) {
    let exporter = Exporter::of_the_store();
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
    let mut counts = Counts::default();
    for view in inspect::queues(&**client.store()).await.unwrap() {
        counts.ready += view.counts.ready;
        counts.leased += view.counts.leased;
        counts.scheduled += view.counts.scheduled;
        counts.dead += view.counts.dead;
    }
    let expected = figures(&ledger, &counts);
    for Figure {
        name,
        number,
        series,
        label,
    } in &expected
    {
        assert_eq!(shown.get(name), Some(number), "{name} on the page");
        assert_eq!(
            scraped(&scrape.body, series, label),
            *number,
            "{name} in the scrape"
        );
    }
    assert_eq!(shown["released"], ledger.released());
    assert_eq!(shown["failed"], ledger.retried + ledger.buried);
    assert_eq!(shown["well"], ledger.released() - ledger.failed());
    // Every figure has been compared.
    assert_eq!(shown.len(), expected.len() + 3, "{shown:?}");
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
    at(&format!(
        "sqlite://{}",
        dir.path().join("jobs.db").display()
    ))
    .await;
}

async fn at(url: &str) {
    let client = Client::open(url).await.unwrap();
    play(&client).await.stop().await;
    agree(client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_overview_is_the_ledger_in_redis() {
    let server = Standalone::start(&[]);
    at(server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_overview_is_the_ledger_in_postgres() {
    let server = Server::start(&["fsync=off"]);
    at(&server.url()).await;
}
