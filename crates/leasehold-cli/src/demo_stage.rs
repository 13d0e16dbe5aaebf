//! The demo's stage: worker processes, what they report, and what the store shows.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;

use super::Trouble;
use super::demo_view::{View, short_id};
use super::demo_worker::{Errand, News};
use leasehold::Client;
use leasehold::clock::{Clock as _, SystemClock, Timestamp};
use leasehold::hooks::monotonic;
use leasehold::inspect::{self, Counts, LeaseFilter, LeaseView, Ledger, Page};
use leasehold::job::{JobId, NewJob, QueueName};
use leasehold::lease::FencingToken;
use leasehold::limits;
use leasehold::store::Enqueued;

/// How often the store is looked at.
const TICK: Duration = Duration::from_millis(50);

/// Far longer than a store has the call of a client in hand, and less than a lease lasts.
const IN_HAND: Duration = Duration::from_millis(250);

/// How long one step of the story may take before the demo gives up on it.
/// None takes three seconds on a machine that has nothing else to do.
const STEP_LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WorkerState {
    Working,
    Killed,
    Frozen,
}

/// The store at one moment.
#[derive(Default)]
pub(super) struct DemoSnapshot {
    pub(super) leases: Vec<LeaseView>,
    pub(super) counts: Counts,
    pub(super) ledger: Ledger,
}

impl DemoSnapshot {
    /// The leases of a worker, counted from 1.
    pub(super) fn of(&self, worker: usize) -> impl Iterator<Item = &LeaseView> {
        let owner = owner(worker);
        self.leases
            .iter()
            .filter(move |lease| *lease.owner == *owner)
    }
}

fn owner(worker: usize) -> String {
    format!("worker-{worker}")
}

pub(super) struct Stage {
    client: Client,
    queue: QueueName,
    url: String,
    slots: usize,
    term: Duration,
    children: Vec<Actor>,
    states: Vec<WorkerState>,
    news: mpsc::UnboundedReceiver<(usize, News)>,
    post: mpsc::UnboundedSender<(usize, News)>,
    /// All that were enqueued.
    pub(super) jobs: Vec<JobId>,
    /// Whether more jobs come when none is left in line: whom a story is told about must be at
    /// work, however slowly a busy machine gets to that point.
    pub(super) more_to_do: bool,
    pub(super) view: View,
    pub(super) reports: Reports,
}

/// What the workers have told.
#[derive(Default)]
pub(super) struct Reports {
    /// Who started a job last.
    pub(super) started: HashMap<JobId, usize>,
    /// Jobs that a worker was refused to settle.
    pub(super) refused: HashSet<(usize, JobId)>,
}

/// A worker that can no longer renew.
pub(super) struct Gone {
    pub(super) worker: usize,
    pub(super) since: Timestamp,
    /// What it held.
    pub(super) leases: Vec<LeaseView>,
}

/// A worker process. It ends with its guard, frozen or not.
struct Actor(Child);

impl Actor {
    fn signal(&self, signal: Signal) -> Result<(), Trouble> {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).map_err(|error| Trouble::Failed(format!("{signal:?}: {error}")))
    }

    /// Whether it ended of itself within `limit`.
    async fn ends_within(&mut self, limit: Duration) -> bool {
        let until = monotonic() + limit;
        while monotonic() < until {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // SIGKILL ends a stopped process, too.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

impl Stage {
    pub(super) fn new(
        client: Client,
        queue: QueueName,
        url: String,
        workers: usize,
        slots: usize,
        term: Duration,
    ) -> Self {
        let (post, news) = mpsc::unbounded_channel();
        Self {
            client,
            queue,
            url,
            slots,
            term,
            children: Vec::new(),
            states: vec![WorkerState::Working; workers],
            news,
            post,
            jobs: Vec::new(),
            more_to_do: true,
            view: View::new(workers),
            reports: Reports::default(),
        }
    }

    /// Starts the workers, each a process of this executable.
    pub(super) fn start(&mut self) -> Result<(), Trouble> {
        let program: PathBuf = std::env::current_exe()?;
        let mut group = 0;
        for worker in 1..=self.states.len() {
            let mut child = Command::new(&program)
                .arg("demo-worker")
                // It may hold a password, and everybody can read arguments.
                .env("LEASEHOLD_URL", &self.url)
                .args(["--owner", &owner(worker)])
                .args(["--slots", &self.slots.to_string()])
                .args(["--term-ms", &self.term.as_millis().to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                // Zero makes a group, which the others join.
                .process_group(group)
                .spawn()?;
            if group == 0 {
                group = child.id() as i32;
            }
            let stdout = child.stdout.take();
            self.children.push(Actor(child));
            let post = self.post.clone();
            std::thread::spawn(move || {
                let lines = stdout
                    .into_iter()
                    .flat_map(|out| BufReader::new(out).lines());
                for news in lines.map_while(Result::ok) {
                    if let Ok(news) = serde_json::from_str(&news) {
                        let _ = post.send((worker, news));
                    }
                }
            });
        }
        Ok(())
    }

    pub(super) async fn enqueue(&mut self, jobs: u64) -> Result<(), Trouble> {
        // A few hundred milliseconds each, and not all the same.
        let job = |n: u64| {
            let millis = 300 + 70 * (n % 5);
            // Kept once completed, so that each can be looked for.
            NewJob::of(&Errand { millis }).map(|job| job.retention(Duration::from_secs(3600)))
        };
        let jobs: Result<Vec<_>, _> = (0..jobs).map(job).collect();
        let enqueued = self.client.enqueue_many(jobs?).await?;
        self.jobs.extend(enqueued.into_iter().map(Enqueued::id));
        Ok(())
    }

    pub(super) async fn look(&self) -> Result<DemoSnapshot, Trouble> {
        let store = &**self.client.store();
        let page = Page::first(limits::PAGE_ROWS);
        let leases = inspect::leases(store, LeaseFilter::default(), page).await?;
        let queue = inspect::queue(store, &self.queue).await?;
        let (counts, ledger) = queue
            .map(|view| (view.counts, view.ledger))
            .unwrap_or_default();
        Ok(DemoSnapshot {
            leases: leases.rows,
            counts,
            ledger,
        })
    }

    /// Shows what happens until `done` says so, and returns what it saw last.
    pub(super) async fn watch_until(
        &mut self,
        what: &str,
        mut done: impl FnMut(&DemoSnapshot, &Reports) -> bool,
    ) -> Result<DemoSnapshot, Trouble> {
        let until = monotonic() + STEP_LIMIT;
        loop {
            self.listen();
            let seen = self.look().await?;
            self.view.draw(&seen, &self.states, self.term);
            if done(&seen, &self.reports) {
                return Ok(seen);
            }
            if self.more_to_do && seen.counts.ready == 0 {
                let slots = self.slots * self.states.len();
                self.enqueue(slots as u64).await?;
            }
            if monotonic() > until {
                return Err(Trouble::Failed(format!(
                    "demo: waited {} s for {what}",
                    STEP_LIMIT.as_secs()
                )));
            }
            for (worker, child) in self.children.iter_mut().enumerate() {
                if self.states[worker] == WorkerState::Working
                    && !matches!(child.0.try_wait(), Ok(None))
                {
                    let worker = worker + 1;
                    return Err(Trouble::Failed(format!(
                        "demo: worker {worker} ended early"
                    )));
                }
            }
            tokio::time::sleep(TICK).await;
        }
    }

    pub(super) async fn watch_for(&mut self, time: Duration) -> Result<(), Trouble> {
        let until = monotonic() + time;
        self.watch_until("time to pass", |_, _| monotonic() >= until)
            .await
            .map(drop)
    }

    /// Takes in what the workers have told since.
    fn listen(&mut self) {
        while let Ok((worker, news)) = self.news.try_recv() {
            let paint = self.view.paint();
            match news {
                News::Started { job } => drop(self.reports.started.insert(job, worker)),
                News::Expired { owner, job } => self.view.detail(&format!(
                    "{}: {}'s lease on job {} has expired; worker {worker} noticed",
                    paint.bad("expired"),
                    owner.replace('-', " "),
                    short_id(job),
                )),
                News::Fenced { verb, job, token } => {
                    if verb == "settle" {
                        self.reports.refused.insert((worker, job));
                    }
                    self.view.detail(&format!(
                        "{}: worker {worker} wanted to {verb} job {} with token {token}, \
                         which is no longer the newest; refused",
                        paint.bad("FENCED"),
                        short_id(job),
                    ));
                }
            }
        }
    }

    /// Kills a worker that is in mid-job.
    pub(super) async fn kill(&mut self, worker: usize) -> Result<Gone, Trouble> {
        self.watch_until("a worker in mid-job", |seen, _| seen.of(worker).count() > 1)
            .await?;
        let since = SystemClock.now();
        let child = &mut self.children[worker - 1];
        child.0.kill()?;
        child.0.wait()?;
        self.states[worker - 1] = WorkerState::Killed;
        let leases = self.held_by_now(worker).await?;
        Ok(Gone {
            worker,
            since,
            leases,
        })
    }

    /// What a worker holds that does nothing any more. The store may still have calls of it in
    /// hand.
    async fn held_by_now(&mut self, worker: usize) -> Result<Vec<LeaseView>, Trouble> {
        let mut before: Option<HashSet<FencingToken>> = None;
        loop {
            let leases: Vec<_> = self.look().await?.of(worker).cloned().collect();
            let tokens = leases.iter().map(|lease| lease.token).collect();
            if before.as_ref() == Some(&tokens) {
                return Ok(leases);
            }
            before = Some(tokens);
            self.watch_for(IN_HAND).await?;
        }
    }

    /// Freezes a worker that is in mid-job.
    ///
    /// A process that is frozen inside a transaction keeps everybody else from writing until it is
    /// thawed. Nothing is lost then, but there is nothing to see either: so it goes on for a
    /// moment, and is frozen again.
    pub(super) async fn freeze(&mut self, worker: usize) -> Result<Gone, Trouble> {
        for _ in 0..20 {
            self.watch_until("a worker in mid-job", |seen, _| seen.of(worker).count() > 1)
                .await?;
            let since = SystemClock.now();
            self.children[worker - 1].signal(Signal::STOP)?;
            let writes = self.client.store().open_session();
            let writes = tokio::time::timeout(Duration::from_millis(200), writes).await;
            if !matches!(writes, Ok(Ok(_))) {
                self.children[worker - 1].signal(Signal::CONT)?;
                continue;
            }
            let leases = self.held_by_now(worker).await?;
            if leases.len() > 1 {
                self.states[worker - 1] = WorkerState::Frozen;
                return Ok(Gone {
                    worker,
                    since,
                    leases,
                });
            }
            self.children[worker - 1].signal(Signal::CONT)?;
        }
        Err(Trouble::Failed(format!(
            "demo: found no moment to freeze worker {worker}"
        )))
    }

    pub(super) fn thaw(&mut self, worker: usize) -> Result<(), Trouble> {
        self.states[worker - 1] = WorkerState::Working;
        self.children[worker - 1].signal(Signal::CONT)
    }

    /// Lets the workers drain and waits until they are gone.
    pub(super) async fn end(&mut self) {
        for child in &mut self.children {
            drop(child.0.stdin.take());
        }
        for mut child in std::mem::take(&mut self.children) {
            child.ends_within(Duration::from_secs(2)).await;
        }
        self.listen();
        self.view.close();
    }
}
