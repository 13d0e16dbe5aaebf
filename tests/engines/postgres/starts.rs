//! Where lines start: what was taken is not stepped over for ever, and nothing is left behind.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::clock::ManualClock;
use leasehold::job::{JobState, QueueName};
use leasehold::lease::Receipt;
use leasehold::store::{
    EnqueueRequest, Outcome, PostgresOptions, PostgresStore, SettleRequest, Settlement,
};
use leasehold::{JobId, NewJob, Store, inspect};
use tokio_postgres::Client;

use crate::postgres::server::Server;
use crate::postgres::{Caller, complete, job};

const TERM: Duration = Duration::from_secs(600);

/// How the starts are moved up.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Arm {
    Shipped,
    /// Without regard to those who have not ended.
    Rash,
    /// Places are drawn by those of whom nobody knows.
    Unknown,
}

struct World {
    server: Server,
    db: Client,
    caller: Caller,
}

impl World {
    async fn new(arm: Arm) -> Self {
        let server = Server::start(&["fsync=off", "autovacuum=off"]);
        let store = PostgresStore::with(server.config(), PostgresOptions::new()).await;
        let caller = Caller::new(store.unwrap()).await;
        let db = server.client().await;
        let (function, sound, broken) = match arm {
            Arm::Shipped => return Self { server, db, caller },
            Arm::Rash => {
                let sound = "NOT \"leasehold\".is_entered_1(h.queue, h.epoch + 1)";
                ("advance_1", sound, "true")
            }
            Arm::Unknown => ("enter_1", "pg_advisory_xact_lock_shared(", "coalesce("),
        };
        let text = format!("SELECT pg_get_functiondef('leasehold.{function}'::regproc)");
        let text: String = db.query_one(&text, &[]).await.unwrap().get(0);
        assert!(text.contains(sound), "{text}");
        db.batch_execute(&text.replace(sound, broken))
            .await
            .unwrap();
        Self { server, db, caller }
    }

    /// Jobs come and go, and the starts follow them.
    async fn traffic(&mut self) {
        for _ in 0..4 {
            self.caller.enqueue(5).await;
            while let Some(held) = self.caller.claim_one(TERM).await {
                self.settle(complete(held)).await;
            }
        }
    }

    async fn settle(&mut self, settlement: Settlement) {
        let request = SettleRequest {
            request: self.caller.request(),
            settlements: vec![settlement],
        };
        let verdicts = self.caller.store.settle(request).await.unwrap();
        assert!(verdicts[0].is_held());
    }

    async fn number(&self, sql: &str) -> i64 {
        self.db.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Whether the only job that waits is found.
    async fn finds_it(&mut self) -> bool {
        let waiting = "SELECT count(*) FROM leasehold.job WHERE state = 2";
        assert_eq!(self.number(waiting).await, 1);
        let sleeper = self.caller.store.clone();
        let queues = [QueueName::default()];
        let start = Instant::now();
        sleeper
            .wait(&queues, true, Duration::from_millis(1_500))
            .await
            .unwrap();
        let woken = start.elapsed() < Duration::from_secs(1);
        let found = self.caller.claim_one(TERM).await.is_some();
        assert_eq!(woken, found, "a sleeper sees what a claim sees");
        found
    }
}

/// What commits late.
#[derive(Clone, Copy, Debug)]
enum Late {
    Enqueue,
    /// To the front of the line.
    Surrender,
}

async fn late_commit(arm: Arm, late: Late) -> bool {
    let mut world = World::new(arm).await;
    world.caller.enqueue(1).await;
    let held = world.caller.claim_one(TERM).await.unwrap();
    let mut other = world.server.client().await;
    let tx = other.transaction().await.unwrap();
    let store = world.caller.store.clone();
    match late {
        Late::Enqueue => {
            store.enqueue_in(&tx, vec![job()]).await.unwrap();
        }
        Late::Surrender => {
            let settlement = surrender(held);
            assert!(store.settle_in(&tx, &settlement).await.unwrap().is_held());
        }
    }
    world.traffic().await;
    tx.commit().await.unwrap();
    let found = world.finds_it().await;
    if found {
        // With the transaction over, the starts move on.
        let before = world.number("SELECT max(sealed) FROM leasehold.head").await;
        world.traffic().await;
        let after = world.number("SELECT max(sealed) FROM leasehold.head").await;
        assert!(after > before, "{after} {before}");
    }
    found
}

fn surrender(receipt: Receipt) -> Settlement {
    Settlement {
        receipt,
        outcome: Outcome::Surrender {
            delay: Duration::ZERO,
            mark: None,
        },
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_job_that_is_committed_late_is_not_left_behind() {
    for late in [Late::Enqueue, Late::Surrender] {
        assert!(late_commit(Arm::Shipped, late).await, "{late:?}");
        // The control arm: it waits, and nobody sees it.
        let found = late_commit(Arm::Rash, late).await;
        assert!(
            !found,
            "{late:?}: a start that waits for nobody does no harm"
        );
    }
}

/// Who is at it elsewhere, in this database or in another of the server, holds nothing back.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_transaction_elsewhere_holds_nothing_back() {
    let mut world = World::new(Arm::Shipped).await;
    world
        .db
        .batch_execute("CREATE DATABASE other")
        .await
        .unwrap();
    world.traffic().await;
    let sealed = "SELECT max(sealed) FROM leasehold.head";
    let mut config = world.server.config();
    for database in ["postgres", "other"] {
        config.dbname(database);
        let (mut elsewhere, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let tx = elsewhere.transaction().await.unwrap();
        tx.batch_execute("CREATE TABLE open (at bigint)")
            .await
            .unwrap();
        let before = world.number(sealed).await;
        world.traffic().await;
        let after = world.number(sealed).await;
        assert!(after > before + 10, "{database}: {after} {before}");
    }
    // Control arm: one that has put a job into the queue does.
    let mut other = world.server.client().await;
    let tx = other.transaction().await.unwrap();
    let store = world.caller.store.clone();
    store.enqueue_in(&tx, vec![job()]).await.unwrap();
    let before = world.number(sealed).await;
    world.traffic().await;
    world.traffic().await;
    let after = world.number(sealed).await;
    assert!(after < before + 20, "{after} {before}");
}

/// An enqueue that has drawn its place and has not written its row.
async fn drawn_and_not_written(arm: Arm, keyed: bool) -> bool {
    let mut world = World::new(arm).await;
    world.traffic().await;
    let stop = "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END $$;
                CREATE TRIGGER stop BEFORE INSERT ON leasehold.job
                FOR EACH ROW WHEN (NEW.weight > 2000) EXECUTE FUNCTION stop()";
    world.db.batch_execute(stop).await.unwrap();
    let keeper = world.server.client().await;
    keeper
        .batch_execute("SELECT pg_advisory_lock(7)")
        .await
        .unwrap();
    let mut producer = Caller::new(world.caller.store.clone()).await;
    let mut large = leasehold::NewJob::raw(
        QueueName::default(),
        leasehold::job::Kind::new("work").unwrap(),
        "x".repeat(4_000),
    );
    if keyed {
        large = large.unique("key").unwrap();
    }
    let enqueue = EnqueueRequest {
        request: producer.request(),
        jobs: vec![(JobId::generate(), large)].into(),
    };
    let store = producer.store.clone();
    let enqueueing = tokio::spawn(async move { store.enqueue(enqueue).await });
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    while world.number(waits).await == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    world.traffic().await;
    keeper
        .batch_execute("SELECT pg_advisory_unlock(7)")
        .await
        .unwrap();
    enqueueing.await.unwrap().unwrap();
    world.finds_it().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_place_that_is_drawn_and_not_yet_taken_is_not_passed() {
    for keyed in [false, true] {
        assert!(drawn_and_not_written(Arm::Shipped, keyed).await);
        let found = drawn_and_not_written(Arm::Unknown, keyed).await;
        assert!(!found, "the lock makes no difference");
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn places_that_start_anew_are_served() {
    let mut world = World::new(Arm::Shipped).await;
    world.traffic().await;
    // As in a copy of the tables without the numbers.
    let back = "SELECT setval('leasehold.place', 1)";
    world.db.batch_execute(back).await.unwrap();
    world.caller.enqueue(1).await;
    assert!(world.finds_it().await);
    world.traffic().await;
    world.traffic().await;
    world.caller.enqueue(1).await;
    assert!(world.finds_it().await);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_claim_does_not_step_over_all_that_was_taken() {
    let mut world = World::new(Arm::Shipped).await;
    let mut reader = world.server.client().await;
    world.caller.enqueue(1).await;
    world.caller.claim_one(TERM).await.unwrap();
    // Nothing of what follows can be removed while this is open.
    let old = reader.build_transaction();
    let old = old.isolation_level(tokio_postgres::IsolationLevel::RepeatableRead);
    let old = old.start().await.unwrap();
    old.batch_execute("SELECT count(*) FROM leasehold.job")
        .await
        .unwrap();
    for _ in 0..30 {
        world.caller.enqueue(1_000).await;
        assert_eq!(world.caller.claim(1_000, TERM).await.len(), 1);
    }
    for _ in 0..3 {
        world.caller.enqueue(1).await;
        world.caller.claim_one(TERM).await.unwrap();
    }
    let steps = pages(&world.db).await;
    let forget = "UPDATE leasehold.head SET lines = '{}', fronts = '{}', starts = '{}'";
    world.db.batch_execute(forget).await.unwrap();
    let control = pages(&world.db).await;
    assert!(
        steps * 8 < control,
        "{steps} pages, and {control} without the starts"
    );
    old.commit().await.unwrap();
}

/// Until a vacuum, the index of deadlines has all grants that ended. A renewal or a settlement,
/// which knows the grant, must not look there: in a table that seems small, any index looks as good
/// as another.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn who_knows_a_grant_does_not_look_among_the_deadlines() {
    let world = World::new(Arm::Shipped).await;
    let mut db = world.server.client().await;
    let tx = db.transaction().await.unwrap();
    let without = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;
                   ALTER TABLE leasehold.grants DROP CONSTRAINT grants_pkey";
    tx.batch_execute(without).await.unwrap();
    let plan = async || -> String {
        let look = "EXPLAIN SELECT deadline FROM leasehold.grants WHERE queue = 1 AND id = 7";
        let lines = tx.query(look, &[]).await.unwrap();
        lines.iter().map(|line| line.get::<_, String>(0)).collect()
    };
    assert!(
        !plan().await.contains("grants_deadline"),
        "{}",
        plan().await
    );
    // Control arm: an index by the queue itself is taken.
    let other = "CREATE INDEX grants_plain ON leasehold.grants (queue, deadline, id)";
    tx.batch_execute(other).await.unwrap();
    assert!(plan().await.contains("grants_plain"), "{}", plan().await);
}

/// How many pages are touched to see that nothing is in line.
async fn pages(db: &Client) -> i64 {
    let look = "SELECT leasehold.look_1(namespace, ARRAY[name], true) FROM leasehold.queue";
    touched(db, look).await
}

async fn touched(db: &Client, sql: &str) -> i64 {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS) {sql}");
    // The first time, the catalog is read too.
    db.query(&explain, &[]).await.unwrap();
    let plan = db.query(&explain, &[]).await.unwrap();
    let lines = plan.iter().map(|row| row.get::<_, &str>(0).trim_start());
    // The first is of the whole: "Buffers: shared hit=7 read=1".
    let whole = lines.filter_map(|line| line.strip_prefix("Buffers: shared "));
    let whole = whole.take(1).flat_map(|line| line.split(' '));
    let counts = whole.filter(|part| part.starts_with("hit=") || part.starts_with("read="));
    let counts = counts.map(|part| part.split('=').nth(1).unwrap().parse::<i64>().unwrap());
    let pages = counts.sum();
    assert!(pages > 0, "{plan:?}");
    pages
}

/// Producers whose transactions end when they like, beside claims that move the starts.
/// Returns how many jobs were never found.
async fn stranded(arm: Arm) -> usize {
    const PRODUCERS: usize = 6;
    const ROUNDS: usize = 25;
    let mut world = World::new(arm).await;
    // Makes the queue, and is no part of what is counted.
    world.caller.enqueue(1).await;
    let first = world.caller.claim_one(TERM).await.unwrap();
    world.settle(complete(first)).await;
    let running = Arc::new(AtomicUsize::new(PRODUCERS));
    let mut producers = tokio::task::JoinSet::new();
    for _ in 0..PRODUCERS {
        let store = world.caller.store.clone();
        let mut db = world.server.client().await;
        let running = Arc::clone(&running);
        producers.spawn(async move {
            let mut ids = Vec::new();
            for _ in 0..ROUNDS {
                let tx = db.transaction().await.unwrap();
                let jobs = (0..fastrand::usize(1..4)).map(|_| job().priority(fastrand::u8(3..5)));
                let stored = store.enqueue_in(&tx, jobs.collect()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(fastrand::u64(0..30))).await;
                if fastrand::u8(..4) == 0 {
                    tx.rollback().await.unwrap();
                } else {
                    tx.commit().await.unwrap();
                    ids.extend(stored.into_iter().map(leasehold::store::Enqueued::id));
                }
            }
            running.fetch_sub(1, Ordering::Relaxed);
            ids
        });
    }
    let mut seen = HashSet::new();
    // What waits at the end, and is not found in so many claims, is never found. Claims count from
    // the last commit on: one before it has found nothing of it.
    let mut idle = 0;
    while idle < 20 {
        let all_committed = running.load(Ordering::Relaxed) == 0;
        let grants = world.caller.claim(5, TERM).await;
        let found_nothing = all_committed && grants.is_empty();
        idle = if found_nothing { idle + 1 } else { 0 };
        for grant in grants {
            for lease in &grant.leases {
                let id = lease.job.id;
                // Some are handed back, to the front of their lines.
                let first = seen.insert(id);
                let receipt = grant.receipt(lease);
                let outcome = if first && fastrand::u8(..8) == 0 {
                    seen.remove(&id);
                    surrender(receipt)
                } else {
                    complete(receipt)
                };
                world.settle(outcome).await;
            }
        }
    }
    let mut enqueued = Vec::new();
    while let Some(ids) = producers.join_next().await {
        enqueued.extend(ids.unwrap());
    }
    let stranded = enqueued.iter().filter(|id| !seen.contains(id)).count();
    let waiting = "SELECT count(*) FROM leasehold.job WHERE state = 2";
    assert_eq!(world.number(waiting).await, stranded as i64);
    stranded
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn nothing_is_stranded_whatever_commits_when() {
    assert_eq!(stranded(Arm::Shipped).await, 0);
    for _ in 0..10 {
        if stranded(Arm::Rash).await > 0 {
            return;
        }
    }
    panic!("the test sees nothing");
}

/// Whatever is known of the starts, the key of the table is the order of service.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn starts_change_no_order() {
    let server = Server::start(&["fsync=off", "autovacuum=off"]);
    for first in [0, 4, 7] {
        for moves in 2..5 {
            Order::new(&server).await.round(first, moves).await;
        }
    }
}

/// Jobs of three priorities, some of them handed back.
struct Order {
    clock: ManualClock,
    caller: Caller,
    db: Client,
}

impl Order {
    async fn new(server: &Server) -> Self {
        let clock = ManualClock::default();
        let caller = Caller::new(server.store(clock.clone()).await).await;
        let db = server.client().await;
        Self { clock, caller, db }
    }

    async fn enqueue(&mut self, jobs: usize, like: NewJob) {
        let jobs = (0..jobs).map(|_| (JobId::generate(), like.clone()));
        let enqueue = EnqueueRequest {
            request: self.caller.request(),
            jobs: Arc::new(jobs.collect()),
        };
        self.caller.store.enqueue(enqueue).await.unwrap();
    }

    async fn claim(&mut self, max: usize, admit_suspect: bool) -> Vec<(JobId, Receipt)> {
        let mut claim = self.caller.claim_request(max, TERM);
        claim.admit_suspect = admit_suspect;
        let claimed = self.caller.store.claim(claim).await.unwrap();
        let grants = claimed.grants.iter();
        let held = grants.flat_map(|grant| {
            let leases = grant.leases.iter();
            leases.map(|lease| {
                let own = lease.job.options.term;
                assert_eq!(grant.term, own.unwrap_or(TERM));
                (lease.job.id, grant.receipt(lease))
            })
        });
        held.collect()
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) {
        let settle = SettleRequest {
            request: self.caller.request(),
            settlements,
        };
        let verdicts = self.caller.store.settle(settle).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    }

    async fn hand_back(&mut self, jobs: usize) {
        let held = self.claim(jobs, false).await;
        let back = held.into_iter().map(|(_, receipt)| surrender(receipt));
        self.settle(back.collect()).await;
    }

    /// Claims go on, and the starts with them: jobs of a priority come and go, as far as they are
    /// the first.
    async fn move_on(&mut self, priority: u8, times: usize) {
        for _ in 0..times {
            self.enqueue(1, job().priority(priority)).await;
            let first = self
                .in_line()
                .await
                .iter()
                .find(|(_, suspect)| !suspect)
                .copied();
            let held = self.claim(1, false).await;
            assert_eq!(held.first().map(|(id, _)| *id), first.map(|(id, _)| id));
            let done = held.into_iter().map(|(_, receipt)| complete(receipt));
            self.settle(done.collect()).await;
        }
    }

    /// The jobs in line, in the order of the key, and whether they are suspects.
    async fn in_line(&self) -> Vec<(JobId, bool)> {
        let all = "SELECT id::text, line % 2 = 0 FROM leasehold.job WHERE state = 2
                   ORDER BY line, place";
        let rows = self.db.query(all, &[]).await.unwrap();
        let id = |row: &tokio_postgres::Row| row.get::<_, &str>(0).parse().unwrap();
        rows.iter().map(|row| (id(row), row.get(1))).collect()
    }

    async fn round(&mut self, first: u8, moves: usize) {
        if moves == 4 {
            self.enqueue(2, job()).await;
            for _ in 0..2 {
                assert_eq!(self.claim(2, false).await.len(), 2);
                self.clock.advance(TERM);
            }
            // The second expiry makes them suspects.
            assert!(self.claim(2, false).await.is_empty());
        }
        for priority in [4, 3, 5] {
            self.enqueue(3, job().priority(priority)).await;
        }
        self.hand_back(2).await;
        self.move_on(first, moves).await;
        self.enqueue(1, job()).await;
        if moves == 2 {
            let mut own = job().priority(5);
            own.options.term = Some(2 * TERM);
            self.enqueue(1, own).await;
        }
        self.hand_back(4).await;
        self.move_on(first, moves / 2).await;
        for max in [1, 3, 2, 9, 9] {
            let mut suspects = 0;
            let mut expected = self.in_line().await;
            expected.retain(|(_, suspect)| {
                suspects += usize::from(*suspect);
                !suspect || suspects == 1
            });
            let expected = expected.iter().map(|(id, _)| *id).take(max);
            let expected: Vec<JobId> = expected.collect();
            let held = self.claim(max, true).await;
            let ids: Vec<JobId> = held.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, expected, "{first} {moves}");
            for id in ids {
                let view = inspect::job(&self.caller.store, id).await.unwrap();
                assert_eq!(view.unwrap().state, JobState::Leased);
            }
            let done = held.into_iter().map(|(_, receipt)| complete(receipt));
            self.settle(done.collect()).await;
        }
        assert!(self.in_line().await.is_empty());
    }
}
