//! The reference model: plain code, no durability, any clock.
//!
//! What the other stores do with statements, this one does with maps under one lock. When two stores
//! disagree, this is the one to read first. Its holders die with it, so its tokens need no limit on
//! how far they run ahead of the clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::wake::Wakers;
use super::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, RequestId, SESSION_IDLE,
    SessionId, SettleRequest, Store, bounded,
};
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::inspect::{AuditView, Counts, Ledger, Query, View};
use crate::job::{JobId, JobRecord, JobState, Key, QueueName};
use crate::lease::{FencingToken, Nonce, Progress, Receipt, Verdict};
use crate::limits;
use crate::rules::ends::{LeaseFacts, Next, Step};
use crate::rules::issue::Issuer;
use line::Line;
use place::is_suspects;
use places::Places;

mod checkpoint;
mod claim;
mod control;
mod enqueue;
mod inspect;
mod line;
mod place;
mod places;
mod prune;
mod reap;
mod renew;
mod settle;

/// A store in this process's memory. Clones share it.
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    /// Never held across an await.
    state: Mutex<State>,
    wakers: Wakers,
}

impl MemoryStore {
    /// A store on the host's clock.
    pub fn new() -> Self {
        Self::with_clock(SystemClock)
    }

    /// A store on any clock.
    pub fn with_clock(clock: impl Clock) -> Self {
        let state = State::new(Issuer::without_memory(clock.now()));
        let shared = Shared {
            clock: Arc::new(clock),
            state: Mutex::new(state),
            wakers: Wakers::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn lock(&self) -> (MutexGuard<'_, State>, Timestamp) {
        // A panic under the lock is a bug in this crate; the maps are consistent between calls.
        let state = self
            .shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        (state, self.shared.clock.now())
    }

    /// Runs one mutating verb under its request id.
    fn call<T: Clone>(
        &self,
        request: RequestId,
        remember: fn(T) -> Answer,
        recall: fn(Answer) -> Option<T>,
        apply: impl FnOnce(&mut State, Timestamp) -> Result<T>,
    ) -> Result<T> {
        let (mut state, now) = self.lock();
        let answer = if let Some(first) = state.recall(request, now)? {
            recall(first).ok_or_else(mixed_up)?
        } else {
            let answer = apply(&mut state, now)?;
            state.remember(request, remember(answer.clone()));
            answer
        };
        self.done(state);
        Ok(answer)
    }

    /// The step is done: wakes whoever waits for it, and lets go of what it left.
    fn done(&self, mut state: MutexGuard<'_, State>) {
        for (queue, suspect, jobs) in state.bells.drain(..) {
            self.shared.wakers.wake(&queue, suspect, jobs);
        }
        let gone = std::mem::take(&mut state.gone);
        drop(state);
        drop(gone);
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("clock", &self.shared.clock)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(self.clone()))
    }

    async fn open_session(&self) -> Result<SessionId> {
        let (mut state, now) = self.lock();
        state
            .sessions
            .retain(|_, session| now.since(session.used) <= SESSION_IDLE);
        let id = SessionId::generate();
        state.sessions.insert(
            id,
            Session {
                used: now,
                lanes: HashMap::new(),
            },
        );
        Ok(id)
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.validate().map_err(at(Verb::Enqueue))?;
        // Before the lock is taken: others need not wait for it.
        let mut jobs = Arc::unwrap_or_clone(request.jobs);
        enqueue::own_payloads(&mut jobs);
        self.call(
            request.request,
            Answer::Enqueue,
            |answer| {
                if let Answer::Enqueue(first) = answer {
                    Some(first)
                } else {
                    None
                }
            },
            |state, now| Ok(state.enqueue(jobs, now)),
        )
        .map_err(at(Verb::Enqueue))
    }

    async fn claim(&self, mut request: ClaimRequest) -> Result<Claimed> {
        request.validate().map_err(at(Verb::Claim))?;
        let settled = match request.settle.take() {
            Some(settle) => self.settle(settle).await?,
            None => Vec::new(),
        };
        let (mut state, now) = self.lock();
        let mut claimed = match state
            .recall(request.request, now)
            .map_err(at(Verb::Claim))?
        {
            Some(Answer::Claim(first)) => state.claim_again(&first, &request, now),
            Some(_) => return Err(at(Verb::Claim)(mixed_up())),
            None => {
                let claimed = state.claim(&request, now);
                let grants = claimed.grants.iter().map(|g| (g.id, g.granted)).collect();
                let first = FirstClaim {
                    grants,
                    expired: claimed.expired.clone(),
                };
                state.remember(request.request, Answer::Claim(first));
                claimed
            }
        };
        self.done(state);
        claimed.settled = settled;
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        Beat::validate_all(&beats).map_err(at(Verb::Renew))?;
        let (mut state, now) = self.lock();
        let renewals = beats
            .into_iter()
            .map(|beat| state.renew(beat, now))
            .collect();
        self.done(state);
        Ok(renewals)
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        request.validate().map_err(at(Verb::Settle))?;
        self.call(
            request.request,
            Answer::Settle,
            |answer| {
                if let Answer::Settle(first) = answer {
                    Some(first)
                } else {
                    None
                }
            },
            |state, now| Ok(state.settle(&request.settlements, now)),
        )
        .map_err(at(Verb::Settle))
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        request.validate().map_err(at(Verb::Checkpoint))?;
        self.call(
            request.request,
            Answer::Checkpoint,
            |answer| {
                if let Answer::Checkpoint(first) = answer {
                    Some(first)
                } else {
                    None
                }
            },
            |state, now| Ok(state.checkpoint(request.checkpoints, now)),
        )
        .map_err(at(Verb::Checkpoint))
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        bounded("max", request.max, limits::STEP_JOBS).map_err(at(Verb::Reap))?;
        self.call(
            request.request,
            Answer::Reap,
            |answer| {
                if let Answer::Reap(first) = answer {
                    Some(first)
                } else {
                    None
                }
            },
            |state, now| Ok(state.reap(request.max, now)),
        )
        .map_err(at(Verb::Reap))
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        request.validate().map_err(at(Verb::Control))?;
        self.call(
            request.request,
            Answer::Control,
            |answer| {
                if let Answer::Control(first) = answer {
                    Some(first)
                } else {
                    None
                }
            },
            |state, now| Ok(state.control(&request, now)),
        )
        .map_err(at(Verb::Control))
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        let (state, now) = self.lock();
        state.inspect(&query, now).map_err(at(Verb::Inspect))
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        let bell = {
            let (state, _) = self.lock();
            if state.has_work(queues, suspects) {
                return Ok(());
            }
            self.shared.wakers.sleep(queues, suspects)
        };
        let _ = tokio::time::timeout(limit, bell).await;
        Ok(())
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        bounded("max", request.max, limits::CALL_ITEMS).map_err(at(Verb::Prune))?;
        self.call(
            request.request,
            Answer::Prune,
            |answer| {
                if let Answer::Prune(first) = answer {
                    Some(first)
                } else {
                    None
                }
            },
            |state, now| Ok(state.prune(now.before(request.overdue), request.max)),
        )
        .map_err(at(Verb::Prune))
    }
}

fn at(verb: Verb) -> impl Fn(Error) -> Error {
    move |error| error.during(verb).in_store("memory")
}

fn mixed_up() -> Error {
    Error::invalid(
        "request id",
        "the id of another verb's call",
        "one call per id",
    )
}

/// Everything stored.
struct State {
    issuer: Issuer,
    names: BTreeMap<QueueName, usize>,
    queues: Vec<Queue>,
    places: Places,
    grants: BTreeMap<FencingToken, GrantState>,
    sessions: HashMap<SessionId, Session>,
    audit: Vec<AuditView>,
    /// Grows with every job that is put somewhere: ties are broken in the order of arrival.
    seq: u64,
    /// Jobs that are gone, to be dropped once the lock is free.
    gone: Vec<Arc<JobRecord>>,
    /// Wake-ups to give once the step is done: queue, suspects' line or not, how many.
    bells: Vec<(QueueName, bool, usize)>,
}

struct Queue {
    name: QueueName,
    paused: bool,
    relaxed: bool,
    /// Ready jobs: [priority 0 suspects, priority 0, priority 1 suspects, …], by place.
    lines: [Line; LINES],
    scheduled: BTreeMap<(Timestamp, u64), Arc<JobRecord>>,
    /// Unique keys: the job that holds it, and until when if it has a window.
    unique: HashMap<Key, (JobId, Option<Timestamp>)>,
    exclusive: BTreeMap<Key, KeyLine>,
    settled: BTreeMap<(JobState, Timestamp, u64), Kept>,
    /// Live grants by (deadline, id).
    deadlines: BTreeSet<(Timestamp, FencingToken)>,
    ledger: Ledger,
    counts: Counts,
}

const LINES: usize = 2 * (limits::PRIORITY_MAX as usize + 1);

/// The jobs of one exclusive key: the head may be leased, ready or waiting for its retry; the others
/// are parked behind it in the order in which they fell due.
struct KeyLine {
    head: JobId,
    parked: BTreeMap<u64, Arc<JobRecord>>,
}

struct Kept {
    job: Arc<JobRecord>,
    keep_until: Timestamp,
}

struct GrantState {
    queue: usize,
    nonce: Nonce,
    owner: Arc<str>,
    task: Arc<str>,
    granted_at: Timestamp,
    deadline: Timestamp,
    term: Duration,
    max_lifetime: Duration,
    renewals: u32,
    /// By token − id; `None` once ended.
    leases: Vec<Option<LeaseState>>,
    live: usize,
}

struct LeaseState {
    job: Arc<JobRecord>,
    cancel: bool,
    progress: Option<Box<Progress>>,
}

impl GrantState {
    /// Whether the receipt is the one of this lease, from a queue of this name.
    fn is_proof(&self, receipt: &Receipt, queue: &QueueName, lease: &LeaseState) -> bool {
        *queue == receipt.queue
            && receipt.partition == 0
            && self.nonce.matches(&receipt.nonce)
            && lease.job.id == receipt.job
    }

    fn facts(&self, token: FencingToken, lease: &LeaseState) -> LeaseFacts {
        LeaseFacts {
            token,
            owner: Arc::clone(&self.owner),
            task: Arc::clone(&self.task),
            granted_at: self.granted_at,
            renewals: self.renewals,
            progress: lease.progress.as_deref().cloned(),
            cancel: lease.cancel,
        }
    }
}

/// Where a job is.
#[derive(Clone)]
enum Place {
    Line {
        queue: usize,
        line: usize,
        place: i64,
    },
    Parked {
        queue: usize,
        key: Key,
        seq: u64,
    },
    Scheduled {
        queue: usize,
        at: Timestamp,
        seq: u64,
    },
    Leased {
        grant: FencingToken,
        token: FencingToken,
    },
    Settled {
        queue: usize,
        state: JobState,
        at: Timestamp,
        seq: u64,
    },
}

struct Session {
    used: Timestamp,
    lanes: HashMap<u32, (u64, Answer)>,
}

/// The last answer of a lane.
#[derive(Clone)]
enum Answer {
    Enqueue(Vec<Enqueued>),
    Claim(FirstClaim),
    Settle(Vec<Verdict>),
    Checkpoint(Vec<Checkpointed>),
    Reap(Vec<Expiry>),
    Control(Controlled),
    Prune(u64),
}

/// What is needed to answer a claim again.
#[derive(Clone)]
struct FirstClaim {
    grants: Vec<(FencingToken, Duration)>,
    expired: Vec<Expiry>,
}

impl State {
    fn new(issuer: Issuer) -> Self {
        Self {
            issuer,
            names: BTreeMap::new(),
            queues: Vec::new(),
            places: Places::default(),
            grants: BTreeMap::new(),
            sessions: HashMap::new(),
            audit: Vec::new(),
            seq: 0,
            gone: Vec::new(),
            bells: Vec::new(),
        }
    }

    /// The first answer to a request that was already applied.
    fn recall(&mut self, request: RequestId, now: Timestamp) -> Result<Option<Answer>> {
        let lost = |why| Error::new(ErrorKind::SessionLost, why);
        let session = self.sessions.get_mut(&request.session);
        let session = session
            .filter(|session| now.since(session.used) <= SESSION_IDLE)
            .ok_or_else(|| lost("the request's session is not open"))?;
        session.used = now;
        match session.lanes.get(&request.lane) {
            Some((seq, answer)) if *seq == request.seq => Ok(Some(answer.clone())),
            Some((seq, _)) if *seq > request.seq => {
                Err(lost("a later request of the same lane has been answered"))
            }
            _ => Ok(None),
        }
    }

    fn remember(&mut self, request: RequestId, answer: Answer) {
        if let Some(session) = self.sessions.get_mut(&request.session) {
            session.lanes.insert(request.lane, (request.seq, answer));
        }
    }

    fn queue(&mut self, name: &QueueName) -> usize {
        if let Some(&queue) = self.names.get(name) {
            return queue;
        }
        let queue = self.queues.len();
        self.names.insert(name.clone(), queue);
        self.queues.push(Queue {
            name: name.clone(),
            paused: false,
            relaxed: false,
            lines: Default::default(),
            scheduled: BTreeMap::new(),
            unique: HashMap::new(),
            exclusive: BTreeMap::new(),
            settled: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            ledger: Ledger::default(),
            counts: Counts::default(),
        });
        queue
    }

    fn next_seq(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    /// Takes a lease out of its grant, and the grant away once it is empty.
    fn take_lease(
        &mut self,
        grant: FencingToken,
        token: FencingToken,
    ) -> Option<(usize, LeaseState)> {
        let held = self.grants.get_mut(&grant)?;
        let lease = held.leases.get_mut(offset(grant, token)?)?.take()?;
        held.live -= 1;
        let queue = held.queue;
        if held.live == 0 {
            let deadline = held.deadline;
            self.grants.remove(&grant);
            self.queues[queue].deadlines.remove(&(deadline, grant));
        }
        let at = &mut self.queues[queue];
        at.ledger.live -= 1;
        at.counts.leased -= 1;
        Some((queue, lease))
    }

    /// The holder's lease, if the receipt is the current one.
    fn held(&self, receipt: &Receipt) -> Option<(&GrantState, &LeaseState)> {
        let grant = self.grants.get(&receipt.grant)?;
        let lease = grant
            .leases
            .get(offset(receipt.grant, receipt.token)?)?
            .as_ref()?;
        let name = &self.queues[grant.queue].name;
        grant
            .is_proof(receipt, name, lease)
            .then_some((grant, lease))
    }

    /// Ends a lease: counts it, and puts the job where it goes. A job that goes to the front is
    /// returned, to be put there with the others of the step.
    fn end(
        &mut self,
        grant: FencingToken,
        token: FencingToken,
        step: Step,
        now: Timestamp,
    ) -> Option<(FencingToken, Arc<JobRecord>)> {
        let next = step.next;
        let gone = matches!(
            next,
            Next::Settled {
                keep_until: None,
                ..
            }
        );
        let facts = if gone { None } else { self.facts(grant, token) };
        let (queue, LeaseState { mut job, .. }) = self.take_lease(grant, token)?;
        self.queues[queue].ledger.count(step.end);
        if let Some(facts) = facts {
            step.apply(Arc::make_mut(&mut job), &facts, now);
        }
        match next {
            Next::Front => return Some((token, job)),
            Next::Back => self.put_back(queue, job),
            Next::Scheduled { keeps_key } => {
                if !keeps_key {
                    self.free_exclusive(queue, &job);
                }
                self.put_scheduled(queue, job);
            }
            Next::Settled { state, keep_until } => {
                self.put_settled(queue, job, state, keep_until, now);
            }
        }
        None
    }

    fn facts(&self, grant: FencingToken, token: FencingToken) -> Option<LeaseFacts> {
        let held = self.grants.get(&grant)?;
        let lease = held.leases.get(offset(grant, token)?)?.as_ref()?;
        Some(held.facts(token, lease))
    }

    fn fenced(&mut self, queue: &QueueName, calls: usize) {
        if let Some(&queue) = self.names.get(queue) {
            self.queues[queue].ledger.fenced += calls as u64;
        }
    }

    fn has_work(&self, queues: &[QueueName], suspects: bool) -> bool {
        let queues = queues.iter().filter_map(|name| self.names.get(name));
        queues.map(|&queue| &self.queues[queue]).any(|queue| {
            let lines = queue.lines.iter().enumerate();
            !queue.paused
                && lines
                    .filter(|(at, _)| suspects || !is_suspects(*at))
                    .any(|(_, line)| !line.is_empty())
        })
    }
}

/// The place of a token in its grant.
fn offset(grant: FencingToken, token: FencingToken) -> Option<usize> {
    usize::try_from(token.get().checked_sub(grant.get())?).ok()
}
