//! The recorder: histograms that count each value in its bucket at once, and a limit on series.
//!
//! The stock recorder keeps every value until the next scrape and sorts them then, so its memory
//! and its pauses grow with the number of jobs between two scrapes. Here a series is a row of
//! counts of a fixed size. Metrics of which the crate does not know the buckets are left to the
//! stock recorder, and so are counters and gauges.
//!
//! Each thread counts in a row of its own, as long as there are enough rows: a row that no other
//! thread writes needs no atomic step.
//!
//! At most [`LINES`] lines of one metric of this crate are exported, so that queues named after
//! customers cannot bring down a Prometheus. Series beyond that are not counted; the log says so
//! once.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use metrics_exporter_prometheus::formatting::{
    sanitize_label_key, sanitize_label_value, write_help_line, write_type_line,
};
use metrics_exporter_prometheus::{PrometheusHandle, PrometheusRecorder};

use leasehold::observe::metrics::BUCKETS;

/// Lines of one metric in a scrape: about a thousand queues in the ledger, or 370 pairs of a queue
/// and a kind in a histogram.
const LINES: usize = 10_000;

/// The metrics of which it has been said that they are at the limit. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Told(Arc<Mutex<BTreeSet<String>>>);

/// The stock recorder, and the histograms that it is spared.
pub(super) struct Sorting {
    stock: PrometheusRecorder,
    families: Arc<Families>,
    /// The series of this crate's metrics, by name.
    admitted: Mutex<HashMap<String, HashSet<Key>>>,
    told: Told,
}

/// What a [`Sorting`] has counted, as text.
#[derive(Clone)]
pub(super) struct Counted {
    stock: PrometheusHandle,
    families: Arc<Families>,
}

/// The histograms by name.
#[derive(Default)]
struct Families(Mutex<BTreeMap<&'static str, Family>>);

/// The series of one histogram.
#[derive(Default)]
struct Family {
    about: Option<SharedString>,
    /// By their labels, as they are written.
    series: BTreeMap<String, Arc<Sorted>>,
}

impl Sorting {
    pub(super) fn new(stock: PrometheusRecorder, told: Told) -> Self {
        Self {
            stock,
            families: Arc::default(),
            admitted: Mutex::default(),
            told,
        }
    }

    /// Whether there is room for a series, each of which is so many lines.
    fn admits(&self, key: &Key, lines: usize) -> bool {
        if !key.name().starts_with("leasehold_") {
            return true;
        }
        let mut admitted = lock(&self.admitted);
        let Some(series) = admitted.get_mut(key.name()) else {
            let series = HashSet::from([key.clone()]);
            admitted.insert(key.name().to_owned(), series);
            return true;
        };
        if series.contains(key) {
            return true;
        }
        if (series.len() + 1) * lines <= LINES {
            series.insert(key.clone());
            return true;
        }
        let metric = key.name();
        if lock(&self.told.0).insert(metric.to_owned()) {
            let series = series.len();
            tracing::warn!(
                metric,
                series,
                "too many queues and kinds: this metric is exported for the first of them only"
            );
        }
        false
    }

    pub(super) fn counted(&self) -> Counted {
        Counted {
            stock: self.stock.handle(),
            families: Arc::clone(&self.families),
        }
    }
}

impl Recorder for Sorting {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, about: SharedString) {
        self.stock.describe_counter(name, unit, about);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, about: SharedString) {
        self.stock.describe_gauge(name, unit, about);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, about: SharedString) {
        match bounds_of(name.as_str()) {
            Some((name, _)) => {
                let mut families = self.families.lock();
                families.entry(name).or_default().about.get_or_insert(about);
            }
            None => self.stock.describe_histogram(name, unit, about),
        }
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        if !self.admits(key, 1) {
            return Counter::noop();
        }
        self.stock.register_counter(key, metadata)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        if !self.admits(key, 1) {
            return Gauge::noop();
        }
        self.stock.register_gauge(key, metadata)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        let Some((name, bounds)) = bounds_of(key.name()) else {
            return self.stock.register_histogram(key, metadata);
        };
        // Each bucket, the one without a bound, the sum and the count.
        if !self.admits(key, bounds.len() + 3) {
            return Histogram::noop();
        }
        let mut families = self.families.lock();
        let series = &mut families.entry(name).or_default().series;
        let sorted = series.entry(labels_of(key));
        let sorted = sorted.or_insert_with(|| Arc::new(Sorted::new(bounds)));
        Histogram::from_arc(Arc::clone(sorted))
    }
}

impl Counted {
    /// Everything, in the Prometheus text format.
    pub(super) fn render(&self) -> String {
        // Histograms of others keep what was recorded until somebody sorts it into the buckets.
        self.stock.run_upkeep();
        let mut text = self.stock.render();
        for (name, family) in &*self.families.lock() {
            family.write(name, &mut text);
        }
        text
    }
}

impl Families {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Family>> {
        lock(&self.0)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Family {
    fn write(&self, name: &str, text: &mut String) {
        if self.series.is_empty() {
            return;
        }
        if let Some(about) = &self.about {
            write_help_line(text, name, None, None, about);
        }
        write_type_line(text, name, None, None, "histogram");
        for (labels, sorted) in &self.series {
            sorted.write(name, labels, text);
        }
        text.push('\n');
    }
}

/// The name and the buckets of a histogram of this crate.
fn bounds_of(name: &str) -> Option<(&'static str, &'static [f64])> {
    BUCKETS.iter().copied().find(|(known, _)| *known == name)
}

fn labels_of(key: &Key) -> String {
    let labels = key.labels().map(|label| {
        let (key, value) = (label.key(), label.value());
        format!(
            "{}=\"{}\"",
            sanitize_label_key(key),
            sanitize_label_value(value)
        )
    });
    labels.collect::<Vec<_>>().join(",")
}

/// One series: how often a value fell between two bounds, and the sum of all.
struct Sorted {
    bounds: &'static [f64],
    /// One for each seat, and one for all who have none.
    rows: [Row; SEATS + 1],
}

/// Threads with rows of their own.
const SEATS: usize = 16;

/// More bounds than this no histogram has: with it a row fills its memory.
const BOUNDS: usize = 29;

/// The counts of a thread, in memory that no other row shares.
#[derive(Default)]
#[repr(align(128))]
struct Row {
    /// A place for each bound, and one for what is above them.
    counts: [AtomicU64; BOUNDS + 1],
    /// The bits of a float.
    sum: AtomicU64,
    /// Where the last value of the thread fell: the next mostly falls there too.
    last: AtomicUsize,
}

impl Row {
    /// Adds what only one thread may add at a time.
    fn add_alone(&self, place: usize, times: u64, more: f64) {
        let count = &self.counts[place];
        count.store(count.load(Ordering::Relaxed) + times, Ordering::Relaxed);
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed)) + more;
        self.sum.store(sum.to_bits(), Ordering::Relaxed);
    }

    /// Adds beside others.
    fn add(&self, place: usize, times: u64, more: f64) {
        self.counts[place].fetch_add(times, Ordering::Relaxed);
        let sum = |bits: u64| Some((f64::from_bits(bits) + more).to_bits());
        let _ = self
            .sum
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
    }
}

/// A thread's place: the same row of every series is its own until it ends.
struct Seat(usize);

/// A bit for each seat that somebody has. Through this lock the next one sees what the last wrote.
static TAKEN: Mutex<u16> = Mutex::new(0);

impl Seat {
    fn take() -> Self {
        let mut taken = lock(&TAKEN);
        let free = taken.trailing_ones() as usize;
        if free < SEATS {
            *taken |= 1 << free;
        }
        Self(free)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.0 < SEATS {
            *lock(&TAKEN) &= !(1 << self.0);
        }
    }
}

thread_local! {
    static SEAT: Seat = Seat::take();
}

impl Sorted {
    fn new(bounds: &'static [f64]) -> Self {
        const { assert_fits() };
        Self {
            bounds,
            rows: Default::default(),
        }
    }

    fn add(&self, value: f64, times: u64) {
        let more = value * times as f64;
        // A thread that is about to end has none any longer.
        match SEAT.try_with(|seat| seat.0) {
            Ok(seat) if seat < SEATS => {
                let row = &self.rows[seat];
                let mut place = row.last.load(Ordering::Relaxed);
                if !self.fits(value, place) {
                    place = self.place(value);
                    row.last.store(place, Ordering::Relaxed);
                }
                row.add_alone(place, times, more);
            }
            _ => self.rows[SEATS].add(self.place(value), times, more),
        }
    }

    /// The place of the first bound that is not below the value.
    fn place(&self, value: f64) -> usize {
        // What is no number is below no bound.
        let above = |bound: &f64| value > *bound || value.is_nan();
        self.bounds.partition_point(above)
    }

    /// Whether a value that is not above all bounds falls there.
    fn fits(&self, value: f64, place: usize) -> bool {
        let above_last = place == 0 || value > self.bounds[place - 1];
        above_last && self.bounds.get(place).is_some_and(|bound| value <= *bound)
    }

    fn write(&self, name: &str, labels: &str, text: &mut String) {
        let rows = || self.rows.iter();
        let separator = if labels.is_empty() { "" } else { "," };
        let mut below = 0;
        for place in 0..=self.bounds.len() {
            let here = rows().map(|row| row.counts[place].load(Ordering::Relaxed));
            below += here.sum::<u64>();
            let _ = write!(text, "{name}_bucket{{{labels}{separator}le=\"");
            let _ = match self.bounds.get(place) {
                Some(bound) => writeln!(text, "{bound}\"}} {below}"),
                None => writeln!(text, "+Inf\"}} {below}"),
            };
        }
        let sum: f64 = rows()
            .map(|row| f64::from_bits(row.sum.load(Ordering::Relaxed)))
            .sum();
        let labels = match labels {
            "" => String::new(),
            labels => format!("{{{labels}}}"),
        };
        let _ = writeln!(text, "{name}_sum{labels} {sum}");
        let _ = writeln!(text, "{name}_count{labels} {below}");
    }
}

impl HistogramFn for Sorted {
    fn record(&self, value: f64) {
        self.add(value, 1);
    }

    fn record_many(&self, value: f64, count: usize) {
        self.add(value, count as u64);
    }
}

/// Every histogram of the crate has room in a row.
const fn assert_fits() {
    let mut at = 0;
    while at < BUCKETS.len() {
        assert!(BUCKETS[at].1.len() <= BOUNDS);
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

    use super::*;
    use leasehold::observe::metrics::{self, ATTEMPTS, JOB_ATTEMPTS, JOB_RUN, STORE_CALL};

    fn stock() -> PrometheusRecorder {
        let mut builder = PrometheusBuilder::new();
        for (name, buckets) in BUCKETS {
            let name = Matcher::Full((*name).to_owned());
            builder = builder.set_buckets_for_metric(name, buckets).unwrap();
        }
        builder.build_recorder()
    }

    /// The families, and the lines of each: neither has an order of its own.
    fn families(text: &str) -> Vec<Vec<&str>> {
        let families = text.split("\n\n").map(|family| {
            let mut lines: Vec<_> = family.lines().filter(|line| !line.is_empty()).collect();
            assert!(lines.is_empty() || lines[0].starts_with('#'), "{family}");
            lines.sort_unstable();
            lines
        });
        let mut families: Vec<_> = families.filter(|family| !family.is_empty()).collect();
        families.sort_unstable();
        families
    }

    /// Halves and quarters, so that no sum depends on the order.
    fn play() {
        metrics::describe();
        ::metrics::describe_histogram!("of_somebody_else", "his own");
        for (queue, value) in [
            ("a", 0.0),
            ("a", 0.25),
            ("a", 2.5),
            ("b", 1e6),
            ("a \"b\" \\ c\n", 0.5),
        ] {
            ::metrics::histogram!(JOB_RUN, "queue" => queue, "kind" => "k").record(value);
        }
        ::metrics::histogram!(JOB_ATTEMPTS).record_many(3.0, 1_000);
        ::metrics::histogram!(JOB_ATTEMPTS).record(f64::from(4));
        ::metrics::histogram!(STORE_CALL, "engine" => "memory", "verb" => "claim").record(-1.0);
        // Known, and never recorded.
        let _ = ::metrics::histogram!(STORE_CALL, "engine" => "memory", "verb" => "settle");
        ::metrics::histogram!("of_somebody_else").record(1.0);
        ::metrics::counter!(metrics::CLAIMS_EMPTY).increment(2);
        ::metrics::gauge!(metrics::LEASES_HELD).set(3.0);
    }

    #[test]
    fn a_scrape_reads_as_the_stock_recorders() {
        let (stock, sorting) = (stock(), Sorting::new(stock(), Told::default()));
        ::metrics::with_local_recorder(&stock, play);
        ::metrics::with_local_recorder(&sorting, play);
        let (theirs, ours) = (stock.handle().render(), sorting.counted().render());
        assert!(ours.contains("# HELP leasehold_job_run_seconds run of the handler\n"));
        assert_eq!(families(&ours), families(&theirs));
    }

    #[test]
    fn what_is_no_number_is_above_every_bound() {
        let (stock, sorting) = (stock(), Sorting::new(stock(), Told::default()));
        let play = || ::metrics::histogram!(JOB_ATTEMPTS).record(f64::NAN);
        ::metrics::with_local_recorder(&stock, play);
        ::metrics::with_local_recorder(&sorting, play);
        let (theirs, ours) = (stock.handle().render(), sorting.counted().render());
        assert_eq!(families(&ours), families(&theirs));
    }

    #[test]
    fn a_metric_has_a_limit_of_series_and_what_is_there_goes_on() {
        let told = Told::default();
        let sorting = Sorting::new(stock(), told.clone());
        let pairs = LINES / (metrics::SECONDS.len() + 3);
        let queues = || (0..LINES + 5).map(|n| n.to_string());
        ::metrics::with_local_recorder(&sorting, || {
            for round in 0..2 {
                for queue in queues() {
                    ::metrics::counter!(metrics::JOBS_ENQUEUED, "queue" => queue).increment(1);
                }
                for queue in queues().take(pairs + 5) {
                    ::metrics::histogram!(JOB_RUN, "queue" => queue).record(f64::from(round));
                }
            }
            for queue in queues() {
                ::metrics::counter!("of_somebody_else", "queue" => queue).increment(1);
            }
        });
        let text = sorting.counted().render();
        let lines = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!(lines("leasehold_jobs_enqueued_total{"), LINES);
        assert_eq!(lines("leasehold_job_run_seconds_count{"), pairs);
        assert_eq!(lines("of_somebody_else{"), LINES + 5);
        let last = format!(
            "leasehold_jobs_enqueued_total{{queue=\"{}\"}} 2\n",
            LINES - 1
        );
        assert!(
            text.contains(&last),
            "the last that was admitted was counted once only"
        );
        let told: Vec<String> = lock(&told.0).iter().cloned().collect();
        assert_eq!(told, [JOB_RUN, metrics::JOBS_ENQUEUED]);
    }

    #[test]
    fn threads_beside_each_other_lose_no_count() {
        let sorted = Sorted::new(ATTEMPTS);
        std::thread::scope(|scope| {
            for _ in 0..2 * SEATS {
                scope.spawn(|| (0..10_000).for_each(|_| sorted.add(2.0, 1)));
            }
        });
        // And those who take the seats of others.
        for _ in 0..2 * SEATS {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..10_000).for_each(|_| sorted.add(2.0, 1)));
            });
        }
        let mut text = String::new();
        sorted.write("x", "", &mut text);
        let all = 4 * SEATS * 10_000;
        assert!(text.contains("x_bucket{le=\"1\"} 0\n"), "{text}");
        assert!(
            text.contains(&format!("x_bucket{{le=\"2\"}} {all}\n")),
            "{text}"
        );
        assert!(text.contains(&format!("x_sum {}\n", 2 * all)), "{text}");
        assert!(text.contains(&format!("x_count {all}\n")), "{text}");
    }
}
