//! What would take the server long goes in steps: no call keeps the others waiting.

use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::job::{JobState, Namespace};
use leasehold::lease::Progress;
use leasehold::store::{
    Beat, ControlCommand, LeaseSelect, RedisOptions, RedisStore, Renewal, Select,
};
use leasehold_conformance::{Driver, Held, ManualFixture, TERM, job, queue};

use crate::redis::support::redis::Standalone;

/// What the server keeps of the windows of unique keys.
const WINDOWS: &str = "{steps:default:0}:uwin";

/// Takes about five milliseconds of a core of the machine on which the limit was set: on a slower one,
/// so much more.
const FIVE_MILLISECONDS: &str = "local x = 0 for n = 1, 400000 do x = x + n % 7 end return x";

struct World {
    d: Driver,
    server: Standalone,
}

/// What the server did for a piece of work.
struct Spent {
    scripts: u64,
    cpu: f64,
}

impl Spent {
    /// Seconds of its core for one script, on average.
    fn each(&self) -> f64 {
        self.cpu / self.scripts as f64
    }
}

impl World {
    async fn new() -> Self {
        let server = Standalone::start(&[]);
        let clock = ManualClock::default();
        let options = RedisOptions::new(server.url())
            .namespace(Namespace::new("steps").unwrap())
            .clock(clock.clone());
        let store = RedisStore::open(options).unwrap();
        let d = Driver::new(Arc::new(ManualFixture::new(store, clock))).await;
        Self { d, server }
    }

    /// Script calls and CPU seconds so far. The time of day would tell who else uses the machine.
    fn spent(&self) -> Spent {
        let server = &self.server.server;
        let cpu = |field: &str| {
            let value = server.info(&["INFO", "cpu"], field).unwrap_or_default();
            value.parse::<f64>().unwrap()
        };
        Spent {
            scripts: server.calls("evalsha") + server.calls("eval"),
            cpu: cpu("used_cpu_user") + cpu("used_cpu_sys"),
        }
    }

    async fn spending<T>(&self, work: impl Future<Output = T>) -> (T, Spent) {
        let before = self.spent();
        let done = work.await;
        let after = self.spent();
        let spent = Spent {
            scripts: after.scripts - before.scripts,
            cpu: after.cpu - before.cpu,
        };
        (done, spent)
    }

    /// What five milliseconds are on this machine.
    async fn limit(&self) -> f64 {
        let loops = async {
            for _ in 0..20 {
                let words = ["EVAL", FIVE_MILLISECONDS, "0"];
                self.server.server.tell::<i64>(&words);
            }
        };
        self.spending(loops).await.1.each()
    }

    /// No fewer calls than this work takes in steps, and none that is long: the steps of a kind
    /// are alike.
    async fn assert_short(&self, what: &str, spent: &Spent, least: u64) {
        let limit = self.limit().await;
        println!(
            "{what}: {} calls of {:.2} ms; five milliseconds are {:.2} here",
            spent.scripts,
            spent.each() * 1e3,
            limit * 1e3
        );
        assert!(spent.scripts >= least, "{what}: {} calls", spent.scripts);
        assert!(spent.each() <= limit, "{what}: {} s a call", spent.each());
    }

    async fn control(&self, command: ControlCommand) -> u64 {
        let request = self.d.control_request(command);
        self.d.store().control(request).await.unwrap().done
    }

    /// Leases from claims of so many.
    async fn hold(&self, jobs: usize, of: usize) -> Vec<Held> {
        self.d.enqueue_many(jobs).await;
        let mut held = Vec::new();
        while held.len() < jobs {
            held.extend(self.d.claim(of).await);
        }
        held
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_thousand_expiries() {
    for of in [1_000, 50, 1] {
        let world = World::new().await;
        let d = &world.d;
        let held = world.hold(1_100, of).await;
        d.advance(TERM * 2).await;
        let request = d.claim_request(1_000);
        let claim = async { d.store().claim(request.clone()).await.unwrap() };
        let (claimed, spent) = world.spending(claim).await;
        let tokens = |held: &[Held]| held.iter().map(Held::token).collect::<Vec<_>>();
        let expired: Vec<_> = claimed.expired.iter().map(|expiry| expiry.token).collect();
        assert_eq!(
            expired,
            tokens(&held[..1_000]),
            "the oldest, in their order"
        );
        world.assert_short("1,000 expiries", &spent, 20).await;
        // They are first in line, in the order in which they were given.
        let again = Held::all(&claimed);
        let ids = |held: &[Held]| held.iter().map(Held::id).collect::<Vec<_>>();
        assert_eq!(ids(&again), ids(&held[..1_000]));
        // A repeat expires nothing more, and says the same.
        let repeated = d.store().claim(request).await.unwrap();
        assert_eq!(repeated.expired, claimed.expired);
        assert_eq!(tokens(&Held::all(&repeated)), tokens(&again));
        assert_eq!(d.ledger().await.expired(), 1_000);
        assert_eq!(d.reap(1_000).await.len(), 100);
        d.snapshot().await.assert_in_order();
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_thousand_promotions() {
    let world = World::new().await;
    let d = &world.d;
    let later = leasehold_conformance::job().delay(TERM);
    let ids = d.enqueue_all(vec![later; 1_200]).await;
    d.advance(TERM).await;
    let (held, spent) = world.spending(d.claim(1_000)).await;
    let claimed: Vec<_> = held.iter().map(Held::id).collect();
    assert_eq!(claimed, ids[..1_000]);
    world.assert_short("1,000 promotions", &spent, 5).await;
    assert_eq!(d.queue().await.counts.scheduled, 200);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn ten_thousand_leases_are_revoked() {
    for of in [1, 100] {
        let world = World::new().await;
        let d = &world.d;
        let held = world.hold(10_000, of).await;
        d.enqueue_many(7).await;
        let mut others = d.claim_request(7);
        others.owner = "somebody else".into();
        d.claim_as(others).await;
        let owner = d.claim_request(1).owner;
        let revoke = ControlCommand::Revoke(LeaseSelect::Owner(owner));
        let (revoked, spent) = world.spending(world.control(revoke)).await;
        assert_eq!((revoked, held.len()), (10_000, 10_000));
        world
            .assert_short("10,000 leases revoked", &spent, 200)
            .await;
        let ledger = d.ledger().await;
        assert!(ledger.balances());
        assert_eq!((ledger.revoked, ledger.live), (10_000, 7));
        assert_eq!(d.queue().await.counts.ready, 10_000);
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn ten_thousand_singles_are_renewed() {
    let world = World::new().await;
    let held = world.hold(10_000, 1).await;
    let beats: Vec<Beat> = held.iter().map(Held::beat).collect();
    for _ in 0..3 {
        world.d.advance(TERM / 3).await;
        let (renewals, spent) = world.spending(world.d.store().renew(beats.clone())).await;
        let is_held = |renewal: &Renewal| matches!(renewal, Renewal::Held { .. });
        assert!(renewals.unwrap().iter().all(is_held));
        world
            .assert_short("10,000 singles renewed", &spent, 200)
            .await;
    }
    assert_eq!(world.d.ledger().await.live, 10_000);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_thousand_beats_show_progress() {
    let world = World::new().await;
    let held = world.hold(1_000, 1).await;
    let shows = |held: &Held| {
        let mut beat = held.beat();
        beat.progress = vec![(held.token(), Progress::default())];
        beat
    };
    let beats = held.iter().map(shows).collect();
    let (renewals, spent) = world.spending(world.d.store().renew(beats)).await;
    let is_held = |renewal: &Renewal| matches!(renewal, Renewal::Held { .. });
    assert!(renewals.unwrap().iter().all(is_held));
    world
        .assert_short("1,000 beats that show progress", &spent, 20)
        .await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn ten_thousand_leases_are_cancelled() {
    let world = World::new().await;
    let held = world.hold(10_000, 50).await;
    let leased = Select::State {
        queue: queue(),
        state: JobState::Leased,
        max: 9_990,
    };
    let (cancelled, spent) = world
        .spending(world.control(ControlCommand::Cancel(leased)))
        .await;
    assert_eq!(cancelled, 9_990);
    world
        .assert_short("10,000 leases cancelled", &spent, 90)
        .await;
    let beats = held.iter().map(Held::beat).collect();
    let renewals = world.d.store().renew(beats).await.unwrap();
    let told = renewals
        .iter()
        .filter(|renewal| matches!(renewal, Renewal::Held { cancel, .. } if !cancel.is_empty()));
    assert_eq!(told.count(), 9_990);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_hundred_thousand_jobs_are_purged() {
    let (world, jobs) = (World::new().await, 100_000);
    for _ in 0..jobs / 10_000 {
        world.d.enqueue_many(10_000).await;
    }
    let purge = async {
        let mut purged = 0;
        while purged < jobs {
            let ready = Select::State {
                queue: queue(),
                state: JobState::Ready,
                max: 10_000,
            };
            purged += world.control(ControlCommand::Purge(ready)).await;
        }
        purged
    };
    let (purged, spent) = world.spending(purge).await;
    assert_eq!(purged, jobs);
    world.assert_short("jobs purged", &spent, jobs / 100).await;
    let queue = world.d.queue().await;
    assert_eq!(
        (queue.counts.ready, world.d.ledger().await.purged),
        (0, jobs)
    );
}

/// A prune takes so many rows at most, be they jobs or unique keys whose window has passed.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_prune_is_bounded_in_keys_too() {
    let world = World::new().await;
    let d = &world.d;
    let window = Duration::from_secs(60);
    for n in 0..500 {
        let once = job().unique_for(format!("key {n}"), window).unwrap();
        d.enqueue(once).await;
    }
    // The server knows the script from here on: a call is one script.
    d.prune(1).await;
    d.advance(window * 2).await;
    let left = || world.server.server.tell::<u64>(&["ZCARD", WINDOWS]);
    assert_eq!(left(), 500);
    for rest in [380, 260] {
        let (pruned, spent) = world.spending(d.prune(120)).await;
        assert_eq!((pruned, left(), spent.scripts), (0, rest, 2));
    }
    // Control arm: what is left is pruned by a call that may take it all.
    d.prune(1_000).await;
    assert_eq!(left(), 0);
}
