//! `kill -9` of workers whose handlers change data beside the queue, on a Redis server.
//!
//! With effect and settlement in one script each effect is there exactly once, counted in the data.
//! Apart, even under a fence, there is a moment between them, and the control arm must find it.

use std::time::{Duration, Instant};

use leasehold::atomic_redis::RedisContext as _;
use leasehold::fence::redis::{Commands, RedisFence};
use leasehold::inspect::{self, QueueView};
use leasehold::job::{JobOptions, QueueName};
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::MACHINE;
use crate::process::{PATIENCE, Process};
use crate::roles::{Role, say};
use crate::support::redis::Standalone;
use crate::world::{TERM, figures};

const WORKERS: usize = 3;
const SLOTS: usize = 4;
/// What the control arm gets to find a job that was paid for twice.
const MOST_KILLS: usize = 200;

/// Where the children find their jobs.
#[derive(Serialize, Deserialize)]
pub(crate) struct PayerRole {
    queue: String,
}

/// Adds one to the job's count.
#[derive(Clone, Serialize, Deserialize)]
struct Pay {
    together: bool,
}

impl Job for Pay {
    const KIND: &'static str = "pay";
    const QUEUE: &'static str = "pay";

    fn options(&self) -> JobOptions {
        let mut options = JobOptions::default();
        options.max_expiries = 1_000;
        options
    }
}

/// The tag of the queue's only partition.
const TAG: &str = "leasehold:pay:0";

/// The child: a worker.
pub(crate) async fn work(role: PayerRole) {
    let client = Client::open(&role.queue).await.unwrap();
    let server = redis::Client::open(role.queue.as_str()).unwrap();
    let db = server.get_multiplexed_async_connection().await.unwrap();
    let fence = RedisFence::new(db, TAG).unwrap();
    let handler = move |pay: Pay, ctx: Context| {
        let fence = fence.clone();
        async move {
            let paid = ctx.data_key("paid")?;
            let count = Commands::new().hincr_by(paid, ctx.job_id().to_string(), 1);
            if pay.together {
                ctx.complete_with(count).await?;
            } else {
                let mut opened = ctx.fence(&fence).await?;
                opened.write_once("pay", count).await?;
            }
            say("paid");
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle(handler).slots(SLOTS);
    let worker = worker.terms(LeaseTerms::of_term(TERM));
    let report = worker.run().await.unwrap();
    assert_eq!(report.unsettled, 0);
}

struct Aftermath {
    jobs: u64,
    kills: usize,
    expired: u64,
    /// How often each job was paid for.
    paid: Vec<u64>,
}

impl Aftermath {
    fn twice(&self) -> usize {
        self.paid.iter().filter(|count| **count > 1).count()
    }
}

fn paid(server: &Standalone) -> Vec<u64> {
    let key = format!("{{{TAG}}}:data:paid");
    server.server.tell(&["HVALS", &key])
}

async fn look(client: &Client) -> QueueView {
    let queue = QueueName::new(Pay::QUEUE).unwrap();
    let view = inspect::queue(&**client.store(), &queue).await.unwrap();
    view.expect("something was enqueued")
}

/// Kills workers at random moments while they pay; stops early if that is `enough`.
async fn kill_payers(together: bool, kills: usize, enough: impl Fn(&[u64]) -> bool) -> Aftermath {
    let server = Standalone::start(&[]);
    let client = Client::open(server.url()).await.unwrap();
    let start = || {
        let queue = server.url().to_owned();
        Process::start(&Role::Payer(PayerRole { queue }))
    };
    let jobs = vec![NewJob::of(&Pay { together }).unwrap(); 400];
    client.enqueue_many(jobs.clone()).await.unwrap();
    let mut fleet: Vec<Process> = (0..WORKERS).map(|_| start()).collect();
    let mut killed = 0;
    while killed < kills && !enough(&paid(&server)) {
        let mut victim = fleet.remove(0);
        // It is at work, with the queue full: from here on any moment is as good as any other.
        client.enqueue_many(jobs.clone()).await.unwrap();
        victim.hear("paid");
        let until = Instant::now() + Duration::from_micros(fastrand::u64(..15_000));
        tokio::time::sleep_until(until.into()).await;
        victim.kill();
        killed += 1;
        fleet.push(start());
    }
    let begun = Instant::now();
    let view = loop {
        let view = look(&client).await;
        if view.ledger.completed == view.ledger.enqueued {
            break view;
        }
        assert!(begun.elapsed() < PATIENCE, "{view:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    for process in &mut fleet {
        process.signal(Signal::TERM);
        assert!(process.ends().await.success());
    }
    assert!(view.ledger.balances(), "{:?}", view.ledger);
    Aftermath {
        jobs: view.ledger.enqueued,
        kills: killed,
        expired: view.ledger.expired(),
        paid: paid(&server),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn kill9_with_effect_and_settlement_in_one_script_pays_exactly_once() {
    let _shared = MACHINE.read().await;
    let kills = if crate::in_campaign() { 200 } else { 20 };
    let seen = kill_payers(true, kills, |_| false).await;
    figures(&format!(
        "kill9_in_one_script: {} jobs, {} kills, {} expiries, {} paid, {} paid twice",
        seen.jobs,
        seen.kills,
        seen.expired,
        seen.paid.len(),
        seen.twice()
    ));
    assert_eq!(seen.kills, kills);
    assert!(seen.expired > 0, "nobody was killed at work");
    assert_eq!((seen.paid.len() as u64, seen.twice()), (seen.jobs, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn kill9_with_a_fenced_effect_and_then_a_settlement_pays_twice() {
    let _shared = MACHINE.read().await;
    let twice = |paid: &[u64]| paid.iter().any(|count| *count > 1);
    let seen = kill_payers(false, MOST_KILLS, twice).await;
    figures(&format!(
        "kill9_effect_apart: {} of {} jobs paid twice after {} kills",
        seen.twice(),
        seen.jobs,
        seen.kills
    ));
    assert_eq!(seen.paid.len() as u64, seen.jobs);
    assert!(seen.twice() > 0, "this test cannot fail");
}
