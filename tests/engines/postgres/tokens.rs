//! Tokens grow over everything that takes the issuer's memory away. The control arm is a plain
//! sequence, which goes back each time.

use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::{Clock, ManualClock};
use leasehold::job::QueueName;
use leasehold::store::{ClaimQueue, EnqueueRequest, PostgresStore};
use leasehold::{ErrorKind, JobId, Store};
use leasehold_conformance::{Driver, ManualFixture};
use tokio_postgres::Client;

use crate::postgres::issuer::goes_on_behind_the_last;
use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, job};

const TERM: Duration = Duration::from_secs(60);

async fn plain(db: &Client) -> i64 {
    let row = db.query_one("SELECT nextval('plain')", &[]).await;
    row.unwrap().get(0)
}

/// Grants from one server, and then from the one that took its place.
struct Line {
    highest: u64,
    plain: i64,
}

impl Line {
    async fn grants(caller: &mut Caller, db: &Client) -> Self {
        let mut line = Self {
            highest: 0,
            plain: 0,
        };
        for _ in 0..20 {
            caller.enqueue(10).await;
            for grant in caller.claim(10, TERM).await {
                for lease in &grant.leases {
                    assert!(lease.token.get() > line.highest);
                    line.highest = lease.token.get();
                }
            }
            line.plain = plain(db).await;
        }
        line
    }

    /// No token of the successor is as low as one that was given before.
    async fn is_followed_by(&self, server: &Server, options: leasehold::store::PostgresOptions) {
        // A process of its own, which remembers nothing.
        let store = PostgresStore::with(server.config(), options).await.unwrap();
        let mut caller = Caller::new(store).await;
        let db = server.client().await;
        let control = plain(&db).await;
        assert!(control <= self.plain, "the plain sequence was to go back");
        let next = Self::grants_from(&mut caller).await;
        assert!(next > self.highest, "{next} after {}", self.highest);
    }

    async fn grants_from(caller: &mut Caller) -> u64 {
        caller.enqueue(1).await;
        let grants = caller.claim(1, TERM).await;
        grants[0].leases[0].token.get()
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn from_process_to_process() {
    for twice in [false, true] {
        let clock = ManualClock::default();
        let options = Server::options().clock(clock.clone());
        let process = async || {
            let store = PostgresStore::with(shared().config(), options.clone()).await;
            let fixture = ManualFixture::new(store.unwrap(), clock.clone());
            Driver::new(Arc::new(fixture)).await
        };
        goes_on_behind_the_last(&clock, twice, process).await;
    }
}

/// A claim that waits for another goes on behind its tokens, not behind those that were there when
/// it began to wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn from_claim_to_claim() {
    let server = Server::start(&["fsync=off"]);
    let mut db = server.client().await;
    let observer = server.client().await;
    for twice in [false, true] {
        let mut caller = Caller::new(server.store(ManualClock::default()).await).await;
        caller.enqueue(1).await;
        let tx = db.transaction().await.unwrap();
        tx.batch_execute("SELECT FROM leasehold.queue FOR UPDATE")
            .await
            .unwrap();
        let issue = "UPDATE leasehold.head SET last = floor + 1000 WHERE last = 0 RETURNING last";
        let last: i64 = tx.query_one(issue, &[]).await.unwrap().get(0);
        let mut claim = caller.claim_request(1, TERM);
        if twice {
            claim.queues.push(claim.queues[0].clone());
        }
        let store = caller.store.clone();
        let claiming = tokio::spawn(async move { store.claim(claim).await });
        let waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted";
        while !observer
            .query_one(waits, &[])
            .await
            .unwrap()
            .get::<_, bool>(0)
        {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tx.commit().await.unwrap();
        let claimed = claiming.await.unwrap().unwrap();
        assert_eq!(claimed.grants[0].id.get(), last as u64 + 1);
    }
}

/// A queue whose tokens are ahead of the clock is passed over, if another one has something to
/// give.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_queue_that_is_ahead_stops_no_other() {
    let clock = ManualClock::default();
    let options = Server::options().clock(clock.clone()).strict_clock();
    let store = PostgresStore::with(shared().config(), options).await;
    let mut caller = Caller::new(store.unwrap()).await;
    let name = |name: &str| QueueName::new(name).unwrap();
    for queue in ["ahead", "ahead", "other", "other"] {
        let mut new = job();
        new.queue = name(queue);
        let enqueue = EnqueueRequest {
            request: caller.request(),
            jobs: vec![(JobId::generate(), new)].into(),
        };
        caller.store.enqueue(enqueue).await.unwrap();
    }
    let mut claim = async |max: usize, names: &[&str]| {
        let mut request = caller.claim_request(max, TERM);
        let first = request.queues.remove(0);
        request.queues.extend(names.iter().map(|queue| ClaimQueue {
            queue: name(queue),
            ..first.clone()
        }));
        let claimed = caller.store.claim(request).await;
        claimed.map(|claimed| claimed.grants.into_iter().map(|grant| grant.queue))
    };
    assert!(claim(1, &["other"]).await.unwrap().eq([name("other")]));
    clock.advance(Duration::from_secs(400));
    assert!(claim(1, &["ahead"]).await.unwrap().eq([name("ahead")]));
    clock.set(clock.now().before(Duration::from_secs(300)));
    let Err(refused) = claim(9, &["ahead"]).await else {
        panic!("no token fits");
    };
    assert_eq!(refused.kind(), ErrorKind::TokensAhead);
    let got = claim(9, &["ahead", "other", "ahead"]).await.unwrap();
    assert!(got.eq([name("other")]));
}

/// The queues of one claim go on behind each other.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn from_queue_to_queue() {
    for twice in [false, true] {
        let mut caller = Caller::new(shared().store(ManualClock::default()).await).await;
        let mut claim = caller.claim_request(9, TERM);
        let first = claim.queues.remove(0);
        for name in ["a", "b", "c"] {
            let queue = QueueName::new(name).unwrap();
            let mut new = job();
            new.queue = queue.clone();
            let jobs = (0..2).map(|_| (JobId::generate(), new.clone()));
            let enqueue = EnqueueRequest {
                request: caller.request(),
                jobs: Arc::new(jobs.collect()),
            };
            caller.store.enqueue(enqueue).await.unwrap();
            claim.queues.push(ClaimQueue {
                queue,
                ..first.clone()
            });
        }
        if twice {
            claim.queues.push(claim.queues[0].clone());
        }
        claim.request = caller.request();
        let claimed = caller.store.claim(claim).await.unwrap();
        let leases = claimed.grants.iter().flat_map(|grant| &grant.leases);
        let tokens: Vec<u64> = leases.map(|lease| lease.token.get()).collect();
        assert_eq!(tokens, (tokens[0]..tokens[0] + 6).collect::<Vec<_>>());
    }
}

/// A new queue starts above its floor, also where its process has seen tokens that are too far
/// ahead.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_queue_that_is_new_starts_above_its_floor() {
    let clock = ManualClock::default();
    let mut caller = Caller::new(shared().store(clock.clone()).await).await;
    clock.advance(Duration::from_secs(400));
    caller.enqueue(1).await;
    caller.claim_one(TERM).await.unwrap();
    clock.set(clock.now().before(Duration::from_secs(300)));
    for twice in [false, true] {
        let queue = QueueName::new(format!("new-{twice}")).unwrap();
        let mut new = job();
        new.queue = queue.clone();
        let enqueue = EnqueueRequest {
            request: caller.request(),
            jobs: vec![(JobId::generate(), new)].into(),
        };
        caller.store.enqueue(enqueue).await.unwrap();
        let mut claim = caller.claim_request(1, TERM);
        claim.queues[0].queue = queue;
        if twice {
            claim.queues.push(claim.queues[0].clone());
        }
        let claimed = caller.store.claim(claim).await.unwrap();
        let floor = clock.now().as_micros() + 20_000;
        assert_eq!(claimed.grants[0].id.get(), floor + 1);
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn over_an_old_backup() {
    let mut server = Server::start(&["fsync=off"]);
    let options = Server::options();
    let store = PostgresStore::with(server.config(), options.clone())
        .await
        .unwrap();
    let db = server.client().await;
    db.batch_execute("CREATE SEQUENCE plain").await.unwrap();
    let mut caller = Caller::new(store.clone()).await;
    Line::grants(&mut caller, &db).await;
    server.back_up();
    let caller = &mut Caller::new(store).await;
    let db = server.client().await;
    let line = Line::grants(caller, &db).await;
    server.restore();
    line.is_followed_by(&server, options).await;
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn over_a_backup_from_before_the_queue() {
    let mut server = Server::start(&["fsync=off"]);
    let options = Server::options();
    let db = server.client().await;
    db.batch_execute("CREATE SEQUENCE plain").await.unwrap();
    server.back_up();
    let store = PostgresStore::with(server.config(), options.clone())
        .await
        .unwrap();
    let db = server.client().await;
    let line = Line::grants(&mut Caller::new(store).await, &db).await;
    server.restore();
    line.is_followed_by(&server, options).await;
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn over_the_promotion_of_a_lagging_standby() {
    let mut primary = Server::start(&["fsync=off", "wal_level=replica"]);
    let options = Server::options();
    let store = PostgresStore::with(primary.config(), options.clone())
        .await
        .unwrap();
    let db = primary.client().await;
    db.batch_execute("CREATE SEQUENCE plain").await.unwrap();
    let mut caller = Caller::new(store).await;
    Line::grants(&mut caller, &db).await;
    let standby = primary.standby();
    standby.cut_off().await;
    let line = Line::grants(&mut caller, &db).await;
    primary.kill();
    standby.promote().await;
    line.is_followed_by(&standby, options).await;
}
