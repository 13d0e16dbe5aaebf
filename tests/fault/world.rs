//! One store, and what its own records say about what happened.

use std::collections::HashSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::clock::Timestamp;
use leasehold::clock::{Clock as _, SystemClock};
use leasehold::inspect::{self, JobView, LeaseFilter, LeaseView, Page, QueueView};
use leasehold::job::{JobState, QueueName};
use leasehold::limits;
use leasehold::store::{SqliteStore, Store};
use leasehold::{Client, Job as _, JobId, NewJob};
use tempfile::TempDir;

use crate::process::{Killed, PATIENCE, Process};
use crate::roles::{Errand, Role, WorkerRole};

/// The term of all leases that are meant to be lost.
pub(crate) const TERM: Duration = Duration::from_secs(1);

pub(crate) struct World {
    pub(crate) client: Client,
    url: String,
    marks: PathBuf,
    started: usize,
    /// A look behind the store.
    server: Option<tokio_postgres::Client>,
    /// Goes last.
    _dir: TempDir,
}

impl World {
    /// On a file of its own.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = dir.path().join("jobs.db");
        Self::at(dir, db)
    }

    /// With the file on another disk.
    pub(crate) fn at(dir: TempDir, db: PathBuf) -> Self {
        let url = format!("sqlite://{}", db.display());
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open(db).unwrap());
        Self::of(dir, url, store)
    }

    /// On the PostgreSQL server of a host.
    pub(crate) async fn on(host: &crate::engine::Host) -> Self {
        let url = host.url();
        let store = crate::crew::open(&url, None).await;
        let mut world = Self::of(tempfile::tempdir().unwrap(), url, store);
        world.server = Some(host.server().client().await);
        world
    }

    /// On the store of a URL, as the client is to see it.
    pub(crate) fn of(dir: TempDir, url: String, store: Arc<dyn Store>) -> Self {
        Self {
            client: Client::new(store),
            url,
            marks: dir.path().to_owned(),
            started: 0,
            server: None,
            _dir: dir,
        }
    }

    /// The file, where the store is one.
    pub(crate) fn db(&self) -> &Path {
        file(&self.url)
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &**self.client.store()
    }

    /// Kills a worker, and waits until all that it has asked for is done or undone: what has
    /// reached a server does not die with its sender.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(
            clippy::unused_async,
            unused_variables,
            reason = "only a server has to be waited for"
        )
    )]
    pub(crate) async fn kill(&self, process: &mut Process, owner: &str) -> Killed {
        let killed = process.kill();
        if let Some(server) = &self.server {
            let busy = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)";
            while server.query_one(busy, &[&owner]).await.unwrap().get(0) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            return Killed {
                not_after: SystemClock.now(),
                ..killed
            };
        }
        killed
    }

    /// A worker with a name of its own, by which a server knows it, too.
    pub(crate) fn role(&mut self, slots: usize) -> WorkerRole {
        self.started += 1;
        let owner = format!("worker-{}", self.started);
        let url = match self.url.split_once('?') {
            Some(_) => format!("{}&application_name={owner}", self.url),
            None => self.url.clone(),
        };
        WorkerRole {
            url,
            marks: self.marks.clone(),
            owner,
            slots,
            term: TERM,
            drain_grace: Duration::from_secs(10),
            flaw: None,
        }
    }

    pub(crate) fn worker(&mut self, slots: usize) -> Process {
        Process::start(&Role::Worker(self.role(slots)))
    }

    pub(crate) async fn enqueue(&self, errands: &[Errand]) -> Vec<JobId> {
        let jobs = errands.iter().map(|errand| NewJob::of(errand).unwrap());
        let jobs = self.client.enqueue_many(jobs).await.unwrap();
        jobs.into_iter()
            .map(leasehold::store::Enqueued::id)
            .collect()
    }

    /// The queue. There must be one: something has been enqueued. A server that does not answer is
    /// asked again.
    pub(crate) async fn look(&self) -> QueueView {
        let name = QueueName::new(Errand::QUEUE).unwrap();
        let start = Instant::now();
        loop {
            match inspect::queue(self.store(), &name).await {
                Ok(view) => return view.expect("something was enqueued"),
                Err(error) => {
                    let patient = error.is_transient() && start.elapsed() < PATIENCE;
                    assert!(patient, "{error}");
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Looks until `check` says so.
    pub(crate) async fn until(&self, what: &str, check: impl Fn(&QueueView) -> bool) -> QueueView {
        let start = Instant::now();
        loop {
            let view = self.look().await;
            if check(&view) {
                return view;
            }
            if start.elapsed() >= PATIENCE {
                let found = self.found().await;
                panic!("waited for {what}: {view:?}; there are {found}");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What is really there, beside what is counted: the two differ when something was lost.
    async fn found(&self) -> String {
        let mut found = Vec::new();
        for state in [JobState::Scheduled, JobState::Ready, JobState::Leased] {
            let jobs = self.jobs(state).await;
            let ids: Vec<String> = jobs.iter().take(8).map(|v| v.job.id.to_string()).collect();
            found.push(format!("{} {state}: {}", jobs.len(), ids.join(" ")));
        }
        found.join("; ")
    }

    /// The live leases of one worker.
    pub(crate) async fn leases(&self, owner: &str) -> Vec<LeaseView> {
        let filter = LeaseFilter {
            owner: Some(owner.into()),
            ..LeaseFilter::default()
        };
        let page = Page::first(limits::PAGE_ROWS);
        let leases = inspect::leases(self.store(), filter, page).await.unwrap();
        leases.rows
    }

    /// All jobs in a state, with their histories.
    pub(crate) async fn jobs(&self, state: JobState) -> Vec<JobView> {
        let queue = QueueName::new(Errand::QUEUE).unwrap();
        let mut page = Page::first(limits::PAGE_ROWS);
        let mut jobs = Vec::new();
        loop {
            let part = inspect::jobs(self.store(), queue.clone(), state, page.clone()).await;
            let part = part.unwrap();
            jobs.extend(part.rows);
            match part.next {
                Some(next) => page.after = Some(next),
                None => return jobs,
            }
        }
    }

    /// The jobs that a handler has worked to their end.
    pub(crate) fn done(&self) -> HashSet<JobId> {
        let lines = std::fs::read_to_string(self.marks.join("done")).unwrap_or_default();
        // Whoever died amid its mark had not done the job: it is done, and marked, again.
        let ids = lines.lines().filter_map(|line| line.split_once(' '));
        ids.filter_map(|(id, _)| id.parse().ok()).collect()
    }

    /// The owners whose processes died of a job, and when on the store's clock.
    pub(crate) fn died(&self) -> Vec<(String, Timestamp)> {
        let lines = std::fs::read_to_string(self.marks.join("died")).unwrap_or_default();
        let died = lines.lines().filter_map(|line| line.split_once(' '));
        died.map(|(owner, at)| {
            let at = Timestamp::from_micros(at.parse().unwrap());
            (owner.to_owned(), at)
        })
        .collect()
    }

    /// What a job left in the resource that nobody guards.
    pub(crate) fn unguarded(&self, job: JobId) -> String {
        std::fs::read_to_string(self.marks.join(job.to_string())).unwrap()
    }

    pub(crate) fn assert_sound(&self) {
        let db = rusqlite::Connection::open(self.db()).unwrap();
        let sound: String = db
            .query_row("PRAGMA integrity_check", [], |row| row.get(0))
            .unwrap();
        assert_eq!(sound, "ok");
    }
}

/// The file of a SQLite store.
pub(crate) fn file(url: &str) -> &Path {
    Path::new(url.strip_prefix("sqlite://").expect("a file"))
}

/// I1, I6 and I9, from the store's own records: every lease ended before the job's next one was
/// granted, under a larger token, and the ledger balances.
pub(crate) fn assert_in_order(queue: &QueueView, jobs: &[JobView]) {
    assert!(queue.ledger.balances(), "{:?}", queue.ledger);
    for view in jobs {
        for pair in view.job.history.windows(2) {
            assert!(
                pair[0].token < pair[1].token && pair[0].ended_at <= pair[1].granted_at,
                "{:?}: {pair:?}",
                view.job.id
            );
        }
    }
}

/// One line, shown even if the case passes.
pub(crate) fn figures(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
