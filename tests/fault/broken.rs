//! Stores with one protection removed, for the arms that must fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::inspect::{Query, View};
use leasehold::job::QueueName;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, Outcome, PruneRequest, ReapRequest, Renewal, RequestId,
    SessionId, SettleRequest, Settlement, Store,
};
use leasehold::{Result, Verdict, async_trait};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Flaw {
    /// Jobs are completed when they are handed out, not when they are done.
    CompletesAtClaim,
    /// A process takes any number of suspects at once.
    CrowdsSuspects,
}

#[derive(Clone)]
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    flaw: Flaw,
    session: SessionId,
    lanes: Arc<AtomicU32>,
}

impl Broken {
    pub(crate) async fn new(inner: Arc<dyn Store>, flaw: Flaw) -> Self {
        Self {
            session: inner.open_session().await.unwrap(),
            inner,
            flaw,
            lanes: Arc::default(),
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
        self.inner.enqueue(request).await
    }

    async fn claim(&self, mut request: ClaimRequest) -> Result<Claimed> {
        request.admit_suspect |= self.flaw == Flaw::CrowdsSuspects;
        let claimed = self.inner.claim(request).await?;
        if self.flaw == Flaw::CompletesAtClaim && !claimed.grants.is_empty() {
            self.complete(&claimed).await?;
        }
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        self.inner.renew(beats).await
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        self.inner.settle(request).await
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        self.inner.checkpoint(request).await
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
