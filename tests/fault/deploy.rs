//! A rolling deploy: workers of the old version are replaced one by one, under load; and jobs of a
//! kind that most workers do not know yet.

use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::inspect::{JobView, QueueView};
use leasehold::job::JobState;
use leasehold::lease::LeaseEnd;
use leasehold::store::MemoryStore;
use leasehold::{Client, Context, Failure, Job, NewJob, Store};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::crew::{Chore, Novelty};
use crate::engine::Engine;
use crate::journal::Judgement;
use crate::stage::Stage;
use crate::support::redis::Standalone;
use crate::table::{Row, report};
use crate::world::TERM;
use crate::{MACHINE, in_campaign};

const WORKERS: usize = 4;

/// The work of both versions, a tenth of it too long for the grace of a drain.
async fn load(stage: &Stage) {
    stage.waits(45, 40).await;
    stage
        .enqueue(&[const { Chore::Wait { millis: 4_000 } }; 5])
        .await;
}

async fn roll(by: Signal, rounds: usize) -> (Stage, QueueView, Vec<JobView>, Judgement) {
    let server = tokio::task::block_in_place(|| Standalone::start(&[]));
    let mut stage = Stage::at(server.url()).await;
    let role = |stage: &mut Stage, number: usize, new| {
        let mut role = stage.role(&format!("worker-{number}"));
        role.drain_grace = Duration::from_secs(2);
        // However busy the machine is, nobody who lives loses a lease.
        role.term = if by == Signal::KILL { TERM } else { 10 * TERM };
        role.new = new;
        role
    };
    let mut fleet = Vec::new();
    for number in 0..WORKERS {
        fleet.push(Stage::hire(role(&mut stage, number, false)).await);
    }
    for number in WORKERS..WORKERS * (1 + rounds) {
        load(&stage).await;
        // Enqueued by the new version, and met by the old one, too.
        let novelties = vec![NewJob::of(&Novelty).unwrap(); 5];
        stage.world.client.enqueue_many(novelties).await.unwrap();
        let busy = |view: &QueueView| view.counts.leased >= WORKERS as u64;
        stage.world.until("everybody to be at work", busy).await;
        let mut old = fleet.remove(0);
        old.signal(by);
        fleet.push(Stage::hire(role(&mut stage, number, true)).await);
        let ended = old.ends().await;
        assert!(by == Signal::KILL || ended.success(), "{ended}");
    }
    let over = |view: &QueueView| view.counts.completed == view.ledger.enqueued;
    let view = stage.world.until("the rest", over).await;
    let jobs = stage.world.jobs(JobState::Completed).await;
    let judged = stage.finish(fleet).await;
    (stage, view, jobs, judged)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server: ./tests/run"]
async fn rolling_deploy() {
    const CASE: &str = "rolling deploy";
    let _machine = MACHINE.write().await;
    let rounds = if in_campaign() { 10 } else { 1 };
    let control = tokio::spawn(roll(Signal::KILL, 1));
    let (stage, view, jobs, judged) = roll(Signal::TERM, rounds).await;
    judged.assert_sound(CASE);
    stage.assert_none_expired(CASE, &view, 10 * TERM);
    let mut gaps = Vec::new();
    for view in &jobs {
        // What nobody knew yet was put off on purpose.
        if view.job.kind.as_str() == Novelty::KIND {
            assert_eq!(
                view.job.failures, 0,
                "a deploy is not the job's fault: {view:?}"
            );
            continue;
        }
        for pair in view.job.history.windows(2) {
            if pair[0].end == LeaseEnd::Surrendered {
                gaps.push(pair[1].granted_at.since(pair[0].ended_at));
            }
        }
    }
    let (_, killed, ..) = control.await.unwrap();
    assert!(killed.ledger.expired_deadline > 0, "this test cannot fail");
    assert!(!gaps.is_empty(), "nobody was in the midst of anything");
    let row = Row {
        takeovers: gaps,
        control: format!("killed: {} expired", killed.ledger.expired_deadline),
        ..judged.row
    };
    let bound = TERM / 4 + stage.slack();
    assert!(
        row.takeover().is_some_and(|[_, p99]| p99 < bound),
        "{:?}",
        row.takeover()
    );
    report(CASE, row);
}

/// What all workers know.
#[derive(Serialize, Deserialize)]
struct Usual;

impl Job for Usual {
    const KIND: &'static str = "usual";
}

/// What one in ten knows.
#[derive(Serialize, Deserialize)]
struct Unusual {
    /// When it was enqueued, since the beginning of the test.
    at: Duration,
}

impl Job for Unusual {
    const KIND: &'static str = "unusual";
}

/// Where a client goes that each worker opens for itself.
enum Place {
    Url(String),
    Process(Arc<dyn Store>),
}

impl Place {
    async fn client(&self) -> Client {
        match self {
            Self::Url(url) => Client::open(url).await.unwrap(),
            Self::Process(store) => Client::new(Arc::clone(store)),
        }
    }
}

/// How long each of 200 jobs of the new kind waited, beside nine old workers and one new.
async fn waits_beside_old_workers(place: Place) -> Vec<Duration> {
    const JOBS: usize = 200;
    let (begun, waits) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
    let mut fleet = Vec::new();
    for number in 0..10 {
        let worker = place.client().await.worker();
        let worker = worker.handle(|_: Usual, _: Context| ready(Ok::<(), Failure>(())));
        let worker = if number == 9 {
            let waits = Arc::clone(&waits);
            worker.handle(move |job: Unusual, _: Context| {
                let waited = begun.elapsed().saturating_sub(job.at);
                waits.lock().unwrap().push(waited);
                ready(Ok::<(), Failure>(()))
            })
        } else {
            worker
        };
        fleet.push(worker.start().unwrap());
    }
    let client = place.client().await;
    for _ in 0..JOBS {
        let at = begun.elapsed();
        client.enqueue(&Unusual { at }).await.unwrap();
        client.enqueue(&Usual).await.unwrap();
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    let view = loop {
        let view = client.queues().await.unwrap().remove(0);
        if view.ledger.completed == 2 * JOBS as u64 {
            break view;
        }
        assert!(Instant::now() < deadline, "{view:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((view.ledger.buried, view.ledger.retried), (0, 0));
    assert!(
        view.ledger.surrendered > 0,
        "no old worker had a part in it"
    );
    for worker in fleet {
        worker.drain();
        worker.join().await.unwrap();
    }
    let mut waits = waits.lock().unwrap().clone();
    waits.sort();
    assert_eq!(waits.len(), JOBS);
    waits
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs redis-server and postgresql: ./tests/run"]
async fn a_new_kind_beside_nine_old_workers() {
    let _machine = MACHINE.write().await;
    let dir = tempfile::tempdir().unwrap();
    let (redis, postgres) = (Engine::Redis.share(), Engine::Postgres.share());
    let places = [
        ("memory", Place::Process(Arc::new(MemoryStore::new()))),
        (
            "SQLite",
            Place::Url(format!("sqlite:{}", dir.path().join("jobs.db").display())),
        ),
        ("Redis", Place::Url(redis.url())),
        ("PostgreSQL", Place::Url(postgres.url())),
    ];
    // Together: none of them has much to do.
    let all = places.map(|(name, place)| (name, tokio::spawn(waits_beside_old_workers(place))));
    for (name, waits) in all {
        let waits = waits.await.unwrap();
        let mean = waits.iter().sum::<Duration>() / waits.len() as u32;
        let [p50, p99, most] = [50, 99, 100].map(|share| waits[waits.len() * share / 100 - 1]);
        let [mean_ms, p50, p99, most] = [mean, p50, p99, most].map(|it| it.as_millis());
        println!("{name}: mean {mean_ms} ms, p50 {p50}, p99 {p99}, longest {most}");
        assert!(mean <= Duration::from_secs(2), "{name}: {mean:?}");
    }
}
