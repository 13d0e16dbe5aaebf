//! Stores that are wrong on purpose: a test that cannot fail proves nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold::inspect::{Query, View};
use leasehold::job::QueueName;
use leasehold::lease::{Receipt, Verdict};
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, RequestId, SessionId,
    SettleRequest,
};
use leasehold::{FencingToken, JobId, Result, Store};

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Nothing: the wrapper itself is no fault.
    None,
    /// Settles whatever lease the job has now, whoever asks.
    ReceiptCheckOff,
    /// Every call is a new call.
    RequestIdsIgnored,
    /// Tells the holder of an overdue grant that it lives.
    RenewResurrects,
    /// Counts every expiry a second time.
    ExpiryCountedTwice,
    /// Tokens come from a counter, which a restart (here: a new session) sets back.
    TokenByCounter,
}

/// A store with a fault.
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    fault: Fault,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    current: HashMap<JobId, Receipt>,
    terms: HashMap<FencingToken, Duration>,
    expired: HashMap<QueueName, u64>,
    counter: u64,
}

impl Broken {
    pub(crate) fn new(inner: impl Store, fault: Fault) -> Self {
        Self {
            inner: Arc::new(inner),
            fault,
            known: Mutex::default(),
        }
    }

    async fn id(&self, request: RequestId) -> Result<RequestId> {
        if self.fault != Fault::RequestIdsIgnored {
            return Ok(request);
        }
        let session = self.inner.open_session().await?;
        Ok(RequestId {
            session,
            lane: 0,
            seq: 1,
        })
    }

    fn unchecked(&self, mut request: SettleRequest) -> SettleRequest {
        if self.fault == Fault::ReceiptCheckOff {
            let known = self.known.lock().unwrap();
            for settlement in &mut request.settlements {
                if let Some(current) = known.current.get(&settlement.receipt.job()) {
                    settlement.receipt = current.clone();
                }
            }
        }
        request
    }

    fn count(&self, expired: &[Expiry]) {
        let mut known = self.known.lock().unwrap();
        for expiry in expired {
            *known.expired.entry(expiry.queue.clone()).or_default() += 1;
        }
    }
}

#[async_trait]
impl Store for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self {
            inner: self.inner.dedicated().await?,
            fault: self.fault,
            known: Mutex::default(),
        }))
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.known.lock().unwrap().counter = 0;
        self.inner.open_session().await
    }

    async fn enqueue(&self, mut request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.request = self.id(request.request).await?;
        self.inner.enqueue(request).await
    }

    async fn claim(&self, mut request: ClaimRequest) -> Result<Claimed> {
        request.request = self.id(request.request).await?;
        let mut claimed = self.inner.claim(request).await?;
        self.count(&claimed.expired);
        let mut known = self.known.lock().unwrap();
        for grant in &mut claimed.grants {
            known.terms.insert(grant.id, grant.term);
            for lease in &grant.leases {
                let receipt = grant.receipt(lease);
                known.current.insert(lease.job.id, receipt);
            }
            if self.fault == Fault::TokenByCounter {
                for lease in &mut grant.leases {
                    known.counter += 1;
                    lease.token = FencingToken::new(known.counter);
                }
                grant.id = grant.leases[0].token;
            }
        }
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        let grants: Vec<FencingToken> = beats.iter().map(|beat| beat.grant).collect();
        let mut renewals = self.inner.renew(beats).await?;
        if self.fault == Fault::RenewResurrects {
            let known = self.known.lock().unwrap();
            for (renewal, grant) in renewals.iter_mut().zip(grants) {
                if let (Renewal::Fenced, Some(term)) = (&*renewal, known.terms.get(&grant)) {
                    *renewal = Renewal::Held {
                        granted: *term,
                        cancel: Vec::new(),
                        fenced: Vec::new(),
                    };
                }
            }
        }
        Ok(renewals)
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        let mut request = self.unchecked(request);
        request.request = self.id(request.request).await?;
        self.inner.settle(request).await
    }

    async fn checkpoint(&self, mut request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        request.request = self.id(request.request).await?;
        self.inner.checkpoint(request).await
    }

    async fn reap(&self, mut request: ReapRequest) -> Result<Vec<Expiry>> {
        request.request = self.id(request.request).await?;
        let expired = self.inner.reap(request).await?;
        self.count(&expired);
        Ok(expired)
    }

    async fn control(&self, mut request: ControlRequest) -> Result<Controlled> {
        request.request = self.id(request.request).await?;
        self.inner.control(request).await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        let mut view = self.inner.inspect(query).await?;
        if let (Fault::ExpiryCountedTwice, View::Queues(queues)) = (self.fault, &mut view) {
            let known = self.known.lock().unwrap();
            for queue in queues {
                let again = known.expired.get(&queue.queue);
                queue.ledger.expired_deadline += again.copied().unwrap_or_default();
            }
        }
        Ok(view)
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        self.inner.wait(queues, suspects, limit).await
    }

    async fn prune(&self, mut request: PruneRequest) -> Result<u64> {
        request.request = self.id(request.request).await?;
        self.inner.prune(request).await
    }
}
