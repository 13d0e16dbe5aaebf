//! Calls of the store in a transaction of the caller's.

use std::time::Duration;

use leasehold::clock::SystemClock;
use leasehold::inspect;
use leasehold::lease::Verdict;
use leasehold::store::{ControlCommand, ControlRequest, SettleRequest};
use leasehold::{ErrorKind, Store as _};
use tokio_postgres::IsolationLevel;

use crate::postgres::server::shared;
use crate::postgres::{Caller, complete, job};

const TERM: Duration = Duration::from_secs(60);

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
async fn a_call_that_is_refused_before_it_is_sent_leaves_the_transaction_as_it_was() {
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
    let jobs = vec![job().unique("one").unwrap()];
    caller.store.enqueue_in(&tx, jobs.clone()).await.unwrap();
    // How long to wait for a lock is the caller's to say.
    let limit = tx.query_one("SHOW lock_timeout", &[]).await.unwrap();
    assert_eq!(limit.get::<_, String>(0), "0");
    let mut other = server.client().await;
    let second = other.transaction().await.unwrap();
    second
        .batch_execute("SET LOCAL lock_timeout = '50ms'")
        .await
        .unwrap();
    let refused = caller.store.enqueue_in(&second, jobs).await.unwrap_err();
    assert_eq!(refused.kind(), leasehold::ErrorKind::Contended);
    second.rollback().await.unwrap();
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

/// A stricter transaction sees a queue that was removed since it began. It cannot put a job there:
/// nobody would ever find it.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn no_job_is_put_into_a_queue_that_was_removed_meanwhile() {
    let server = shared();
    let mut db = server.client().await;
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        for is_removed in [true, false] {
            let mut caller = Caller::new(server.store(SystemClock).await).await;
            caller.enqueue(1).await;
            let held = caller.claim_one(TERM).await.unwrap();
            let settle = SettleRequest {
                request: caller.request(),
                settlements: vec![complete(held)],
            };
            caller.store.settle(settle).await.unwrap();
            let begin = db.build_transaction().isolation_level(level).start();
            let tx = begin.await.unwrap();
            tx.batch_execute("SELECT 1").await.unwrap();
            if is_removed {
                let remove = ControlRequest {
                    request: caller.request(),
                    actor: "ann".into(),
                    reason: "unused".into(),
                    command: ControlCommand::Remove(job().queue),
                };
                assert_eq!(caller.store.control(remove).await.unwrap().done, 1);
            }
            let stored = caller.store.enqueue_in(&tx, vec![job()]).await;
            if is_removed {
                assert_eq!(stored.unwrap_err().kind(), ErrorKind::Contended);
                tx.rollback().await.unwrap();
                continue;
            }
            // The control: where the queue is still there, the job is found, and claims go on
            // beside the transaction.
            stored.unwrap();
            caller.enqueue(1).await;
            assert!(caller.claim_one(TERM).await.is_some());
            tx.commit().await.unwrap();
            let held = caller.claim_one(TERM).await;
            assert!(held.is_some(), "{level:?}");
        }
    }
}
