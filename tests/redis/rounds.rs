//! Grants that are renewed together share an entry and a deadline there: whatever becomes of one of them,
//! the others and the books stay as in the memory store, and nothing is left behind.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::inspect::{self, LeaseFilter, LeaseView, Page};
use leasehold::job::{JobState, Namespace};
use leasehold::lease::Nonce;
use leasehold::store::conformance::{Driver, Held, LIFETIME, ManualFixture, TERM, job, queue};
use leasehold::store::{
    Beat, Claimed, ControlCommand, EnqueueRequest, LeaseSelect, MemoryStore, Outcome, RedisOptions,
    RedisStore, Renewal, Select,
};
use leasehold::{JobId, Store};

use crate::support::redis::Standalone;

const ENDS: &str = "{rounds:default:0}:ends";
const HELD: &str = "{rounds:default:0}:held";
/// Of a round's name; a grant's is longer.
const ROUND_BYTES: usize = 12;

fn driver(store: impl Store + 'static, clock: ManualClock) -> impl Future<Output = Driver> {
    Driver::new(Arc::new(ManualFixture::new(store, clock)))
}

async fn memory() -> Driver {
    let clock = ManualClock::default();
    driver(MemoryStore::with_clock(clock.clone()), clock).await
}

async fn redis(server: &Standalone, index: bool) -> Driver {
    let clock = ManualClock::default();
    let options = RedisOptions::new(server.url())
        .namespace(Namespace::new("rounds").unwrap())
        .index(index)
        .clock(clock.clone());
    driver(RedisStore::open(options).unwrap(), clock).await
}

fn held_of(server: &Standalone) -> BTreeMap<Vec<u8>, Vec<u8>> {
    server.server.tell(&["HGETALL", HELD])
}

/// How often each round was renewed as a whole: HELD says so behind its name and a zero.
fn renewals_of_rounds(server: &Standalone) -> Vec<u32> {
    let mut held = held_of(server);
    held.retain(|name, _| name.len() == ROUND_BYTES + 1);
    let renewals = |shared: &Vec<u8>| u32::from_le_bytes(shared[8..12].try_into().unwrap());
    held.values().map(renewals).collect()
}

fn rounds(server: &Standalone) -> usize {
    let entries: Vec<Vec<u8>> = server.server.tell(&["ZRANGE", ENDS, "0", "-1"]);
    let is_round = |entry: &&Vec<u8>| entry.len() == ROUND_BYTES;
    entries.iter().filter(is_round).count()
}

/// One of the two stores, and the leases that it has given, in the same order as the other.
struct Side {
    d: Driver,
    held: Vec<Held>,
}

/// What of a claim must be the same.
type Told = (Vec<JobId>, Vec<(JobId, JobState)>, Option<Duration>);

impl Side {
    async fn enqueue(&self, jobs: &EnqueueRequest) {
        let mut request = jobs.clone();
        request.request = self.d.request();
        self.d.store().enqueue(request).await.unwrap();
    }

    async fn claim(&mut self, max: usize, owner: &str) -> Told {
        let mut request = self.d.claim_request(max);
        request.owner = owner.into();
        let claimed: Claimed = self.d.claim_as(request).await;
        let new = Held::all(&claimed);
        let ids = new.iter().map(Held::id).collect();
        let expired = claimed.expired.iter().map(|end| (end.job, end.state));
        let told = (ids, expired.collect(), claimed.next_deadline);
        self.held.extend(new);
        told
    }

    /// Renews these leases in one call; of some it says that they lapse.
    async fn renew(&self, places: &[usize], lapse: Option<usize>) -> Vec<String> {
        let beat = |at: &usize| {
            let held = &self.held[*at];
            if Some(*at) == lapse {
                held.lapse()
            } else {
                held.beat()
            }
        };
        let beats: Vec<Beat> = places.iter().map(beat).collect();
        let renewals = self.d.store().renew(beats).await.unwrap();
        let text = |renewal: &Renewal| match renewal {
            Renewal::Held {
                granted,
                cancel,
                fenced,
            } => format!("{granted:?} {} {}", cancel.len(), fenced.len()),
            Renewal::Fenced => "fenced".to_owned(),
        };
        renewals.iter().map(text).collect()
    }

    async fn settle(&self, places: &[usize], outcome: &Outcome) -> String {
        let ends = places.iter().map(|at| (&self.held[*at], outcome.clone()));
        let request = self.d.settle_request(ends.collect());
        format!("{:?}", self.d.store().settle(request).await.unwrap())
    }

    /// The live leases, by pages of a few.
    async fn leases(&self) -> Vec<(JobId, Duration, u32, bool)> {
        let mut all: Vec<LeaseView> = Vec::new();
        let mut page = Page::first(7);
        loop {
            let paged = inspect::leases(self.d.store(), LeaseFilter::default(), page)
                .await
                .unwrap();
            all.extend(paged.rows);
            if paged.next.is_none() {
                break;
            }
            page = Page {
                after: paged.next,
                rows: 7,
            };
        }
        let row = |view: &LeaseView| (view.job, view.time_left, view.renewals, view.cancel);
        all.iter().map(row).collect()
    }
}

/// Both take the same steps, and say the same. Returns how many rounds there were at most, and how many
/// steps found one that had been renewed as a whole.
async fn compare(seed: u64, index: bool, most: usize) -> (usize, usize) {
    let server = Standalone::start(&[]);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut sides = [memory().await, redis(&server, index).await].map(|d| Side {
        d,
        held: Vec::new(),
    });
    let mut met = (0, 0);
    let mut renewed: Vec<usize> = Vec::new();
    for step in 0..400 {
        let what = format!("seed {seed}, step {step}");
        let by = Duration::from_millis([0, 0, 1, 9_000, 21_000][rng.usize(..5)]);
        let jobs = vec![job(); usize::from(step == 0) + rng.usize(..3)];
        let jobs = sides[0].d.enqueue_request(jobs);
        let (max, owner) = ([1, 1, 1, most][rng.usize(..4)], ["a", "b"][rng.usize(..2)]);
        let count = sides[0].held.len();
        let recent = count.saturating_sub(60);
        let mut grants = HashSet::new();
        // Often the same as before, as a worker does it: those of them that still live.
        if rng.u8(..5) == 0 {
            renewed = (recent..count)
                .filter(|at| rng.u8(..10) < 8 && grants.insert(sides[0].held[*at].receipt.grant()))
                .collect();
        } else if rng.u8(..4) > 0 {
            let live = sides[0].leases().await;
            let lives = |at: &usize| live.iter().any(|lease| lease.0 == sides[0].held[*at].id());
            renewed.retain(lives);
        }
        let lapse = renewed.first().copied().filter(|_| rng.u8(..8) == 0);
        let ends: Vec<usize> = (recent..count).filter(|_| rng.u8(..24) == 0).collect();
        let outcome = match rng.u8(..4) {
            0 => Outcome::Surrender {
                delay: Duration::ZERO,
                mark: None,
            },
            1 => Outcome::Retry {
                delay: TERM / 4,
                reason: "it failed".into(),
            },
            _ => Outcome::Complete { result: None },
        };
        let command = match rng.u8(..40) {
            0 => Some(ControlCommand::Revoke(LeaseSelect::Owner("b".into()))),
            1 => Some(ControlCommand::Cancel(Select::State {
                queue: queue(),
                state: JobState::Leased,
                max: 2,
            })),
            _ => None,
        };
        let reaps = rng.u8(..6) == 0;
        let mut answers = Vec::new();
        for side in &mut sides {
            side.d.advance(by).await;
            if !jobs.jobs.is_empty() {
                side.enqueue(&jobs).await;
            }
            let mut said = vec![format!("{:?}", side.renew(&renewed, lapse).await)];
            said.push(side.settle(&ends, &outcome).await);
            if let Some(command) = command.clone() {
                said.push(format!("{:?}", side.d.control(command).await.done));
            }
            if reaps {
                let reaped = side.d.reap(20).await;
                let jobs: Vec<_> = reaped.iter().map(|end| (end.job, end.state)).collect();
                said.push(format!("{jobs:?}"));
            }
            said.push(format!("{:?}", side.claim(max, owner).await));
            said.push(format!("{:?}", side.leases().await));
            answers.push(said);
        }
        assert_eq!(answers[0], answers[1], "{what}");
        met.0 = met.0.max(rounds(&server));
        met.1 += usize::from(renewals_of_rounds(&server).iter().any(|times| *times > 0));
        for side in &sides {
            assert!(side.d.ledger().await.balances(), "{what}");
        }
    }
    // When all have ended nothing of them is there.
    for _ in 0..9 {
        sides[1].d.advance(TERM * 2).await;
        while !sides[1].d.reap(1_000).await.is_empty() {}
    }
    let ledger = sides[1].d.ledger().await;
    assert_eq!(ledger.live, 0, "seed {seed}");
    let left: u64 = server.server.tell(&["EXISTS", ENDS, HELD]);
    assert_eq!(left, 0, "seed {seed}: something of ended grants is left");
    met
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn renewed_together_they_fare_as_if_alone() {
    // Of one lease each, and of up to three.
    let seeds = if crate::in_campaign() { 100 } else { 4 };
    for seed in 1..=seeds {
        let (index, most) = (seed % 2 == 0, if seed % 4 < 2 { 3 } else { 1 });
        let met = compare(seed, index, most).await;
        // Control arm: a program that makes no round, or renews none as a whole, shows nothing.
        let whole = if most == 1 { 3 } else { 0 };
        assert!(met.0 >= 2 && met.1 >= whole, "seed {seed}: {met:?}");
    }
}

/// Two hundred singles are renewed by a few entries; the last to stay takes its entry along.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_round_ends_with_the_last_of_its_grants() {
    let server = Standalone::start(&[]);
    let d = redis(&server, false).await;
    d.enqueue_many(200).await;
    let mut held = Vec::new();
    for _ in 0..200 {
        held.extend(d.claim(1).await);
    }
    let entries = || server.server.tell::<usize>(&["ZCARD", ENDS]);
    let cells = || {
        let mut held = held_of(&server);
        held.retain(|name, _| name.len() > ROUND_BYTES + 1);
        held
    };
    assert_eq!((entries(), rounds(&server)), (200, 0));
    let renew = |held: &[Held]| d.store().renew(held.iter().map(Held::beat).collect());
    let renewed = async |held: &[Held]| {
        let renewals = renew(held).await.unwrap();
        assert!(renewals.iter().all(|r| matches!(r, Renewal::Held { .. })));
        assert_eq!(entries(), rounds(&server), "none is alone");
    };
    d.advance(TERM / 3).await;
    renewed(&held).await;
    let (formed, written) = (rounds(&server), cells());
    assert!((1..5).contains(&formed), "{formed} rounds");
    for times in 1..3 {
        d.advance(TERM / 3).await;
        renewed(&held).await;
        // As a whole: nothing is written of any grant.
        assert_eq!(renewals_of_rounds(&server), vec![times; formed]);
        assert_eq!(cells(), written);
    }
    // The others go on as the same rounds when one of them ends.
    d.settled(&held.remove(120), Outcome::Complete { result: None })
        .await;
    d.advance(TERM / 3).await;
    renewed(&held).await;
    assert_eq!(renewals_of_rounds(&server), vec![3; formed]);
    // One goes on alone, the others as rounds of two times.
    d.advance(TERM / 3).await;
    renew(&held[..1]).await.unwrap();
    renew(&held[1..100]).await.unwrap();
    d.advance(TERM / 3).await;
    renew(&held[100..]).await.unwrap();
    assert_eq!(entries(), rounds(&server) + 1);
    // At the deadline, and not before, the first hundred are there for others.
    let almost = (TERM * 2 / 3).saturating_sub(Duration::from_micros(1));
    d.advance(almost).await;
    assert!(d.reap(1_000).await.is_empty());
    d.advance(Duration::from_micros(1)).await;
    let expired: Vec<_> = d.reap(1_000).await.iter().map(|end| end.token).collect();
    let tokens: Vec<_> = held[..100].iter().map(Held::token).collect();
    assert_eq!(expired, tokens);
    assert_eq!(entries(), rounds(&server));
    for (at, held) in held[100..].iter().enumerate() {
        assert!(rounds(&server) > 0, "before the end of {at}");
        d.settled(held, Outcome::Complete { result: None }).await;
    }
    assert_eq!(server.server.tell::<u64>(&["EXISTS", ENDS, HELD]), 0);
}

/// Whoever cannot name all of a round renews none of it, and neither does one who comes too late.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_round_is_renewed_by_its_holder_and_in_time() {
    let server = Standalone::start(&[]);
    let d = redis(&server, false).await;
    d.enqueue_many(20).await;
    let mut held = Vec::new();
    for _ in 0..20 {
        held.extend(d.claim(1).await);
    }
    let beats: Vec<Beat> = held.iter().map(Held::beat).collect();
    let renew = |beats: &[Beat]| d.store().renew(beats.to_vec());
    renew(&beats).await.unwrap();
    // All but one nonce are right: the others are renewed, and this one is not.
    let mut forged = beats.clone();
    forged[7].nonce = Nonce::draw().unwrap();
    d.advance(TERM / 2).await;
    for (at, renewal) in renew(&forged).await.unwrap().into_iter().enumerate() {
        assert_eq!(renewal == Renewal::Fenced, at == 7, "{at}: {renewal:?}");
    }
    // One that has ended is fenced, though the caller names it with those that live.
    d.settled(&held[3], Outcome::Complete { result: None })
        .await;
    for (at, renewal) in renew(&beats).await.unwrap().into_iter().enumerate() {
        assert_eq!(renewal == Renewal::Fenced, at == 3, "{at}: {renewal:?}");
    }
    let live: Vec<Beat> = (0..20)
        .filter(|at| *at != 3)
        .map(|at| beats[at].clone())
        .collect();
    renew(&live).await.unwrap();
    renew(&live).await.unwrap();
    assert!(renewals_of_rounds(&server).iter().all(|times| *times > 0));
    // One that is cancelled hears of it.
    d.control(ControlCommand::Cancel(Select::State {
        queue: queue(),
        state: JobState::Leased,
        max: 1,
    }))
    .await;
    let told = renew(&live).await.unwrap();
    let cancelled =
        |renewal: &&Renewal| matches!(renewal, Renewal::Held { cancel, .. } if cancel.len() == 1);
    assert_eq!(told.iter().filter(cancelled).count(), 1);
    d.advance(TERM).await;
    let late = renew(&live).await.unwrap();
    assert!(late.iter().all(|renewal| *renewal == Renewal::Fenced));
    assert_eq!(d.reap(1_000).await.len(), 19);
    assert_eq!(server.server.tell::<u64>(&["EXISTS", ENDS, HELD]), 0);
}

/// A whole round is gone at its deadline, and goes no further than the lifetime of its first lease.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_whole_round_ends_at_its_deadline_and_with_its_lifetime() {
    for is_late in [true, false] {
        let server = Standalone::start(&[]);
        let d = redis(&server, false).await;
        d.enqueue_many(5).await;
        let mut held = Vec::new();
        for _ in 0..5 {
            held.extend(d.claim(1).await);
        }
        let renew = || d.store().renew(held.iter().map(Held::beat).collect());
        let mut age = Duration::ZERO;
        while renew().await.unwrap().iter().all(|renewal| {
            let Renewal::Held { granted, .. } = renewal else {
                return false;
            };
            assert!(age + *granted <= LIFETIME, "{granted:?} at {age:?}");
            true
        }) {
            assert!(age < LIFETIME, "nothing ended it");
            // The second renewal and those after it find the round whole.
            let pause = if is_late && age > TERM {
                TERM
            } else {
                TERM / 3
            };
            d.advance(pause).await;
            age += pause;
        }
        if is_late {
            assert!(age < TERM * 3, "fenced at {age:?}");
        } else {
            assert_eq!(age, LIFETIME);
        }
    }
}

/// A worker names its leases in any order, and some of its grants are not of one lease: the others are
/// renewed as whole rounds all the same, and each answer goes to its beat.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn rounds_are_whole_in_whatever_order_they_are_named() {
    let server = Standalone::start(&[]);
    let d = redis(&server, false).await;
    d.enqueue_many(300).await;
    let mut beats: Vec<Beat> = Vec::new();
    for _ in 0..100 {
        for leases in [1, 2] {
            let held = d.claim(leases).await;
            let mut beat = held[0].beat();
            beat.leases = held.iter().map(Held::token).collect();
            beats.push(beat);
        }
    }
    let singles = || {
        let names = beats.iter().filter(|beat| beat.leases.len() == 1);
        let names = names.map(|beat| {
            let grant = beat.grant.get().to_be_bytes();
            [&grant[..], beat.nonce.as_bytes()].concat()
        });
        let held = held_of(&server);
        names.map(|name| held[&name].clone()).collect::<Vec<_>>()
    };
    let mut rng = fastrand::Rng::with_seed(11);
    let renew = async |beats: &[Beat]| {
        d.advance(TERM / 3).await;
        d.store().renew(beats.to_vec()).await.unwrap()
    };
    let is_held = |renewal: &Renewal| matches!(renewal, Renewal::Held { .. });
    assert!(renew(&beats).await.iter().all(is_held));
    let (formed, written) = (rounds(&server), singles());
    assert!((2..8).contains(&formed), "{formed} rounds");
    assert_eq!(server.server.tell::<usize>(&["ZCARD", ENDS]), formed);
    let mut shuffled = beats.clone();
    for _ in 0..3 {
        rng.shuffle(&mut shuffled);
        assert!(renew(&shuffled).await.iter().all(is_held));
        assert_eq!(rounds(&server), formed);
        // As a whole: nothing is written of any single.
        assert_eq!(singles(), written);
    }
    // One nonce is wrong, wherever it stands.
    let wrong = shuffled[137].grant;
    shuffled[137].nonce = Nonce::draw().unwrap();
    rng.shuffle(&mut shuffled);
    for (beat, renewal) in shuffled.iter().zip(renew(&shuffled).await) {
        assert_eq!(renewal == Renewal::Fenced, beat.grant == wrong);
    }
}
