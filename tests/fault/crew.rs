//! The workers of the campaign: children that note every call in the common journal.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use leasehold::clock::{Clock, SystemClock, Timestamp};
use leasehold::job::JobOptions;
use leasehold::store::PostgresStore;
use leasehold::store::{RedisOptions, RedisStore};
use leasehold::store::{SqliteOptions, SqliteStore, Store};
use leasehold::worker::shutdown_signal;
use leasehold::{Client, Context, Failure, Job, LeaseTerms};
use leasehold_conformance::history::Op;
use serde::{Deserialize, Serialize};

use crate::broken::{Broken, Flaw};
use crate::journal::{Journal, Log};
use crate::register::Place;
use crate::roles::{Errand, GO, say};

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct CrewRole {
    /// Where it finds the store.
    pub(crate) url: String,
    pub(crate) journal: PathBuf,
    pub(crate) number: u32,
    pub(crate) owner: String,
    pub(crate) slots: usize,
    pub(crate) prefetch: usize,
    pub(crate) term: Duration,
    pub(crate) drain_grace: Duration,
    pub(crate) stall_limit: Option<Duration>,
    /// Where the store's clock is set by hand.
    pub(crate) clock: Option<PathBuf>,
    pub(crate) registers: Place,
    /// Whether registers are fenced.
    pub(crate) fenced: bool,
    /// Whether it is of the version that knows [`Novelty`].
    pub(crate) new: bool,
    pub(crate) flaw: Option<Flaw>,
}

impl CrewRole {
    pub(crate) async fn open(&self) -> Arc<dyn Store> {
        let store = open(&self.url, self.clock.as_deref().map(HandClock::of)).await;
        let log = Log::open(&self.journal, self.number);
        let store: Arc<dyn Store> = Arc::new(Journal::new(store, log));
        match self.flaw {
            Some(flaw) => Arc::new(Broken::new(store, flaw).await),
            None => store,
        }
    }
}

/// The store of a URL.
#[cfg_attr(
    not(feature = "postgres"),
    expect(clippy::unused_async, reason = "a server has to be waited for")
)]
pub(crate) async fn open(url: &str, clock: Option<HandClock>) -> Arc<dyn Store> {
    if let Some(path) = url.strip_prefix("sqlite://") {
        let options = SqliteOptions::new();
        let options = match clock {
            Some(clock) => options.clock(clock),
            None => options,
        };
        return Arc::new(SqliteStore::with(path, options).unwrap());
    }
    if url.starts_with("postgres://") {
        assert!(clock.is_none(), "a URL has no room for a clock");
        return Arc::new(PostgresStore::open(url).await.unwrap());
    }
    {
        let options = RedisOptions::new(url);
        let options = match clock {
            Some(clock) => options.clock(clock),
            None => options,
        };
        Arc::new(RedisStore::open(options).unwrap())
    }
    #[cfg(not(feature = "redis"))]
    panic!("no store at {url}");
}

/// A clock that is off by what stands in a file: so far ahead, and so much faster.
#[derive(Clone, Debug)]
pub(crate) struct HandClock {
    file: PathBuf,
}

/// How a clock is off.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Off {
    pub(crate) ahead_micros: i64,
    /// Gains so many parts per thousand from this moment of the host's on.
    pub(crate) gains: i64,
    pub(crate) from: u64,
}

impl HandClock {
    pub(crate) fn of(file: &std::path::Path) -> Self {
        let file = file.to_owned();
        Self { file }
    }

    /// Sets it for all processes at once.
    pub(crate) fn set(&self, ahead_micros: i64, gains: i64) {
        let from = SystemClock.now().as_micros();
        let off = Off {
            ahead_micros,
            gains,
            from,
        };
        // Written aside and moved: nobody reads half of it.
        let aside = self.file.with_extension("new");
        std::fs::write(&aside, serde_json::to_vec(&off).unwrap()).unwrap();
        std::fs::rename(aside, &self.file).unwrap();
    }
}

impl Clock for HandClock {
    fn now(&self) -> Timestamp {
        let off: Off = serde_json::from_slice(&std::fs::read(&self.file).unwrap()).unwrap();
        let host = SystemClock.now().as_micros();
        let gained = host.saturating_sub(off.from) as i64 * off.gains / 1_000;
        let ahead = off.ahead_micros + gained;
        Timestamp::from_micros(host.saturating_add_signed(ahead))
    }
}

/// The job of the campaign.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Chore {
    /// Takes a while.
    Wait { millis: u64 },
    /// Adds its token to a register, read-modify-write. The owners of the first attempts wait for a
    /// word between the read and the write, and do not listen to anything else.
    Add { key: usize, waiting: u32 },
    /// Saves its place, and waits for a word likewise.
    Page { waiting: u32 },
    /// Makes no progress at its first attempt.
    Stuck,
}

impl Job for Chore {
    const KIND: &'static str = "chore";
    const QUEUE: &'static str = Errand::QUEUE;

    fn options(&self) -> JobOptions {
        kept()
    }
}

/// A job that only the new version knows.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Novelty;

impl Job for Novelty {
    const KIND: &'static str = "novelty";
    const QUEUE: &'static str = Errand::QUEUE;

    fn options(&self) -> JobOptions {
        kept()
    }
}

/// The history of every job is the evidence.
fn kept() -> JobOptions {
    let mut options = JobOptions::default();
    options.retention = Some(Duration::from_secs(3_600));
    options.max_expiries = 1_000;
    options
}

/// The child.
pub(crate) async fn work(role: CrewRole) {
    let client = Client::new(role.open().await);
    let log = Log::open(&role.journal, role.number | RESOURCES);
    let hand = Arc::new(Hand { role, log });
    let role = hand.role.clone();
    let handler = move |chore: Chore, ctx: Context| {
        let hand = Arc::clone(&hand);
        async move { hand.handle(chore, ctx).await }
    };
    let mut worker = client
        .worker()
        .handle(handler)
        .queue(Errand::QUEUE)
        .owner(&role.owner)
        .task("campaign")
        .slots(role.slots)
        .prefetch(role.prefetch)
        .terms(LeaseTerms::of_term(role.term))
        // A zombie gets all the time it needs to do harm.
        .grace(Duration::from_secs(60))
        .drain_grace(role.drain_grace);
    if role.new {
        worker = worker.handle(|_: Novelty, _: Context| async { Ok::<(), Failure>(()) });
    }
    if let Some(limit) = role.stall_limit {
        worker = worker.stall_limit(limit).grace(Duration::from_millis(100));
    }
    say("ready");
    let asked = OnceLock::new();
    let stop = async {
        shutdown_signal().await;
        let _ = asked.set(Instant::now());
    };
    let report = worker.run_until(stop).await.unwrap();
    drop(client);
    // Nothing is left but for the process to end.
    let took = asked.get().map_or(Duration::ZERO, Instant::elapsed);
    say(&format!(
        "unsettled {} {}",
        report.unsettled,
        took.as_millis()
    ));
}

/// Calls to resources are numbered apart from those to the store.
const RESOURCES: u32 = 1 << 20;

struct Hand {
    role: CrewRole,
    log: Log,
}

impl Hand {
    async fn handle(&self, chore: Chore, ctx: Context) -> Result<(), Failure> {
        match chore {
            Chore::Wait { millis } => {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                Ok(())
            }
            Chore::Add { key, waiting } => self.add(key, waiting, &ctx).await,
            Chore::Page { waiting } => {
                if ctx.attempt() <= waiting {
                    say(&format!("open {}", ctx.job_id()));
                    GO.acquire().await?.forget();
                }
                let saved = ctx.save_checkpoint(&ctx.token()).await;
                let word = if saved.is_ok() { "stored" } else { "refused" };
                say(&format!("wrote {word}"));
                saved
            }
            Chore::Stuck if ctx.attempt() == 1 => {
                say("stuck");
                ctx.cancelled().await;
                say("stopped");
                std::future::pending().await
            }
            Chore::Stuck => Ok(()),
        }
    }

    async fn add(&self, key: usize, waiting: u32, ctx: &Context) -> Result<(), Failure> {
        let mut register = self.role.registers.connect(key).await;
        let (resource, token) = (key.to_string(), ctx.token());
        let mut names = if self.role.fenced {
            let resource = resource.clone();
            let op = Op::FenceOpen { resource, token };
            let open = register.open_and_read(ctx);
            self.log.fence(op, open, Result::is_ok).await?
        } else {
            register.read().await
        };
        if ctx.attempt() <= waiting {
            say(&format!("open {key}"));
            GO.acquire().await?.forget();
        }
        names.insert(token.get());
        let op = Op::FenceWrite {
            resource,
            token,
            value: token.to_string(),
        };
        let write = async {
            if self.role.fenced {
                return register.write_fenced(ctx, &names).await;
            }
            register.write(&names).await;
            Ok(true)
        };
        let stored = self.log.fence(op, write, |said| matches!(said, Ok(true)));
        let stored = stored.await?;
        let word = if stored { "stored" } else { "refused" };
        say(&format!("wrote {word} {key}"));
        if stored { Ok(()) } else { Err(Failure::lost()) }
    }
}
