//! Each mutating verb, with its reply lost on the way back: the server did it, and the client
//! cannot know. The repeat must get the first answer, and the books must show one transition.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::inspect::Ledger;
use leasehold::job::{JobState, Namespace, NewJob};
use leasehold::lease::Verdict;
use leasehold::store::{
    Checkpoint, CheckpointRequest, Checkpointed, ClaimRequest, ControlCommand, ControlRequest,
    EnqueueRequest, Enqueued, Outcome, PruneRequest, ReapRequest, RedisOptions, RedisStore,
    Renewal, Select, SettleRequest,
};
use leasehold::{ErrorKind, JobId, Result};
use leasehold_conformance::{Driver, Held, ManualFixture, TERM, job, queue};

use crate::redis::support::proxy::Proxy;
use crate::redis::support::redis::{Cluster, STEADY, Server, Standalone};

const HELD: Verdict = Verdict::Held {
    late: false,
    cancel: false,
};

/// A call that bears a name.
trait Named: Clone {
    fn rename(&mut self, d: &Driver);
}

macro_rules! named {
    ($($request:ty),*) => { $(
        impl Named for $request {
            fn rename(&mut self, d: &Driver) {
                self.request = d.request();
            }
        }
    )* };
}

named!(
    EnqueueRequest,
    ClaimRequest,
    SettleRequest,
    CheckpointRequest,
    ReapRequest,
    ControlRequest,
    PruneRequest
);

struct World {
    d: Driver,
    proxy: Proxy,
    partitions: u16,
    /// The flaw: a repeat goes under a new name, as if there were no request ids.
    forgets: bool,
    calm: AtomicBool,
    _servers: Servers,
}

/// Where the calls go.
enum Servers {
    One(#[expect(dead_code, reason = "it ends with its guard")] Standalone),
    Six(
        #[expect(dead_code, reason = "they end with their guard")] Cluster,
        #[expect(dead_code, reason = "they end with their guard")] Vec<Proxy>,
    ),
}

impl World {
    async fn new(forgets: bool) -> Self {
        Self::before_one(forgets, 1).await
    }

    async fn before_one(forgets: bool, partitions: u16) -> Self {
        let one = Standalone::start(&[]);
        let proxy = Proxy::start(one.server.port()).await;
        let url = format!("redis://127.0.0.1:{}", proxy.port());
        let options = RedisOptions::new(url).partitions(partitions);
        Self::open(options, partitions, forgets, proxy, Servers::One(one)).await
    }

    /// Before each primary of a cluster, which says that this is where it can be reached.
    async fn before_six(partitions: u16) -> Self {
        let mut six = Cluster::start(STEADY);
        // A replica would follow its primary through the proxy, and be counted.
        six.nodes[3..].iter_mut().for_each(Server::kill);
        let first = Proxy::start(six.nodes[0].port()).await;
        let mut proxies = Vec::new();
        for node in &six.nodes[1..3] {
            proxies.push(first.beside(node.port()).await);
        }
        for (node, proxy) in six.nodes.iter().zip([&first].into_iter().chain(&proxies)) {
            let port = proxy.port().to_string();
            node.tell::<()>(&["CONFIG", "SET", "cluster-announce-port", &port]);
        }
        let ports: Vec<u16> = [&first]
            .into_iter()
            .chain(&proxies)
            .map(Proxy::port)
            .collect();
        six.announced(&ports);
        let url = format!("redis+cluster://127.0.0.1:{}", first.port());
        let options = RedisOptions::new(url).partitions(partitions);
        Self::open(
            options,
            partitions,
            false,
            first,
            Servers::Six(six, proxies),
        )
        .await
    }

    async fn open(
        options: RedisOptions,
        partitions: u16,
        forgets: bool,
        proxy: Proxy,
        servers: Servers,
    ) -> Self {
        let clock = ManualClock::default();
        let options = options
            .namespace(Namespace::new("replies").unwrap())
            .clock(clock.clone());
        let store = RedisStore::open(options).unwrap();
        let d = Driver::new(Arc::new(ManualFixture::new(store, clock))).await;
        let world = Self {
            d,
            proxy,
            partitions,
            forgets,
            calm: AtomicBool::new(true),
            _servers: servers,
        };
        // Scripts are loaded and the session is known: from here on a verb's requests are its own.
        world.round().await;
        world.calm.store(false, Ordering::Relaxed);
        world
    }

    /// Loses the reply to one of the requests that a call takes, and repeats the call until it is
    /// answered. The first of `places` is that of the request that makes the transition.
    async fn known<R: Named, T>(
        &self,
        places: &[usize],
        mut call: R,
        send: impl AsyncFn(R) -> Result<T>,
    ) -> T {
        // Every partition that a call visits takes requests of its own.
        let more = usize::from(self.partitions - 1);
        let pass = if self.forgets {
            places[0]
        } else {
            places[fastrand::usize(..places.len())] + fastrand::usize(..=more)
        };
        let hit = usize::from(!self.calm.load(Ordering::Relaxed));
        self.proxy.lose_replies(pass, hit);
        loop {
            match send(call.clone()).await {
                Ok(answer) => {
                    self.proxy.lose_replies(0, 0);
                    return answer;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
            }
            if self.forgets {
                call.rename(&self.d);
            }
        }
    }

    async fn enqueue(&self, jobs: Vec<NewJob>) -> Vec<JobId> {
        let call = self.d.enqueue_request(jobs);
        let send = async |call| self.d.store().enqueue(call).await;
        let answers = self.known(&[0], call, send).await;
        let new = answers.into_iter().map(|answer| match answer {
            Enqueued::New(id) => id,
            Enqueued::Duplicate(id) => panic!("a duplicate of {id}"),
        });
        new.collect()
    }

    async fn claim(&self, max: usize) -> Vec<Held> {
        let call = self.d.claim_request(max);
        let send = async |call| self.d.store().claim(call).await;
        Held::all(&self.known(&[0], call, send).await)
    }

    async fn settle(&self, held: &Held, outcome: Outcome) -> Verdict {
        let call = self.d.settle_request(vec![(held, outcome)]);
        let send = async |call| self.d.store().settle(call).await;
        self.known(&[0], call, send).await[0]
    }

    async fn checkpoint(&self, held: &Held) -> Checkpointed {
        let call = CheckpointRequest {
            request: self.d.request(),
            checkpoints: vec![Checkpoint {
                receipt: held.receipt.clone(),
                seq: 1,
                bytes: "half".into(),
            }],
        };
        let send = async |call| self.d.store().checkpoint(call).await;
        self.known(&[0], call, send).await[0]
    }

    async fn renew(&self, held: &Held) -> Renewal {
        let send = async |_: Anew| self.d.store().renew(vec![held.beat()]).await;
        self.known(&[0], Anew, send).await.remove(0)
    }

    async fn reap(&self) -> usize {
        let call = ReapRequest {
            request: self.d.request(),
            max: 1_000,
        };
        let send = async |call| self.d.store().reap(call).await;
        self.known(&[2, 1, 0], call, send).await.len()
    }

    async fn retry_dead(&self) -> u64 {
        let dead = Select::State {
            queue: queue(),
            state: JobState::Dead,
            max: 10,
        };
        let call = self.d.control_request(ControlCommand::RetryDead(dead));
        let send = async |call| self.d.store().control(call).await;
        self.known(&[1, 0, 2], call, send).await.done
    }

    async fn prune(&self) -> u64 {
        let call = PruneRequest {
            request: self.d.request(),
            overdue: Duration::ZERO,
            max: 10,
        };
        let send = async |call| self.d.store().prune(call).await;
        self.known(&[1, 0], call, send).await
    }

    /// Five jobs through every verb.
    async fn round(&self) {
        let mut jobs = vec![job(); 4];
        jobs.push(job().retention(Duration::from_secs(1)));
        let ids = self.enqueue(jobs).await;
        // Of several partitions each has its own order.
        let mut held = self.claim(5).await;
        if self.partitions == 1 {
            assert_eq!(held.iter().map(Held::id).collect::<Vec<_>>(), ids);
        }
        held.sort_by_key(|held| ids.iter().position(|id| *id == held.id()));
        assert_eq!(held.iter().map(Held::id).collect::<Vec<_>>(), ids);
        let saved = self.checkpoint(&held[0]).await;
        assert!(matches!(saved, Checkpointed::Saved { .. }), "{saved:?}");
        let renewed = self.renew(&held[0]).await;
        assert!(matches!(renewed, Renewal::Held { .. }), "{renewed:?}");
        let outcomes = [complete(), retry(), surrender(), bury(), complete()];
        for (held, outcome) in held.iter().zip(outcomes) {
            assert_eq!(self.settle(held, outcome).await, HELD);
        }
        assert_eq!(self.retry_dead().await, 1);
        assert_eq!(self.claim(9).await.len(), 3);
        self.d.advance(TERM).await;
        assert_eq!(self.reap().await, 3);
        assert_eq!(self.prune().await, 1);
        let held = self.claim(9).await;
        assert_eq!(held.len(), 3);
        for held in &held {
            assert_eq!(self.settle(held, complete()).await, HELD);
        }
        assert!(self.claim(9).await.is_empty());
    }
}

/// A renewal has no name: it is evaluated anew.
#[derive(Clone)]
struct Anew;

impl Named for Anew {
    fn rename(&mut self, _: &Driver) {}
}

fn complete() -> Outcome {
    Outcome::Complete { result: None }
}

fn retry() -> Outcome {
    Outcome::Retry {
        delay: Duration::ZERO,
        reason: "it failed".into(),
    }
}

fn surrender() -> Outcome {
    Outcome::Surrender {
        delay: Duration::ZERO,
        mark: None,
    }
}

fn bury() -> Outcome {
    Outcome::Bury {
        reason: "hopeless".into(),
    }
}

/// 10,000 in the first two tests together on a campaign.
fn losses() -> usize {
    if crate::redis::in_campaign() {
        5_000
    } else {
        200
    }
}

async fn replies_get_lost(world: World, losses: usize) {
    let mut rounds = 1;
    while world.proxy.lost() < losses {
        world.round().await;
        rounds += 1;
    }
    let mut expected = Ledger::default();
    expected.enqueued = 5 * rounds;
    expected.granted = 11 * rounds;
    expected.completed = 5 * rounds;
    expected.retried = rounds;
    expected.surrendered = rounds;
    expected.buried = rounds;
    expected.expired_deadline = 3 * rounds;
    expected.pruned = rounds;
    assert_eq!(world.d.ledger().await, expected);
    let left = world.d.snapshot().await;
    left.assert_in_order();
    assert_eq!((left.jobs.len(), left.audit.len() as u64), (0, rounds));
    println!(
        "{} replies lost in {rounds} rounds, {} connections: {expected:?}",
        world.proxy.lost(),
        world.proxy.connections()
    );
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_lost_reply_costs_nothing() {
    replies_get_lost(World::new(false).await, losses()).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_lost_reply_costs_nothing_across_partitions() {
    let world = World::before_one(false, 3).await;
    replies_get_lost(world, losses() / 2).await;
}

/// The cluster's client repeats by itself what it thinks was lost; that is one more repeat.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_lost_reply_costs_nothing_in_a_cluster() {
    for partitions in [1, 3] {
        let world = World::before_six(partitions).await;
        replies_get_lost(world, losses() / 10).await;
    }
}

/// Control arm: without request ids every verb does harm, or lies about what it did.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn without_request_ids_a_lost_reply_does_harm() {
    let world = World::new(true).await;
    let d = &world.d;
    let before = d.ledger().await;
    let mut jobs = vec![job(); 5];
    jobs.push(job().retention(Duration::from_secs(1)));
    d.enqueue_all(jobs).await;

    assert_eq!(world.claim(2).await.len(), 2);
    assert_eq!(d.ledger().await.live, 4, "a claim strands its leases");
    let held = d.claim(2).await;
    assert!(world.settle(&held[0], bury()).await.is_fenced());
    assert_eq!(
        d.ledger().await.buried - before.buried,
        1,
        "and yet it was applied"
    );
    let done = Outcome::Complete {
        result: Some("done".into()),
    };
    assert!(world.settle(&held[1], done).await.is_fenced());
    assert_eq!(world.retry_dead().await, 0);
    assert_eq!(
        d.snapshot().await.audit.len(),
        1 + 2,
        "two records of one command"
    );
    assert_eq!(d.queue().await.counts.dead, 0);
    d.advance(TERM).await;
    assert_eq!(world.reap().await, 0, "nobody hears who died");
    assert_eq!(d.ledger().await.expired() - before.expired(), 4);
    assert_eq!(world.prune().await, 0);
    assert_eq!(d.ledger().await.pruned - before.pruned, 1);
    let call = d.enqueue_request(vec![job(); 2]);
    let send = async |call| d.store().enqueue(call).await;
    for answer in world.known(&[0], call, send).await {
        let Enqueued::Duplicate(_) = answer else {
            panic!("{answer:?}: a job is refused for the sake of itself");
        };
    }
    let enqueued = d.ledger().await.enqueued - before.enqueued;
    assert_eq!(enqueued, 6 + 2, "and yet they were stored");
}
