//! The store is a library of functions: servers that have none, that forget it, that have no room
//! for it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::hooks::{Level, examine_redis};
use leasehold::job::Namespace;
use leasehold::store::{Outcome, RedisOptions, RedisStore, Renewal};
use leasehold::{ErrorKind, Store};
use leasehold_conformance::{Driver, Held, ManualFixture, job};

use crate::redis::support::redis::Standalone;

fn options(server: &Standalone, namespace: &str) -> RedisOptions {
    RedisOptions::new(server.url()).namespace(Namespace::new(namespace).unwrap())
}

/// By the server's clock.
async fn driver(server: &Standalone) -> Driver {
    let store = RedisStore::open(options(server, "a")).unwrap();
    Driver::new(Arc::new(ManualFixture::new(store, ManualClock::default()))).await
}

/// Functions are what the store is made of: where there are none it says so, and so does the
/// doctor.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_without_functions_is_refused_in_plain_words() {
    for (lines, kind) in [
        (&["rename-command FCALL \"\""][..], ErrorKind::Unsupported),
        (&["rename-command FUNCTION \"\""], ErrorKind::Unsupported),
        (
            &["user default on nopass ~* &* +@all -function"],
            ErrorKind::Denied,
        ),
        (
            &["user default on nopass ~* &* +@all -fcall"],
            ErrorKind::Denied,
        ),
    ] {
        let server = Standalone::start(lines);
        let store = RedisStore::open(options(&server, "a")).unwrap();
        let refused = store.open_session().await.unwrap_err();
        assert_eq!(refused.kind(), kind, "{lines:?}: {refused}");
        let findings = examine_redis(server.url()).await.unwrap();
        let rights = findings.iter().find(|finding| finding.check == "rights");
        let rights = rights.unwrap();
        assert_eq!(rights.level, Level::Risk, "{lines:?}: {rights:?}");
        assert!(rights.found.contains("function"), "{lines:?}: {rights:?}");
    }
}

/// A library that somebody flushed is loaded again by whoever calls next: no call fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_library_that_is_flushed_under_workers_comes_back() {
    let server = Standalone::start(&[]);
    let stop = Arc::new(AtomicBool::new(false));
    let finished = Arc::new(AtomicUsize::new(0));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let d = driver(&server).await;
        let (stop, finished) = (Arc::clone(&stop), Arc::clone(&finished));
        workers.spawn(async move {
            let (mut made, mut done) = (HashSet::new(), HashSet::new());
            loop {
                let stops = stop.load(Ordering::Relaxed);
                if !stops {
                    made.extend(d.enqueue_many(20).await);
                }
                let held = d.claim(10).await;
                if stops && held.is_empty() {
                    return (made, done);
                }
                let beats = held.iter().map(Held::beat).collect();
                let renewed = d.store().renew(beats).await.unwrap();
                let is_held = |renewal: &Renewal| matches!(renewal, Renewal::Held { .. });
                assert!(renewed.iter().all(is_held), "{renewed:?}");
                for held in held {
                    d.settled(&held, Outcome::Complete { result: None }).await;
                    assert!(done.insert(held.id()), "a job was done twice");
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    for flush in 0..20 {
        let before = finished.load(Ordering::Relaxed);
        server.server.tell::<()>(&["FUNCTION", "FLUSH"]);
        while finished.load(Ordering::Relaxed) < before + 50 {
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert!(!workers.is_empty(), "flush {flush} ended the workers");
        }
    }
    stop.store(true, Ordering::Relaxed);
    let (mut made, mut done) = (HashSet::new(), HashSet::new());
    for (more_made, more_done) in workers.join_all().await {
        made.extend(more_made);
        done.extend(more_done);
    }
    assert_eq!(made, done);
    let ledger = driver(&server).await.ledger().await;
    assert!(ledger.balances(), "{ledger:?}");
    assert_eq!((ledger.live, ledger.completed), (0, made.len() as u64));
}

/// To load a library takes memory: a full server that has it lets holders out, and one that has not
/// says that it is full.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_full_server_takes_no_library_and_runs_the_one_it_has() {
    let server = Standalone::start(&[]);
    let memory = |limit| {
        let words = ["CONFIG", "SET", "maxmemory", limit];
        server.server.tell::<()>(&words);
    };
    let d = driver(&server).await;
    d.enqueue(job()).await;
    let held = d.claim_one().await;
    memory("1");
    // Another process, too.
    let store = RedisStore::open(options(&server, "a")).unwrap();
    store.open_session().await.unwrap();
    let renewal = store.renew(vec![held.beat()]).await.unwrap();
    assert!(matches!(renewal[..], [Renewal::Held { .. }]), "{renewal:?}");

    server.server.tell::<()>(&["FUNCTION", "FLUSH"]);
    let refused = store.renew(vec![held.beat()]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
    let refused = store.open_session().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
    memory("0");
    d.settled(&held, Outcome::Complete { result: None }).await;
}
