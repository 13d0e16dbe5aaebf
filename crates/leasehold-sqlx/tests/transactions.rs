//! The calls in transactions of sqlx, on a real server. `tests/beside/sqlx-0.8` runs the same with
//! sqlx 0.8; so text is leaked, which both versions take.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::inspect::Ledger;
use leasehold::store::{Enqueued, PostgresOptions};
use leasehold::{Client, Context, ErrorKind, Failure, Job, NewJob, RetryPolicy};
use leasehold_sqlx as _;
use leasehold_support::postgres::{Server, shared};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, PgConnection, PgPool, Row as _};

#[derive(Serialize, Deserialize)]
struct Pay {
    cents: i64,
}

impl Job for Pay {
    const KIND: &'static str = "pay";
}

struct World {
    client: Client,
    pool: PgPool,
    table: &'static str,
}

impl World {
    /// One URL for both, with settings of ours.
    async fn new(table: &'static str) -> Self {
        let url = format!("{}?namespace={table}&connect_timeout=30", shared().url());
        let client = Client::open(&url).await.unwrap();
        // What only tokio-postgres takes aside.
        let url = PostgresOptions::server_url(&url).replace("?connect_timeout=30", "");
        let pool = PgPool::connect(&url).await.unwrap();
        let world = Self {
            client,
            pool,
            table,
        };
        world
            .execute(format!("CREATE TABLE {table} (cents bigint)"))
            .await;
        world
    }

    async fn execute(&self, sql: String) {
        let sql = sqlx::raw_sql(&*sql.leak());
        sql.execute(&self.pool).await.unwrap();
    }

    async fn paid(&self) -> Vec<i64> {
        let sql = format!("SELECT cents FROM {} ORDER BY 1", self.table);
        let rows = sqlx::query(&*sql.leak()).fetch_all(&self.pool);
        rows.await.unwrap().iter().map(|row| row.get(0)).collect()
    }

    /// Runs the handler until the ledger says so. The handler gets the number of its run.
    async fn run<F, Fut>(&self, handler: F, enough: impl Fn(&Ledger) -> bool) -> Ledger
    where
        F: Fn(PgPool, Context, usize) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send,
    {
        let runs = Arc::new(AtomicUsize::new(0));
        let pool = self.pool.clone();
        let handler = move |_: Pay, ctx: Context| {
            let run = runs.fetch_add(1, Ordering::SeqCst);
            handler(pool.clone(), ctx, run)
        };
        let worker = self.client.worker().handle(handler);
        let worker = worker
            .retry(RetryPolicy::constant(Duration::from_millis(1)))
            .start()
            .unwrap();
        let ledger = loop {
            let ledger = self.client.ledger().await.unwrap();
            if enough(&ledger) {
                break ledger;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        worker.drain();
        worker.await.unwrap();
        ledger
    }
}

async fn pay(db: &mut PgConnection, table: &str, cents: i64) -> Result<(), sqlx::Error> {
    let sql = format!("INSERT INTO {table} VALUES ($1)");
    let insert = sqlx::query(&*sql.leak()).bind(cents);
    insert.execute(db).await.map(|_| ())
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_order_and_its_jobs_or_neither() {
    let world = World::new("orders").await;
    let client = &world.client;
    for commits in [false, true] {
        let mut tx = world.pool.begin().await.unwrap();
        pay(&mut tx, "orders", 1).await.unwrap();
        // Every way to have hold of it.
        client.enqueue_in(&mut tx, Pay { cents: 1 }).await.unwrap();
        client.enqueue_in(&mut *tx, Pay { cents: 2 }).await.unwrap();
        let jobs = [3, 4].map(|cents| NewJob::of(&Pay { cents }).unwrap().priority(0));
        let stored = client.enqueue_many_in(&mut tx, jobs).await.unwrap();
        assert!(matches!(stored[..], [Enqueued::New(_), Enqueued::New(_)]));
        if commits {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
    }
    let mut connection = world.pool.acquire().await.unwrap();
    sqlx::raw_sql("BEGIN")
        .execute(&mut *connection)
        .await
        .unwrap();
    let job = || {
        let job = NewJob::of(&Pay { cents: 5 }).unwrap().header("a", "b");
        job.unique("five").unwrap().exclusive("five").unwrap()
    };
    let first = client.enqueue_in(&mut connection, job()).await.unwrap();
    let again = client.enqueue_in(&mut *connection, job()).await.unwrap();
    assert_eq!(again, Enqueued::Duplicate(first.id()));
    sqlx::raw_sql("COMMIT")
        .execute(&mut *connection)
        .await
        .unwrap();
    assert_eq!(world.paid().await, [1]);
    assert_eq!(client.ledger().await.unwrap().enqueued, 5);
    let five = client.job(first.id()).await.unwrap().unwrap().job;
    assert_eq!(five.exclusive.as_ref().unwrap().as_str(), "five");
    assert_eq!(five.headers.len(), 1);
    let handler = |_: PgPool, _: Context, _| async { Ok(()) };
    world.run(handler, |ledger| ledger.completed == 5).await;
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_effect_and_the_end_of_the_job_or_neither() {
    let world = World::new("effects").await;
    world.client.enqueue(Pay { cents: 7 }).await.unwrap();
    let handler = |pool: PgPool, ctx: Context, run: usize| async move {
        if run > 2 {
            return Ok(()); // the job that the first one left behind
        }
        let mut tx = match run {
            1 => pool.begin().await?,
            _ => ctx.begin(&pool).await?,
        };
        if run == 1 {
            ctx.fence(&mut tx).await?;
        }
        pay(&mut tx, "effects", run as i64).await?;
        ctx.save_checkpoint_in(&mut tx, &run).await?;
        if run < 2 {
            return Err(Failure::from("changed its mind"));
        }
        assert!(ctx.saved_checkpoint().is_none(), "rolled back");
        ctx.enqueue_in(&mut tx, Pay { cents: 8 }).await?;
        ctx.complete_in(tx).await
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 2).await;
    assert_eq!((ledger.granted, ledger.retried), (4, 2));
    assert_eq!(world.paid().await, [2]);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_stale_owner_changes_nothing() {
    use leasehold::store::{ControlCommand, LeaseSelect};
    let world = World::new("stale").await;
    let id = world.client.enqueue(Pay { cents: 7 }).await.unwrap().id();
    let client = world.client.clone();
    let handler = move |pool: PgPool, ctx: Context, run: usize| {
        let client = client.clone();
        async move {
            let mut db = PgConnection::connect_with(&pool.connect_options()).await?;
            let mut tx = ctx.begin(&mut db).await?;
            if run < 2 {
                let revoke = ControlCommand::Revoke(LeaseSelect::Job(id));
                let operator = client.operator("test");
                operator.because("stale").command(revoke).await?;
            }
            pay(&mut tx, "stale", run as i64).await?;
            let done = match run {
                0 => ctx.save_checkpoint_in(&mut tx, &1).await,
                _ => ctx.complete_in(tx).await,
            };
            assert_eq!(done.as_ref().is_err_and(Failure::is_lost), run < 2);
            done
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 1).await;
    assert_eq!((ledger.granted, ledger.revoked), (3, 2));
    assert_eq!(world.paid().await, [2]);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_fence_reads_and_writes_as_the_transaction_does_and_has_its_limits() {
    let world = World::new("fenced").await;
    world.client.enqueue(Pay { cents: 7 }).await.unwrap();
    let handler = |pool: PgPool, ctx: Context, _: usize| async move {
        let mut tx = pool.begin().await?;
        {
            let mut fenced = ctx.fence(&mut tx).await?;
            let first = fenced.is_first("pay").await? && !fenced.is_first("pay").await?;
            pay(&mut fenced, "fenced", first.into()).await?;
        }
        let limits = "SELECT current_setting('idle_in_transaction_session_timeout'),
                             current_setting('statement_timeout') <> '0',
                             current_setting('lock_timeout') <> '0'";
        let limits: (String, bool, bool) = sqlx::query_as(limits).fetch_one(&mut *tx).await?;
        assert_eq!(limits, ("1min".into(), true, true));
        tx.commit().await?;
        let after: String = sqlx::query_scalar("SHOW lock_timeout")
            .fetch_one(&pool)
            .await?;
        assert_eq!(after, "0");
        Ok(())
    };
    world.run(handler, |ledger| ledger.completed == 1).await;
    assert_eq!(world.paid().await, [1]);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_wrong_is_said() {
    let world = World::new("wrong").await;
    world.execute("CREATE DATABASE elsewhere".into()).await;
    let url = shared().url().replace("/postgres", "/elsewhere");
    let mut db = PgConnection::connect(&url.replace("//elsewhere@", "//postgres@"))
        .await
        .unwrap();
    let mut tx = db.begin().await.unwrap();
    let error = world
        .client
        .enqueue_in(&mut tx, Pay { cents: 1 })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "no tables: {error}");
    drop(tx);
    let server = Server::start(&["fsync=off"]);
    let mut db = PgConnection::connect(&server.url()).await.unwrap();
    drop(server);
    let tx = db.begin().await;
    assert!(tx.is_err());
    let memory = Client::open("memory:").await.unwrap();
    let mut tx = world.pool.begin().await.unwrap();
    let error = memory
        .enqueue_in(&mut tx, Pay { cents: 1 })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
