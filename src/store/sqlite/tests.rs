//! Random programs against the model: same answers, same order, same views. Every statement
//! prepares, and none scans a table of jobs.

use std::sync::Arc;
use std::time::Duration;

use super::{SqliteOptions, SqliteStore};
use crate::clock::ManualClock;
use crate::inspect::{LeaseFilter, Page, Query, View};
use crate::job::{JobId, JobState, Kind, NewJob, QueueName};
use crate::lease::{FencingToken, Grant, Nonce, Progress, Receipt};
use crate::store::{
    Beat, Checkpoint, CheckpointRequest, ClaimQueue, ClaimRequest, ControlCommand, ControlRequest,
    EnqueueRequest, LeaseSelect, MemoryStore, Outcome, PruneRequest, ReapRequest, RequestId,
    Select, SessionId, SettleRequest, Settlement, Store,
};

struct Pair {
    memory: MemoryStore,
    sqlite: SqliteStore,
    clock: ManualClock,
    sessions: (SessionId, SessionId),
    seq: u64,
    random: fastrand::Rng,
    jobs: Vec<JobId>,
    grants: Vec<Grant>,
}

const QUEUES: [&str; 3] = ["a", "b", "c"];

impl Pair {
    async fn new(seed: u64, dir: &std::path::Path) -> Self {
        let clock = ManualClock::default();
        let memory = MemoryStore::with_clock(clock.clone());
        let options = SqliteOptions::new().clock(clock.clone()).inline();
        let options = options.synchronous_normal();
        let sqlite = SqliteStore::with(dir.join(format!("{seed}.db")), options).unwrap();
        let sessions = (
            memory.open_session().await.unwrap(),
            sqlite.open_session().await.unwrap(),
        );
        Self {
            memory,
            sqlite,
            clock,
            sessions,
            seq: 0,
            random: fastrand::Rng::with_seed(seed),
            jobs: Vec::new(),
            grants: Vec::new(),
        }
    }

    fn ids(&mut self) -> (RequestId, RequestId) {
        // Now and then the same id again: then both must give the first answer, or refuse.
        if self.random.u8(..) > 12 {
            self.seq += 1;
        }
        let id = |session| RequestId {
            session,
            lane: 0,
            seq: self.seq,
        };
        (id(self.sessions.0), id(self.sessions.1))
    }

    fn queue(&mut self) -> QueueName {
        QueueName::new(QUEUES[self.random.usize(..QUEUES.len())]).unwrap()
    }

    fn job(&mut self) -> NewJob {
        let payload = vec![7; self.random.usize(..50)];
        let kind = Kind::new(["x", "y"][self.random.usize(..2)]).unwrap();
        let mut job = NewJob::raw(self.queue(), kind, payload);
        let random = &mut self.random;
        if random.bool() {
            job = job.priority(random.u8(..8));
        }
        if random.u8(..4) == 0 {
            job = job.delay(Duration::from_millis(random.u64(..3_000)));
        }
        if random.u8(..4) == 0 {
            job = job.exclusive(format!("e{}", random.u8(..3))).unwrap();
        }
        match random.u8(..8) {
            0 => job = job.unique(format!("u{}", random.u8(..4))).unwrap(),
            1 => {
                let window = Duration::from_millis(1 + random.u64(..4_000));
                job = job
                    .unique_for(format!("u{}", random.u8(..4)), window)
                    .unwrap();
            }
            2 => job = job.retention(Duration::from_millis(random.u64(..2_000))),
            3 => job.options.term = Some(Duration::from_nanos(1_500_000_700)),
            4 => job.options.max_expiries = 3,
            5 => job = job.header("trace", "1"),
            _ => {}
        }
        job
    }

    fn receipt(&mut self) -> Option<Receipt> {
        let grant = self.random.usize(..self.grants.len().max(1));
        let grant = self.grants.get(grant)?;
        let lease = &grant.leases[self.random.usize(..grant.leases.len())];
        let mut receipt = grant.receipt(lease);
        match self.random.u8(..30) {
            0 => receipt.nonce = Nonce::from_bytes([9; 16]),
            1 => receipt.token = FencingToken::new(receipt.token.get() + 1),
            2 => receipt.job = JobId::generate(),
            3 => receipt.queue = self.queue(),
            _ => {}
        }
        Some(receipt)
    }

    fn select(&mut self) -> Select {
        if self.random.bool() && !self.jobs.is_empty() {
            return Select::Job(self.jobs[self.random.usize(..self.jobs.len())]);
        }
        Select::State {
            queue: self.queue(),
            state: JobState::ALL[self.random.usize(..6)],
            max: 1 + self.random.usize(..4),
        }
    }

    async fn step(&mut self) -> String {
        let (a, b) = self.ids();
        macro_rules! both {
            ($verb:ident, $request:expr) => {{
                let request = $request;
                let (mut one, mut two) = (request.clone(), request.clone());
                one.request = a;
                two.request = b;
                let one = self.memory.$verb(one).await;
                let two = self.sqlite.$verb(two).await;
                let text = format!("{request:?} -> {one:?}");
                match (&one, &two) {
                    (Ok(x), Ok(y)) => assert_eq!(x, y, "{text}"),
                    (Err(x), Err(y)) => assert_eq!(x.kind(), y.kind(), "{text}"),
                    _ => panic!("{text} but {two:?}"),
                }
                (text, two)
            }};
        }
        match self.random.u8(..100) {
            0..25 => {
                let count = 1 + self.random.usize(..6);
                let mut jobs: Vec<_> = (0..count)
                    .map(|_| (JobId::generate(), self.job()))
                    .collect();
                if self.random.u8(..5) == 0 && !self.jobs.is_empty() {
                    // An id that is or was there already.
                    jobs[0].0 = self.jobs[self.random.usize(..self.jobs.len())];
                }
                self.jobs.extend(jobs.iter().map(|(id, _)| *id));
                let jobs = jobs.into();
                both!(enqueue, EnqueueRequest { request: a, jobs }).0
            }
            25..45 => self.claim(a, b).await,
            45..55 => self.renew().await,
            55..72 => {
                let count = 1 + self.random.usize(..5);
                let settlements = (0..count).filter_map(|_| self.settlement()).collect();
                let request = SettleRequest {
                    request: a,
                    settlements,
                };
                both!(settle, request).0
            }
            72..77 => {
                let checkpoints = self.receipt().into_iter().map(|receipt| Checkpoint {
                    receipt,
                    seq: self.random.u64(..4),
                    bytes: vec![1; self.random.usize(..9)].into(),
                });
                let checkpoints = checkpoints.collect();
                let request = CheckpointRequest {
                    request: a,
                    checkpoints,
                };
                both!(checkpoint, request).0
            }
            77..80 => {
                let max = 1 + self.random.usize(..6);
                both!(reap, ReapRequest { request: a, max }).0
            }
            80..90 => {
                let command = self.command();
                let request = ControlRequest {
                    request: a,
                    actor: "me".into(),
                    reason: "why".into(),
                    command,
                };
                both!(control, request).0
            }
            90..93 => {
                let request = PruneRequest {
                    request: a,
                    overdue: Duration::from_millis(self.random.u64(..500)),
                    max: 1 + self.random.usize(..5),
                };
                both!(prune, request).0
            }
            _ => {
                let by = Duration::from_micros(self.random.u64(..1_200_000));
                self.clock.advance(by);
                format!("{by:?} later")
            }
        }
    }

    fn settlement(&mut self) -> Option<Settlement> {
        let receipt = self.receipt()?;
        let delay = Duration::from_millis(self.random.u64(..2_000));
        let reason = "boom".to_owned();
        let outcome = match self.random.u8(..9) {
            0..3 => Outcome::Complete {
                result: self.random.bool().then(|| vec![3].into()),
            },
            3 => Outcome::Retry { delay, reason },
            4 => Outcome::Surrender { delay, mark: None },
            5 => Outcome::Surrender {
                delay: Duration::ZERO,
                mark: None,
            },
            6 => Outcome::Surrender {
                delay: Duration::ZERO,
                mark: Some(FencingToken::new(
                    receipt.token.get() + self.random.u64(..9_000),
                )),
            },
            7 => Outcome::Decline { delay, reason },
            _ => Outcome::Bury { reason },
        };
        Some(Settlement { receipt, outcome })
    }

    fn command(&mut self) -> ControlCommand {
        let (queue, jobs) = (self.queue(), self.select());
        match self.random.u8(..9) {
            0 => ControlCommand::Pause(queue),
            1 | 2 => ControlCommand::Resume(queue),
            3 => ControlCommand::Configure {
                queue,
                relaxed: self.random.bool(),
            },
            4 => ControlCommand::Cancel(jobs),
            5 => ControlCommand::Purge(jobs),
            6 => ControlCommand::Reschedule {
                jobs,
                delay: Duration::from_millis(self.random.u64(..1_500)),
            },
            7 => ControlCommand::RetryDead(jobs),
            _ => ControlCommand::Revoke(match jobs {
                Select::Job(id) => LeaseSelect::Job(id),
                Select::State { .. } if self.random.bool() => LeaseSelect::Owner("o1".into()),
                Select::State { .. } => LeaseSelect::Task("t1".into()),
            }),
        }
    }

    async fn claim(&mut self, a: RequestId, b: RequestId) -> String {
        let owner: Arc<str> = ["o1", "o2", "o3"][self.random.usize(..3)].into();
        let task: Arc<str> = ["t1", "t2", "t3"][self.random.usize(..3)].into();
        let mut queues = QUEUES.map(|name| ClaimQueue {
            queue: QueueName::new(name).unwrap(),
            term: Duration::from_secs(1),
            max_lifetime: Duration::from_secs(3),
        });
        self.random.shuffle(&mut queues);
        let mut request = ClaimRequest {
            request: a,
            owner,
            task,
            nonce: Nonce::from_bytes(std::array::from_fn(|_| self.random.u8(..))),
            queues: queues[..=self.random.usize(..3)].to_vec(),
            max: 1 + self.random.usize(..9),
            admit_suspect: self.random.bool(),
        };
        let one = self.memory.claim(request.clone()).await;
        request.request = b;
        let two = self.sqlite.claim(request.clone()).await;
        let text = format!("{request:?} -> {one:?}");
        match (one, two) {
            (Ok(x), Ok(y)) => {
                assert_eq!(x, y, "{text}");
                let grants = y
                    .grants
                    .into_iter()
                    .filter(|grant| !grant.leases.is_empty());
                self.grants.extend(grants);
            }
            (Err(x), Err(y)) => assert_eq!(x.kind(), y.kind(), "{text}"),
            (_, two) => panic!("{text} but {two:?}"),
        }
        text
    }

    async fn renew(&mut self) -> String {
        let mut beats = Vec::new();
        for _ in 0..=self.random.usize(..3) {
            let at = self.random.usize(..self.grants.len().max(1));
            let Some(grant) = self.grants.get(at) else {
                continue;
            };
            let mut beat = Beat::of(grant);
            if self.random.bool() {
                let at = self.random.usize(..beat.leases.len());
                beat.lapse.push(beat.leases.remove(at));
            }
            if self.random.bool() {
                let shown = Progress {
                    done: self.random.u64(..),
                    total: None,
                    note: "n".into(),
                };
                beat.progress
                    .extend(beat.leases.first().map(|t| (*t, shown)));
            }
            beats.push(beat);
        }
        let one = self.memory.renew(beats.clone()).await.unwrap();
        let two = self.sqlite.renew(beats.clone()).await.unwrap();
        assert_eq!(one, two, "{beats:?}");
        format!("{beats:?} -> {one:?}")
    }

    /// All rows of a query, page by page.
    async fn rows(store: &dyn Store, mut query: Query) -> Vec<String> {
        let mut rows = Vec::new();
        loop {
            let view = store.inspect(query.clone()).await.unwrap();
            let next = match view {
                View::Leases(page) => {
                    rows.extend(page.rows.iter().map(|row| format!("{row:?}")));
                    page.next
                }
                View::Jobs(page) => {
                    rows.extend(page.rows.iter().map(|row| format!("{row:?}")));
                    page.next
                }
                View::Audit(page) => {
                    rows.extend(page.rows.iter().map(|row| format!("{row:?}")));
                    page.next
                }
                other => {
                    rows.push(format!("{other:?}"));
                    None
                }
            };
            let Some(after) = next else { return rows };
            match &mut query {
                Query::Leases { page, .. } | Query::Jobs { page, .. } | Query::Audit { page } => {
                    page.after = Some(after);
                }
                _ => return rows,
            }
        }
    }

    async fn compare(&mut self, text: &str) {
        let page = Page::first(1 + self.random.usize(..7));
        let mut queries = vec![
            Query::Queues,
            Query::Audit { page: page.clone() },
            Query::Leases {
                filter: LeaseFilter {
                    owner: self.random.bool().then(|| "o1".into()),
                    task: self.random.bool().then(|| "t1".into()),
                    queue: self.random.bool().then(|| self.queue()),
                },
                page: page.clone(),
            },
        ];
        for queue in QUEUES {
            queries.extend(JobState::ALL.map(|state| Query::Jobs {
                queue: QueueName::new(queue).unwrap(),
                state,
                page: page.clone(),
            }));
        }
        for _ in 0..3 {
            if !self.jobs.is_empty() {
                let at = self.random.usize(..self.jobs.len());
                queries.push(Query::Job(self.jobs[at]));
            }
        }
        for query in queries {
            let one = Self::rows(&self.memory, query.clone()).await;
            let two = Self::rows(&self.sqlite, query.clone()).await;
            assert_eq!(one, two, "{query:?} after {text}");
        }
    }
}

#[tokio::test]
async fn random_programs_agree_with_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let campaign = std::env::var_os("LEASEHOLD_CAMPAIGN").is_some();
    for seed in 0..if campaign { 300 } else { 8 } {
        let mut pair = Pair::new(seed, dir.path()).await;
        for step in 0..150 {
            let text = pair.step().await;
            if step % 5 == 0 {
                pair.compare(&format!("seed {seed} step {step}: {text}"))
                    .await;
            }
        }
        let queues = crate::inspect::queues(&pair.sqlite).await.unwrap();
        assert!(
            queues.iter().all(|view| view.ledger.balances()),
            "seed {seed}"
        );
    }
}

#[test]
fn every_statement_prepares_and_none_scans_a_table_of_jobs() {
    let db = rusqlite::Connection::open_in_memory().unwrap();
    db.execute_batch(include_str!("schema.sql")).unwrap();
    let statements = [
        super::claim::STATEMENTS,
        super::control::STATEMENTS,
        super::enqueue::STATEMENTS,
        super::grant::STATEMENTS,
        super::inspect::STATEMENTS,
        super::place::STATEMENTS,
        super::prune::STATEMENTS,
        super::reap::STATEMENTS,
        super::settle::STATEMENTS,
        super::wait::STATEMENTS,
        super::tx::STATEMENTS,
        super::in_tx::STATEMENTS,
    ]
    .concat();
    assert!(statements.len() < super::migrate::CACHED);
    for (name, sql) in &statements {
        db.prepare(sql).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut plan = db.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
        let nulls = vec![rusqlite::types::Null; plan.parameter_count()];
        let steps = plan
            .query_map(rusqlite::params_from_iter(nulls), |row| {
                row.get::<_, String>("detail")
            })
            .unwrap();
        for step in steps.map(Result::unwrap) {
            for table in ["ready", "aside", "records", "notes", "unique", "lanes"] {
                let scan = step.starts_with(&format!("SCAN leasehold_{table}"));
                assert!(!scan, "{name}: {step}");
            }
            // Sorted: the queues, the live grants. Never a line, nor what waits to be deleted.
            let small = *name == "QUEUE_IDS" || name.starts_with("GRANTS_");
            assert!(small || !step.contains("TEMP B-TREE"), "{name}: {step}");
        }
    }
}
