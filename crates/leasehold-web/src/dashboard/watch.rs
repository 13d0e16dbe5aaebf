//! The last hour, sampled: what the charts and rates are made of.
//!
//! The ledger has totals; a rate takes repeated samples. The store is asked once per refresh,
//! however many pages are open. The number of samples is bounded, and they are lost with the
//! process.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::App;
use leasehold::Result;
use leasehold::clock::{Clock as _, SystemClock, Timestamp};
use leasehold::hooks::monotonic;
use leasehold::inspect::{self, Counts, Ledger, QueueView};
use leasehold::job::QueueName;

/// How far back the samples of everything together go.
pub(super) const HISTORY: Duration = Duration::from_secs(3_600);
/// How far back those of each queue go.
const QUEUE_HISTORY: Duration = Duration::from_secs(300);
/// Samples of everything, whatever the refresh.
const SAMPLES: usize = 3_600;
/// Queues whose history is kept.
const QUEUES: usize = 256;

/// The queues at one moment.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) at: Timestamp,
    pub(super) queues: Vec<QueueView>,
    pub(super) ledger: Ledger,
    pub(super) counts: Counts,
}

impl Snapshot {
    fn of(queues: Vec<QueueView>) -> Self {
        let (mut ledger, mut counts) = (Ledger::default(), Counts::default());
        for view in &queues {
            ledger = ledger.plus(&view.ledger);
            counts.scheduled += view.counts.scheduled;
            counts.ready += view.counts.ready;
            counts.parked += view.counts.parked;
            counts.leased += view.counts.leased;
            counts.completed += view.counts.completed;
            counts.dead += view.counts.dead;
            counts.cancelled += view.counts.cancelled;
        }
        Self {
            at: SystemClock.now(),
            queues,
            ledger,
            counts,
        }
    }

    /// How long the longest due job has waited, and in which queue.
    pub(super) fn longest_in_line(&self) -> Option<(Duration, &QueueView)> {
        let waits = self.queues.iter();
        let waits = waits.filter_map(|view| Some((view.oldest_ready?, view)));
        waits.max_by_key(|(wait, _)| *wait)
    }
}

/// What is kept of a moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Point {
    pub(super) at: Timestamp,
    pub(super) enqueued: u64,
    pub(super) granted: u64,
    pub(super) completed: u64,
    /// Surrendered, or called off.
    pub(super) handed_back: u64,
    pub(super) retried: u64,
    pub(super) buried: u64,
    pub(super) expired: u64,
    pub(super) revoked: u64,
    pub(super) live: u64,
}

impl Point {
    fn of(at: Timestamp, ledger: &Ledger) -> Self {
        Self {
            at,
            enqueued: ledger.enqueued,
            granted: ledger.granted,
            completed: ledger.completed,
            handed_back: ledger.surrendered + ledger.cancelled,
            retried: ledger.retried,
            buried: ledger.buried,
            expired: ledger.expired(),
            revoked: ledger.revoked,
            live: ledger.live,
        }
    }
}

/// What happened within a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Stretch {
    pub(super) seconds: f64,
    pub(super) enqueued: u64,
    pub(super) granted: u64,
    pub(super) completed: u64,
    pub(super) handed_back: u64,
    pub(super) retried: u64,
    pub(super) buried: u64,
    pub(super) expired: u64,
    pub(super) revoked: u64,
}

impl Stretch {
    fn add(&mut self, from: &Point, to: &Point) {
        self.seconds += to.at.since(from.at).as_secs_f64();
        // A store that was put back from a backup counts from less.
        self.enqueued += to.enqueued.saturating_sub(from.enqueued);
        self.granted += to.granted.saturating_sub(from.granted);
        self.completed += to.completed.saturating_sub(from.completed);
        self.handed_back += to.handed_back.saturating_sub(from.handed_back);
        self.retried += to.retried.saturating_sub(from.retried);
        self.buried += to.buried.saturating_sub(from.buried);
        self.expired += to.expired.saturating_sub(from.expired);
        self.revoked += to.revoked.saturating_sub(from.revoked);
    }

    /// From one moment to another.
    pub(super) fn between(from: &Point, to: &Point) -> Self {
        let mut stretch = Self::default();
        stretch.add(from, to);
        stretch
    }

    /// Ended by a holder that had not failed.
    pub(super) fn well(&self) -> u64 {
        self.completed + self.handed_back
    }

    /// Ended by a holder that had.
    pub(super) fn failed(&self) -> u64 {
        self.retried + self.buried
    }

    /// The share of the runs that failed, if any ended.
    pub(super) fn failed_share(&self) -> Option<f64> {
        let runs = self.completed + self.failed();
        (runs > 0).then(|| self.failed() as f64 / runs as f64)
    }

    /// The ends that a picture tells apart, in the order of their bars, by their colours.
    pub(super) fn ends(&self) -> [(&'static str, u64); 5] {
        [
            ("released", self.well()),
            ("retried", self.retried),
            ("buried", self.buried),
            ("revoked", self.revoked),
            ("expired", self.expired),
        ]
    }

    /// So many per second.
    pub(super) fn rate(&self, count: u64) -> f64 {
        if self.seconds > 0.0 {
            count as f64 / self.seconds
        } else {
            0.0
        }
    }
}

/// The samples.
pub(super) struct Watch {
    begun: AtomicBool,
    most: usize,
    most_of_queue: usize,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    latest: Option<Arc<Snapshot>>,
    all: VecDeque<Point>,
    queues: HashMap<QueueName, VecDeque<Point>>,
}

impl Watch {
    pub(super) fn new(refresh: Duration) -> Self {
        let fits = |history: Duration| {
            let samples = history.as_secs_f64() / refresh.as_secs_f64().max(0.1);
            (samples.ceil() as usize).clamp(2, SAMPLES)
        };
        Self {
            begun: AtomicBool::new(false),
            most: fits(HISTORY),
            most_of_queue: fits(QUEUE_HISTORY),
            ring: Mutex::default(),
        }
    }

    /// Whether it is this call that begins.
    pub(super) fn begin(&self) -> bool {
        !self.begun.swap(true, Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self, snapshot: Arc<Snapshot>) {
        self.lock().latest = Some(snapshot);
    }

    fn sample(&self, snapshot: Arc<Snapshot>) {
        let at = snapshot.at;
        let mut ring = self.lock();
        push(&mut ring.all, Point::of(at, &snapshot.ledger), self.most);
        for view in &snapshot.queues {
            if ring.queues.len() >= QUEUES && !ring.queues.contains_key(&view.queue) {
                continue;
            }
            let points = ring.queues.entry(view.queue.clone()).or_default();
            let point = Point::of(at, &view.ledger);
            push(points, point, self.most_of_queue);
        }
        ring.latest = Some(snapshot);
    }

    /// The last sample, if there is one.
    pub(super) fn latest(&self) -> Option<Arc<Snapshot>> {
        self.lock().latest.clone()
    }

    /// The last so many seconds of everything.
    pub(super) fn recent(&self, window: Duration) -> Stretch {
        stretch(&self.lock().all, window)
    }

    /// The last so many seconds of a queue, and its points.
    pub(super) fn of_queue(&self, queue: &QueueName, window: Duration) -> (Stretch, Vec<Point>) {
        let ring = self.lock();
        let Some(points) = ring.queues.get(queue) else {
            return Default::default();
        };
        (stretch(points, window), points.iter().copied().collect())
    }

    /// The last `window` in so many columns, the current one last.
    pub(super) fn columns(&self, window: Duration, columns: usize) -> Vec<Stretch> {
        let ring = self.lock();
        let width = (window.as_micros() as u64 / columns as u64).max(1);
        let mut out = vec![Stretch::default(); columns];
        let Some(last) = ring.all.back() else {
            return out;
        };
        // Columns are whole multiples of their width, so that they stand still while time passes.
        let last = last.at.as_micros() / width;
        for (from, to) in ring.all.iter().zip(ring.all.iter().skip(1)) {
            let back = last.saturating_sub(to.at.as_micros() / width) as usize;
            if back < columns {
                out[columns - 1 - back].add(from, to);
            }
        }
        out
    }
}

fn push(points: &mut VecDeque<Point>, point: Point, most: usize) {
    if points.len() >= most {
        points.pop_front();
    }
    points.push_back(point);
}

fn stretch(points: &VecDeque<Point>, window: Duration) -> Stretch {
    let mut sum = Stretch::default();
    let Some(last) = points.back() else {
        return sum;
    };
    let start = last.at.before(window);
    if let Some(first) = points.iter().find(|point| point.at >= start) {
        sum.add(first, last);
    }
    sum
}

/// Samples until the dashboard is gone.
pub(super) async fn run(app: Weak<App>) {
    loop {
        let Some(app) = app.upgrade() else { return };
        let every = app.refresh;
        match fresh(&app).await {
            Ok(snapshot) => app.watch.sample(snapshot),
            Err(error) => tracing::debug!(%error, "the dashboard has no sample"),
        }
        drop(app);
        tokio::time::sleep(every).await;
    }
}

/// The queues as they are now.
pub(super) async fn fresh(app: &App) -> Result<Arc<Snapshot>> {
    let queues = inspect::queues(&**app.client.store()).await?;
    let snapshot = Arc::new(Snapshot::of(queues));
    app.watch.look(Arc::clone(&snapshot));
    Ok(snapshot)
}

/// The queues as they were within the last refresh: for streams, of which there can be many.
pub(super) async fn recent(app: &App) -> Result<Arc<Snapshot>> {
    let latest = app.watch.latest();
    match latest.filter(|seen| SystemClock.now().since(seen.at) <= app.refresh) {
        Some(snapshot) => Ok(snapshot),
        None => fresh(app).await,
    }
}

/// An answer that is worth some work, and good for a while whoever asks.
pub(super) struct Cached<T> {
    good_for: Duration,
    kept: tokio::sync::Mutex<Option<(tokio::time::Instant, Arc<T>)>>,
}

impl<T> Cached<T> {
    pub(super) fn new(good_for: Duration) -> Self {
        Self {
            good_for,
            kept: tokio::sync::Mutex::new(None),
        }
    }

    /// The answer that is kept, or a new one. Those who ask meanwhile wait for it.
    pub(super) async fn get(&self, make: impl AsyncFnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut kept = self.kept.lock().await;
        if let Some((at, answer)) = &*kept
            && at.elapsed() < self.good_for
        {
            return Ok(Arc::clone(answer));
        }
        let answer = Arc::new(make().await?);
        *kept = Some((monotonic(), Arc::clone(&answer)));
        Ok(answer)
    }

    /// Forgets what is kept: something was changed.
    pub(super) async fn forget(&self) {
        *self.kept.lock().await = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64, completed: u64) -> Arc<Snapshot> {
        let mut ledger = Ledger::default();
        ledger.completed = completed;
        ledger.granted = completed;
        Arc::new(Snapshot {
            at: Timestamp::from_micros(seconds * 1_000_000),
            queues: Vec::new(),
            ledger,
            counts: Counts::default(),
        })
    }

    #[test]
    fn a_stretch_is_a_difference_and_the_ring_is_bounded() {
        let watch = Watch::new(Duration::from_secs(2));
        for n in 0..5_000 {
            watch.sample(at(1_000 + n * 2, n * 10));
        }
        assert_eq!(watch.lock().all.len(), 1_800);
        let minute = watch.recent(Duration::from_secs(60));
        assert_eq!(minute.completed, 300);
        assert!((minute.rate(minute.completed) - 5.0).abs() < 1e-9);
        let columns = watch.columns(Duration::from_secs(60), 6);
        assert_eq!(columns.len(), 6);
        assert!(
            columns[..5].iter().all(|column| column.completed == 50),
            "{columns:?}"
        );
    }

    #[test]
    fn a_ledger_that_falls_back_counts_nothing() {
        let watch = Watch::new(Duration::from_secs(2));
        watch.sample(at(10, 500));
        watch.sample(at(12, 20));
        assert_eq!(watch.recent(Duration::from_secs(60)).completed, 0);
    }
}
