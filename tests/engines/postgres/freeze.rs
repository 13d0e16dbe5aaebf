//! A process is frozen in the middle of a transaction: the server frees what it holds.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::Store;
use leasehold::inspect;
use leasehold::job::Namespace;
use leasehold::lease::Receipt;
use leasehold::store::{PostgresOptions, PostgresStore, SettleRequest};
use rustix::process::{Pid, Signal, kill_process};
use tokio_postgres::Config;

use crate::postgres::server::Server;
use crate::postgres::{Caller, answered, complete};

const ROLE: &str = "LEASEHOLD_TEST_POSTGRES_FROZEN";
const TERM: Duration = Duration::from_secs(600);
/// Only a server that never frees anything takes as long.
const PATIENCE: Duration = Duration::from_secs(120);

fn options() -> PostgresOptions {
    PostgresOptions::new().namespace(Namespace::new("frozen").unwrap())
}

/// Another process, killed when it goes.
struct Process(Child);

impl Process {
    fn start(role: &str, server: &Server) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "postgres::freeze::frozen_process", "--ignored"])
            .env(ROLE, format!("{role} {}", server.url()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Transactions of the frozen process that the server waits for.
async fn open(db: &tokio_postgres::Client, also: &str) -> i64 {
    let sql = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'frozen'
         AND state LIKE 'idle in transaction%' {also}"
    );
    db.query_one(&sql, &[]).await.unwrap().get(0)
}

async fn ended(db: &tokio_postgres::Client) {
    let start = Instant::now();
    while open(db, "").await > 0 {
        assert!(start.elapsed() < PATIENCE, "nobody ends it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn in_a_call_of_the_store() {
    let server = Server::start(&["fsync=off"]);
    let store = PostgresStore::with(server.config(), options())
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    let db = server.client().await;
    // A call of one statement cannot be frozen in its middle. One that begins a transaction can.
    let process = Process::start("calls", &server);
    // Until it is caught in a claim, which holds the row of the queue.
    let claims = "AND pid IN (SELECT pid FROM pg_locks WHERE mode = 'RowShareLock'
                  AND relation = 'leasehold.queue'::regclass)";
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < PATIENCE, "it is never in a claim");
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..20_000))).await;
        process.signal(Signal::STOP);
        // What it has sent is done by then, or is done again.
        tokio::time::sleep(Duration::from_millis(20)).await;
        if open(&db, claims).await > 0 {
            break;
        }
        process.signal(Signal::CONT);
    }
    // Whoever adds jobs does not notice. Whoever claims them waits, and not for ever.
    caller.enqueue(1).await;
    let lease = loop {
        if let Some(lease) = caller.claim_one(TERM).await {
            break lease;
        }
    };
    let request = SettleRequest {
        request: caller.request(),
        settlements: vec![complete(lease)],
    };
    assert!(answered(|| caller.store.settle(request.clone())).await[0].is_held());
    ended(&db).await;
    // It finds its connection closed, opens another, and goes on.
    let before = answered(|| inspect::ledger(&caller.store)).await.completed;
    process.signal(Signal::CONT);
    let start = Instant::now();
    while answered(|| inspect::ledger(&caller.store)).await.completed < before + 10 {
        assert!(start.elapsed() < PATIENCE, "it does not go on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(process);
    assert!(inspect::ledger(&caller.store).await.unwrap().balances());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn in_a_transaction_of_its_own() {
    let server = Server::start(&["fsync=off"]);
    let options = options().patience(Duration::from_millis(200));
    let store = PostgresStore::with(server.config(), options).await.unwrap();
    let mut caller = Caller::new(store).await;
    caller.enqueue(1).await;
    let held = caller.claim_one(TERM).await.unwrap();
    let db = server.client().await;
    let handed = "CREATE TABLE handed (receipt text); INSERT INTO handed VALUES ('";
    let handed = format!("{handed}{held}')");
    db.batch_execute(&handed).await.unwrap();
    let process = Process::start("settles", &server);
    while open(&db, "AND query LIKE '%settle_1%'").await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    process.signal(Signal::STOP);
    // The job is settled there, and not yet: the end of that transaction decides.
    ended(&db).await;
    let request = SettleRequest {
        request: caller.request(),
        settlements: vec![complete(held)],
    };
    let verdicts = answered(|| caller.store.settle(request.clone())).await;
    assert!(verdicts[0].is_held(), "what was frozen did not happen");
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(ledger.completed, 1);
}

/// Not a test: the process that the tests above freeze.
#[tokio::test]
#[ignore = "the process that other tests freeze"]
async fn frozen_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (role, url) = role.split_once(' ').unwrap();
    let mut config: Config = url.parse().unwrap();
    config.application_name("frozen");
    if role == "calls" {
        config.options("-c default_transaction_isolation=serializable");
    }
    let store = PostgresStore::with(config.clone(), options())
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    if role == "settles" {
        let (mut db, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let tx = db.transaction().await.unwrap();
        let row = tx.query_one("SELECT receipt FROM handed", &[]).await;
        let receipt: Receipt = row.unwrap().get::<_, String>(0).parse().unwrap();
        // Sooner than the store's own limit would have it, so that the test ends sooner.
        let limit = "SET LOCAL idle_in_transaction_session_timeout = '3s'";
        tx.batch_execute(limit).await.unwrap();
        let settled = caller.store.settle_in(&tx, &complete(receipt)).await;
        assert!(settled.unwrap().is_held());
        std::future::pending::<()>().await;
    }
    loop {
        caller = Caller::new(caller.store.clone()).await;
        for _ in 0..100 {
            caller.enqueue(1).await;
            let Some(lease) = caller.claim_one(TERM).await else {
                continue;
            };
            let request = SettleRequest {
                request: caller.request(),
                settlements: vec![complete(lease)],
            };
            answered(|| caller.store.settle(request.clone())).await;
        }
    }
}
