//! Every case of the conformance suite on private Redis servers, each in a namespace of its own:
//! on one server, on a cluster of six, and for a user who may do no more than [`acl_rule`] says.

use leasehold_support as support;

use std::sync::OnceLock;

use leasehold::clock::ManualClock;
use leasehold::job::Namespace;
use leasehold::store::{RedisOptions, RedisStore, acl_rule};
use leasehold::{ErrorKind, Store};
use leasehold_conformance::ManualFixture;
use support::redis::{Cluster, STEADY, Standalone};

/// One server for all cases. Its watchdog ends it with the process.
fn server() -> &'static Standalone {
    static SERVER: OnceLock<Standalone> = OnceLock::new();
    SERVER.get_or_init(|| Standalone::start(&[]))
}

fn nodes() -> &'static Cluster {
    static NODES: OnceLock<Cluster> = OnceLock::new();
    NODES.get_or_init(|| Cluster::start(STEADY))
}

/// A server that lets nobody in but those whom a case names.
fn strict_server() -> &'static Standalone {
    static SERVER: OnceLock<Standalone> = OnceLock::new();
    SERVER.get_or_init(|| Standalone::with_acl("-@all"))
}

fn fresh() -> Namespace {
    Namespace::new(format!("case-{:016x}", fastrand::u64(..))).unwrap()
}

fn fixture(url: impl std::fmt::Display, namespace: Namespace) -> ManualFixture {
    let clock = ManualClock::default();
    // A busy machine is not what the cases are about.
    let options = RedisOptions::new(format!("{url}?timeout=60s"))
        .namespace(namespace)
        .clock(clock.clone());
    ManualFixture::new(RedisStore::open(options).unwrap(), clock)
}

/// The URL of a user of the strict server who may reach this namespace and no other.
fn user_of(namespace: &Namespace) -> String {
    let rule = acl_rule(namespace);
    let mut words = vec!["ACL", "SETUSER", namespace.as_str(), "on", ">secret"];
    words.extend(rule.split(' '));
    let server = &strict_server().server;
    server.tell::<()>(&words);
    format!("redis://{namespace}:secret@{}", server.address())
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn single() -> ManualFixture {
    fixture(server().url(), fresh())
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn clustered() -> ManualFixture {
    fixture(nodes().url(), fresh())
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn restricted() -> ManualFixture {
    let namespace = fresh();
    fixture(user_of(&namespace), namespace)
}

leasehold_conformance::conformance!(redis, single, ignore = "needs redis-server: ./tests/run");
leasehold_conformance::conformance!(
    redis_cluster,
    clustered,
    ignore = "needs redis-server: ./tests/run"
);
leasehold_conformance::conformance!(
    redis_least_rights,
    restricted,
    ignore = "needs redis-server: ./tests/run"
);

/// Control arm: the rule does keep somebody out.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_user_of_a_namespace_reaches_no_other() {
    let namespace = fresh();
    let url = user_of(&namespace);
    let own = RedisStore::open(RedisOptions::new(&url).namespace(namespace)).unwrap();
    own.open_session().await.unwrap();
    let other = RedisStore::open(RedisOptions::new(&url).namespace(fresh())).unwrap();
    let refused = other.open_session().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
}
