//! Settlements that are plain: jobs that leave nothing behind end by one script that opens no grant. What
//! is not plain goes the longer way, to the answer that it would have had at once.
//!
//! Which way a call went is told by the number of its scripts.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::job::{JobState, Namespace};
use leasehold::store::conformance::{Driver, Held, ManualFixture, TERM, job, queue};
use leasehold::store::{
    Checkpointed, Command, Outcome, RedisOptions, RedisStore, Renewal, Select, SettleRequest,
};
use leasehold::{NewJob, Receipt, Verdict};

use crate::support::redis::Standalone;

const H: Verdict = Verdict::Held {
    late: false,
    cancel: false,
};
const LATE: Verdict = Verdict::Held {
    late: true,
    cancel: false,
};
const CANCEL: Verdict = Verdict::Held {
    late: false,
    cancel: true,
};
const F: Verdict = Verdict::Fenced;

/// Scripts of a plain call, and of one that turned out not to be plain and fits into one step.
const PLAIN: u64 = 1;
const LONGER: u64 = 2;

const INSTANT: Duration = Duration::from_micros(1);

struct World {
    server: Standalone,
    scenes: Cell<usize>,
}

/// A namespace without an index.
struct Scene<'a> {
    world: &'a World,
    name: String,
    clock: ManualClock,
    d: Driver,
}

impl World {
    /// The server knows the scripts of both ways.
    async fn new() -> Self {
        let world = Self {
            server: Standalone::start(&[]),
            scenes: Cell::new(0),
        };
        let scene = world.scene().await;
        let held = scene.held(1).await;
        scene.settle(&held).await;
        scene.settle(&held).await;
        world
    }

    async fn scene(&self) -> Scene<'_> {
        let number = self.scenes.get();
        self.scenes.set(number + 1);
        let (name, clock) = (format!("plain-{number}"), ManualClock::default());
        let d = self.driver(&name, &clock).await;
        Scene {
            world: self,
            name,
            clock,
            d,
        }
    }

    async fn driver(&self, name: &str, clock: &ManualClock) -> Driver {
        let options = RedisOptions::new(self.server.url())
            .namespace(Namespace::new(name).unwrap())
            .index(false)
            .clock(clock.clone());
        let store = RedisStore::open(options).unwrap();
        Driver::new(Arc::new(ManualFixture::new(store, clock.clone()))).await
    }

    fn scripts(&self) -> u64 {
        let calls = |command: &str| {
            let words = ["INFO", "commandstats"];
            let stats = self.server.server.info(&words, command);
            let stats = stats.unwrap_or_default();
            let calls = stats.strip_prefix("calls=").unwrap_or("0");
            calls.split(',').next().unwrap().parse::<u64>().unwrap()
        };
        calls("cmdstat_evalsha") + calls("cmdstat_eval")
    }
}

fn heavy() -> NewJob {
    let mut job = job();
    job.payload = vec![b'x'; 100_000].into();
    job
}

fn complete(held: &[Held]) -> Vec<(&Held, Outcome)> {
    let done = |held| (held, Outcome::Complete { result: None });
    held.iter().map(done).collect()
}

/// The same receipt with another part: 1 is the partition, 3 the token, 4 the job, 5 the proof.
fn forged(held: &Held, part: usize, text: &str) -> Held {
    let receipt = held.receipt.to_string();
    let mut parts: Vec<&str> = receipt.split('/').collect();
    assert_ne!(parts[part], text);
    parts[part] = text;
    let mut forged = held.clone();
    forged.receipt = parts.join("/").parse::<Receipt>().unwrap();
    forged
}

impl Scene<'_> {
    async fn held_of(&self, jobs: Vec<NewJob>) -> Vec<Held> {
        let count = jobs.len();
        self.d.enqueue_all(jobs).await;
        let held = self.d.claim(count).await;
        assert_eq!(held.len(), count);
        held
    }

    /// Leases of one grant.
    async fn held(&self, count: usize) -> Vec<Held> {
        self.held_of(vec![job(); count]).await
    }

    async fn send(&self, request: SettleRequest) -> (Vec<Verdict>, u64) {
        let before = self.world.scripts();
        let verdicts = self.d.store().settle(request).await.unwrap();
        (verdicts, self.world.scripts() - before)
    }

    /// Completes them in one call: the verdicts, and how many scripts that took.
    async fn settle(&self, held: &[Held]) -> (Vec<Verdict>, u64) {
        self.send(self.d.settle_request(complete(held))).await
    }

    /// Another process. It tries the plain way again, which this one leaves alone for a while after
    /// a call that was not plain.
    async fn again(&mut self) {
        self.d = self.world.driver(&self.name, &self.clock).await;
        // The partition is greeted by the first call.
        assert!(self.d.claim(1).await.is_empty());
    }

    /// What is left of grants: fields, deadlines, and what is known of single leases.
    fn kept(&self) -> [usize; 3] {
        let count = |word: &str, part: &str| {
            let key = format!("{{{}:default:0}}:{part}", self.name);
            self.world.server.server.tell::<usize>(&[word, &key])
        };
        [
            count("HLEN", "held"),
            count("ZCARD", "ends"),
            count("HLEN", "note"),
        ]
    }

    /// Everything has ended, and nothing is left of it.
    async fn is_over(&self, completed: u64) {
        assert_eq!(self.kept(), [0, 0, 0]);
        let ledger = self.d.ledger().await;
        assert_eq!((ledger.completed, ledger.live), (completed, 0));
        self.d.snapshot().await.assert_in_order();
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_grant_ends_by_one_script() {
    let world = World::new().await;
    for jobs in [vec![job(); 1], vec![job(); 300], vec![heavy(); 4]] {
        let scene = world.scene().await;
        let count = jobs.len();
        let held = scene.held_of(jobs).await;
        assert_eq!(scene.settle(&held).await, (vec![H; count], PLAIN));
        scene.is_over(count as u64).await;
    }
}

/// The second call is answered by what the first one has left, in as many verdicts as it has leases:
/// more than a step of the longer way would end.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_repeat_gets_all_of_the_first_answer() {
    let world = World::new().await;
    let scene = world.scene().await;
    let held = scene.held(120).await;
    let request = scene.d.settle_request(complete(&held));
    let first = scene.send(request.clone()).await;
    assert_eq!(first, (vec![H; 120], PLAIN));
    for _ in 0..2 {
        assert_eq!(scene.send(request.clone()).await.0, first.0);
    }
    assert_eq!(scene.d.ledger().await.fenced, 0);
    scene.is_over(120).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn leases_of_a_grant_end_in_any_order() {
    let world = World::new().await;
    let mut scene = world.scene().await;
    let held = scene.held(6).await;
    for at in [3, 1, 2] {
        let one = &held[at..=at];
        assert_eq!(scene.settle(one).await, (vec![H], PLAIN), "lease {at}");
    }
    // Beside what has ended, and up to it.
    assert_eq!(scene.settle(&held[..2]).await, (vec![H, F], LONGER));
    scene.again().await;
    assert_eq!(scene.settle(&held[3..5]).await, (vec![F, H], LONGER));
    scene.again().await;
    assert_eq!(scene.settle(&held[5..]).await, (vec![H], PLAIN));
    assert_eq!(scene.d.ledger().await.fenced, 2);
    scene.is_over(6).await;
    scene.again().await;
    assert_eq!(scene.settle(&held[..1]).await, (vec![F], LONGER));
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn one_call_ends_parts_of_several_grants() {
    let world = World::new().await;
    let scene = world.scene().await;
    let [one, other, third] = [
        scene.held(3).await,
        scene.held(2).await,
        scene.held(2).await,
    ];
    let parts = [&one[..1], &other[..], &one[2..], &third[1..]].concat();
    assert_eq!(scene.settle(&parts).await, (vec![H; 5], PLAIN));
    let counts = scene.d.queue().await.counts;
    assert_eq!((counts.leased, scene.kept()[1]), (2, 2));
    let rest = [&one[1..2], &third[..1]].concat();
    assert_eq!(scene.settle(&rest).await, (vec![H; 2], PLAIN));
    scene.is_over(7).await;

    // A hundred runs are the most that are tried.
    for (count, scripts) in [(100, PLAIN), (101, 3)] {
        let scene = world.scene().await;
        let mut held = Vec::new();
        for _ in 0..count {
            held.extend(scene.held(1).await);
        }
        assert_eq!(scene.settle(&held).await, (vec![H; count], scripts));
        scene.is_over(count as u64).await;
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn what_is_late_is_told_and_counted() {
    let world = World::new().await;
    let scene = world.scene().await;
    let old = scene.held(4).await;
    scene.d.advance(INSTANT).await;
    let young = scene.held(3).await;
    scene.d.advance(TERM.saturating_sub(INSTANT * 2)).await;
    assert_eq!(scene.settle(&old[..1]).await, (vec![H], PLAIN));
    scene.d.advance(INSTANT).await;
    let both = [&old[1..], &young[..1]].concat();
    let told = vec![LATE, LATE, LATE, H];
    assert_eq!(scene.settle(&both).await, (told, PLAIN));
    assert_eq!(scene.d.ledger().await.late, 3);
    scene.d.advance(INSTANT).await;
    assert_eq!(scene.settle(&young[1..]).await, (vec![LATE; 2], PLAIN));
    assert_eq!(scene.d.ledger().await.late, 5);
    scene.is_over(7).await;
}

/// What is known of a single lease goes with it.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_grant_with_notes_is_not_plain() {
    let world = World::new().await;
    let scene = world.scene().await;
    let held = scene.held(3).await;
    let saved = scene.d.checkpoint(&held[1], 1, "half").await;
    assert!(matches!(saved, Checkpointed::Saved { .. }), "{saved:?}");
    assert_eq!(scene.kept()[2], 1);
    assert_eq!(scene.settle(&held).await, (vec![H; 3], LONGER));
    scene.is_over(3).await;

    let scene = world.scene().await;
    let held = scene.held(3).await;
    let select = Select::State {
        queue: queue(),
        state: JobState::Leased,
        max: 2,
    };
    assert_eq!(scene.d.control(Command::Cancel(select)).await.done, 2);
    let told = vec![CANCEL, CANCEL, H];
    assert_eq!(scene.settle(&held).await, (told, LONGER));
    scene.is_over(3).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_job_that_leaves_something_behind_is_not_plain() {
    let world = World::new().await;
    for new in [
        job().retention(TERM),
        job().unique("u").unwrap(),
        job().exclusive("e").unwrap(),
    ] {
        let mut scene = world.scene().await;
        let is_kept = new.options.retention.is_some();
        let held = scene.held_of(vec![new.clone()]).await;
        assert_eq!(scene.settle(&held).await, (vec![H], LONGER));
        let counts = scene.d.queue().await.counts;
        assert_eq!(counts.completed, u64::from(is_kept));
        scene.is_over(1).await;
        // The key is free.
        scene.again().await;
        assert_eq!(scene.held_of(vec![new]).await.len(), 1);
    }
}

/// What is left of a large grant is written anew once half of it has ended, and lies elsewhere then.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_large_grant_is_plain_until_half_of_it_has_ended() {
    let world = World::new().await;
    for (new, half) in [(job(), PLAIN), (heavy(), LONGER)] {
        let mut scene = world.scene().await;
        let held = scene.held_of(vec![new; 4]).await;
        assert_eq!(scene.settle(&held[2..3]).await, (vec![H], PLAIN));
        assert_eq!(scene.settle(&held[..1]).await, (vec![H], half));
        scene.again().await;
        assert_eq!(scene.settle(&held[3..]).await, (vec![H], half));
        scene.again().await;
        assert_eq!(scene.settle(&held[1..2]).await, (vec![H], half));
        scene.is_over(4).await;
    }
}

/// Grants that are renewed by one call share a deadline, which goes with the last of them.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn grants_leave_their_round() {
    let world = World::new().await;
    for together in [false, true] {
        let scene = world.scene().await;
        let mut held = Vec::new();
        for _ in 0..4 {
            held.extend(scene.held(1).await);
        }
        scene.d.advance(INSTANT).await;
        let beats = held[..3].iter().map(Held::beat).collect();
        for renewal in scene.d.store().renew(beats).await.unwrap() {
            assert!(matches!(renewal, Renewal::Held { .. }), "{renewal:?}");
        }
        assert_eq!(scene.kept()[1], 2, "the round, and the one beside it");
        if together {
            assert_eq!(scene.settle(&held[..2]).await, (vec![H; 2], PLAIN));
        } else {
            for at in [0, 1] {
                assert_eq!(scene.settle(&held[at..=at]).await, (vec![H], PLAIN));
            }
        }
        assert_eq!(scene.kept()[1], 2);
        assert_eq!(scene.settle(&held[2..]).await, (vec![H; 2], PLAIN));
        scene.is_over(4).await;
    }
}

/// A receipt that is not the lease's own ends nothing, also among those that are.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_forged_receipt_ends_nothing() {
    let world = World::new().await;
    let mut scene = world.scene().await;
    let held = scene.held(3).await;
    let [first, next, last] = &held[..] else {
        panic!("{} leases", held.len());
    };
    let beyond = (last.token().get() + 1).to_string();
    let forgeries = [
        forged(next, 1, "7"),
        forged(last, 3, &beyond),
        forged(next, 4, &last.id().to_string()),
        forged(next, 5, &"0".repeat(32)),
    ];
    for forgery in forgeries {
        let one = [forgery];
        let act = async || assert_eq!(scene.settle(&one).await, (vec![F], LONGER));
        scene.d.unchanged(act).await;
        scene.again().await;
    }
    // In the place of the second lease, in a call that would end the whole grant.
    let wrong = forged(next, 4, &first.id().to_string());
    let all = [first.clone(), wrong, last.clone()];
    assert_eq!(scene.settle(&all).await, (vec![H, F, H], LONGER));
    scene.again().await;
    assert_eq!(scene.settle(&held[1..2]).await, (vec![H], PLAIN));
    scene.is_over(3).await;
}
