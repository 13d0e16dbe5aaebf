//! The PostgreSQL store beside a bare table, on a private server whose commits wait for the disk.
//!
//! ```text
//! cargo bench --features postgres --bench postgres
//! ```
//! drain: one worker with an empty handler takes all jobs; the bare table gives rows away, a
//! hundred in a transaction (`DELETE … SKIP LOCKED RETURNING`). The sides take turns; figures are
//! medians. depth: CPU of the server and of this process for a job, in a long queue and in a
//! short one. wait: from the call of enqueue in one process's client to the start of the handler
//! in another's. size: what the tables take on disk after many jobs have gone through the queue.
//! held: the rate from enqueue to the end after many jobs, beside a transaction that has written
//! and stays open all the time, in the same database or in another, and beside none; with jobs
//! that have no keys, and with jobs that have some.
//!
//! `LEASEHOLD_BENCH_JOBS` jobs in a round, `_ROUNDS` rounds, `_DEPTH` the long queue's length,
//! `_THROUGH` jobs through the queue for its size, `_HELD` before the rates are taken,
//! `_CLAIMERS` workers beside each other, `_PARTS` which of `speed,depth,wait,beside,size,held`
//! to run: all, unless it is said. `_ONLY` which of `plain,keyed` the last of them takes.

#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]

mod common;
use leasehold_support::postgres as server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{cpu_time, drain, enqueue, job, median, setting};
use leasehold::job::Namespace;
use leasehold::store::{PostgresOptions, PostgresStore};
use leasehold::{Client, Context, Failure, Job, NewJob};
use serde::{Deserialize, Serialize};
use server::Server;
use tokio_postgres::types::Type;

const SLOTS: usize = 16;
const BATCH: usize = 100;

async fn client(server: &Server, namespace: &str) -> Client {
    let options = PostgresOptions::new().namespace(Namespace::new(namespace).expect("a name"));
    let store = PostgresStore::with(server.config(), options).await;
    Client::new(Arc::new(store.expect("a store")))
}

/// Rows go in and come out, a hundred in a transaction. Returns the rates of both.
async fn bare(db: &tokio_postgres::Client, jobs: usize) -> (f64, f64) {
    let table = "CREATE TABLE IF NOT EXISTS raw (id bigserial PRIMARY KEY, payload bytea NOT NULL)";
    db.batch_execute(table).await.expect("a table");
    let insert = "INSERT INTO raw (payload) SELECT unnest($1)";
    let start = Instant::now();
    for from in (0..jobs).step_by(BATCH) {
        let rows = from..(from + BATCH).min(jobs);
        let rows: Vec<Vec<u8>> = rows.map(|n| job(n).payload.to_vec()).collect();
        let done = db
            .execute_typed(insert, &[(&rows, Type::BYTEA_ARRAY)])
            .await;
        done.expect("rows");
    }
    let pushed = jobs as f64 / start.elapsed().as_secs_f64();
    let delete = "DELETE FROM raw WHERE id = ANY (ARRAY (
                      SELECT id FROM raw ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED))
                  RETURNING payload";
    let start = Instant::now();
    let mut left = jobs;
    while left > 0 {
        let rows = db.query_typed(delete, &[]).await.expect("rows");
        assert!(!rows.is_empty(), "rows are missing");
        left -= rows.len();
    }
    (pushed, jobs as f64 / start.elapsed().as_secs_f64())
}

async fn speed(server: &Server, jobs: usize, rounds: usize) {
    let db = server.client().await;
    let ours = client(server, "speed").await;
    let mut ratios: [Vec<f64>; 2] = Default::default();
    let mut rates: [Vec<f64>; 4] = Default::default();
    for _ in 0..rounds {
        let (pushed, popped) = bare(&db, jobs).await;
        let start = Instant::now();
        enqueue_beside(&ours, jobs).await;
        let enqueued = jobs as f64 / start.elapsed().as_secs_f64();
        let drained = drain(&ours, jobs, SLOTS).await.per_second(jobs);
        for (at, rate) in [pushed, popped, enqueued, drained].into_iter().enumerate() {
            rates[at].push(rate);
        }
        ratios[0].push(enqueued / pushed);
        ratios[1].push(drained / popped);
    }
    let [pushed, popped, enqueued, drained] = rates.map(median);
    let [push, pop] = ratios.map(median);
    println!("enqueue {enqueued:>9.0} jobs/s, bare INSERT {pushed:>9.0}, ratio {push:.2}");
    println!("drain   {drained:>9.0} jobs/s, bare DELETE {popped:>9.0}, ratio {pop:.2} (aim 0.5)");
}

/// Eight callers, a hundred jobs in a call.
async fn enqueue_beside(client: &Client, jobs: usize) {
    let next = Arc::new(AtomicU64::new(0));
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (client, next) = (client.clone(), Arc::clone(&next));
        callers.spawn(async move {
            loop {
                let from = next.fetch_add(BATCH as u64, Ordering::Relaxed) as usize;
                if from >= jobs {
                    return;
                }
                let batch = (from..(from + BATCH).min(jobs)).map(job);
                client.enqueue_many(batch).await.expect("enqueued");
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller.expect("a caller");
    }
}

/// CPU seconds of the server's processes, those that ended included, and of this one.
fn cpu(server: &Server) -> f64 {
    server.cpu().as_secs_f64() + cpu_time().as_secs_f64()
}

async fn depth(server: &Server, depth: usize, jobs: usize, rounds: usize) {
    let short = client(server, "short").await;
    let long = client(server, "long").await;
    enqueue(&short, 1_000).await;
    enqueue(&long, depth).await;
    let db = server.client().await;
    db.batch_execute("VACUUM ANALYZE").await.expect("vacuum");
    let mut costs: [Vec<f64>; 2] = Default::default();
    for _ in 0..rounds {
        for (client, costs) in [&short, &long].into_iter().zip(&mut costs) {
            let before = cpu(server);
            enqueue(client, jobs).await;
            take(client, jobs).await;
            costs.push((cpu(server) - before) * 1e6 / jobs as f64);
        }
    }
    let ratio = median(
        costs[1]
            .iter()
            .zip(&costs[0])
            .map(|(long, short)| long / short),
    );
    let [short, long] = costs.map(median);
    println!(
        "depth   {depth} queued: {long:.1} µs CPU a job, 1000: {short:.1}, ratio {ratio:.2} (aim 1.1)"
    );
}

/// One worker takes so many jobs, and leaves the others.
async fn take(client: &Client, jobs: usize) {
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let handler = move |_: common::Numbered, _: Context| {
        count.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Failure>(()) }
    };
    let until = async {
        while taken.load(Ordering::Relaxed) < jobs as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let worker = client.worker().handle(handler).slots(SLOTS);
    worker.run_until(until).await.expect("a worker");
}

#[derive(Serialize, Deserialize)]
struct Timed {
    sent: u64,
}

impl Job for Timed {
    const KIND: &'static str = "timed";
}

async fn waits(server: &Server, jobs: usize) {
    // Two stores: what wakes the worker is the server's word, as between two machines.
    let (here, there) = (client(server, "wait").await, client(server, "wait").await);
    let start = Instant::now();
    let waits: Arc<std::sync::Mutex<Vec<f64>>> = Arc::default();
    let seen = Arc::clone(&waits);
    let handler = move |job: Timed, _: Context| {
        let took = start.elapsed().as_micros() as u64 - job.sent;
        seen.lock().expect("no panics").push(took as f64 / 1e3);
        async { Ok::<_, Failure>(()) }
    };
    let until = async {
        for _ in 0..jobs {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let sent = start.elapsed().as_micros() as u64;
            let job = NewJob::of(&Timed { sent }).expect("a job");
            here.enqueue_many(vec![job]).await.expect("enqueued");
        }
        while waits.lock().expect("no panics").len() < jobs {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let worker = there.worker().handle(handler).slots(SLOTS);
    worker.run_until(until).await.expect("a worker");
    let mut waits = waits.lock().expect("no panics").clone();
    waits.sort_by(f64::total_cmp);
    let at = |part: usize| waits[waits.len() * part / 100];
    println!(
        "wait    p50 {:.2} ms (aim 5), p99 {:.2} ms, {jobs} jobs",
        at(50),
        at(99)
    );
}

async fn size(server: &Server, through: usize) {
    let ours = client(server, "size").await;
    let db = server.client().await;
    let sql = "SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c
               JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = 'leasehold' AND c.relkind = 'r'";
    let mut sizes = Vec::new();
    let part = through / 10;
    for _ in 0..10 {
        // Jobs come and go at once, as in a service.
        let (feeding, taking) = (ours.clone(), take(&ours, part));
        tokio::join!(enqueue_beside(&feeding, part), taking);
        let row = db.query_typed_one(sql, &[]).await.expect("a size");
        let bytes: i64 = row.get(0);
        sizes.push(bytes as f64 / f64::from(1 << 20));
    }
    let each: Vec<String> = sizes.iter().map(|size| format!("{size:.0}")).collect();
    println!(
        "size    MiB after each tenth of {through} jobs: {}",
        each.join(" ")
    );
}

/// A server, and a transaction that stays open there.
struct Held {
    arm: &'static str,
    client: Client,
    open: Option<tokio_postgres::Client>,
    _server: Server,
    done: usize,
}

impl Held {
    async fn new(arm: &'static str, kind: &str) -> Self {
        let server = Server::start(&["max_connections=400"]);
        let ours = client(&server, &format!("held-{kind}")).await;
        let mut open = None;
        if arm != "none" {
            let db = server.client().await;
            db.batch_execute("CREATE DATABASE another")
                .await
                .expect("a database");
            let mut config = server.config();
            if arm == "another" {
                config.dbname("another");
            }
            let (db, connection) = config
                .connect(tokio_postgres::NoTls)
                .await
                .expect("a connection");
            tokio::spawn(connection);
            let write = "CREATE TABLE held (n int); BEGIN; INSERT INTO held VALUES (1)";
            db.batch_execute(write).await.expect("a transaction");
            open = Some(db);
        }
        Self {
            arm,
            client: ours,
            open,
            _server: server,
            done: 0,
        }
    }

    /// Jobs come and go at once, as in a service. Returns how many a second are enqueued, claimed
    /// and settled: a worker that only ran them would leave the settlements to the next.
    async fn rate(&mut self, jobs: usize, is_keyed: bool) -> f64 {
        let (from, till) = (self.done, self.done + jobs);
        self.done = till;
        let feeding = async {
            let next = Arc::new(AtomicU64::new(from as u64));
            let mut callers = tokio::task::JoinSet::new();
            for _ in 0..8 {
                let (client, next) = (self.client.clone(), Arc::clone(&next));
                callers.spawn(async move {
                    loop {
                        let from = next.fetch_add(BATCH as u64, Ordering::Relaxed) as usize;
                        if from >= till {
                            return;
                        }
                        let jobs = (from..(from + BATCH).min(till))
                            .map(|n| if is_keyed { keyed(n) } else { job(n) });
                        client.enqueue_many(jobs).await.expect("enqueued");
                    }
                });
            }
            while let Some(caller) = callers.join_next().await {
                caller.expect("a caller");
            }
        };
        let handler = |_: common::Numbered, _: Context| async { Ok::<_, Failure>(()) };
        let settled = async {
            feeding.await;
            while self.client.ledger().await.expect("a ledger").completed < till as u64 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let worker = self.client.worker().handle(handler).slots(SLOTS);
        let start = Instant::now();
        worker.run_until(settled).await.expect("a worker");
        let rate = jobs as f64 / start.elapsed().as_secs_f64();
        if let Some(open) = &self.open {
            let alive = open.query_typed_one("SELECT count(*) FROM held", &[]).await;
            assert_eq!(alive.expect("it is open").get::<_, i64>(0), 1);
        }
        rate
    }
}

/// With a key of each sort, and kept for a moment.
fn keyed(n: usize) -> NewJob {
    let keyed = job(n).unique(format!("u{n}")).expect("a key");
    let keyed = keyed.exclusive(format!("e{n}")).expect("a key");
    keyed.retention(Duration::from_secs(1))
}

async fn held(before: usize, jobs: usize, rounds: usize) {
    let only = std::env::var("LEASEHOLD_BENCH_ONLY").unwrap_or_default();
    for (kind, is_keyed) in [("plain", false), ("keyed", true)] {
        if !only.is_empty() && only != kind {
            continue;
        }
        let mut sides = Vec::new();
        for arm in ["none", "same", "another"] {
            let mut side = Held::new(arm, kind).await;
            for _ in 0..before.div_ceil(jobs) {
                side.rate(jobs, is_keyed).await;
            }
            sides.push((side, Vec::new()));
        }
        for _ in 0..rounds {
            for (side, rates) in &mut sides {
                rates.push(side.rate(jobs, is_keyed).await);
            }
        }
        let alone = sides[0].1.clone();
        for (side, rates) in sides {
            let ratios = rates.iter().zip(&alone).map(|(rate, alone)| rate / alone);
            println!(
                "held    {kind}, {before} jobs before, open transaction in {:>7} database: {:>6.0} jobs/s, ratio {:.2} (aim 0.7)",
                side.arm,
                median(rates.iter().copied()),
                median(ratios),
            );
        }
    }
}

/// Claims of one queue go one after the other: what that costs many workers.
async fn side_by_side(server: &Server, jobs: usize, most: usize) {
    for workers in [1, most] {
        for queues in [1, most] {
            let namespace = format!("beside-{workers}-{queues}");
            let feeding = client(server, &namespace).await;
            let mut clients = Vec::new();
            for _ in 0..workers {
                clients.push(client(server, &namespace).await);
            }
            for at in 0..queues {
                for from in (0..jobs / queues).step_by(1_000) {
                    let batch = (from..from + 1_000).map(|n| {
                        let mut job = job(n);
                        job.queue = format!("queue-{at}").parse().expect("a name");
                        job
                    });
                    feeding.enqueue_many(batch).await.expect("enqueued");
                }
            }
            let start = Instant::now();
            let mut running = tokio::task::JoinSet::new();
            let taken = Arc::new(AtomicU64::new(0));
            for (at, client) in clients.into_iter().enumerate() {
                let (count, taken) = (Arc::clone(&taken), Arc::clone(&taken));
                running.spawn(async move {
                    let handler = move |_: common::Numbered, _: Context| {
                        count.fetch_add(1, Ordering::Relaxed);
                        async { Ok::<_, Failure>(()) }
                    };
                    let until = async {
                        while taken.load(Ordering::Relaxed) < jobs as u64 {
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                    };
                    // With one queue each there is nothing to wait for.
                    let own = (0..queues).filter(|q| queues < workers || q % workers == at);
                    let own: Vec<_> = own.map(|queue| format!("queue-{queue}")).collect();
                    let worker = client.worker().slots(SLOTS);
                    let worker = worker.handle_in(&own[0], handler);
                    let worker = own.iter().fold(worker, leasehold::Worker::queue);
                    worker.run_until(until).await.expect("a worker");
                });
            }
            while let Some(worker) = running.join_next().await {
                worker.expect("a worker");
            }
            let rate = jobs as f64 / start.elapsed().as_secs_f64();
            println!("beside  {workers} workers, {queues} queues: {rate:>9.0} jobs/s");
        }
    }
}

fn main() {
    let jobs = setting("JOBS", 50_000, 5_000);
    let rounds = setting("ROUNDS", 9, 1);
    let long = setting("DEPTH", 1_000_000, 20_000);
    let through = setting("THROUGH", 200_000, 20_000);
    let claimers = setting("CLAIMERS", 8, 2);
    let server = Server::start(&["max_connections=400"]);
    let parts = std::env::var("LEASEHOLD_BENCH_PARTS");
    let parts = parts.unwrap_or_else(|_| "speed,depth,wait,beside,size,held".into());
    let runs = |part: &str| parts.split(',').any(|named| named == part);
    common::runtime().block_on(async {
        if runs("speed") {
            speed(&server, jobs, rounds).await;
        }
        if runs("depth") {
            depth(&server, long, jobs, rounds).await;
        }
        if runs("wait") {
            waits(&server, setting("WAITS", 500, 50)).await;
        }
        if runs("beside") {
            side_by_side(&server, jobs, claimers).await;
        }
        if runs("size") {
            size(&server, through).await;
        }
        if runs("held") {
            held(setting("HELD", 1_000_000, 5_000), jobs, rounds).await;
        }
    });
}
