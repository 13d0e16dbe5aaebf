//! The calls in transactions of diesel-async, on a real server.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel::sql_types::BigInt;
use diesel::{QueryableByName, sql_query};
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};
use leasehold::store::Enqueued;
use leasehold::{Client, Context, ErrorKind, Failure, Job, NewJob, RetryPolicy};
use leasehold_diesel as _;
use leasehold_support::postgres::Server;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Pay {
    cents: i64,
}

impl Job for Pay {
    const KIND: &'static str = "pay";
}

#[derive(QueryableByName)]
struct Paid {
    #[diesel(sql_type = BigInt)]
    cents: i64,
}

async fn connect(url: &str) -> AsyncPgConnection {
    AsyncPgConnection::establish(url).await.unwrap()
}

async fn pay(db: &mut AsyncPgConnection, cents: i64) -> Result<(), diesel::result::Error> {
    let insert = sql_query("INSERT INTO paid VALUES ($1)").bind::<BigInt, _>(cents);
    insert.execute(db).await.map(|_| ())
}

async fn charge(url: &str, ctx: &Context, run: usize) -> Result<(), Failure> {
    let mut db = connect(url).await;
    let tx = ctx.begin(&mut db).await?;
    pay(tx, run as i64).await?;
    if run < 3 {
        assert!(ctx.saved_checkpoint().is_none(), "rolled back");
        ctx.save_checkpoint_in(&mut *tx, &run).await?;
        let mut fenced = ctx.fence(&mut *tx).await?;
        assert!(fenced.is_first("pay").await?);
        assert!(!fenced.is_first("pay").await?);
        return Err(Failure::from("changed its mind"));
    }
    ctx.complete_in(tx).await
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_enqueued_and_done_in_a_transaction_is_there_if_it_commits() {
    let server = Server::start(&["fsync=off"]);
    let client = Client::open(&server.url()).await.unwrap();
    let mut db = connect(&server.url()).await;
    let table = "CREATE TABLE paid (cents bigint)";
    sql_query(table).execute(&mut db).await.unwrap();
    let job = || {
        let job = NewJob::of(&Pay { cents: 1 })
            .unwrap()
            .priority(0)
            .header("a", "b");
        job.unique("one").unwrap()
    };
    for commits in [false, true] {
        let done = db.transaction(async |tx| {
            let first = client.enqueue_in(&mut *tx, job()).await?;
            let again = client.enqueue_many_in(&mut *tx, [job()]).await?;
            assert_eq!(again, [Enqueued::Duplicate(first.id())]);
            client.enqueue_in(&mut *tx, Pay { cents: 2 }).await?;
            anyhow::ensure!(commits, "no");
            Ok(())
        });
        assert_eq!(done.await.is_ok(), commits);
    }
    assert_eq!(client.ledger().await.unwrap().enqueued, 2);

    let (runs, url) = (Arc::new(AtomicUsize::new(0)), server.url());
    let handler = move |_: Pay, ctx: Context| {
        let (run, url) = (runs.fetch_add(1, Ordering::SeqCst), url.clone());
        async move { charge(&url, &ctx, run).await }
    };
    let worker = client.worker().handle(handler).slots(1);
    let worker = worker.retry(RetryPolicy::constant(Duration::from_millis(1)));
    let worker = worker.start().unwrap();
    while client.ledger().await.unwrap().completed < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    worker.drain();
    worker.await.unwrap();
    let paid = sql_query("SELECT cents FROM paid ORDER BY 1").load::<Paid>(&mut db);
    let paid: Vec<i64> = paid.await.unwrap().iter().map(|paid| paid.cents).collect();
    assert_eq!(paid, [3, 4]);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_wrong_is_said() {
    let server = Server::start(&["fsync=off"]);
    let memory = Client::open("memory:").await.unwrap();
    let mut db = connect(&server.url()).await;
    let error = memory
        .enqueue_in(&mut db, Pay { cents: 1 })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let client = Client::open(&server.url()).await.unwrap();
    client.enqueue(Pay { cents: 1 }).await.unwrap();
    drop(server);
    let error = client
        .enqueue_in(&mut db, Pay { cents: 1 })
        .await
        .unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}
