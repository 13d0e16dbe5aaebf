//! Settlements and claims that are plain: jobs that leave nothing behind end by one script that opens no
//! grant, and jobs without terms of their own are granted by one that looks at none of them. What is not
//! plain goes the longer way, to the answer that it would have had at once.
//!
//! Which way a call went is told by the number of its scripts.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::job::{JobState, Namespace, QueueName};
use leasehold::lease::{Receipt, Verdict};
use leasehold::store::conformance::{Driver, Held, ManualFixture, TERM, job, queue};
use leasehold::store::{
    Checkpointed, ClaimRequest, Claimed, ControlCommand, Outcome, RedisOptions, RedisStore,
    Renewal, Select, SettleRequest,
};
use leasehold::{JobId, NewJob};

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

/// So many calls do without the plain way after one that was not plain.
const DETOUR: usize = 8;

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
        // What is overdue is not plain.
        scene.held(1).await;
        scene.d.advance(TERM).await;
        assert_eq!(scene.claim(1).await.0.len(), 1);
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
        let server = &self.server.server;
        server.calls("evalsha") + server.calls("eval")
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

    async fn take(&self, request: ClaimRequest) -> (Claimed, u64) {
        let before = self.world.scripts();
        let claimed = self.d.claim_as(request).await;
        (claimed, self.world.scripts() - before)
    }

    /// A claim, and settlements that ride with it.
    fn ride(&self, max: usize, ends: &[Held]) -> ClaimRequest {
        let mut request = self.d.claim_request(max);
        let mut riders = self.d.settle_request(complete(ends));
        riders.request = self.d.request_on(7);
        request.settle = Some(riders);
        request
    }

    /// Claims: the jobs in the order in which they were granted, and how many scripts that took.
    async fn claim(&self, max: usize) -> (Vec<JobId>, u64) {
        let (claimed, scripts) = self.take(self.d.claim_request(max)).await;
        let ids = Held::all(&claimed).iter().map(Held::id).collect();
        (ids, scripts)
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
    assert_eq!(
        scene.d.control(ControlCommand::Cancel(select)).await.done,
        2
    );
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

/// The first tokens of a queue, and those of an hour later; with room for a suspect, if there is none.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_is_one_script() {
    let world = World::new().await;
    let scene = world.scene().await;
    let ids = scene.d.enqueue_many(9).await;
    assert_eq!(scene.claim(2).await, (ids[..2].to_vec(), PLAIN));
    scene.d.advance(TERM / 2).await;
    assert_eq!(scene.claim(3).await, (ids[2..5].to_vec(), PLAIN));
    let mut request = scene.d.claim_request(1);
    request.admit_suspect = true;
    let (claimed, scripts) = scene.take(request).await;
    assert_eq!((Held::all(&claimed)[0].id(), scripts), (ids[5], PLAIN));
    assert_eq!(claimed.next_deadline, Some(TERM / 2));
    assert_eq!(scene.claim(9).await, (ids[6..].to_vec(), PLAIN));
    assert_eq!(scene.claim(9).await, (Vec::new(), PLAIN));
    let counts = scene.d.queue().await.counts;
    assert_eq!((counts.ready, counts.leased), (0, 9));
    scene.d.snapshot().await.assert_in_order();
}

/// By priority and place, whatever the sizes of the calls that brought them and of those that take them.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn claims_cut_what_they_find() {
    let world = World::new().await;
    for sizes in [&[1, 2, 3, 60, 7][..], &[5], &[40, 1], &[25, 50]] {
        let scene = world.scene().await;
        let mut lines: [Vec<JobId>; 3] = Default::default();
        // More segments than a grant has names for, and some that are cut by hand.
        for n in 0..90 {
            let line = n % 7 % 3;
            let priority = [0, 4, 7][line];
            let jobs = vec![job().priority(priority); 1 + n % 4];
            lines[line].extend(scene.d.enqueue_all(jobs).await);
        }
        let all = lines.concat();
        let (mut got, mut held) = (Vec::new(), Vec::new());
        for size in sizes.iter().cycle() {
            let (claimed, scripts) = scene.take(scene.d.claim_request(*size)).await;
            assert_eq!(scripts, PLAIN);
            let some = Held::all(&claimed);
            if some.is_empty() {
                break;
            }
            assert_eq!(some.len(), (*size).min(all.len() - got.len()));
            assert_eq!(claimed.grants.len(), 1);
            got.extend(some.iter().map(Held::id));
            held.push(some);
        }
        scene.d.snapshot().await.assert_in_order();
        assert_eq!(got, all);
        // They come back as they were.
        scene.d.expire_all().await;
        let mut again = Vec::new();
        loop {
            let some = scene.d.claim(1_000).await;
            if some.is_empty() {
                break;
            }
            again.extend(some);
        }
        assert_eq!(again.iter().map(Held::id).collect::<Vec<_>>(), all);
        for some in held {
            assert_eq!(scene.settle(&some[..1]).await.0, [F]);
        }
        let done = again
            .iter()
            .map(|held| (held, Outcome::Complete { result: None }));
        let request = scene.d.settle_request(done.collect());
        assert!(
            scene
                .send(request)
                .await
                .0
                .iter()
                .all(|verdict| verdict.is_held())
        );
        scene.is_over(all.len() as u64).await;
    }
}

/// A large grant is kept in the pieces that it was taken in, or in few of them together: to join all would cost
/// the server more than all the rest. Its jobs come back as they were.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_large_grant_is_kept_in_pieces() {
    // Behind its name, its id, and that and a zero: the starts of segments and each rest, or all in groups.
    for (call, calls, fields) in [
        (50, 20, 3 + 21),
        (10, 63, 3 + 64),
        (10, 64, 3 + 64),
        (1, 65, 3 + 44),
        (1, 300, 3 + 60),
    ] {
        let world = World::new().await;
        let scene = world.scene().await;
        let numbered = |n: usize| {
            let mut job = job();
            job.payload = format!("{n}").into_bytes().into();
            job
        };
        for first in (0..call * calls).step_by(call) {
            let jobs = (first..first + call).map(numbered).collect();
            scene.d.enqueue_all(jobs).await;
        }
        let payloads = |held: &[Held]| {
            let numbers = held.iter().map(|held| held.job.payload.clone());
            numbers.collect::<Vec<_>>()
        };
        let (claimed, scripts) = scene.take(scene.d.claim_request(call * calls)).await;
        let held = Held::all(&claimed);
        let all: Vec<_> = (0..call * calls).map(|n| numbered(n).payload).collect();
        assert!(payloads(&held) == all, "{calls} calls of {call}");
        assert_eq!(
            (scripts, scene.kept()[0]),
            (PLAIN, fields),
            "{calls} of {call}"
        );
        // One that fails is looked at by itself, the others when they expire.
        let retry = Outcome::Retry {
            delay: Duration::ZERO,
            reason: String::new(),
        };
        scene.d.settled(&held[call], retry).await;
        scene.d.expire_all().await;
        let again = scene.d.claim(call * calls).await;
        let (mut back, mut all) = (payloads(&again), all);
        back.sort();
        all.sort();
        assert!(back == all, "{calls} calls of {call}");
        scene.settle(&again).await;
        scene.is_over((call * calls) as u64).await;
    }
}

/// A claim that meets something that is not plain puts back what it has taken, in its place.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_that_is_not_plain_leaves_no_trace() {
    let world = World::new().await;
    let mut own = job();
    own.options.term = Some(TERM / 2);
    let mut short = job();
    short.options.max_lifetime = Some(TERM / 3);
    let mut big = job();
    big.payload = vec![b'x'; 250_000].into();
    for (odd, count) in [(own, 1), (short, 1), (big, 18)] {
        for before in [0, 1, 5] {
            let mut scene = world.scene().await;
            let mut ids = scene.d.enqueue_all(vec![job().priority(1); 2]).await;
            let mut low = scene.d.enqueue_all(vec![job().priority(6); 2]).await;
            for n in 0..before {
                ids.extend(scene.d.enqueue_many(1 + n % 2).await);
            }
            ids.extend(scene.d.enqueue_all(vec![odd.clone(); count]).await);
            ids.extend(scene.d.enqueue_many(3).await);
            ids.append(&mut low);
            // What is ahead of it is plain.
            assert_eq!(scene.claim(1).await, (ids[..1].to_vec(), PLAIN));
            let (got, scripts) = scene.claim(100).await;
            assert_eq!((&got[..], scripts), (&ids[1..], LONGER), "{before} before");
            scene.d.snapshot().await.assert_in_order();
            scene.again().await;
        }
    }
}

/// What falls due, is overdue, or may not be granted is for the longer way.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_with_other_work_is_not_plain() {
    let world = World::new().await;
    let mut scene = world.scene().await;
    let due = scene.d.enqueue(job().delay(TERM)).await;
    let first = scene.held(1).await;
    let ids = scene.d.enqueue_many(2).await;
    scene.d.advance(TERM.saturating_sub(INSTANT)).await;
    assert_eq!(scene.claim(1).await, (ids[..1].to_vec(), PLAIN));
    scene.d.advance(INSTANT).await;
    let expected = vec![first[0].id(), ids[1], due];
    assert_eq!(scene.claim(9).await, (expected, LONGER));
    // A retry that falls due, alone.
    let mut scene = {
        scene.again().await;
        world.scene().await
    };
    let due = scene.d.enqueue(job().delay(INSTANT)).await;
    assert_eq!(scene.claim(9).await, (Vec::new(), PLAIN));
    scene.d.advance(INSTANT).await;
    assert_eq!(scene.claim(9).await, (vec![due], LONGER));
    scene.again().await;
    scene.d.enqueue_many(1).await;
    scene.d.control(ControlCommand::Pause(queue())).await;
    assert_eq!(scene.claim(9).await, (Vec::new(), LONGER));
}

/// Settlements that ride with a claim end by its script, if both are plain.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn riders_are_plain_too() {
    let world = World::new().await;
    let scene = world.scene().await;
    let (old, ids) = (scene.held(4).await, scene.d.enqueue_many(3).await);
    scene.d.advance(TERM / 2).await;
    let young = scene.held_of(vec![job().priority(0); 2]).await;
    // Of the oldest grant a part, then all of the other: the deadline that is told is that of the oldest.
    for (ends, id) in [(&old[..2], ids[0]), (&young[..], ids[1])] {
        let (claimed, scripts) = scene.take(scene.ride(1, ends)).await;
        assert_eq!((Held::all(&claimed)[0].id(), scripts), (id, PLAIN));
        assert_eq!(claimed.settled, vec![H; ends.len()]);
        assert_eq!(claimed.next_deadline, Some(TERM / 2));
    }
    // And once it has gone, that of the next.
    let (claimed, scripts) = scene.take(scene.ride(1, &old[2..])).await;
    assert_eq!((&claimed.settled[..], scripts), (&[H; 2][..], PLAIN));
    assert_eq!(claimed.next_deadline, Some(TERM));
    let ledger = scene.d.ledger().await;
    assert_eq!((ledger.granted, ledger.completed, ledger.live), (9, 6, 3));
    // Nothing to claim is no reason to end nothing.
    let last = Held::all(&claimed);
    let (claimed, scripts) = scene.take(scene.ride(9, &last)).await;
    assert_eq!((claimed.settled, scripts), (vec![H], PLAIN));
    let ledger = scene.d.ledger().await;
    assert_eq!((ledger.completed, ledger.live, ledger.fenced), (7, 2, 0));
    // A forged one is no plain one, and ends nothing.
    let forgery = [forged(&last[0], 5, &"0".repeat(32))];
    let (claimed, scripts) = scene.take(scene.ride(9, &forgery)).await;
    assert_eq!((claimed.settled, scripts), (vec![F], LONGER));
    scene.d.snapshot().await.assert_in_order();
}

/// Grants that were renewed together share a deadline, which is told until the last of them has gone.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn riders_leave_their_round() {
    let world = World::new().await;
    let scene = world.scene().await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.extend(scene.held(1).await);
    }
    scene.d.advance(INSTANT).await;
    let beats = held.iter().map(Held::beat).collect();
    for renewal in scene.d.store().renew(beats).await.unwrap() {
        assert!(matches!(renewal, Renewal::Held { .. }), "{renewal:?}");
    }
    scene.d.advance(INSTANT).await;
    assert_eq!(scene.held(1).await.len(), 1);
    for (ends, deadline) in [
        (&held[..2], TERM.saturating_sub(INSTANT)),
        (&held[2..], TERM),
    ] {
        let (claimed, scripts) = scene.take(scene.ride(1, ends)).await;
        assert_eq!((claimed.settled, scripts), (vec![H; ends.len()], PLAIN));
        assert_eq!(claimed.next_deadline, Some(deadline));
    }
}

/// A claim that is sent again gives what it gave, and so do its riders, whichever of the two is repeated.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_repeat_rides_for_nothing() {
    let world = World::new().await;
    let scene = world.scene().await;
    let held = scene.held(3).await;
    scene.d.enqueue_many(3).await;
    let request = scene.ride(1, &held[..2]);
    let riders = request.settle.clone().unwrap();
    let (first, scripts) = scene.take(request.clone()).await;
    assert_eq!((&first.settled[..], scripts), (&[H; 2][..], PLAIN));
    let before = scene.d.snapshot().await;
    let (again, scripts) = scene.take(request.clone()).await;
    assert_eq!(
        (&again.settled, &again.grants),
        (&first.settled, &first.grants)
    );
    assert_eq!(scripts, LONGER);
    assert_eq!(scene.send(riders.clone()).await.0, first.settled);
    assert_eq!(scene.d.snapshot().await, before);

    // A claim that is given up leaves its riders to the next one. By then the plain way is tried again.
    for _ in 0..DETOUR {
        assert!(scene.claim(1).await.1 == PLAIN);
    }
    let id = scene.d.enqueue(job()).await;
    let mut request = scene.d.claim_request(1);
    request.settle = Some(riders);
    let (claimed, scripts) = scene.take(request).await;
    assert_eq!(Held::all(&claimed)[0].id(), id);
    assert_eq!((claimed.settled, scripts), (first.settled, LONGER));
    let ledger = scene.d.ledger().await;
    assert_eq!((ledger.completed, ledger.fenced), (2, 0));
}

/// A server that lost writes may have less in a line than it has counted.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_line_that_is_shorter_than_its_count() {
    let world = World::new().await;
    let scene = world.scene().await;
    let first = scene.d.enqueue_all(vec![job().priority(1); 2]).await;
    scene.d.enqueue_all(vec![job().priority(3); 5]).await;
    let last = scene.d.enqueue_all(vec![job().priority(5); 2]).await;
    let line = format!("{{{}:default:0}}:3", scene.name);
    assert_eq!(world.server.server.tell::<u64>(&["DEL", &line]), 1);
    assert_eq!(scene.d.queue().await.counts.ready, 9);
    let (got, scripts) = scene.claim(9).await;
    assert_eq!((got, scripts), ([first, last].concat(), LONGER));
    let counts = scene.d.queue().await.counts;
    assert_eq!((counts.ready, counts.leased), (0, 4));
}

/// A claim that has what it asked for does not ask the queues that it names behind.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_asks_no_queue_in_vain() {
    let world = World::new().await;
    let scene = world.scene().await;
    scene.held(1).await;
    let other = job().queue("other").unwrap();
    scene.d.enqueue_all(vec![job(), other]).await;
    let mut request = scene.d.claim_request(1);
    let mut last = request.queues[0].clone();
    last.queue = QueueName::new("other").unwrap();
    request.queues.push(last);
    let (claimed, scripts) = scene.take(request).await;
    assert_eq!((Held::all(&claimed).len(), scripts), (1, PLAIN));
}

/// Whatever ends rides in the claim's own script; what is more than a step's work goes ahead.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn one_burial_rides_and_many_go_ahead() {
    let world = World::new().await;
    for (count, scripts) in [(1, 1), (120, 4)] {
        let scene = world.scene().await;
        let held = scene.held(count).await;
        let bury = |held| {
            let reason = "hopeless".to_owned();
            (held, Outcome::Bury { reason })
        };
        let mut riders = scene.d.settle_request(held.iter().map(bury).collect());
        riders.request = scene.d.request_on(7);
        let mut request = scene.d.claim_request(1);
        request.settle = Some(riders);
        let (claimed, spent) = scene.take(request).await;
        assert_eq!((claimed.settled, spent), (vec![H; count], scripts));
        assert_eq!(scene.d.queue().await.counts.dead, count as u64);
    }
}

/// With an index no claim is plain, and none is tried in vain.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn with_an_index_a_claim_is_one_script() {
    let world = World::new().await;
    let clock = ManualClock::default();
    let options = RedisOptions::new(world.server.url())
        .namespace(Namespace::new("indexed").unwrap())
        .index(true)
        .clock(clock.clone());
    let store = RedisStore::open(options).unwrap();
    let d = Driver::new(Arc::new(ManualFixture::new(store, clock))).await;
    d.held(job()).await;
    d.enqueue(job()).await;
    let before = world.scripts();
    assert_eq!(d.claim(1).await.len(), 1);
    assert_eq!(world.scripts() - before, 1);
    // Unless more rides with it than a step ends: that goes ahead, in steps of its own.
    d.enqueue_many(120).await;
    let held = d.claim(120).await;
    let mut riders = d.settle_request(complete(&held));
    riders.request = d.request_on(7);
    let mut request = d.claim_request(1);
    request.settle = Some(riders);
    let before = world.scripts();
    assert_eq!(d.claim_as(request).await.settled, vec![H; 120]);
    assert!(world.scripts() - before > 3);
}
