//! A schema with a name of its own: every call in the caller's transaction finds it.

use std::sync::Arc;
use std::time::Duration;

use leasehold::lease::Verdict;
use leasehold::store::{Checkpoint, Checkpointed, PostgresStore};
use leasehold::{Client, NewJob, Store as _};

use super::paying::{Pay, run};
use super::public::{connect, database, one};
use super::{Caller, complete, job, server};

const TERM: Duration = Duration::from_secs(60);

/// In a database in which there is no other.
async fn store(name: &str) -> (PostgresStore, tokio_postgres::Client) {
    let config = database(name).await;
    let port = server::shared().port();
    let url = format!("postgres://postgres@127.0.0.1:{port}/{name}?schema=jobs_2");
    let store = PostgresStore::open(&url).await.unwrap();
    (store, connect(&config).await)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_store_s_calls_take_part_in_a_transaction() {
    let (store, mut db) = store("schema_calls").await;
    let mut caller = Caller::new(store).await;
    let tx = db.transaction().await.unwrap();
    let two = vec![job(), job().exclusive("k").unwrap()];
    caller.store.enqueue_in(&tx, two).await.unwrap();
    tx.commit().await.unwrap();
    let held = caller.claim_one(TERM).await.unwrap();
    let tx = db.transaction().await.unwrap();
    let half = Checkpoint {
        receipt: held.clone(),
        seq: 1,
        bytes: "half".into(),
    };
    let saved = caller.store.checkpoint_in(&tx, &half).await.unwrap();
    assert!(matches!(saved, Checkpointed::Saved { .. }), "{saved:?}");
    let settlement = complete(held);
    let verdict = caller.store.settle_in(&tx, &settlement).await.unwrap();
    assert!(verdict.is_held());
    tx.commit().await.unwrap();
    let tx = db.transaction().await.unwrap();
    let verdict = caller.store.settle_in(&tx, &settlement).await.unwrap();
    assert_eq!(verdict, Verdict::Fenced);
    tx.commit().await.unwrap();
    let left = leasehold::inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((left.enqueued, left.completed, left.live), (2, 1, 0));
    assert_eq!(
        caller.store.namespace(),
        leasehold::job::Namespace::default()
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn so_do_a_handler_s() {
    let (store, db) = store("schema_handler").await;
    let config = {
        let mut config = server::shared().config();
        config.dbname("schema_handler");
        config
    };
    let client = Client::new(Arc::new(store));
    client
        .enqueue(NewJob::of(&Pay::default()).unwrap())
        .await
        .unwrap();
    db.batch_execute("CREATE TABLE paid (run bigint)")
        .await
        .unwrap();
    let handler = move |_: Pay, ctx: leasehold::Context, nth: usize| {
        let config = config.clone();
        async move {
            if nth > 0 {
                return Ok(());
            }
            let mut db = connect(&config).await;
            let tx = ctx.begin(&mut db).await?;
            let mut fenced = ctx.fence(&tx).await?;
            assert!(fenced.is_first("pay").await?);
            assert!(!fenced.is_first("pay").await?);
            fenced.execute("INSERT INTO paid VALUES (1)", &[]).await?;
            ctx.save_checkpoint_in(&tx, &1).await?;
            ctx.enqueue_in(&tx, &Pay::default()).await?;
            ctx.complete_in(tx).await
        }
    };
    let ledger = run(&client, 1, handler, |ledger| ledger.completed == 2).await;
    assert_eq!((ledger.granted, ledger.fenced), (2, 0));
    assert_eq!(one(&db, "SELECT count(*) FROM paid").await.unwrap(), "1");
    let marks = "SELECT count(*) FROM jobs_2.fence";
    assert_eq!(one(&db, marks).await.unwrap(), "1");
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'leasehold'";
    assert_eq!(one(&db, schemas).await.unwrap(), "0");
}
