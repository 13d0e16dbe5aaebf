//! Effect, checkpoint and settlement in the handler's own transaction.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::inspect::Ledger;
use leasehold::job::JobState;
use leasehold::observe::Event;
use leasehold::store::MemoryStore;
use leasehold::store::{ControlCommand, LeaseSelect, SqliteStore};
use leasehold::{Client, Context, ErrorKind, Failure, NewJob};
use leasehold_support::proxy::{Mode, Proxy, Speech};
use rusqlite::{Connection, DropBehavior};
use tempfile::TempDir;
use tokio_postgres::NoTls;

use crate::assert_completed_in_doubt;
use crate::paying::{Pay, run};
use crate::postgres_server::Server;

struct World {
    client: Client,
    renewals: Arc<AtomicUsize>,
    path: PathBuf,
    _dir: TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("jobs.db");
        let client = Client::new(Arc::new(SqliteStore::open(&path).unwrap()));
        let renewals = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&renewals);
        let client = client.observer(move |event: &Event<'_>| {
            if let Event::Renewed { .. } = event {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        let sql = "CREATE TABLE paid (n INTEGER NOT NULL, run INTEGER NOT NULL)";
        connect(&path).execute_batch(sql).unwrap();
        Self {
            client,
            renewals,
            path,
            _dir: dir,
        }
    }

    /// Runs the handler until the ledger says so. The handler gets the number of its run.
    async fn run<F, Fut>(&self, handler: F, enough: impl Fn(&Ledger) -> bool + Sync) -> Ledger
    where
        F: Fn(Connection, Context, usize) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send,
    {
        let path = self.path.clone();
        let handler = move |_: Pay, ctx: Context, number| handler(connect(&path), ctx, number);
        run(&self.client, 2, handler, enough).await
    }

    fn paid(&self) -> i64 {
        let count = "SELECT count(*) FROM paid";
        let db = connect(&self.path);
        db.query_row(count, [], |row| row.get(0)).unwrap()
    }
}

fn connect(path: &Path) -> Connection {
    let db = Connection::open(path).unwrap();
    db.busy_timeout(Duration::from_secs(60)).unwrap();
    db
}

fn pay(db: &Connection, run: usize) -> rusqlite::Result<usize> {
    db.execute("INSERT INTO paid (n, run) VALUES (1, ?1)", [run as i64])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_committed_completion_needs_no_other_settlement_and_no_renewal_takes_it_for_lost() {
    let world = World::new();
    let jobs = vec![NewJob::of(&Pay::default()).unwrap(); 2];
    let jobs = world.client.enqueue_many(jobs).await.unwrap();
    let renewals = Arc::clone(&world.renewals);
    let handler = move |mut db: Connection, ctx: Context, run: usize| {
        let renewals = Arc::clone(&renewals);
        async move {
            if run == 0 {
                let tx = db.transaction()?;
                pay(&tx, run)?;
                ctx.save_checkpoint_in(&tx, &"half way")?;
                ctx.set_result(&42)?;
                ctx.complete_in(tx)?;
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
    assert_eq!(world.paid(), 1);
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
async fn a_committed_completion_leaves_nothing_to_renew_and_nothing_to_settle() {
    let mut world = World::new();
    let renewed = Arc::<Mutex<Vec<usize>>>::default();
    let seen = Arc::clone(&renewed);
    world.client = world.client.clone().observer(move |event: &Event<'_>| {
        if let Event::Renewed { leases, .. } = event {
            seen.lock().unwrap().push(*leases);
        }
    });
    world.client.enqueue(&Pay::default()).await.unwrap();
    let seen = Arc::clone(&renewed);
    let handler = move |mut db: Connection, ctx: Context, run: usize| {
        let renewed = Arc::clone(&seen);
        async move {
            if run == 0 {
                let tx = db.transaction()?;
                pay(&tx, run)?;
                ctx.enqueue_in(&tx, &Pay::default())?;
                return ctx.complete_in(tx);
            }
            // The next job is claimed after the commit. The second renewal from here is long after
            // the first handler's end.
            let before = renewed.lock().unwrap().len();
            while renewed.lock().unwrap().len() < before + 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(())
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 2).await;
    assert_eq!(renewed.lock().unwrap().last(), Some(&1), "leases renewed");
    assert_eq!((ledger.granted, ledger.retried, ledger.fenced), (2, 0, 0));
    assert!(ledger.balances(), "{ledger:?}");
    assert_eq!(world.paid(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_fails_after_its_commit_has_completed_its_job() {
    let world = World::new();
    world.client.enqueue(&Pay::default()).await.unwrap();
    let handler = |mut db: Connection, ctx: Context, run: usize| async move {
        let tx = db.transaction()?;
        pay(&tx, run)?;
        ctx.complete_in(tx)?;
        Err(Failure::from("too late"))
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 1).await;
    assert_eq!((ledger.granted, ledger.retried, ledger.fenced), (1, 0, 0));
    assert_eq!(world.paid(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_is_not_committed_has_done_nothing() {
    let world = World::new();
    world.client.enqueue(&Pay::default()).await.unwrap();
    let handler = |mut db: Connection, ctx: Context, run: usize| async move {
        // A commit that fails: the constraint is looked at only then.
        db.execute_batch(
            "PRAGMA foreign_keys = ON; CREATE TABLE IF NOT EXISTS a (id INTEGER PRIMARY KEY);
             CREATE TABLE IF NOT EXISTS b (a REFERENCES a DEFERRABLE INITIALLY DEFERRED);",
        )?;
        let tx = db.transaction()?;
        pay(&tx, run)?;
        match run {
            0 => {
                tx.execute("INSERT INTO b VALUES (1)", [])?;
                ctx.complete_in(tx)
            }
            1 => {
                ctx.save_checkpoint_in(&tx, &1)?;
                ctx.enqueue_in(&tx, &Pay::default())?;
                drop(tx);
                Err(Failure::from("changed its mind"))
            }
            _ => {
                assert!(ctx.saved_checkpoint().is_none());
                ctx.complete_in(tx)
            }
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 1).await;
    let ends = (ledger.enqueued, ledger.granted, ledger.retried);
    assert_eq!((ends, ledger.fenced), ((1, 3, 2), 0));
    assert_eq!(world.paid(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_owners_whole_transaction_is_rolled_back() {
    let world = World::new();
    let id = world.client.enqueue(&Pay::default()).await.unwrap().id();
    let client = world.client.clone();
    let handler = move |mut db: Connection, ctx: Context, run: usize| {
        let client = client.clone();
        async move {
            if run == 0 {
                let revoke = ControlCommand::Revoke(LeaseSelect::Job(id));
                client
                    .operator("test")
                    .because("stale")
                    .command(revoke)
                    .await?;
            }
            let mut tx = db.transaction()?;
            // Even if the caller would have it committed.
            tx.set_drop_behavior(DropBehavior::Commit);
            pay(&tx, run)?;
            let completed = ctx.complete_in(tx);
            assert_eq!(completed.as_ref().is_err_and(Failure::is_lost), run == 0);
            completed
        }
    };
    let ledger = world.run(handler, |ledger| ledger.completed == 1).await;
    assert_eq!((ledger.granted, ledger.revoked, ledger.retried), (2, 1, 0));
    assert_eq!(world.paid(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_are_enqueued_if_the_transaction_commits() {
    let world = World::new();
    let mut db = connect(&world.path);
    let jobs = || vec![NewJob::of(&Pay::default()).unwrap().unique("one").unwrap()];
    let tx = db.transaction().unwrap();
    world.client.enqueue_many_in(&tx, jobs()).unwrap();
    tx.rollback().unwrap();
    let tx = db.transaction().unwrap();
    let first = world.client.enqueue_many_in(&tx, jobs()).unwrap()[0].id();
    let again = world.client.enqueue_many_in(&tx, jobs()).unwrap()[0];
    assert_eq!(again, leasehold::store::Enqueued::Duplicate(first));
    tx.commit().unwrap();
    assert_eq!(world.client.ledger().await.unwrap().enqueued, 1);
    // One job that waits for a worker, and one that a sleeping worker is woken for.
    let path = world.path.clone();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        let client = Client::new(Arc::new(SqliteStore::open(&path).unwrap()));
        let mut db = connect(&path);
        let tx = db.transaction().unwrap();
        let job = NewJob::of(&Pay::default()).unwrap();
        client.enqueue_many_in(&tx, vec![job]).unwrap();
        tx.commit().unwrap();
    });
    let handler = |_: Connection, _: Context, _: usize| async { Ok(()) };
    let ledger = world.run(handler, |ledger| ledger.completed == 2).await;
    assert_eq!((ledger.enqueued, ledger.completed), (2, 2));
    late.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_of_another_file_or_another_store_is_refused() {
    let world = World::new();
    let other = World::new();
    let job = || vec![NewJob::of(&Pay::default()).unwrap()];
    let mut db = connect(&other.path);
    let tx = db.transaction().unwrap();
    let error = world.client.enqueue_many_in(&tx, job()).unwrap_err();
    assert_eq!(error.field(), Some("transaction"), "{error}");
    let memory = Client::new(Arc::new(MemoryStore::new()));
    let error = memory.enqueue_many_in(&tx, job()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// The server commits and its answer is lost. What the worker settles then is refused, and that
/// says nothing of a stale holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_commit_whose_answer_is_lost_is_in_doubt_and_no_stale_holders() {
    let server = Arc::new(Server::start(&["fsync=off"]));
    let proxy = Arc::new(Proxy::speaking(Speech::Postgres, server.port()).await);
    let client = Client::open(&server.url()).await.unwrap();
    // A commit that takes long enough to lose its answer, and no other.
    let slow = "CREATE TABLE slow (n int);
        CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER nap AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION nap()";
    server.client().await.batch_execute(slow).await.unwrap();
    client.enqueue(&Pay { n: 1 }).await.unwrap();
    let (watched, way) = (Arc::clone(&server), Arc::clone(&proxy));
    let handler = move |_: Pay, ctx: Context| {
        let (server, proxy) = (Arc::clone(&watched), Arc::clone(&way));
        async move {
            let url = format!(
                "postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable",
                proxy.port()
            );
            let (mut db, connection) = tokio_postgres::connect(&url, NoTls).await?;
            tokio::spawn(connection);
            let tx = db.transaction().await?;
            tx.execute("INSERT INTO slow VALUES (1)", &[]).await?;
            let watch = server.client().await;
            let commits = async |count: i64| {
                let asked = "SELECT count(*) FROM pg_stat_activity \
                             WHERE state = 'active' AND query = 'COMMIT'";
                while watch.query_one(asked, &[]).await.unwrap().get::<_, i64>(0) != count {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let cut = async {
                commits(1).await;
                proxy.set(Mode::DropReplies);
                commits(0).await;
                proxy.set(Mode::Reset);
            };
            let (completed, ()) = tokio::join!(ctx.complete_in(tx), cut);
            assert!(completed.as_ref().is_err_and(|failure| !failure.is_lost()));
            completed
        }
    };
    assert_completed_in_doubt(&client, client.worker().handle(handler)).await;
}
