//! Every metric appears in a scrape after a run, under its final name, and the exported ledger is
//! the store's.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::job::{Kind, QueueName};
use leasehold::observe::metrics as names;
use leasehold::worker::executor::SameRuntime;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob, RetryPolicy};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Step {
    n: u32,
}

impl Job for Step {
    const KIND: &'static str = "step";
}

/// Runs until it is told to stop.
#[derive(Serialize, Deserialize)]
struct Vigil;

impl Job for Vigil {
    const KIND: &'static str = "vigil";
    const QUEUE: &'static str = "vigils";
}

async fn vigil(_: Vigil, ctx: Context) -> Result<(), Failure> {
    while !ctx.is_cancelled() {
        ctx.progress(0, None, "still here");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Every name.
const ALL: &[&str] = &[
    names::JOBS_ENQUEUED,
    names::JOBS_DUPLICATE,
    names::LEASES_GRANTED,
    names::LEASES_RELEASED,
    names::LEASES_EXPIRED,
    names::JOBS_DECLINED,
    names::LEASES_LOST,
    names::LEASE_RENEWALS,
    names::CALLS_FENCED,
    names::STALE_WRITES_REJECTED,
    names::SETTLEMENTS_LATE,
    names::SETTLEMENTS_IN_DOUBT,
    names::CLAIMS_EMPTY,
    names::LEASE_HELD,
    names::JOB_WAIT,
    names::JOB_RUN,
    names::LEASE_MARGIN,
    names::JOB_ATTEMPTS,
    names::WORKER_SLOTS,
    names::LEASES_HELD,
    names::UTILIZATION,
    names::STORE_CALL,
    names::QUEUE_JOBS,
    names::QUEUE_PARKED,
    names::OLDEST_READY,
    names::CLOCK_BEHIND,
    names::QUEUE_PAUSED,
    names::LEDGER_ENQUEUED,
    names::LEDGER_GRANTED,
    names::LEDGER_ENDED,
    names::LEDGER_LIVE,
    names::LEDGER_FENCED,
    names::LEDGER_LATE,
    names::LEDGER_DELETED,
    names::LEDGER_DEATHS,
    names::STORE_UP,
    names::BUILD_INFO,
];

/// The value of each series: name and labels as they are written.
fn scraped(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let series = lines.filter_map(|line| line.rsplit_once(' '));
    series
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

/// A pool that has seen a retry, a stall, a duplicate, an unknown kind and completions.
async fn worked() -> Client {
    let client = Client::new(leasehold_support::virtual_time::memory());
    let mut jobs: Vec<NewJob> = (0..4).map(|n| NewJob::of(&Step { n }).unwrap()).collect();
    jobs[0] = jobs[0].clone().unique("once").unwrap();
    client.enqueue_many(jobs.clone()).await.unwrap();
    client.enqueue(jobs[0].clone()).await.unwrap();
    client.enqueue(&Vigil).await.unwrap();
    let unknown = NewJob::raw(
        QueueName::new(Vigil::QUEUE).unwrap(),
        Kind::new("novel").unwrap(),
        "{}",
    );
    client.enqueue(unknown).await.unwrap();
    let handler = |job: Step, ctx: Context| async move {
        match (job.n, ctx.attempt()) {
            (1, 1) => Err(Failure::from("again")),
            (2, 1) => {
                ctx.cancelled().await;
                Ok(())
            }
            _ => Ok(()),
        }
    };
    let watch = client.clone();
    let done = async move {
        while watch.ledger().await.unwrap().completed < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // One round of the measurements that are taken every few seconds.
        tokio::time::sleep(Duration::from_secs(6)).await;
    };
    client
        .worker()
        .handle(handler)
        .handle(vigil)
        .queue("default")
        .queue("vigils")
        .slots(4)
        .terms(LeaseTerms::of_term(Duration::from_millis(600)))
        .stall_limit(Duration::from_millis(300))
        .executor(SameRuntime)
        .retry(RetryPolicy::constant(Duration::from_millis(1)))
        .run_until(done)
        .await
        .unwrap();
    client
}

#[tokio::test(start_paused = true)]
async fn every_metric_is_in_a_scrape() {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in names::BUCKETS {
        let name = Matcher::Full((*name).to_owned());
        builder = builder.set_buckets_for_metric(name, buckets).unwrap();
    }
    let recorder = builder.install_recorder().unwrap();
    names::describe();

    let client = worked().await;
    names::export(&**client.store()).await.unwrap();

    let text = recorder.render();
    for name in ALL {
        assert!(
            text.contains(&format!("\n{name}")),
            "{name} is not in the scrape"
        );
    }
    for (name, _) in names::BUCKETS {
        assert!(
            text.contains(&format!("{name}_bucket{{")),
            "{name} has no buckets"
        );
    }

    let series = scraped(&text);
    let value = |name: &str| {
        series
            .get(name)
            .copied()
            .unwrap_or_else(|| panic!("{name}\n{text}"))
    };
    // One of four slots, all the time, though its run had not ended when it was measured.
    let busy = value(r#"leasehold_utilization_ratio{queue="vigils"}"#);
    assert!(busy > 0.02 && busy <= 0.26, "{busy}");

    let step = r#"queue="default",kind="step""#;
    let queues = client.queues().await.unwrap();
    let ledger = &queues.iter().find(|view| view.queue.as_str() == "default");
    let ledger = ledger.unwrap().ledger;
    assert_eq!((ledger.granted, ledger.completed), (6, 4));
    assert_eq!((ledger.retried, ledger.expired_stalled), (1, 1));
    let granted = value(&format!("leasehold_leases_granted_total{{{step}}}"));
    assert!((granted - 6.0).abs() < 0.5, "{granted}");
    for (name, count) in [
        (
            format!("leasehold_leases_released_total{{{step},outcome=\"complete\"}}"),
            4.0,
        ),
        (
            format!("leasehold_leases_released_total{{{step},outcome=\"retry\"}}"),
            1.0,
        ),
        (
            format!("leasehold_leases_expired_total{{{step},cause=\"stalled\"}}"),
            1.0,
        ),
        (
            format!("leasehold_leases_lost_total{{{step},cause=\"stalled\"}}"),
            1.0,
        ),
        (format!("leasehold_jobs_enqueued_total{{{step}}}"), 4.0),
        (format!("leasehold_jobs_duplicate_total{{{step}}}"), 1.0),
        (format!("leasehold_job_run_seconds_count{{{step}}}"), 6.0),
        (format!("leasehold_job_attempts_count{{{step}}}"), 5.0),
        (
            "leasehold_ledger_granted_total{store=\"leasehold\",queue=\"default\"}".into(),
            6.0,
        ),
        (
            "leasehold_ledger_ended_total{store=\"leasehold\",queue=\"default\",end=\"completed\"}".into(),
            4.0,
        ),
        (
            "leasehold_ledger_ended_total{store=\"leasehold\",queue=\"default\",end=\"expired_stalled\"}".into(),
            1.0,
        ),
    ] {
        let found = value(&name);
        assert!((found - count).abs() < 0.5, "{name} is {found}");
    }
}

#[test]
fn every_metric_is_in_the_guide() {
    let guide = include_str!("../../src/guide/operations.md");
    for name in ALL {
        assert!(guide.contains(&format!("`{name}`")), "{name}");
    }
}
