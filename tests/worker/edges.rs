//! The worker at its edges: user code that panics where nobody expects it, parts that die, futures
//! that are dropped half way, settings and wishes that go to the limit.

use leasehold_support as support;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::{Future, pending};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::task::Waker;
use std::time::{Duration, Instant};

use leasehold::clock::ManualClock;
use leasehold::error::Verb;
use leasehold::inspect::QueueView;
use leasehold::job::{JobOptions, QueueName};
use leasehold::lease::Nonce;
use leasehold::observe::Event;
use leasehold::store::MemoryStore;
use leasehold::store::{ClaimQueue, ClaimRequest, ControlCommand, LeaseSelect, RequestId};
use leasehold::worker::executor::SameRuntime;
use leasehold::{
    Client, Context, ErrorKind, Failure, FencingToken, Job, LeaseTerms, NewJob, QueueConfig,
    RetryPolicy, Store, Worker,
};
use metrics_exporter_prometheus::PrometheusBuilder;
use serde::{Deserialize, Serialize};
use support::{Fate, Faulty, virtual_time};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize, Clone)]
struct Add {
    n: usize,
}

impl Job for Add {
    const KIND: &'static str = "add";
}

/// Longer than anything here takes, on a machine that has better things to do.
const LIMIT: Duration = Duration::from_secs(30);

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn client() -> Client {
    Client::new(memory())
}

fn adds(count: usize) -> Vec<NewJob> {
    (0..count)
        .map(|n| NewJob::of(&Add { n }).unwrap())
        .collect()
}

/// A term that no busy machine lets run out, and a renewal every moment.
fn often_renewed() -> LeaseTerms {
    LeaseTerms::of_term(Duration::from_secs(60)).renew_every(Duration::from_millis(200))
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, what)
        .await
        .expect("it never happened")
}

/// Resolves once `check` is true.
async fn true_soon(check: impl Fn() -> bool) {
    soon(async {
        while !check() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Resolves once `check` says so of the queue.
async fn until(client: &Client, check: impl Fn(&QueueView) -> bool) {
    soon(async {
        while !client.queues().await.unwrap().first().is_some_and(&check) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

async fn completed(client: &Client, jobs: u64) {
    until(client, |queue| queue.ledger.completed >= jobs).await;
}

/// Why each lease of a job ended.
async fn reasons(client: &Client, id: leasehold::JobId) -> Vec<String> {
    let job = client.job(id).await.unwrap().unwrap().job;
    let ends = job.history.iter();
    ends.map(|end| end.reason.clone().unwrap_or_default())
        .collect()
}

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "bomb");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_panics_as_it_is_dropped_costs_no_slot_and_no_lease() {
    let client = client();
    client.enqueue_many(adds(2)).await.unwrap();
    let handler = |job: Add, ctx: Context| async move {
        if job.n == 0 && ctx.attempt() == 1 {
            let _bomb = Bomb;
            pending::<()>().await;
        }
        Ok::<(), Failure>(())
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(1)
        .timeout(Duration::from_millis(20))
        .retry(RetryPolicy::constant(Duration::from_millis(1)));
    let report = worker.run_until(completed(&client, 2)).await.unwrap();
    assert_eq!((report.finished, report.unsettled), (3, 0));
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!((ledger.retried, ledger.completed), (1, 2));
}

#[derive(Debug)]
struct Speechless;

impl fmt::Display for Speechless {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("no words");
    }
}

impl std::error::Error for Speechless {}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panics_around_a_failure_are_failures() {
    let client = client();
    let keep = |job: NewJob| job.retention(Duration::from_secs(60));
    let job = keep(NewJob::of(&Add { n: 0 }).unwrap());
    let id = client.enqueue(job).await.unwrap().id();
    let handler = |_: Add, ctx: Context| async move {
        match ctx.attempt() {
            1 => std::panic::panic_any(Bomb),
            2 => Err(Failure::from(Speechless)),
            _ => Ok(()),
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(1)
        .retry(RetryPolicy::constant(Duration::from_millis(1)));
    worker.run_until(completed(&client, 1)).await.unwrap();
    let expected = ["panic: without a message", "panic: no words", ""];
    assert_eq!(reasons(&client, id).await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observer_that_panics_stops_nothing() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = seen.clone();
    let client = client().observer(|_: &Event<'_>| panic!("an observer"));
    client.enqueue(&Add { n: 0 }).await.unwrap();
    let renewed = Arc::new(AtomicUsize::new(0));
    let beats = renewed.clone();
    let handler = move |_: Add, _: Context| {
        let renewed = renewed.clone();
        async move {
            true_soon(|| renewed.load(Ordering::SeqCst) > 1).await;
            Ok::<(), Failure>(())
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(often_renewed())
        .observer(move |event: &Event<'_>| {
            counted.fetch_add(1, Ordering::SeqCst);
            beats.fetch_add(
                usize::from(matches!(event, Event::Renewed { .. })),
                Ordering::SeqCst,
            );
            panic!("another")
        });
    let report = worker.run_until(completed(&client, 1)).await.unwrap();
    assert_eq!((report.finished, report.unsettled), (1, 0));
    assert!(
        seen.load(Ordering::SeqCst) > 4,
        "the second observer was not told"
    );
}

/// A worker whose store panics in one verb, and what it ends with.
async fn with_a_store_that_panics_in(verb: Verb) -> leasehold::Error {
    let store = memory();
    let plan = move |called: Verb| {
        assert!(called != verb, "a store that panics");
        Fate::Pass
    };
    let client = Client::new(Arc::new(Faulty::new(store, plan)));
    client.enqueue(&Add { n: 0 }).await.unwrap();
    let handler = |_: Add, ctx: Context| async move {
        ctx.cancelled().await;
        Ok::<(), Failure>(())
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(LeaseTerms::of_term(Duration::from_millis(300)));
    soon(worker.run_until(pending())).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_panics_ends_the_worker_and_the_caller_hears_of_it() {
    for verb in [Verb::Claim, Verb::Renew] {
        let error = with_a_store_that_panics_in(verb).await;
        assert_eq!(error.kind(), ErrorKind::Unexpected, "{verb}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewer_without_a_connection_is_an_error_of_the_worker() {
    let mut faulty = Faulty::new(memory(), |_| Fate::Pass);
    faulty.dedicate = Fate::Refuse;
    let client = Client::new(Arc::new(faulty));
    let worker = client.worker().handle(quick);
    let error = soon(worker.run_until(pending())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

async fn quick(_: Add, _: Context) -> Result<(), Failure> {
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewer_that_waits_for_its_connection_watches_all_the_same() {
    let mut faulty = Faulty::new(memory(), |_| Fate::Pass);
    faulty.dedicate = Fate::Hang;
    let client = Client::new(Arc::new(faulty));
    client.enqueue(&Add { n: 0 }).await.unwrap();
    let (told, mut received) = mpsc::unbounded_channel();
    let handler = move |_: Add, ctx: Context| {
        let told = told.clone();
        async move {
            ctx.cancelled().await;
            told.send(ctx.is_lost()).unwrap();
            Ok::<(), Failure>(())
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(LeaseTerms::of_term(Duration::from_millis(500)));
    let stop = async { assert_eq!(soon(received.recv()).await, Some(true)) };
    worker.run_until(stop).await.unwrap();
}

#[tokio::test]
async fn durations_without_end_are_refused_by_name() {
    type Change = fn(Worker) -> Worker;
    let changes: [(&str, Change); 6] = [
        ("timeout", |worker| worker.timeout(Duration::MAX)),
        ("timeout", |worker| worker.timeout(Duration::ZERO)),
        ("stall_limit", |worker| worker.stall_limit(Duration::MAX)),
        ("stall_limit", |worker| worker.stall_limit(Duration::ZERO)),
        ("grace", |worker| worker.grace(Duration::MAX)),
        ("drain_grace", |worker| worker.drain_grace(Duration::MAX)),
    ];
    for (field, change) in changes {
        let worker = change(client().worker().handle(quick));
        let error = worker.run_until(async {}).await.unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_is_always_ready_is_dropped_at_its_timeout() {
    let client = client();
    let id = client.enqueue(&Add { n: 0 }).await.unwrap().id();
    // Never waits, but gives way as often as the runtime asks it to: as does a loop over a channel
    // that never runs dry.
    let handler = |_: Add, _: Context| async move {
        loop {
            tokio::task::consume_budget().await;
        }
        #[expect(unreachable_code, reason = "names the type")]
        Ok::<(), Failure>(())
    };
    let worker = client
        .worker()
        .handle(handler)
        .max_failures(1)
        .timeout(Duration::from_millis(50));
    let dead = until(&client, |queue| queue.counts.dead == 1);
    worker.run_until(dead).await.unwrap();
    assert_eq!(reasons(&client, id).await, ["timed out after 50ms"]);
}

/// Lets the lease of the first job of the queue expire this often.
async fn expire_first(store: &Arc<dyn Store>, clock: &ManualClock, times: u64) {
    let session = store.open_session().await.unwrap();
    let term = Duration::from_secs(1);
    for seq in 1..=times {
        let request = ClaimRequest {
            request: RequestId {
                session,
                lane: 0,
                seq,
            },
            owner: "nobody".into(),
            task: "none".into(),
            nonce: Nonce::draw().unwrap(),
            queues: vec![ClaimQueue {
                queue: QueueName::default(),
                term,
                max_lifetime: term,
            }],
            max: 1,
            admit_suspect: true,
        };
        assert_eq!(store.claim(request).await.unwrap().grants.len(), 1);
        clock.advance(term * 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_dropped_amid_its_claim_bars_no_suspect() {
    let clock = ManualClock::default();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_clock(clock.clone()));
    Client::new(store.clone())
        .enqueue(&Add { n: 0 })
        .await
        .unwrap();
    expire_first(&store, &clock, 2).await;
    let claims = AtomicUsize::new(0);
    let faulty = Faulty::new(store, move |verb| match verb {
        Verb::Claim if claims.fetch_add(1, Ordering::SeqCst) == 0 => Fate::Hang,
        _ => Fate::Pass,
    });
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    let asked = true_soon(|| calls.claim.load(Ordering::SeqCst) > 0);
    tokio::select! {
        _ = client.worker().handle(quick).run_until(pending()) => panic!("it ended"),
        () = asked => {}
    }
    let handler = |_: Add, ctx: Context| async move {
        assert!(ctx.job().is_suspect());
        Ok::<(), Failure>(())
    };
    let worker = client.worker().handle(handler);
    worker.run_until(completed(&client, 1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_dropped_lets_go_of_its_store() {
    let store = memory();
    let faulty = Faulty::new(store.clone(), |verb| match verb {
        Verb::Settle => Fate::Hang,
        _ => Fate::Pass,
    });
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = ran.clone();
    let handler = move |_: Add, _: Context| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok::<(), Failure>(()) }
    };
    let amid = async {
        client.enqueue(&Add { n: 0 }).await.unwrap();
        true_soon(|| calls.settle.load(Ordering::SeqCst) > 0).await;
        // What is handed in from here on waits behind the call that hangs.
        client.enqueue_many(adds(5)).await.unwrap();
        true_soon(|| ran.load(Ordering::SeqCst) == 6).await;
    };
    tokio::select! {
        _ = client.worker().handle(handler).run_until(pending()) => panic!("it ended"),
        () = amid => {}
    }
    drop(client);
    true_soon(|| Arc::strong_count(&store) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_handler_has_spawned_hears_that_its_worker_is_gone() {
    let client = client();
    client.enqueue(&Add { n: 0 }).await.unwrap();
    let (send, mut contexts) = mpsc::unbounded_channel();
    let handler = move |_: Add, ctx: Context| {
        send.send(ctx).unwrap();
        pending::<Result<(), Failure>>()
    };
    let ctx = tokio::select! {
        _ = client.worker().handle(handler).run_until(pending()) => panic!("it ended"),
        ctx = contexts.recv() => ctx.unwrap(),
    };
    // Nobody renews the lease any longer, and nobody will tell when it has run out.
    soon(ctx.cancelled()).await;
    assert!(ctx.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_refuses_claims_is_not_asked_in_a_hot_loop() {
    let store = memory();
    Client::new(store.clone())
        .enqueue(&Add { n: 0 })
        .await
        .unwrap();
    let faulty = Faulty::new(store, |verb| match verb {
        Verb::Claim => Fate::Refuse,
        _ => Fate::Pass,
    });
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    let start = Instant::now();
    let worker = client.worker().handle(quick);
    let a_while = true_soon(|| calls.claim.load(Ordering::SeqCst) > 2);
    worker.run_until(a_while).await.unwrap();
    let (claims, took) = (calls.claim.load(Ordering::SeqCst), start.elapsed());
    assert!(
        claims < 10 && took > Duration::from_secs(1),
        "{claims} claims in {took:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_claim_asks_for_all_slots() {
    // Slots begin on two threads while the claimer asks how many are free.
    for round in 0..200 {
        let client = client();
        client.enqueue_many(adds(64)).await.unwrap();
        let first = Arc::new(AtomicUsize::new(0));
        let seen = first.clone();
        let worker = client.worker().handle(quick).slots(64);
        let worker = worker.observer(move |event: &Event<'_>| {
            if let Event::Claimed { grant } = event {
                let leases = grant.leases.len();
                let _ = seen.compare_exchange(0, leases, Ordering::SeqCst, Ordering::SeqCst);
            }
        });
        worker.run_until(completed(&client, 64)).await.unwrap();
        assert_eq!(first.load(Ordering::SeqCst), 64, "round {round}");
    }
}

/// Two jobs of one grant: the first is given up by `give_up` in its first run, the second runs
/// until the first was completed by another run.
async fn given_up_beside_a_sibling<F>(
    lapses_to_lose: usize,
    give_up: impl Fn(Context) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Result<(), Failure>> + Send,
{
    let faulty = Faulty::new(virtual_time::memory(), |_| Fate::Pass);
    faulty
        .lapses_to_lose
        .store(lapses_to_lose, Ordering::SeqCst);
    let client = Client::new(Arc::new(faulty));
    client.enqueue_many(adds(2)).await.unwrap();
    let (first_done, give_up) = (Arc::new(AtomicUsize::new(0)), Arc::new(give_up));
    let grants = Arc::new(Mutex::new(Vec::new()));
    let seen = grants.clone();
    let handler = move |job: Add, ctx: Context| {
        let (first_done, give_up) = (first_done.clone(), give_up.clone());
        async move {
            if job.n == 0 && ctx.attempt() == 1 {
                return give_up(ctx).await;
            }
            if job.n == 0 {
                first_done.store(1, Ordering::SeqCst);
                return Ok(());
            }
            while first_done.load(Ordering::SeqCst) == 0 {
                ctx.progress(1, None, "working");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(2)
        .terms(often_renewed())
        .stall_limit(Duration::from_secs(2))
        .grace(Duration::from_millis(10))
        .executor(SameRuntime)
        .observer(move |event: &Event<'_>| {
            if let Event::Claimed { grant } = event {
                seen.lock().unwrap().push(grant.leases.len());
            }
        });
    worker.run_until(completed(&client, 2)).await.unwrap();
    assert_eq!(*grants.lock().unwrap(), [2, 1], "one grant, and one again");
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!((ledger.completed, ledger.expired()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_lapse_that_got_lost_is_repeated_though_its_handler_is_gone() {
    given_up_beside_a_sibling(3, |_| pending()).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_its_handler_gives_up_expires_though_its_siblings_live() {
    given_up_beside_a_sibling(0, |_| async { Err(Failure::lost()) }).await;
}

#[tokio::test(start_paused = true)]
async fn a_lifetime_shorter_than_the_guard_is_worked_and_watched() {
    let client = Client::new(virtual_time::memory());
    let short = JobOptions::default().max_lifetime(Duration::from_millis(500));
    let jobs = adds(2).into_iter().map(|job| job.options(short.clone()));
    client.enqueue_many(jobs).await.unwrap();
    let (told, mut received) = mpsc::unbounded_channel();
    let handler = move |job: Add, ctx: Context| {
        let told = told.clone();
        async move {
            if job.n == 1 && ctx.attempt() == 1 {
                let start = tokio::time::Instant::now();
                ctx.cancelled().await;
                told.send(start.elapsed()).unwrap();
            }
            Ok::<(), Failure>(())
        }
    };
    // The guard of this term is 700 ms, and its renewals are 100 s apart.
    let worker = client.worker().handle(handler).terms(LeaseTerms::LONG);
    let worker = worker.executor(SameRuntime);
    worker.run_until(completed(&client, 2)).await.unwrap();
    let told = received.recv().await.unwrap();
    assert!(told < Duration::from_secs(8), "told after {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mark_below_the_token_is_a_broken_fence_and_no_loop() {
    let client = client();
    let id = client.enqueue(&Add { n: 0 }).await.unwrap().id();
    let handler = |_: Add, _: Context| async { Err(Failure::fenced(FencingToken::new(1))) };
    let worker = client
        .worker()
        .handle(handler)
        .max_failures(2)
        .retry(RetryPolicy::constant(Duration::from_millis(1)));
    let dead = until(&client, |queue| queue.counts.dead == 1);
    worker.run_until(dead).await.unwrap();
    let reasons = reasons(&client, id).await;
    assert_eq!(reasons.len(), 2);
    assert!(
        reasons.iter().all(|why| why.contains("broken fence")),
        "{reasons:?}"
    );
}

#[test]
fn an_enqueue_outside_of_a_runtime_does_not_stop_those_inside() {
    let client = client();
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let job = Add { n: 0 };
        let mut enqueue = std::pin::pin!(client.enqueue(&job));
        let _ = enqueue
            .as_mut()
            .poll(&mut std::task::Context::from_waker(Waker::noop()));
    }));
    assert!(outside.is_err(), "there is no runtime to do it on");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime
        .block_on(async { soon(client.enqueue(&Add { n: 1 })).await })
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn leases_that_waited_in_vain_go_to_a_worker_with_a_free_slot() {
    const SLOW: usize = 400;
    let store = memory();
    let client = Client::new(store.clone());
    client.enqueue_many(adds(SLOW + 100)).await.unwrap();
    let slow = Arc::new(Mutex::new(None));
    let (began, others) = (slow.clone(), Client::new(store));
    let handler = move |job: Add, _: Context| {
        let began = began.clone();
        async move {
            if job.n == SLOW || job.n == SLOW + 1 {
                began
                    .lock()
                    .unwrap()
                    .get_or_insert_with(tokio::time::Instant::now);
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok::<(), Failure>(())
        }
    };
    let busy = client
        .worker()
        .handle(handler)
        .slots(2)
        .executor(SameRuntime);
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    let busy = tokio::spawn(busy.run_until(stopped.cancelled_owned()));
    true_soon(|| slow.lock().unwrap().is_some()).await;
    let start = slow.lock().unwrap().unwrap();
    let all_but_the_slow = completed(&others, (SLOW + 98) as u64);
    let worker = others.worker().handle(quick).executor(SameRuntime);
    worker.run_until(all_but_the_slow).await.unwrap();
    let took = start.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?} for a free slot");
    stop.cancel();
    busy.await.unwrap().unwrap();
}

#[test]
fn a_runtime_without_timers_is_refused_at_once() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let run = || runtime.block_on(client().worker().handle(quick).run_until(pending()));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        done.send(text.unwrap_or_default()).unwrap();
    });
    let text = ended
        .recv_timeout(LIMIT)
        .expect("it hangs instead of saying what is missing");
    assert!(text.contains("timers"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn leases_that_wait_for_a_slot_go_back_before_an_unanswered_claim_is_known() {
    #[derive(Default)]
    struct Seen {
        waiting: AtomicIsize,
        hangs: AtomicBool,
    }
    let seen = Arc::new(Seen::default());
    // The first claim that is made while several leases wait is never answered.
    let plan = seen.clone();
    let faulty = Faulty::new(memory(), move |verb| {
        let hangs =
            || plan.hangs.load(Ordering::SeqCst) || plan.waiting.load(Ordering::SeqCst) > 12;
        if verb == Verb::Claim && hangs() {
            plan.hangs.store(true, Ordering::SeqCst);
            return Fate::Hang;
        }
        Fate::Pass
    });
    let client = Client::new(Arc::new(faulty));
    client.enqueue_many(adds(10_000)).await.unwrap();
    let (observed, hung) = (seen.clone(), seen.clone());
    let handler = move |_: Add, _: Context| {
        // From then on they wait behind handlers that do not end.
        let stuck = hung.hangs.load(Ordering::SeqCst);
        async move {
            tokio::time::sleep(Duration::from_millis(if stuck { 60_000 } else { 1 })).await;
            Ok::<(), Failure>(())
        }
    };
    let stop = tokio_util::sync::CancellationToken::new();
    let worker = client
        .worker()
        .handle(handler)
        .slots(8)
        .executor(SameRuntime);
    let worker = worker.observer(move |event: &Event<'_>| {
        let more = match event {
            Event::Claimed { grant } => grant.leases.len() as isize,
            Event::Started { .. } => -1,
            _ => 0,
        };
        observed.waiting.fetch_add(more, Ordering::SeqCst);
    });
    let worker = tokio::spawn(worker.run_until(stop.clone().cancelled_owned()));
    true_soon(|| seen.hangs.load(Ordering::SeqCst)).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let leased = async || client.queues().await.unwrap()[0].counts.leased;
    let ahead = leased().await;
    assert!(ahead > 8, "no lease waits for a slot: {ahead}");
    stop.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(leased().await, 8, "of {ahead}, those of the handlers");
    worker.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn workers_of_one_client_use_the_lanes_of_those_before() {
    let faulty = Faulty::new(memory(), |_| Fate::Pass);
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    let lanes = || calls.lanes.lock().unwrap().len();
    let mut first = 0;
    for run in 1..=20 {
        client.enqueue(&Add { n: 0 }).await.unwrap();
        let worker = client.worker().handle(quick).executor(SameRuntime);
        worker.run_until(completed(&client, run)).await.unwrap();
        if run == 1 {
            first = lanes();
        }
    }
    assert!(
        first > 0 && lanes() <= 2 * first + 2,
        "{first}, then {}",
        lanes()
    );
}

// In real time, as the store's clock: in none at all the same wait would take any number of claims.
#[tokio::test]
async fn a_term_shorter_than_the_way_to_the_store_is_no_loop() {
    let faulty = Faulty::new(memory(), |verb| match verb {
        Verb::Claim => Fate::Late(Duration::from_millis(30)),
        _ => Fate::Pass,
    });
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    let short = JobOptions::default().term(Duration::from_millis(20));
    let job = NewJob::of(&Add { n: 0 }).unwrap().options(short);
    let id = client.enqueue_many(vec![job]).await.unwrap()[0].id();
    let worker = client
        .worker()
        .handle(quick)
        .max_failures(3)
        .retry(RetryPolicy::constant(Duration::from_millis(1)))
        .executor(SameRuntime);
    let dead = until(&client, |queue| queue.counts.dead == 1);
    worker.run_until(dead).await.unwrap();
    let reasons = reasons(&client, id).await;
    assert!(
        reasons.iter().any(|why| why.contains("too short")),
        "{reasons:?}"
    );
    let claims = calls.claim.load(Ordering::SeqCst);
    assert!(claims < 20, "{claims} claims");
}

/// How a lease ends in the store while its worker renews it.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    /// By its own settlement, which is answered several renewals later.
    SettledBefore,
    /// By its own settlement, while a renewal is on its way to the store.
    SettledMeanwhile,
    Revoked,
}

/// What was refused as a stale holder's: by the store's count, and of renewals by the worker's.
async fn refused(ends: Ends) -> (u64, usize) {
    let faulty = Faulty::new(virtual_time::memory(), move |verb| match (verb, ends) {
        (Verb::Settle, Ends::SettledBefore) => Fate::Late(Duration::from_millis(800)),
        // Less than a third of the term, after which the worker gives a renewal up.
        (Verb::Renew, Ends::SettledMeanwhile) => Fate::Slow(Duration::from_millis(300)),
        _ => Fate::Pass,
    });
    let calls = Arc::clone(&faulty.calls);
    let client = Client::new(Arc::new(faulty));
    client.enqueue(&Add { n: 0 }).await.unwrap();
    let renewals = Arc::clone(&calls);
    let handler = move |_: Add, ctx: Context| {
        let calls = Arc::clone(&renewals);
        async move {
            match ends {
                Ends::SettledBefore => {}
                Ends::SettledMeanwhile => {
                    while calls.renew.load(Ordering::SeqCst) == 0 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
                Ends::Revoked => ctx.cancelled().await,
            }
            Ok::<(), Failure>(())
        }
    };
    let term = if ends == Ends::SettledMeanwhile {
        1_500
    } else {
        300
    };
    let told = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&told);
    let worker = client
        .worker()
        .owner("stale")
        .handle(handler)
        .terms(LeaseTerms::of_term(Duration::from_millis(term)))
        .executor(SameRuntime)
        .observer(move |event: &Event<'_>| {
            if let Event::Fenced { verb, .. } = event {
                assert_eq!(*verb, Verb::Renew);
                seen.fetch_add(1, Ordering::SeqCst);
            }
        });
    let script = async {
        if ends == Ends::Revoked {
            until(&client, |queue| queue.counts.leased == 1).await;
            let everything = ControlCommand::Revoke(LeaseSelect::Owner("stale".into()));
            let operator = client.operator("operator").because("a test");
            operator.command(everything).await.unwrap();
            return soon(async {
                while told.load(Ordering::SeqCst) == 0 {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
            .await;
        }
        completed(&client, 1).await;
        if ends == Ends::SettledMeanwhile {
            // The renewal arrives, and is answered.
            return tokio::time::sleep(Duration::from_millis(450)).await;
        }
        let before = calls.renew.load(Ordering::SeqCst);
        soon(async {
            while calls.renew.load(Ordering::SeqCst) < before + 2 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    };
    worker.run_until(script).await.unwrap();
    let ledger = client.queues().await.unwrap()[0].ledger;
    (ledger.fenced, told.load(Ordering::SeqCst))
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_its_own_settlement_overtakes_is_no_stale_holders() {
    assert_eq!(refused(Ends::SettledBefore).await, (0, 0));
    assert_eq!(refused(Ends::SettledMeanwhile).await, (0, 0));
    // The worker that is told counts the lease once. The store counts what a stale holder tries
    // to change, and this one has tried nothing.
    assert_eq!(refused(Ends::Revoked).await, (0, 1));
}

/// The fates of settlements, in order; what is left over passes.
fn settles_as(fates: &[Fate]) -> Faulty {
    let fates = Mutex::new(VecDeque::from(fates.to_vec()));
    Faulty::new(memory(), move |verb| match verb {
        Verb::Settle => fates.lock().unwrap().pop_front().unwrap_or(Fate::Pass),
        _ => Fate::Pass,
    })
}

/// What the observers were told of refusals: as a stale holder's, and in doubt.
async fn refusals_of_one_settlement(fates: &[Fate], revoked: bool) -> (usize, usize) {
    let client = Client::new(Arc::new(settles_as(fates)));
    client.enqueue(&Add { n: 0 }).await.unwrap();
    let told = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let seen = Arc::clone(&told);
    let operator = client.clone();
    let handler = move |_: Add, _: Context| {
        let client = operator.clone();
        async move {
            if revoked {
                let operator = client.operator("operator").because("a test");
                // Nobody is granted it again.
                let pause = ControlCommand::Pause(QueueName::default());
                operator.command(pause).await.unwrap();
                let operator = client.operator("operator").because("a test");
                let everything = ControlCommand::Revoke(LeaseSelect::Owner("stale".into()));
                operator.command(everything).await.unwrap();
            }
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().owner("stale").handle(handler).observer(
        move |event: &Event<'_>| match event {
            Event::Fenced { verb, .. } => {
                assert_eq!(*verb, Verb::Settle);
                seen[0].fetch_add(1, Ordering::SeqCst);
            }
            Event::InDoubt { .. } => {
                seen[1].fetch_add(1, Ordering::SeqCst);
            }
            _ => {}
        },
    );
    let handle = worker.start().unwrap();
    true_soon(|| handle.stats().finished == 1 && handle.stats().held == 0).await;
    handle.drain();
    handle.await.unwrap();
    let told = (
        told[0].load(Ordering::SeqCst),
        told[1].load(Ordering::SeqCst),
    );
    let completed = client.queues().await.unwrap()[0].ledger.completed;
    assert_eq!(completed, u64::from(!revoked));
    told
}

#[tokio::test]
async fn a_settlement_whose_answer_is_lost_for_good_is_no_stale_holders() {
    use Fate::{Forget, LoseReply, LoseRequest};
    // It was applied, and is refused when it is sent again under another session.
    let lost = refusals_of_one_settlement(&[LoseReply, Forget], false).await;
    assert_eq!(lost, (0, 1));
    // It had not been applied: it is now.
    let lost = refusals_of_one_settlement(&[LoseRequest, Forget], false).await;
    assert_eq!(lost, (0, 0));
    // The session alone is lost, and nobody doubts that the first copy did nothing.
    let forgotten = refusals_of_one_settlement(&[Forget], false).await;
    assert_eq!(forgotten, (0, 0));
    // The control arm: a holder that has been replaced.
    assert_eq!(refusals_of_one_settlement(&[], true).await, (1, 0));
    assert_eq!(refusals_of_one_settlement(&[Forget], true).await, (1, 0));
}

/// Of two leases of one grant, the first lapses in a renewal that the second's settlement
/// overtakes: the answer is that none of the grant is left.
#[tokio::test(start_paused = true)]
async fn a_lease_that_lapses_is_no_refused_renewal() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let faulty = Faulty::new(virtual_time::memory(), |verb| match verb {
        // Less than a third of the term, after which the worker gives a renewal up.
        Verb::Renew => Fate::Slow(Duration::from_millis(400)),
        _ => Fate::Pass,
    });
    let calls = Arc::clone(&faulty.calls);
    let client = Client::new(Arc::new(faulty));
    let stalls = JobOptions::default().stall_limit(Duration::from_millis(100));
    let hangs = NewJob::of(&Add { n: 0 }).unwrap().options(stalls);
    let ends = NewJob::of(&Add { n: 1 }).unwrap();
    client.enqueue_many([hangs, ends]).await.unwrap();
    let (renewals, watch) = (Arc::clone(&calls), client.clone());
    let handler = move |job: Add, ctx: Context| {
        let (calls, client) = (Arc::clone(&renewals), watch.clone());
        async move {
            match (job.n, ctx.attempt()) {
                // Shows no progress until it is told to stop, and is deaf to that.
                (0, 1) => {
                    ctx.cancelled().await;
                    until(&client, |queue| queue.ledger.expired_stalled == 1).await;
                }
                (0, _) => {}
                _ => true_soon(|| calls.renew.load(Ordering::SeqCst) > 0).await,
            }
            Ok::<(), Failure>(())
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(2)
        .executor(SameRuntime)
        .terms(LeaseTerms::of_term(Duration::from_secs(3)));
    let handle = metrics::with_local_recorder(&recorder, || worker.start().unwrap());
    until(&client, |queue| queue.ledger.completed == 2).await;
    handle.drain();
    handle.await.unwrap();
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!((ledger.granted, ledger.expired_stalled), (3, 1));
    let scrape = recorder.handle().render();
    for refused in [
        r#"leasehold_calls_fenced_total{queue="default",verb="renew"} 0"#,
        r#"leasehold_lease_renewals_total{queue="default",result="fenced"} 0"#,
        r#"leasehold_settlements_in_doubt_total{queue="default"} 0"#,
    ] {
        assert!(scrape.lines().any(|line| line == refused), "{scrape}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_wake_its_workers_delays_a_job_by_a_second_at_most() {
    let inner = memory();
    let mut deaf = Faulty::new(Arc::clone(&inner), |_| Fate::Pass);
    deaf.deaf = true;
    let (started, mut starts) = mpsc::unbounded_channel();
    let handler = move |_: Add, _: Context| {
        started.send(tokio::time::Instant::now()).unwrap();
        async { Ok::<(), Failure>(()) }
    };
    let client = Client::new(Arc::new(deaf));
    let worker = client.worker().handle(handler).executor(SameRuntime);
    let handle = worker.start().unwrap();
    // Idle for long enough to sleep as long as it ever does.
    tokio::time::sleep(Duration::from_secs(300)).await;
    let enqueued = tokio::time::Instant::now();
    Client::new(inner).enqueue(&Add { n: 0 }).await.unwrap();
    let waited = starts.recv().await.unwrap() - enqueued;
    assert!(waited <= Duration::from_millis(1_001), "{waited:?}");
    handle.drain();
    handle.await.unwrap();
}

#[tokio::test]
async fn a_dropped_enqueue_stores_its_job_all_the_same() {
    let client = Client::new(memory());
    {
        let mut enqueue = std::pin::pin!(client.enqueue(&Add { n: 0 }));
        // Polled once, as by a caller that loses patience.
        let poll = std::future::poll_fn(|cx| Poll::Ready(enqueue.as_mut().poll(cx)));
        assert!(poll.await.is_pending());
    }
    until(&client, |queue| queue.counts.ready == 1).await;
}

/// Says to a child that it is one.
const WITHOUT_THREADS: &str = "LEASEHOLD_WITHOUT_THREADS";

/// A child that cannot have threads: their stacks are larger than any memory.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn without_threads() {
    if std::env::var_os(WITHOUT_THREADS).is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let run = client().worker().handle(quick).run_until(pending());
    let error = runtime.block_on(run).unwrap_err();
    println!("kind {}", error.kind().as_str());
}

#[test]
fn a_thread_that_does_not_start_is_an_error() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "edges::without_threads",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(WITHOUT_THREADS, "yes")
        .env("RUST_MIN_STACK", (1_u64 << 60).to_string())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains("kind unavailable"), "{child:?}");
}

fn adds_to(queue: &str, count: usize) -> Vec<NewJob> {
    let jobs = adds(count).into_iter();
    jobs.map(|job| job.queue(queue).unwrap()).collect()
}

/// How many leases of each queue wait for a slot, by the events of their worker.
#[derive(Default)]
struct Waiting(Mutex<BTreeMap<String, isize>>);

impl Waiting {
    fn see(&self, event: &Event<'_>) {
        let (queue, more) = match event {
            Event::Claimed { grant } => (&grant.queue, grant.leases.len() as isize),
            Event::Started { queue, .. } => (*queue, -1),
            _ => return,
        };
        let mut waiting = self.0.lock().unwrap();
        *waiting.entry(queue.as_str().to_owned()).or_default() += more;
    }

    fn everywhere(&self, queues: usize) -> bool {
        let waiting = self.0.lock().unwrap();
        waiting.len() == queues && waiting.values().all(|leases| *leases > 0)
    }
}

#[tokio::test]
async fn a_drain_waits_until_its_settlements_are_known() {
    let to_lose = AtomicIsize::new(3);
    let store = Faulty::new(memory(), move |verb| match verb {
        Verb::Settle if to_lose.fetch_sub(1, Ordering::SeqCst) > 0 => Fate::LoseRequest,
        _ => Fate::Pass,
    });
    let calls = Arc::clone(&store.calls);
    let client = Client::new(Arc::new(store));
    client.enqueue(Add { n: 0 }).await.unwrap();
    let handler = |_: Add, ctx: Context| async move {
        ctx.cancelled().await;
        Ok::<(), Failure>(())
    };
    let worker = client.worker().handle(handler).start().unwrap();
    true_soon(|| worker.stats().busy == 1).await;
    worker.drain();
    let report = worker.await.unwrap();
    assert_eq!((report.finished, report.unsettled), (1, 0));
    assert_eq!(client.ledger().await.unwrap().completed, 1);
    let settles = calls.settle.load(Ordering::SeqCst);
    assert_eq!(settles, 4, "three of them were lost");
}

#[tokio::test(start_paused = true)]
async fn a_drain_hands_back_what_waits_for_a_slot_in_every_queue() {
    let client = client();
    for queue in ["first", "second"] {
        client.enqueue_many(adds_to(queue, 10_000)).await.unwrap();
    }
    // Handlers are quick until leases of both queues wait behind them, and then do not end.
    let (waiting, stuck) = (
        Arc::new(Waiting::default()),
        Arc::new(AtomicBool::new(false)),
    );
    let (seen, is_stuck) = (waiting.clone(), stuck.clone());
    let handler = move |_: Add, _: Context| {
        let sticks = is_stuck.load(Ordering::SeqCst) || seen.everywhere(2);
        is_stuck.store(sticks, Ordering::SeqCst);
        async move {
            tokio::time::sleep(Duration::from_millis(if sticks { 60_000 } else { 1 })).await;
            Ok::<(), Failure>(())
        }
    };
    let stop = tokio_util::sync::CancellationToken::new();
    let seen = waiting.clone();
    let worker = client.worker().handle_in("first", handler).slots(8);
    let worker = worker.queue("first").queue("second").executor(SameRuntime);
    let worker = worker.observer(move |event: &Event<'_>| seen.see(event));
    let worker = tokio::spawn(worker.run_until(stop.clone().cancelled_owned()));
    true_soon(|| stuck.load(Ordering::SeqCst)).await;
    // Those that were quick have ended by now.
    tokio::time::sleep(Duration::from_millis(10)).await;
    let leased = async || -> u64 {
        let queues = client.queues().await.unwrap();
        queues.iter().map(|queue| queue.counts.leased).sum()
    };
    assert!(waiting.everywhere(2), "{:?}", waiting.0);
    assert!(leased().await > 9);
    stop.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(leased().await, 8, "those of the handlers");
    let report = worker.await.unwrap().unwrap();
    assert_eq!(report.unsettled, 0);
    for queue in client.queues().await.unwrap() {
        assert_eq!(
            (queue.ledger.live, queue.ledger.expired()),
            (0, 0),
            "{queue:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_lease_that_ends_is_settled_once_though_replies_are_lost() {
    const JOBS: usize = 2_000;
    let dice = Mutex::new(fastrand::Rng::with_seed(11));
    let faulty = Faulty::new(memory(), move |verb| match verb {
        Verb::Claim | Verb::Settle if dice.lock().unwrap().u8(0..4) == 0 => Fate::LoseReply,
        _ => Fate::Pass,
    });
    let client = Client::new(Arc::new(faulty));
    client.enqueue_many(adds(JOBS)).await.unwrap();
    let handler = async |job: Add, ctx: Context| match job.n % 5 {
        0 if ctx.job().failures == 0 => Err(Failure::from("once more")),
        1 => Err(Failure::bury("no use")),
        2 => {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(())
        }
        _ => Ok(()),
    };
    let (finished, settled) = (
        <Arc<Mutex<Vec<_>>>>::default(),
        <Arc<Mutex<Vec<_>>>>::default(),
    );
    let (ends, settlements) = (finished.clone(), settled.clone());
    let worker = client.worker().handle(handler).slots(8);
    let retry = RetryPolicy::constant(Duration::from_millis(1));
    let worker = worker
        .retry(retry)
        .observer(move |event: &Event<'_>| match event {
            Event::Finished { token, outcome, .. } if outcome.is_some() => {
                ends.lock().unwrap().push(*token);
            }
            Event::Settled { token, .. } => settlements.lock().unwrap().push(*token),
            _ => {}
        });
    let done = until(&client, |queue| {
        queue.ledger.completed + queue.ledger.buried == JOBS as u64
    });
    worker.run_until(done).await.unwrap();
    let (mut finished, mut settled) = (
        std::mem::take(&mut *finished.lock().unwrap()),
        std::mem::take(&mut *settled.lock().unwrap()),
    );
    finished.sort_unstable();
    settled.sort_unstable();
    assert!(finished.len() > JOBS, "some were retried");
    let (ends, settlements) = (finished.len(), settled.len());
    assert!(settled == finished, "{settlements} settled, of {ends} ends");
}

/// The handlers that run in one queue, and the most that ever did at once.
#[derive(Default)]
struct AtOnce {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl AtOnce {
    fn begin(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
    }

    fn end(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_whose_handlers_are_stuck_leaves_the_other_slots_to_the_others() {
    let client = client();
    client.enqueue_many(adds_to("stuck", 100)).await.unwrap();
    let (stuck, busy) = (Arc::new(AtOnce::default()), Arc::new(AtOnce::default()));
    let counts = (stuck.clone(), busy.clone());
    let handler = move |_: Add, ctx: Context| {
        let (stuck, busy) = counts.clone();
        async move {
            if ctx.queue().as_str() == "stuck" {
                stuck.begin();
                return pending().await;
            }
            busy.begin();
            tokio::time::sleep(Duration::from_millis(10)).await;
            busy.end();
            Ok::<(), Failure>(())
        }
    };
    let worker = client
        .worker()
        .handle_in("stuck", handler)
        .slots(8)
        .executor(SameRuntime);
    let worker = worker.drain_grace(Duration::from_millis(10));
    let worker = worker
        .queue_with(QueueConfig::new("stuck").slots(2))
        .queue("busy");
    let watch = client.clone();
    let of = async |name: &str| {
        let queues = watch.queues().await.unwrap();
        queues
            .into_iter()
            .find(|view| view.queue.as_str() == name)
            .unwrap()
    };
    let most = |at: &AtOnce| at.most.load(Ordering::SeqCst);
    let done = async {
        true_soon(|| most(&stuck) == 2).await;
        watch.enqueue_many(adds_to("busy", 600)).await.unwrap();
        let begun = tokio::time::Instant::now();
        while of("busy").await.ledger.completed < 600 {
            assert!(begun.elapsed() < Duration::from_secs(5), "it starves");
            assert!(
                of("stuck").await.counts.leased <= 2,
                "held beyond its slots"
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    worker.run_until(done).await.unwrap();
    assert_eq!((most(&stuck), most(&busy)), (2, 6));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_with_slots_of_its_own_never_uses_more_and_is_worked_to_the_end() {
    const JOBS: usize = 300;
    let client = client();
    client.enqueue_many(adds_to("few", JOBS)).await.unwrap();
    let few = Arc::new(AtOnce::default());
    let count = few.clone();
    let handler = move |job: Add, _: Context| {
        let few = count.clone();
        async move {
            few.begin();
            if job.n.is_multiple_of(2) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            few.end();
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle_in("few", handler).slots(8);
    let worker = worker.queue_with(QueueConfig::new("few").slots(2));
    worker
        .run_until(soon(completed(&client, JOBS as u64)))
        .await
        .unwrap();
    assert_eq!(few.most.load(Ordering::SeqCst), 2);
}
