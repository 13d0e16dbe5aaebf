//! Effect, checkpoint and settlement in the handler's own transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::clock::SystemClock;
use leasehold::inspect::Ledger;
use leasehold::job::JobState;
use leasehold::observe::Event;
use leasehold::store::MemoryStore;
use leasehold::store::{ControlCommand, Enqueued, LeaseSelect};
use leasehold::{Client, Context, ErrorKind, Failure, NewJob};
use tokio_postgres::GenericClient;

use crate::postgres::paying::{Pay, run};
use crate::postgres::server::{Server, shared};

/// A namespace and a table of its own, on the server that all share.
struct World {
    client: Client,
    renewals: Arc<AtomicUsize>,
    table: &'static str,
}

impl World {
    async fn new(table: &'static str) -> Self {
        let client = Client::new(Arc::new(shared().store(SystemClock).await));
        let renewals = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&renewals);
        let client = client.observer(move |event: &Event<'_>| {
            if let Event::Renewed { .. } = event {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        let db = shared().client().await;
        db.batch_execute(&format!("CREATE TABLE {table} (run BIGINT)"))
            .await
            .unwrap();
        Self {
            client,
            renewals,
            table,
        }
    }

    /// Runs the handler until the ledger says so. The handler gets the number of its run.
    async fn run<F, Fut>(&self, handler: F, enough: impl Fn(&Ledger) -> bool + Sync) -> Ledger
    where
        F: Fn(tokio_postgres::Client, Context, usize) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send,
    {
        let handler = move |_: Pay, ctx: Context, number| {
            let handler = handler.clone();
            async move { handler(shared().client().await, ctx, number).await }
        };
        run(&self.client, 2, handler, enough).await
    }

    async fn paid(&self) -> i64 {
        let count = format!("SELECT count(*) FROM {}", self.table);
        let db = shared().client().await;
        db.query_one(&count, &[]).await.unwrap().get(0)
    }
}

async fn pay(
    db: &impl GenericClient,
    table: &str,
    run: usize,
) -> Result<(), tokio_postgres::Error> {
    let run = run as i64;
    let sql = format!("INSERT INTO {table} (run) VALUES ($1)");
    db.execute(&sql, &[&run]).await.map(|_| ())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_committed_completion_needs_no_other_settlement_and_no_renewal_takes_it_for_lost() {
    let world = World::new("paid_once").await;
    let jobs = vec![NewJob::of(&Pay::default()).unwrap(); 2];
    let jobs = world.client.enqueue_many(jobs).await.unwrap();
    let renewals = Arc::clone(&world.renewals);
    let handler = move |mut db: tokio_postgres::Client, ctx: Context, run: usize| {
        let renewals = Arc::clone(&renewals);
        async move {
            if run == 0 {
                let tx = db.transaction().await?;
                pay(&tx, "paid_once", run).await?;
                ctx.save_checkpoint_in(&tx, &"half way").await?;
                ctx.set_result(&42)?;
                ctx.complete_in(tx).await?;
            }
            // The other lease of the grant is renewed while this handler goes on.
            let before = renewals.load(Ordering::SeqCst);
            while renewals.load(Ordering::SeqCst) == before {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(!ctx.is_cancelled());
            Ok(())
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 2).await;
    assert_eq!((ledger.granted, ledger.completed, ledger.fenced), (2, 2, 0));
    assert_eq!(world.paid().await, 1);
    let mut saved = 0;
    for job in jobs {
        let view = world.client.job(job.id()).await.unwrap().unwrap();
        assert_eq!(view.state, JobState::Completed);
        let checkpoint = view.job.checkpoint.as_ref();
        if checkpoint.is_some_and(|checkpoint| checkpoint.bytes == "\"half way\"") {
            assert_eq!(view.job.result.as_ref().unwrap(), "42");
            saved += 1;
        }
    }
    assert_eq!(saved, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_not_committed_did_not_happen() {
    let world = World::new("paid_late").await;
    let sql = "CREATE TABLE late_a (a int PRIMARY KEY);
               CREATE TABLE late_b (a int REFERENCES late_a DEFERRABLE INITIALLY DEFERRED)";
    shared().client().await.batch_execute(sql).await.unwrap();
    world.client.enqueue(&Pay::default()).await.unwrap();
    let handler = |mut db: tokio_postgres::Client, ctx: Context, run: usize| async move {
        if run == 3 {
            // A transaction that was begun by a statement is one too.
            db.batch_execute("BEGIN").await?;
            pay(&db, "paid_late", run).await?;
            assert!(ctx.saved_checkpoint().is_none());
            return ctx.complete_in(&db).await;
        }
        let tx = db.transaction().await?;
        pay(&tx, "paid_late", run).await?;
        match run {
            // The commit itself is refused.
            0 => {
                tx.execute("INSERT INTO late_b VALUES (1)", &[]).await?;
                ctx.complete_in(tx).await
            }
            1 => {
                ctx.save_checkpoint_in(&tx, &1).await?;
                ctx.enqueue_in(&tx, &Pay::default()).await?;
                drop(tx);
                Err(Failure::from("changed its mind"))
            }
            // A call that never ends: the handler is dropped in the middle of it.
            _ => {
                let mut other = shared().client().await;
                let lock = other.transaction().await?;
                lock.batch_execute("LOCK TABLE leasehold.grants").await?;
                let completing = ctx.complete_in(tx);
                let late = tokio::time::timeout(Duration::from_millis(100), completing).await;
                assert!(late.is_err(), "it did not wait");
                Err(Failure::from("out of patience"))
            }
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 1).await;
    let ends = (ledger.enqueued, ledger.granted, ledger.retried);
    assert_eq!((ends, ledger.fenced), ((1, 4, 3), 0));
    assert_eq!(world.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_stale_owners_whole_transaction_is_rolled_back() {
    let world = World::new("paid_stale").await;
    let id = world.client.enqueue(&Pay::default()).await.unwrap().id();
    let client = world.client.clone();
    let handler = move |mut db: tokio_postgres::Client, ctx: Context, run: usize| {
        let client = client.clone();
        async move {
            if run < 2 {
                let revoke = ControlCommand::Revoke(LeaseSelect::Job(id));
                client
                    .operator("test")
                    .because("stale")
                    .command(revoke)
                    .await?;
            }
            let tx = db.transaction().await?;
            pay(&tx, "paid_stale", run).await?;
            let done = match run {
                0 => ctx.save_checkpoint_in(&tx, &1).await.map(|()| false),
                _ => ctx.complete_in(tx).await.map(|()| true),
            };
            assert_eq!(done.as_ref().is_err_and(Failure::is_lost), run < 2);
            done.map(|_| ())
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 1).await;
    assert_eq!((ledger.granted, ledger.revoked, ledger.retried), (3, 2, 0));
    assert_eq!(world.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn jobs_are_enqueued_if_the_transaction_commits() {
    let world = World::new("paid_for_order").await;
    let mut db = shared().client().await;
    let jobs = || vec![NewJob::of(&Pay::default()).unwrap().unique("one").unwrap()];
    let tx = db.transaction().await.unwrap();
    world.client.enqueue_many_in(&tx, jobs()).await.unwrap();
    tx.rollback().await.unwrap();
    let tx = db.transaction().await.unwrap();
    let first = world.client.enqueue_many_in(&tx, jobs()).await.unwrap()[0].id();
    let again = world.client.enqueue_many_in(&tx, jobs()).await.unwrap()[0];
    assert_eq!(again, Enqueued::Duplicate(first));
    tx.commit().await.unwrap();
    assert_eq!(world.client.ledger().await.unwrap().enqueued, 1);
    // A handler's own: with its completion, or not at all.
    let handler = |mut db: tokio_postgres::Client, ctx: Context, run: usize| async move {
        if run > 0 {
            return Ok(());
        }
        let tx = db.transaction().await?;
        ctx.enqueue_in(&tx, &Pay::default()).await?;
        ctx.complete_in(tx).await
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 2).await;
    assert_eq!((ledger.enqueued, ledger.granted), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_transaction_of_another_database_or_another_store_is_refused() {
    let world = World::new("paid_elsewhere").await;
    let job = || vec![NewJob::of(&Pay::default()).unwrap()];
    let admin = shared().client().await;
    admin.batch_execute("CREATE DATABASE other").await.unwrap();
    let mut config = shared().config();
    config.dbname("other");
    let (mut db, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let tx = db.transaction().await.unwrap();
    let error = world.client.enqueue_many_in(&tx, job()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "no tables: {error}");
    drop(tx);
    // The same tables, and yet another queue.
    let options = Server::options();
    let other = leasehold::store::PostgresStore::with(config, options).await;
    let other = Client::new(Arc::new(other.unwrap()));
    let tx = db.transaction().await.unwrap();
    other.enqueue_many_in(&tx, job()).await.unwrap();
    let error = world.client.enqueue_many_in(&tx, job()).await.unwrap_err();
    assert_eq!(error.field(), Some("transaction"), "{error}");
    tx.commit().await.unwrap();
    assert_eq!(other.ledger().await.unwrap().enqueued, 1);
    let tx = db.transaction().await.unwrap();
    let memory = Client::new(Arc::new(MemoryStore::new()));
    let error = memory.enqueue_many_in(&tx, job()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
