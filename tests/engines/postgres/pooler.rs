//! Behind `PgBouncer` in transaction mode, and with nobody to listen.

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::job::{JobOptions, QueueName};
use leasehold::store::PostgresStore;
use leasehold::{Client, Context, Failure, Job, NewJob, RetryPolicy, Store};
use serde::{Deserialize, Serialize};

use crate::postgres::Caller;
use crate::postgres::public::one;
use crate::postgres::server::{Server, command, free_port, own, shared};

const JOBS: usize = 300;

#[derive(Serialize, Deserialize)]
struct Pay;

impl Job for Pay {
    const KIND: &'static str = "pay";

    fn options(&self) -> JobOptions {
        let mut options = JobOptions::default();
        options.runs.max_failures = Some(1_000);
        options
    }
}

/// A pooler in front of a server, with fewer connections than it has clients.
pub(super) struct Pooler {
    process: Child,
    port: u16,
}

impl Pooler {
    pub(super) async fn start(server: &Server) -> Self {
        let port = free_port();
        let config = server.config();
        let (settings, users) = (server.dir().join("pool.ini"), server.dir().join("users"));
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {}\n\
             pool_mode = transaction\ndefault_pool_size = 3\nmax_client_conn = 100\n",
            config.get_ports()[0],
            users.display(),
        );
        std::fs::write(&settings, text).unwrap();
        std::fs::write(&users, "\"postgres\" \"\"\n").unwrap();
        for file in [&settings, &users] {
            own(file);
        }
        // Where it is installed is not on everybody's path.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
        let program = places
            .map(|place| place.join("pgbouncer"))
            .find(|program| program.is_file())
            .expect("PgBouncer is not installed here: ./tests/run installs it");
        let process = command(&program)
            .arg("-q")
            .arg(&settings)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut pooler = Self { process, port };
        let start = Instant::now();
        while tokio::net::TcpStream::connect(("127.0.0.1", port))
            .await
            .is_err()
        {
            assert!(
                pooler.process.try_wait().unwrap().is_none(),
                "PgBouncer ended"
            );
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "PgBouncer does not start"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        pooler
    }

    pub(super) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub(super) fn config(&self, server: &Server) -> tokio_postgres::Config {
        let url = self.url();
        assert_ne!(url, server.url());
        url.parse().unwrap()
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn pay(config: tokio_postgres::Config, ctx: Context) -> Result<(), Failure> {
    let (mut db, connection) = config.connect(tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    let tx = db.transaction().await?;
    let id = ctx.job_id().to_string();
    let effect = "INSERT INTO pooled_effects VALUES ($1)";
    tx.query_typed(effect, &[(&id, tokio_postgres::types::Type::TEXT)])
        .await?;
    ctx.complete_in(tx).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql and pgbouncer: ./tests/run"]
async fn everything_works_behind_a_pooler_in_transaction_mode() {
    let server = Server::start(&["fsync=off"]);
    let table = "CREATE TABLE pooled_effects (job text)";
    server.client().await.batch_execute(table).await.unwrap();
    let pooler = Pooler::start(&server).await;
    let config = pooler.config(&server);
    let options = Server::options();
    // Two processes' worth of connections, on three of the server's.
    let mut running = tokio::task::JoinSet::new();
    let store = PostgresStore::with(config.clone(), options.clone()).await;
    let client = Client::new(Arc::new(store.unwrap()));
    let over = tokio_util::sync::CancellationToken::new();
    for _ in 0..2 {
        let store = PostgresStore::with(config.clone(), options.clone()).await;
        let (client, config) = (Client::new(Arc::new(store.unwrap())), config.clone());
        let over = over.clone();
        running.spawn(async move {
            let handler = move |_: Pay, ctx: Context| pay(config.clone(), ctx);
            let worker = client.worker().handle(handler).slots(8);
            let worker = worker.retry(RetryPolicy::constant(Duration::from_millis(1)));
            worker.run_until(over.cancelled()).await.unwrap();
        });
    }
    for _ in 0..JOBS / 10 {
        let jobs = vec![NewJob::of(&Pay).unwrap(); 10];
        client.enqueue_many(jobs).await.unwrap();
    }
    let start = Instant::now();
    while client.ledger().await.unwrap().completed < JOBS as u64 {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "jobs are not done"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // An idle worker finds a job without being told.
    client.enqueue(&Pay).await.unwrap();
    while client.ledger().await.unwrap().completed < JOBS as u64 + 1 {
        assert!(start.elapsed() < Duration::from_secs(120), "nobody looks");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    over.cancel();
    while let Some(worker) = running.join_next().await {
        worker.unwrap();
    }
    let db = server.client().await;
    let count = "SELECT count(*), count(DISTINCT job) FROM pooled_effects";
    let row = db.query_one(count, &[]).await.unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i64>(1)),
        (JOBS as i64 + 1, JOBS as i64 + 1)
    );
    // Nothing of ours is left in the connections that others get next.
    let (behind, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..20 {
        let sql = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),
                          (SELECT count(*) FROM pg_prepared_statements)";
        let row = behind.query_typed_one(sql, &[]).await.unwrap();
        assert_eq!((row.get::<_, &str>(0), row.get::<_, &str>(1)), ("0", "0"));
        assert_eq!(row.get::<_, i64>(2), 0);
    }
}

/// Ends whoever stands still with a scope, as a successor does.
async fn open_fence(db: &tokio_postgres::Client, token: u64) -> Result<(), tokio_postgres::Error> {
    let open = format!("SELECT leasehold.open_fence('leasehold/default/n:till', {token})");
    db.batch_execute(&open).await
}

/// A pooler's connections go from client to client. A successor ends the one that stands still in
/// its scope now, and not whoever came to the same connection after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql and pgbouncer: ./tests/run"]
async fn the_next_client_of_a_connection_is_not_ended_for_the_last() {
    // Longer than a transaction must have stood still to be ended.
    const STILL: Duration = Duration::from_millis(1_300);
    let server = Server::start(&["fsync=off"]);
    let made = PostgresStore::with(server.config(), Server::options().migrate()).await;
    made.unwrap();
    let pooler = Pooler::start(&server).await;
    let through = async || {
        let (db, connection) = pooler
            .config(&server)
            .connect(tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(connection);
        db
    };
    let pid = async |db: &tokio_postgres::Client| one(db, "SELECT pg_backend_pid()").await.unwrap();
    let successor = server.client().await;

    // The first has gone on, and another client has its connection, in a transaction that stands
    // still.
    let first = through().await;
    first.batch_execute("BEGIN").await.unwrap();
    open_fence(&first, 1).await.unwrap();
    let its = pid(&first).await;
    first.batch_execute("COMMIT").await.unwrap();
    let other = through().await;
    let start = Instant::now();
    loop {
        other.batch_execute("BEGIN").await.unwrap();
        if pid(&other).await == its {
            break;
        }
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it never gets that connection"
        );
        other.batch_execute("ROLLBACK").await.unwrap();
    }
    tokio::time::sleep(STILL).await;
    open_fence(&successor, 2).await.unwrap();
    assert_eq!(pid(&other).await, its, "it was hit");

    // Control arm: by the number that the first had when it was there, the other is hit.
    let end = format!("SELECT pg_terminate_backend({its})");
    one(&successor, &end).await.unwrap();
    assert!(
        one(&other, "SELECT 1").await.is_err(),
        "this test cannot fail"
    );

    // And one that is still there is ended, behind the pooler as well.
    let late = through().await;
    late.batch_execute("BEGIN").await.unwrap();
    open_fence(&late, 3).await.unwrap();
    tokio::time::sleep(STILL).await;
    open_fence(&successor, 4).await.unwrap();
    assert!(
        one(&late, "SELECT 1").await.is_err(),
        "it stands still as before"
    );
}

/// The process that listens, by the server's number for it.
async fn listener(db: &tokio_postgres::Client, name: &str) -> Option<i32> {
    let sql = "SELECT a.pid FROM pg_stat_activity a JOIN pg_locks l USING (pid)
               WHERE l.locktype = 'advisory' AND a.application_name = $1 LIMIT 1";
    let row = db.query_opt(sql, &[&name]).await.unwrap();
    row.map(|row| row.get(0))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn whoever_listens_and_is_cut_off_listens_again() {
    let server = shared();
    let options = Server::options();
    let mut config = server.config();
    config.application_name("listens");
    let here = PostgresStore::with(config, options.clone()).await.unwrap();
    let there = PostgresStore::with(server.config(), options).await.unwrap();
    let mut there = Caller::new(there).await;
    let db = server.client().await;
    let woken = Arc::new(AtomicUsize::new(0));
    let queue = [QueueName::default()];
    let mut last = None;
    for round in 1..=3 {
        let waiting = tokio::spawn({
            let (here, queue, woken) = (here.clone(), queue.clone(), Arc::clone(&woken));
            async move {
                here.wait(&queue, false, Duration::from_secs(600))
                    .await
                    .unwrap();
                woken.fetch_add(1, Ordering::SeqCst);
            }
        });
        let pid = loop {
            match listener(&db, "listens").await {
                Some(pid) if last != Some(pid) => break pid,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        last = Some(pid);
        let cut = "SELECT pg_terminate_backend($1)";
        db.query(cut, &[&pid]).await.unwrap();
        // Whether or not anybody listens at this moment.
        there.enqueue(1).await;
        waiting.await.unwrap();
        assert_eq!(woken.load(Ordering::SeqCst), round);
        assert!(there.claim_one(Duration::from_secs(60)).await.is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn without_anybody_who_listens_a_sleeper_looks_by_itself() {
    let server = Server::start(&["fsync=off"]);
    let options = Server::options();
    let there = PostgresStore::with(server.config(), options.clone())
        .await
        .unwrap();
    let mut there = Caller::new(there).await;
    let db = server.client().await;
    // One connection for the calls, and none for listening.
    let role = "CREATE ROLE few LOGIN CONNECTION LIMIT 1; GRANT USAGE ON SCHEMA leasehold TO few;
                GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO few;
                GRANT ALL ON ALL SEQUENCES IN SCHEMA leasehold TO few";
    db.batch_execute(role).await.unwrap();
    let mut config = server.config();
    config.user("few");
    let options = options.connections(1).without_migrations();
    let here = PostgresStore::with(config, options).await.unwrap();
    let queue = [QueueName::default()];
    for _ in 0..3 {
        let waiting = tokio::spawn({
            let (here, queue) = (here.clone(), queue.clone());
            async move { here.wait(&queue, false, Duration::from_secs(600)).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        let start = Instant::now();
        there.enqueue(1).await;
        waiting.await.unwrap().unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "it slept on");
        assert!(there.claim_one(Duration::from_secs(60)).await.is_some());
    }
    let listens = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'few'";
    let connections: i64 = db.query_one(listens, &[]).await.unwrap().get(0);
    assert!(connections <= 1, "nobody was to listen");
}
