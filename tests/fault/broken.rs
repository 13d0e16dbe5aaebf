//! Stores with one protection removed, for the arms that must fail.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::inspect::{Query, View};
use leasehold::job::QueueName;
use leasehold::lease::Verdict;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, Outcome, PruneRequest, ReapRequest, Renewal, RequestId,
    SessionId, SettleRequest, Settlement, Store,
};
use leasehold::{Result, async_trait};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Flaw {
    /// Jobs are completed when they are handed out, not when they are done.
    CompletesAtClaim,
    /// A process takes any number of suspects at once.
    CrowdsSuspects,
    /// No flaw of the store, but of the way to it: every call arrives twice, and the one before it
    /// once more.
    SendsTwice,
    /// The same where nobody looks at request ids.
    SendsTwiceUnnamed,
    /// Whoever does not get an answer asks again, under another request id.
    RepeatsUnnamed,
    /// Whoever does not get an answer asks again at once.
    RepeatsAtOnce,
    /// Renewals are never sent.
    NeverRenews,
}

/// A call that bears a name.
trait Named: Clone {
    fn name(&mut self) -> &mut RequestId;
}

macro_rules! named {
    ($($request:ty),*) => { $(
        impl Named for $request {
            fn name(&mut self) -> &mut RequestId {
                &mut self.request
            }
        }
    )* };
}

named!(
    EnqueueRequest,
    ClaimRequest,
    SettleRequest,
    CheckpointRequest
);

#[derive(Clone)]
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    flaw: Flaw,
    session: SessionId,
    lanes: Arc<AtomicU32>,
    /// The last settlements of each lane.
    before: Arc<Mutex<HashMap<u32, SettleRequest>>>,
}

impl Broken {
    pub(crate) async fn new(inner: Arc<dyn Store>, flaw: Flaw) -> Self {
        Self {
            session: inner.open_session().await.unwrap(),
            inner,
            flaw,
            lanes: Arc::default(),
            before: Arc::default(),
        }
    }

    fn rename(&self, request: &mut impl Named) {
        *request.name() = RequestId {
            session: self.session,
            lane: self.lanes.fetch_add(1, Ordering::Relaxed),
            seq: 1,
        };
    }

    /// Sends a call as often and under as many names as the flaw will have it. The last answer
    /// counts.
    async fn send<R: Named, T, F>(&self, mut request: R, send: impl Fn(R) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut answer = send(request.clone()).await;
        while answer.is_err() && self.flaw == Flaw::RepeatsAtOnce {
            tokio::time::sleep(Duration::from_millis(1)).await;
            answer = send(request.clone()).await;
        }
        match self.flaw {
            Flaw::SendsTwice if answer.is_ok() => send(request).await,
            Flaw::SendsTwiceUnnamed if answer.is_ok() => {
                self.rename(&mut request);
                send(request).await
            }
            Flaw::RepeatsUnnamed if answer.is_err() => {
                self.rename(&mut request);
                send(request).await
            }
            _ => answer,
        }
    }

    async fn complete(&self, claimed: &Claimed) -> Result<()> {
        let receipts = claimed.grants.iter().flat_map(|grant| {
            let leases = grant.leases.iter();
            leases.map(|lease| grant.receipt(lease))
        });
        let settlements = receipts.map(|receipt| Settlement {
            receipt,
            outcome: Outcome::Complete { result: None },
        });
        let request = RequestId {
            session: self.session,
            lane: self.lanes.fetch_add(1, Ordering::Relaxed),
            seq: 1,
        };
        let settlements = settlements.collect();
        let request = SettleRequest {
            request,
            settlements,
        };
        self.inner.settle(request).await.map(drop)
    }
}

#[async_trait]
impl Store for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(self.clone()))
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.inner.open_session().await
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        self.send(request, |request| self.inner.enqueue(request))
            .await
    }

    async fn claim(&self, mut request: ClaimRequest) -> Result<Claimed> {
        request.admit_suspect |= self.flaw == Flaw::CrowdsSuspects;
        let claimed = self
            .send(request, |request| self.inner.claim(request))
            .await?;
        if self.flaw == Flaw::CompletesAtClaim && !claimed.grants.is_empty() {
            self.complete(&claimed).await?;
        }
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        if self.flaw == Flaw::NeverRenews {
            return std::future::pending().await;
        }
        let answer = self.inner.renew(beats.clone()).await;
        match self.flaw {
            Flaw::SendsTwice if answer.is_ok() => self.inner.renew(beats).await,
            _ => answer,
        }
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        let lane = request.request.lane;
        let send = |request| self.inner.settle(request);
        let answer = self.send(request.clone(), send).await;
        if self.flaw == Flaw::SendsTwice {
            // One that was long under way arrives now. The checker sees what became of it.
            let before = self.before.lock().unwrap().insert(lane, request);
            if let Some(before) = before {
                let _ = self.inner.settle(before).await;
            }
        }
        answer
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        self.send(request, |request| self.inner.checkpoint(request))
            .await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        self.inner.reap(request).await
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        self.inner.control(request).await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.inner.inspect(query).await
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        let suspects = suspects || self.flaw == Flaw::CrowdsSuspects;
        self.inner.wait(queues, suspects, limit).await
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        self.inner.prune(request).await
    }
}
