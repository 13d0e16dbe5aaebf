//! What holds for each run of a job, not only for the first or the usual one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::job::{JobOptions, QueueName};
use leasehold::layer::{Layer, Next};
use leasehold::lease::Nonce;
use leasehold::observe::Event;
use leasehold::store::{ClaimQueue, ClaimRequest, MemoryStore, RequestId};
use leasehold::{
    Client, Context, Failure, Job, NewJob, QueueConfig, RetryPolicy, Store, async_trait,
};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Clone)]
struct Add {
    n: usize,
}

impl Job for Add {
    const KIND: &'static str = "add";
}

/// A job whose handler is elsewhere.
#[derive(Serialize, Deserialize, Clone)]
struct Foreign;

impl Job for Foreign {
    const KIND: &'static str = "foreign";
}

/// Longer than anything here takes, on a machine that has better things to do.
const LIMIT: Duration = Duration::from_secs(30);

fn client() -> Client {
    Client::new(Arc::new(MemoryStore::new()))
}

/// Waits until so many jobs of all queues are completed or dead.
async fn ended(client: &Client, jobs: u64) {
    let all = async {
        loop {
            let queues = client.queues().await.unwrap();
            let ledgers = queues.iter().map(|queue| &queue.ledger);
            let ended: u64 = ledgers.map(|it| it.completed + it.buried).sum();
            if ended >= jobs {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(LIMIT, all).await;
    waited.expect("the jobs have not ended");
}

/// Fails twice, and then does not.
async fn third_time(_: Add, ctx: Context) -> Result<(), Failure> {
    if ctx.job().failures < 2 {
        return Err("not yet".into());
    }
    Ok(())
}

/// Notes how often the job of each run has failed.
struct Failures(Arc<Mutex<Vec<u32>>>);

#[async_trait]
impl Layer for Failures {
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
        self.0.lock().unwrap().push(ctx.job().failures);
        next.run().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_are_around_retried_jobs_too() {
    let client = client();
    client.enqueue(Add { n: 0 }).await.unwrap();
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let retry = RetryPolicy::constant(Duration::from_millis(1));
    let worker = client.worker().handle(third_time).retry(retry);
    let worker = worker.layer(Failures(Arc::clone(&seen)));
    worker.run_until(ended(&client, 1)).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [0, 1, 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jobs_own_retry_policy_comes_before_the_workers() {
    let client = client();
    let own = RetryPolicy::constant(Duration::from_millis(1));
    let options = JobOptions::default().retry(own).max_failures(3);
    let job = NewJob::of(&Add { n: 0 }).unwrap().options(options);
    client.enqueue(job).await.unwrap();
    let slow = RetryPolicy::constant(Duration::from_secs(3_600));
    let worker = client.worker().handle(third_time);
    let worker = worker.retry(slow).max_failures(1);
    worker.run_until(ended(&client, 1)).await.unwrap();
    assert_eq!(client.ledger().await.unwrap().completed, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jobs_own_timeout_comes_before_the_workers() {
    let handler = async |_: Add, _: Context| {
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok::<(), Failure>(())
    };
    let short = Duration::from_millis(20);
    for (own, workers, completed) in [(LIMIT, short, 1), (short, LIMIT, 0)] {
        let client = client();
        let options = JobOptions::default().timeout(own).max_failures(1);
        let job = NewJob::of(&Add { n: 0 }).unwrap().options(options);
        client.enqueue(job).await.unwrap();
        let worker = client.worker().handle(handler).timeout(workers);
        worker.run_until(ended(&client, 1)).await.unwrap();
        assert_eq!(client.ledger().await.unwrap().completed, completed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_no_handler_knows_gives_its_queues_slot_back() {
    let client = client();
    let few = |job: NewJob| job.queue("few").unwrap();
    for _ in 0..3 {
        let foreign = few(NewJob::of(&Foreign).unwrap());
        client.enqueue(foreign).await.unwrap();
    }
    client
        .enqueue(few(NewJob::of(&Add { n: 0 }).unwrap()))
        .await
        .unwrap();
    let handler = async |_: Add, _: Context| Ok::<(), Failure>(());
    let worker = client.worker().handle_in("few", handler).slots(8);
    let worker = worker.queue_with(QueueConfig::new("few").slots(2));
    worker.run_until(ended(&client, 1)).await.unwrap();
}

/// Lets the leases of all these jobs expire this often.
async fn expire(store: &Arc<dyn Store>, clock: &ManualClock, jobs: usize, times: u64) {
    let session = store.open_session().await.unwrap();
    let term = Duration::from_secs(1);
    for seq in 1..=times {
        let request = RequestId {
            session,
            lane: 0,
            seq,
        };
        let claim = ClaimRequest {
            request,
            owner: "nobody".into(),
            task: "none".into(),
            nonce: Nonce::draw().unwrap(),
            queues: vec![ClaimQueue {
                queue: QueueName::default(),
                term,
                max_lifetime: term,
            }],
            max: jobs,
            admit_suspect: true,
        };
        let claimed = store.claim(claim).await.unwrap();
        assert_eq!(claimed.grants[0].leases.len(), jobs);
        clock.advance(term * 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suspects_are_worked_one_at_a_time() {
    const JOBS: usize = 6;
    let clock = ManualClock::default();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_clock(clock.clone()));
    let client = Client::new(Arc::clone(&store));
    for n in 0..JOBS {
        client.enqueue(Add { n }).await.unwrap();
    }
    expire(&store, &clock, JOBS, 2).await;
    let (now, most) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let at_once = Arc::clone(&most);
    let handler = move |_: Add, ctx: Context| {
        let (now, most) = (Arc::clone(&now), Arc::clone(&at_once));
        async move {
            assert!(ctx.job().is_suspect());
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(20)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle(handler).slots(4);
    worker.run_until(ended(&client, JOBS as u64)).await.unwrap();
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

/// Also of handlers that end at once, whose settlements gather to many in a call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_is_announced_once() {
    const JOBS: usize = 10_000;
    let client = client();
    let jobs = (0..JOBS).map(|n| NewJob::of(&Add { n }).unwrap());
    let jobs: Vec<NewJob> = jobs.collect();
    for some in jobs.chunks(1_000) {
        client.enqueue_many(some.to_vec()).await.unwrap();
    }
    let settled: Arc<Mutex<Vec<_>>> = Arc::default();
    let told = Arc::clone(&settled);
    let handler = async |_: Add, _: Context| Ok::<(), Failure>(());
    let worker = client.worker().handle(handler).slots(4);
    let worker = worker.observer(move |event: &Event<'_>| {
        if let Event::Settled { token, .. } = event {
            told.lock().unwrap().push(*token);
        }
    });
    worker.run_until(ended(&client, JOBS as u64)).await.unwrap();
    let mut settled = std::mem::take(&mut *settled.lock().unwrap());
    let announced = settled.len();
    settled.sort_unstable();
    settled.dedup();
    assert_eq!((settled.len(), announced), (JOBS, JOBS));
}
