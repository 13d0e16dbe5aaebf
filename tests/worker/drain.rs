//! Draining while the store does not answer, on virtual time: when the worker ends, what it hands
//! back, and what it leaves.

use leasehold_support as support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::error::Verb;
use leasehold::inspect::Ledger;
use leasehold::store::MemoryStore;
use leasehold::worker::executor::SameRuntime;
use leasehold::worker::{DrainReport, WorkerHandle};
use leasehold::{Client, Context, Failure, Job, Store};
use serde::{Deserialize, Serialize};
use support::{Fate, Faulty};
use tokio::time::{Instant, sleep};

/// A handler that does not listen, for so long.
#[derive(Serialize, Deserialize, Clone)]
struct Deaf {
    seconds: u64,
}

impl Job for Deaf {
    const KIND: &'static str = "deaf";
}

/// What virtual time does not account for: the looks of the drain at its settlements.
const SLACK: Duration = Duration::from_millis(100);

const DRAIN_GRACE: Duration = Duration::from_secs(25);

/// A worker on a store that can be broken.
struct Scene {
    /// Past the fault.
    client: Client,
    broken: Arc<AtomicBool>,
    worker: WorkerHandle,
    /// When each handler was dropped or had ended.
    ended: Arc<Mutex<Vec<Instant>>>,
}

struct Ended(Arc<Mutex<Vec<Instant>>>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(Instant::now());
    }
}

impl Scene {
    /// A worker with settings by default. Once the store is broken, this befalls the calls.
    fn new(fate: impl Fn(Verb) -> Fate + Send + Sync + 'static) -> Self {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let broken = Arc::new(AtomicBool::new(false));
        let is_broken = Arc::clone(&broken);
        let plan = move |verb| {
            if is_broken.load(Ordering::SeqCst) {
                fate(verb)
            } else {
                Fate::Pass
            }
        };
        let ended = Arc::new(Mutex::default());
        let note = Arc::clone(&ended);
        let handler = move |job: Deaf, _: Context| {
            let note = Ended(Arc::clone(&note));
            async move {
                let _note = note;
                sleep(Duration::from_secs(job.seconds)).await;
                Ok::<(), Failure>(())
            }
        };
        let worker = Client::new(Arc::new(Faulty::new(Arc::clone(&store), plan)))
            .worker()
            .handle(handler)
            .executor(SameRuntime)
            .start()
            .unwrap();
        Self {
            client: Client::new(store),
            broken,
            worker,
            ended,
        }
    }

    async fn ledger(&self) -> Ledger {
        self.client.ledger().await.unwrap()
    }

    async fn granted(&self, count: u64) {
        while self.ledger().await.granted < count {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Drains, and tells how long it took.
    async fn drained(&self) -> (Duration, DrainReport) {
        let start = Instant::now();
        self.worker.drain();
        let report = self.worker.join().await.unwrap();
        (start.elapsed(), report)
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_worker_ends_at_once_and_with_a_claim_in_doubt_after_a_second() {
    let second = Duration::from_secs(1);
    // The first is the other arm: a store that answers.
    for (fate, limit) in [
        (Fate::Pass, Duration::ZERO),
        (Fate::Contend, Duration::ZERO),
        (Fate::Ahead, Duration::ZERO),
        (Fate::Refuse, Duration::ZERO),
        (Fate::LoseRequest, second),
        (Fate::Hang, second),
    ] {
        let scene = Scene::new(move |_| fate);
        sleep(second).await;
        scene.broken.store(true, Ordering::SeqCst);
        sleep(10 * second).await;
        let (took, report) = scene.drained().await;
        assert!(took <= limit + SLACK, "{fate:?}: {took:?}");
        assert_eq!(report.unsettled, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_never_there_does_not_hold_up_a_drain() {
    for fate in [Fate::LoseRequest, Fate::Hang] {
        let scene = Scene::new(move |_| fate);
        scene.broken.store(true, Ordering::SeqCst);
        sleep(Duration::from_secs(10)).await;
        let (took, _) = scene.drained().await;
        assert!(took <= Duration::from_secs(1) + SLACK, "{fate:?}: {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deaf_handler_is_dropped_in_time_to_be_handed_back_within_the_drain_grace() {
    let dropped_after = Duration::from_secs(20);
    for fate in [Fate::Pass, Fate::LoseRequest, Fate::Hang] {
        let scene = Scene::new(move |_| fate);
        let job = Deaf { seconds: 3_600 };
        scene.client.enqueue(&job).await.unwrap();
        scene.granted(1).await;
        scene.broken.store(true, Ordering::SeqCst);
        let start = Instant::now();
        let (took, report) = scene.drained().await;
        let dropped = scene.ended.lock().unwrap()[0] - start;
        assert!(
            (dropped_after..dropped_after + SLACK).contains(&dropped),
            "{fate:?}: dropped after {dropped:?}"
        );
        let ledger = scene.ledger().await;
        if fate == Fate::Pass {
            assert!(took <= dropped_after + SLACK, "{took:?}");
            assert_eq!((report.unsettled, ledger.surrendered), (0, 1));
        } else {
            // Repeated to the end, which the store does not put off.
            assert!(
                (DRAIN_GRACE..DRAIN_GRACE + SLACK).contains(&took),
                "{fate:?}: {took:?}"
            );
            assert_eq!((report.unsettled, ledger.live), (1, 1));
        }
    }
}

/// A worker is drained this long before the answer to its claim arrives. Returns how long it took,
/// and how many leases it handed back.
async fn answered_after(left: Duration, handler_seconds: Option<u64>) -> (Duration, u64) {
    let before = Duration::from_secs(4);
    let answer = before + left;
    let scene = Scene::new(move |verb| match verb {
        Verb::Claim => Fate::Late(answer),
        _ => Fate::Pass,
    });
    let mut granted = 0;
    if let Some(seconds) = handler_seconds {
        scene.client.enqueue(&Deaf { seconds }).await.unwrap();
        granted += 1;
        scene.granted(granted).await;
    }
    scene.broken.store(true, Ordering::SeqCst);
    let job = Deaf { seconds: 1 };
    scene.client.enqueue(&job).await.unwrap();
    scene.granted(granted + 1).await;
    sleep(before).await;
    let (took, _) = scene.drained().await;
    let ledger = scene.ledger().await;
    assert_eq!(ledger.live + ledger.surrendered, 1, "{ledger:?}");
    (took, ledger.surrendered)
}

#[tokio::test(start_paused = true)]
async fn what_a_late_claim_brings_goes_back_if_it_comes_within_a_second_or_while_handlers_run() {
    let millis = Duration::from_millis;
    let (took, surrendered) = answered_after(millis(500), None).await;
    assert_eq!(surrendered, 1);
    assert!(took <= millis(500) + SLACK, "{took:?}");

    let (took, surrendered) = answered_after(millis(1_500), None).await;
    assert_eq!(surrendered, 0, "nobody waited for it");
    assert!(took <= millis(1_000) + SLACK, "{took:?}");

    let (took, surrendered) = answered_after(millis(1_500), Some(8)).await;
    assert_eq!(surrendered, 1);
    assert!(took > millis(1_500), "{took:?}");
}
