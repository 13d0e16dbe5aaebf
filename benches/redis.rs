//! The Redis store beside bare list commands, on a private server.
//!
//! ```text
//! cargo bench --features redis --bench redis
//! ```
//! `LEASEHOLD_BENCH_JOBS` is the number of jobs a round, `_ROUNDS` how many rounds each side has,
//! `_DEPTH` the length of the long queue, `_PARTS` which of `speed,verbs,renew,depth,longest` to
//! run: all, unless it is said. The raw side pushes and pops a hundred payloads of 100 bytes a
//! call, one connection, eight calls in flight; the store does the same with leases. Both sides
//! take turns; figures are medians. CPU is the server's. The longest call of a verb is that of the
//! quietest round, one call at a time: the clock also counts while others have the server's core.

#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]

mod common;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{job, median, setting};
use leasehold::hooks::List;
use leasehold::job::{Namespace, QueueName};
use leasehold::lease::Nonce;
use leasehold::store::{
    Beat, ClaimQueue, ClaimRequest, EnqueueRequest, Outcome, RedisOptions, RedisStore, Renewal,
    RequestId, SessionId, SettleRequest, Settlement,
};
use leasehold::{JobId, Store};
use redis::aio::MultiplexedConnection;

const STEP: usize = 100;
const IN_FLIGHT: usize = 8;

struct Server {
    process: Child,
    _dir: tempfile::TempDir,
    url: String,
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|socket| socket.local_addr())
            .expect("a port")
            .port();
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", ""])
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server");
        Self {
            process,
            _dir: dir,
            url: format!("redis://127.0.0.1:{port}"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The server, asked past the store.
#[derive(Clone)]
struct Probe(MultiplexedConnection);

impl Probe {
    async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).expect("a URL");
        loop {
            let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
            match client
                .get_multiplexed_async_connection_with_config(&patient)
                .await
            {
                Ok(connection) => return Self(connection),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    async fn info(&mut self, section: &str, field: &str) -> f64 {
        let text: String = redis::cmd("INFO")
            .arg(section)
            .query_async(&mut self.0)
            .await
            .expect("INFO");
        let value = text.lines().find_map(|line| line.strip_prefix(field));
        let value = value.and_then(|value| value.strip_prefix(':'));
        value
            .and_then(|value| value.trim().parse().ok())
            .unwrap_or(0.0)
    }

    /// CPU seconds of the server.
    async fn cpu(&mut self) -> f64 {
        self.info("cpu", "used_cpu_user").await + self.info("cpu", "used_cpu_sys").await
    }

    async fn memory(&mut self) -> f64 {
        self.info("memory", "used_memory").await
    }

    /// Microseconds spent in scripts.
    async fn scripts(&mut self) -> f64 {
        let text: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut self.0)
            .await
            .expect("INFO");
        let mut lines = text.lines();
        let line = lines.find(|line| line.starts_with("cmdstat_fcall:"));
        let usec = line.and_then(|line| line.split("usec=").nth(1));
        let usec = usec.and_then(|usec| usec.split(',').next());
        usec.and_then(|usec| usec.parse().ok()).unwrap_or(0.0)
    }

    async fn set(&mut self, name: &str, value: usize) {
        let mut set = redis::cmd("CONFIG");
        let set = set.arg("SET").arg(name).arg(value);
        set.exec_async(&mut self.0).await.expect("CONFIG");
    }

    /// Forgets the calls so far.
    async fn forget_calls(&mut self) {
        let mut reset = redis::cmd("SLOWLOG");
        reset
            .arg("RESET")
            .exec_async(&mut self.0)
            .await
            .expect("SLOWLOG");
    }

    /// The longest script call since then, in microseconds.
    async fn slowest(&mut self) -> i64 {
        let rows: Vec<redis::Value> = redis::cmd("SLOWLOG")
            .arg("GET")
            .arg(1_000)
            .query_async(&mut self.0)
            .await
            .expect("SLOWLOG");
        let row = |value: &redis::Value| -> Option<i64> {
            let redis::Value::Array(parts) = value else {
                return None;
            };
            let redis::Value::Int(micros) = parts.get(2)? else {
                return None;
            };
            let redis::Value::Array(words) = parts.get(3)? else {
                return None;
            };
            let called = matches!(words.first()?, redis::Value::BulkString(w) if w == b"FCALL");
            called.then_some(*micros)
        };
        rows.iter().filter_map(row).max().unwrap_or_default()
    }
}

/// Jobs a second and the server's CPU in microseconds a job.
#[derive(Clone, Copy)]
struct Rate {
    per_second: f64,
    micros: f64,
}

async fn measured<F: Future<Output = ()>>(probe: &mut Probe, jobs: usize, work: F) -> Rate {
    let (cpu, start) = (probe.cpu().await, Instant::now());
    work.await;
    let elapsed = start.elapsed().as_secs_f64();
    let cpu = probe.cpu().await - cpu;
    Rate {
        per_second: jobs as f64 / elapsed,
        micros: cpu * 1e6 / jobs as f64,
    }
}

async fn together<F: Future<Output = ()> + Send + 'static>(task: impl Fn(usize) -> F) {
    let tasks: Vec<_> = (0..IN_FLIGHT)
        .map(|lane| tokio::spawn(task(lane)))
        .collect();
    for task in tasks {
        task.await.expect("a task");
    }
}

async fn raw_push(list: &Arc<List>, jobs: usize) {
    together(|_| {
        let list = list.clone();
        async move {
            let payloads = vec![vec![b'x'; 100]; STEP];
            for _ in 0..jobs / STEP / IN_FLIGHT {
                list.push(&payloads).await.expect("RPUSH");
            }
        }
    })
    .await;
}

async fn raw_pop(list: &Arc<List>, jobs: usize) {
    together(|_| {
        let list = list.clone();
        async move {
            for _ in 0..jobs / STEP / IN_FLIGHT {
                assert_eq!(list.pop(STEP).await.expect("LPOP"), STEP);
            }
        }
    })
    .await;
}

/// A store under load.
#[derive(Clone)]
struct Side {
    store: Arc<dyn Store>,
    session: SessionId,
    seq: Arc<std::sync::atomic::AtomicU64>,
}

impl Side {
    async fn open(url: &str, namespace: &str) -> Self {
        let namespace = Namespace::new(namespace).expect("a name");
        let options = RedisOptions::new(url).namespace(namespace);
        let store: Arc<dyn Store> = Arc::new(RedisStore::open(options).expect("a store"));
        let session = store.open_session().await.expect("a session");
        Self {
            store,
            session,
            seq: Arc::default(),
        }
    }

    fn request(&self, lane: usize) -> RequestId {
        let seq = self.seq.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        RequestId {
            session: self.session,
            lane: lane as u32,
            seq: seq + 1,
        }
    }

    async fn enqueue(&self, lane: usize, count: usize) {
        let jobs = (0..count).map(|_| (JobId::generate(), job(12_345)));
        let request = EnqueueRequest {
            request: self.request(lane),
            jobs: Arc::new(jobs.collect()),
        };
        self.store.enqueue(request).await.expect("enqueue");
    }

    async fn fill(&self, jobs: usize) {
        together(|lane| {
            let side = self.clone();
            async move {
                for _ in 0..jobs / STEP / IN_FLIGHT {
                    side.enqueue(lane, STEP).await;
                }
            }
        })
        .await;
    }

    fn claim(&self, lane: usize, max: usize) -> ClaimRequest {
        ClaimRequest {
            request: self.request(lane),
            owner: "bench".into(),
            task: "bench".into(),
            nonce: Nonce::draw().expect("randomness"),
            queues: vec![ClaimQueue {
                queue: QueueName::default(),
                term: Duration::from_secs(600),
                max_lifetime: Duration::from_secs(3_600),
            }],
            max,
            admit_suspect: false,
        }
    }

    /// Claims, waiting out a clock that the tokens have overtaken.
    async fn claimed(&self, lane: usize, max: usize) -> leasehold::store::Claimed {
        loop {
            let request = self.claim(lane, max);
            match self.store.claim(request).await {
                Ok(claimed) if claimed.grants.is_empty() => tokio::task::yield_now().await,
                Ok(claimed) => return claimed,
                Err(error) if error.is_transient() => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn settlements(claimed: &leasehold::store::Claimed) -> Vec<Settlement> {
        let grants = claimed.grants.iter();
        let leases = grants.flat_map(|grant| grant.leases.iter().map(|lease| grant.receipt(lease)));
        leases
            .map(|receipt| Settlement {
                receipt,
                outcome: Outcome::Complete { result: None },
            })
            .collect()
    }

    async fn settle(&self, lane: usize, settlements: Vec<Settlement>) {
        let request = SettleRequest {
            request: self.request(lane),
            settlements,
        };
        let verdicts = self.store.settle(request).await.expect("settle");
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    }

    /// Claims and settles as many jobs, a hundred a call.
    async fn drain(&self, jobs: usize) {
        together(|lane| {
            let side = self.clone();
            async move {
                let mut left = jobs / IN_FLIGHT;
                while left > 0 {
                    let claimed = side.claimed(lane, STEP.min(left)).await;
                    let settlements = Self::settlements(&claimed);
                    left -= settlements.len();
                    side.settle(lane, settlements).await;
                }
            }
        })
        .await;
    }
}

fn main() {
    let jobs = setting("JOBS", 80_000, 8_000);
    let rounds = setting("ROUNDS", 5, 1);
    let depth = setting("DEPTH", 200_000, 8_000);
    let parts = std::env::var("LEASEHOLD_BENCH_PARTS");
    let parts = parts.unwrap_or_else(|_| "speed,verbs,renew,depth,longest".into());
    let runs = |part: &str| parts.split(',').any(|named| named == part);
    let server = Server::start();
    common::runtime().block_on(async {
        let mut probe = Probe::connect(&server.url).await;
        if runs("speed") {
            speed(&server, &mut probe, jobs, rounds).await;
        }
        if runs("verbs") {
            verbs(&server, &mut probe, jobs, rounds).await;
        }
        if runs("renew") {
            renewals(&server, &mut probe).await;
        }
        if runs("depth") {
            lengths(&server, &mut probe, depth, jobs, rounds).await;
        }
        if runs("longest") {
            longest(&server, &mut probe, rounds).await;
        }
    });
}

async fn speed(server: &Server, probe: &mut Probe, jobs: usize, rounds: usize) {
    let side = Side::open(&server.url, "speed").await;
    let bare = Namespace::new("bare").expect("a name");
    let list = Arc::new(List::open(&server.url, &bare, &QueueName::default()).expect("a list"));
    let mut rates: [Vec<Rate>; 4] = Default::default();
    let mut bytes: [Vec<f64>; 2] = Default::default();
    for _ in 0..rounds {
        let empty = probe.memory().await;
        rates[0].push(measured(probe, jobs, raw_push(&list, jobs)).await);
        bytes[0].push((probe.memory().await - empty) / jobs as f64);
        rates[1].push(measured(probe, jobs, raw_pop(&list, jobs)).await);
        let empty = probe.memory().await;
        rates[2].push(measured(probe, jobs, side.fill(jobs)).await);
        bytes[1].push((probe.memory().await - empty) / jobs as f64);
        rates[3].push(measured(probe, jobs, side.drain(jobs)).await);
    }
    let names = ["raw RPUSH", "raw LPOP", "enqueue", "claim + settle"];
    let of = |at: usize, value: fn(&Rate) -> f64| median(rates[at].iter().map(value));
    let told = |name: &str, raw: usize, rate: f64, micros: f64| {
        let ratio = rate / of(raw, |r| r.per_second);
        let times = micros / of(raw, |r| r.micros);
        println!(
            "{name:24} {rate:>10.0} jobs/s, {ratio:.2} of raw  {micros:>6.2} µs CPU a job, {times:.1} times raw"
        );
    };
    for (at, name) in names.iter().enumerate() {
        told(name, at % 2, of(at, |r| r.per_second), of(at, |r| r.micros));
    }
    for (name, bytes) in ["raw", "queued"].iter().zip(bytes) {
        println!("{name:24} {:>10.0} bytes a job of 100 bytes", median(bytes));
    }
}

/// What each verb costs by the thousand, by the hundred and one by one: in its script, and of the
/// server in all. One call at a time.
async fn verbs(server: &Server, probe: &mut Probe, jobs: usize, rounds: usize) {
    for step in [1_000, STEP, 1] {
        let jobs = if step == 1 { jobs / 20 } else { jobs };
        let jobs = jobs.next_multiple_of(1_000);
        let side = Side::open(&server.url, &format!("verbs-{step}")).await;
        let mut costs: [Vec<(f64, f64)>; 3] = Default::default();
        for _ in 0..rounds {
            let mut claimed = Vec::new();
            costs[0].push(
                spent(probe, jobs, async {
                    // Singles are claimed from what came by the hundred.
                    for _ in 0..jobs / step.max(STEP) {
                        side.enqueue(0, step.max(STEP)).await;
                    }
                })
                .await,
            );
            costs[1].push(
                spent(probe, jobs, async {
                    for _ in 0..jobs / step {
                        claimed.push(Side::settlements(&side.claimed(0, step).await));
                    }
                })
                .await,
            );
            costs[2].push(
                spent(probe, jobs, async {
                    for settlements in claimed {
                        side.settle(0, settlements).await;
                    }
                })
                .await,
            );
        }
        for (verb, costs) in ["enqueue", "claim", "settle"].iter().zip(&costs) {
            let least = costs.iter().map(|cost| cost.0).fold(f64::MAX, f64::min);
            let script = median(costs.iter().map(|cost| cost.0));
            let all = median(costs.iter().map(|cost| cost.1));
            println!(
                "{verb:8} {step:>5} a call: {script:.2} µs a job in its script (least {least:.2}), {all:.2} in all"
            );
        }
    }
}

/// Microseconds a job in scripts, and of the server in all.
async fn spent<F: Future<Output = ()>>(probe: &mut Probe, jobs: usize, work: F) -> (f64, f64) {
    let scripts = probe.scripts().await;
    let all = measured(probe, jobs, work).await.micros;
    ((probe.scripts().await - scripts) / jobs as f64, all)
}

async fn renewals(server: &Server, probe: &mut Probe) {
    const LEASES: usize = 10_000;
    for (name, size) in [("hundreds", 100), ("singles", 1)] {
        let side = Side::open(&server.url, name).await;
        side.fill(LEASES.next_multiple_of(STEP * IN_FLIGHT)).await;
        let mut beats = Vec::new();
        let mut held = 0;
        while held < LEASES {
            let claimed = side.claimed(0, size).await;
            for grant in &claimed.grants {
                held += grant.leases.len();
                beats.push(Beat::of(grant));
            }
        }
        let mut spent = Vec::new();
        for _ in 0..6 {
            let before = probe.scripts().await;
            let renewals = side.store.renew(beats.clone()).await.expect("renew");
            assert!(renewals.iter().all(|r| matches!(r, Renewal::Held { .. })));
            spent.push((probe.scripts().await - before) / 1_000.0);
        }
        let first = spent.remove(0);
        let again = median(spent);
        println!(
            "renew {held} leases granted as {name}: {again:.2} ms of the server, {first:.2} the first time"
        );
    }
}

/// The longest script call of each verb, a thousand jobs a call; of renewals, ten thousand leases.
async fn longest(server: &Server, probe: &mut Probe, rounds: usize) {
    const MANY: usize = 1_000;
    let side = Side::open(&server.url, "longest").await;
    let singles = Side::open(&server.url, "longest-singles").await;
    singles
        .fill(10 * MANY.next_multiple_of(STEP * IN_FLIGHT))
        .await;
    let mut beats = Vec::new();
    while beats.len() < 10 * MANY {
        let claimed = singles.claimed(0, 1).await;
        beats.extend(claimed.grants.iter().map(Beat::of));
    }
    // Not before: to note a call costs time as well.
    probe.set("slowlog-log-slower-than", 100).await;
    probe.set("slowlog-max-len", 1_000).await;
    let mut micros: [Vec<i64>; 4] = Default::default();
    for _ in 0..rounds {
        probe.forget_calls().await;
        side.enqueue(0, MANY).await;
        micros[0].push(probe.slowest().await);
        probe.forget_calls().await;
        let claimed = side.claimed(0, MANY).await;
        micros[1].push(probe.slowest().await);
        probe.forget_calls().await;
        side.settle(0, Side::settlements(&claimed)).await;
        micros[2].push(probe.slowest().await);
        probe.forget_calls().await;
        singles.store.renew(beats.clone()).await.expect("renew");
        micros[3].push(probe.slowest().await);
    }
    for (verb, micros) in ["enqueue", "claim", "settle", "renew"].iter().zip(micros) {
        let least = micros.into_iter().min().unwrap_or_default();
        println!(
            "longest script call, {verb:8} {:>8.2} ms",
            least as f64 / 1e3
        );
    }
}

async fn lengths(server: &Server, probe: &mut Probe, depth: usize, jobs: usize, rounds: usize) {
    let short = Side::open(&server.url, "short").await;
    let long = Side::open(&server.url, "long").await;
    let step = STEP * IN_FLIGHT;
    short.fill(1_000_usize.next_multiple_of(step)).await;
    long.fill(depth.next_multiple_of(step)).await;
    let mut costs: [Vec<f64>; 2] = Default::default();
    for _ in 0..rounds {
        for (side, costs) in [&short, &long].into_iter().zip(&mut costs) {
            let work = async {
                for _ in 0..jobs / step {
                    side.fill(step).await;
                    side.drain(step).await;
                }
            };
            costs.push(measured(probe, jobs / step * step, work).await.micros);
        }
    }
    let [short, long] = costs.map(median);
    let ratio = long / short;
    println!("a queue of {depth}: {long:.2} µs CPU a job, of 1000: {short:.2}, ratio {ratio:.2}");
}
