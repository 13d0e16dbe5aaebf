//! Looking changes nothing, and programs of two versions work side by side.

use std::sync::Arc;
use std::time::Duration;

use leasehold::error::ErrorKind;
use leasehold::inspect::{LeaseFilter, Page};
use leasehold::job::{JobState, QueueName};
use leasehold::store::{PostgresOptions, PostgresStore, SettleRequest};
use leasehold::{Client, JobId, Store as _};

use super::public::{connect, database, one};
use super::{Caller, complete, job, server};

const MINUTE: Duration = Duration::from_secs(60);
const RELEASE: &str = include_str!("release_1.sql");

fn url(database: &str) -> String {
    let port = server::shared().port();
    format!("postgres://postgres@127.0.0.1:{port}/{database}")
}

async fn opened(database: &str) -> leasehold::Result<PostgresStore> {
    PostgresStore::open(&url(database)).await
}

/// Everything that a migration could leave behind.
const MADE: &str = "SELECT (SELECT count(*) FROM pg_class WHERE oid >= 16384)
    + (SELECT count(*) FROM pg_proc WHERE oid >= 16384) + (SELECT count(*) FROM pg_namespace WHERE oid >= 16384)";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn who_looks_at_an_empty_database_leaves_it_empty() {
    let db = connect(&database("looking_empty").await).await;
    let store = opened("looking_empty").await.unwrap();
    assert!(!store.is_there().await.unwrap());
    let client = Client::new(Arc::new(store));
    let queue = QueueName::default();
    assert_eq!(client.queues().await.unwrap(), []);
    assert!(client.job(JobId::generate()).await.unwrap().is_none());
    let jobs = client
        .jobs(queue.clone(), JobState::Ready, Page::first(9))
        .await;
    assert_eq!(jobs.unwrap().rows, []);
    let leases = client.leases(LeaseFilter::default(), Page::first(9)).await;
    assert_eq!(leases.unwrap().rows, []);
    assert_eq!(client.audit(Page::first(9)).await.unwrap().rows, []);
    assert_eq!(one(&db, MADE).await.unwrap(), "0");
    // The control: the first job is stored without more ado.
    client.enqueue(job()).await.unwrap();
    assert_ne!(one(&db, MADE).await.unwrap(), "0");
    assert_eq!(client.queues().await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn many_processes_may_write_first() {
    database("writing_first").await;
    let writers = (0..8).map(|_| {
        tokio::spawn(async {
            let client = Client::open(&url("writing_first")).await.unwrap();
            client.enqueue(job()).await.unwrap();
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let client = Client::open(&url("writing_first")).await.unwrap();
    assert_eq!(client.queues().await.unwrap()[0].counts.ready, 8);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn tables_that_nobody_may_make_are_asked_for() {
    let db = connect(&database("never_made").await).await;
    let url = format!("{}?migrate=false", url("never_made"));
    let error = PostgresStore::open(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("leasehold migrate"), "{error}");
    assert_eq!(one(&db, MADE).await.unwrap(), "0");
    // By hand, then.
    let text = PostgresStore::migrations("leasehold").unwrap();
    db.batch_execute(&text).await.unwrap();
    let store = PostgresStore::open(&url).await.unwrap();
    assert_eq!(Caller::new(store).await.enqueue(1).await.len(), 1);
}

/// A schema of an earlier version is left alone, and so is one of a later version that has dropped
/// what this program calls.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_program_works_only_with_a_schema_that_it_knows() {
    let db = connect(&database("two_versions").await).await;
    let text = PostgresStore::migrations("leasehold").unwrap();
    db.batch_execute(&text).await.unwrap();
    let before = one(&db, MADE).await.unwrap();
    for (version, oldest, kind, told) in [
        (0, 0, ErrorKind::Unsupported, "leasehold migrate"),
        (9, 9, ErrorKind::TooNew, "newer version of the program"),
    ] {
        let set = format!("UPDATE leasehold.meta SET version = {version}, oldest = {oldest}");
        db.batch_execute(&set).await.unwrap();
        let error = opened("two_versions").await.unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains(told), "{error}");
        assert_eq!(one(&db, MADE).await.unwrap(), before);
        let kept = one(&db, "SELECT version FROM leasehold.meta")
            .await
            .unwrap();
        assert_eq!(kept, version.to_string());
    }
}

/// Enqueues, claims and completes so many jobs.
async fn work(caller: &mut Caller, jobs: usize) {
    caller.enqueue(jobs).await;
    let mut done = 0;
    while done < jobs {
        for grant in caller.claim(jobs, MINUTE).await {
            let receipts = grant.leases.iter().map(|lease| grant.receipt(lease));
            let settlements: Vec<_> = receipts.map(complete).collect();
            done += settlements.len();
            let request = caller.request();
            let settle = SettleRequest {
                request,
                settlements,
            };
            let verdicts = caller.store.settle(settle).await.unwrap();
            assert!(
                verdicts.iter().all(|verdict| verdict.is_held()),
                "{verdicts:?}"
            );
        }
    }
}

/// The schema goes on to a next version, with more columns and functions, while workers of this
/// version are at work.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn workers_go_on_beside_the_next_version() {
    let db = connect(&database("next_version").await).await;
    let mut caller = Caller::new(opened("next_version").await.unwrap()).await;
    work(&mut caller, 3).await;
    caller.enqueue(1).await;
    let held = caller.claim_one(MINUTE).await.unwrap();
    db.batch_execute(
        "BEGIN;
         ALTER TABLE leasehold.job ADD COLUMN of_group text, ADD COLUMN held bigint NOT NULL DEFAULT 0;
         ALTER TABLE leasehold.head ADD COLUMN rate bigint;
         ALTER TABLE leasehold.grants ADD COLUMN units integer NOT NULL DEFAULT 1;
         CREATE FUNCTION leasehold.enqueue_2(jobs jsonb) RETURNS bigint LANGUAGE sql AS 'SELECT 2::bigint';
         UPDATE leasehold.meta SET version = version + 1, code = 'of the next';
         COMMIT;",
    )
    .await
    .unwrap();
    work(&mut caller, 3).await;
    let request = caller.request();
    let settlements = vec![complete(held)];
    let settle = SettleRequest {
        request,
        settlements,
    };
    let verdicts = caller.store.settle(settle).await.unwrap();
    assert!(verdicts[0].is_held(), "{verdicts:?}");
    // One that starts now finds a schema with which it can work, and leaves it as it is.
    let with = PostgresOptions::new().migrate();
    let mut config = server::shared().config();
    config.dbname("next_version");
    let late = PostgresStore::with(config, with).await.unwrap();
    work(&mut Caller::new(late).await, 3).await;
    let code = one(&db, "SELECT code FROM leasehold.meta").await.unwrap();
    assert_eq!(code, "of the next");
}

/// All functions once more under the next number, and the public ones call those: as in a database
/// whose schema has gone on. Workers of both kinds take jobs from one queue, and each job is taken
/// once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn workers_of_two_versions_share_a_queue() {
    const JOBS: usize = 200;
    let config = database("two_kinds").await;
    let db = connect(&config).await;
    let mut caller = Caller::new(opened("two_kinds").await.unwrap()).await;
    caller.enqueue(1).await;
    db.batch_execute(
        r"DO $$
          DECLARE text text;
          BEGIN
              SET LOCAL check_function_bodies = off;
              FOR text IN SELECT pg_get_functiondef(p.oid) FROM pg_proc p
                          WHERE p.pronamespace = 'leasehold'::regnamespace LOOP
                  EXECUTE regexp_replace(text, '\m(\w+)_1\M', '\1_2', 'g');
              END LOOP;
              UPDATE leasehold.meta SET version = version + 1, code = 'of the next';
          END $$",
    )
    .await
    .unwrap();
    let functions = "SELECT string_agg(prosrc, '') FROM pg_proc
                     WHERE pronamespace = 'leasehold'::regnamespace AND proname IN ('claim', 'claim_2', 'settle_2')";
    let text = one(&db, functions).await.unwrap();
    assert!(
        text.contains("leasehold.claim_2(") || text.contains("\"leasehold\".claim_2("),
        "{text}"
    );
    assert!(!text.contains("_1("), "{text}");

    // Half of the jobs come from each side.
    caller.enqueue(JOBS / 2 - 1).await;
    let next = "SELECT count(*) FROM generate_series(1, $) AS n, leasehold.enqueue('default', 'work', to_jsonb(n))";
    one(&db, &next.replace('$', &(JOBS / 2).to_string()))
        .await
        .unwrap();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let mut ours = Caller::new(caller.store.clone()).await;
        workers.spawn(async move {
            let mut taken = Vec::new();
            loop {
                let Some(grant) = ours.claim(3, MINUTE).await.pop() else {
                    return ("ours", taken);
                };
                let settlements = grant
                    .leases
                    .iter()
                    .map(|lease| complete(grant.receipt(lease)));
                let settle = SettleRequest {
                    request: ours.request(),
                    settlements: settlements.collect(),
                };
                let verdicts = ours.store.settle(settle).await.unwrap();
                assert!(verdicts.iter().all(|verdict| verdict.is_held()));
                taken.extend(
                    grant
                        .leases
                        .iter()
                        .map(|lease| (lease.token.get(), lease.job.id.to_string())),
                );
                // A worker of the other kind gets its share.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        let db = connect(&config).await;
        workers.spawn(async move {
            let mut taken = Vec::new();
            loop {
                let claim = "SELECT receipt, token, id::text FROM leasehold.claim(ARRAY['default'], 3, 'next')";
                let rows = db.query(claim, &[]).await.unwrap();
                if rows.is_empty() {
                    return ("theirs", taken);
                }
                for row in rows {
                    let receipt: String = row.get(0);
                    db.execute("SELECT leasehold.complete($1)", &[&receipt]).await.unwrap();
                    taken.push((row.get::<_, i64>(1).cast_unsigned(), row.get(2)));
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
    }
    let mut all: Vec<(u64, String)> = Vec::new();
    while let Some(done) = workers.join_next().await {
        let (whose, taken) = done.unwrap();
        assert!(!taken.is_empty(), "{whose} got nothing");
        all.extend(taken);
    }
    let distinct = |of: &dyn Fn(&(u64, String)) -> String| {
        all.iter()
            .map(of)
            .collect::<std::collections::HashSet<_>>()
            .len()
    };
    assert_eq!(all.len(), JOBS);
    assert_eq!(distinct(&|(_, job)| job.clone()), JOBS);
    assert_eq!(distinct(&|(token, _)| token.to_string()), JOBS);
    let ledger = leasehold::inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(
        (ledger.granted, ledger.completed, ledger.fenced),
        (200, 200, 0)
    );
    assert!(ledger.balances());
}

/// Of two programs of one version, the later has the last word on the functions, whichever migrates
/// last.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn an_earlier_release_leaves_the_functions_of_a_later_one() {
    let db = connect(&database("two_releases").await).await;
    let migrating = format!("{}?migrate=true", url("two_releases"));
    PostgresStore::open(&migrating).await.unwrap();
    let mark = "SELECT code || ' of ' || edition FROM leasehold.meta";
    let ours = one(&db, mark).await.unwrap();
    let body = "SELECT prosrc LIKE '%of another%' FROM pg_proc WHERE proname = 'no_counts_1'";
    let is_other = async || one(&db, body).await.unwrap() == "t";
    let text = "SELECT pg_get_functiondef('leasehold.no_counts_1'::regproc)";
    let text = one(&db, text).await.unwrap();
    assert!(text.contains("SELECT array_fill"), "{text}");
    let other = text.replace("SELECT array_fill", "/* of another */ SELECT array_fill");
    let set = "; UPDATE leasehold.meta SET code = 'of another', edition = edition + ";
    for (than_ours, is_kept) in [(1, true), (-2, false), (0, false)] {
        db.batch_execute(&format!("{other}{set}{than_ours}"))
            .await
            .unwrap();
        PostgresStore::open(&migrating).await.unwrap();
        assert_eq!(is_other().await, is_kept, "{than_ours}");
        assert_eq!(
            one(&db, mark).await.unwrap() != ours,
            is_kept,
            "{than_ours}"
        );
    }
}

/// A copy of the text as it was released, or will be. This program works with it as it is, and
/// after a migration as well. `LEASEHOLD_BLESS=1` makes the copy anew: only until the release.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn the_released_schema_is_one_that_this_program_can_use() {
    let now = PostgresStore::migrations("leasehold").unwrap();
    let blessed = std::env::var_os("LEASEHOLD_BLESS").is_some();
    if blessed {
        let file = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/engines/postgres/release_1.sql"
        );
        std::fs::write(file, &now).unwrap();
    }
    let db = connect(&database("released").await).await;
    let text = if blessed { &*now } else { RELEASE };
    db.batch_execute(text).await.unwrap();
    let mut caller = Caller::new(opened("released").await.unwrap()).await;
    work(&mut caller, 5).await;
    caller.enqueue(2).await;
    PostgresStore::open(&format!("{}?migrate=true", url("released")))
        .await
        .unwrap();
    let claim = "SELECT receipt FROM leasehold.claim(ARRAY['default'], 1, 'psql')";
    let receipt = one(&db, claim).await.unwrap();
    one(&db, &format!("SELECT leasehold.complete('{receipt}')"))
        .await
        .unwrap();
    work(&mut caller, 5).await;
}
