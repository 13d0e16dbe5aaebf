//! Tokens grow through whatever makes a server forget that it gave them.
//!
//! Beside each claim a plain counter on the same server gives tokens of its own, in the same
//! moments. It is the control arm: where it does not fall back, nothing was forgotten.

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::clock::ManualClock;
use leasehold::inspect;
use leasehold::job::Namespace;
use leasehold::store::{RedisOptions, RedisStore, Store as _};
use leasehold_conformance::{Driver, ManualFixture, queue};

use crate::redis::issuer::goes_on_behind_the_last;
use crate::redis::support::redis::{
    Cluster, PATIENCE, RDB_ONLY, SentinelSet, Server, Standalone, until,
};

const CLAIM: usize = 1_000;

/// In the slot of the queue's partition, and so with the same server.
const PLAIN: &str = "{tokens:default:0}:plain";

/// A process that has just started: what another one has seen is unknown to it.
async fn process(url: impl Into<String>) -> Driver {
    let namespace = Namespace::new("tokens").unwrap();
    let store = RedisStore::open(RedisOptions::new(url).namespace(namespace)).unwrap();
    let start = Instant::now();
    while store.open_session().await.is_err() || inspect::queue(&store, &queue()).await.is_err() {
        assert!(
            start.elapsed() < PATIENCE,
            "{:?}",
            store.open_session().await
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The time is the server's; nobody asks this clock.
    let unused = ManualClock::default();
    Driver::new(Arc::new(ManualFixture::new(store, unused))).await
}

/// The tokens of one life of the server, in the order in which they were given.
#[derive(Default)]
struct Given {
    ours: Vec<u64>,
    plain: Vec<u64>,
}

impl Given {
    async fn claim(&mut self, d: &Driver, server: &Server) {
        d.enqueue_many(CLAIM).await;
        let held = d.claim(CLAIM).await;
        assert_eq!(held.len(), CLAIM);
        self.ours.extend(held.iter().map(|held| held.token().get()));
        let last: u64 = server.tell(&["INCRBY", PLAIN, &CLAIM.to_string()]);
        self.plain.extend(last + 1 - CLAIM as u64..=last);
    }
}

/// How many tokens are not above all earlier ones, and how many were given before.
fn faults(before: &[u64], after: &[u64]) -> (usize, usize) {
    let mut top = 0;
    let mut known = HashSet::new();
    let mut faults = (0, 0);
    for token in before.iter().chain(after) {
        faults.0 += usize::from(*token <= top);
        faults.1 += usize::from(!known.insert(*token));
        top = top.max(*token);
    }
    faults
}

fn judge(what: &str, before: &Given, after: &Given) {
    let ours = faults(&before.ours, &after.ours);
    let plain = faults(&before.plain, &after.plain);
    println!("{what}: (fell back, given twice) ours {ours:?}, a plain counter {plain:?}");
    assert_eq!(ours, (0, 0), "{what}");
    assert!(plain.0 > 0, "{what}: the control arm must fall back");
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_from_process_to_process() {
    let server = Standalone::start(&[]);
    let clock = ManualClock::default();
    let process = async || {
        let options = RedisOptions::new(server.url())
            .namespace(Namespace::new("tokens").unwrap())
            .clock(clock.clone());
        let store = RedisStore::open(options).unwrap();
        Driver::new(Arc::new(ManualFixture::new(store, clock.clone()))).await
    };
    goes_on_behind_the_last(&clock, false, process).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_through_a_kill_with_snapshots_only() {
    let mut one = Standalone::start(RDB_ONLY);
    let (mut before, mut after) = (Given::default(), Given::default());
    let d = process(one.url()).await;
    before.claim(&d, &one.server).await;
    one.server.tell::<()>(&["SAVE"]);
    before.claim(&d, &one.server).await;
    one.server.restart();
    after.claim(&process(one.url()).await, &one.server).await;
    judge("kill -9 with snapshots only", &before, &after);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_through_an_old_snapshot() {
    let mut one = Standalone::start(RDB_ONLY);
    let (mut before, mut after) = (Given::default(), Given::default());
    let d = process(one.url()).await;
    before.claim(&d, &one.server).await;
    one.server.tell::<()>(&["SAVE"]);
    let (dump, old) = ("dump.rdb", "old.rdb");
    let file = |name| one.server.place().join(name);
    fs::copy(file(dump), file(old)).unwrap();
    before.claim(&d, &one.server).await;
    one.server.tell::<()>(&["SAVE"]);
    let (dump, old) = (file(dump), file(old));
    one.server.kill();
    fs::rename(old, dump).unwrap();
    one.server.restart();
    after.claim(&process(one.url()).await, &one.server).await;
    judge("restore of an old snapshot", &before, &after);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_through_a_flush() {
    let one = Standalone::start(&[]);
    let (mut before, mut after) = (Given::default(), Given::default());
    before.claim(&process(one.url()).await, &one.server).await;
    one.server.tell::<()>(&["FLUSHALL"]);
    after.claim(&process(one.url()).await, &one.server).await;
    judge("FLUSHALL", &before, &after);
}

/// Waits until a replica has all that its primary has now.
fn caught_up(replica: &Server, primary: &Server) {
    let offset = |server: &Server, field| -> Option<u64> {
        let offset = server.info(&["INFO", "replication"], field)?;
        offset.parse().ok()
    };
    let written = offset(primary, "master_repl_offset").unwrap();
    until("the replica has caught up", || {
        (offset(replica, "slave_repl_offset")? >= written).then_some(())
    });
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_through_a_failover_of_sentinels_that_loses_writes() {
    let mut set = SentinelSet::start(&[]);
    let (mut before, mut after) = (Given::default(), Given::default());
    let d = process(set.url()).await;
    before.claim(&d, &set.servers[0]).await;
    for replica in &set.servers[1..] {
        caught_up(replica, &set.servers[0]);
    }
    set.servers[0].cut_off();
    before.claim(&d, &set.servers[0]).await;
    let new = set.failed_over(set.servers[0].port());
    set.servers[0].kill();
    after
        .claim(&process(set.url()).await, &set.servers[new])
        .await;
    judge("failover by sentinels", &before, &after);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_through_a_failover_of_a_cluster_that_loses_writes() {
    let mut cluster = Cluster::start(&[]);
    let (mut before, mut after) = (Given::default(), Given::default());
    let d = process(cluster.url()).await;
    let old = cluster.owner_of(PLAIN);
    before.claim(&d, &cluster.nodes[old]).await;
    caught_up(&cluster.nodes[old + 3], &cluster.nodes[old]);
    cluster.nodes[old].cut_off();
    before.claim(&d, &cluster.nodes[old]).await;
    cluster.nodes[old].kill();
    let new = cluster.failed_over(PLAIN, old);
    after
        .claim(&process(cluster.url()).await, &cluster.nodes[new])
        .await;
    judge("failover of a cluster", &before, &after);
}
