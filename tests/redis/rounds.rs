//! Grants that are renewed together share an entry and a deadline there: whatever becomes of one of them,
//! the others and the books stay as in the memory store, and nothing is left behind.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::inspect::{self, LeaseFilter, LeaseView, Page};
use leasehold::job::{JobState, Namespace};
use leasehold::store::conformance::{Driver, Held, ManualFixture, TERM, job, queue};
use leasehold::store::{
    Beat, Claimed, Command, EnqueueRequest, LeaseSelect, MemoryStore, Outcome, RedisOptions,
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

/// Both take the same steps, and say the same.
async fn compare(seed: u64, index: bool) -> usize {
    let server = Standalone::start(&[]);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut sides = [memory().await, redis(&server, index).await].map(|d| Side {
        d,
        held: Vec::new(),
    });
    let mut met = 0;
    for step in 0..250 {
        let what = format!("seed {seed}, step {step}");
        let by = Duration::from_millis([0, 0, 1, 9_000, 21_000][rng.usize(..5)]);
        let jobs = vec![job(); usize::from(step == 0) + rng.usize(..3)];
        let jobs = sides[0].d.enqueue_request(jobs);
        let (max, owner) = ([1, 1, 1, 3][rng.usize(..4)], ["a", "b"][rng.usize(..2)]);
        let count = sides[0].held.len();
        let recent = count.saturating_sub(60);
        let mut grants = HashSet::new();
        let renewed: Vec<usize> = (recent..count)
            .filter(|at| rng.u8(..10) < 8 && grants.insert(sides[0].held[*at].receipt.grant()))
            .collect();
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
            0 => Some(Command::Revoke(LeaseSelect::Owner("b".into()))),
            1 => Some(Command::Cancel(Select::State {
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
        met = met.max(rounds(&server));
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
    for (seed, index) in [(1, false), (2, true), (3, false)] {
        let met = compare(seed, index).await;
        // Control arm: a program that makes no round shows nothing.
        assert!(met >= 2, "seed {seed}: {met} rounds at most");
    }
}

/// Two hundred singles are renewed by one entry; the last to stay takes it along.
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
    assert_eq!((entries(), rounds(&server)), (200, 0));
    let renew = |held: &[Held]| d.store().renew(held.iter().map(Held::beat).collect());
    for _ in 0..3 {
        d.advance(TERM / 3).await;
        let renewals = renew(&held).await.unwrap();
        assert!(renewals.iter().all(|r| matches!(r, Renewal::Held { .. })));
        assert_eq!((entries(), rounds(&server)), (1, 1));
    }
    // One goes on alone, the others as two rounds.
    d.advance(TERM / 3).await;
    renew(&held[..1]).await.unwrap();
    renew(&held[1..100]).await.unwrap();
    d.advance(TERM / 3).await;
    renew(&held[100..]).await.unwrap();
    assert_eq!((entries(), rounds(&server)), (3, 2));
    // At the deadline, and not before, the first hundred are there for others.
    let almost = (TERM * 2 / 3).saturating_sub(Duration::from_micros(1));
    d.advance(almost).await;
    assert!(d.reap(1_000).await.is_empty());
    d.advance(Duration::from_micros(1)).await;
    let expired: Vec<_> = d.reap(1_000).await.iter().map(|end| end.token).collect();
    let tokens: Vec<_> = held[..100].iter().map(Held::token).collect();
    assert_eq!(expired, tokens);
    assert_eq!((entries(), rounds(&server)), (1, 1));
    for (at, held) in held[100..].iter().enumerate() {
        assert_eq!(rounds(&server), 1, "before the end of {at}");
        d.settled(held, Outcome::Complete { result: None }).await;
    }
    assert_eq!(server.server.tell::<u64>(&["EXISTS", ENDS, HELD]), 0);
}
