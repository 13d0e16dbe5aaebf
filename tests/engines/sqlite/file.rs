//! What is in the file: it survives, it keeps tokens in order, and it keeps things apart.

use std::time::Duration;

use leasehold::clock::{Clock, ManualClock, Timestamp};
use leasehold::inspect::{self, LeaseFilter, Page};
use leasehold::job::{JobState, Namespace};
use leasehold::store::{
    Beat, Checkpoint, CheckpointRequest, Outcome, PruneRequest, Renewal, RequestId, SessionId,
    SettleRequest, Settlement, SqliteOptions, SqliteStore,
};
use leasehold::{ErrorKind, Store};

use crate::sqlite::client::{Client, job, queue};

fn on(clock: &ManualClock) -> SqliteOptions {
    SqliteOptions::new().clock(clock.clone())
}

async fn views(store: &dyn Store) -> impl PartialEq + std::fmt::Debug + use<> {
    let jobs = |state| inspect::jobs(store, queue("q"), state, Page::first(9));
    (
        inspect::queues(store).await.unwrap(),
        inspect::leases(store, LeaseFilter::default(), Page::first(9))
            .await
            .unwrap(),
        jobs(JobState::Ready).await.unwrap(),
        jobs(JobState::Scheduled).await.unwrap(),
    )
}

#[tokio::test]
async fn everything_is_there_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let clock = ManualClock::default();
    let mut client = Client::new(SqliteStore::with(&path, on(&clock)).unwrap()).await;
    let later = job("q").delay(Duration::from_secs(60));
    let only = || job("q").unique("only").unwrap();
    let answers = client
        .enqueue(vec![job("q"), later, only(), job("q")])
        .await
        .unwrap();
    let request = client.claim_request("q", 2);
    let claimed = client.store.claim(request.clone()).await.unwrap();
    let before = views(&*client.store).await;

    let (session, seq) = (client.session, client.seq);
    drop(client);
    let store = SqliteStore::with(&path, on(&clock)).unwrap();
    assert_eq!(views(&store).await, before);
    let mut client = Client {
        store: std::sync::Arc::new(store),
        session,
        lane: 0,
        seq,
    };
    // The session lives on: the claim is answered again, and not applied again.
    assert_eq!(client.store.claim(request).await.unwrap(), claimed);
    let again = client.enqueue(vec![only()]).await.unwrap();
    assert_eq!(
        again[0].id(),
        answers[2].id(),
        "the unique key is still held"
    );
    let verdicts = client.complete(&claimed.grants).await.unwrap();
    assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    let ledger = inspect::ledger(&*client.store).await.unwrap();
    assert!(ledger.balances() && ledger.completed == 2, "{ledger:?}");
}

async fn highest(store: SqliteStore) -> (u64, u64) {
    let mut client = Client::new(store).await;
    client.enqueue(vec![job("t"); 500]).await.unwrap();
    let claimed = client.claim("t", 500).await.unwrap();
    let tokens = claimed
        .grants
        .iter()
        .flat_map(|grant| &grant.leases)
        .map(|l| l.token.get());
    (tokens.clone().min().unwrap(), tokens.max().unwrap())
}

#[tokio::test]
async fn tokens_grow_over_reopening_a_clock_set_back_and_an_old_copy() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("jobs.db"), dir.path().join("copy.db"));
    let clock = ManualClock::default();
    let mut last = 0;
    let mut next = |(low, high): (u64, u64)| {
        assert!(low > last, "{low} after {last}");
        last = high;
        high
    };
    next(highest(SqliteStore::with(&path, on(&clock)).unwrap()).await);
    next(highest(SqliteStore::with(&path, on(&clock)).unwrap()).await);
    clock.set(Timestamp::from_micros(clock.now().as_micros() - 5_000_000));
    next(highest(SqliteStore::with(&path, on(&clock)).unwrap()).await);
    clock.advance(Duration::from_secs(10));

    std::fs::copy(&path, &copy).unwrap();
    let mut given = 0;
    for _ in 0..5 {
        clock.advance(Duration::from_millis(3));
        given = next(highest(SqliteStore::with(&path, on(&clock)).unwrap()).await);
    }
    for side in ["jobs.db-wal", "jobs.db-shm"] {
        let _ = std::fs::remove_file(dir.path().join(side));
    }
    std::fs::rename(&copy, &path).unwrap();
    // The control arm: a counter in the copied file would start far below what was given.
    let db = rusqlite::Connection::open(&path).unwrap();
    let remembered: i64 = db
        .query_row("SELECT max(last, floor) FROM leasehold_meta", [], |row| {
            row.get(0)
        })
        .unwrap();
    assert!(
        (remembered as u64) < given,
        "the copy knows what it cannot know"
    );
    drop(db);
    clock.advance(Duration::from_millis(50));
    next(highest(SqliteStore::with(&path, on(&clock)).unwrap()).await);
}

#[tokio::test]
async fn tokens_run_at_most_20_ms_ahead_and_a_refused_claim_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::default();
    let store = SqliteStore::with(dir.path().join("jobs.db"), on(&clock)).unwrap();
    let mut client = Client::new(store).await;
    for _ in 0..21 {
        client.enqueue(vec![job("q"); 1_000]).await.unwrap();
    }
    let mut granted = 0;
    let error = loop {
        match client.claim("q", 999).await {
            Ok(claimed) => granted += claimed.grants[0].leases.len(),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TokensAhead);
    assert_eq!(granted, 20_000, "the last claim got what fits");
    let view = inspect::queues(&*client.store).await.unwrap();
    assert_eq!(view[0].ledger.granted, 20_000);
    clock.advance(Duration::from_millis(41));
    assert_eq!(
        client.claim("q", 999).await.unwrap().grants[0].leases.len(),
        999
    );
}

#[tokio::test]
async fn two_namespaces_in_one_file_never_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let other = SqliteOptions::new().namespace(Namespace::new("other").unwrap());
    let mut a = Client::new(SqliteStore::open(&path).unwrap()).await;
    let mut b = Client::new(SqliteStore::with(&path, other).unwrap()).await;
    let ids = a
        .enqueue(vec![job("q").unique("k").unwrap(), job("q")])
        .await
        .unwrap();
    let claimed = a.claim("q", 1).await.unwrap();
    assert!(inspect::queues(&*b.store).await.unwrap().is_empty());
    assert!(b.claim("q", 9).await.unwrap().grants.is_empty());
    for id in ids {
        assert!(inspect::job(&*b.store, id.id()).await.unwrap().is_none());
        assert!(inspect::job(&*a.store, id.id()).await.unwrap().is_some());
    }
    let verdicts = b.complete(&claimed.grants).await.unwrap();
    assert!(
        verdicts.iter().all(|verdict| verdict.is_fenced()),
        "a foreign receipt"
    );
    let mine = b
        .enqueue(vec![job("q").unique("k").unwrap()])
        .await
        .unwrap();
    let theirs = b.claim("q", 9).await.unwrap();
    assert_eq!(theirs.grants[0].leases[0].job.id, mine[0].id());
    // One file, one issuer.
    assert!(theirs.grants[0].id > claimed.grants[0].id);
    // Nor do sessions cross over.
    b.session = a.session;
    let error = b.claim("q", 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionLost);
}

#[tokio::test]
async fn calls_that_wait_together_share_a_commit_and_refused_ones_hurt_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(dir.path().join("jobs.db")).unwrap();
    let client = Client::new(store.clone()).await;
    let calls = |lost: bool| {
        (0..200_u32).map(move |lane| {
            let session = if lost && lane % 2 == 1 {
                SessionId::generate()
            } else {
                client.session
            };
            let request = RequestId {
                session,
                lane,
                seq: u64::from(lost),
            };
            leasehold::store::EnqueueRequest {
                request,
                jobs: vec![(leasehold::JobId::generate(), job("q"))].into(),
            }
        })
    };
    // The control arm: one after the other, each has a commit of its own.
    let start = store.commits();
    for request in calls(false).take(20) {
        store.enqueue(request).await.unwrap();
    }
    assert_eq!(store.commits() - start, 20);

    let start = store.commits();
    let mut tasks = tokio::task::JoinSet::new();
    for request in calls(true) {
        let store = store.clone();
        tasks.spawn(async move { (request.request.lane, store.enqueue(request).await) });
    }
    while let Some(done) = tasks.join_next().await {
        let (lane, answer) = done.unwrap();
        match answer {
            Ok(_) => assert_eq!(lane % 2, 0),
            Err(error) => {
                assert_eq!(lane % 2, 1);
                assert_eq!(error.kind(), ErrorKind::SessionLost);
            }
        }
    }
    let commits = store.commits() - start;
    assert!(commits <= 50, "{commits} commits for 200 calls");
    let view = inspect::queues(&store).await.unwrap();
    assert_eq!(view[0].counts.ready, 20 + 100);
}

#[tokio::test]
async fn a_users_own_database_is_shared_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute_batch("CREATE TABLE orders (id); PRAGMA user_version = 7")
        .unwrap();
    for _ in 0..2 {
        let mut client = Client::new(SqliteStore::open(&path).unwrap()).await;
        client.enqueue(vec![job("q")]).await.unwrap();
    }
    let number = |sql: &str| db.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(number("PRAGMA user_version"), 7);
    assert_eq!(number("PRAGMA application_id"), 0);
    assert_eq!(number("SELECT version FROM leasehold_meta"), 1);
    let strange = "SELECT count(*) FROM sqlite_schema WHERE name NOT LIKE 'leasehold%'
                   AND name NOT LIKE 'sqlite%'";
    assert_eq!(number(strange), 1, "all our names start with leasehold_");

    let own = dir.path().join("own.db");
    drop(SqliteStore::open(&own).unwrap());
    let db = rusqlite::Connection::open(&own).unwrap();
    let version: i64 = db
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .unwrap();
    assert_eq!(version, 1);
}

#[test]
fn many_may_open_a_new_file_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| SqliteStore::open(&path).unwrap());
        }
    });
}

#[tokio::test]
async fn a_half_settled_grant_is_compacted_and_still_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store).await;
    client.enqueue(vec![job("q"); 100]).await.unwrap();
    let mut grant = client.claim("q", 100).await.unwrap().grants.remove(0);
    let db = rusqlite::Connection::open(&path).unwrap();
    let stored = || {
        let sql = "SELECT length(records) FROM leasehold_records";
        db.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    let whole = stored();
    let kept = grant.leases.split_off(60);
    client.complete(std::slice::from_ref(&grant)).await.unwrap();
    assert_eq!(stored(), whole * 40 / 100);
    grant.leases = kept;
    let views = inspect::leases(&*client.store, LeaseFilter::default(), Page::first(100)).await;
    assert_eq!(views.unwrap().rows.len(), 40);
    let verdicts = client.complete(std::slice::from_ref(&grant)).await.unwrap();
    assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    let left: i64 = db
        .query_row("SELECT count(*) FROM leasehold_records", [], |row| {
            row.get(0)
        })
        .unwrap();
    assert_eq!(left, 0);
}

/// Merged calls share what a transaction has read; this is where that could go wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_of_two_handles_end_every_job_exactly_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let stores = [
        SqliteStore::open(&path).unwrap(),
        SqliteStore::open(&path).unwrap(),
    ];
    let mut tasks = tokio::task::JoinSet::new();
    for at in 0..12_u64 {
        let mut client = Client::new(stores[at as usize % 2].clone()).await;
        tasks.spawn(async move {
            let mut random = fastrand::Rng::with_seed(at);
            let jobs = (0..60).map(|n| match n % 4 {
                0 => job("q").exclusive(format!("e{}", n % 3)).unwrap(),
                1 => job("q").priority(n % 8),
                2 => job("q").unique(format!("u{at}.{n}")).unwrap(),
                _ => job("q"),
            });
            client.enqueue(jobs.collect()).await.unwrap();
            let (mut done, mut tokens) = (Vec::new(), Vec::new());
            let mut idle = 0;
            while idle < 40 {
                let claimed = client.claim("q", 1 + random.usize(..20)).await.unwrap();
                idle = if claimed.grants.is_empty() {
                    idle + 1
                } else {
                    0
                };
                if idle > 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let beats = claimed.grants.iter().map(Beat::of).collect();
                for renewal in client.store.renew(beats).await.unwrap() {
                    assert!(matches!(renewal, Renewal::Held { .. }), "{renewal:?}");
                }
                for grant in &claimed.grants {
                    let mut rest: Vec<_> = grant.leases.iter().collect();
                    while !rest.is_empty() {
                        let part = rest.split_off(rest.len() - (1 + random.usize(..rest.len())));
                        let settlements: Vec<_> = part
                            .iter()
                            .map(|lease| {
                                tokens.push(lease.token);
                                let outcome = match random.u8(..5) {
                                    0 => Outcome::Retry {
                                        delay: Duration::ZERO,
                                        reason: "r".into(),
                                    },
                                    1 => Outcome::Surrender {
                                        delay: Duration::ZERO,
                                        mark: None,
                                    },
                                    _ => {
                                        done.push(lease.job.id);
                                        Outcome::Complete { result: None }
                                    }
                                };
                                Settlement {
                                    receipt: grant.receipt(lease),
                                    outcome,
                                }
                            })
                            .collect();
                        let request = SettleRequest {
                            request: client.id(),
                            settlements,
                        };
                        let verdicts = client.store.settle(request).await.unwrap();
                        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
                    }
                }
            }
            (done, tokens)
        });
    }
    let (mut done, mut tokens) = (Vec::new(), Vec::new());
    while let Some(ended) = tasks.join_next().await {
        let (mut jobs, mut given) = ended.unwrap();
        done.append(&mut jobs);
        tokens.append(&mut given);
    }
    let ended = done.len();
    done.sort();
    done.dedup();
    assert_eq!((ended, done.len()), (720, 720), "each job completed once");
    let given = tokens.len();
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), given, "no token was given twice");
    let view = inspect::queues(&stores[0]).await.unwrap().remove(0);
    assert!(view.ledger.balances(), "{view:?}");
    assert_eq!(view.counts, inspect::Counts::default());
    assert_eq!((view.ledger.enqueued, view.ledger.completed), (720, 720));
    nothing_is_left(&path);
}

fn rows(path: &std::path::Path, table: &str) -> i64 {
    let db = rusqlite::Connection::open(path).unwrap();
    let count = format!("SELECT count(*) FROM leasehold_{table}");
    db.query_row(&count, [], |row| row.get(0)).unwrap()
}

#[tokio::test]
async fn keys_past_their_window_go_in_transactions_of_so_many() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let clock = ManualClock::default();
    let store = SqliteStore::with(&path, on(&clock)).unwrap();
    let mut client = Client::new(store.clone()).await;
    let window = Duration::from_secs(60);
    let jobs = (0..10).map(|n| job("q").unique_for(format!("{n}"), window).unwrap());
    client.enqueue(jobs.collect()).await.unwrap();
    clock.advance(window);
    let lasting = job("q").unique_for("lasting", window * 2).unwrap();
    client.enqueue(vec![lasting]).await.unwrap();

    let (before, request) = (store.commits(), client.id());
    let prune = PruneRequest {
        request,
        overdue: Duration::ZERO,
        max: 3,
    };
    assert_eq!(store.prune(prune).await.unwrap(), 0);
    assert_eq!(store.commits() - before, 4, "3, 3, 3 and 1");
    assert_eq!(rows(&path, "unique"), 1);
}

/// The call is with the store, and has no answer yet.
async fn asked<T>(call: &mut (impl Future<Output = T> + Unpin)) {
    tokio::select! {
        biased;
        _ = call => panic!("it was answered"),
        () = std::future::ready(()) => {}
    }
}

/// One transaction ends a lease and then notes the first thing of another of its grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_note_forgets_nothing_that_its_transaction_did_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let store = SqliteStore::open(&path).unwrap();
    let mut client = Client::new(store.clone()).await;
    client.enqueue(vec![job("q"); 2]).await.unwrap();
    let grant = client.claim("q", 2).await.unwrap().grants.remove(0);
    let settle = SettleRequest {
        request: client.id(),
        settlements: vec![Settlement {
            receipt: grant.receipt(&grant.leases[0]),
            outcome: Outcome::Complete { result: None },
        }],
    };
    client.lane = 1;
    let checkpoint = CheckpointRequest {
        request: client.id(),
        checkpoints: vec![Checkpoint {
            receipt: grant.receipt(&grant.leases[1]),
            seq: 1,
            bytes: "x".into(),
        }],
    };
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // The first waits for the lock, and the others for the first, so that they share a transaction.
    let before = store.commits();
    let side = std::fs::File::open(dir.path().join("jobs.db-turn")).unwrap();
    let mut first = Box::pin(store.open_session());
    asked(&mut first).await;
    while side.try_lock().is_ok() {
        side.unlock().unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut second = Box::pin(store.settle(settle));
    let mut third = Box::pin(store.checkpoint(checkpoint));
    asked(&mut second).await;
    asked(&mut third).await;
    other.execute_batch("COMMIT").unwrap();
    first.await.unwrap();
    let _ = second.await.unwrap();
    third.await.unwrap();
    assert_eq!(store.commits() - before, 2, "they did not share one");
    let live = inspect::leases(&store, LeaseFilter::default(), Page::first(9));
    assert_eq!(live.await.unwrap().rows.len(), 1);
    assert_eq!(rows(&path, "notes"), 1);
}

#[tokio::test]
async fn what_is_noted_of_a_lease_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.db");
    let mut client = Client::new(SqliteStore::open(&path).unwrap()).await;
    client.enqueue(vec![job("q"); 4]).await.unwrap();
    let mut grants = client.claim("q", 4).await.unwrap().grants;
    let checkpoints = grants[0].leases.iter().map(|lease| Checkpoint {
        receipt: grants[0].receipt(lease),
        seq: 1,
        bytes: vec![7; 1_000].into(),
    });
    let request = CheckpointRequest {
        checkpoints: checkpoints.collect(),
        request: client.id(),
    };
    client.store.checkpoint(request).await.unwrap();
    assert_eq!(rows(&path, "notes"), 4);
    let slow = grants[0].leases.pop().unwrap();
    client.complete(&grants).await.unwrap();
    assert_eq!(rows(&path, "notes"), 1, "only the slow one's");
    grants[0].leases = vec![slow];
    client.complete(&grants).await.unwrap();
    nothing_is_left(&path);
}

fn nothing_is_left(path: &std::path::Path) {
    let db = rusqlite::Connection::open(path).unwrap();
    for table in [
        "ready",
        "aside",
        "grants",
        "records",
        "notes",
        "unique",
        "exclusive",
    ] {
        let count = format!("SELECT count(*) FROM leasehold_{table}");
        let left: i64 = db.query_row(&count, [], |row| row.get(0)).unwrap();
        assert_eq!(left, 0, "{table}");
    }
}
