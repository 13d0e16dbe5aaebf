//! How the machine itself behaved while something was measured on it.
//!
//! A bound on real time is kept by code *on a machine that runs it*. While others have the
//! processors or the disk, nothing here is on time, and a broken bound says nothing about the code.
//! So a watch stands beside the measurement and does what needs no code of ours: it sleeps for a
//! moment, syncs a few bytes, and adds up what others had of the processors. A round that breaks
//! its bound while the watch itself was held up is void, and run again. The bounds do not move, a
//! round that breaks one on a calm machine fails at once, and a machine that is never calm fails
//! too.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A sleeper that wakes later than this was kept waiting by others: a processor of our own comes
/// round in a few milliseconds.
const LATE: Duration = Duration::from_millis(20);

/// A sync of a few bytes that takes longer waited for others: alone it takes a millisecond, and
/// beside four of our own writers a few.
const SLOW_SYNC: Duration = Duration::from_millis(40);

/// Others that have more than this share of all processors leave too little.
const CROWDED: f64 = 0.25;

/// Rounds before the machine is given up.
const ROUNDS: usize = 5;

/// How long a void round waits for a calm moment, and how long a moment is.
const PATIENCE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(500);

/// Runs rounds until one keeps its bounds, or breaks them on a calm machine.
pub async fn judged<F: Future<Output = Result<(), String>>>(mut round: impl FnMut() -> F) {
    let mut void = Vec::new();
    for _ in 0..ROUNDS {
        let watch = Watch::start();
        let kept = round().await;
        let weather = watch.stop();
        let Err(broken) = kept else { return };
        assert!(weather.is_bad(), "{broken}, on a calm machine: {weather:?}");
        println!("void: {broken}, while the machine was busy with others: {weather:?}");
        void.push((broken, weather));
        calm().await;
    }
    panic!("the machine was never calm enough to measure on: {void:#?}");
}

/// Waits for a calm moment, with patience.
async fn calm() {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let watch = Watch::start();
        tokio::time::sleep(MOMENT).await;
        if !watch.stop().is_bad() {
            return;
        }
    }
}

/// What a watch has seen.
#[derive(Debug)]
pub struct Weather {
    latest: Duration,
    slowest_sync: Duration,
    /// What others had of all processors.
    others: f64,
}

impl Weather {
    fn is_bad(&self) -> bool {
        self.latest > LATE || self.slowest_sync > SLOW_SYNC || self.others > CROWDED
    }
}

/// Stands beside a measurement.
pub struct Watch {
    since: Option<Ticks>,
    over: Arc<AtomicBool>,
    seen: JoinHandle<(Duration, Duration)>,
}

impl Watch {
    pub fn start() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        Self {
            since: Ticks::now(),
            over,
            seen: std::thread::spawn(move || watch(&ends)),
        }
    }

    pub fn stop(self) -> Weather {
        self.over.store(true, Ordering::Relaxed);
        let (latest, slowest_sync) = self.seen.join().unwrap();
        let others = self.since.zip(Ticks::now());
        Weather {
            latest,
            slowest_sync,
            // A system that does not tell is taken to be ours alone.
            others: others.map_or(0.0, |(since, now)| now.others_since(&since)),
        }
    }
}

/// Sleeps and syncs in turn, and tells the longest of each.
fn watch(over: &AtomicBool) -> (Duration, Duration) {
    const SLEEP: Duration = Duration::from_millis(2);
    let mut file = tempfile::tempfile().unwrap();
    let (mut latest, mut slowest) = (Duration::ZERO, Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        for _ in 0..10 {
            let start = Instant::now();
            std::thread::sleep(SLEEP);
            latest = latest.max(start.elapsed().saturating_sub(SLEEP));
        }
        let start = Instant::now();
        file.write_all(b"on watch").unwrap();
        file.sync_data().unwrap();
        slowest = slowest.max(start.elapsed());
    }
    (latest, slowest)
}

/// Time of the processors, in the system's ticks.
struct Ticks {
    all: f64,
    idle: f64,
    /// Of this process and the children that it has waited for.
    own: f64,
}

impl Ticks {
    fn now() -> Option<Self> {
        let numbers = |text: &str| -> Vec<f64> {
            let fields = text.split_whitespace();
            fields.filter_map(|field| field.parse().ok()).collect()
        };
        let machine = std::fs::read_to_string("/proc/stat").ok()?;
        // user, nice, system, idle, iowait, irq, softirq, steal.
        let machine = numbers(machine.lines().next()?.strip_prefix("cpu")?);
        let process = std::fs::read_to_string("/proc/self/stat").ok()?;
        // Behind the name and the state; own and children's, in user and system mode, come 11th.
        let process = numbers(process.rsplit_once(')')?.1);
        Some(Self {
            all: machine.get(..8)?.iter().sum(),
            idle: machine[3] + machine[4],
            own: process.get(10..14)?.iter().sum(),
        })
    }

    fn others_since(&self, before: &Self) -> f64 {
        let all = (self.all - before.all).max(1.0);
        let busy = all - (self.idle - before.idle);
        (busy - (self.own - before.own)) / all
    }
}
