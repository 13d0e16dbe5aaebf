//! Every metric that the Grafana dashboard and the alert rules use is in a scrape after a run.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold_web::prometheus::Exporter;

use crate::dashboard::scene::{job, memory, play};

const GRAFANA: &str = include_str!("../../../../../contrib/grafana/leasehold.json");
/// The lines of the table.
const DOCUMENTATION: &str = include_str!("../../../../leasehold-web/src/prometheus.rs");
const ALERTS: &str = include_str!("../../../../../contrib/prometheus/alerts.yml");
const SCALING: &str = include_str!("../../../../../contrib/deploy/autoscaling-metric.yaml");

/// The names of our series in a text.
fn names(text: &str) -> BTreeSet<String> {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let found = text.match_indices("leasehold_").map(|(at, _)| {
        let rest = &text[at..];
        rest[..rest.find(|c| !inside(c)).unwrap_or(rest.len())].to_owned()
    });
    found.collect()
}

/// The panels, those in rows included.
fn panels(of: &serde_json::Value) -> Vec<serde_json::Value> {
    let own = of["panels"].as_array().cloned().unwrap_or_default();
    let inner = own.iter().flat_map(panels).collect::<Vec<_>>();
    own.into_iter().chain(inner).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_they_use_appears_in_a_scrape() {
    let exporter = Exporter::install().unwrap();
    assert!(Exporter::install().is_err(), "two recorders in one process");
    let client = memory();
    let unique = job("mail", "send_mail", "{}")
        .unique("once")
        .unwrap()
        .delay(Duration::from_secs(900));
    client
        .enqueue_many(vec![unique.clone(), unique])
        .await
        .unwrap();
    let playing = play(&client).await;
    // Utilisation is measured every few seconds.
    let store = &**client.store();
    let measured = async {
        while !exporter
            .scrape(store)
            .await
            .contains("\nleasehold_utilization_ratio{")
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), measured)
        .await
        .unwrap();
    playing.stop().await;
    let scrape = exporter.scrape(store).await;
    // Something with an id in its labels would be a series per job.
    for line in scrape.lines().filter(|line| !line.starts_with('#')) {
        let labels = line.split_once('{').map_or("", |(_, labels)| labels);
        for forbidden in ["job=", "id=", "token=", "owner=", "task=", "key="] {
            let found = labels.split(',').any(|label| label.starts_with(forbidden));
            assert!(!found, "{line}");
        }
    }
    let present: BTreeSet<String> = names(&scrape);
    // What is scraped is documented, and what is documented is scraped.
    let table = DOCUMENTATION
        .lines()
        .filter(|line| line.starts_with("//! |"));
    let documented = names(&table.collect::<String>());
    for name in &present {
        let base = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end));
        let known = documented.contains(name) || base.is_some_and(|base| documented.contains(base));
        assert!(known, "{name} is not in the table");
    }
    for name in &documented {
        assert!(present.contains(name), "{name} is in the table only");
    }
    for (file, text, least) in [
        ("leasehold.json", GRAFANA, 6),
        ("alerts.yml", ALERTS, 6),
        ("autoscaling-metric.yaml", SCALING, 2),
    ] {
        let used = names(text);
        assert!(used.len() >= least, "{file} uses only {used:?}");
        for name in used {
            assert!(
                present.contains(&name),
                "{file} uses {name}, which no scrape has"
            );
        }
    }
}

#[test]
fn the_grafana_dashboard_can_be_imported() {
    let model: serde_json::Value = serde_json::from_str(GRAFANA).unwrap();
    assert_eq!(model["uid"], "leasehold");
    let variables = model["templating"]["list"].as_array().unwrap();
    assert!(
        variables
            .iter()
            .any(|variable| variable["type"] == "datasource")
    );
    let panels = panels(&model);
    let ids: BTreeSet<u64> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len(), "two panels have one id");
    let charts: Vec<_> = panels
        .iter()
        .filter(|panel| panel["type"] != "row")
        .collect();
    assert!(charts.len() >= 12, "{}", charts.len());
    for panel in charts {
        assert_eq!(
            panel["datasource"]["uid"], "${datasource}",
            "{}",
            panel["title"]
        );
        assert!(
            !panel["description"].as_str().unwrap_or_default().is_empty(),
            "{}",
            panel["title"]
        );
        assert!(
            !panel["targets"].as_array().unwrap().is_empty(),
            "{}",
            panel["title"]
        );
    }
    // What the operator asks for first is among them.
    let used = names(GRAFANA);
    for name in [
        "leasehold_ledger_ended_total",
        "leasehold_lease_margin_ratio_bucket",
        "leasehold_utilization_ratio",
        "leasehold_job_wait_seconds_bucket",
        "leasehold_lease_held_seconds_bucket",
        "leasehold_job_attempts_bucket",
        "leasehold_ledger_fenced_total",
        "leasehold_lease_renewals_total",
        "leasehold_queue_parked_jobs",
        "leasehold_claims_empty_total",
        "leasehold_oldest_ready_seconds",
        "leasehold_queue_jobs",
    ] {
        assert!(used.contains(name), "{name} has no panel");
    }
}
