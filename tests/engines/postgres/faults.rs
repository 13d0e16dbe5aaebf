//! The server restarts, connections die, a client freezes in the middle of a transaction.

use std::time::{Duration, Instant};

use leasehold::clock::SystemClock;
use leasehold::inspect;
use leasehold::store::{
    EnqueueRequest, Enqueued, Outcome, PostgresStore, SettleRequest, Settlement,
};
use leasehold::{ErrorKind, JobId, Store};

use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, answered, complete, job};

const TERM: Duration = Duration::from_secs(60);

#[tokio::test]
async fn what_is_wrong_with_an_address_is_said() {
    for (url, kind, says) in [
        ("postgres://", ErrorKind::InvalidInput, "host"),
        (
            "postgres://127.0.0.1:1/d",
            ErrorKind::Unavailable,
            "refused",
        ),
    ] {
        let error = leasehold::Client::open(url).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{url}");
        let text = format!("{error:?}");
        assert!(text.contains(says), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs postgresql: ./tests/run"]
async fn many_processes_may_start_at_once() {
    let server = Server::start(&["fsync=off", "max_connections=100"]);
    let opening: Vec<_> = (0..16)
        .map(|_| {
            tokio::spawn(PostgresStore::with(
                server.config(),
                Server::options().connections(1),
            ))
        })
        .collect();
    for opened in opening {
        opened.await.unwrap().unwrap();
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_call_goes_on_over_a_restart() {
    let mut server = Server::start(&["fsync=off"]);
    let store = PostgresStore::with(server.config(), Server::options())
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    let ids = caller.enqueue(3).await;
    server.restart();
    let request = caller.claim_request(3, TERM);
    let claimed = answered(|| caller.store.claim(request.clone())).await;
    let granted: Vec<JobId> = claimed.grants[0].leases.iter().map(|l| l.job.id).collect();
    assert_eq!(granted, ids);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_repeat_after_a_killed_connection_counts_once() {
    let server = Server::start(&["fsync=off"]);
    let options = Server::options().connections(1);
    let store = PostgresStore::with(server.config(), options).await.unwrap();
    let mut caller = Caller::new(store).await;
    let db = server.client().await;
    for _ in 0..20 {
        let request = EnqueueRequest {
            request: caller.request(),
            jobs: vec![(JobId::generate(), job())].into(),
        };
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                    WHERE application_name = 'leasehold'";
        let (first, _) = tokio::join!(caller.store.enqueue(request.clone()), async {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3_000))).await;
            db.query(kill, &[]).await.unwrap()
        });
        if let Err(error) = &first {
            assert!(
                error.is_transient() && !error.kind().is_certain(),
                "{error:?}"
            );
        }
        let stored = answered(|| caller.store.enqueue(request.clone())).await;
        assert!(matches!(stored[0], Enqueued::New(_)));
    }
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(ledger.enqueued, 20);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_frozen_clients_transaction_stops_nobody_else() {
    let server = shared();
    let options = Server::options().patience(Duration::from_millis(300));
    let store = PostgresStore::with(server.config(), options).await.unwrap();
    let mut caller = Caller::new(store).await;
    caller.enqueue(2).await;
    let held = caller.claim_one(TERM).await.unwrap();
    // It settles and enqueues in a transaction, and is not heard of again.
    let mut frozen = server.client().await;
    let tx = frozen.transaction().await.unwrap();
    let settled = caller.store.settle_in(&tx, &complete(held.clone())).await;
    assert!(settled.unwrap().is_held());
    caller.store.enqueue_in(&tx, vec![job()]).await.unwrap();
    let limit = tx
        .query_one("SHOW idle_in_transaction_session_timeout", &[])
        .await;
    assert_eq!(
        limit.unwrap().get::<_, String>(0),
        "1min",
        "our limit on it"
    );

    caller.enqueue(1).await;
    let other = caller.claim_one(TERM).await.expect("another job");
    let request = leasehold::store::SettleRequest {
        request: caller.request(),
        settlements: vec![complete(other)],
    };
    assert!(caller.store.settle(request).await.unwrap()[0].is_held());
    // Only who wants the very same grant waits, and not for ever.
    let request = leasehold::store::SettleRequest {
        request: caller.request(),
        settlements: vec![complete(held)],
    };
    let error = caller.store.settle(request.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error:?}");
    tx.rollback().await.unwrap();
    assert!(caller.store.settle(request).await.unwrap()[0].is_held());
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn errors_say_what_they_are() {
    let server = shared();
    let wrong: tokio_postgres::Config = server
        .url()
        .replace("/postgres", "/nowhere")
        .parse()
        .unwrap();
    let error = PostgresStore::with(wrong, Server::options())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    let secret = "postgres://me:swordfish@127.0.0.1:1/jobs?connect_timeout=1";
    let error = leasehold::Client::open(secret).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(!format!("{error:?} {error}").contains("swordfish"));
    let error = leasehold::Client::open("postgres://h/d?schema=Bad-Name")
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_standby_is_worth_waiting_for() {
    let primary = Server::start(&["fsync=off", "wal_level=replica"]);
    let options = Server::options();
    let store = PostgresStore::with(primary.config(), options.clone())
        .await
        .unwrap();
    drop(store);
    let standby = primary.standby();
    let store = PostgresStore::with(standby.config(), options)
        .await
        .unwrap();
    let error = store.open_session().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    standby.promote().await;
    answered(|| store.open_session()).await;
}

/// A sleeper looks by itself once a second. Most that are woken are up long before on a quiet machine, some on
/// any: the third quickest of nine.
async fn woken_after(sleeper: PostgresStore, enqueuer: PostgresStore) -> Duration {
    let mut enqueuer = Caller::new(enqueuer).await;
    let queue = [leasehold::job::QueueName::default()];
    let mut took = Vec::new();
    for _ in 0..9 {
        let waiting = tokio::spawn({
            let (sleeper, queue) = (sleeper.clone(), queue.clone());
            async move { sleeper.wait(&queue, false, Duration::from_secs(600)).await }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let start = Instant::now();
        enqueuer.enqueue(1).await;
        waiting.await.unwrap().unwrap();
        took.push(start.elapsed());
        assert!(enqueuer.claim_one(TERM).await.is_some());
    }
    took.sort_unstable();
    took[2]
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn another_process_is_woken() {
    let (server, options) = (shared(), Server::options());
    let here = PostgresStore::with(server.config(), options.clone());
    let there = PostgresStore::with(server.config(), options);
    let took = woken_after(here.await.unwrap(), there.await.unwrap()).await;
    assert!(took < Duration::from_millis(400), "{took:?}");
}

/// Without a word of the server's, which tells the others only.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn ones_own_process_is_woken() {
    let store = PostgresStore::with(shared().config(), Server::options());
    let store = store.await.unwrap();
    let took = woken_after(store.clone(), store).await;
    assert!(took < Duration::from_millis(400), "{took:?}");
}

/// The rows of the counts are put together after the commit: trouble with that is not the call's.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_fails_after_the_commit_is_not_said_of_the_call() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let db = server.client().await;
    db.batch_execute(
        "CREATE SEQUENCE failures;
         CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM nextval('failures');
             RAISE EXCEPTION 'the disk is full' USING ERRCODE = 'disk_full';
         END $$;
         CREATE TRIGGER fail BEFORE DELETE ON leasehold.tallies
         FOR EACH ROW EXECUTE FUNCTION fail()",
    )
    .await
    .unwrap();
    let mut stored = 0;
    let tried = "SELECT is_called FROM failures";
    while !db.query_one(tried, &[]).await.unwrap().get::<_, bool>(0) {
        let request = EnqueueRequest {
            request: caller.request(),
            jobs: vec![(JobId::generate(), job())].into(),
        };
        caller.store.enqueue(request).await.unwrap();
        stored += 1;
    }
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(ledger.enqueued, stored);
}

/// Whoever finds a grant that makes no sense says so, and changes nothing.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_damaged_grant_is_told() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(2).await;
    let grant = caller.claim(2, TERM).await.remove(0);
    let receipt = grant.receipt(&grant.leases[0]);
    let db = server.client().await;
    for (damage, repair, says) in [
        (
            "UPDATE leasehold.records SET heads = heads || '\\x00'",
            "UPDATE leasehold.records SET heads = substr(heads, 1, octet_length(heads) - 1)",
            "heads",
        ),
        (
            "UPDATE leasehold.grants SET live = 1",
            "UPDATE leasehold.grants SET live = 2",
            "count",
        ),
    ] {
        db.batch_execute(damage).await.unwrap();
        let settle = SettleRequest {
            request: caller.request(),
            settlements: vec![Settlement {
                receipt: receipt.clone(),
                outcome: Outcome::Surrender {
                    delay: Duration::ZERO,
                    mark: None,
                },
            }],
        };
        let error = caller.store.settle(settle).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
        assert!(format!("{error:?}").contains(says), "{error:?}");
        db.batch_execute(repair).await.unwrap();
    }
    let settle = SettleRequest {
        request: caller.request(),
        settlements: vec![complete(receipt)],
    };
    assert!(caller.store.settle(settle).await.unwrap()[0].is_held());
}
