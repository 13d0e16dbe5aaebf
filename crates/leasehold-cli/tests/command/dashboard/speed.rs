//! How fast pages answer beside ten thousand live leases and a million queued jobs, and what pages
//! that are open cost the store.
//!
//! Without `LEASEHOLD_CAMPAIGN` a small store shows that each page is paged. The figures are
//! printed, and held to their bounds, by `LEASEHOLD_CAMPAIGN=1 cargo test --release -p
//! leasehold-cli --test command speed -- --nocapture --test-threads=1 --include-ignored`. They run
//! one at a time, because the CPU time measured is that of the whole process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::{Client, NewJob};
use leasehold_web::Dashboard;
use leasehold_web::prometheus::Exporter;
use tokio::sync::Notify;

use crate::dashboard::http::{Events, get};
use crate::dashboard::postgres_server::Server;
use crate::dashboard::redis_server::Standalone;
use crate::dashboard::scene::{abandon, job, memory, serve_at};

fn campaign() -> bool {
    std::env::var_os("LEASEHOLD_CAMPAIGN").is_some()
}

struct Size {
    jobs: usize,
    leases: usize,
    /// Requests per page.
    asks: usize,
}

fn size() -> Size {
    if campaign() {
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
        client.enqueue_many(jobs).await.unwrap();
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
        if campaign() {
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

/// CPU time of a server.
fn cpu_of(server: &Standalone) -> Duration {
    let used = |field| {
        let seconds = server.server.info(&["INFO", "cpu"], field);
        seconds.unwrap().parse::<f64>().unwrap()
    };
    Duration::from_secs_f64(used("used_cpu_user") + used("used_cpu_sys"))
}

/// How often pages are brought up to date unless told otherwise, and here: what they cost is less
/// than the noise of a drain, and twenty times as much is not.
const BY_DEFAULT: Duration = Duration::from_secs(2);
const HERE: Duration = Duration::from_millis(100);

const OPEN: [&str; 3] = ["/", "/leases", "/queues"];

/// A dashboard with three pages open, each read as a browser does.
struct Open {
    server: tokio::task::JoinHandle<()>,
    readers: tokio::task::JoinSet<()>,
    updates: Arc<AtomicU64>,
    since: std::time::Instant,
}

impl Open {
    async fn pages(client: &Client) -> Self {
        let mut readers = tokio::task::JoinSet::new();
        let dashboard = Dashboard::new(client.clone()).refresh(HERE);
        let (at, server) = serve_at(dashboard, "/", 0).await;
        let updates = Arc::new(AtomicU64::new(0));
        for page in OPEN {
            let mut events = Events::open(at, page).await;
            events.until("event: live").await;
            let updates = Arc::clone(&updates);
            readers.spawn(async move {
                loop {
                    events.forget();
                    events.until("event: live").await;
                    updates.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self {
            server,
            readers,
            updates,
            since: now(),
        }
    }

    /// Closes the pages, and tells how many times as often they were updated as by default.
    async fn close(mut self) -> f64 {
        let updates = self.updates.load(Ordering::Relaxed) as f64;
        let rate = updates / self.since.elapsed().as_secs_f64();
        self.readers.shutdown().await;
        self.server.abort();
        let _ = self.server.await;
        rate * BY_DEFAULT.as_secs_f64() / OPEN.len() as f64
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Step {}

impl leasehold::Job for Step {
    const KIND: &'static str = "step";
}

/// The store's CPU per job of a drain, in µs.
async fn drain(client: &Client, jobs: u64, cpu: impl Fn() -> Duration) -> f64 {
    let mut left = jobs as usize;
    while left > 0 {
        let some = left.min(10_000);
        let batch: Vec<NewJob> = (0..some).map(|_| NewJob::of(&Step {}).unwrap()).collect();
        client.enqueue_many(batch).await.unwrap();
        left -= some;
    }
    // Nobody asks the store how far it is: that would cost more than a page.
    let (left, last) = (Arc::new(AtomicU64::new(jobs)), Arc::new(Notify::new()));
    let done = Arc::clone(&last);
    let handler = move |_: Step, _: leasehold::Context| {
        if left.fetch_sub(1, Ordering::Relaxed) == 1 {
            last.notify_one();
        }
        std::future::ready(Ok::<(), leasehold::Failure>(()))
    };
    let start = cpu();
    let worker = client.worker().handle(handler).slots(64);
    worker.run_until(done.notified()).await.unwrap();
    cpu().saturating_sub(start).as_secs_f64() * 1e6 / jobs as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What three open pages add to the store's CPU per job: pairs, interleaved, the median of their
/// ratios, by how many times as often the pages were updated. Where the store is in this process,
/// all that the dashboard does is counted with it.
async fn beside(name: &str, client: &Client, jobs: u64, cpu: impl Fn() -> Duration) {
    let (pairs, jobs) = if campaign() { (9, jobs) } else { (1, 2_000) };
    let before = client.ledger().await.unwrap().completed;
    let (mut alone, mut more, mut often) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..pairs {
        let without = drain(client, jobs, &cpu).await;
        let open = Open::pages(client).await;
        let with = drain(client, jobs, &cpu).await;
        often.push(open.close().await);
        alone.push(without);
        more.push((with / without - 1.0) * 100.0);
    }
    let spread = format!("{more:.1?}");
    let (alone, more, often) = (median(alone), median(more), median(often));
    let added = more / often;
    println!(
        "{name:>7} {alone:.2} µs of CPU per job; three open pages, updated {often:.1} times as often as by \
         default, add {more:+.1} % of {spread}: by default {added:+.2} %"
    );
    let completed = client.ledger().await.unwrap().completed - before;
    assert_eq!(completed, 2 * pairs as u64 * jobs);
    if campaign() {
        assert!(often > 5.0, "nobody looked: {often}");
        assert!(added <= 5.0, "{name}: {added:.2} % more");
    }
}

/// The CPU that pages which are open cost per second while nothing else happens.
async fn at_rest(name: &str, client: &Client, cpu: impl Fn() -> Duration) {
    let open = Open::pages(client).await;
    let span = Duration::from_secs(if campaign() { 10 } else { 1 });
    let before = cpu();
    tokio::time::sleep(span).await;
    let share = cpu().saturating_sub(before).as_secs_f64() / span.as_secs_f64();
    let often = open.close().await;
    println!(
        "{name:>7} three open pages at rest, updated {often:.1} times as often as by default: {:.2} % of one \
         core; by default {:.3} %",
        share * 100.0,
        share * 100.0 / often
    );
}

/// How fast the pages of one store answer.
async fn pages(name: &str, client: Client) {
    let size = size();
    fill(&client, &size).await;
    let exporter = Exporter::of_the_store();
    let dashboard = Dashboard::new(client.clone()).metrics(exporter);
    let (at, server) = serve_at(dashboard, "/", 0).await;
    measure(name, at, &size).await;
    server.abort();
    let _ = server.await;
    assert_eq!(client.ledger().await.unwrap().live, size.leases as u64);
}

/// What pages that are open cost one store; a drain of `jobs` takes it some seconds.
async fn cost(name: &str, client: Client, jobs: u64, cpu: impl Fn() -> Duration) {
    let size = size();
    fill(&client, &size).await;
    at_rest(name, &client, &cpu).await;
    beside(name, &client, jobs, &cpu).await;
    assert_eq!(client.ledger().await.unwrap().live, size.leases as u64);
}

async fn in_sqlite(dir: &tempfile::TempDir) -> Client {
    let file = dir.path().join("jobs.db");
    let url = format!("sqlite://{}?synchronous=normal", file.display());
    Client::open(&url).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_large_memory_store() {
    pages("memory", memory()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_large_sqlite_store() {
    let dir = tempfile::tempdir().unwrap();
    pages("sqlite", in_sqlite(&dir).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn pages_of_a_large_redis_store() {
    let server = Standalone::start(&[]);
    pages("redis", Client::open(server.url()).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn pages_of_a_large_postgres_store() {
    let server = Server::start(&[]);
    pages("postgres", Client::open(&server.url()).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cost_of_open_pages_in_memory() {
    cost("memory", memory(), 500_000, cpu).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cost_of_open_pages_in_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    cost("sqlite", in_sqlite(&dir).await, 100_000, cpu).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn cost_of_open_pages_in_redis() {
    let server = Standalone::start(&[]);
    let client = Client::open(server.url()).await.unwrap();
    cost("redis", client, 500_000, || cpu_of(&server)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn cost_of_open_pages_in_postgres() {
    let server = Server::start(&["fsync=off"]);
    let client = Client::open(&server.url()).await.unwrap();
    cost("postgres", client, 50_000, || server.cpu()).await;
}
