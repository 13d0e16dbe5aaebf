//! Every case of the conformance suite on private Redis servers, each in a namespace of its own:
//! on one server, on a cluster of six, and for a user who may do no more than [`acl_rule`] says.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "a server's start is waited for")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::inspect::{self, JobView, Page, Query, View};
use leasehold::job::{JobState, Namespace, QueueName};
use leasehold::lease::Verdict;
use leasehold::store::conformance::{ManualFixture, cases};
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlCommand, ControlRequest,
    Controlled, EnqueueRequest, Enqueued, Expiry, LeaseSelect, PruneRequest, ReapRequest,
    RedisOptions, RedisStore, Renewal, Select, SessionId, SettleRequest, acl_rule,
};
use leasehold::{ErrorKind, JobId, Store};
use support::redis::{Cluster, STEADY, Standalone};

/// One server for all cases. Its watchdog ends it with the process.
fn server() -> &'static Standalone {
    static SERVER: OnceLock<Standalone> = OnceLock::new();
    SERVER.get_or_init(|| Standalone::start(&[]))
}

fn nodes() -> &'static Cluster {
    static NODES: OnceLock<Cluster> = OnceLock::new();
    NODES.get_or_init(|| Cluster::start(STEADY))
}

/// A server that lets nobody in but those whom a case names.
fn strict_server() -> &'static Standalone {
    static SERVER: OnceLock<Standalone> = OnceLock::new();
    SERVER.get_or_init(|| Standalone::with_acl("-@all"))
}

fn fresh() -> Namespace {
    Namespace::new(format!("case-{:016x}", fastrand::u64(..))).unwrap()
}

fn fixture(url: impl std::fmt::Display, namespace: Namespace) -> ManualFixture {
    let clock = ManualClock::default();
    // A busy machine is not what the cases are about.
    let options = RedisOptions::new(format!("{url}?timeout=60s"))
        .namespace(namespace)
        .index(true)
        .clock(clock.clone());
    ManualFixture::new(RedisStore::open(options).unwrap(), clock)
}

/// The URL of a user of the strict server who may reach this namespace and no other.
fn user_of(namespace: &Namespace) -> String {
    let rule = acl_rule(namespace);
    let mut words = vec!["ACL", "SETUSER", namespace.as_str(), "on", ">secret"];
    words.extend(rule.split(' '));
    let server = &strict_server().server;
    server.tell::<()>(&words);
    format!("redis://{namespace}:secret@{}", server.address())
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn indexed() -> ManualFixture {
    fixture(server().url(), fresh())
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn clustered() -> ManualFixture {
    fixture(nodes().url(), fresh())
}

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn restricted() -> ManualFixture {
    let namespace = fresh();
    fixture(user_of(&namespace), namespace)
}

leasehold::conformance!(redis, indexed, ignore = "needs redis-server: ./tests/run");
leasehold::conformance!(
    redis_cluster,
    clustered,
    ignore = "needs redis-server: ./tests/run"
);
leasehold::conformance!(
    redis_least_rights,
    restricted,
    ignore = "needs redis-server: ./tests/run"
);

/// Control arm: the rule does keep somebody out.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn the_user_of_a_namespace_reaches_no_other() {
    let namespace = fresh();
    let url = user_of(&namespace);
    let own = RedisStore::open(RedisOptions::new(&url).namespace(namespace)).unwrap();
    own.open_session().await.unwrap();
    let other = RedisStore::open(RedisOptions::new(&url).namespace(fresh())).unwrap();
    let refused = other.open_session().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
}

/// A store without an index, in which jobs are looked for one by one: the cases ask for them by id. A
/// command to one job by its id is refused, and seen.
struct Searched {
    store: Arc<dyn Store>,
    refused: Arc<AtomicBool>,
}

impl Searched {
    async fn find(&self, id: JobId) -> leasehold::Result<Option<Box<JobView>>> {
        for queue in inspect::queues(&*self.store).await? {
            for state in JobState::ALL {
                let mut page = Page::first(1_000);
                loop {
                    let jobs =
                        inspect::jobs(&*self.store, queue.queue.clone(), state, page).await?;
                    if let Some(found) = jobs.rows.into_iter().find(|view| view.job.id == id) {
                        return Ok(Some(Box::new(found)));
                    }
                    page = Page::first(1_000);
                    page.after = jobs.next;
                    if page.after.is_none() {
                        break;
                    }
                }
            }
        }
        Ok(None)
    }
}

#[leasehold::async_trait]
impl Store for Searched {
    fn name(&self) -> &'static str {
        self.store.name()
    }
    async fn dedicated(&self) -> leasehold::Result<Arc<dyn Store>> {
        let (store, refused) = (self.store.dedicated().await?, Arc::clone(&self.refused));
        Ok(Arc::new(Self { store, refused }))
    }
    async fn open_session(&self) -> leasehold::Result<SessionId> {
        self.store.open_session().await
    }
    async fn enqueue(&self, request: EnqueueRequest) -> leasehold::Result<Vec<Enqueued>> {
        self.store.enqueue(request).await
    }
    async fn claim(&self, request: ClaimRequest) -> leasehold::Result<Claimed> {
        self.store.claim(request).await
    }
    async fn renew(&self, beats: Vec<Beat>) -> leasehold::Result<Vec<Renewal>> {
        self.store.renew(beats).await
    }
    async fn settle(&self, request: SettleRequest) -> leasehold::Result<Vec<Verdict>> {
        self.store.settle(request).await
    }
    async fn checkpoint(&self, request: CheckpointRequest) -> leasehold::Result<Vec<Checkpointed>> {
        self.store.checkpoint(request).await
    }
    async fn reap(&self, request: ReapRequest) -> leasehold::Result<Vec<Expiry>> {
        self.store.reap(request).await
    }
    async fn control(&self, request: ControlRequest) -> leasehold::Result<Controlled> {
        let is_by_id = matches!(
            request.command,
            ControlCommand::Cancel(Select::Job(_))
                | ControlCommand::RetryDead(Select::Job(_))
                | ControlCommand::Purge(Select::Job(_))
                | ControlCommand::Reschedule {
                    jobs: Select::Job(_),
                    ..
                }
                | ControlCommand::Revoke(LeaseSelect::Job(_))
        );
        let controlled = self.store.control(request).await;
        let kind = controlled.as_ref().err().map(leasehold::Error::kind);
        if is_by_id && kind == Some(ErrorKind::Unsupported) {
            self.refused.store(true, Ordering::Relaxed);
        }
        controlled
    }
    async fn inspect(&self, query: Query) -> leasehold::Result<View> {
        match query {
            Query::Job(id) => self.find(id).await.map(View::Job),
            query => self.store.inspect(query).await,
        }
    }
    async fn wait(
        &self,
        queues: &[QueueName],
        suspects: bool,
        limit: Duration,
    ) -> leasehold::Result<()> {
        self.store.wait(queues, suspects, limit).await
    }
    async fn prune(&self, request: PruneRequest) -> leasehold::Result<u64> {
        self.store.prune(request).await
    }
}

/// All cases but those that call a job by its id, on a store without an index: there what is plain goes
/// another way, through scripts of its own.
#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn without_an_index() {
    all_but_by_id(RedisOptions::BULK_BYTES);
}

/// The same with every plain job enqueued in a transaction.
#[test]
#[ignore = "needs redis-server: ./tests/run"]
fn in_bulk() {
    all_but_by_id(1);
    let transactions = server().server.calls("exec");
    assert!(transactions > cases().len() as u64, "{transactions}");
}

fn all_but_by_id(bulk: usize) {
    let (all, next) = (cases(), AtomicUsize::new(0));
    let (failed, by_id) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
    let run = || {
        while let Some(case) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let name = format!("{}::{}", case.verb, case.name);
            let (clock, refused) = (ManualClock::default(), Arc::<AtomicBool>::default());
            let options = RedisOptions::new(format!("{}?timeout=60s", server().url()))
                .namespace(fresh())
                .index(false)
                .bulk(bulk)
                .clock(clock.clone());
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let ran = catch_unwind(AssertUnwindSafe(|| {
                runtime.block_on(async {
                    let store = Searched {
                        store: Arc::new(RedisStore::open(options).unwrap()),
                        refused: Arc::clone(&refused),
                    };
                    case.run(ManualFixture::new(store, clock)).await;
                });
            }));
            if refused.load(Ordering::Relaxed) {
                by_id.fetch_add(1, Ordering::Relaxed);
                println!("calls a job by its id: {name}");
            } else if ran.is_err() {
                failed.lock().unwrap().push(name);
            }
            if !failed.lock().unwrap().is_empty() {
                return;
            }
        }
    };
    std::thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(run))));
    assert_eq!(failed.into_inner().unwrap(), Vec::<String>::new());
    let by_id = by_id.into_inner();
    assert!(by_id * 5 < all.len(), "{by_id} of {} cases", all.len());
}
