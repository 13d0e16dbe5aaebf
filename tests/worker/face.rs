//! What a user holds: the handle of a worker, layers and shared state, deaths, and settings that
//! are refused before anything runs.

use leasehold_support as support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::clock::ManualClock;
use leasehold::handler::IntoHandler;
use leasehold::job::{JobOptions, JobState, QueueName};
use leasehold::layer::{Layer, Next};
use leasehold::lease::Cause;
use leasehold::observe::Event;
use leasehold::store::Enqueued;
use leasehold::store::MemoryStore;
use leasehold::worker::Death;
use leasehold::worker::executor::SameRuntime;
use leasehold::{
    Client, Context, ErrorKind, Failure, Handler, Job, LeaseTerms, NewJob, QueueConfig,
    RetryPolicy, State, Store, Worker, async_trait,
};
use serde::{Deserialize, Serialize};
use support::{Fate, Faulty, virtual_time};
use tokio::sync::Notify;

#[derive(Serialize, Deserialize, Clone)]
struct Add {
    n: usize,
}

impl Job for Add {
    const KIND: &'static str = "add";
}

#[derive(Serialize, Deserialize)]
struct Mail;

impl Job for Mail {
    const KIND: &'static str = "mail";
    const QUEUE: &'static str = "mails";
}

fn client() -> Client {
    Client::new(Arc::new(MemoryStore::new()))
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn quick(_: Add, _: Context) -> Result<(), Failure> {
    Ok(())
}

async fn post(_: Mail, _: Context) -> Result<(), Failure> {
    Ok(())
}

/// Resolves once `check` says so; panics after 20 s.
async fn until(check: impl AsyncFn() -> bool) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < Duration::from_secs(20), "never");
        tokio::time::sleep(millis(2)).await;
    }
}

/// Runs a worker until `check` says so.
async fn run(worker: Worker, check: impl AsyncFn() -> bool) {
    let worker = worker.start().unwrap();
    until(check).await;
    worker.drain();
    assert_eq!(worker.await.unwrap().unsettled, 0);
}

async fn completed(client: &Client) -> u64 {
    client.ledger().await.unwrap().completed
}

/// A handler that waits until it is let go.
fn waiting(gate: &Arc<Notify>) -> impl IntoHandler<Add, (), Handler: Handler<Add>> + use<> {
    let gate = Arc::clone(gate);
    move |_: Add, _: Context| {
        let gate = Arc::clone(&gate);
        async move {
            gate.notified().await;
            Ok::<(), Failure>(())
        }
    }
}

#[tokio::test]
async fn a_worker_in_the_background_drains_when_asked() {
    let client = client();
    client
        .enqueue_many((0..50).map(|n| Add { n }))
        .await
        .unwrap();
    let worker = client.worker().handle(quick).slots(4).start().unwrap();
    until(async || completed(&client).await == 50).await;
    until(async || worker.stats().held == 0).await;
    let stats = worker.stats();
    assert_eq!((stats.slots, stats.busy, stats.buffered), (4, 0, 0));
    assert_eq!(stats.finished, 50);
    let health = worker.health();
    assert!(
        health.claiming && health.is_alive() && health.is_ready(),
        "{health:?}"
    );
    assert!(health.store_answered.is_some());

    worker.drain();
    let another = worker.clone();
    let report = another.join().await.unwrap();
    assert_eq!((report.finished, report.unsettled), (50, 0));
    let health = worker.health();
    assert!(
        health.draining && health.ended && !health.claiming,
        "{health:?}"
    );
    assert!(!health.is_alive() && !health.is_ready());
    // Everybody who asks hears the same, also afterwards.
    assert_eq!(worker.await.unwrap(), report);
}

#[tokio::test(start_paused = true)]
async fn a_paused_worker_claims_nothing_and_its_handlers_go_on() {
    let client = client();
    client.enqueue(Add { n: 0 }).await.unwrap();
    let gate = Arc::new(Notify::new());
    let worker = client
        .worker()
        .handle(waiting(&gate))
        .slots(2)
        .executor(SameRuntime)
        .start()
        .unwrap();
    until(async || worker.stats().queues[0].running == 1).await;
    worker.pause();
    let health = worker.health();
    assert!(
        health.paused && !health.claiming && health.is_alive() && health.is_ready(),
        "{health:?}"
    );
    // A claim that was under way when the pause began has been answered by now.
    tokio::time::sleep(millis(50)).await;
    client.enqueue(Add { n: 1 }).await.unwrap();
    tokio::time::sleep(millis(300)).await;
    assert_eq!(worker.stats().held, 1, "it claimed while it was paused");
    // One that it handed back at once would not be held, but it was granted.
    let granted = client.ledger().await.unwrap().granted;
    assert_eq!(granted, 1, "it claimed and handed back while it was paused");

    gate.notify_one();
    until(async || completed(&client).await == 1).await;
    assert_eq!(client.queues().await.unwrap()[0].counts.ready, 1);
    worker.resume();
    assert!(worker.health().claiming);
    until(async || worker.stats().busy == 1).await;
    gate.notify_one();
    until(async || completed(&client).await == 2).await;
    worker.drain();
    worker.await.unwrap();
}

#[tokio::test]
async fn a_paused_worker_drains() {
    let worker = client().worker().handle(quick).start().unwrap();
    worker.pause();
    tokio::time::sleep(millis(20)).await;
    worker.drain();
    let report = tokio::time::timeout(Duration::from_secs(5), worker.join()).await;
    assert_eq!(report.unwrap().unwrap().unsettled, 0);
}

#[tokio::test]
async fn a_worker_whose_store_is_silent_is_not_ready_but_alive() {
    let store = Faulty::new(Arc::new(MemoryStore::new()), |_| Fate::LoseRequest);
    let client = Client::new(Arc::new(store) as Arc<dyn Store>);
    let terms = LeaseTerms::of_term(millis(200));
    let worker = client.worker().handle(quick).terms(terms).start().unwrap();
    until(async || !worker.health().is_ready()).await;
    let health = worker.health();
    assert_eq!(health.store_answered, None);
    assert!(!health.draining && !health.ended, "{health:?}");
    let why = health.why_not_ready().unwrap();
    assert!(why.starts_with("the store has not answered for"), "{why}");
    // An outage is no reason to restart the process, however long it takes.
    assert!(health.is_alive(), "{health:?}");
}

#[tokio::test(start_paused = true)]
async fn a_worker_is_alive_through_any_outage_and_a_part_that_is_stuck_is_named() {
    let store = Faulty::new(Arc::new(MemoryStore::new()), |_| Fate::Hang);
    let client = Client::new(Arc::new(store) as Arc<dyn Store>);
    let worker = client.worker().handle(quick).executor(SameRuntime);
    let worker = worker.start().unwrap();
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    let health = worker.health();
    assert!(health.is_alive() && !health.is_ready(), "{health:?}");

    // As it is when a handler blocks the thread of a part.
    let minute = Duration::from_secs(61);
    let mut stuck = health;
    stuck.claimer_ran = minute;
    let why = stuck.why_not_alive().unwrap();
    assert!(why.starts_with("the claimer has not run for 61 s"), "{why}");
    assert!(!stuck.is_ready());

    // A worker that drains has no claimer, and lives; without its renewer it does not.
    worker.drain();
    tokio::time::sleep(millis(500)).await;
    let mut health = worker.health();
    health.claimer_ran = minute;
    assert!(health.is_alive() && !health.ended, "{health:?}");
    health.renewer_ran = minute;
    assert!(!health.is_alive());
    let health = worker.health();
    assert_eq!(
        health.why_not_ready().as_deref(),
        Some("the worker is draining")
    );
    worker.join().await.unwrap();
    let why = worker.health().why_not_alive();
    assert_eq!(why.as_deref(), Some("the worker has ended"));
}

#[tokio::test]
async fn one_enqueue_takes_a_job_in_every_form() {
    let client = client();
    let add = Add { n: 1 };
    client.enqueue(&add).await.unwrap();
    client.enqueue(add.clone()).await.unwrap();
    let described = NewJob::of(&add).unwrap().unique("one").unwrap();
    let first = client.enqueue(described.clone()).await.unwrap();
    let again = client.enqueue(described).await.unwrap();
    assert_eq!(again, Enqueued::Duplicate(first.id()));
    // A description that failed is an error of the enqueue.
    let error = client.enqueue(NewJob::of(&add).and_then(|job| job.unique("")));
    assert_eq!(error.await.unwrap_err().field(), Some("key"));
    let many = [Add { n: 2 }, Add { n: 3 }];
    assert_eq!(client.enqueue_many(&many).await.unwrap().len(), 2);
    assert_eq!(client.enqueue_many(many).await.unwrap().len(), 2);
    let none: [Add; 0] = [];
    assert_eq!(client.enqueue_many(none).await.unwrap(), []);
    assert_eq!(client.queues().await.unwrap()[0].counts.ready, 7);

    let handler = |_: Mail, ctx: Context| async move {
        ctx.enqueue(&Add { n: 4 }).await?;
        ctx.enqueue(NewJob::of(&Add { n: 5 })?.delay(millis(1)))
            .await?;
        ctx.enqueue_many([Add { n: 6 }]).await?;
        Ok::<(), Failure>(())
    };
    client.enqueue(Mail).await.unwrap();
    let done = async || completed(&client).await == 1;
    run(client.worker().handle(handler), done).await;
    let queues = client.queues().await.unwrap();
    let adds = queues
        .iter()
        .find(|queue| queue.queue == QueueName::default());
    assert_eq!(adds.unwrap().ledger.enqueued, 10);
}

struct Journal(&'static str, Arc<Mutex<Vec<String>>>);

#[async_trait]
impl Layer for Journal {
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
        let note = |what: &str| {
            let line = format!("{} {what} {}", self.0, ctx.job().kind);
            self.1.lock().unwrap().push(line);
        };
        note("before");
        let result = next.run().await;
        note(if result.is_ok() { "after" } else { "failed" });
        result
    }
}

/// Turns away what it does not like, without the handler.
struct NoThree;

#[async_trait]
impl Layer for NoThree {
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
        let job: Add = serde_json::from_slice(&ctx.job().payload)?;
        if job.n == 3 {
            return Err(Failure::bury("three is not allowed"));
        }
        next.run().await
    }
}

#[tokio::test]
async fn layers_wrap_each_run_from_the_first_inwards() {
    let client = client();
    let journal: Arc<Mutex<Vec<String>>> = Arc::default();
    let ran = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ran);
    let handler = move |_: Add, _: Context| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok::<(), Failure>(()) }
    };
    client.enqueue(Add { n: 1 }).await.unwrap();
    let worker = client
        .worker()
        .handle(handler)
        .slots(1)
        .layer(Journal("outer", Arc::clone(&journal)))
        .layer(Arc::new(Journal("inner", Arc::clone(&journal))))
        .layer(NoThree)
        .start()
        .unwrap();
    until(async || completed(&client).await == 1).await;
    let order = std::mem::take(&mut *journal.lock().unwrap());
    let expected = ["outer before", "inner before", "inner after", "outer after"];
    assert_eq!(order, expected.map(|line| format!("{line} add")));

    let refused = client.enqueue(Add { n: 3 }).await.unwrap().id();
    until(async || client.ledger().await.unwrap().buried == 1).await;
    assert_eq!(ran.load(Ordering::SeqCst), 1, "the handler ran");
    let job = client.job(refused).await.unwrap().unwrap();
    assert_eq!(job.state, JobState::Dead);
    assert!(
        journal
            .lock()
            .unwrap()
            .contains(&"outer failed add".to_owned())
    );
    worker.drain();
    worker.await.unwrap();
}

#[derive(Debug)]
struct Motto(&'static str);

#[tokio::test]
async fn state_is_found_by_its_type_and_missed_by_name() {
    let client = client();
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let told = Arc::clone(&seen);
    let handler = move |_: Add, ctx: Context| {
        let told = Arc::clone(&told);
        async move {
            let word = ctx.state::<Motto>()?.0.to_owned();
            told.lock().unwrap().push(word);
            ctx.state::<String>().map(|_| ())
        }
    };
    let options = JobOptions::default().max_failures(1);
    let job = NewJob::of(&Add { n: 0 }).unwrap().options(options);
    let id = client.enqueue(job).await.unwrap().id();
    let dead = async || client.ledger().await.unwrap().buried == 1;
    let worker = client.worker().handle(handler);
    let worker = worker.state(Motto("old")).state(Motto("hello"));
    run(worker, dead).await;
    assert_eq!(*seen.lock().unwrap(), ["hello"]);
    let job = client.job(id).await.unwrap().unwrap();
    let why = job.job.history.last().unwrap().reason.clone().unwrap();
    assert!(
        why.contains("no state of type alloc::string::String"),
        "{why}"
    );
}

#[derive(Clone)]
struct Word(&'static str);

type Said = Arc<Mutex<Vec<String>>>;

async fn say(
    Add { n }: Add,
    ctx: Context,
    State(word): State<Word>,
    State(said): State<Said>,
    State(mark): State<char>,
    State(times): State<usize>,
) -> Result<(), Failure> {
    assert_eq!(ctx.state::<char>()?, &mark);
    let word = word.0.repeat(times);
    said.lock().unwrap().push(format!("{word}{mark}{n}"));
    Ok(())
}

#[tokio::test]
async fn functions_take_what_the_worker_was_given() {
    let client = client();
    client.enqueue(Add { n: 7 }).await.unwrap();
    let said = Said::default();
    let worker = client.worker().state(Word("ha")).handle(say);
    let worker = worker.state(Arc::clone(&said)).state('!').state(2_usize);
    run(worker, async || completed(&client).await == 1).await;
    assert_eq!(*said.lock().unwrap(), ["haha!7"]);
}

#[tokio::test]
async fn what_a_function_takes_and_nobody_gave_is_named_before_the_start() {
    async fn one(_: Add, _: Context, _: State<Word>) -> Result<(), Failure> {
        Ok(())
    }
    let name = std::any::type_name::<Word>();
    let without = [
        client().worker().handle(one),
        client().worker().handle(one).state('!'),
        client().worker().handle(one).state(Arc::new(Word("ha"))),
    ];
    for worker in without {
        let (field, text) = refused(worker);
        assert_eq!(field, "state");
        assert!(text.contains(name) && text.contains("\"add\""), "{text}");
    }
    // The last of four, as well as the only one.
    let worker = client().worker().handle(say).state(Word("ha")).state('!');
    let (_, text) = refused(worker.state(Said::default()));
    assert!(text.contains("usize"), "{text}");
    let worker = client().worker().handle(one).state(Word("ha"));
    worker.run_until(async {}).await.unwrap();
}

struct Shared(AtomicUsize);

#[async_trait]
impl Handler<Add> for Shared {
    async fn handle(&self, _: Add, _: Context) -> Result<(), Failure> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[tokio::test]
async fn a_handler_can_be_shared() {
    let client = client();
    client.enqueue(Add { n: 0 }).await.unwrap();
    let shared = Arc::new(Shared(AtomicUsize::new(0)));
    let done = async || completed(&client).await == 1;
    let worker = client.worker().handle(Arc::clone(&shared));
    run(worker, done).await;
    assert_eq!(shared.0.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_last_result_counts() {
    let client = client();
    let job = NewJob::of(&Add { n: 0 }).unwrap();
    let job = job.retention(Duration::from_secs(60));
    let id = client.enqueue(job).await.unwrap().id();
    let handler = |_: Add, ctx: Context| async move {
        ctx.set_result(&"first")?;
        ctx.set_result(&"last")
    };
    let done = async || completed(&client).await == 1;
    run(client.worker().handle(handler), done).await;
    let result: Option<String> = client.result(id).await.unwrap();
    assert_eq!(result.as_deref(), Some("last"));
    let error = client.result::<u32>(id).await.unwrap_err();
    assert_eq!(error.field(), Some("result"));
}

/// Collects what an `on_dead` hook is told.
fn mourner(deaths: &Arc<Mutex<Vec<Death>>>) -> impl Fn(Death) -> std::future::Ready<()> + use<> {
    let deaths = Arc::clone(deaths);
    move |death| {
        deaths.lock().unwrap().push(death);
        std::future::ready(())
    }
}

#[tokio::test]
async fn a_hook_hears_of_the_buried() {
    let client = client();
    let id = client.enqueue(Add { n: 0 }).await.unwrap().id();
    let deaths: Arc<Mutex<Vec<Death>>> = Arc::default();
    let events = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&events);
    let handler = |_: Add, _: Context| async { Err::<(), _>(Failure::bury("no such account")) };
    let dead = async || client.ledger().await.unwrap().buried == 1;
    let worker = client.worker().handle(handler).on_dead(mourner(&deaths));
    let worker = worker.on_dead(|_| async { panic!("a hook that panics ends nothing") });
    let worker = worker.observer(move |event: &Event<'_>| {
        seen.fetch_add(
            usize::from(matches!(event, Event::Dead { .. })),
            Ordering::SeqCst,
        );
    });
    // The drain waits for the hooks.
    run(worker, dead).await;
    let deaths = deaths.lock().unwrap();
    assert_eq!(deaths.len(), 1);
    assert_eq!((deaths[0].job, &*deaths[0].reason), (id, "no such account"));
    assert_eq!(deaths[0].expired, None);
    assert_eq!(events.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_hook_hears_of_those_whose_leases_expired_too_often() {
    let clock = ManualClock::default();
    let client = Client::new(Arc::new(MemoryStore::with_clock(clock.clone())));
    let options = JobOptions::default().max_expiries(3);
    let job = NewJob::of(&Add { n: 0 }).unwrap().options(options);
    let id = client.enqueue(job).await.unwrap().id();
    let deaths: Arc<Mutex<Vec<Death>>> = Arc::default();
    // Workers that vanish: nobody settles or hands back what they held.
    for round in 1..=3 {
        let gate = Arc::new(Notify::new());
        let worker = client
            .worker()
            .handle(waiting(&gate))
            .on_dead(mourner(&deaths));
        let gone = tokio::spawn(worker.run_until(std::future::pending()));
        until(async || client.ledger().await.unwrap().granted == round).await;
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        clock.advance(2 * LeaseTerms::default().term);
    }
    let worker = client.worker().handle(quick).on_dead(mourner(&deaths));
    let dead = async || client.queues().await.unwrap()[0].counts.dead == 1;
    run(worker, dead).await;
    let deaths = deaths.lock().unwrap();
    assert_eq!(deaths.len(), 1, "{deaths:?}");
    assert_eq!(deaths[0].job, id);
    assert!(deaths[0].expired.is_some());
    assert!(
        deaths[0].reason.starts_with("3 leases expired"),
        "{}",
        deaths[0].reason
    );
}

#[tokio::test(start_paused = true)]
async fn a_hook_hears_of_those_that_stalled_too_often() {
    let client = Client::new(virtual_time::memory());
    let options = JobOptions::default().max_expiries(3);
    let job = NewJob::of(&Add { n: 0 }).unwrap().options(options);
    client.enqueue(job).await.unwrap();
    let deaths: Arc<Mutex<Vec<Death>>> = Arc::default();
    let gate = Arc::new(Notify::new());
    let worker = client
        .worker()
        .handle(waiting(&gate))
        .on_dead(mourner(&deaths));
    let worker = worker.terms(LeaseTerms::of_term(millis(300)));
    let worker = worker.stall_limit(millis(100)).grace(Duration::ZERO);
    let worker = worker.executor(SameRuntime);
    let dead = async || client.queues().await.unwrap()[0].counts.dead == 1;
    run(worker, dead).await;
    let deaths = deaths.lock().unwrap();
    assert_eq!(deaths.len(), 1, "{deaths:?}");
    assert_eq!(deaths[0].expired.map(Cause::as_str), Some("stalled"));
}

#[tokio::test]
async fn an_operator_acts_under_a_name_and_for_a_reason() {
    let client = client();
    let id = client.enqueue(Add { n: 0 }).await.unwrap().id();
    let ann = client.operator("ann").because("the bank is closed");
    ann.pause("default").await.unwrap();
    assert!(client.queues().await.unwrap()[0].paused);
    ann.resume("default").await.unwrap();
    assert!(!client.queues().await.unwrap()[0].paused);
    assert_eq!(ann.reschedule(id, millis(5)).await.unwrap().done, 1);
    assert_eq!(ann.cancel(id).await.unwrap().done, 1);
    assert_eq!(ann.purge(id).await.unwrap().done, 1);
    ann.configure("default", true).await.unwrap();
    assert!(client.queues().await.unwrap()[0].relaxed);
    let page = leasehold::inspect::Page::first(10);
    let audit = client.audit(page).await.unwrap().rows;
    assert_eq!(audit.len(), 6);
    let by_ann = |row: &leasehold::inspect::AuditView| {
        row.actor == "ann" && row.reason == "the bank is closed"
    };
    assert!(audit.iter().all(by_ann), "{audit:?}");
    let error = client.operator("ann").revoke(id).await.unwrap_err();
    assert_eq!(error.field(), Some("reason"));
    let error = ann.pause("no name").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

fn refused(worker: Worker) -> (&'static str, String) {
    let error = worker.start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    (error.field().unwrap(), error.to_string())
}

#[tokio::test]
async fn a_handler_whose_queue_is_not_claimed_is_refused() {
    let worker = || client().worker().handle(quick).handle(post);
    let (field, text) = refused(worker().queue("default"));
    assert_eq!(field, "handlers");
    for word in ["run: ", "\"mail\"", "\"mails\"", "handle_in"] {
        assert!(text.contains(word), "{text}");
    }
    for fine in [
        worker(),
        worker().queue("default").queue("mails"),
        client().worker().handle_in("elsewhere", quick),
        client()
            .worker()
            .handle_in("a", quick)
            .queue("a")
            .queue("b"),
    ] {
        fine.run_until(async {}).await.unwrap();
    }
}

#[tokio::test]
async fn settings_that_make_no_sense_are_refused_by_name() {
    let with = |change: fn(Worker) -> Worker| change(client().worker().handle(quick));
    let queue = |change: fn(QueueConfig) -> QueueConfig| {
        let queue = change(QueueConfig::new("default"));
        client().worker().handle(quick).slots(4).queue_with(queue)
    };
    let many = (0..1_001).map(|n| format!("q{n}"));
    let many = many.fold(with(|worker| worker), Worker::queue);
    let brief = LeaseTerms::of_term(millis(9));
    let endless = LeaseTerms::of_term(Duration::from_secs(11 * 365 * 24 * 3600));
    let mut late = LeaseTerms::SHORT;
    late.renew_every = late.term;
    for (expected, worker) in [
        ("queues", many),
        (
            "queue",
            with(|worker| worker.queue("default").queue("default")),
        ),
        ("slots", queue(|queue| queue.slots(0))),
        ("slots", queue(|queue| queue.slots(5))),
        ("weight", queue(|queue| queue.weight(f64::NAN))),
        ("max_failures", queue(|queue| queue.max_failures(0))),
        ("max_failures", with(|worker| worker.max_failures(0))),
        (
            "stall_limit",
            queue(|queue| queue.stall_limit(Duration::ZERO)),
        ),
        (
            "base",
            with(|worker| worker.retry(RetryPolicy::constant(Duration::MAX))),
        ),
        (
            "cap",
            with(|worker| worker.retry(RetryPolicy::exponential(millis(2), millis(1)))),
        ),
        (
            "decode_grace",
            queue(|queue| queue.decode_grace(Duration::MAX)),
        ),
        (
            "term",
            queue(|queue| queue.terms(LeaseTerms::of_term(millis(9)))),
        ),
        ("term", client().worker().handle(quick).terms(brief)),
        ("term", client().worker().handle(quick).terms(endless)),
        ("renew_every", client().worker().handle(quick).terms(late)),
    ] {
        let (field, text) = refused(worker);
        assert_eq!(field, expected, "{text}");
        assert!(text.contains("found") && text.contains("allowed"), "{text}");
    }
    queue(|queue| queue.slots(4))
        .run_until(async {})
        .await
        .unwrap();
}

#[tokio::test]
async fn jobs_that_make_no_sense_are_refused_by_name() {
    let client = client();
    let job = || NewJob::of(&Add { n: 0 }).unwrap();
    assert_eq!(job().unique("").unwrap_err().field(), Some("key"));
    assert_eq!(job().exclusive("").unwrap_err().field(), Some("key"));
    let options = JobOptions::default;
    let mut shrinking = RetryPolicy::default();
    shrinking.factor = 0.5;
    for (field, options) in [
        ("term", options().term(Duration::ZERO)),
        ("term", options().term(millis(9))),
        ("term", options().term(Duration::MAX)),
        ("timeout", options().timeout(Duration::ZERO)),
        ("stall_limit", options().stall_limit(Duration::MAX)),
        ("max_failures", options().max_failures(0)),
        ("max_expiries", options().max_expiries(2)),
        ("factor", options().retry(shrinking)),
    ] {
        let error = client.enqueue(job().options(options)).await.unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
    }
    assert!(client.queues().await.unwrap().is_empty());
}
