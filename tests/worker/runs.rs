//! The worker runtime over the memory store: on virtual time where a bound on time is judged, and
//! otherwise on real time.

use leasehold_support as support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::error::Verb;
use leasehold::inspect::{LeaseFilter, Page};
use leasehold::job::{JobOptions, Kind, QueueName};
use leasehold::lease::DeclineCause;
use leasehold::observe::Event;
use leasehold::store::MemoryStore;
use leasehold::store::{ControlCommand, Select};
use leasehold::worker::executor::SameRuntime;
use leasehold::{
    Client, Context, ErrorKind, Failure, FencingToken, Job, JobId, LeaseTerms, NewJob, QueueConfig,
    RetryPolicy, Store,
};
use serde::{Deserialize, Serialize};
use support::machine::judged;
use support::{Fate, Faulty, virtual_time};
use tokio::sync::Notify;

#[derive(Serialize, Deserialize, Clone)]
struct Add {
    n: usize,
}

impl Job for Add {
    const KIND: &'static str = "add";
}

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

fn term(millis: u64) -> LeaseTerms {
    LeaseTerms::of_term(Duration::from_millis(millis))
}

/// Resolves once `check` says so; panics after 20 s.
async fn until(client: &Client, check: impl Fn(&leasehold::inspect::QueueView) -> bool) {
    let start = Instant::now();
    loop {
        if client.queues().await.unwrap().first().is_some_and(&check) {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{:?}",
            client.queues().await
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What a round that is judged by the clock comes to.
fn kept(bound: bool, otherwise: impl std::fmt::Display) -> Result<(), String> {
    if bound {
        Ok(())
    } else {
        Err(otherwise.to_string())
    }
}

async fn settled(client: &Client, jobs: u64) {
    until(client, |queue| {
        queue.ledger.completed + queue.ledger.buried + queue.ledger.cancelled >= jobs
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_job_is_handled_once() {
    let client = client();
    client.enqueue_many(adds(5_000)).await.unwrap();
    let sum = Arc::new(AtomicUsize::new(0));
    let runs = Arc::new(AtomicUsize::new(0));
    let (s, r) = (sum.clone(), runs.clone());
    let handler = move |job: Add, _: Context| {
        let (sum, runs) = (s.clone(), r.clone());
        async move {
            sum.fetch_add(job.n, Ordering::SeqCst);
            if job.n.is_multiple_of(3) {
                tokio::task::yield_now().await;
            }
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle(handler).slots(8);
    let report = worker.run_until(settled(&client, 5_000)).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 5_000);
    assert_eq!(sum.load(Ordering::SeqCst), 5_000 * 4_999 / 2);
    assert_eq!((report.finished, report.unsettled), (5_000, 0));
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!(
        (ledger.granted, ledger.completed, ledger.live),
        (5_000, 5_000, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_retried_with_their_reasons_and_then_buried() {
    let client = client();
    let id = client.enqueue(&Add { n: 1 }).await.unwrap().id();
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let handler = move |_: Add, _: Context| {
        let run = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            match run {
                0 => Err(anyhow::anyhow!("disk on fire").context("cannot add")),
                1 => panic!("out of luck"),
                _ => {
                    tokio::time::sleep(Duration::from_secs(60)).await;
                    Ok(())
                }
            }
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .max_failures(3)
        .timeout(Duration::from_millis(30))
        .retry(RetryPolicy::constant(Duration::from_millis(2)));
    worker
        .run_until(until(&client, |queue| queue.counts.dead == 1))
        .await
        .unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    let job = client.job(id).await.unwrap().unwrap().job;
    assert_eq!((job.failures, job.expiries), (3, 0));
    let reasons: Vec<_> = job
        .history
        .iter()
        .map(|end| end.reason.clone().unwrap())
        .collect();
    assert_eq!(
        reasons,
        [
            "cannot add: disk on fire",
            "panic: out of luck",
            "timed out after 30ms"
        ]
    );
    let queue = &client.queues().await.unwrap()[0];
    assert_eq!((queue.ledger.retried, queue.ledger.buried), (2, 1));
    assert!(queue.ledger.balances());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_can_retry_in_snooze_and_bury() {
    let client = client();
    client.enqueue_many(adds(3)).await.unwrap();
    let handler = |job: Add, ctx: Context| async move {
        match (job.n, ctx.job().failures, ctx.job().history.len()) {
            (0, 0, _) => Err(Failure::retry_in(Duration::from_millis(3), "again")),
            (1, 0, 0) => Err(Failure::snooze(Duration::from_millis(3))),
            (2, ..) => Err(Failure::bury("hopeless")),
            _ => Ok(()),
        }
    };
    let worker = client.worker().handle(handler);
    worker.run_until(settled(&client, 3)).await.unwrap();
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!((ledger.completed, ledger.retried), (2, 1));
    assert_eq!((ledger.surrendered, ledger.buried), (1, 1));
}

/// Runs one job whose worker cannot renew, and tells how long after the first send of the claim the
/// handler was told to stop, and whether its worker settled it.
async fn cut_off(overstate: u32, lease: Duration) -> (Duration, u64) {
    let store = virtual_time::memory();
    let mut faulty = Faulty::new(store.clone(), |verb| match verb {
        Verb::Renew => Fate::Hang,
        _ => Fate::Pass,
    });
    faulty.overstate = overstate;
    let client = Client::new(Arc::new(faulty));
    client.enqueue(&Add { n: 1 }).await.unwrap();
    let told = Arc::new(Mutex::new(None));
    let (seen, gone) = (told.clone(), Arc::new(Notify::new()));
    let notify = gone.clone();
    let start = tokio::time::Instant::now();
    let handler = move |_: Add, ctx: Context| {
        let (seen, notify) = (seen.clone(), notify.clone());
        async move {
            ctx.cancelled().await;
            assert!(ctx.is_lost());
            *seen.lock().unwrap() = Some(start.elapsed());
            notify.notify_one();
            // Ignores the stop signal: it is dropped after the grace.
            std::future::pending::<()>().await;
            Ok::<(), Failure>(())
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(LeaseTerms::of_term(lease))
        .grace(Duration::from_millis(10))
        .drain_grace(Duration::from_millis(50))
        .slots(1)
        .executor(SameRuntime);
    let run = worker.run_until(async move { gone.notified().await });
    let run = tokio::time::timeout(Duration::from_secs(20), run).await;
    run.expect("the handler was never told to stop").unwrap();
    let told = told.lock().unwrap().expect("the handler was told to stop");
    let views = Client::new(store).queues().await.unwrap();
    (told, views[0].ledger.released())
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_cannot_renew_is_stopped_before_its_deadline() {
    let lease = Duration::from_millis(600);
    let (told, released) = cut_off(1, lease).await;
    assert_eq!(released, 0, "a lost lease was settled");
    assert!(
        told > lease / 2,
        "told after {told:?}, long before it had to be"
    );
    assert!(told < lease, "told after {told:?}");
    // Control arm: a holder that overestimates what it was granted is told too late.
    let (told, _) = cut_off(3, lease).await;
    assert!(told > lease, "told after {told:?}");
}

/// Handlers that block every thread of their runtime for three terms, beside another worker that
/// would take over whatever expires. Returns runs of the job and the ledger's expiries.
fn blocked(on_own_thread: bool) -> (usize, u64) {
    let store = memory();
    let runs = Arc::new(AtomicUsize::new(0));
    let lease = Duration::from_millis(400);
    let other = {
        let (store, runs) = (store.clone(), runs.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = Client::new(store);
                let handler = move |_: Add, _: Context| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    async { Ok::<(), Failure>(()) }
                };
                // The first worker gets the jobs.
                until(&client, |queue| queue.ledger.granted >= 2).await;
                let stop = async {
                    while !stopped.load(Ordering::SeqCst) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                };
                let worker = client
                    .worker()
                    .handle(handler)
                    .terms(LeaseTerms::of_term(lease));
                worker.run_until(stop).await.unwrap();
            });
        });
        (thread, stop)
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let client = Client::new(store.clone());
        client.enqueue_many(adds(2)).await.unwrap();
        let counted = runs.clone();
        let handler = move |_: Add, _: Context| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move {
                std::thread::sleep(lease * 3);
                Ok::<(), Failure>(())
            }
        };
        let worker = client
            .worker()
            .handle(handler)
            .slots(2)
            .terms(LeaseTerms::of_term(lease));
        let worker = if on_own_thread {
            worker
        } else {
            worker.executor(SameRuntime)
        };
        let watch = client.clone();
        let work = tokio::spawn(worker.run_until(async move { settled(&watch, 2).await }));
        work.await.unwrap().unwrap();
    });
    let (thread, stop) = other;
    stop.store(true, Ordering::SeqCst);
    thread.join().unwrap();
    let ledger = runtime.block_on(async { Client::new(store).queues().await.unwrap()[0].ledger });
    (runs.load(Ordering::SeqCst), ledger.expired())
}

#[tokio::test]
async fn handlers_that_block_every_thread_cost_nobody_a_lease() {
    let apart = |own| async move {
        let blocked = std::thread::spawn(move || blocked(own));
        blocked.join().unwrap()
    };
    judged(|| async {
        let (runs, expired) = apart(true).await;
        let found = format!("{runs} runs, {expired} expired");
        kept((runs, expired) == (2, 0), found)
    })
    .await;
    // Control arm: a renewer on the blocked runtime loses them.
    let (runs, expired) = apart(false).await;
    assert!(runs > 2 && expired > 0, "{runs} runs, {expired} expired");
}

#[tokio::test(start_paused = true)]
async fn a_stalled_handler_lapses_within_its_limit_and_one_interval() {
    let client = Client::new(virtual_time::memory());
    client.enqueue_many(adds(2)).await.unwrap();
    let terms = term(900);
    let limit = Duration::from_millis(500);
    let lost = Arc::new(Mutex::new(None));
    let seen = lost.clone();
    let handler = move |job: Add, ctx: Context| {
        let seen = seen.clone();
        async move {
            if job.n == 0 {
                // The control: as long a run, but it shows progress.
                for done in 0..10 {
                    tokio::time::sleep(Duration::from_millis(120)).await;
                    ctx.progress(done, 10, "working");
                }
            } else if ctx.attempt() == 1 {
                let start = tokio::time::Instant::now();
                ctx.cancelled().await;
                *seen.lock().unwrap() = Some((start.elapsed(), ctx.is_lost()));
            }
            Ok::<(), Failure>(())
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(terms)
        .stall_limit(limit)
        .slots(4)
        .executor(SameRuntime);
    worker.run_until(settled(&client, 2)).await.unwrap();
    let (after, is_lost) = lost.lock().unwrap().expect("it was never told to stop");
    assert!(is_lost);
    let latest = limit + terms.renew_every + Duration::from_millis(100);
    assert!(after >= limit, "lapsed after {after:?}");
    assert!(
        after <= latest,
        "lapsed after {after:?}, at the latest {latest:?}"
    );
    let ledger = client.queues().await.unwrap()[0].ledger;
    let found = (ledger.completed, ledger.expired_stalled, ledger.expired());
    assert_eq!(found, (2, 1, 1), "{ledger:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_reaches_the_store_whatever_becomes_of_the_first_renewals() {
    let renewals = AtomicUsize::new(0);
    let faulty = Faulty::new(memory(), move |verb| {
        if verb != Verb::Renew {
            return Fate::Pass;
        }
        match renewals.fetch_add(1, Ordering::SeqCst) {
            0 => Fate::LoseRequest,
            1 => Fate::LoseReply,
            _ => Fate::Pass,
        }
    });
    let client = Client::new(Arc::new(faulty));
    client.enqueue(&Add { n: 1 }).await.unwrap();
    let handler = move |_: Add, ctx: Context| async move {
        // Between two renewals, and never again.
        tokio::time::sleep(Duration::from_millis(10)).await;
        ctx.progress(4, 10, "frames");
        ctx.cancelled().await;
        Ok::<(), Failure>(())
    };
    let watched = client.clone();
    let seen = async move {
        loop {
            let leases = watched.leases(LeaseFilter::default(), Page::first(1)).await;
            if let Some(progress) = leases
                .unwrap()
                .rows
                .first()
                .and_then(|l| l.progress.clone())
            {
                break assert_eq!((progress.done, progress.total), (4, Some(10)));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let seen = async move {
        let limit = Duration::from_secs(30);
        tokio::time::timeout(limit, seen).await.expect("progress");
    };
    let worker = client.worker().handle(handler).terms(term(3_000));
    worker.run_until(seen).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_with_its_maximum_lifetime_though_its_holder_renews() {
    let client = Client::new(virtual_time::memory());
    client.enqueue(&Add { n: 1 }).await.unwrap();
    let mut terms = term(300);
    terms.max_lifetime = Duration::from_millis(900);
    let handler = move |_: Add, ctx: Context| async move {
        if ctx.attempt() == 1 {
            loop {
                ctx.progress(1, None, "busy for ever");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok::<(), Failure>(())
    };
    let worker = client
        .worker()
        .handle(handler)
        .terms(terms)
        .grace(Duration::from_millis(10))
        .executor(SameRuntime);
    let start = tokio::time::Instant::now();
    worker.run_until(settled(&client, 1)).await.unwrap();
    let after = start.elapsed();
    assert!(after >= Duration::from_millis(900), "after {after:?}");
    let ledger = client.queues().await.unwrap()[0].ledger;
    // A renewal that came too late would have ended it before.
    assert_eq!(
        (ledger.completed, ledger.expired_lifetime),
        (1, 1),
        "{ledger:?}"
    );
}

/// Renewal calls so far, and the leases in them.
async fn renewals(calls: &support::Calls) -> (usize, usize) {
    let read = || {
        (
            calls.renew.load(Ordering::SeqCst),
            calls.renewed_leases.load(Ordering::SeqCst),
        )
    };
    // The two are counted one after the other: a pair that stays for a moment belongs together.
    loop {
        let before = read();
        tokio::time::sleep(Duration::from_millis(5)).await;
        if before == read() {
            return before;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_leases_are_renewed_in_one_call_per_tick() {
    let faulty = Faulty::new(virtual_time::memory(), |_| Fate::Pass);
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    client.enqueue_many(adds(10_000)).await.unwrap();
    let release = Arc::new(Notify::new());
    let running = Arc::new(AtomicUsize::new(0));
    let (gate, counted) = (release.clone(), running.clone());
    let handler = move |_: Add, _: Context| {
        let gate = gate.clone();
        let counted = counted.clone();
        async move {
            let open = gate.notified();
            counted.fetch_add(1, Ordering::SeqCst);
            open.await;
            Ok::<(), Failure>(())
        }
    };
    let watch = client.clone();
    let lease = term(3_000);
    let script = async move {
        while running.load(Ordering::SeqCst) < 10_000 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // A grant that was claimed a moment before a tick joins the others at the next one.
        let start = Instant::now();
        let mut before = renewals(&calls).await;
        loop {
            let now = renewals(&calls).await;
            if (now.0 - before.0, now.1 - before.1) == (1, 10_000) {
                before = now;
                break;
            }
            before = now;
            assert!(start.elapsed() < Duration::from_secs(20), "{now:?}");
        }
        tokio::time::sleep(lease.term * 2).await;
        let now = renewals(&calls).await;
        // From the release on, a renewal may meet the settlement of its lease.
        let ledger = watch.queues().await.unwrap()[0].ledger;
        release.notify_waiters();
        settled(&watch, 10_000).await;
        (now.0 - before.0, now.1 - before.1, ledger.fenced)
    };
    let figures = Arc::new(Mutex::new((0, 0, 0)));
    let out = figures.clone();
    let worker = client.worker().handle(handler).slots(10_000).terms(lease);
    let worker = worker.executor(SameRuntime);
    worker
        .run_until(async move { *out.lock().unwrap() = script.await })
        .await
        .unwrap();
    let (ticks, leases, fenced) = *figures.lock().unwrap();
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!(
        (ledger.completed, ledger.expired(), fenced),
        (10_000, 0, 0),
        "{ledger:?}"
    );
    assert!((5..=8).contains(&ticks), "{ticks} calls in two terms");
    assert_eq!(leases, ticks * 10_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_are_lost_lose_and_double_nothing() {
    // Every mutating verb loses a request or a reply now and then, after its effect or before it.
    let dice = Mutex::new(fastrand::Rng::with_seed(7));
    let faulty = Faulty::new(memory(), move |verb| match verb {
        Verb::Inspect | Verb::Wait | Verb::Renew => Fate::Pass,
        _ => match dice.lock().unwrap().u8(0..10) {
            0 => Fate::LoseRequest,
            1 | 2 => Fate::LoseReply,
            _ => Fate::Pass,
        },
    });
    let client = Client::new(Arc::new(faulty));
    let mut ids = HashSet::new();
    for _ in 0..40 {
        for enqueued in client.enqueue_many(adds(25)).await.unwrap() {
            ids.insert(enqueued.id());
        }
    }
    assert_eq!(ids.len(), 1_000);
    let runs: Arc<Mutex<Vec<JobId>>> = Arc::default();
    let ran = runs.clone();
    let handler = move |_: Add, ctx: Context| {
        let ran = ran.clone();
        async move {
            ctx.save_checkpoint(&"half way").await?;
            ran.lock().unwrap().push(ctx.job_id());
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle(handler).slots(8);
    worker.run_until(settled(&client, 1_000)).await.unwrap();
    let runs = runs.lock().unwrap().clone();
    assert_eq!(runs.len(), 1_000, "a job ran twice");
    assert_eq!(runs.iter().copied().collect::<HashSet<_>>(), ids);
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!(ledger.enqueued, 1_000);
    // What waits too long for a slot, behind a call that is being repeated, goes back unused.
    assert_eq!(ledger.granted, 1_000 + ledger.surrendered);
    assert_eq!(
        (
            ledger.completed,
            ledger.expired(),
            ledger.fenced,
            ledger.live
        ),
        (1_000, 0, 0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn a_drain_settles_what_ends_and_surrenders_the_rest() {
    let client = Client::new(virtual_time::memory());
    client.enqueue_many(adds(40)).await.unwrap();
    let started = Arc::new(Notify::new());
    let notify = started.clone();
    let begun = Arc::new(AtomicUsize::new(0));
    let handler = move |job: Add, ctx: Context| {
        let (notify, begun) = (notify.clone(), begun.clone());
        async move {
            // All four run when the drain begins.
            if begun.fetch_add(1, Ordering::SeqCst) == 3 {
                notify.notify_one();
            }
            match job.n {
                0 => {
                    // Heeds the stop signal and saves its work.
                    ctx.cancelled().await;
                    assert!(ctx.is_draining() && !ctx.is_lost());
                    Ok(())
                }
                1 => {
                    ctx.cancelled().await;
                    Err(Failure::from("stopped half way"))
                }
                2 => std::future::pending().await,
                _ => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    Ok(())
                }
            }
        }
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(4)
        .grace(Duration::from_millis(20))
        .drain_grace(Duration::from_millis(400))
        .executor(SameRuntime);
    let start = tokio::time::Instant::now();
    let report = worker
        .run_until(async move { started.notified().await })
        .await
        .unwrap();
    let took = start.elapsed();
    assert_eq!(report.unsettled, 0);
    let queue = client.queues().await.unwrap()[0].clone();
    assert_eq!(
        (
            queue.counts.leased,
            queue.ledger.live,
            queue.ledger.expired()
        ),
        (0, 0, 0)
    );
    assert_eq!(queue.ledger.retried, 0, "a drain counted as a failure");
    assert!(queue.ledger.surrendered >= 2, "{:?}", queue.ledger);
    assert_eq!(
        (queue.ledger.completed, queue.counts.ready),
        (2, 38),
        "not the one that heeded and the one that ended: {queue:?}"
    );
    assert!(took < Duration::from_secs(2), "it took {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_job_stops_and_its_neighbours_do_not() {
    let client = client();
    let ids = client.enqueue_many(adds(3)).await.unwrap();
    let operator = client.clone();
    let handler = move |job: Add, ctx: Context| {
        let operator = operator.clone();
        async move {
            if job.n == 1 {
                let cancel = ControlCommand::Cancel(Select::Job(ctx.job_id()));
                operator
                    .operator("tester")
                    .because("changed my mind")
                    .command(cancel)
                    .await?;
                ctx.cancelled().await;
                assert!(!ctx.is_lost());
                return Err(Failure::from("stopped"));
            }
            Ok(())
        }
    };
    let worker = client.worker().handle(handler).terms(term(600));
    worker.run_until(settled(&client, 3)).await.unwrap();
    let view = client.job(ids[1].id()).await.unwrap().unwrap();
    assert_eq!(view.state, leasehold::job::JobState::Cancelled);
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!(
        (ledger.completed, ledger.cancelled, ledger.retried),
        (2, 1, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_kinds_and_bad_payloads_are_put_off_and_not_charged() {
    let client = client();
    let queue = QueueName::default();
    let stranger = NewJob::raw(queue.clone(), Kind::new("stranger").unwrap(), "{}");
    let garbage = NewJob::raw(queue, Kind::new("add").unwrap(), "not json");
    let ids = client.enqueue_many(vec![stranger, garbage]).await.unwrap();
    let causes = Arc::new(Mutex::new(HashSet::new()));
    let seen = causes.clone();
    let worker = client
        .worker()
        .handle(|_: Add, _: Context| async { Ok::<(), Failure>(()) })
        .max_failures(1)
        .observer(move |event: &Event<'_>| {
            if let Event::Declined { job, cause, .. } = event {
                seen.lock().unwrap().insert((job.id, *cause));
            }
        });
    // More than once each.
    let done = until(&client, |queue| queue.ledger.surrendered >= 4);
    worker.run_until(done).await.unwrap();
    let declined = [
        (
            DeclineCause::UnknownKind,
            "no handler for kind \"stranger\"",
        ),
        (
            DeclineCause::UndecodablePayload,
            "undecodable payload of 8 bytes: ",
        ),
    ];
    assert_eq!(causes.lock().unwrap().len(), 2);
    for (id, (cause, why)) in ids.iter().map(|enqueued| enqueued.id()).zip(declined) {
        assert!(causes.lock().unwrap().contains(&(id, cause)));
        let view = client.job(id).await.unwrap().unwrap();
        assert_eq!(view.job.attempt(), 1, "a decline was charged");
        let since = view.job.declined_since.unwrap();
        assert!(since <= view.job.history[0].ended_at);
        let reason = view.job.history[0].reason.clone().unwrap();
        assert!(reason.starts_with(why), "{reason}");
    }
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_by_name() {
    let client = client();
    let ok = |_: Add, _: Context| async { Ok::<(), Failure>(()) };
    let never = || std::future::ready(());
    let refused = |result: leasehold::Result<leasehold::worker::DrainReport>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        error.field().unwrap()
    };
    let worker = || client.worker();
    assert_eq!(
        refused(worker().handle(ok).slots(0).run_until(never()).await),
        "slots"
    );
    for (field, worker) in [
        ("slots", worker().slots(usize::MAX)),
        ("prefetch", worker().prefetch(usize::MAX)),
        ("owner", worker().owner("")),
        ("task", worker().task("t".repeat(257))),
        ("owner", worker().owner("a\0b")),
    ] {
        let error = worker.handle(ok).run_until(never()).await.unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("run: {field}: found ")), "{text}");
    }
    assert_eq!(refused(worker().run_until(never()).await), "handlers");
    assert_eq!(
        refused(worker().handle(ok).handle(ok).run_until(never()).await),
        "handlers"
    );
    assert_eq!(
        refused(worker().handle(ok).queue("a b").run_until(never()).await),
        "queue"
    );
    let light = QueueConfig::new("a").weight(0.0);
    assert_eq!(
        refused(
            worker()
                .handle(ok)
                .queue_with(light)
                .run_until(never())
                .await
        ),
        "weight"
    );
    let mut slow = LeaseTerms::SHORT;
    slow.renew_every = Duration::from_secs(9);
    assert_eq!(
        refused(worker().handle(ok).terms(slow).run_until(never()).await),
        "renew_every"
    );

    let big = NewJob::raw(
        QueueName::default(),
        Kind::new("add").unwrap(),
        vec![0; 256 * 1024 + 1],
    );
    let error = client.enqueue(big).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.field()),
        (ErrorKind::InvalidInput, Some("payload"))
    );
    let message = error.to_string();
    assert!(
        message.contains("262145") && message.contains("262144"),
        "{message}"
    );
    assert!(
        client.queues().await.unwrap().is_empty(),
        "something was stored"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_share_by_weight_and_none_starves() {
    let client = client();
    for queue in ["heavy", "light"] {
        let jobs = adds(4_000).into_iter().map(|job| job.queue(queue).unwrap());
        client.enqueue_many(jobs).await.unwrap();
    }
    let order: Arc<Mutex<Vec<bool>>> = Arc::default();
    let seen = order.clone();
    let handler = move |_: Add, ctx: Context| {
        seen.lock().unwrap().push(ctx.queue().as_str() == "heavy");
        async { Ok::<(), Failure>(()) }
    };
    let watch = client.clone();
    let done = async move {
        while watch
            .queues()
            .await
            .unwrap()
            .iter()
            .map(|q| q.ledger.completed)
            .sum::<u64>()
            < 8_000
        {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let worker = client
        .worker()
        .handle_in("heavy", handler)
        .queue_with(QueueConfig::new("heavy").weight(3.0))
        .queue_with(QueueConfig::new("light").weight(1.0))
        .slots(4)
        .prefetch(0);
    worker.run_until(done).await.unwrap();
    let order = order.lock().unwrap();
    let heavy = order[..4_000].iter().filter(|heavy| **heavy).count();
    assert!(
        (2_600..3_400).contains(&heavy),
        "{heavy} of the first 4,000 were heavy"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_pools_share_a_process() {
    let client = client();
    client.enqueue_many(adds(500)).await.unwrap();
    let owners: Arc<Mutex<HashSet<String>>> = Arc::default();
    let mut pools = Vec::new();
    for _ in 0..3 {
        let owners = owners.clone();
        let handler = move |_: Add, ctx: Context| {
            let owners = owners.clone();
            async move {
                owners.lock().unwrap().insert(ctx.owner().to_owned());
                // The first of them leaves something for the last.
                while owners.lock().unwrap().len() < 3 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Ok::<(), Failure>(())
            }
        };
        let watch = client.clone();
        let worker = client.worker().handle(handler).slots(4);
        pools.push(tokio::spawn(
            worker.run_until(async move { settled(&watch, 500).await }),
        ));
    }
    for pool in pools {
        assert_eq!(pool.await.unwrap().unwrap().unsettled, 0);
    }
    assert_eq!(owners.lock().unwrap().len(), 3);
    assert!(client.queues().await.unwrap()[0].ledger.balances());
}

/// On one thread, where all callers have asked before the first call goes out.
#[tokio::test]
async fn enqueues_that_come_together_share_a_call() {
    let faulty = Faulty::new(memory(), |_| Fate::Pass);
    let calls = faulty.calls.clone();
    let client = Client::new(Arc::new(faulty));
    let mut callers = tokio::task::JoinSet::new();
    for n in 0..1_000 {
        let client = client.clone();
        callers.spawn(async move { client.enqueue(&Add { n }).await.unwrap().id() });
    }
    let ids: HashSet<JobId> = callers.join_all().await.into_iter().collect();
    assert_eq!(ids.len(), 1_000);
    let calls = calls.enqueue.load(Ordering::SeqCst);
    assert_eq!(calls, 1, "for 1,000 jobs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_goes_on_from_the_checkpoint_under_a_larger_token() {
    let client = client();
    client.enqueue(&Add { n: 10 }).await.unwrap();
    let steps: Arc<Mutex<Vec<(usize, FencingToken)>>> = Arc::default();
    let seen = steps.clone();
    let handler = move |job: Add, ctx: Context| {
        let seen = seen.clone();
        async move {
            let from: usize = ctx.last_checkpoint()?.unwrap_or(0);
            if let Some(saved) = ctx.saved_checkpoint() {
                assert!(saved.token < ctx.token());
            }
            for step in from..job.n {
                seen.lock().unwrap().push((step, ctx.token()));
                ctx.save_checkpoint(&(step + 1)).await?;
                if step == 4 && ctx.attempt() == 1 {
                    return Err(Failure::retry_in(Duration::ZERO, "half way"));
                }
            }
            ctx.set_result(&"done")?;
            Ok(())
        }
    };
    let worker = client.worker().handle(handler);
    worker.run_until(settled(&client, 1)).await.unwrap();
    let steps = steps.lock().unwrap();
    assert_eq!(
        steps.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        (0..10).collect::<Vec<_>>()
    );
    assert!(steps[5].1 > steps[4].1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_is_kept_as_long_as_its_job() {
    let client = client();
    let job = NewJob::of(&Add { n: 2 })
        .unwrap()
        .retention(Duration::from_secs(60));
    let id = client.enqueue(job).await.unwrap().id();
    let handler = |job: Add, ctx: Context| async move {
        ctx.set_result(&(job.n * 21))?;
        Ok::<(), Failure>(())
    };
    client
        .worker()
        .handle(handler)
        .run_until(settled(&client, 1))
        .await
        .unwrap();
    let view = client.job(id).await.unwrap().unwrap();
    assert_eq!(view.state, leasehold::job::JobState::Completed);
    assert_eq!(view.job.result.as_deref(), Some(&b"42"[..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_outlives_its_session() {
    // The store forgets the session in the middle of the work, as after ten idle minutes.
    let clock = leasehold::clock::ManualClock::default();
    let client = Client::new(Arc::new(MemoryStore::with_clock(clock.clone())));
    client.enqueue_many(adds(4)).await.unwrap();
    let runs = Arc::new(AtomicU64::new(0));
    let counted = runs.clone();
    let handler = move |_: Add, _: Context| {
        let (counted, clock) = (counted.clone(), clock.clone());
        async move {
            counted.fetch_add(1, Ordering::SeqCst);
            clock.advance(leasehold::store::SESSION_IDLE + Duration::from_secs(1));
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok::<(), Failure>(())
        }
    };
    let mut options = JobOptions::default();
    options.term = Some(Duration::from_secs(24 * 3600));
    let late = NewJob::of(&Add { n: 9 }).unwrap().options(options);
    client.enqueue(late).await.unwrap();
    let worker = client
        .worker()
        .handle(handler)
        .slots(1)
        .terms(LeaseTerms::of_term(Duration::from_secs(24 * 3600)));
    worker.run_until(settled(&client, 5)).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 5);
    let ledger = client.queues().await.unwrap()[0].ledger;
    assert_eq!((ledger.completed, ledger.expired()), (5, 0));
}

#[tokio::test(start_paused = true)]
async fn a_job_with_a_short_term_of_its_own_is_renewed_in_a_slow_pool() {
    let client = Client::new(virtual_time::memory());
    let mut options = JobOptions::default();
    options.term = Some(Duration::from_millis(150));
    client
        .enqueue(NewJob::of(&Add { n: 1 }).unwrap().options(options))
        .await
        .unwrap();
    let handler = |_: Add, ctx: Context| async move {
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert!(ctx.time_left() < Duration::from_millis(150));
        Ok::<(), Failure>(())
    };
    let worker = client.worker().handle(handler).terms(LeaseTerms::MEDIUM);
    let worker = worker.executor(SameRuntime);
    worker.run_until(settled(&client, 1)).await.unwrap();
    let ledger = client.queues().await.unwrap()[0].ledger;
    let found = (ledger.completed, ledger.granted, ledger.expired());
    assert_eq!(found, (1, 1, 0), "{ledger:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ran_out_before_its_claim_was_answered_goes_back_unused() {
    let since = Arc::new(Mutex::new(None::<tokio::time::Instant>));
    let first = since.clone();
    // The first claim arrives after more than a term.
    let faulty = Faulty::new(virtual_time::memory(), move |verb| {
        let mut first = first.lock().unwrap();
        let cut_off = |first: tokio::time::Instant| first.elapsed() < Duration::from_millis(400);
        match verb {
            Verb::Claim if cut_off(*first.get_or_insert_with(tokio::time::Instant::now)) => {
                Fate::LoseRequest
            }
            _ => Fate::Pass,
        }
    });
    let client = Client::new(Arc::new(faulty));
    client.enqueue_many(adds(3)).await.unwrap();
    let handler = |_: Add, ctx: Context| async move {
        assert!(!ctx.time_left().is_zero(), "started too late");
        Ok::<(), Failure>(())
    };
    let worker = client.worker().handle(handler).terms(term(300));
    let worker = worker.executor(SameRuntime);
    worker.run_until(settled(&client, 3)).await.unwrap();
    assert!(since.lock().unwrap().unwrap().elapsed() > Duration::from_millis(400));
    let ledger = client.queues().await.unwrap()[0].ledger;
    let found = (ledger.completed, ledger.surrendered, ledger.expired());
    assert_eq!(found, (3, 3, 0), "{ledger:?}");
}

/// Ten pools at steady load lose the store for a while. The busiest second, in calls: before the
/// outage, and from its start until the load is steady again.
async fn busiest_seconds(stubborn: bool) -> (usize, usize) {
    let start = tokio::time::Instant::now();
    let outage = Duration::from_secs(10)..Duration::from_secs(16);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let (seen, down) = (calls.clone(), outage.clone());
    let mut faulty = Faulty::new(memory(), move |_| {
        let at = start.elapsed();
        seen.lock().unwrap().push(at);
        if down.contains(&at) {
            Fate::LoseRequest
        } else {
            Fate::Pass
        }
    });
    faulty.stubborn = stubborn;
    let store: Arc<dyn Store> = Arc::new(faulty);
    Client::new(store.clone())
        .enqueue_many(adds(9_000))
        .await
        .unwrap();
    let mut pools = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let handler = |_: Add, _: Context| async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok::<(), Failure>(())
        };
        let client = Client::new(store.clone());
        let worker = client.worker().handle(handler).slots(2);
        let worker = worker.terms(LeaseTerms::MEDIUM).executor(SameRuntime);
        let end = tokio::time::sleep_until(start + Duration::from_secs(26));
        pools.spawn(worker.run_until(end));
    }
    while let Some(ended) = pools.join_next().await {
        ended.unwrap().unwrap();
    }
    let calls = calls.lock().unwrap();
    let busiest = |from: Duration, to: Duration| {
        let second = Duration::from_secs(1);
        let within: Vec<_> = calls.iter().filter(|at| (from..to).contains(*at)).collect();
        let starts = within.iter().enumerate();
        let counts = starts.map(|(i, at)| within[i..].partition_point(|b| **b < **at + second));
        counts.max().unwrap_or_default()
    };
    let steady = busiest(Duration::from_secs(2), outage.start);
    (steady, busiest(outage.start, Duration::from_secs(25)))
}

#[tokio::test(start_paused = true)]
async fn an_outage_brings_no_more_than_one_and_a_half_times_the_steady_load() {
    let (steady, after) = busiest_seconds(false).await;
    assert!(steady > 100, "{steady} calls a second are no load");
    assert!(2 * after <= 3 * steady, "{after} after {steady} a second");
    // Control arm: whatever repeats at once brings many times that.
    let (steady, after) = busiest_seconds(true).await;
    assert!(2 * after > 3 * steady, "{after} after {steady} a second");
}
