//! A server that lost single keys, evicted or deleted by hand: no call fails for ever, what is
//! still there goes on, and the doctor says what is missing and puts it back.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::hooks::{Level, examine_redis, repair_redis};
use leasehold::inspect::Counts;
use leasehold::job::{JobState, Namespace};
use leasehold::store::{
    Checkpointed, ClaimRequest, ControlCommand, Enqueued, LeaseSelect, Outcome, RedisOptions,
    RedisStore, Select,
};
use leasehold::{ErrorKind, JobId, NewJob};
use leasehold_conformance::{Driver, Held, ManualFixture, job, queue};

use crate::redis::in_campaign;
use crate::redis::support::redis::Standalone;

struct World {
    server: Standalone,
    d: Driver,
}

const LINE: &str = "4";

/// What `goes_on` adds.
const ADDED: u64 = 4;
const HOUR: Duration = Duration::from_secs(3_600);

fn complete() -> Outcome {
    Outcome::Complete { result: None }
}

impl World {
    async fn new() -> Self {
        Self::with(1).await
    }

    async fn with(partitions: u16) -> Self {
        let server = Standalone::start(&[]);
        let d = Self::open(&server, Some(partitions)).await;
        Self { server, d }
    }

    /// By the server's clock, as the doctor has it; nothing here may advance it.
    async fn open(server: &Standalone, partitions: Option<u16>) -> Driver {
        let namespace = Namespace::new("losses").unwrap();
        let mut options = RedisOptions::new(server.url()).namespace(namespace);
        if let Some(partitions) = partitions {
            options = options.partitions(partitions);
        }
        let store = RedisStore::open(options).unwrap();
        Driver::new(Arc::new(ManualFixture::new(store, ManualClock::default()))).await
    }

    async fn by_hand(server: &Standalone, clock: &ManualClock) -> Driver {
        let namespace = Namespace::new("losses").unwrap();
        let options = RedisOptions::new(server.url()).namespace(namespace);
        let store = RedisStore::open(options.clock(clock.clone())).unwrap();
        Driver::new(Arc::new(ManualFixture::new(store, clock.clone()))).await
    }

    fn url(&self) -> String {
        format!("{}?namespace=losses", self.server.url())
    }

    fn delete(&self, part: &str) -> u64 {
        let key = format!("{{losses:default:0}}:{part}");
        self.server.server.tell::<u64>(&["DEL", &key])
    }

    /// Jobs in every place: in line, parked, scheduled, leased, completed, dead. Returns those that
    /// are leased, and the ids of those that can be claimed now or later.
    async fn fill(&self) -> (Vec<Held>, HashSet<JobId>) {
        let d = &self.d;
        let keyed = || job().exclusive("one").unwrap();
        let mut jobs: Vec<NewJob> = vec![job(); 20];
        jobs.extend([keyed(), keyed(), keyed()]);
        jobs.push(job().unique("u").unwrap());
        jobs.push(job().unique_for("w", HOUR).unwrap());
        let mut waiting: HashSet<JobId> = d.enqueue_all(jobs).await.into_iter().collect();
        d.enqueue(job().delay(HOUR)).await;
        let kept = job().retention(HOUR).priority(0);
        d.enqueue_all(vec![kept, job().priority(0)]).await;
        let mut held = d.claim(8).await;
        for held in &held {
            waiting.remove(&held.id());
        }
        d.settled(&held[0], complete()).await;
        let reason = "hopeless".to_owned();
        d.settled(&held[1], Outcome::Bury { reason }).await;
        held.drain(..2);
        let saved = d.checkpoint(&held[0], 1, "half").await;
        assert!(matches!(saved, Checkpointed::Saved { .. }), "{saved:?}");
        (held, waiting)
    }

    /// Every verb answers, though not always what it would have.
    async fn goes_on(&self, held: &[Held]) {
        let d = &self.d;
        let store = d.store();
        for _ in 0..2 {
            match d.try_enqueue(vec![job(), job()]).await {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::SessionLost, "{error:?}"),
            }
            store
                .renew(held.iter().map(Held::beat).collect())
                .await
                .unwrap();
            let request: ClaimRequest = d.claim_request(2);
            match store.claim(request).await {
                Ok(claimed) => {
                    for held in Held::all(&claimed) {
                        let reason = "again".to_owned();
                        let retry = Outcome::Retry {
                            delay: Duration::ZERO,
                            reason,
                        };
                        let request = d.settle_request(vec![(&held, retry)]);
                        store.settle(request).await.unwrap();
                    }
                }
                Err(error) => assert!(
                    matches!(
                        error.kind(),
                        ErrorKind::SessionLost | ErrorKind::TokensAhead
                    ),
                    "{error:?}"
                ),
            }
        }
        d.queue().await;
    }

    async fn loss(&self) -> Level {
        let findings = examine_redis(&self.url()).await.unwrap();
        let worst = |check| {
            let of = findings
                .iter()
                .filter(move |finding| finding.check == check);
            of.map(|finding| finding.level).next().unwrap()
        };
        match (worst("losses"), worst("ledger")) {
            (Level::Fine, Level::Fine) => Level::Fine,
            _ => Level::Risk,
        }
    }

    /// Completes everything that can be claimed, and tells which jobs that were.
    async fn drain(&self) -> HashSet<JobId> {
        let d = self.d.other().await;
        let mut done = HashSet::new();
        let mut empty = 0;
        while empty < 20 {
            let held = match d.store().claim(d.claim_request(100)).await {
                Ok(claimed) => Held::all(&claimed),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error:?}");
                    Vec::new()
                }
            };
            if held.is_empty() {
                empty += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            for held in held {
                d.settled(&held, complete()).await;
                done.insert(held.id());
            }
        }
        done
    }
}

/// The keys that a partition has, the last of which cannot be made again.
const PARTS: [&str; 15] = [
    "meta", "due", "park", "excl", "uniq", "uwin", "done", "dead", "keep", "held", "note", "ends",
    "sleep", LINE, "jobs",
];
/// What is missed only when it is next needed: the books by the next claim, the notes of leases by
/// the end of their grant.
const MISSED_LATER: [&str; 3] = ["meta", "note", "sleep"];

fn all(counts: &Counts) -> u64 {
    counts.ready + counts.parked + counts.scheduled + counts.leased + counts.completed + counts.dead
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_that_lost_any_key_goes_on() {
    for part in PARTS {
        let world = World::new().await;
        let d = &world.d;
        let (held, waiting) = world.fill().await;
        assert_eq!(world.loss().await, Level::Fine, "before {part} was lost");
        let before = d.queue().await.counts;
        let deleted = world.delete(part);
        assert!(deleted == 1 || part == "sleep", "there is no {part}");
        let level = world.loss().await;
        if !MISSED_LATER.contains(&part) {
            assert_eq!(level, Level::Risk, "{part} is not missed");
        }
        if part == "held" {
            let view = d.view(held[0].id()).await;
            assert_eq!(view.state, JobState::Leased, "its job is there");
            assert!(view.lease.is_none(), "and its lease is not");
        }
        world.goes_on(&held).await;
        repair_redis(&world.url()).await.unwrap();
        assert_eq!(world.loss().await, Level::Fine, "{part} is not mended");
        let after = d.queue().await.counts;
        let ledger = d.ledger().await;
        assert!(ledger.balances(), "{part}: {ledger:?}");
        let is_kept = part != "jobs";
        if is_kept {
            assert_eq!(all(&after), all(&before) + ADDED, "{part}: {after:?}");
            assert_eq!((after.dead, after.completed), (1, 1), "{part}: {after:?}");
        }
        // Keys go on to hold.
        let double = d.try_enqueue(vec![job().unique_for("w", HOUR).unwrap()]);
        let double = double.await.unwrap();
        if is_kept {
            let is_double = matches!(double[0], Enqueued::Duplicate(_));
            assert!(is_double, "{part}: the window is forgotten");
        }
        let done = world.drain().await;
        for held in &held {
            let verdict = d.settle(held, complete()).await;
            let is_expected = verdict.is_fenced() == (part == "held");
            assert!(is_expected || !is_kept, "{part}: {verdict:?}");
        }
        assert!(
            waiting.is_subset(&done) || !is_kept,
            "{part}: jobs are stuck"
        );
        let counts = d.queue().await.counts;
        assert_eq!((counts.ready, counts.leased), (0, 0), "{part}: {counts:?}");
        assert_eq!(counts.scheduled, u64::from(is_kept), "{part}: {counts:?}");
        if part == "note" {
            assert_eq!(
                world.loss().await,
                Level::Risk,
                "a checkpoint is gone unseen"
            );
            repair_redis(&world.url()).await.unwrap();
        }
        assert_eq!(world.loss().await, Level::Fine, "{part} in the end");
    }
}

/// More grants than a command takes at once are gone through by their deadlines, those that were
/// lost among them.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn commands_pass_by_grants_that_were_lost() {
    let world = World::new().await;
    let d = &world.d;
    d.enqueue_many(302).await;
    for _ in 0..301 {
        assert_eq!(d.claim(1).await.len(), 1);
    }
    world.delete("held");
    let left = d.claim_one().await;
    let leased = Select::State {
        queue: queue(),
        state: JobState::Leased,
        max: 1_000,
    };
    let owner = LeaseSelect::Owner(d.claim_request(1).owner);
    let cancel = d.control(ControlCommand::Cancel(leased)).await;
    assert_eq!(cancel.done, 1, "the one that is there");
    let revoke = d.control(ControlCommand::Revoke(owner)).await;
    assert_eq!(revoke.done, 1);
    assert!(d.settle(&left, complete()).await.is_fenced());
}

/// Ids that come again after their jobs were lost: what still speaks of the lost jobs harms nobody,
/// and a repair takes it away.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn what_a_lost_job_left_behind_harms_no_job_of_its_id() {
    for repairs in [false, true] {
        let server = Standalone::start(&[]);
        let clock = ManualClock::default();
        let d = World::by_hand(&server, &clock).await;
        let keyed = || job().exclusive("one").unwrap();
        let kept = d.held(job().retention(HOUR)).await;
        d.settled(&kept, complete()).await;
        let dead = d.held(job()).await;
        let reason = "hopeless".to_owned();
        d.settled(&dead, Outcome::Bury { reason }).await;
        let head = d.held(keyed()).await;
        let parked = d.enqueue(keyed()).await;
        let later = d.enqueue(job().delay(HOUR)).await;
        server
            .server
            .tell::<u64>(&["DEL", "{losses:default:0}:jobs"]);
        let ids = [kept.id(), dead.id(), parked, later];
        let mut request = d.enqueue_request(vec![job(); ids.len()]);
        for (slot, id) in Arc::make_mut(&mut request.jobs).iter_mut().zip(ids) {
            slot.0 = id;
        }
        let stored = d.store().enqueue(request).await.unwrap();
        assert_eq!(stored, ids.map(Enqueued::New));
        if repairs {
            let url = format!("{}?namespace=losses", server.url());
            repair_redis(&url).await.unwrap();
            for part in ["keep", "done", "dead", "park", "due"] {
                let key = format!("{{losses:default:0}}:{part}");
                assert_eq!(server.server.tell::<u64>(&["ZCARD", &key]), 0, "{part}");
            }
        }
        let dead = Select::State {
            queue: queue(),
            state: JobState::Dead,
            max: 10,
        };
        assert_eq!(d.control(ControlCommand::Purge(dead)).await.done, 0);
        // The head of the key ends: whoever was behind it then is not put in line once more.
        d.settled(&head, complete()).await;
        clock.advance(HOUR * 2);
        let d = d.other().await;
        assert_eq!(d.prune(10).await, 0);
        d.reap(10).await;
        for id in ids {
            assert_eq!(d.state(id).await, Some(JobState::Ready), "{repairs}");
        }
        let claimed: Vec<_> = d.claim(10).await.iter().map(Held::id).collect();
        assert_eq!(claimed.len(), ids.len(), "{repairs}: {claimed:?}");
    }
}

/// Keys of which only the end of their window is left are counted.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_loss_of_unique_keys_is_counted() {
    let world = World::new().await;
    let d = &world.d;
    d.settled(
        &d.held(job().unique_for("w", HOUR).unwrap()).await,
        complete(),
    )
    .await;
    world.delete("uniq");
    let repaired = repair_redis(&world.url()).await.unwrap();
    assert!(repaired.found.contains(" 1 unique keys"), "{repaired:?}");
    assert_eq!(world.loss().await, Level::Fine);
}

/// The list of queues is the one key without which no other is found.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_list_of_queues_is_made_again() {
    let list = "{losses}:queues";
    for repairs in [true, false] {
        let world = World::with(4).await;
        let d = &world.d;
        let tell = |words: &[&str]| world.server.server.tell::<Option<String>>(words);
        d.enqueue_many(50).await;
        let made = tell(&["HGET", list, "default"]);
        assert!(made.is_some());
        world.server.server.tell::<u64>(&["DEL", list]);
        assert_eq!(world.loss().await, Level::Risk, "nobody misses it");
        if repairs {
            repair_redis(&world.url()).await.unwrap();
        } else {
            // A worker that knows the queue puts it back when its next session begins.
            let other = d.other().await;
            assert_eq!(other.claim(1).await.len(), 1);
        }
        assert_eq!(
            tell(&["HGET", list, "default"]),
            made,
            "with its partitions"
        );
        assert_eq!(world.loss().await, Level::Fine);
        let fresh = World::open(&world.server, None).await;
        let mut left = 50 - usize::from(!repairs);
        while left > 0 {
            let some = fresh.claim(50).await.len();
            assert!(some > 0, "{left} jobs are not found");
            left -= some;
        }
    }
}

/// A check-up and a repair may come at any time: what moves is not missing, and what is put back is
/// put back once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_repair_under_load_harms_nothing() {
    const WORKERS: usize = 4;
    let world = World::new().await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..WORKERS {
        let d = World::open(&world.server, None).await;
        let stop = Arc::clone(&stop);
        workers.spawn(async move {
            let (mut made, mut done) = (HashSet::new(), HashSet::new());
            let mut round = 0_u64;
            loop {
                let stops = stop.load(Ordering::Relaxed);
                if !stops {
                    round += 1;
                    let keyed = job().exclusive(format!("{}", round % 3)).unwrap();
                    let mut jobs = vec![job(); 40];
                    jobs.extend([keyed.clone(), keyed, job().priority(1)]);
                    jobs.push(job().delay(Duration::from_millis(20)));
                    made.extend(d.enqueue_all(jobs).await);
                }
                let request = d.claim_request(30);
                let held = match d.store().claim(request).await {
                    Ok(claimed) => Held::all(&claimed),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::TokensAhead, "{error:?}");
                        Vec::new()
                    }
                };
                let is_empty = held.is_empty();
                for held in held {
                    // Those of a lost grant are claimed again.
                    if d.settle(&held, complete()).await.is_held() {
                        assert!(done.insert(held.id()), "a job was done twice");
                    }
                }
                if stops && is_empty {
                    return (d, made, done);
                }
            }
        });
    }
    let rounds = if in_campaign() { 60 } else { 12 };
    for round in 0..rounds {
        // Without losses nothing is missing.
        assert_eq!(
            world.loss().await,
            Level::Fine,
            "a false alarm in round {round}"
        );
        let repaired = repair_redis(&world.url()).await.unwrap();
        assert_eq!(repaired.level, Level::Fine, "{repaired:?} in round {round}");
    }
    for part in [LINE, "ends", "held", "due", "park", "excl"] {
        world.delete(part);
        let mut repairs = 0;
        while world.loss().await != Level::Fine {
            repair_redis(&world.url()).await.unwrap();
            repairs += 1;
            assert!(repairs < 10, "{part} is not mended");
        }
    }
    stop.store(true, Ordering::Relaxed);
    let (mut made, mut done) = (HashSet::new(), HashSet::new());
    let mut drivers = Vec::new();
    for (d, more_made, more_done) in workers.join_all().await {
        made.extend(more_made);
        done.extend(more_done);
        drivers.push(d);
    }
    // What was scheduled, or came back late.
    tokio::time::sleep(Duration::from_millis(50)).await;
    done.extend(world.drain().await);
    let lost: Vec<_> = made.difference(&done).collect();
    assert_eq!(lost.len(), 0, "of {} jobs", made.len());
    let counts = world.d.queue().await.counts;
    assert_eq!(all(&counts), 0, "{counts:?}");
    let ledger = world.d.ledger().await;
    assert!(ledger.balances(), "{ledger:?}");
    assert_eq!(
        (ledger.live, ledger.enqueued),
        (0, made.len() as u64),
        "{ledger:?}"
    );
    assert_eq!(world.loss().await, Level::Fine);
}

/// Control arm: without repair, what a server lost stays lost, and the doctor keeps saying so.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn what_nobody_repairs_stays_at_risk() {
    let world = World::new().await;
    world.fill().await;
    world.delete(LINE);
    world.drain().await;
    assert!(world.d.queue().await.counts.ready > 0);
    assert_eq!(world.loss().await, Level::Risk);
}
