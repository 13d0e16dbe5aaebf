//! The link on real servers that are killed, frozen, replaced and refuse it.

#![allow(clippy::disallowed_methods, reason = "it measures the real time")]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::io::Read as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use redis::Value;
use tokio::task::JoinSet;

use super::RedisOptions;
use super::link::{Function, Library, Link};
use crate::error::{Error, ErrorKind, Result};
use leasehold_support::certs::Authority;
use leasehold_support::redis::{AOF, Cluster, PATIENCE, SentinelSet, Server, Standalone};

fn link(url: &str) -> Link {
    Link::open(&RedisOptions::new(url)).unwrap()
}

/// Counts up at a key, and answers the count.
fn counter() -> Function {
    let text = "redis.register_function(LIBRARY .. 'count', function(keys)
        return redis.call('INCR', keys[1])
    end)";
    Library::new("test", text).function("count")
}

async fn count(link: &Link, key: &str) -> Result<i64> {
    match link.call(&counter(), &[key.as_bytes()], &[]).await? {
        Value::Int(count) => Ok(count),
        other => panic!("{other:?}"),
    }
}

/// Repeats until it is answered. What comes before must be worth repeating, and must not claim to
/// know that nothing was applied.
async fn count_at_last(link: &Link, key: &str) -> i64 {
    let start = Instant::now();
    loop {
        match count(link, key).await {
            Ok(count) => return count,
            Err(error) => {
                assert!(error.is_transient(), "{error:?}");
                assert!(!error.kind().is_certain(), "{error:?}");
                assert!(start.elapsed() < PATIENCE, "still {error}");
            }
        }
    }
}

async fn ping(link: &Link) -> Result<()> {
    link.run(b"n", redis::cmd("PING")).await.map(drop)
}

async fn refused(url: &str) -> Error {
    ping(&link(url)).await.unwrap_err()
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_link_outlives_its_server() {
    let mut one = Standalone::start(AOF);
    let link = link(one.url());
    assert_eq!(count(&link, "n").await.unwrap(), 1);
    for round in 0..3 {
        one.server.kill();
        let error = count(&link, "n").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        one.server.restart();
        // The server may have forgotten the library; the link loads it again.
        assert_eq!(count_at_last(&link, "n").await, 2 + round);
    }
    one.server.tell::<()>(&["FUNCTION", "FLUSH"]);
    assert_eq!(count(&link, "n").await.unwrap(), 5);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_frozen_server_is_a_timeout_and_not_a_hang() {
    let one = Standalone::start(&[]);
    let link = link(&format!("{}?timeout=200ms", one.url()));
    assert_eq!(count(&link, "n").await.unwrap(), 1);
    one.server.pause();
    for _ in 0..3 {
        let asked = tokio::time::timeout(PATIENCE / 3, count(&link, "n"));
        let error = asked.await.expect("no hang").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    one.server.resume();
    // The call that was under way was applied, and those that were not sent were not.
    assert_eq!(count_at_last(&link, "n").await, 3);
}

#[tokio::test]
async fn a_process_dials_once_for_all_its_callers() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", server.local_addr().unwrap());
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&accepted);
    std::thread::spawn(move || {
        for connection in server.incoming() {
            counted.fetch_add(1, Ordering::SeqCst);
            // Hears something, and hangs up.
            let _ = connection.unwrap().read(&mut [0; 64]);
        }
    });
    let link = link(&url);
    let mut calls = JoinSet::new();
    for _ in 0..40 {
        let link = link.clone();
        calls.spawn(async move { ping(&link).await.map_err(|error| error.kind()) });
    }
    for outcome in calls.join_all().await {
        assert_eq!(outcome, Err(ErrorKind::Unavailable));
    }
    let accepted = accepted.load(Ordering::SeqCst);
    assert!(
        (1..=4).contains(&accepted),
        "{accepted} connections for 40 callers"
    );
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn after_a_failover_the_sentinels_name_the_new_primary() {
    let mut set = SentinelSet::start(&[]);
    let link = link(&set.url());
    assert_eq!(count(&link, "n").await.unwrap(), 1);
    let old = set.servers[0].port();
    set.servers[0].replicated(2);
    set.servers[0].kill();
    let new = set.failed_over(old);
    assert_eq!(count_at_last(&link, "n").await, 2);
    assert_eq!(set.servers[new].tell::<u32>(&["GET", "n"]), 2);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_demoted_primary_is_left_for_the_new_one() {
    let set = SentinelSet::start(&[]);
    let link = link(&set.url());
    assert_eq!(count(&link, "n").await.unwrap(), 1);
    let old = &set.servers[0];
    old.cut_off();
    let new = set.failed_over(old.port());
    // Nobody has told this client: it is still with the old one.
    assert_eq!(count(&link, "n").await.unwrap(), 2);
    old.heal();
    let start = Instant::now();
    while old.info(&["INFO", "replication"], "role").as_deref() != Some("slave") {
        assert!(
            start.elapsed() < PATIENCE,
            "the old primary is never demoted"
        );
    }
    // What the old one took while it was cut off is lost.
    let counted = count_at_last(&link, "n").await;
    assert_eq!(set.servers[new].tell::<i64>(&["GET", "n"]), counted);
}

/// A key for each of the three primaries.
const KEYS: [&str; 3] = ["a", "b", "c"];

fn owners(cluster: &Cluster) -> Vec<usize> {
    KEYS.iter().map(|key| cluster.owner_of(key)).collect()
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn in_a_cluster_calls_go_where_the_slots_are() {
    let mut cluster = Cluster::start(&[]);
    let mut spread = owners(&cluster);
    spread.sort_unstable();
    assert_eq!(spread, [0, 1, 2], "the keys are on three nodes");
    let link = link(&format!("{}?timeout=1s", cluster.url()));
    assert!(link.is_cluster());
    for key in KEYS {
        assert_eq!(count(&link, key).await.unwrap(), 1);
    }
    // Killed, and frozen: the second gives no sign of being gone.
    for (key, frozen) in [(KEYS[0], false), (KEYS[1], true)] {
        let old = cluster.owner_of(key);
        cluster.nodes[old].replicated(1);
        if frozen {
            cluster.nodes[old].pause();
            taken_over(&cluster.nodes[old + 3]);
        } else {
            cluster.nodes[old].kill();
            cluster.failed_over(key, old);
        }
        assert_eq!(count_at_last(&link, key).await, 2);
        if frozen {
            cluster.nodes[old].resume();
        }
        cluster.nodes[old].restart();
        cluster.settled();
    }
    for (key, counted) in KEYS.iter().zip([3, 3, 2]) {
        assert_eq!(count_at_last(&link, key).await, counted);
    }
}

fn taken_over(replica: &Server) {
    leasehold_support::redis::until("the replica has taken over", || {
        let role = replica.info(&["INFO", "replication"], "role")?;
        let state = replica.info(&["CLUSTER", "INFO"], "cluster_state")?;
        (role == "master" && state == "ok").then_some(())
    });
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_slot_that_moves_is_followed() {
    let cluster = Cluster::start(&[]);
    let link = link(&cluster.url());
    assert_eq!(count(&link, "a").await.unwrap(), 1);
    let (from, to) = (cluster.owner_of("a"), cluster.owner_of("b"));
    let (source, target) = (&cluster.nodes[from], &cluster.nodes[to]);
    let id = |node: &Server| node.tell::<String>(&["CLUSTER", "MYID"]);
    let slot = super::link::slot(b"a").to_string();
    assert_eq!(
        source.tell::<u16>(&["CLUSTER", "KEYSLOT", "a"]).to_string(),
        slot
    );
    target.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(source)]);
    source.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(target)]);
    let port = target.port().to_string();
    source.tell::<String>(&["MIGRATE", "127.0.0.1", &port, "a", "0", "5000"]);
    // The key is there, the slot is still here: ASK.
    assert_eq!(count_at_last(&link, "a").await, 2);
    for node in [target, source] {
        node.tell::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &id(target)]);
    }
    // The slot is there: MOVED.
    assert_eq!(count_at_last(&link, "a").await, 3);

    let wrong = Link::open(&RedisOptions::new(format!("redis://{}", source.address())));
    let error = count(&wrong.unwrap(), "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("redis+cluster"), "{error}");
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn only_a_server_with_the_right_certificate_is_trusted() {
    let place = tempfile::TempDir::new().unwrap();
    let ours = Authority::new(place.path(), "ours");
    let theirs = Authority::new(place.path(), "theirs");
    let url = |one: &Standalone, authority: &Authority| {
        format!("{}?ca={}", one.url(), authority.root().display())
    };
    let (certificate, key) = ours.issue("127.0.0.1", false);
    let good = Standalone::with_tls(&certificate, &key);
    assert_eq!(count(&link(&url(&good, &ours)), "n").await.unwrap(), 1);

    let (certificate, key) = ours.issue("127.0.0.1", true);
    let expired = Standalone::with_tls(&certificate, &key);
    let (certificate, key) = ours.issue("db.example", false);
    let elsewhere = Standalone::with_tls(&certificate, &key);
    for (case, url) in [
        ("another authority", url(&good, &theirs)),
        ("the system's authorities", good.url().to_owned()),
        ("expired", url(&expired, &ours)),
        ("another host", url(&elsewhere, &ours)),
    ] {
        let error = refused(&url).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{case}: {error:?}");
        assert!(error.to_string().contains("certificate"), "{case}: {error}");
    }
    let missing = RedisOptions::new(format!("{}?ca=/nowhere.pem", good.url()));
    let error = Link::open(&missing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn who_is_not_let_in_hears_so() {
    let one = Standalone::with_acl("~* &* +@all -incr");
    let inside = count(&link(one.url()), "n").await.unwrap_err();
    // The script had begun when it was stopped.
    assert_eq!(inside.kind(), ErrorKind::Unexpected, "{inside:?}");

    one.server.tell::<()>(&["ACL", "SETUSER", "app", "-fcall"]);
    let before = count(&link(one.url()), "n").await.unwrap_err();
    assert_eq!(before.kind(), ErrorKind::Denied, "{before:?}");
    assert!(!before.is_transient() && before.kind().is_certain());

    let address = one.server.address();
    for login in ["", "app:hush@", "nobody:hush@", ":hush@"] {
        let error = refused(&format!("redis://{login}{address}")).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{login}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("hush"));
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn what_is_published_arrives_and_silence_is_noticed() {
    let mut one = Standalone::start(&[]);
    let link = link(one.url());
    let mut listener = link.listen("bell").await.unwrap();
    assert_eq!(one.server.tell::<u32>(&["PUBLISH", "bell", "ding"]), 1);
    assert_eq!(listener.next().await.unwrap(), b"ding");
    one.server.kill();
    assert_eq!(listener.next().await, None);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn in_a_cluster_and_behind_sentinels_everybody_hears() {
    let cluster = Cluster::start(&[]);
    let mut listener = link(&cluster.url()).listen("bell").await.unwrap();
    cluster.nodes[2].tell::<u32>(&["PUBLISH", "bell", "ding"]);
    assert_eq!(listener.next().await.unwrap(), b"ding");

    let set = SentinelSet::start(&[]);
    let mut listener = link(&set.url()).listen("bell").await.unwrap();
    set.servers[0].tell::<u32>(&["PUBLISH", "bell", "dong"]);
    assert_eq!(listener.next().await.unwrap(), b"dong");
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_dedicated_link_works_when_the_other_runtime_stands_still() {
    let one = Standalone::start(&[]);
    let link = link(one.url());
    assert_eq!(count(&link, "n").await.unwrap(), 1);
    // This thread is the only one of the first runtime, and waits for the second.
    let counted = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async move {
            let own = link.dedicated().unwrap();
            count(&own, "n").await.unwrap()
        })
    });
    assert_eq!(counted.join().unwrap(), 2);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_socket_in_the_file_system_will_do() {
    let place = tempfile::TempDir::new().unwrap();
    let path = place.path().join("redis.sock");
    let socket = format!("unixsocket {}", path.display());
    let _one = Standalone::start(&[&socket]);
    let link = link(&format!("redis+unix://{}", path.display()));
    assert_eq!(count(&link, "n").await.unwrap(), 1);
}
