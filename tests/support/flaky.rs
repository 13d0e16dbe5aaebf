//! A store between a worker and its store that misbehaves on demand. Broken variants for control
//! arms are made here, never in the shipped code.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::error::Verb;
use leasehold::inspect::{Query, View};
use leasehold::job::QueueName;
use leasehold::lease::Verdict;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, SessionId, SettleRequest,
    Store,
};
use leasehold::{Error, ErrorKind, Result, async_trait};

/// What becomes of one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Pass,
    /// The request does not arrive.
    LoseRequest,
    /// The request is applied, and its reply does not arrive.
    LoseReply,
    /// The reply takes this long.
    Late(Duration),
    /// The request takes this long to arrive.
    Slow(Duration),
    /// The reply never comes.
    Hang,
    /// The store says no, for certain, and will say so again.
    Refuse,
    /// Another process has the store's lock: nothing is done, and it may work later.
    Contend,
    /// The store has forgotten the session: nothing is done.
    Forget,
    /// The store's clock was set back, and it is strict.
    Ahead,
}

impl Fate {
    async fn befall<T>(self, verb: Verb, call: impl Future<Output = Result<T>>) -> Result<T> {
        let lost = || Error::new(ErrorKind::Unavailable, "cut off").during(verb);
        match self {
            Self::Pass => call.await,
            Self::LoseRequest => Err(lost()),
            Self::LoseReply => call.await.and_then(|_| Err(lost())),
            Self::Slow(by) => {
                tokio::time::sleep(by).await;
                call.await
            }
            Self::Late(by) => {
                let reply = call.await;
                tokio::time::sleep(by).await;
                reply
            }
            Self::Hang => std::future::pending().await,
            Self::Refuse => Err(Error::new(ErrorKind::Denied, "no").during(verb)),
            Self::Contend => Err(Error::new(ErrorKind::Contended, "locked").during(verb)),
            Self::Forget => Err(Error::new(ErrorKind::SessionLost, "forgotten").during(verb)),
            Self::Ahead => Err(Error::new(ErrorKind::TokensAhead, "two hours").during(verb)),
        }
    }
}

type Plan = dyn Fn(Verb) -> Fate + Send + Sync;

/// Counts calls, and lets each of them pass, fail or hang.
#[derive(Clone)]
pub struct Faulty {
    inner: Arc<dyn Store>,
    plan: Arc<Plan>,
    pub calls: Arc<Calls>,
    /// Claims and renewals report this many times the time that was granted: a holder that believes
    /// it relies on its leases for too long.
    pub overstate: u32,
    /// A lost request is sent again at once, and again, beneath the worker that should decide.
    pub stubborn: bool,
    /// What becomes of the renewer's wish for a handle of its own.
    pub dedicate: Fate,
    /// How many renewals that let a lease lapse do not arrive.
    pub lapses_to_lose: Arc<AtomicUsize>,
    /// Nobody can wait for work here, although the store says that its waits may be long.
    pub deaf: bool,
}

#[derive(Default)]
pub struct Calls {
    pub enqueue: AtomicUsize,
    pub claim: AtomicUsize,
    pub renew: AtomicUsize,
    pub renewed_leases: AtomicUsize,
    pub settle: AtomicUsize,
    pub checkpoint: AtomicUsize,
    /// The lanes of claims and settlements.
    pub lanes: Mutex<BTreeSet<u32>>,
}

impl Calls {
    fn came_by(&self, lane: u32) {
        let lanes = self.lanes.lock();
        lanes.unwrap_or_else(PoisonError::into_inner).insert(lane);
    }
}

impl Faulty {
    pub fn new(inner: Arc<dyn Store>, plan: impl Fn(Verb) -> Fate + Send + Sync + 'static) -> Self {
        Self {
            inner,
            plan: Arc::new(plan),
            calls: Arc::default(),
            overstate: 1,
            stubborn: false,
            dedicate: Fate::Pass,
            lapses_to_lose: Arc::default(),
            deaf: false,
        }
    }

    async fn meet<T>(&self, verb: Verb, call: impl Future<Output = Result<T>>) -> Result<T> {
        let mut fate = (self.plan)(verb);
        while self.stubborn && fate == Fate::LoseRequest {
            tokio::time::sleep(Duration::from_millis(1)).await;
            fate = (self.plan)(verb);
        }
        fate.befall(verb, call).await
    }
}

#[async_trait]
impl Store for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        let handle = async { Ok(Arc::new(self.clone()) as Arc<dyn Store>) };
        self.dedicate.befall(Verb::Open, handle).await
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.meet(Verb::Open, self.inner.open_session()).await
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        self.calls.enqueue.fetch_add(1, Ordering::SeqCst);
        self.meet(Verb::Enqueue, self.inner.enqueue(request)).await
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        self.calls.claim.fetch_add(1, Ordering::SeqCst);
        self.calls.came_by(request.request.lane);
        let mut claimed = self.meet(Verb::Claim, self.inner.claim(request)).await?;
        for grant in &mut claimed.grants {
            grant.granted *= self.overstate;
        }
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        self.calls.renew.fetch_add(1, Ordering::SeqCst);
        let leases = beats.iter().map(|beat| beat.leases.len()).sum();
        self.calls
            .renewed_leases
            .fetch_add(leases, Ordering::SeqCst);
        let lapses = beats.iter().any(|beat| !beat.lapse.is_empty());
        let one_less = |left: usize| left.checked_sub(1);
        let left = &self.lapses_to_lose;
        if lapses
            && left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less)
                .is_ok()
        {
            return Fate::LoseRequest
                .befall(Verb::Renew, std::future::pending())
                .await;
        }
        self.meet(Verb::Renew, self.inner.renew(beats)).await
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        self.calls.settle.fetch_add(1, Ordering::SeqCst);
        self.calls.came_by(request.request.lane);
        self.meet(Verb::Settle, self.inner.settle(request)).await
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        self.calls.checkpoint.fetch_add(1, Ordering::SeqCst);
        self.meet(Verb::Checkpoint, self.inner.checkpoint(request))
            .await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        self.meet(Verb::Reap, self.inner.reap(request)).await
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        self.meet(Verb::Control, self.inner.control(request)).await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.inner.inspect(query).await
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        if self.deaf {
            return Err(Error::new(ErrorKind::Unavailable, "deaf").during(Verb::Wait));
        }
        self.inner.wait(queues, suspects, limit).await
    }

    fn longest_wait(&self) -> Duration {
        match self.deaf {
            true => Duration::from_secs(60),
            false => self.inner.longest_wait(),
        }
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        self.meet(Verb::Prune, self.inner.prune(request)).await
    }
}
