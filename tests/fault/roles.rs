//! What the children do.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use leasehold::clock::{Clock as _, SystemClock};
use leasehold::job::JobOptions;
use leasehold::lease::{Receipt, Verdict};
use leasehold::store::{
    Outcome, RequestId, SessionId, SettleRequest, Settlement, SqliteStore, Store,
};
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use crate::broken::{Broken, Flaw};
use crate::crew::{self, CrewRole};
use crate::lockset::{self, HolderRole};
use crate::world::file;

/// Names the role of a child.
pub(crate) const ROLE: &str = "LEASEHOLD_FAULT_ROLE";

#[derive(Serialize, Deserialize)]
pub(crate) enum Role {
    Worker(WorkerRole),
    Producer(ProducerRole),
    Holder(HolderRole),
    Crew(CrewRole),
    Racer(CrewRole),
    Payer(crate::one_step::PayerRole),
    /// Takes the file's write lock and keeps it.
    LockHolder {
        db: PathBuf,
    },
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct WorkerRole {
    /// Where it finds the store.
    pub(crate) url: String,
    /// Where handlers leave their marks.
    pub(crate) marks: PathBuf,
    pub(crate) owner: String,
    pub(crate) slots: usize,
    pub(crate) term: Duration,
    pub(crate) drain_grace: Duration,
    pub(crate) flaw: Option<Flaw>,
}

/// Enqueues until it is killed, and says what was acknowledged.
#[derive(Serialize, Deserialize)]
pub(crate) struct ProducerRole {
    pub(crate) db: PathBuf,
    pub(crate) number: u32,
    /// Says so before it is true: the control arm.
    pub(crate) hasty: bool,
}

/// The job of all cases.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Errand {
    /// Takes a while.
    Wait { millis: u64 },
    /// Ends at once, and says where it comes from.
    Note { producer: u32, number: u64 },
    /// Takes its process with it.
    Poison { millis: u64 },
    /// Changes data in the queue's own file, in one transaction with its settlement or before it.
    Pay { together: bool },
    /// Blocks its thread, and if it is late does not stop for that.
    Zombie { millis: u64 },
}

impl Job for Errand {
    const KIND: &'static str = "errand";
    const QUEUE: &'static str = "fault";

    fn options(&self) -> JobOptions {
        let mut options = JobOptions::default();
        // The history of every job is the evidence.
        options.retention = Some(Duration::from_secs(3600));
        options.max_expiries = 1_000;
        options
    }
}

/// A permit for each word that the supervisor gives.
pub(crate) static GO: Semaphore = Semaphore::const_new(0);

pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // In one write, so that a kill leaves no half of it.
    let _ = out.write_all(format!("{line}\n").as_bytes());
    let _ = out.flush();
}

#[test]
fn play() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    // The harness has begun a line.
    say("");
    std::thread::spawn(|| {
        // Nobody outlives the test that started it.
        while matches!(std::io::stdin().lock().read(&mut [0]), Ok(1)) {
            GO.add_permits(1);
        }
        std::process::exit(1);
    });
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).unwrap();
    match serde_json::from_str(&role).unwrap() {
        Role::Worker(role) => runtime(role.slots + 2).block_on(work(role)),
        Role::Producer(role) => runtime(2).block_on(produce(role)),
        Role::Holder(role) => runtime(2).block_on(lockset::hold(role)),
        Role::Crew(role) => runtime(2).block_on(crew::work(role)),
        Role::Racer(role) => runtime(2).block_on(crate::race::race(role)),
        Role::Payer(role) => runtime(2).block_on(crate::one_step::work(role)),
        Role::LockHolder { db } => hold(&db),
    }
}

/// A thread for each handler that blocks.
fn runtime(threads: usize) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .unwrap()
}

fn hold(db: &Path) {
    let db = rusqlite::Connection::open(db).unwrap();
    // The engine's own way of waiting asks too rarely to get in between busy writers.
    db.busy_timeout(Duration::ZERO).unwrap();
    while db.execute_batch("BEGIN IMMEDIATE").is_err() {
        std::thread::sleep(Duration::from_micros(100));
    }
    say("holding");
    loop {
        std::thread::park();
    }
}

async fn produce(role: ProducerRole) {
    let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&role.db).unwrap());
    let client = Client::new(store);
    let next = Arc::new(AtomicU64::new(0));
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (client, next) = (client.clone(), Arc::clone(&next));
        let (producer, hasty) = (role.number, role.hasty);
        callers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if hasty {
                    say(&format!("stored {producer} {number}"));
                }
                let note = NewJob::of(&Errand::Note { producer, number }).unwrap();
                client.enqueue(note).await.unwrap();
                if !hasty {
                    say(&format!("stored {producer} {number}"));
                }
            }
        });
    }
    callers.join_next().await.unwrap().unwrap();
}

async fn work(role: WorkerRole) {
    let store = crew::open(&role.url, None).await;
    let store = match role.flaw {
        Some(flaw) => Arc::new(Broken::new(store, flaw).await),
        None => store,
    };
    let client = Client::new(store);
    let hand = Arc::new(Hand::new(&client, role.clone()).await);
    let handler = move |errand: Errand, ctx: Context| {
        let hand = Arc::clone(&hand);
        async move { hand.handle(errand, &ctx).await }
    };
    let worker = client
        .worker()
        .handle(handler)
        .owner(&role.owner)
        .task("fault")
        .slots(role.slots)
        .terms(LeaseTerms::of_term(role.term))
        // A zombie gets all the time it needs to do harm.
        .grace(Duration::from_secs(20))
        .drain_grace(role.drain_grace);
    let report = worker.run().await.unwrap();
    assert_eq!(report.unsettled, 0);
}

/// The handlers of one worker, with what they need to act past their runtime.
struct Hand {
    role: WorkerRole,
    store: Arc<dyn Store>,
    session: SessionId,
    lanes: AtomicU32,
}

impl Hand {
    async fn new(client: &Client, role: WorkerRole) -> Self {
        let store = Arc::clone(client.store());
        Self {
            role,
            session: store.open_session().await.unwrap(),
            store,
            lanes: AtomicU32::new(0),
        }
    }

    async fn handle(&self, errand: Errand, ctx: &Context) -> Result<(), Failure> {
        match errand {
            Errand::Wait { millis } => {
                say("waits");
                tokio::time::sleep(Duration::from_millis(millis)).await;
            }
            Errand::Note { .. } => {}
            Errand::Poison { millis } => {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                self.last_words();
                std::process::abort();
            }
            Errand::Pay { together } => return self.pay(together, ctx),
            Errand::Zombie { millis } => {
                return self.haunt(Duration::from_millis(millis), ctx).await;
            }
        }
        self.mark(ctx);
        Ok(())
    }

    fn pay(&self, together: bool, ctx: &Context) -> Result<(), Failure> {
        let mut db = rusqlite::Connection::open(file(&self.role.url))?;
        db.busy_timeout(Duration::from_secs(60))?;
        let tx = db.transaction()?;
        let row = (ctx.job_id().to_string(), ctx.token().get().cast_signed());
        tx.execute("INSERT INTO paid (job, token) VALUES (?1, ?2)", row)?;
        if together {
            ctx.complete_in(tx)?;
        } else {
            tx.commit()?;
        }
        say("paid");
        Ok(())
    }

    /// Leaves a mark that outlives the process: this job was worked to its end.
    fn mark(&self, ctx: &Context) {
        // A kill can cut even one write in two, where it crosses a page: what is left of it gets a
        // line of its own.
        self.note("done", &format!("\n{} {}\n", ctx.job_id(), ctx.token()));
    }

    /// When the process died, on the store's clock.
    fn last_words(&self) {
        let now = SystemClock.now().as_micros();
        self.note("died", &format!("{} {now}\n", self.role.owner));
    }

    fn note(&self, file: &str, line: &str) {
        let path = self.role.marks.join(file);
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.unwrap().write_all(line.as_bytes()).unwrap();
    }

    /// Works without looking at its stop signal. Whoever stood still meanwhile tries everything
    /// that the lease once allowed.
    async fn haunt(&self, takes: Duration, ctx: &Context) -> Result<(), Failure> {
        say("began");
        std::thread::sleep(takes);
        // The first run ends when it was frozen, not before.
        while ctx.attempt() == 1 && !ctx.time_left().is_zero() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let late = ctx.time_left().is_zero();
        let job = ctx.job_id();
        // A resource that nobody guards.
        let unguarded = self.role.marks.join(job.to_string());
        std::fs::write(unguarded, ctx.token().to_string()).unwrap();
        let saved = ctx.save_checkpoint(&ctx.token()).await;
        if !late {
            return saved;
        }
        let settled = self.settle(ctx.receipt()).await;
        let saved = if saved.is_ok() { "saved" } else { "refused" };
        let settled = if settled.is_held() { "held" } else { "fenced" };
        say(&format!("late {job} {} {saved} {settled}", ctx.token()));
        Err(Failure::lost())
    }

    /// Settles past the runtime, which would know better.
    async fn settle(&self, receipt: Receipt) -> Verdict {
        let request = RequestId {
            session: self.session,
            lane: self.lanes.fetch_add(1, Ordering::Relaxed),
            seq: 1,
        };
        let settlements = vec![Settlement {
            receipt,
            outcome: Outcome::Complete { result: None },
        }];
        let request = SettleRequest {
            request,
            settlements,
        };
        self.store.settle(request).await.unwrap()[0]
    }
}
