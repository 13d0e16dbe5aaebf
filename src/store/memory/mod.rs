//! The reference model: plain code, no durability, any clock.
//!
//! What the other stores do with statements, this one does with maps under one lock. When two
//! stores disagree, read this one first. Each verb has its file; `place.rs` keeps the jobs between
//! verbs. Holders die with the store, so there is no limit on how far its tokens may run ahead of
//! the clock.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::holding::{Acquisition, Committed, HoldingStore, Reaped, Released, SavedState};
use super::wake::Wakers;
use super::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, RequestId, SESSION_IDLE,
    SessionId, SettleRequest, Store, bounded,
};
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::inspect::{AuditView, Query, View};
use crate::job::{JobId, QueueName};
use crate::lease::{FencingToken, Nonce, Progress, Verdict};
use crate::limits;
use crate::rules::ends::LeaseFacts;
use crate::rules::holding::FamilyName;
use crate::rules::issue::Issuer;
use claim::FirstClaim;
use holding::{Family, Waiters};
use place::{Queue, Stored};

mod checkpoint;
mod claim;
mod control;
mod enqueue;
mod holding;
mod inspect;
mod place;
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
    waiters: Waiters,
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
            waiters: Waiters::default(),
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

    /// Runs one mutating verb under its request id: a repeat gets the first answer. `last` is where
    /// a lane keeps the answers of this verb.
    fn call<T: Clone>(
        &self,
        verb: Verb,
        request: RequestId,
        last: fn(&mut Answers) -> &mut Option<T>,
        apply: impl FnOnce(&mut State, Timestamp) -> T,
    ) -> Result<T> {
        self.try_call(verb, request, last, |state, now| Ok(apply(state, now)))
    }

    /// The same for a call that may be refused, and then changes nothing.
    fn try_call<T: Clone>(
        &self,
        verb: Verb,
        request: RequestId,
        last: fn(&mut Answers) -> &mut Option<T>,
        apply: impl FnOnce(&mut State, Timestamp) -> Result<T>,
    ) -> Result<T> {
        let (mut state, now) = self.lock();
        if let Some(first) = state.recall(request, last, now).map_err(at(verb))? {
            return Ok(first);
        }
        let answer = apply(&mut state, now).map_err(at(verb))?;
        state.remember(request, last, answer.clone());
        self.wake(state);
        Ok(answer)
    }

    /// The step is done: wakes those who sleep on the queues that it gave work to, or with tickets
    /// that may be granted now.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        for ((queue, suspect), jobs) in std::mem::take(&mut state.wakeups) {
            let queue = &state.queues[queue].name;
            self.shared.wakers.wake(queue, suspect, jobs);
        }
        for (family, nonce) in std::mem::take(&mut state.woken) {
            self.shared.waiters.wake(&family, &nonce);
        }
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

    fn holdings(&self) -> Option<Arc<dyn HoldingStore>> {
        Some(Arc::new(self.clone()))
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
        self.call(
            Verb::Enqueue,
            request.request,
            |last| &mut last.enqueue,
            |state, now| state.enqueue(&request.jobs, now),
        )
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        request.validate().map_err(at(Verb::Claim))?;
        let (mut state, now) = self.lock();
        let first = state
            .recall(request.request, |last| &mut last.claim, now)
            .map_err(at(Verb::Claim))?;
        let claimed = if let Some(first) = first {
            state.claim_again(first, &request, now)
        } else {
            let claimed = state.claim(&request, now);
            let first = FirstClaim::of(&claimed);
            state.remember(request.request, |last| &mut last.claim, first);
            claimed
        };
        self.wake(state);
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        Beat::validate_all(&beats).map_err(at(Verb::Renew))?;
        let (mut state, now) = self.lock();
        let beats = beats.into_iter();
        let renewals = beats.map(|beat| state.renew(beat, now)).collect();
        self.wake(state);
        Ok(renewals)
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        request.validate().map_err(at(Verb::Settle))?;
        self.call(
            Verb::Settle,
            request.request,
            |last| &mut last.settle,
            |state, now| state.settle(&request.settlements, now),
        )
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        request.validate().map_err(at(Verb::Checkpoint))?;
        self.call(
            Verb::Checkpoint,
            request.request,
            |last| &mut last.checkpoint,
            |state, now| state.checkpoint(request.checkpoints, now),
        )
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        bounded("max", request.max, limits::STEP_JOBS).map_err(at(Verb::Reap))?;
        self.call(
            Verb::Reap,
            request.request,
            |last| &mut last.reap,
            |state, now| state.reap(request.max, now),
        )
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        request.validate().map_err(at(Verb::Control))?;
        self.try_call(
            Verb::Control,
            request.request,
            |last| &mut last.control,
            |state, now| state.control(&request, now),
        )
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        let (state, now) = self.lock();
        state.inspect(&query, now).map_err(at(Verb::Inspect))
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        let woken = {
            let (state, _) = self.lock();
            if state.has_work(queues, suspects) {
                return Ok(());
            }
            self.shared.wakers.sleep(queues, suspects)
        };
        let _ = tokio::time::timeout(limit, woken).await;
        Ok(())
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        bounded("max", request.max, limits::CALL_ITEMS).map_err(at(Verb::Prune))?;
        self.call(
            Verb::Prune,
            request.request,
            |last| &mut last.prune,
            |state, now| state.prune(now.before(request.overdue), request.max),
        )
    }
}

fn at(verb: Verb) -> impl Fn(Error) -> Error {
    move |error| error.during(verb).in_store("memory")
}

/// Everything stored.
struct State {
    issuer: Issuer,
    names: BTreeMap<QueueName, usize>,
    queues: Vec<Queue>,
    /// Ordered, as ids are by age: the jobs of a claim are neighbours here too. In a hash map a
    /// drain takes a tenth more CPU (`leasehold bench memory: --jobs 1200000`), and enqueues do as
    /// well.
    jobs: BTreeMap<JobId, Stored>,
    /// Live grants, by their first token.
    grants: BTreeMap<FencingToken, GrantState>,
    sessions: HashMap<SessionId, Session>,
    audit: Vec<AuditView>,
    /// Grows with every job that is put somewhere: ties are broken in the order of arrival.
    seq: u64,
    /// The step that is being done: jobs that it puts to the front stand there in token order.
    step: u64,
    /// Wake-ups to give once the step is done: how many, by queue and whether for a suspect.
    wakeups: BTreeMap<(usize, bool), usize>,
    families: BTreeMap<FamilyName, Family>,
    /// Tickets to wake once the step is done.
    woken: Vec<(FamilyName, Nonce)>,
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
    /// By token, from the first on. None: that lease has ended.
    leases: Vec<Option<LeaseState>>,
    /// Leases that have not ended. A grant without any is gone.
    live: usize,
}

struct LeaseState {
    job: JobId,
    /// Somebody asked for the job to be cancelled.
    cancel: bool,
    progress: Option<Box<Progress>>,
}

impl GrantState {
    fn lease(&self, id: FencingToken, token: FencingToken) -> Option<&LeaseState> {
        self.leases.get(index(id, token)?)?.as_ref()
    }

    /// Those that have not ended, in token order.
    fn live_leases(&self, id: FencingToken) -> impl Iterator<Item = (FencingToken, &LeaseState)> {
        let leases = (0..).zip(&self.leases);
        leases.filter_map(move |(at, lease)| Some((id.plus(at), lease.as_ref()?)))
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

/// Where a grant has the lease of this token.
fn index(id: FencingToken, token: FencingToken) -> Option<usize> {
    usize::try_from(token.get().checked_sub(id.get())?).ok()
}

struct Session {
    used: Timestamp,
    lanes: HashMap<u32, (u64, Answers)>,
}

/// The answer to the last request of a lane, under the verb that was called.
#[derive(Default)]
struct Answers {
    enqueue: Option<Vec<Enqueued>>,
    claim: Option<FirstClaim>,
    settle: Option<Vec<Verdict>>,
    checkpoint: Option<Vec<Checkpointed>>,
    reap: Option<Vec<Expiry>>,
    control: Option<Controlled>,
    prune: Option<u64>,
    acquire: Option<Acquisition>,
    release: Option<Vec<Released>>,
    save: Option<Vec<SavedState>>,
    commit: Option<Vec<Committed>>,
    reap_holdings: Option<Reaped>,
    holding_control: Option<u64>,
}

impl State {
    fn new(issuer: Issuer) -> Self {
        Self {
            issuer,
            names: BTreeMap::new(),
            queues: Vec::new(),
            jobs: BTreeMap::new(),
            grants: BTreeMap::new(),
            sessions: HashMap::new(),
            audit: Vec::new(),
            seq: 0,
            step: 0,
            wakeups: BTreeMap::new(),
            families: BTreeMap::new(),
            woken: Vec::new(),
        }
    }

    /// The first answer to a request that was already applied.
    fn recall<T: Clone>(
        &mut self,
        request: RequestId,
        last: fn(&mut Answers) -> &mut Option<T>,
        now: Timestamp,
    ) -> Result<Option<T>> {
        let refused = |why| Error::new(ErrorKind::SessionLost, why);
        let session = self.sessions.get_mut(&request.session);
        let session = session
            .filter(|session| now.since(session.used) <= SESSION_IDLE)
            .ok_or_else(|| refused("the request's session is not open"))?;
        session.used = now;
        match session.lanes.get_mut(&request.lane) {
            Some((seq, answers)) if *seq == request.seq => match last(answers) {
                Some(first) => Ok(Some(first.clone())),
                None => Err(Error::invalid(
                    "request id",
                    "the id of another verb's call",
                    "one call per id",
                )),
            },
            Some((seq, _)) if *seq > request.seq => Err(refused(
                "a later request of the same lane has been answered",
            )),
            _ => Ok(None),
        }
    }

    fn remember<T>(
        &mut self,
        request: RequestId,
        last: fn(&mut Answers) -> &mut Option<T>,
        answer: T,
    ) {
        if let Some(session) = self.sessions.get_mut(&request.session) {
            let mut answers = Answers::default();
            *last(&mut answers) = Some(answer);
            session.lanes.insert(request.lane, (request.seq, answers));
        }
    }

    fn lease_mut(&mut self, grant: FencingToken, token: FencingToken) -> Option<&mut LeaseState> {
        let leases = &mut self.grants.get_mut(&grant)?.leases;
        leases.get_mut(index(grant, token)?)?.as_mut()
    }

    /// Counts calls that were refused as stale.
    fn fenced(&mut self, queue: &QueueName, calls: usize) {
        if let Some(&queue) = self.names.get(queue) {
            self.queues[queue].ledger.fenced += calls as u64;
        }
    }

    fn has_work(&self, queues: &[QueueName], suspects: bool) -> bool {
        let queues = queues.iter().filter_map(|name| self.names.get(name));
        queues
            .map(|&queue| &self.queues[queue])
            .any(|queue| !queue.paused && queue.has_ready(suspects))
    }
}
