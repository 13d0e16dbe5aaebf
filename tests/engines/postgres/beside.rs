//! Calls beside each other: what one takes is granted, and what it writes is written at once.

use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::{ManualClock, SystemClock};
use leasehold::job::{Kind, QueueName};
use leasehold::store::{
    ClaimQueue, EnqueueRequest, Outcome, PostgresStore, SettleRequest, Settlement,
};
use leasehold::{JobId, NewJob, Store, inspect};
use tokio_postgres::Client;

use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, complete};

const TERM: Duration = Duration::from_secs(60);

async fn number(db: &Client, sql: &str) -> i64 {
    db.query_one(sql, &[]).await.unwrap().get(0)
}

/// Waits for a fact that the server is to show.
async fn until(db: &Client, fact: &str) {
    while !db.query_one(fact, &[]).await.unwrap().get::<_, bool>(0) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_queue_that_is_made_while_a_claim_looks_for_it_keeps_its_jobs() {
    let server = Server::start(&["fsync=off"]);
    let store = PostgresStore::with(server.config(), Server::options()).await;
    let mut caller = Caller::new(store.unwrap()).await;
    let mut producer = Caller::new(caller.store.clone()).await;
    caller.enqueue(1).await;
    let late = QueueName::new("late").unwrap();
    let mut claim = caller.claim_request(10, TERM);
    claim.queues.push(ClaimQueue {
        queue: late.clone(),
        ..claim.queues[0].clone()
    });

    // The claim waits for the queue that is there, and has seen that the other is not.
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    tx.batch_execute("SELECT FROM leasehold.queue FOR UPDATE")
        .await
        .unwrap();
    let claiming = tokio::spawn({
        let store = caller.store.clone();
        async move { store.claim(claim).await }
    });
    let observer = server.client().await;
    until(
        &observer,
        "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted",
    )
    .await;
    let enqueue = EnqueueRequest {
        request: producer.request(),
        jobs: vec![(
            JobId::generate(),
            NewJob::raw(late.clone(), Kind::new("work").unwrap(), "{}"),
        )]
        .into(),
    };
    producer.store.enqueue(enqueue).await.unwrap();
    tx.commit().await.unwrap();

    // Nobody has locked its row: what this claim took there, another could have taken too.
    let claimed = claiming.await.unwrap().unwrap();
    let of_late = claimed.grants.iter().filter(|grant| grant.queue == late);
    assert_eq!(of_late.count(), 0);
    let waiting = "SELECT count(*) FROM leasehold.job WHERE state = 2";
    assert_eq!(number(&observer, waiting).await, 1);
    let mut claim = caller.claim_request(1, TERM);
    claim.queues[0].queue = late;
    assert_eq!(caller.store.claim(claim).await.unwrap().grants.len(), 1);
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.granted, ledger.live), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn all_that_a_call_writes_is_of_one_transaction() {
    let server = Server::start(&["fsync=off"]);
    let store = PostgresStore::with(server.config(), Server::options()).await;
    let mut caller = Caller::new(store.unwrap()).await;
    caller.enqueue(3).await;
    let claim = caller.claim_request(10, TERM);
    let claimed = caller.store.claim(claim).await.unwrap();
    assert_eq!(claimed.grants[0].leases.len(), 3);
    // The grant, its jobs, the issuer, and the answer.
    let written = "SELECT count(*), count(DISTINCT x::text) FROM (
                       SELECT xmin AS x FROM leasehold.grants UNION ALL
                       SELECT xmin FROM leasehold.job UNION ALL
                       SELECT xmin FROM leasehold.head UNION ALL
                       SELECT xmin FROM leasehold.lane) AS w";
    let db = server.client().await;
    let row = db.query_one(written, &[]).await.unwrap();
    let (rows, transactions): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!((rows, transactions), (6, 1));
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn jobs_are_taken_with_all_that_a_claim_does_or_not_at_all() {
    let server = Server::start(&["fsync=off"]);
    let store = PostgresStore::with(server.config(), Server::options()).await;
    let mut caller = Caller::new(store.unwrap()).await;
    caller.enqueue(3).await;
    let claim = caller.claim_request(10, TERM);
    let db = server.client().await;
    // The very last that a claim does, fails.
    let fail = "CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS
                    $$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '53100'; END $$;
                CREATE TRIGGER fails BEFORE INSERT OR UPDATE ON leasehold.lane
                    FOR EACH ROW WHEN (NEW.verb = 2) EXECUTE FUNCTION fails()";
    db.batch_execute(fail).await.unwrap();
    let error = caller.store.claim(claim.clone()).await.unwrap_err();
    assert_eq!(error.kind(), leasehold::ErrorKind::Full, "{error:?}");
    let waiting = "SELECT count(*) FROM leasehold.job WHERE state = 2";
    assert_eq!(number(&db, waiting).await, 3);
    db.batch_execute("DROP TRIGGER fails ON leasehold.lane")
        .await
        .unwrap();
    let claimed = caller.store.claim(claim).await.unwrap();
    assert_eq!(claimed.grants[0].leases.len(), 3);
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.granted, ledger.live), (3, 3));

    // Control: the same steps, each by itself, lose what the first of them took.
    caller.enqueue(2).await;
    db.batch_execute(&fail.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
        .await
        .unwrap();
    for step in [
        "DELETE FROM leasehold.job WHERE state = 2",
        "UPDATE leasehold.lane SET verb = 2",
    ] {
        let done = db.batch_execute(step).await;
        assert_eq!(done.is_err(), step.starts_with("UPDATE"));
    }
    assert_eq!(number(&db, waiting).await, 0);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_role_with_a_stricter_default_is_served_as_well() {
    let server = shared();
    for level in ["repeatable\\ read", "serializable"] {
        let mut config = server.config();
        config.options(format!("-c default_transaction_isolation={level}"));
        let store = PostgresStore::with(config, Server::options()).await;
        let mut caller = Caller::new(store.unwrap()).await;
        caller.enqueue(5).await;
        let claimed = caller.claim(10, TERM).await;
        let grant = &claimed[0];
        assert_eq!(grant.leases.len(), 5);
        let settle = SettleRequest {
            request: caller.request(),
            settlements: vec![complete(grant.receipt(&grant.leases[0]))],
        };
        assert!(caller.store.settle(settle).await.unwrap()[0].is_held());
        let ledger = inspect::ledger(&caller.store).await.unwrap();
        assert_eq!((ledger.granted, ledger.completed, ledger.live), (5, 1, 4));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn many_may_open_a_new_database_at_once_whatever_the_default() {
    let server = Server::start(&["fsync=off"]);
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    // Both have begun, and wait for somebody who is making the tables.
    tx.batch_execute(
        "SELECT pg_advisory_xact_lock(hashtextextended('leasehold migration of leasehold', 0))",
    )
    .await
    .unwrap();
    let mut opening = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let mut config = server.config();
        config.options("-c default_transaction_isolation=serializable");
        opening.spawn(PostgresStore::with(config, Server::options().migrate()));
    }
    let observer = server.client().await;
    until(
        &observer,
        "SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted",
    )
    .await;
    tx.commit().await.unwrap();
    while let Some(opened) = opening.join_next().await {
        opened.unwrap().unwrap();
    }
}

/// What is claimed is what was enqueued, whatever the jobs look like; and what comes back is, too.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_claimed_is_what_was_enqueued() {
    let mut caller = Caller::new(shared().store(SystemClock).await).await;
    for size in [0, 100, 3_000, 200_000] {
        let jobs = (0..7).map(|n| {
            let payload = format!("\"{n}{}\"", "x".repeat(size));
            let job = NewJob::raw(QueueName::default(), Kind::new("work").unwrap(), payload);
            (JobId::generate(), job)
        });
        let enqueue = EnqueueRequest {
            request: caller.request(),
            jobs: Arc::new(jobs.collect()),
        };
        caller.store.enqueue(enqueue.clone()).await.unwrap();
        let grants = caller.claim(7, TERM).await;
        let [grant] = &grants[..] else {
            panic!("one grant: {grants:?}")
        };
        for ((id, new), lease) in enqueue.jobs.iter().zip(&grant.leases) {
            assert_eq!((*id, &new.payload), (lease.job.id, &lease.job.payload));
            assert!(lease.job.enqueued_at == lease.job.run_at);
            assert!(lease.job.enqueued_at <= grant.granted_at);
            assert!(grant.granted_at.since(lease.job.enqueued_at) < Duration::from_secs(600));
        }
        // Some are completed; the others come back.
        let (done, back) = grant.leases.split_at(3);
        let settle = SettleRequest {
            request: caller.request(),
            settlements: done.iter().map(|l| complete(grant.receipt(l))).collect(),
        };
        let verdicts = caller.store.settle(settle).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        let surrender = back.iter().map(|lease| Settlement {
            receipt: grant.receipt(lease),
            outcome: Outcome::Surrender {
                delay: Duration::ZERO,
                mark: None,
            },
        });
        let settle = SettleRequest {
            request: caller.request(),
            settlements: surrender.collect(),
        };
        let verdicts = caller.store.settle(settle).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        let again = caller.claim(7, TERM).await;
        let ids = |leases: &[leasehold::lease::Lease]| -> Vec<JobId> {
            leases.iter().map(|lease| lease.job.id).collect()
        };
        assert_eq!(ids(&again[0].leases), ids(back));
        let settle = SettleRequest {
            request: caller.request(),
            settlements: again[0]
                .leases
                .iter()
                .map(|lease| complete(again[0].receipt(lease)))
                .collect(),
        };
        let verdicts = caller.store.settle(settle.clone()).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        // A receipt is worth something once.
        let settle = SettleRequest {
            request: caller.request(),
            ..settle
        };
        let verdicts = caller.store.settle(settle).await.unwrap();
        assert!(verdicts.iter().all(|verdict| !verdict.is_held()));
    }
}

/// The plan of a statement that was first made while a table was empty is kept: it must not be one
/// that reads a queue from end to end.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn an_enqueue_reads_nothing_of_a_long_queue() {
    const LONG: usize = 10_000;
    let server = Server::start(&["fsync=off", "autovacuum=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let call = "SELECT count(*) FROM leasehold.queue AS q CROSS JOIN LATERAL leasehold.enqueue_1(
                    q.namespace, NULL, NULL, NULL, NULL,
                    (SELECT array_agg(gen_random_uuid()) FROM generate_series(1, 100)),
                    array_fill(q.name, ARRAY[100]), array_fill('work'::text, ARRAY[100]),
                    array_fill(''::bytea, ARRAY[100]), NULL, NULL, NULL, NULL)";
    let mut db = server.client().await;
    for jobs in [1, LONG] {
        caller.enqueue(jobs).await;
        let tx = db.transaction().await.unwrap();
        let done = tx.query_one(call, &[]).await.unwrap();
        assert_eq!(done.get::<_, i64>(0), 0, "there are duplicates");
        if jobs == LONG {
            read_little(&tx, LONG).await;
        }
    }
}

async fn read_little(tx: &tokio_postgres::Transaction<'_>, long: usize) {
    let read = async || -> i64 {
        let read = "SELECT coalesce(idx_tup_fetch, 0) + coalesce(seq_tup_read, 0)
                    FROM pg_stat_xact_user_tables WHERE schemaname = 'leasehold' AND relname = 'job'";
        tx.query_one(read, &[]).await.unwrap().get(0)
    };
    let rows = read().await;
    assert!(rows <= 100, "{rows} of {long}");
    // Control arm: the same question about the same rows, asked without their key.
    tx.execute("SELECT FROM leasehold.job WHERE weight = -1", &[])
        .await
        .unwrap();
    assert!(read().await >= long as i64, "this test cannot fail");
}

/// Each queue is an issuer: two processes may get grants under one number from two queues. A claim
/// that names both queues takes neither for the other.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn grants_of_one_number_are_told_apart() {
    const SHORT: Duration = Duration::from_secs(20);
    let clock = ManualClock::default();
    let options = Server::options().clock(clock.clone());
    let process = async || {
        let store = PostgresStore::with(shared().config(), options.clone()).await;
        Caller::new(store.unwrap()).await
    };
    let (mut ours, mut theirs) = (process().await, process().await);
    let [a, b] = ["a", "b"].map(|name| QueueName::new(name).unwrap());
    let from = |caller: &mut Caller, queues: &[&QueueName], term: Duration| {
        let mut claim = caller.claim_request(9, term);
        let first = claim.queues.remove(0);
        claim.queues.extend(queues.iter().map(|queue| ClaimQueue {
            queue: (*queue).clone(),
            ..first.clone()
        }));
        claim
    };
    let jobs = [&a, &b].map(|queue| {
        let new = NewJob::raw(queue.clone(), Kind::new("work").unwrap(), "{}");
        (JobId::generate(), new)
    });
    for (caller, job) in [(&mut ours, &jobs[0]), (&mut theirs, &jobs[1])] {
        let enqueue = EnqueueRequest {
            request: caller.request(),
            jobs: vec![job.clone()].into(),
        };
        caller.store.enqueue(enqueue).await.unwrap();
    }
    clock.advance(Duration::from_secs(1));
    let claim = from(&mut theirs, &[&b], SHORT);
    let short = theirs.store.claim(claim).await.unwrap().grants.remove(0);
    let claim = from(&mut ours, &[&b, &a], TERM);
    let long = ours.store.claim(claim.clone()).await.unwrap();
    assert_eq!((&long.grants[0].queue, long.grants[0].id), (&a, short.id));

    let again = ours.store.claim(claim).await.unwrap();
    assert_eq!(again.grants.len(), 1);
    assert_eq!(again.grants[0].leases[0].job.id, jobs[0].0);

    // The one that ends is not the one that is next.
    let grant = &long.grants[0];
    let settle = SettleRequest {
        request: ours.request(),
        settlements: vec![complete(grant.receipt(&grant.leases[0]))],
    };
    assert!(ours.store.settle(settle).await.unwrap()[0].is_held());
    let claim = from(&mut ours, &[&b, &b], TERM);
    let claimed = ours.store.claim(claim).await.unwrap();
    assert_eq!(claimed.next_deadline, Some(SHORT));
}
