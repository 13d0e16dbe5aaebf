//! Where a case of the campaign plays: a store, registers, a journal, and a crew to be hired.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::inspect::JobView;
use leasehold::inspect::QueueView;
use leasehold::store::MemoryStore;
use leasehold::{Client, NewJob};
use leasehold::{FencingToken, JobId};
use leasehold_conformance::history::Final;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::crew::{Chore, CrewRole, HandClock};
use crate::journal::accepted;
use crate::journal::{Judgement, read};
use crate::process::Process;
use crate::register::Place;
use crate::roles::Role;
use crate::world::{TERM, World};

pub(crate) struct Stage {
    /// What the supervisor sees; its own calls are in the journal, too.
    pub(crate) world: World,
    url: String,
    clock: Option<PathBuf>,
    journal: PathBuf,
    registers: Place,
    keys: usize,
    hired: u32,
    began: Instant,
}

impl Stage {
    /// On a file of its own.
    pub(crate) async fn sqlite() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
        Self::on(dir, url, None).await
    }

    /// On the store of a URL.
    pub(crate) async fn at(url: impl Into<String>) -> Self {
        Self::on(tempfile::tempdir().unwrap(), url.into(), None).await
    }

    /// On the store of a URL, whose clock is set by hand.
    pub(crate) async fn with_clock(url: impl Into<String>) -> (Self, HandClock) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clock");
        let hand = HandClock::of(&file);
        hand.set(0, 0);
        (Self::on(dir, url.into(), Some(file)).await, hand)
    }

    /// A clock for the roles that are made from now on; the supervisor keeps the host's.
    pub(crate) fn clock_of_its_own(&mut self) -> HandClock {
        let file = self.journal.with_file_name("clock");
        let hand = HandClock::of(&file);
        self.clock = Some(file);
        hand
    }

    async fn on(dir: TempDir, url: String, clock: Option<PathBuf>) -> Self {
        pulse::start();
        let journal = dir.path().join("journal");
        let registers = Place::Sqlite(dir.path().join("registers.db"));
        let blank = Arc::new(MemoryStore::new());
        let mut stage = Self {
            world: World::of(dir, url.clone(), blank),
            url,
            clock,
            journal,
            registers,
            keys: 0,
            hired: 0,
            began: Instant::now(),
        };
        stage.world.client = Client::new(stage.role("supervisor").open().await);
        stage
    }

    /// Empty registers.
    pub(crate) async fn registers(&mut self, keys: usize) {
        for key in self.keys..keys {
            self.registers.create(key).await;
        }
        self.keys = keys;
    }

    pub(crate) fn role(&mut self, owner: &str) -> CrewRole {
        self.hired += 1;
        CrewRole {
            url: self.url.clone(),
            journal: self.journal.clone(),
            number: self.hired,
            owner: owner.to_owned(),
            slots: 8,
            prefetch: 0,
            term: TERM,
            drain_grace: Duration::from_secs(10),
            stall_limit: None,
            clock: self.clock.clone(),
            registers: self.registers.clone(),
            fenced: true,
            new: false,
            flaw: None,
        }
    }

    /// Starts a worker, and waits until it is there.
    pub(crate) async fn hire(role: CrewRole) -> Process {
        let mut process = Process::start(&Role::Crew(role));
        process.hears("ready").await;
        process
    }

    pub(crate) async fn enqueue(&self, chores: &[Chore]) {
        let jobs = chores.iter().map(|chore| {
            let job = NewJob::of(chore).unwrap();
            match chore {
                // Two jobs that touch one register need one key.
                Chore::Add { key, .. } => job.exclusive(key.to_string()).unwrap(),
                _ => job,
            }
        });
        self.world.client.enqueue_many(jobs).await.unwrap();
    }

    /// Waits of up to `millis`.
    pub(crate) async fn waits(&self, count: usize, millis: u64) {
        let wait = || Chore::Wait {
            millis: fastrand::u64(0..=millis),
        };
        let waits: Vec<_> = (0..count).map(|_| wait()).collect();
        self.enqueue(&waits).await;
    }

    /// Waits until every job that there ever was is completed.
    pub(crate) async fn drained(&self) -> QueueView {
        let all = |view: &QueueView| view.counts.completed == view.ledger.enqueued;
        self.world.until("everything to be completed", all).await
    }

    /// Asks workers to stop, and judges the history of all.
    pub(crate) async fn finish(&self, crew: impl IntoIterator<Item = Process>) -> Judgement {
        let mut crew: Vec<Process> = crew.into_iter().collect();
        for process in &crew {
            process.signal(Signal::TERM);
        }
        for process in &mut crew {
            assert!(process.ends().await.success(), "a worker failed");
        }
        let mut last = Final::of(self.world.store()).await;
        for key in 0..self.keys {
            let names = self.registers.connect(key).await.read().await;
            let names = names.iter().map(u64::to_string).collect();
            last.resources.insert(key.to_string(), names);
        }
        Judgement::of(&read(&self.journal), &last)
    }

    /// Completions that were accepted, and of which what is left knows nothing: the job is gone, or
    /// was completed under another token.
    pub(crate) fn settlements_lost(&self, left: &[JobView]) -> u64 {
        let kept: HashSet<(JobId, FencingToken)> = left
            .iter()
            .filter_map(|view| Some((view.job.id, view.job.history.last()?.token)))
            .collect();
        let accepted = accepted(&read(&self.journal));
        accepted.difference(&kept).count() as u64
    }

    /// The longest that the machine has kept somebody waiting who had little to do.
    pub(crate) fn lag(&self) -> Duration {
        pulse::longest(self.began)
    }

    /// No lease of a live worker has run out, unless the machine stood still for it.
    pub(crate) fn assert_none_expired(&self, case: &str, view: &QueueView, term: Duration) {
        let (expired, lag) = (view.ledger.expired(), self.lag());
        assert!(
            expired == 0 || lag > term / 8,
            "{case}: {expired} expired, lag {lag:?}"
        );
    }

    /// What may come on top of a bound: what the machine needs when it is idle, and for each time
    /// that somebody on the way has to be woken, from the timer to the reply, what this process had
    /// to wait for the processor.
    pub(crate) fn slack(&self) -> Duration {
        pulse::slack(self.began)
    }

    /// The bound on takeovers, where the store stayed up.
    pub(crate) fn assert_prompt(&self, case: &str, judged: &Judgement, term: Duration) {
        let bound = term + self.slack();
        let p99 = judged.row.takeover().map(|[_, p99]| p99);
        assert!(
            p99.is_some_and(|p99| p99 <= bound),
            "{case}: {p99:?}, allowed {bound:?}"
        );
    }
}

/// Feels how long the machine keeps somebody waiting who has little to do. One for all stages.
pub(crate) mod pulse {
    use std::io::Write as _;
    use std::sync::{Mutex, Once};
    use std::time::{Duration, Instant};

    use rustix::time::{ClockId, clock_gettime};

    const SLEEP: Duration = Duration::from_millis(20);
    /// As much as it takes to answer a call.
    const WORK: Duration = Duration::from_millis(2);

    type Waits = Mutex<Vec<(Instant, Duration)>>;

    static LATE: Waits = Mutex::new(Vec::new());
    static SYNCED: Waits = Mutex::new(Vec::new());

    pub(crate) fn start() {
        static START: Once = Once::new();
        START.call_once(|| {
            std::thread::spawn(|| {
                loop {
                    let start = Instant::now();
                    std::thread::sleep(SLEEP);
                    let begun = worked();
                    while worked() < begun + WORK {}
                    let late = start.elapsed().saturating_sub(SLEEP + WORK);
                    LATE.lock().unwrap().push((start, late));
                }
            });
            std::thread::spawn(|| {
                let mut file = tempfile::tempfile().unwrap();
                loop {
                    std::thread::sleep(SLEEP);
                    let start = Instant::now();
                    file.write_all(b"pulse").unwrap();
                    file.sync_data().unwrap();
                    SYNCED.lock().unwrap().push((start, start.elapsed()));
                }
            });
        });
    }

    /// The processor time that this thread has had.
    fn worked() -> Duration {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    /// The longest wait for a processor since then.
    pub(crate) fn longest(since: Instant) -> Duration {
        longest_of(&LATE, since)
    }

    /// What may come on top of a bound that has counted since then: see `Stage::slack`.
    pub(crate) fn slack(since: Instant) -> Duration {
        Duration::from_millis(250) + 3 * longest(since)
    }

    /// The longest wait for a processor or for the disk since then: how long a process that does
    /// its best may have kept silent.
    pub(crate) fn stood_still(since: Instant) -> Duration {
        longest(since).max(longest_of(&SYNCED, since))
    }

    fn longest_of(waits: &Waits, since: Instant) -> Duration {
        let waits = waits.lock().unwrap();
        let waits = waits.iter().rev().take_while(|(start, _)| *start >= since);
        waits.map(|(_, wait)| *wait).max().unwrap_or_default()
    }
}
