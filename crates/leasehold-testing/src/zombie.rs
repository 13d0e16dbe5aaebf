//! The zombie test: freeze a handler wherever it can stand still, replace it, and let it go on.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::report::{Fault, FaultKind, FrozenAt, Report};
use super::run::Ended;
use super::stage::{Actor, Stage, Step, lock};
use leasehold::handler::IntoHandler;
use leasehold::job::{Job, Key, NewJob};
use leasehold::{Handler, Result, Worker};

/// A run that takes this long on the virtual clock waits for something that will not come: no lease
/// lives longer by default.
const LONGEST_RUN: Duration = Duration::from_secs(24 * 3600);

/// A run with more await points than this does not end.
const MOST_POINTS: usize = 10_000;

/// The watch on what the handlers enqueue.
const ENQUEUED: &str = "jobs enqueued";

/// Gives a worker the handler that is under test, for the jobs of a queue.
type Handle<R> = Box<dyn Fn(R, Worker, &str) -> Worker + Send>;

/// A test that makes a zombie of a handler at each of its await points.
///
/// For each point: fresh resources; the handler runs up to there and is not polled any more; its
/// lease expires; a successor runs under the next token; the zombie wakes up and runs to its end,
/// believing that it still holds its lease. It wakes up amid its successor's run (before each
/// change that the watches see, and before and after each fence that is opened), and when both its
/// successor and the queue's next job have ended. The successor is the next run of the job, or,
/// once the job is given up, the next job of its exclusive key. The watched resources tell what
/// came of it.
///
/// All of it happens on a thread and a virtual clock of its own; nothing is waited for.
#[must_use = "nothing is tested until it is run"]
pub struct Zombie<R> {
    job: Result<NewJob>,
    next: Result<NewJob>,
    key: Option<Key>,
    make: Box<dyn Fn() -> R + Send>,
    handle: Handle<R>,
    watches: Vec<Watch<R>>,
    patience: Duration,
}

/// What is compared.
struct Watch<R> {
    name: String,
    look: Box<dyn Fn(&R) -> String + Send>,
    /// Whether each effect counts, or only how it ends.
    each: bool,
}

impl<R: Clone + Send + 'static> Zombie<R> {
    /// A test of the handler that `handler` makes, on this job.
    ///
    /// `make` makes the resources afresh; clones must share them, as clients of one database do.
    /// They are in this process: memory, SQLite, files behind a
    /// [`FencedFile`](leasehold::fence::file::FencedFile). Real sockets do not go with virtual
    /// time.
    pub fn new<J: Job, M, H: IntoHandler<J, M, Handler: Handler<J>>>(
        job: &J,
        make: impl Fn() -> R + Send + 'static,
        handler: impl Fn(R) -> H + Send + 'static,
    ) -> Self {
        Self {
            job: NewJob::of(job),
            next: NewJob::of(job),
            key: None,
            make: Box::new(make),
            handle: Box::new(move |resources, worker, queue| {
                worker.handle_in(queue, handler(resources))
            }),
            watches: Vec::new(),
            patience: Duration::from_secs(30),
        }
    }

    /// What the handler's worker has around it, made of the resources: shared state, layers.
    pub fn worker(mut self, around: impl Fn(R, Worker) -> Worker + Send + 'static) -> Self {
        let handle = self.handle;
        self.handle = Box::new(move |resources: R, worker, queue| {
            let worker = around(resources.clone(), worker);
            handle(resources, worker, queue)
        });
        self
    }

    /// Watches a resource: no effect of the zombie may be accepted once its successor has opened
    /// its fences, and the end must be the same as without a zombie.
    ///
    /// Compared by its `Debug` text: leave out what differs from run to run, such as tokens.
    pub fn watch<T: fmt::Debug>(
        self,
        name: impl Into<String>,
        look: impl Fn(&R) -> T + Send + 'static,
    ) -> Self {
        self.watched(name.into(), look, true)
    }

    /// Watches a resource that an idempotency key protects, not a fence: only its end must be the
    /// same as without a zombie, whoever did it.
    pub fn watch_end<T: fmt::Debug>(
        self,
        name: impl Into<String>,
        look: impl Fn(&R) -> T + Send + 'static,
    ) -> Self {
        self.watched(name.into(), look, false)
    }

    fn watched<T: fmt::Debug>(
        mut self,
        name: String,
        look: impl Fn(&R) -> T + Send + 'static,
        each: bool,
    ) -> Self {
        let look = Box::new(move |resources: &R| format!("{:?}", look(resources)));
        self.watches.push(Watch { name, look, each });
        self
    }

    /// The jobs have this exclusive key.
    ///
    /// # Errors
    /// If it is too long.
    pub fn exclusive(mut self, key: &str) -> Result<Self> {
        self.key = Some(Key::new(key)?);
        Ok(self)
    }

    /// The job that comes next, so that the resource moves on before the zombie wakes up. By
    /// default the same once more, with an id of its own.
    pub fn next_job<J: Job>(mut self, job: &J) -> Self {
        self.next = NewJob::of(job);
        self
    }

    /// How long, in real time, a poll may take before it is called hung. 30 s by default.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Runs the test.
    ///
    /// # Panics
    /// If a job breaks a limit, or `make` or a watch panics.
    pub fn run(self) -> Report {
        let shared = Arc::new(Shared::default());
        let (patience, seen) = (self.patience, Arc::clone(&shared));
        let (done, ended) = mpsc::channel();
        // A thread that nobody joins: a handler that blocks it would never give it back.
        std::thread::spawn(move || {
            self.explore(&seen);
            let _ = done.send(());
        });
        let mut pulse = None;
        loop {
            match ended.recv_timeout(patience) {
                Ok(()) => break,
                Err(RecvTimeoutError::Disconnected) => panic!("the zombie test itself panicked"),
                Err(RecvTimeoutError::Timeout) => {
                    let now = Some(shared.pulse.load(Ordering::Relaxed));
                    if now == pulse {
                        let detail = format!("for {patience:?}");
                        shared.fault(FaultKind::Hung, shared.frozen(), None, detail);
                        break;
                    }
                    pulse = now;
                }
            }
        }
        lock(&shared.report).clone()
    }

    fn explore(&self, shared: &Shared) {
        let done = self.undisturbed(shared);
        let Some(alone) = done.unwrap_or_else(|e| panic!("the zombie test cannot run: {e}")) else {
            return;
        };
        let found = self.haunt(shared, &alone);
        found.unwrap_or_else(|e| panic!("the zombie test cannot go on: {e}"));
    }

    /// The handler alone: what it does when nobody disturbs it.
    fn undisturbed(&self, shared: &Shared) -> Result<Option<Alone>> {
        on_virtual_time(async {
            let not_completed = |detail: String| {
                shared.fault(FaultKind::NotCompleted, None, None, detail);
                Ok(None)
            };
            let scene = self.scene(shared, Heir::SameJob).await?;
            let mut first = scene.claim().await?;
            let ended = first.finish().await;
            let points = first.points();
            lock(&shared.report).points = points;
            if ended != Some(Ended::Completed) {
                return not_completed(says(ended.as_ref()));
            }
            let end = scene.look();
            scene.enqueue(&self.next).await?;
            let ended = scene.claim().await?.finish().await;
            if ended != Some(Ended::Completed) {
                return not_completed(format!("the next job: {}", says(ended.as_ref())));
            }
            if self.watches.is_empty() && scene.stage.enqueued().is_empty() {
                shared.fault(FaultKind::NothingWatched, None, None, String::new());
                return Ok(None);
            }
            if points == 0 {
                shared.fault(FaultKind::NoAwaitPoint, None, None, String::new());
                return Ok(None);
            }
            let next_end = scene.look();
            Ok(Some(Alone {
                points,
                end,
                next_end,
            }))
        })
    }

    fn haunt(&self, shared: &Shared, alone: &Alone) -> Result<()> {
        for point in 1..=alone.points {
            shared.at.store(point, Ordering::Relaxed);
            let Some(stops) = self.after_all(shared, alone, point)? else {
                continue;
            };
            self.in_between(shared, alone, point, Heir::SameJob, &stops)?;
            if let Some(stops) = self.stops(shared, point, Heir::NextJob)? {
                self.in_between(shared, alone, point, Heir::NextJob, &stops)?;
            }
        }
        shared.at.store(alone.points + 1, Ordering::Relaxed);
        self.died_before_settling(shared, alone)
    }

    /// The zombie wakes up amid its successor's run, at each of its stops in turn.
    fn in_between(
        &self,
        shared: &Shared,
        alone: &Alone,
        point: usize,
        heir: Heir,
        stops: &[usize],
    ) -> Result<()> {
        let frozen = FrozenAt::Await(point);
        let Some(serial) = self.awake(shared, point, heir, 0)? else {
            return Ok(());
        };
        for &at in stops {
            let Some(seen) = self.awake(shared, point, heir, at)? else {
                break;
            };
            for (number, watch) in self.watches.iter().enumerate() {
                let (before, after) = (&seen.before[number], &seen.after[number]);
                if !watch.each || before == after || seen.is_as_good_as(&serial) {
                    continue;
                }
                let (opened, in_all) = (seen.opened, seen.opened_in_all);
                let detail = format!(
                    "{before} → {after}, when the successor was at its await point {at} and had \
                     opened {opened} of {in_all} fences"
                );
                let kind = if opened < in_all {
                    FaultKind::OpenedLate
                } else {
                    FaultKind::Accepted
                };
                shared.fault(kind, Some(frozen), Some(&watch.name), detail);
            }
            if heir == Heir::SameJob {
                self.compare(shared, frozen, &alone.end, &seen.end);
            }
        }
        Ok(())
    }

    /// The first run did everything, and its lease was never settled: the second does it again.
    fn died_before_settling(&self, shared: &Shared, alone: &Alone) -> Result<()> {
        on_virtual_time(async {
            let scene = self.scene(shared, Heir::SameJob).await?;
            let mut first = scene.claim().await?;
            first.go_to(MOST_POINTS).await;
            scene.stage.expire(&first);
            let mut second = scene.claim().await?;
            let ended = second.finish().await;
            shared.made();
            let frozen = FrozenAt::Return;
            shared.must_complete(frozen, ended.as_ref());
            self.compare(shared, frozen, &alone.end, &scene.look());
            Ok(())
        })
    }

    /// The zombie wakes up when its successor and the next job have ended. Tells the stops of its
    /// successor; none if that one does not end, so that there is nothing more to try.
    fn after_all(
        &self,
        shared: &Shared,
        alone: &Alone,
        point: usize,
    ) -> Result<Option<Vec<usize>>> {
        let frozen = FrozenAt::Await(point);
        on_virtual_time(async {
            let scene = self.scene(shared, Heir::SameJob).await?;
            let (mut first, mut second) = scene.replaced(point, Heir::SameJob).await?;
            shared.made();
            let Some(stops) = scene.walk(&mut second).await else {
                shared.fault(FaultKind::Blocked, Some(frozen), None, says(None));
                return Ok(None);
            };
            let ended = second.settle().await;
            shared.must_complete(frozen, ended.as_ref());
            if ended == Some(Ended::Completed) {
                scene.enqueue(&self.next).await?;
                let ended = scene.claim().await?.finish().await;
                shared.must_complete(frozen, ended.as_ref());
                self.compare(shared, frozen, &alone.next_end, &scene.look());
            }
            let before = scene.look();
            first.wake().await;
            let after = scene.look();
            let names = self.watches.iter().map(|watch| &*watch.name);
            for (name, (before, after)) in names.chain([ENQUEUED]).zip(before.iter().zip(&after)) {
                if before != after {
                    let detail = format!("{before} → {after}, when the successor had ended");
                    shared.fault(FaultKind::Accepted, Some(frozen), Some(name), detail);
                }
            }
            Ok(Some(stops))
        })
    }

    /// The stops of a successor that nobody disturbs; none if it does not end.
    fn stops(&self, shared: &Shared, point: usize, heir: Heir) -> Result<Option<Vec<usize>>> {
        on_virtual_time(async {
            let scene = self.scene(shared, heir).await?;
            let (_first, mut second) = scene.replaced(point, heir).await?;
            Ok(scene.walk(&mut second).await)
        })
    }

    /// The zombie wakes up when its successor is at an await point; at 0 it has its lease, and has
    /// not begun. None if the successor never gets there.
    fn awake(&self, shared: &Shared, point: usize, heir: Heir, at: usize) -> Result<Option<Seen>> {
        on_virtual_time(async {
            let scene = self.scene(shared, heir).await?;
            let (mut first, mut second) = scene.replaced(point, heir).await?;
            if at > 0 && second.reach(at).await != Some(Step::There) {
                return Ok(None);
            }
            shared.made();
            let (before, opened) = (scene.look(), second.opened());
            first.wake().await;
            let after = scene.look();
            let ended = second.finish().await;
            if !first.has_returned() {
                // It waited for something that its successor had.
                first.wake().await;
            }
            Ok(Some(Seen {
                before,
                after,
                opened,
                opened_in_all: second.opened(),
                ended,
                end: scene.look(),
            }))
        })
    }

    /// Compares how it ended with how it should.
    fn compare(&self, shared: &Shared, frozen: FrozenAt, right: &[String], end: &[String]) {
        let names = self.watches.iter().map(|watch| &*watch.name);
        for (name, (right, end)) in names.chain([ENQUEUED]).zip(right.iter().zip(end)) {
            if right != end {
                let detail = format!("{end}, not {right}");
                shared.fault(FaultKind::Repeated, Some(frozen), Some(name), detail);
            }
        }
    }

    /// Fresh resources, and the job in the queue.
    async fn scene<'a>(&'a self, shared: &Shared, heir: Heir) -> Result<Scene<'a, R>> {
        let scene = Scene {
            test: self,
            key: match heir {
                Heir::SameJob => None,
                Heir::NextJob => Some(Key::new("zombie test")?),
            },
            stage: Stage::new(Arc::clone(&shared.pulse)),
            resources: (self.make)(),
        };
        scene.enqueue(&self.job).await?;
        Ok(scene)
    }
}

impl<R> fmt::Debug for Zombie<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let watches: Vec<_> = self.watches.iter().map(|watch| &watch.name).collect();
        f.debug_struct("Zombie")
            .field("job", &self.job)
            .field("watches", &watches)
            .finish_non_exhaustive()
    }
}

/// Who comes after the zombie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heir {
    /// The next run of its own job.
    SameJob,
    /// The next job of its exclusive key: its own was given up. What that one writes differs from
    /// what the zombie writes, so that a lost update shows.
    NextJob,
}

/// What the handler does when nobody disturbs it.
struct Alone {
    points: usize,
    end: Vec<String>,
    /// When the next job has ended, too.
    next_end: Vec<String>,
}

/// What came of a zombie that woke up amid its successor's run.
struct Seen {
    before: Vec<String>,
    after: Vec<String>,
    /// Fences that the successor had opened by then.
    opened: usize,
    opened_in_all: usize,
    ended: Option<Ended>,
    end: Vec<String>,
}

impl Seen {
    /// Whether the successor went on as if the zombie had been done before it began: it had a fence
    /// still to open, and had not read behind it.
    fn is_as_good_as(&self, serial: &Self) -> bool {
        self.opened < self.opened_in_all
            && self.opened_in_all == serial.opened_in_all
            && says(self.ended.as_ref()) == says(serial.ended.as_ref())
            && self.end == serial.end
    }
}

/// One stage with its resources.
struct Scene<'a, R> {
    test: &'a Zombie<R>,
    /// The key of jobs that have none.
    key: Option<Key>,
    stage: Stage,
    resources: R,
}

impl<R: Clone> Scene<'_, R> {
    async fn enqueue(&self, job: &Result<NewJob>) -> Result<()> {
        let mut job = match job {
            Ok(job) => job.clone(),
            Err(error) => return Err(error.duplicate()),
        };
        let own = self.test.key.clone().or(job.exclusive);
        job.exclusive = own.or_else(|| self.key.clone());
        self.stage.enqueue(job).await
    }

    async fn claim(&self) -> Result<Actor> {
        let job = self.test.job.as_ref();
        let queue = job.map_or("default", |job| job.queue.as_str());
        let handle = |worker: Worker| (self.test.handle)(self.resources.clone(), worker, queue);
        self.stage.claim(handle).await
    }

    /// The handler stands still at an await point, its lease has run out, and its successor has
    /// one.
    async fn replaced(&self, point: usize, heir: Heir) -> Result<(Actor, Actor)> {
        let mut first = self.claim().await?;
        first.go_to(point).await;
        if heir == Heir::NextJob {
            self.enqueue(&self.test.next).await?;
            self.stage.cancel(&first).await?;
        }
        self.stage.expire(&first);
        let second = self.claim().await?;
        Ok((first, second))
    }

    /// Runs a handler to its end, and tells its stops: the last await point before each change that
    /// the watches see, each fence that it opens, and its end. Whatever it has read by then it has
    /// not acted on yet. None if it does not end.
    async fn walk(&self, actor: &mut Actor) -> Option<Vec<usize>> {
        let mut stops = Vec::new();
        let mut seen = None;
        for point in 1..MOST_POINTS {
            if actor.reach(point).await? == Step::Returned {
                stops.extend(seen.map(|_| point - 1));
                return Some(stops);
            }
            let now = Some((actor.opened(), self.look()));
            if seen.is_some() && seen != now {
                stops.push(point - 1);
            }
            seen = now;
        }
        None
    }

    /// What the watches see.
    fn look(&self) -> Vec<String> {
        let watches = self.test.watches.iter();
        let mut seen: Vec<_> = watches.map(|watch| (watch.look)(&self.resources)).collect();
        let text = |job: &NewJob| format!("{} {}", job.kind, String::from_utf8_lossy(&job.payload));
        let mut enqueued: Vec<_> = self.stage.enqueued().iter().map(text).collect();
        enqueued.sort();
        seen.push(format!("{enqueued:?}"));
        seen
    }
}

impl Actor {
    /// Goes to an await point. None if it gets neither there nor to its end.
    async fn reach(&mut self, point: usize) -> Option<Step> {
        tokio::time::timeout(LONGEST_RUN, self.go_to(point))
            .await
            .ok()
    }

    /// Runs to its end, and settles. None if it does not end.
    async fn finish(&mut self) -> Option<Ended> {
        match self.reach(MOST_POINTS).await {
            Some(Step::Returned) => self.settle().await,
            _ => None,
        }
    }

    /// Is thawed, and goes on as far as it can. It settles nothing: a store would refuse it.
    async fn wake(&mut self) {
        self.thaw();
        self.reach(MOST_POINTS).await;
    }
}

fn says(ended: Option<&Ended>) -> String {
    ended.map_or_else(
        || "it has not ended after a day of virtual time".to_owned(),
        Ended::to_string,
    )
}

/// What the test's thread and its watchdog share.
struct Shared {
    /// Rises with every poll.
    pulse: Arc<AtomicU64>,
    /// Where the handler is being frozen; 0 while it is not.
    at: AtomicUsize,
    report: Mutex<Report>,
}

impl Default for Shared {
    fn default() -> Self {
        let report = Report {
            points: 0,
            runs: 0,
            faults: Vec::new(),
        };
        Self {
            pulse: Arc::default(),
            at: AtomicUsize::new(0),
            report: Mutex::new(report),
        }
    }
}

impl Shared {
    /// One more zombie was made.
    fn made(&self) {
        lock(&self.report).runs += 1;
    }

    fn frozen(&self) -> Option<FrozenAt> {
        let at = self.at.load(Ordering::Relaxed);
        match at {
            0 => None,
            at if at > lock(&self.report).points => Some(FrozenAt::Return),
            at => Some(FrozenAt::Await(at)),
        }
    }

    fn must_complete(&self, frozen: FrozenAt, ended: Option<&Ended>) {
        if ended != Some(&Ended::Completed) {
            self.fault(FaultKind::Failed, Some(frozen), None, says(ended));
        }
    }

    fn fault(
        &self,
        kind: FaultKind,
        frozen: Option<FrozenAt>,
        resource: Option<&str>,
        detail: String,
    ) {
        lock(&self.report).note(Fault {
            kind,
            frozen,
            resource: resource.map(str::to_owned),
            detail,
        });
    }
}

/// A runtime for each scene: what a handler has spawned ends with it.
fn on_virtual_time<T>(scene: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .map_err(|e| {
            let why = "the runtime did not start";
            leasehold::Error::new(leasehold::ErrorKind::Unavailable, why).caused_by(e)
        })?;
    runtime.block_on(scene)
}
