//! The store is away: what a worker's `/metrics` says meanwhile, and what a live Prometheus makes
//! of it.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::{Client, Context, Failure, Job, LeaseTerms};
use leasehold_support::http::{Port, get};
use leasehold_support::machine;
use leasehold_support::redis::{AOF, Standalone};
use leasehold_web::prometheus::{self, Exporter};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::RULES;

const URL: &str = "LEASEHOLD_TEST_URL";
const LISTEN: &str = "LEASEHOLD_TEST_LISTEN";
const LEASES: usize = 8;
/// Only a hang takes that long.
const LONG: Duration = Duration::from_secs(60);

/// Half of what Prometheus gives a scrape by default.
const IN_TIME: Duration = Duration::from_secs(5);

/// A job that runs until it is told to stop.
#[derive(Serialize, Deserialize)]
struct Vigil;

impl Job for Vigil {
    const KIND: &'static str = "vigil";
}

async fn vigil(_: Vigil, ctx: Context) -> Result<(), Failure> {
    ctx.cancelled().await;
    Ok(())
}

/// A worker with `/metrics`, in a process of its own: this binary again.
struct Worker {
    child: Child,
    port: Port,
}

impl Worker {
    async fn start(url: &str) -> Self {
        let port = Port::keep();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["alerts::outage::play_the_worker", "--exact", "--nocapture"])
            .env(URL, url)
            .env(LISTEN, port.at.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let worker = Self { child, port };
        let begun = Instant::now();
        while tokio::net::TcpStream::connect(worker.at()).await.is_err() {
            assert!(begun.elapsed() < LONG, "the worker does not listen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        worker.scraped("leasehold_leases_held 8").await;
        worker
    }

    fn at(&self) -> SocketAddr {
        self.port.at
    }

    /// Waits for a line of the scrape that begins so, and returns the scrape.
    async fn scraped(&self, line: &str) -> String {
        let begun = Instant::now();
        loop {
            let scrape = get(self.at(), "/metrics").await;
            assert_eq!(scrape.status, 200, "{}", scrape.body);
            if scrape.body.lines().any(|found| found.starts_with(line)) {
                return scrape.body;
            }
            assert!(begun.elapsed() < LONG, "{line}:\n{}", scrape.body);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn play_the_worker() {
    let (Ok(url), Ok(listen)) = (std::env::var(URL), std::env::var(LISTEN)) else {
        return;
    };
    let exporter = Exporter::install().unwrap();
    let client = Client::open(&url).await.unwrap();
    for _ in 0..LEASES {
        client.enqueue(&Vigil).await.unwrap();
    }
    let listen = listen.parse().unwrap();
    tokio::spawn(prometheus::serve_metrics(
        listen,
        client.clone(),
        exporter,
        None,
    ));
    let worker = client.worker().handle(vigil).slots(LEASES);
    let terms = LeaseTerms::of_term(Duration::from_secs(6));
    worker.terms(terms).run().await.unwrap();
}

/// What the process counts, and nothing of what the store last said.
fn is_the_process_alone(scrape: &str) {
    for line in [
        "leasehold_store_up{store=\"leasehold\"} 0",
        "leasehold_build_info{",
        "leasehold_lease_renewals_total{queue=\"default\",result=\"held\"}",
        "leasehold_worker_slots{state=\"busy\"}",
        "leasehold_store_call_seconds_bucket{engine=\"redis\"",
        "leasehold_scrapes_failed_total{store=\"leasehold\"}",
    ] {
        let found = scrape.lines().any(|found| found.starts_with(line));
        assert!(found, "{line}:\n{scrape}");
    }
    for gone in ["leasehold_ledger_", "leasehold_queue_", "leasehold_oldest_"] {
        assert!(!scrape.contains(gone), "{gone}:\n{scrape}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_scrape_answers_whatever_the_store_does() {
    machine::judged(|| async {
        let took = scraped_without_a_store().await;
        if took.iter().any(|took| *took >= IN_TIME) {
            return Err(format!("{took:?}"));
        }
        Ok(())
    })
    .await;
}

/// How long a scrape takes with a frozen store, and with one that is gone.
async fn scraped_without_a_store() -> [Duration; 2] {
    let mut store = Standalone::start(AOF);
    let worker = Worker::start(store.url()).await;
    let scrape = worker.scraped("leasehold_ledger_live{").await;
    assert!(scrape.contains("leasehold_store_up{store=\"leasehold\"} 1\n"));
    // Frozen, it takes what it is sent and says nothing; gone, it takes nothing.
    store.server.pause();
    let begun = Instant::now();
    let scrape = get(worker.at(), "/metrics").await.body;
    let frozen = begun.elapsed();
    is_the_process_alone(&scrape);
    store.server.resume();
    worker.scraped("leasehold_ledger_live{").await;
    store.server.kill();
    let begun = Instant::now();
    let scrape = get(worker.at(), "/metrics").await.body;
    let gone = begun.elapsed();
    is_the_process_alone(&scrape);
    store.server.restart();
    worker.scraped("leasehold_ledger_live{").await;
    [frozen, gone]
}

/// Prometheus itself, with the rules as they are shipped and short windows.
struct Prometheus {
    child: Child,
    port: Port,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    async fn start(target: SocketAddr, window: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = Port::keep();
        let mut rules = RULES.to_owned();
        for shipped in ["[2m]", "[5m]", "[10m]", "[15m]"] {
            rules = rules.replace(shipped, &format!("[{window}s]"));
        }
        for shipped in ["for: 15s", "for: 1m", "for: 5m", "for: 15m"] {
            rules = rules.replace(&format!("{shipped}\n"), "for: 2s\n");
        }
        std::fs::write(dir.path().join("rules.yml"), rules).unwrap();
        let config = format!(
            "global: {{scrape_interval: 5s, scrape_timeout: 5s, evaluation_interval: 1s}}\n\
             rule_files: [rules.yml]\n\
             scrape_configs:\n\
             - job_name: workers\n\
             \x20 static_configs: [{{targets: ['{target}']}}]\n"
        );
        let file = dir.path().join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().display()))
            .arg(format!("--web.listen-address={}", port.at))
            .arg("--log.level=error")
            .stdout(Stdio::null())
            .spawn()
            .expect("prometheus is not installed: ./tests/run installs it");
        let prometheus = Self {
            child,
            port,
            _dir: dir,
        };
        let begun = Instant::now();
        while tokio::net::TcpStream::connect(prometheus.port.at)
            .await
            .is_err()
        {
            assert!(begun.elapsed() < LONG, "Prometheus does not listen");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        prometheus
    }

    /// The value of an expression that has one.
    async fn value(&self, expression: &str) -> Option<f64> {
        let path = expression
            .bytes()
            .fold("/api/v1/query?query=".to_owned(), |path, byte| {
                path + &format!("%{byte:02x}")
            });
        let answer = get(self.port.at, &path).await.body;
        let json = &answer[answer.find('{')?..=answer.rfind('}')?];
        let answer: Value = serde_json::from_str(json).unwrap();
        let value = &answer["data"]["result"][0]["value"][1];
        value.as_str().map(|value| value.parse().unwrap())
    }

    async fn fires(&self, alert: &str) -> bool {
        let firing = format!("ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}");
        self.value(&firing).await.is_some()
    }

    async fn until(&self, expression: &str, patience: Duration) {
        let begun = Instant::now();
        while self.value(expression).await.is_none() {
            assert!(begun.elapsed() < patience, "not in time: {expression}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn in_campaign() -> bool {
    std::env::var_os("LEASEHOLD_CAMPAIGN").is_some()
}

/// In a campaign the outage is 80 s long and the windows a minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs prometheus and redis-server: ./tests/run"]
async fn an_outage_is_told_while_it_lasts_and_is_over_when_it_is() {
    let (outage, window) = if in_campaign() { (80, 60) } else { (30, 30) };
    let outage = Duration::from_secs(outage);
    let mut store = Standalone::start(AOF);
    let worker = Worker::start(store.url()).await;
    let prometheus = Prometheus::start(worker.at(), window).await;
    let firing = |alert: &str| format!("ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}");
    let silent = |alert: &str| format!("absent({})", firing(alert));
    prometheus.until("leasehold_store_up == 1", LONG).await;
    let renewed = "increase(leasehold_lease_renewals_total{result=\"held\"}[30s]) > 0";
    prometheus.until(renewed, LONG).await;
    for alert in ["LeaseholdStoreDown", "LeaseholdRenewalsFail"] {
        assert!(!prometheus.fires(alert).await, "{alert} fires before");
    }

    store.server.kill();
    let away = Instant::now();
    for alert in ["LeaseholdStoreDown", "LeaseholdRenewalsFail"] {
        let left = outage.saturating_sub(away.elapsed());
        prometheus.until(&firing(alert), left).await;
        println!("{alert} fires {:?} into the outage", away.elapsed());
    }
    // It goes on to the end: this is how long the outage is, not a wait for something.
    tokio::time::sleep(outage.saturating_sub(away.elapsed())).await;
    assert!(prometheus.fires("LeaseholdStoreDown").await, "gave up");
    // What the process counts has been scraped all the while.
    prometheus.until("leasehold_worker_slots", LONG).await;

    store.server.restart();
    let back = Instant::now();
    for alert in ["LeaseholdStoreDown", "LeaseholdRenewalsFail"] {
        let patience = LONG + Duration::from_secs(window);
        prometheus.until(&silent(alert), patience).await;
        println!("{alert} is over {:?} after it", back.elapsed());
    }
    prometheus.until("leasehold_ledger_live >= 8", LONG).await;
}
