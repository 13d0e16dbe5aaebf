//! One history of many processes.
//!
//! All of them append to one file: each call is a line when it is sent and a line when it is
//! answered, so the order of the lines is the order of real time. A process that is killed leaves
//! calls without an answer, which is what happened. The file is in the format of the shared
//! recorder, and the shared checker judges it.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::clock::{Clock as _, SystemClock, Timestamp};
use leasehold::inspect::{Query, View};
use leasehold::job::{Namespace, QueueName};
use leasehold::lease::Cause;
use leasehold::lease::Verdict;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, SessionId, SettleRequest,
    Store,
};
use leasehold::{FencingToken, JobId, Result, async_trait};
use leasehold_conformance::RecordingStore;
use leasehold_conformance::checker::{Rule, Violation, check};
use leasehold_conformance::history::{Answer, Ending, Event, Final, History, Op, What};

use crate::support::{Fate, Faulty};
use crate::table::Row;

/// Where one process writes.
#[derive(Clone)]
pub(crate) struct Log {
    file: Arc<File>,
    process: u32,
    calls: Arc<AtomicU64>,
}

impl Log {
    pub(crate) fn open(path: &Path, process: u32) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Self {
            file: Arc::new(file.unwrap()),
            process,
            calls: Arc::default(),
        }
    }

    /// A number that no other call of any process has.
    fn call(&self) -> u64 {
        u64::from(self.process) << 40 | self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn write(&self, call: u64, what: What) {
        let event = Event {
            at: 0,
            process: self.process,
            call,
            clock: Some(SystemClock.now()),
            what,
        };
        let mut line = serde_json::to_vec(&event).unwrap();
        line.push(b'\n');
        // In one write: lines of several processes do not mix.
        (&*self.file).write_all(&line).unwrap();
    }

    /// Notes what a fenced resource is asked, and what it says.
    pub(crate) async fn fence<T>(
        &self,
        op: Op,
        ask: impl Future<Output = T>,
        accepted: impl FnOnce(&T) -> bool,
    ) -> T {
        let call = self.call();
        self.write(call, What::Invoke(op));
        let said = ask.await;
        let accepted = accepted(&said);
        self.write(call, What::Ok(Answer::Fence { accepted }));
        said
    }
}

/// Notes every call to a store.
#[derive(Clone)]
pub(crate) struct Journal {
    inner: Arc<dyn Store>,
    log: Log,
}

impl Journal {
    pub(crate) fn new(inner: Arc<dyn Store>, log: Log) -> Self {
        Self { inner, log }
    }

    /// The shared recorder writes one call at a time; its first word is on disk before the store
    /// hears of the call, and the second before the caller hears of the answer.
    async fn noted<T, F>(&self, send: impl FnOnce(RecordingStore) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let (history, call) = (History::new(), self.log.call());
        let note = {
            let (log, history) = (self.log.clone(), history.clone());
            move |at: usize| log.write(call, history.events().swap_remove(at).what)
        };
        let first = note.clone();
        let gate = Faulty::new(Arc::clone(&self.inner), move |_| {
            first(0);
            Fate::Pass
        });
        let recorder = RecordingStore::new(Arc::new(gate), history, self.log.process);
        let answer = send(recorder).await;
        note(1);
        answer
    }
}

#[async_trait]
impl Store for Journal {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn namespace(&self) -> Namespace {
        self.inner.namespace()
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        let inner = self.inner.dedicated().await?;
        Ok(Arc::new(Self::new(inner, self.log.clone())))
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.noted(|to| async move { to.open_session().await })
            .await
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        self.noted(|to| async move { to.enqueue(request).await })
            .await
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        self.noted(|to| async move { to.claim(request).await })
            .await
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        self.noted(|to| async move { to.renew(beats).await }).await
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        self.noted(|to| async move { to.settle(request).await })
            .await
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        self.noted(|to| async move { to.checkpoint(request).await })
            .await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        self.noted(|to| async move { to.reap(request).await }).await
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        self.noted(|to| async move { to.control(request).await })
            .await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.inner.inspect(query).await
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        self.inner.wait(queues, suspects, limit).await
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        self.noted(|to| async move { to.prune(request).await })
            .await
    }
}

/// The history of all processes.
pub(crate) fn read(path: &Path) -> Vec<Event> {
    let text = std::fs::read_to_string(path).unwrap();
    let events = text.lines().enumerate().map(|(at, line)| {
        // A killed process may leave half a line; the next one's begins behind it.
        let whole = line.rfind("{\"at\":").map_or(line, |start| &line[start..]);
        let event: Event = serde_json::from_str(whole).unwrap_or_else(|e| panic!("{e}: {line}"));
        Event {
            at: at as u64,
            ..event
        }
    });
    events.collect()
}

/// What a history shows, counted and judged.
pub(crate) struct Judgement {
    pub(crate) row: Row,
    pub(crate) violations: Vec<Violation>,
}

impl Judgement {
    pub(crate) fn of(events: &[Event], last: &Final) -> Self {
        let violations = check(events, Some(last));
        let count = |rules: &[Rule]| {
            let hits = violations.iter().filter(|v| rules.contains(&v.rule));
            hits.count() as u64
        };
        let row = Row {
            acknowledged: acknowledged(events),
            lost: count(&[Rule::JobLost, Rule::WriteLost, Rule::CheckpointLost]),
            duplicated: duplicated(events),
            refused: events.iter().map(refused).sum(),
            regressions: count(&[
                Rule::TokenWentBack,
                Rule::TokenIssuedTwice,
                Rule::StaleTokenAccepted,
                Rule::CheckpointWentBack,
            ]),
            takeovers: takeovers(events),
            control: String::new(),
        };
        Self { row, violations }
    }

    pub(crate) fn broke(&self, rule: Rule) -> usize {
        let hits = self.violations.iter().filter(|v| v.rule == rule);
        hits.count()
    }

    /// No rule is broken.
    pub(crate) fn assert_sound(&self, case: &str) {
        let text: Vec<String> = self.violations.iter().map(ToString::to_string).collect();
        assert!(text.is_empty(), "{case}:\n{}", text.join("\n"));
        self.row.assert_clean(case);
    }
}

/// Jobs that were said to be stored, and writes that were said to be done.
fn acknowledged(events: &[Event]) -> u64 {
    let mut jobs: HashSet<JobId> = HashSet::new();
    for event in events {
        if let What::Ok(Answer::Enqueued(answers)) = &event.what {
            jobs.extend(answers.iter().map(|answer| answer.id()));
        }
    }
    jobs.len() as u64
}

/// Jobs whose completion was accepted under more than one token.
fn duplicated(events: &[Event]) -> u64 {
    let mut done: HashMap<JobId, usize> = HashMap::new();
    for (job, _) in accepted(events) {
        *done.entry(job).or_default() += 1;
    }
    done.values().filter(|tokens| **tokens > 1).count() as u64
}

/// The completions that were accepted, each once.
pub(crate) fn accepted(events: &[Event]) -> HashSet<(JobId, FencingToken)> {
    let mut asked = HashMap::new();
    let mut done = HashSet::new();
    for event in events {
        match &event.what {
            What::Invoke(Op::Settle(note)) => {
                asked.insert(event.call, note);
            }
            What::Ok(Answer::Settled(verdicts)) => {
                let Some(note) = asked.get(&event.call) else {
                    continue;
                };
                for ((receipt, ending), verdict) in note.settlements.iter().zip(verdicts) {
                    if *ending == Ending::Complete && verdict.is_held() {
                        done.insert((receipt.job, receipt.token));
                    }
                }
            }
            _ => {}
        }
    }
    done
}

/// Refusals in one answer. Not of renewals: they are refused for what was settled meanwhile, too.
fn refused(event: &Event) -> u64 {
    let What::Ok(answer) = &event.what else {
        return 0;
    };
    let refused = match answer {
        Answer::Settled(verdicts) => verdicts.iter().filter(|verdict| !verdict.is_held()).count(),
        Answer::Checkpointed(answers) => {
            let fenced = answers.iter().filter(|a| **a == Checkpointed::Fenced);
            fenced.count()
        }
        Answer::Fence { accepted: false } => 1,
        _ => 0,
    };
    refused as u64
}

/// For each lease that ran out: from its owner's last sign of life to the grant of its successor.
fn takeovers(events: &[Event]) -> Vec<Duration> {
    let mut sent: HashMap<u64, (&Op, Timestamp)> = HashMap::new();
    let mut alive: HashMap<FencingToken, (JobId, Timestamp)> = HashMap::new();
    let mut expired: HashMap<JobId, (FencingToken, Timestamp)> = HashMap::new();
    let mut times = Vec::new();
    for event in events {
        let Some(at) = event.clock else { continue };
        match &event.what {
            What::Invoke(op) => {
                sent.insert(event.call, (op, at));
            }
            What::Ok(Answer::Renewed(renewals)) => {
                let Some((Op::Renew { beats }, sent)) = sent.get(&event.call) else {
                    continue;
                };
                for (beat, renewal) in beats.iter().zip(renewals) {
                    let Renewal::Held { fenced, .. } = renewal else {
                        continue;
                    };
                    for token in beat.leases.iter().filter(|token| !fenced.contains(token)) {
                        if let Some((_, last)) = alive.get_mut(token) {
                            *last = *sent;
                        }
                    }
                }
            }
            What::Ok(Answer::Claimed {
                grants,
                expired: over,
            }) => {
                expire(over, &alive, &mut expired);
                let since = sent.get(&event.call).map_or(at, |(_, since)| *since);
                for lease in grants.iter().flat_map(|grant| &grant.leases) {
                    alive.insert(lease.token, (lease.job, since));
                    if let Some((before, last)) = expired.remove(&lease.job)
                        && before < lease.token
                    {
                        times.push(at.since(last));
                    }
                }
            }
            What::Ok(Answer::Reaped(over)) => expire(over, &alive, &mut expired),
            _ => {}
        }
    }
    times
}

fn expire(
    over: &[Expiry],
    alive: &HashMap<FencingToken, (JobId, Timestamp)>,
    expired: &mut HashMap<JobId, (FencingToken, Timestamp)>,
) {
    for expiry in over.iter().filter(|expiry| expiry.cause == Cause::Deadline) {
        if let Some((job, last)) = alive.get(&expiry.token) {
            expired.insert(*job, (expiry.token, *last));
        }
    }
}
