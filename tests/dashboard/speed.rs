//! How fast pages answer beside ten thousand live leases and a million queued jobs.
//!
//! Without `LEASEHOLD_CAMPAIGN` a small store shows that each page is paged; the figures are printed by
//! `LEASEHOLD_CAMPAIGN=1 cargo test --release --all-features --test dashboard speed -- --nocapture
//! --test-threads=1`: one at a time, as the CPU is the process's.

use std::net::SocketAddr;
use std::time::Duration;

use leasehold::dashboard::Dashboard;
use leasehold::observe::prometheus::Exporter;
use leasehold::{Client, NewJob};

use crate::http::{Events, get};
use crate::scene::{abandon, job, memory, serve};

struct Size {
    jobs: usize,
    leases: usize,
    /// Requests per page.
    asks: usize,
}

fn size() -> Size {
    if std::env::var_os("LEASEHOLD_CAMPAIGN").is_some() {
        Size {
            jobs: 1_000_000,
            leases: 10_000,
            asks: 200,
        }
    } else {
        Size {
            jobs: 20_000,
            leases: 1_000,
            asks: 5,
        }
    }
}

async fn fill(client: &Client, size: &Size) {
    let mut left = size.jobs + size.leases;
    while left > 0 {
        let some = left.min(10_000);
        let jobs: Vec<NewJob> = (0..some)
            .map(|n| job("bulk", "step", &format!("{{\"n\":{n}}}")))
            .collect();
        client.enqueue_all(jobs).await.unwrap();
        left -= some;
    }
    let mut held = 0;
    while held < size.leases {
        let owner = format!("worker-{}", held / 100);
        let grants = abandon(
            &**client.store(),
            &owner,
            "bulk",
            Duration::from_secs(3_600),
            100,
        )
        .await;
        held += grants.iter().map(|grant| grant.leases.len()).sum::<usize>();
    }
}

async fn measure(store: &str, at: SocketAddr, size: &Size) {
    let pages = [
        "/",
        "/leases",
        "/queues",
        "/jobs?queue=bulk&state=ready",
        "/dead",
        "/workers",
        "/expiry",
        "/audit",
        "/metrics",
    ];
    for page in pages {
        let mut took = Vec::new();
        for _ in 0..size.asks {
            let before = now();
            let answer = get(at, page).await;
            took.push(before.elapsed());
            assert_eq!(answer.status, 200, "{page}");
            // The page never carries them all.
            assert!(
                answer.body.len() < 400_000,
                "{page}: {} bytes",
                answer.body.len()
            );
        }
        took.sort_unstable();
        let p99 = took[(took.len() * 99).div_ceil(100) - 1];
        println!(
            "{store:>7} {page:<30} p50 {:>8.1?}  p99 {p99:>8.1?}",
            took[took.len() / 2]
        );
        if std::env::var_os("LEASEHOLD_CAMPAIGN").is_some() {
            assert!(p99 < Duration::from_millis(200), "{page}: {p99:?}");
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "how long a page takes is the question"
)]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}

/// CPU time of this process.
fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The CPU that pages which are open cost per second.
async fn open_pages(store: &str, at: SocketAddr) {
    let mut open = Vec::new();
    for page in ["/", "/leases", "/queues"] {
        let mut events = Events::open(at, page).await;
        events.until("event: live").await;
        open.push(events);
    }
    let span = Duration::from_secs(if std::env::var_os("LEASEHOLD_CAMPAIGN").is_some() {
        20
    } else {
        1
    });
    let before = cpu();
    tokio::time::sleep(span).await;
    let share = cpu().saturating_sub(before).as_secs_f64() / span.as_secs_f64();
    println!(
        "{store:>7} three open pages take {:.2} % of one core",
        share * 100.0
    );
}

async fn run(name: &str, client: Client) {
    let size = size();
    fill(&client, &size).await;
    let exporter = Exporter::of_the_store().unwrap();
    let at = serve(Dashboard::new(client).metrics(exporter), "/").await;
    measure(name, at, &size).await;
    open_pages(name, at).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_large_memory_store() {
    run("memory", memory()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_large_sqlite_store() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!(
        "sqlite://{}?synchronous=normal",
        dir.path().join("jobs.db").display()
    );
    run("sqlite", Client::open(&url).await.unwrap()).await;
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Step {}

impl leasehold::Job for Step {
    const KIND: &'static str = "step";
}

/// CPU per job of a drain.
async fn drain(client: &Client, jobs: u64) -> f64 {
    let before = client.ledger().await.unwrap().completed;
    let mut left = jobs as usize;
    while left > 0 {
        let some = left.min(10_000);
        let batch: Vec<NewJob> = (0..some).map(|_| NewJob::of(&Step {}).unwrap()).collect();
        client.enqueue_all(batch).await.unwrap();
        left -= some;
    }
    let watch = client.clone();
    let done = async move {
        while watch.ledger().await.unwrap().completed < before + jobs {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let start = cpu();
    let handler = async |_: Step, _: leasehold::Context| Ok::<(), leasehold::Failure>(());
    client
        .worker()
        .handle(handler)
        .slots(64)
        .run_until(done)
        .await
        .unwrap();
    cpu().saturating_sub(start).as_secs_f64() * 1e6 / jobs as f64
}

/// What an open dashboard adds to the CPU per job: pairs, interleaved, medians.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_dashboard_beside_a_busy_store() {
    let campaign = std::env::var_os("LEASEHOLD_CAMPAIGN").is_some();
    let (pairs, jobs) = if campaign { (9, 400_000) } else { (1, 2_000) };
    let client = memory();
    let (mut alone, mut watched) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        alone.push(drain(&client, jobs).await);
        let (at, server) = crate::scene::serve_at(Dashboard::new(client.clone()), "/", 0).await;
        let mut open = Vec::new();
        for page in ["/", "/leases", "/queues"] {
            let mut events = Events::open(at, page).await;
            events.until("event: live").await;
            open.push(events);
        }
        watched.push(drain(&client, jobs).await);
        server.abort();
        let _ = server.await;
    }
    alone.sort_by(f64::total_cmp);
    watched.sort_by(f64::total_cmp);
    let (alone, watched) = (alone[pairs / 2], watched[pairs / 2]);
    println!(
        " memory {alone:.2} µs of CPU per job alone, {watched:.2} µs with three pages open: {:+.1} %",
        (watched / alone - 1.0) * 100.0
    );
    let ledger = client.ledger().await.unwrap();
    assert_eq!(ledger.completed, 2 * pairs as u64 * jobs);
}
