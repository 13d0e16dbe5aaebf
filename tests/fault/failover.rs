//! Failovers that lose what was acknowledged: of a Sentinel set, and of a cluster.
//!
//! The primary is cut off from its replicas while workers go on with it: jobs are enqueued, granted
//! and completed that no replica hears of. Then it is gone, and a replica takes over from what it
//! has. Tokens and fenced writes must hold; jobs and settlements of the lost moments are gone, and
//! counted.
//!
//! In the campaign only: a failover takes the better part of a minute.

use std::time::Instant;

use leasehold::job::JobState;
use leasehold_conformance::checker::Rule;

use crate::crew::Chore;
use crate::process::{PATIENCE, Process};
use crate::roles::Errand;
use crate::stage::Stage;
use crate::support::redis::{Cluster, SentinelSet, Server, until};
use crate::table::{Row, report};
use crate::world::figures;
use crate::{MACHINE, in_campaign};

const KEYS: usize = 4;
const WAITS: usize = 120;
const ROUNDS: usize = 3;

/// Several servers, one of which answers for the queue.
trait Servers: Sized + Send + 'static {
    fn start() -> Self;
    fn url(&self) -> String;
    /// The one that answers, and its replicas.
    fn primary(&self) -> (&Server, Vec<&Server>);
    /// The primary goes, and another takes over; which.
    fn fail_over(&mut self) -> &Server;
}

struct Sentinels(SentinelSet);

impl Servers for Sentinels {
    fn start() -> Self {
        Self(SentinelSet::start(&[]))
    }

    fn url(&self) -> String {
        self.0.url()
    }

    fn primary(&self) -> (&Server, Vec<&Server>) {
        (&self.0.servers[0], self.0.servers[1..].iter().collect())
    }

    fn fail_over(&mut self) -> &Server {
        // Cut off, the primary is down for the sentinels; for clients not before it is killed.
        let new = self.0.failed_over(self.0.servers[0].port());
        self.0.servers[0].kill();
        &self.0.servers[new]
    }
}

struct Nodes {
    cluster: Cluster,
    old: usize,
}

/// A key of the queue's partition, by the name that is hashed.
fn key() -> String {
    format!(
        "{{leasehold:{}:0}}:counter",
        <Errand as leasehold::Job>::QUEUE
    )
}

impl Servers for Nodes {
    fn start() -> Self {
        let cluster = Cluster::start(&[]);
        let old = cluster.owner_of(&key());
        Self { cluster, old }
    }

    fn url(&self) -> String {
        self.cluster.url()
    }

    fn primary(&self) -> (&Server, Vec<&Server>) {
        let nodes = &self.cluster.nodes;
        (&nodes[self.old], vec![&nodes[(self.old + 3) % 6]])
    }

    fn fail_over(&mut self) -> &Server {
        self.cluster.nodes[self.old].kill();
        let new = self.cluster.failed_over(&key(), self.old);
        &self.cluster.nodes[new]
    }
}

/// A counter in the slot of the queue: what a token must not be.
fn count(server: &Server, by: u64) -> u64 {
    server.tell(&["INCRBY", &key(), &by.to_string()])
}

fn caught_up(replica: &Server, primary: &Server) {
    let offset = |server: &Server, field| -> Option<u64> {
        server.info(&["INFO", "replication"], field)?.parse().ok()
    };
    let written = offset(primary, "master_repl_offset").unwrap();
    until("the replica has caught up", || {
        (offset(replica, "slave_repl_offset")? >= written).then_some(())
    });
}

/// Waits until the workers have said so often that they have read and wait for a word.
async fn opened(crew: &mut [Process], wanted: usize) {
    let (mut opened, start) = (0, Instant::now());
    while opened < wanted {
        assert!(start.elapsed() < PATIENCE, "{opened} opened");
        for process in &mut *crew {
            while let Some(line) = process.overhear() {
                opened += usize::from(line.starts_with("open"));
            }
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

/// What one failover came to.
struct Lost {
    row: Row,
    /// Completions that were accepted, and of which the new primary knows nothing.
    settlements: u64,
    counted: (u64, u64),
}

async fn fail_over<S: Servers>(case: &str) -> Lost {
    let mut servers = tokio::task::block_in_place(S::start);
    let mut stage = Stage::at(servers.url()).await;
    stage.registers(KEYS).await;
    let mut crew = Vec::new();
    for owner in ["first", "second"] {
        let mut role = stage.role(owner);
        role.slots = 3 * KEYS;
        crew.push(Stage::hire(role).await);
    }
    let waiting = (0..KEYS).map(|key| Chore::Add { key, waiting: 1 });
    let waiting: Vec<_> = waiting.collect();
    // Jobs that the replicas know, and whose ends they do not.
    stage.waits(WAITS, 400).await;
    tokio::task::block_in_place(|| {
        let (primary, replicas) = servers.primary();
        for replica in replicas {
            caught_up(replica, primary);
        }
        primary.cut_off();
    });
    // From here on all is lost: jobs, grants, reads under them, settlements.
    let before = stage.world.look().await.ledger.completed;
    stage.enqueue(&waiting).await;
    opened(&mut crew, KEYS).await;
    stage.waits(20, 10).await;
    let ended = |view: &leasehold::inspect::QueueView| view.ledger.completed >= before + 20;
    stage.world.until("settlements to be lost", ended).await;
    let counted = tokio::task::block_in_place(|| count(servers.primary().0, 50));
    let recounted = tokio::task::block_in_place(|| count(servers.fail_over(), 1));

    // The same registers, under grants of the new primary. Then those who were left behind write.
    while stage.world.client.queues().await.is_err() {}
    stage.enqueue(&waiting).await;
    opened(&mut crew, KEYS).await;
    for process in &mut crew {
        process.tell(4 * KEYS);
    }
    stage.drained().await;
    let completed: Vec<_> = stage.world.jobs(JobState::Completed).await;
    let settlements = stage.settlements_lost(&completed);
    let judged = stage.finish(crew).await;
    let row = judged.row.clone();
    assert_eq!(row.regressions, 0, "{case}: {:?}", judged.violations);
    assert_eq!(judged.broke(Rule::WriteLost), 0, "{:?}", judged.violations);
    assert!(row.refused >= KEYS as u64, "{case}: {}", row.refused);
    assert!(settlements > 0, "{case}: nothing was lost");
    Lost {
        row,
        settlements,
        counted: (counted, recounted),
    }
}

async fn failovers<S: Servers>(case: &'static str) {
    let _machine = MACHINE.read().await;
    if !in_campaign() {
        return figures(&format!("{case}: NOT RUN, in the campaign only"));
    }
    let (mut sum, mut settlements) = (Row::default(), 0);
    let mut counted = (0, 0);
    for _ in 0..ROUNDS {
        let lost = fail_over::<S>(case).await;
        assert!(lost.counted.1 < lost.counted.0, "this test cannot fail");
        counted = lost.counted;
        settlements += lost.settlements;
        let row = lost.row;
        sum.acknowledged += row.acknowledged;
        sum.lost += row.lost;
        sum.duplicated += row.duplicated;
        sum.refused += row.refused;
        sum.takeovers.extend(row.takeovers);
    }
    let (before, after) = counted;
    sum.control = format!("a counter: {before}, then {after}; {settlements} settlements lost");
    report(case, sum);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn sentinel_failover() {
    failovers::<Sentinels>("failover by Sentinel").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn cluster_failover() {
    failovers::<Nodes>("failover of a cluster").await;
}
