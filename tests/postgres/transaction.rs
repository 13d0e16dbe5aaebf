//! The effect and the settlement in one transaction: both or neither, whoever is killed.

use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::clock::SystemClock;
use leasehold::inspect;
use leasehold::job::{JobState, Namespace};
use leasehold::store::{PostgresOptions, PostgresStore, Store};
use leasehold::{Receipt, Verdict};

use crate::server::{Server, shared};
use crate::{Caller, answered, complete, job};

const TERM: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(2);
const ROLE: &str = "LEASEHOLD_TEST_POSTGRES_WORKER";

fn kills(campaign: usize) -> usize {
    let long = std::env::var("LEASEHOLD_CAMPAIGN").is_ok_and(|value| value == "1");
    if long { campaign } else { 20 }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn jobs_are_there_if_and_when_the_transaction_commits() {
    let server = shared();
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    caller.store.enqueue_in(&tx, vec![job()]).await.unwrap();
    assert!(caller.claim_one(TERM).await.is_none(), "not committed");
    tx.rollback().await.unwrap();
    assert!(caller.claim_one(TERM).await.is_none(), "rolled back");

    let tx = db.transaction().await.unwrap();
    let keyed = job().exclusive("order-1").unwrap();
    let stored = caller.store.enqueue_in(&tx, vec![job(), keyed]).await;
    assert_eq!(stored.unwrap().len(), 2);
    tx.commit().await.unwrap();
    assert!(caller.claim_one(TERM).await.is_some());
    assert!(caller.claim_one(TERM).await.is_some(), "the job with a key");
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.enqueued, ledger.live), (2, 2));
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_refused_call_leaves_the_transaction_as_it_was() {
    let server = shared();
    let caller = Caller::new(server.store(SystemClock).await).await;
    let mut db = server.client().await;
    db.batch_execute("CREATE TABLE own_effect (n int)")
        .await
        .unwrap();
    let tx = db.transaction().await.unwrap();
    tx.execute("INSERT INTO own_effect VALUES (1)", &[])
        .await
        .unwrap();
    let big = leasehold::NewJob::raw(
        leasehold::job::QueueName::default(),
        leasehold::job::Kind::new("work").unwrap(),
        "x".repeat(300 * 1024),
    );
    let refused = caller.store.enqueue_in(&tx, vec![big]).await.unwrap_err();
    assert_eq!(refused.kind(), leasehold::ErrorKind::InvalidInput);
    tx.commit().await.unwrap();
    let rows = db.query("SELECT n FROM own_effect", &[]).await.unwrap();
    assert_eq!(rows.len(), 1);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_replaced_owner_is_refused_and_its_effect_rolled_back() {
    let server = shared();
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let mut db = server.client().await;
    db.batch_execute("CREATE TABLE zombie_effect (n int)")
        .await
        .unwrap();
    caller.enqueue(1).await;
    let old = caller.claim_one(Duration::from_millis(1)).await.unwrap();
    // The next claim expires the first and grants the job anew.
    let new = loop {
        if let Some(new) = caller.claim_one(TERM).await {
            break new;
        }
    };
    assert!(new.token() > old.token());
    let tx = db.transaction().await.unwrap();
    tx.execute("INSERT INTO zombie_effect VALUES (1)", &[])
        .await
        .unwrap();
    let verdict = caller.store.settle_in(&tx, &complete(old)).await.unwrap();
    assert_eq!(verdict, Verdict::Fenced);
    tx.rollback().await.unwrap();
    let tx = db.transaction().await.unwrap();
    tx.execute("INSERT INTO zombie_effect VALUES (2)", &[])
        .await
        .unwrap();
    let verdict = caller.store.settle_in(&tx, &complete(new)).await.unwrap();
    assert!(verdict.is_held());
    tx.commit().await.unwrap();
    let rows = db.query("SELECT n FROM zombie_effect", &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<i32>>(), [2]);
}

/// Works one job in a transaction. False: there was none. None: the server was gone.
async fn work(caller: &mut Caller, server: &Server) -> Option<bool> {
    let request = caller.claim_request(1, SHORT);
    let grants = caller.store.claim(request).await.ok()?.grants;
    let Some(grant) = grants.first() else {
        return Some(false);
    };
    settle(caller, server, grant.receipt(&grant.leases[0])).await
}

async fn settle(caller: &Caller, server: &Server, receipt: Receipt) -> Option<bool> {
    let (mut db, connection) = server.config().connect(tokio_postgres::NoTls).await.ok()?;
    tokio::spawn(connection);
    let tx = db.transaction().await.ok()?;
    let id = receipt.job().to_string();
    let effect = "INSERT INTO effects (job) VALUES ($1)";
    tx.execute(effect, &[&id]).await.ok()?;
    let verdict = caller.store.settle_in(&tx, &complete(receipt)).await.ok()?;
    if verdict.is_held() {
        tx.commit().await.ok()?;
    }
    Some(true)
}

/// Works until nothing is left, waiting for the leases of the dead, and asserts one effect per job.
async fn drained(caller: &mut Caller, server: &Server, jobs: usize) {
    loop {
        let _ = work(caller, server).await;
        let queues = answered(|| inspect::queues(&caller.store)).await;
        let counts = queues[0].counts;
        assert_eq!(counts.of(JobState::Dead), 0, "no job was to die");
        if counts.ready + counts.leased + counts.scheduled == 0 {
            assert!(queues[0].ledger.balances());
            break;
        }
    }
    let db = server.client().await;
    let rows = db
        .query("SELECT job, count(*) FROM effects GROUP BY job", &[])
        .await
        .unwrap();
    assert_eq!(rows.len(), jobs, "every job has an effect");
    for row in rows {
        assert_eq!(
            row.get::<_, i64>(1),
            1,
            "{}: more than once",
            row.get::<_, String>(0)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn every_effect_once_when_the_server_is_killed() {
    let mut server = Server::start(&["fsync=off"]);
    let db = server.client().await;
    db.batch_execute("CREATE TABLE effects (job text)")
        .await
        .unwrap();
    let store = PostgresStore::with(server.config(), Server::options())
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    let rounds = kills(200);
    let mut jobs = 0;
    for _ in 0..rounds {
        // A call that the last kill cut off is not repeated here: the caller starts a new session.
        caller = Caller::new(caller.store.clone()).await;
        caller.enqueue(3).await;
        jobs += 3;
        let until = tokio::time::sleep(Duration::from_micros(fastrand::u64(0..30_000)));
        tokio::select! {
            () = until => {}
            () = async { while work(&mut caller, &server).await == Some(true) {} } => {}
        }
        server.kill();
        server.launch();
    }
    caller = Caller::new(caller.store.clone()).await;
    drained(&mut caller, &server, jobs).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn every_effect_once_when_workers_are_killed() {
    let server = Server::start(&["fsync=off"]);
    let db = server.client().await;
    db.batch_execute("CREATE TABLE effects (job text)")
        .await
        .unwrap();
    let options = PostgresOptions::new().namespace(Namespace::new("killed").unwrap());
    let store = PostgresStore::with(server.config(), options).await.unwrap();
    let mut caller = Caller::new(store).await;
    let rounds = kills(200);
    let mut jobs = 0;
    for _ in 0..rounds {
        caller.enqueue(10).await;
        jobs += 10;
        let before = effects(&db).await;
        let mut worker = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "transaction::worker_process", "--ignored"])
            .env(ROLE, server.url())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // It is at work: from here on any moment will do.
        while effects(&db).await == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..10_000))).await;
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
    drained(&mut caller, &server, jobs).await;
}

async fn effects(db: &tokio_postgres::Client) -> i64 {
    let row = db.query_one("SELECT count(*) FROM effects", &[]).await;
    row.unwrap().get(0)
}

/// Not a test: the process that the test above kills.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "the process that another test kills"]
async fn worker_process() {
    let Ok(url) = std::env::var(ROLE) else { return };
    let store = PostgresStore::open(&format!("{url}?namespace=killed"))
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    let server = Server::elsewhere(&url);
    loop {
        let _ = work(&mut caller, &server).await;
    }
}
