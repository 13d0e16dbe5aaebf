//! What the Redis store promises beyond the contract: repeats after a loss of memory, a full
//! server, a server that forgot everything, namespaces, partitions, one sleeper per job.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use leasehold::clock::{Clock, ManualClock, Timestamp};
use leasehold::inspect::{self, Ledger};
use leasehold::job::{JobState, Namespace, QueueName};
use leasehold::store::{
    Checkpointed, ClaimQueue, ControlCommand, Enqueued, LeaseSelect, Outcome, RedisOptions,
    RedisStore, Renewal, Select, acl_rule,
};
use leasehold::{Client, ErrorKind, FencingToken, JobId, Store};
use leasehold_conformance::{Driver, Held, ManualFixture, TERM, job, queue};

use crate::redis::support::redis::Standalone;

fn options(server: &Standalone, namespace: &str) -> RedisOptions {
    RedisOptions::new(server.url()).namespace(Namespace::new(namespace).unwrap())
}

async fn driver(options: RedisOptions) -> Driver {
    let clock = ManualClock::default();
    let store = RedisStore::open(options.clock(clock.clone())).unwrap();
    Driver::new(Arc::new(ManualFixture::new(store, clock))).await
}

fn complete() -> Outcome {
    Outcome::Complete { result: None }
}

fn surrender() -> Outcome {
    Outcome::Surrender {
        delay: Duration::ZERO,
        mark: None,
    }
}

fn retry() -> Outcome {
    Outcome::Retry {
        delay: Duration::ZERO,
        reason: "it failed".repeat(20),
    }
}

fn bury() -> Outcome {
    Outcome::Bury {
        reason: "hopeless".repeat(20),
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_partition_that_forgot_refuses_the_repeat() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    let request = d.enqueue_request(vec![job()]);
    d.store().enqueue(request.clone()).await.unwrap();
    let memory: Vec<String> = server.server.tell(&["KEYS", "{a:default:0}:s:*"]);
    assert_eq!(memory.len(), 1);
    server.server.tell::<()>(&["DEL", &memory[0]]);
    let error = d.store().enqueue(request.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionLost);
    assert_eq!(d.ledger().await.enqueued, 1);

    // Control arm: under another name the call is carried out, and finds its job there.
    let other = d.other().await;
    let mut again = request;
    again.request = other.request();
    let answers = d.store().enqueue(again).await.unwrap();
    assert!(matches!(answers[..], [Enqueued::Duplicate(_)]));
}

/// A handle knows which of its requests is the last of its lane; a partition knows it for itself.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_partition_that_has_answered_a_later_request_refuses() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    let held = d.held(job()).await;
    let memory: Vec<String> = server.server.tell(&["KEYS", "{a:default:0}:s:*"]);
    // Sequence number 99 of the first lane, some verb, the first step.
    let (lane, later) = ("\0".repeat(4), format!("c{}", "\0".repeat(10)));
    server
        .server
        .tell::<()>(&["HSET", &memory[0], &lane, &later]);
    let refused = [
        d.store()
            .settle(d.settle_request(vec![(&held, complete())]))
            .await
            .map(drop),
        d.try_enqueue(vec![job()]).await.map(drop),
    ];
    for refused in refused {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SessionLost, "{error}");
    }
    let request = d.claim_request(1);
    d.store().claim(request.clone()).await.unwrap_err();
    let error = d.store().claim(request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionLost, "{error}");
    assert_eq!(d.ledger().await.live, 1);
}

/// Two queues lie in two partitions: what one of them refuses, the other may have carried out.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_refusal_after_another_partition_has_acted_is_not_certain() {
    let server = Standalone::start(&[]);
    let tell = |words: &[&str]| server.server.tell::<()>(words);
    let forget_other = || {
        let memory: Vec<String> = server.server.tell(&["KEYS", "{a:other:0}:s:*"]);
        for key in memory {
            tell(&["DEL", &key]);
        }
    };
    let both = || vec![job(), job().queue("other").unwrap()];
    let d = driver(options(&server, "a")).await;
    d.enqueue_all(both()).await;

    forget_other();
    let request = d.enqueue_request(both());
    let error = d.store().enqueue(request.clone()).await.unwrap_err();
    assert!(!error.kind().is_certain(), "{error:?}");
    assert!(error.is_transient(), "{error:?}");
    assert_eq!(d.ledger().await.enqueued, 2, "the first has acted");
    // The repeat does nothing, and says so.
    let error = d.store().enqueue(request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionLost, "{error:?}");
    assert_eq!(d.ledger().await.enqueued, 2);

    let d = d.other().await;
    d.enqueue_all(both()).await;
    tell(&[
        "ACL",
        "SETUSER",
        "default",
        "resetkeys",
        "~{a}:*",
        "~{a:default:0}:*",
    ]);
    let request = d.enqueue_request(both());
    let error = d.store().enqueue(request.clone()).await.unwrap_err();
    assert!(!error.kind().is_certain(), "{error:?}");
    let error = d.store().enqueue(request.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    tell(&["ACL", "SETUSER", "default", "allkeys"]);
    d.store().enqueue(request).await.unwrap();
    assert_eq!(d.ledger().await.enqueued, 4);

    // A client must not send again what it cannot know to be undone.
    let store = RedisStore::open(options(&server, "a")).unwrap();
    let client = Client::new(Arc::new(store));
    client.enqueue_many(both()).await.unwrap();
    forget_other();
    let error = client.enqueue_many(both()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
    assert_eq!(d.ledger().await.enqueued, 6);
    client.enqueue_many(both()).await.unwrap();
    assert_eq!(d.ledger().await.enqueued, 7);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_keeps_what_it_got_before_a_partition_that_forgot() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    let other = || QueueName::new("other").unwrap();
    d.enqueue_all(vec![job(), job().queue("other").unwrap()])
        .await;
    let both = |d: &Driver| {
        let mut request = d.claim_request(9);
        request.queues.push(ClaimQueue {
            queue: other(),
            ..request.queues[0].clone()
        });
        request
    };
    // Its session is known to both.
    for held in Held::all(&d.claim_as(both(&d)).await) {
        d.settled(&held, surrender()).await;
    }
    let memory: Vec<String> = server.server.tell(&["KEYS", "{a:other:0}:s:*"]);
    assert_eq!(memory.len(), 1);
    server.server.tell::<()>(&["DEL", &memory[0]]);

    let held = Held::all(&d.claim_as(both(&d)).await);
    assert_eq!(held.len(), 1);
    assert_eq!(*held[0].receipt.queue(), queue());
    d.settled(&held[0], complete()).await;
    // With nothing to keep, it says what happened.
    let request = both(&d);
    let error = d.store().claim(request.clone()).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    let error = d.store().claim(request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SessionLost, "{error:?}");
    let d = d.other().await;
    assert_eq!(Held::all(&d.claim_as(both(&d)).await).len(), 1);
}

/// A clock that can be set back between two of its readings.
#[derive(Clone, Debug)]
struct Wobbly {
    clock: ManualClock,
    state: Arc<AtomicU8>,
}

const STEADY: u8 = 0;
/// After the next reading it is a second behind.
const ARMED: u8 = 1;
const BEHIND: u8 = 2;

impl Clock for Wobbly {
    fn now(&self) -> Timestamp {
        let order = Ordering::SeqCst;
        match self.state.compare_exchange(ARMED, BEHIND, order, order) {
            Err(BEHIND) => self.clock.now().before(Duration::from_secs(1)),
            _ => self.clock.now(),
        }
    }
}

/// A claim that finds much overdue goes in steps, and may find no token at the end of them.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_in_steps_that_finds_no_token_can_be_repeated() {
    let server = Standalone::start(&[]);
    let clock = ManualClock::default();
    let state = Arc::new(AtomicU8::new(STEADY));
    let wobbly = Wobbly {
        clock: clock.clone(),
        state: Arc::clone(&state),
    };
    let options = options(&server, "a").clock(wobbly).strict_clock();
    let store = RedisStore::open(options).unwrap();
    let d = Driver::new(Arc::new(ManualFixture::new(store, clock))).await;
    d.enqueue_many(102).await;
    assert_eq!(d.claim(100).await.len(), 100);
    let moment = Duration::from_millis(1);
    d.advance(TERM.saturating_sub(moment)).await;
    assert_eq!(d.claim(1).await.len(), 1);
    d.advance(moment).await;

    let request = d.claim_request(9);
    state.store(ARMED, Ordering::SeqCst);
    let refused = d.store().claim(request.clone()).await.unwrap_err();
    state.store(STEADY, Ordering::SeqCst);
    assert_eq!(refused.kind(), ErrorKind::TokensAhead, "{refused:?}");
    let claimed = d.claim_as(request).await;
    assert_eq!(Held::all(&claimed).len(), 1, "what nobody had claimed");
    assert_eq!(d.claim(9).await.len(), 9, "what has expired");
    d.snapshot().await.assert_in_order();
}

/// More than one answer may carry: what goes back in line for its weight stays findable, and others
/// hear of it.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn heavy_jobs_that_did_not_fit_stay_in_line() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    for priority in [0, 4] {
        let heavy = || {
            let mut heavy = job().priority(priority);
            heavy.payload = vec![7; 256 << 10].into();
            heavy
        };
        let mut ids = d.enqueue_all(vec![heavy(); 35]).await;
        ids.extend(d.enqueue_all(vec![heavy(); 35]).await);
        // Somebody who sleeps is woken for what stayed.
        let woken = || {
            let stats = server
                .server
                .info(&["INFO", "commandstats"], "cmdstat_publish");
            stats.map_or(0, |stats| {
                stats[6..].split(',').next().unwrap().parse().unwrap()
            })
        };
        let before: u64 = woken();
        let asleep = d.other().await;
        let mut got = d.claim_ids(100).await;
        assert!(got.len() < 70, "one answer does not carry all of them");
        while got.len() < 70 {
            let more = asleep.claim_ids(100).await;
            assert!(
                !more.is_empty(),
                "{} of priority {priority} are stuck",
                70 - got.len()
            );
            got.extend(more);
        }
        assert_eq!(got, ids, "in the order of arrival");
        assert_eq!(woken(), before, "nobody slept");
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_full_server_takes_no_jobs_and_lets_holders_out() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    let keyed = |n: usize| {
        let job = job().unique(format!("unique {n}")).unwrap();
        job.exclusive(format!("key {}", n / 2)).unwrap()
    };
    d.enqueue_all((0..200).map(keyed).collect()).await;
    d.enqueue_many(301).await;
    let held = d.claim(400).await;
    assert_eq!(held.len(), 400, "one of each key, and the others");
    let memory = |limit| {
        let words = ["CONFIG", "SET", "maxmemory", limit];
        server.server.tell::<()>(&words);
    };
    memory("1");

    let refused = d.try_enqueue(vec![job()]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
    let refused = d.store().claim(d.claim_request(1)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
    for _ in 0..10 {
        d.advance(TERM / 2).await;
        let beats = held.iter().map(Held::beat).collect();
        for renewal in d.store().renew(beats).await.unwrap() {
            assert!(matches!(renewal, Renewal::Held { .. }), "{renewal:?}");
        }
        assert!(d.reap(1_000).await.is_empty());
    }
    for held in &held {
        let saved = d.checkpoint(held, 1, "half").await;
        assert!(matches!(saved, Checkpointed::Saved { .. }), "{saved:?}");
    }
    let outcomes = [complete(), surrender(), retry(), bury()];
    let ends = held.iter().zip(outcomes.iter().cycle().cloned()).collect();
    let verdicts = d.store().settle(d.settle_request(ends)).await.unwrap();
    assert!(verdicts.iter().all(|verdict| verdict.is_held()));

    memory("0");
    let ledger = d.ledger().await;
    assert!(ledger.balances());
    assert_eq!(
        (ledger.enqueued, ledger.expired(), ledger.live),
        (501, 0, 0)
    );
    assert_eq!((ledger.completed, ledger.buried), (100, 100));
    let counts = d.queue().await.counts;
    assert_eq!(counts.ready + counts.scheduled, 301, "nothing is lost");
    d.snapshot().await.assert_in_order();
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn tokens_grow_through_a_server_that_forgot_everything() {
    let server = Standalone::start(&[]);
    let store: Arc<dyn Store> = Arc::new(RedisStore::open(options(&server, "a")).unwrap());
    // The server's own clock: nothing here may look at it.
    let clock = ManualClock::default();
    let fixture = || {
        Arc::new(ManualFixture::new(
            Shared(Arc::clone(&store)),
            clock.clone(),
        ))
    };
    let mut last = FencingToken::new(0);
    for _ in 0..5 {
        let d = Driver::new(fixture()).await;
        d.enqueue_many(1_000).await;
        for _ in 0..10 {
            let held = d.claim(100).await;
            assert!(held[0].token() > last, "{} after {last}", held[0].token());
            last = held.last().unwrap().token();
        }
        server.server.tell::<()>(&["FLUSHALL"]);
    }
    let d = Driver::new(fixture()).await;
    d.enqueue_many(1).await;
    let queues = inspect::queues(d.store()).await.unwrap();
    assert_eq!(queues.len(), 1, "the queue is on the list again");
}

/// A store handle that several drivers share.
struct Shared(Arc<dyn Store>);

#[leasehold::async_trait]
impl Store for Shared {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    async fn dedicated(&self) -> leasehold::Result<Arc<dyn Store>> {
        self.0.dedicated().await
    }
    async fn open_session(&self) -> leasehold::Result<leasehold::store::SessionId> {
        self.0.open_session().await
    }
    async fn enqueue(
        &self,
        request: leasehold::store::EnqueueRequest,
    ) -> leasehold::Result<Vec<Enqueued>> {
        self.0.enqueue(request).await
    }
    async fn claim(
        &self,
        request: leasehold::store::ClaimRequest,
    ) -> leasehold::Result<leasehold::store::Claimed> {
        self.0.claim(request).await
    }
    async fn renew(&self, beats: Vec<leasehold::store::Beat>) -> leasehold::Result<Vec<Renewal>> {
        self.0.renew(beats).await
    }
    async fn settle(
        &self,
        request: leasehold::store::SettleRequest,
    ) -> leasehold::Result<Vec<leasehold::lease::Verdict>> {
        self.0.settle(request).await
    }
    async fn checkpoint(
        &self,
        request: leasehold::store::CheckpointRequest,
    ) -> leasehold::Result<Vec<Checkpointed>> {
        self.0.checkpoint(request).await
    }
    async fn reap(
        &self,
        request: leasehold::store::ReapRequest,
    ) -> leasehold::Result<Vec<leasehold::store::Expiry>> {
        self.0.reap(request).await
    }
    async fn control(
        &self,
        request: leasehold::store::ControlRequest,
    ) -> leasehold::Result<leasehold::store::Controlled> {
        self.0.control(request).await
    }
    async fn inspect(&self, query: inspect::Query) -> leasehold::Result<inspect::View> {
        self.0.inspect(query).await
    }
    async fn wait(
        &self,
        queues: &[QueueName],
        suspects: bool,
        limit: Duration,
    ) -> leasehold::Result<()> {
        self.0.wait(queues, suspects, limit).await
    }
    async fn prune(&self, request: leasehold::store::PruneRequest) -> leasehold::Result<u64> {
        self.0.prune(request).await
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn namespaces_share_nothing() {
    let server = Standalone::start(&[]);
    let a = driver(options(&server, "a")).await;
    let b = driver(options(&server, "a.b")).await;
    let keyed = job().unique("u").unwrap().exclusive("e").unwrap();
    a.enqueue(keyed.clone()).await;
    assert!(b.snapshot().await.queues.is_empty());
    for (d, name) in [(&a, "a"), (&b, "a.b")] {
        assert_eq!(d.store().namespace().as_str(), name);
        let dedicated = d.store().dedicated().await.unwrap();
        assert_eq!(dedicated.namespace().as_str(), name);
    }
    b.enqueue(keyed).await;
    let held = a.claim_one().await;
    assert!(b.settle(&held, complete()).await.is_fenced());
    b.control(ControlCommand::Pause(queue())).await;
    assert!(!a.queue().await.paused);
    assert_eq!(a.snapshot().await.audit.len(), 0);
    a.settled(&held, complete()).await;
    let keys: Vec<String> = server.server.tell(&["KEYS", "*"]);
    for key in keys {
        let known = ["{a:", "{a}", "{a.b:", "{a.b}"];
        assert!(known.iter().any(|tag| key.starts_with(tag)), "{key}");
    }
}

/// The server does not undo what a function did before a command that its user may not run.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_user_with_too_few_rights_opens_no_session_and_writes_nothing() {
    let namespace = Namespace::new("a").unwrap();
    let server = Standalone::with_acl(&acl_rule(&namespace));
    let rules = |rules: &[&str]| {
        let words = [&["ACL", "SETUSER", "app"], rules].concat();
        server.server.tell::<()>(&words);
    };
    rules(&["-rpush", "-zadd"]);
    let store = RedisStore::open(options(&server, "a")).unwrap();
    let refused = store.open_session().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    assert!(refused.to_string().contains("rpush, zadd"), "{refused}");
    let client = Client::new(Arc::new(store));
    let refused = client.enqueue_many(vec![job()]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    let keys: Vec<String> = server.server.tell(&["KEYS", "*"]);
    assert!(keys.is_empty(), "{keys:?}");

    // What only a cluster, a sentinel or a listener needs may be missing, and so may other queues.
    rules(&[
        "+rpush",
        "+zadd",
        "-asking",
        "-cluster|slots",
        "-role",
        "-readonly",
        "-select",
    ]);
    rules(&["-subscribe", "resetkeys", "~{a}:*", "~{a:default:*"]);
    let d = driver(options(&server, "a")).await;
    d.settled(&d.held(job()).await, complete()).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_queue_of_an_earlier_layout_is_refused() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    server
        .server
        .tell::<()>(&["HSET", "{a}:queues", "default", "1:0"]);
    let refused = d.try_enqueue(vec![job()]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    assert!(refused.to_string().contains("another version"), "{refused}");
    let refused = d.store().claim(d.claim_request(1)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    // Whoever comes now is not let in at all, not even to queues of its own.
    let late = RedisStore::open(options(&server, "a")).unwrap();
    let refused = late.open_session().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let refused = inspect::queues(&late).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
}

/// Where the list of queues was lost the partition itself tells of its layout.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_books_of_an_earlier_layout_are_left_alone() {
    let server = Standalone::start(&[]);
    let meta = "{a:default:0}:meta";
    let books = || {
        server
            .server
            .tell::<BTreeMap<String, String>>(&["HGETALL", meta])
    };
    let words = ["HSET", meta, "layout", "2", "seq", "7", "last", "99"];
    server.server.tell::<()>(&words);
    let before = books();
    let d = driver(options(&server, "a")).await;
    let refused = [
        d.try_enqueue(vec![job()]).await.map(drop),
        d.store().claim(d.claim_request(1)).await.map(drop),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert!(refused.to_string().contains("another version"), "{refused}");
    }
    assert_eq!(books(), before);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn partitions_share_a_queue_and_keep_a_key_together() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a").partitions(4)).await;
    let plain: HashSet<JobId> = d.enqueue_many(200).await.into_iter().collect();
    let mut keyed = Vec::new();
    for n in 0..60 {
        keyed.push(job().exclusive(format!("key {}", n % 12)).unwrap());
    }
    d.enqueue_all(keyed).await;
    let mut ready = Vec::new();
    while let Some(more) = Some(d.claim(50).await).filter(|more| !more.is_empty()) {
        ready.extend(more);
    }
    let ids: HashSet<JobId> = ready.iter().map(Held::id).collect();
    assert_eq!((ids.len(), ready.len()), (212, 212));
    assert!(plain.is_subset(&ids));
    let used: HashSet<u16> = ready.iter().map(|held| held.receipt.partition()).collect();
    assert_eq!(used.len(), 4);
    assert_eq!(d.view(ready[0].id()).await.job.id, ready[0].id());
    for held in &ready {
        d.settled(held, complete()).await;
    }
    let next = d.claim(100).await;
    assert_eq!(next.len(), 12, "the next of each key");

    let other = driver(options(&server, "a").partitions(2)).await;
    let refused = other.try_enqueue(vec![job()]).await.unwrap_err();
    assert_eq!(refused.field(), Some("partitions"), "{refused}");
    // A setting that is wrong here keeps nobody from looking, nor from what is there already.
    assert_eq!(other.queue().await.counts.leased, 12);
    assert_eq!(other.view(next[0].id()).await.state, JobState::Leased);
    other.control(ControlCommand::Pause(queue())).await;
    other.control(ControlCommand::Resume(queue())).await;
    other.advance(TERM).await;
    assert_eq!(other.claim(100).await.len(), 12);
    assert!(RedisStore::open(options(&server, "a").partitions(65)).is_err());
}

/// A queue has all its partitions from the start; one that nothing went to yet is nowhere.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_partition_that_is_not_there_is_in_nobodys_way() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a").partitions(8)).await;
    let id = d.enqueue(job()).await;
    let made: Vec<String> = server.server.tell(&["KEYS", "{a:default:*}:meta"]);
    assert_eq!(made.len(), 1, "{made:?}");
    let held = d.claim(9).await;
    assert_eq!(held.iter().map(Held::id).collect::<Vec<_>>(), [id]);
    let expired: Vec<JobId> = d.expire_all().await.iter().map(|end| end.job).collect();
    assert_eq!(expired, [id]);
    assert!(d.expire_all().await.is_empty());
    // A repeat tells what comes next, in all partitions.
    let request = d.claim_request(9);
    let first = d.claim_as(request.clone()).await;
    assert_eq!(Held::all(&first)[0].id(), id);
    let again = d.claim_as(request).await;
    assert_eq!(again.next_deadline, first.next_deadline);
    assert_eq!(again.grants, first.grants);
    // Also of those where it did not have to look for anything.
    for _ in 0..3 {
        d.settled(&d.held(job()).await, complete()).await;
        d.enqueue(job()).await;
        let request = d.claim_request(1);
        let first = d.claim_as(request.clone()).await;
        assert_eq!(d.claim_as(request).await.grants, first.grants);
        d.settled(&Held::all(&first)[0], complete()).await;
    }
}

/// One process removes a queue and makes it again; others know it as it was.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_queue_made_again_with_other_partitions_is_noticed() {
    for (before, after) in [(4, 2), (2, 4)] {
        let server = Standalone::start(&[]);
        let partitions = |pattern: &str| {
            let keys: Vec<String> = server.server.tell(&["KEYS", pattern]);
            keys.len()
        };
        driver(options(&server, "a").partitions(before))
            .await
            .enqueue_many(50)
            .await;
        let old = driver(options(&server, "a")).await;
        let held = old.claim(100).await;
        assert_eq!(held.len(), 50);
        for held in held {
            old.settled(&held, complete()).await;
        }
        // Sessions of processes that know it, and have not yet called.
        let enqueues = old.other().await;
        let claims = driver(options(&server, "a")).await;
        let new = driver(options(&server, "a").partitions(after)).await;
        let removed = new.control(ControlCommand::Remove(queue())).await;
        assert_eq!(removed.done, 1);
        let listed: u64 = server.server.tell(&["HLEN", "{a}:queues"]);
        assert_eq!(listed, 0, "it is on the list");
        new.enqueue_many(50).await;
        assert_eq!(partitions("{a:default:*}:jobs"), usize::from(after));

        let refused = enqueues.try_enqueue(vec![job(); 50]).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::SessionLost, "{refused}");
        assert!(refused.to_string().contains("made again"), "{refused}");
        let request = claims.claim_request(100);
        for _ in 0..2 {
            let refused = claims.store().claim(request.clone()).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::SessionLost);
        }

        let old = old.other().await;
        old.enqueue_many(50).await;
        assert_eq!(partitions("{a:default:*}:jobs"), usize::from(after));
        assert_eq!(new.claim(200).await.len(), 100);
    }
}

/// Claims of a lane take turns at the partitions, and so do those of neighbouring lanes: none is
/// always the last to be asked.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn claims_take_turns_at_the_partitions() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a").partitions(4)).await;
    d.enqueue_many(400).await;
    for lanes in [[8; 4], [20, 21, 22, 23]] {
        let mut asked = HashSet::new();
        for lane in lanes {
            let mut request = d.claim_request(1);
            request.request = d.request_on(lane);
            asked.insert(d.claim_as(request).await.grants[0].partition);
        }
        assert_eq!(asked.len(), 4, "lanes {lanes:?}");
    }
}

/// A queue whose tokens are ahead of the clock is passed over, if another one has something to
/// give.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_queue_that_is_ahead_stops_no_other() {
    let server = Standalone::start(&[]);
    // Far, and just so that not one token fits.
    let (far, just) = (Duration::from_secs(300), Duration::from_millis(20));
    for (name, behind) in [("a", far), ("b", just)] {
        let d = driver(options(&server, name).strict_clock()).await;
        let of = |name: &str| job().queue(name).unwrap();
        let claim = async |max: usize, names: &[&str]| {
            let mut request = d.claim_request(max);
            let first = request.queues.remove(0);
            request.queues.extend(names.iter().map(|name| ClaimQueue {
                queue: QueueName::new(*name).unwrap(),
                ..first.clone()
            }));
            d.store().claim(request).await
        };
        // Neither is new.
        d.enqueue_all(vec![of("ahead"), of("ahead"), of("ahead"), of("other")])
            .await;
        let both = claim(2, &["ahead", "other"]).await.unwrap();
        assert_eq!(Held::all(&both).len(), 2);
        d.advance(Duration::from_secs(400)).await;
        assert_eq!(claim(1, &["ahead"]).await.unwrap().grants.len(), 1);
        d.set_back(behind).await;
        d.enqueue(of("ahead")).await;
        let refused = claim(9, &["ahead"]).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::TokensAhead);
        let got = Held::all(&claim(9, &["ahead", "other"]).await.unwrap());
        let queues: Vec<&str> = got
            .iter()
            .map(|held| held.receipt.queue().as_str())
            .collect();
        assert_eq!(queues, ["other"]);
    }
}

/// A claim that finds no token has not been answered: the one before it is the last of its lane,
/// and can be repeated.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_claim_that_finds_no_token_leaves_its_lane_as_it_was() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a").strict_clock()).await;
    // A new issuer starts above the clock of that time.
    d.settled(&d.held(job()).await, complete()).await;
    d.enqueue_many(2).await;
    d.advance(Duration::from_secs(9)).await;
    let request = d.claim_request(1);
    let first = d.claim_as(request.clone()).await;
    d.set_back(Duration::from_secs(1)).await;
    let refused = d.store().claim(d.claim_request(1)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::TokensAhead);
    assert_eq!(d.claim_as(request).await.grants, first.grants);
}

/// The jobs that were claimed, in the order of each partition.
fn by_partition(held: &[Held]) -> BTreeMap<u16, Vec<JobId>> {
    let mut parts = BTreeMap::<u16, Vec<JobId>>::new();
    for held in held {
        let part = parts.entry(held.receipt.partition()).or_default();
        part.push(held.id());
    }
    parts
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn order_holds_within_a_partition_and_the_books_balance_across() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a").partitions(4)).await;
    let ids = d.enqueue_many(100).await;
    let mut held = Vec::new();
    while held.len() < 100 {
        held.extend(d.claim(30).await);
    }
    let place = |id: &JobId| ids.iter().position(|other| other == id);
    let first = by_partition(&held);
    assert_eq!(first.len(), 4);
    for part in first.values() {
        assert!(part.is_sorted_by_key(place), "in the order of arrival");
    }
    let tokens: HashSet<_> = held
        .iter()
        .map(|held| (held.receipt.partition(), held.token()))
        .collect();
    assert_eq!(tokens.len(), 100, "each issuer gives a token once");

    d.advance(TERM).await;
    d.control(ControlCommand::Pause(queue())).await;
    assert_eq!(d.reap(1_000).await.len(), 100);
    assert!(d.claim(100).await.is_empty(), "a pause is for all of them");
    d.control(ControlCommand::Resume(queue())).await;
    let again = d.claim(1_000).await;
    assert_eq!(
        by_partition(&again),
        first,
        "first in line, as they were given"
    );

    let owner = d.claim_request(1).owner;
    let revoked = d
        .control(ControlCommand::Revoke(LeaseSelect::Owner(owner)))
        .await;
    assert_eq!(revoked.done, 100);
    for (max, done) in [(10, 10), (1_000, 90), (1_000, 0)] {
        let ready = Select::State {
            queue: queue(),
            state: JobState::Ready,
            max,
        };
        assert_eq!(d.control(ControlCommand::Purge(ready)).await.done, done);
    }
    let mut expected = Ledger::default();
    expected.enqueued = 100;
    expected.granted = 200;
    expected.expired_deadline = 100;
    expected.revoked = 100;
    expected.purged = 100;
    assert_eq!(d.ledger().await, expected);
    d.snapshot().await.assert_in_order();
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn one_job_wakes_one_sleeper() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    let sleepers = || {
        server
            .server
            .tell::<usize>(&["ZCARD", "{a:default:0}:sleep"])
    };
    let queues = [queue()];
    let wait = || d.store().wait(&queues, false, Duration::from_secs(60));
    let asleep = async {
        while sleepers() < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        d.enqueue(job()).await;
        sleepers()
    };
    let (_, _, _, left) = tokio::join!(wait(), wait(), wait(), asleep);
    assert_eq!(left, 2, "one job takes one sleeper out");
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn one_job_wakes_one_process_of_many() {
    let server = Standalone::start(&[]);
    let d = driver(options(&server, "a")).await;
    d.enqueue(job()).await;
    d.claim_one().await;
    let mut sleepers = tokio::task::JoinSet::new();
    for _ in 0..5 {
        // The sleepers' entries last as long as the store's time stands still.
        let store = RedisStore::open(options(&server, "a").clock(ManualClock::default())).unwrap();
        let sleep = async move { store.wait(&[queue()], false, Duration::from_secs(60)).await };
        sleepers.spawn(sleep);
    }
    let asleep = || {
        server
            .server
            .tell::<usize>(&["ZCARD", "{a:default:0}:sleep"])
    };
    while asleep() < 5 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for jobs in 1..=3 {
        d.enqueue(job()).await;
        assert_eq!(asleep(), 5 - jobs, "each job takes one sleeper out");
        let stats = server
            .server
            .info(&["INFO", "commandstats"], "cmdstat_publish");
        let stats = stats.expect("a word was said");
        assert!(stats.starts_with(&format!("calls={jobs},")), "{stats}");
    }
}

#[test]
fn a_password_is_never_shown() {
    let options = RedisOptions::new("redis://user:secret@127.0.0.1:1/0");
    assert!(!format!("{options:?}").contains("secret"));
    if let Err(error) = RedisStore::open(options) {
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
}
