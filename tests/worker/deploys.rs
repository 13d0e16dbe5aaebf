//! Old and new workers side by side, on virtual time: new kinds, changed payloads, and a worker
//! that knows nothing of what is in its queue.

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::clock::Clock;
use leasehold::error::Verb;
use leasehold::inspect::{Page, QueueView};
use leasehold::job::{JobState, Kind, QueueName, UpgradeError};
use leasehold::lease::DeclineCause;
use leasehold::observe::Event;
use leasehold::store::SqliteStore;
use leasehold::worker::WorkerHandle;
use leasehold::worker::executor::SameRuntime;
use leasehold::{Client, Context, Failure, Job, NewJob, Store, Worker};
use leasehold_support::virtual_time::{Virtual, memory};
use leasehold_support::{Fate, Faulty};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::Dispatch;
use tracing::subscriber::{DefaultGuard, NoSubscriber};

use crate::security::Log;

/// What old and new workers know.
#[derive(Serialize, Deserialize)]
struct Known;

impl Job for Known {
    const KIND: &'static str = "known";
}

/// What only new workers know.
#[derive(Serialize, Deserialize)]
struct Novel;

impl Job for Novel {
    const KIND: &'static str = "novel";
}

/// A field was renamed without raising the version.
mod renamed {
    use super::*;

    #[derive(Serialize, Deserialize)]
    pub(super) struct Old {
        pub(super) amount: i64,
    }

    impl Job for Old {
        const KIND: &'static str = "renamed";
    }

    #[derive(Serialize, Deserialize)]
    pub(super) struct New {
        pub(super) cents: i64,
    }

    impl Job for New {
        const KIND: &'static str = "renamed";
    }
}

/// Three versions of one payload: `amount`, then `cents`, then `cents` and a `currency`.
mod versioned {
    use super::*;

    #[derive(Serialize, Deserialize)]
    pub(super) struct First {
        pub(super) amount: i64,
    }

    impl Job for First {
        const KIND: &'static str = "versioned";
    }

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    pub(super) struct Third {
        pub(super) cents: i64,
        pub(super) currency: String,
    }

    impl Job for Third {
        const KIND: &'static str = "versioned";
        const VERSION: u32 = 3;

        fn upgrade(from: u32, mut payload: Value) -> Result<Value, UpgradeError> {
            match from {
                1 => {
                    let amount = payload["amount"].as_i64().ok_or("no amount")?;
                    payload["cents"] = json!(amount * 100);
                }
                _ => payload["currency"] = json!("EUR"),
            }
            Ok(payload)
        }
    }
}

async fn done<J>(_: J, _: Context) -> Result<(), Failure> {
    Ok(())
}

fn worker(store: &Arc<dyn Store>) -> Worker {
    Client::new(Arc::clone(store))
        .worker()
        .executor(SameRuntime)
}

fn start(worker: Worker) -> WorkerHandle {
    worker.start().unwrap()
}

/// What is warned of on this thread, for as long as the guards live.
fn warnings() -> (Log, (DefaultGuard, Dispatch)) {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    // As long as there is one subscriber only, `tracing` takes the word of the thread that first
    // comes by a record, and that may be the thread of a test without one.
    let second = Dispatch::new(NoSubscriber::default());
    let guard = tracing::subscriber::set_default(subscriber);
    tracing::callsite::rebuild_interest_cache();
    (log, (guard, second))
}

async fn drain(fleet: impl IntoIterator<Item = WorkerHandle>) {
    for worker in fleet {
        worker.drain();
        worker.join().await.unwrap();
    }
}

async fn view(client: &Client) -> QueueView {
    client.queues().await.unwrap().remove(0)
}

/// Waits until nothing is left to do.
async fn worked_off(client: &Client) -> QueueView {
    let begun = Instant::now();
    loop {
        let view = view(client).await;
        if view.counts.ready + view.counts.scheduled + view.counts.leased == 0 {
            return view;
        }
        assert!(begun.elapsed() < Duration::from_secs(3600), "{view:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// How long jobs waited from their enqueue to their handler.
#[derive(Clone)]
struct Waits {
    clock: Arc<Virtual>,
    all: Arc<Mutex<Vec<Duration>>>,
}

impl Waits {
    fn new() -> Self {
        Self {
            clock: Arc::new(Virtual::new()),
            all: Arc::default(),
        }
    }

    fn note(&self, ctx: &Context) {
        let waited = self.clock.now().since(ctx.job().enqueued_at);
        self.all.lock().unwrap().push(waited);
    }

    fn mean(&self) -> Duration {
        let all = self.all.lock().unwrap();
        all.iter().sum::<Duration>() / all.len() as u32
    }

    /// A handler that notes them.
    fn handler<J: Job>(
        &self,
    ) -> impl Fn(J, Context) -> Ready<Result<(), Failure>> + Send + Sync + 'static {
        let waits = self.clone();
        move |_: J, ctx: Context| {
            waits.note(&ctx);
            ready(Ok::<(), Failure>(()))
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_kind_beside_nine_old_workers_waits_less_than_two_seconds() {
    const JOBS: usize = 200;
    let (log, _guards) = warnings();
    let (waits, behind) = (Waits::new(), Waits::new());
    let store = memory();
    let client = Client::new(Arc::clone(&store));
    let declined = Arc::new(AtomicUsize::new(0));
    let mut fleet = Vec::new();
    for _ in 0..9 {
        let declined = Arc::clone(&declined);
        let old = worker(&store).handle(behind.handler::<Known>());
        fleet.push(start(old.observer(move |event: &Event<'_>| {
            if let Event::Declined { cause, .. } = event {
                assert_eq!(*cause, DeclineCause::UnknownKind);
                declined.fetch_add(1, Ordering::SeqCst);
            }
        })));
    }
    let new = worker(&store)
        .handle(behind.handler::<Known>())
        .handle(waits.handler::<Novel>());
    fleet.push(start(new));
    let begun = Instant::now();
    for n in 0..JOBS {
        let key = format!("key {n}");
        let head = NewJob::of(&Novel).unwrap().exclusive(&key).unwrap();
        let follower = NewJob::of(&Known).unwrap().exclusive(&key).unwrap();
        client.enqueue_many([head, follower]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let view = worked_off(&client).await;
    let declined = declined.load(Ordering::SeqCst);
    println!(
        "mean wait {:?}, behind it {:?}, {declined} declines",
        waits.mean(),
        behind.mean()
    );
    let ledger = view.ledger;
    assert_eq!(ledger.completed, 2 * JOBS as u64);
    assert_eq!((ledger.buried, ledger.retried, view.counts.dead), (0, 0, 0));
    assert_eq!(ledger.surrendered, declined as u64);
    assert!(declined > 0, "the old workers had no part in it");
    assert!(waits.mean() <= Duration::from_secs(2), "{:?}", waits.mean());
    // Its key is kept for as long as it waits itself, and no longer.
    let longer = behind.mean().saturating_sub(waits.mean());
    assert!(longer < Duration::from_millis(100), "{longer:?}");
    let minutes = 1 + begun.elapsed().as_secs() as usize / 60;
    let lines = log.text().matches("WARN").count();
    assert!((1..=9 * minutes).contains(&lines), "{lines} warnings");
    drain(fleet).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_full_of_unknown_jobs_leaves_the_store_to_the_others() {
    const JOBS: usize = 20_000;
    let (log, _guards) = warnings();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let counting = Faulty::new(memory(), move |verb| {
        counted.fetch_add(usize::from(verb == Verb::Settle), Ordering::SeqCst);
        Fate::Pass
    });
    let store: Arc<dyn Store> = Arc::new(counting);
    let client = Client::new(Arc::clone(&store));
    for _ in 0..JOBS / 10_000 {
        let jobs = (0..10_000).map(|_| NewJob::of(&Novel));
        client.enqueue_many(jobs).await.unwrap();
    }
    let waits = Waits::new();
    let old = start(worker(&store).handle(waits.handler::<Known>()));
    // Each of them once: nobody can know that it is unknown before it was claimed.
    while view(&client).await.ledger.surrendered < JOBS as u64 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (before, called) = (view(&client).await.ledger, calls.load(Ordering::SeqCst));
    let begun = Instant::now();
    for _ in 0..60 {
        client.enqueue(&Known).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let after = view(&client).await.ledger;
    let declines = (after.surrendered - before.surrendered) as f64 / seconds;
    let settles = (calls.load(Ordering::SeqCst) - called) as f64 / seconds;
    println!("{declines:.0} declines and {settles:.0} settle calls a second");
    assert!(declines <= 210.0, "{declines} declines a second");
    assert!(settles <= 211.0, "{settles} settle calls a second");
    assert_eq!(after.completed, 60);
    assert!(
        waits.mean() < Duration::from_millis(100),
        "{:?}",
        waits.mean()
    );
    let minutes = 1 + begun.elapsed().as_secs() as usize / 60;
    let text = log.text();
    let lines = text.matches("WARN").count();
    assert!(lines <= 1 + minutes, "{lines} warnings");
    assert!(text.contains("jobs=1 "), "{text}");
    drain([old]).await;
}

/// The warnings of declined jobs: the kind, and how many jobs each speaks of.
fn warned_of(log: &Log) -> Vec<(String, u64)> {
    let field = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!(" {name}=")).unwrap();
        rest.split(' ').next().unwrap().to_owned()
    };
    let text = log.text();
    let lines = text.lines().filter(|line| line.contains("declined: "));
    lines
        .map(|line| {
            assert!(line.contains("WARN"), "{line}");
            (field(line, "kind"), field(line, "jobs").parse().unwrap())
        })
        .collect()
}

/// The warnings that so many declines call for: the first of each kind, and then one a minute with
/// what has come since.
fn called_for(declines: &[(String, Instant)]) -> Vec<(String, u64)> {
    let mut told = HashMap::new();
    let mut warnings = Vec::new();
    for (kind, at) in declines {
        let (last, since) = told.entry(kind).or_insert((None::<Instant>, 0));
        *since += 1;
        if last.is_none_or(|last| *at - last >= Duration::from_secs(60)) {
            warnings.push((kind.clone(), std::mem::take(since)));
            *last = Some(*at);
        }
    }
    warnings
}

/// Which kind was declined, and when.
type Noted = Arc<Mutex<Vec<(String, Instant)>>>;

/// A worker that knows none of these kinds, with a note of each decline.
fn ignorant(store: &Arc<dyn Store>) -> (WorkerHandle, Noted) {
    let declines = Noted::default();
    let noted = Arc::clone(&declines);
    let old = worker(store).handle(done::<Known>);
    let old = old.observer(move |event: &Event<'_>| {
        if let Event::Declined { job, .. } = event {
            let decline = (job.kind.to_string(), Instant::now());
            noted.lock().unwrap().push(decline);
        }
    });
    (start(old), declines)
}

fn of_kinds<const N: usize>(kinds: [&str; N]) -> impl Iterator<Item = NewJob> {
    let jobs = kinds.map(|kind| {
        let kind = Kind::new(kind).unwrap();
        NewJob::raw(QueueName::default(), kind, "{}")
    });
    jobs.into_iter()
}

#[tokio::test(start_paused = true)]
async fn each_kind_is_warned_of_once_a_minute_with_the_number_of_its_jobs() {
    let (log, _guards) = warnings();
    let store = memory();
    let client = Client::new(Arc::clone(&store));
    let (old, declines) = ignorant(&store);
    let begun = Instant::now();
    for _ in 0..30 {
        let jobs = of_kinds(["often", "often", "often", "rarely"]);
        client.enqueue_many(jobs).await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    drain([old]).await;
    let declines = declines.lock().unwrap();
    let warned = warned_of(&log);
    assert_eq!(warned, called_for(&declines));
    let minutes = begun.elapsed().as_secs() as usize / 60;
    for kind in ["often", "rarely"] {
        let (mut lines, mut jobs) = (0, 0);
        for (_, count) in warned.iter().filter(|(of, _)| of == kind) {
            (lines, jobs) = (lines + 1, jobs + count);
        }
        assert!(
            (minutes..=minutes + 1).contains(&lines),
            "{kind}: {warned:?}"
        );
        // All but those of the last minute.
        let all = declines.iter().filter(|(of, _)| of == kind).count() as u64;
        assert!(jobs <= all && jobs * 2 > all, "{kind}: {jobs} of {all}");
    }
}

/// In real time, on a file: jobs that come back again and again within the minute are warned of
/// once for each kind.
#[tokio::test]
async fn on_a_file_each_kind_is_warned_of_once_within_the_minute() {
    let (log, _guards) = warnings();
    let dir = tempfile::tempdir().unwrap();
    let file = SqliteStore::open(dir.path().join("jobs.db")).unwrap();
    let store: Arc<dyn Store> = Arc::new(file);
    let client = Client::new(Arc::clone(&store));
    for _ in 0..10 {
        let jobs = of_kinds(["new", "newer"]);
        client.enqueue_many(jobs).await.unwrap();
    }
    let (old, declines) = ignorant(&store);
    let begun = Instant::now();
    while view(&client).await.ledger.surrendered < 60 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drain([old]).await;
    let mut warned = warned_of(&log);
    assert_eq!(warned, called_for(&declines.lock().unwrap()));
    warned.sort();
    let once = ["new", "newer"].map(|kind| (kind.to_owned(), 1));
    assert_eq!(warned, once);
}

#[tokio::test(start_paused = true)]
async fn a_changed_payload_is_left_to_new_workers() {
    use renamed::{New, Old};
    const JOBS: usize = 50;
    let store = memory();
    let client = Client::new(Arc::clone(&store));
    let waits = Waits::new();
    let mut fleet = Vec::new();
    for _ in 0..9 {
        // A failure would be the last.
        let old = worker(&store).handle(done::<Old>).max_failures(1);
        fleet.push(start(old));
    }
    fleet.push(start(worker(&store).handle(waits.handler::<New>())));
    for cents in 0..JOBS as i64 {
        client.enqueue(&New { cents }).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let view = worked_off(&client).await;
    assert_eq!(view.ledger.completed, JOBS as u64);
    assert_eq!((view.ledger.retried, view.ledger.buried), (0, 0));
    assert!(view.ledger.surrendered > 0, "the old workers could read it");
    println!("mean wait {:?}", waits.mean());
    assert!(waits.mean() <= Duration::from_secs(2), "{:?}", waits.mean());
    drain(fleet).await;
}

#[tokio::test(start_paused = true)]
async fn a_payload_that_nobody_can_read_is_dead_after_the_grace() {
    use renamed::{New, Old};
    let store = memory();
    let client = Client::new(Arc::clone(&store));
    let fleet = [(); 3].map(|()| start(worker(&store).handle(done::<Old>)));
    client.enqueue(&Old { amount: 1 }).await.unwrap();
    let id = client.enqueue(&New { cents: 1 }).await.unwrap().id();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(599) {
        let view = client.job(id).await.unwrap().unwrap();
        assert!(!view.state.is_settled(), "{:?}", begun.elapsed());
        assert_eq!(view.job.failures, 0);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    worked_off(&client).await;
    // The last try of a row comes a twentieth of the time later.
    assert!(
        begun.elapsed() < Duration::from_secs(635),
        "{:?}",
        begun.elapsed()
    );
    let view = client.job(id).await.unwrap().unwrap();
    assert_eq!((view.state, view.job.failures), (JobState::Dead, 1));
    let reason = view.job.history.last().unwrap().reason.clone().unwrap();
    let expected = "undecodable payload of 11 bytes: missing field `amount`";
    assert!(reason.starts_with(expected), "{reason}");
    // Given another life, it has the whole grace again.
    assert_eq!(view.job.declined_since, None);
    drain(fleet).await;
    // Without a grace it is dead at once.
    let id = client.enqueue(&New { cents: 1 }).await.unwrap().id();
    let strict = worker(&store).handle(done::<Old>);
    let strict = start(strict.decode_grace(Duration::ZERO));
    let view = worked_off(&client).await;
    assert_eq!(view.counts.dead, 2);
    assert_eq!(client.job(id).await.unwrap().unwrap().job.history.len(), 1);
    drain([strict]).await;
}

#[tokio::test(start_paused = true)]
async fn an_older_payload_is_upgraded_step_by_step_and_a_newer_one_declined() {
    use versioned::{First, Third};
    let store = memory();
    let client = Client::new(Arc::clone(&store));
    let third = |cents, currency: &str| Third {
        cents,
        currency: currency.to_owned(),
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let second = NewJob::of(&First { amount: 0 }).unwrap();
    let mut second = second.version(2);
    second.payload = r#"{"cents": 250}"#.into();
    client.enqueue(&First { amount: 7 }).await.unwrap();
    client.enqueue(second).await.unwrap();
    client.enqueue(&third(9, "SEK")).await.unwrap();
    let log = Arc::clone(&seen);
    let new = worker(&store).handle(move |job: Third, ctx: Context| {
        assert!(ctx.job().headers.is_empty(), "the version shows");
        log.lock().unwrap().push(job);
        ready(Ok::<(), Failure>(()))
    });
    let new = start(new);
    worked_off(&client).await;
    let expected = [third(700, "EUR"), third(250, "EUR"), third(9, "SEK")];
    assert_eq!(*seen.lock().unwrap(), expected);
    drain([new]).await;

    // An old worker reads what it can, and never gives up the rest: there is nothing wrong with it.
    let old = worker(&store).handle(done::<First>).max_failures(1);
    let old = start(old.decode_grace(Duration::ZERO));
    client.enqueue(&First { amount: 7 }).await.unwrap();
    let id = client.enqueue(&third(1, "EUR")).await.unwrap().id();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let waiting = client.job(id).await.unwrap().unwrap();
    assert_eq!(waiting.state, JobState::Scheduled);
    assert_eq!((waiting.job.version, waiting.job.failures), (3, 0));
    let why = waiting.job.history.last().unwrap().reason.clone();
    let expected = "payload version 3, this worker reads up to 1";
    assert_eq!(why.as_deref(), Some(expected));
    assert_eq!(view(&client).await.ledger.completed, 4);
    drain([old]).await;

    // What cannot be upgraded cannot be decoded.
    let queue = QueueName::default();
    let mut broken = NewJob::of(&First { amount: 0 }).unwrap();
    broken.payload = "{}".into();
    client.enqueue(broken).await.unwrap();
    let new = worker(&store).handle(done::<Third>);
    let new = start(new.decode_grace(Duration::ZERO));
    worked_off(&client).await;
    let dead = client.jobs(queue, JobState::Dead, Page::first(9)).await;
    let dead = dead.unwrap().rows.remove(0);
    let why = dead.job.history[0].reason.clone().unwrap();
    let expected = "undecodable payload of 2 bytes: version 1 does not become 2: no amount";
    assert_eq!(why, expected);
    drain([new]).await;
}
