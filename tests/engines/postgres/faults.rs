//! The server restarts, connections die, a client freezes in the middle of a transaction.

use std::time::{Duration, Instant};

use leasehold::clock::SystemClock;
use leasehold::inspect;
use leasehold::store::{EnqueueRequest, Enqueued, PostgresStore, SettleRequest};
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
    let of_nobody = server.config().user("nobody").clone();
    let nowhere = server.config().dbname("nowhere").clone();
    for (config, kind) in [
        (of_nobody, ErrorKind::Denied),
        (nowhere, ErrorKind::Unsupported),
    ] {
        let error = PostgresStore::with(config, Server::options())
            .await
            .unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
    }
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

/// A sleeper looks by itself once a second. Most that are woken are up long before on a quiet
/// machine, some on any: the third quickest of nine.
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

/// Of those who sleep, one is told of one job. The others look by themselves once a second, and
/// find nothing, most of the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn one_job_wakes_one_process() {
    const PROCESSES: usize = 6;
    const ROUNDS: usize = 5;
    let server = Server::start(&["fsync=off"]);
    let store = async || PostgresStore::with(server.config(), Server::options()).await;
    let mut producer = Caller::new(store().await.unwrap()).await;
    let mut sleepers = Vec::new();
    let options = Server::options().namespace(producer.store.namespace());
    for _ in 0..PROCESSES {
        let store = PostgresStore::with(server.config(), options.clone()).await;
        sleepers.push(store.unwrap());
    }
    let woken = async |producer: &mut Caller, jobs: usize| -> usize {
        let mut waiting = tokio::task::JoinSet::new();
        for sleeper in &sleepers {
            let sleeper = sleeper.clone();
            waiting.spawn(async move {
                let queues = [leasehold::job::QueueName::default()];
                let limit = Duration::from_secs(600);
                sleeper.wait(&queues, false, limit).await.unwrap();
                Caller::new(sleeper).await.claim_one(TERM).await
            });
        }
        // All of them listen, and have looked.
        tokio::time::sleep(Duration::from_millis(800)).await;
        producer.enqueue(jobs).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut woken = 0;
        while waiting.try_join_next().is_some() {
            woken += 1;
        }
        waiting.shutdown().await;
        woken
    };
    // On a busy machine a sleeper's own look, once a second, may come before the claim of the one
    // that was told. It does not in every round.
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push(woken(&mut producer, 1).await);
        while producer.claim_one(TERM).await.is_some() {}
    }
    assert_eq!(rounds.iter().min(), Some(&1), "{rounds:?}");
    assert!(rounds.iter().sum::<usize>() < 2 * ROUNDS, "{rounds:?}");
    // Control arm: many jobs wake more.
    let many = woken(&mut producer, 100).await;
    assert!(many > 2, "{many} of {PROCESSES}");
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

/// The rows of the counts are added up by claims, beside calls that add to them: none is lost, none
/// is counted twice, and they stay few.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn counts_are_exact_while_they_are_added_up() {
    const CALLERS: u64 = 4;
    const ROUNDS: u64 = 60;
    let server = Server::start(&["fsync=off"]);
    let store = server.store(SystemClock).await;
    let mut calling = tokio::task::JoinSet::new();
    for _ in 0..CALLERS {
        let store = store.clone();
        calling.spawn(async move {
            let mut caller = Caller::new(store).await;
            for _ in 0..ROUNDS {
                caller.enqueue(2).await;
                let held = caller.claim_one(TERM).await.expect("there is more");
                let settle = SettleRequest {
                    request: caller.request(),
                    settlements: vec![complete(held)],
                };
                let settled = answered(|| caller.store.settle(settle.clone())).await;
                assert!(settled[0].is_held());
            }
        });
    }
    calling.join_all().await;
    let ledger = inspect::ledger(&store).await.unwrap();
    let rounds = CALLERS * ROUNDS;
    assert_eq!(
        (ledger.enqueued, ledger.granted, ledger.completed),
        (2 * rounds, rounds, rounds)
    );
    let queues = inspect::queues(&store).await.unwrap();
    assert_eq!(
        (queues[0].counts.ready, queues[0].counts.leased),
        (rounds, 0)
    );
    let db = server.client().await;
    let rows = "SELECT count(*) FROM leasehold.tally";
    let rows: i64 = db.query_one(rows, &[]).await.unwrap().get(0);
    assert!(rows < rounds as i64, "{rows} of {}", 2 * rounds);
}

/// Whoever finds a job that makes no sense says so.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_damaged_job_is_told() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let id = caller.enqueue(1).await[0];
    let db = server.client().await;
    for (damage, repair) in [
        ("kind = 'no name'", "kind = 'work'"),
        ("history = '[{\"token\": 1}]'", "history = NULL"),
        ("options = '{\"term\": \"long\"}'", "options = NULL"),
    ] {
        let set = |what: &str| format!("UPDATE leasehold.job SET {what}");
        db.batch_execute(&set(damage)).await.unwrap();
        let error = inspect::job(&caller.store, id).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
        db.batch_execute(&set(repair)).await.unwrap();
        assert!(inspect::job(&caller.store, id).await.unwrap().is_some());
    }
}
