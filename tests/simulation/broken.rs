//! Stores that are wrong on purpose, one protection off in each: a simulator that cannot catch them
//! proves nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::inspect::{LeaseFilter, Page, Query, View};
use leasehold::job::QueueName;
use leasehold::lease::{Receipt, Verdict};
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlCommand, ControlRequest,
    Controlled, EnqueueRequest, Enqueued, Expiry, LeaseSelect, PruneRequest, ReapRequest, Renewal,
    RequestId, SessionId, SettleRequest, Store,
};
use leasehold::{FencingToken, JobId, Result, async_trait};
use leasehold_conformance::checker::Rule;

use crate::net::Port;

/// Which protection is off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Variant {
    /// None: the wrappers themselves are no fault.
    Sound,
    /// The resource lets everybody in.
    FenceOff,
    /// A settlement ends whatever lease the job has now.
    ReceiptCheckOff,
    /// Overdue leases are looked up in one step and ended in another, by their jobs.
    ReapNotAtomic,
    /// Tokens come from a counter that a rollback sets back.
    TokenByCounter,
    /// The holder counts its deadline from the reply.
    DeadlineFromReply,
    /// Every copy of a call is a new call.
    RequestIdsIgnored,
    /// Claims bring nothing: the backlog never drains.
    NothingGranted,
}

impl Variant {
    /// The protections whose absence a run for safety must show.
    pub(crate) const UNSAFE: [Self; 6] = [
        Self::FenceOff,
        Self::ReceiptCheckOff,
        Self::ReapNotAtomic,
        Self::TokenByCounter,
        Self::DeadlineFromReply,
        Self::RequestIdsIgnored,
    ];

    /// By which rules it must be caught: a catch for another reason does not count.
    pub(crate) fn caught_by(self) -> Vec<String> {
        let rules: &[Rule] = match self {
            Self::Sound | Self::NothingGranted => &[],
            Self::FenceOff => &[Rule::StaleTokenAccepted, Rule::WriteLost],
            Self::ReceiptCheckOff => &[Rule::AcceptedAfterEnd, Rule::EndedTwice],
            Self::ReapNotAtomic => &[Rule::TwoLeasesOfAJob, Rule::CurrentReceiptFenced],
            Self::TokenByCounter => &[Rule::TokenWentBack, Rule::TokenIssuedTwice],
            Self::DeadlineFromReply => return vec!["I8 HolderNotTold".into()],
            Self::RequestIdsIgnored => &[Rule::RepeatAnsweredAnew, Rule::CurrentReceiptFenced],
        };
        let name = |rule: &Rule| format!("I{} {rule:?}", rule.invariant());
        rules.iter().map(name).collect()
    }
}

const REAPER: &str = "the second step of the reaper";

/// A store with a fault, at the store's end of the network.
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    variant: Variant,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    current: HashMap<JobId, Receipt>,
    overdue: Vec<JobId>,
    counter: u64,
}

impl Broken {
    pub(crate) fn new(inner: Arc<dyn Store>, variant: Variant) -> Self {
        Self {
            inner,
            variant,
            known: Mutex::default(),
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn fresh(&self) -> Result<RequestId> {
        let session = self.inner.open_session().await?;
        Ok(RequestId {
            session,
            lane: 0,
            seq: 1,
        })
    }

    async fn id(&self, request: RequestId) -> Result<RequestId> {
        match self.variant {
            Variant::RequestIdsIgnored => self.fresh().await,
            _ => Ok(request),
        }
    }

    fn unchecked(&self, mut request: SettleRequest) -> SettleRequest {
        if self.variant == Variant::ReceiptCheckOff {
            let known = self.known();
            for settlement in &mut request.settlements {
                if let Some(current) = known.current.get(&settlement.receipt.job()) {
                    settlement.receipt = current.clone();
                }
            }
        }
        request
    }

    /// Ends what the step before found overdue, and looks for more.
    async fn reap_in_two_steps(&self) -> Result<()> {
        if self.variant != Variant::ReapNotAtomic {
            return Ok(());
        }
        let overdue = std::mem::take(&mut self.known().overdue);
        for job in overdue {
            let request = ControlRequest {
                request: self.fresh().await?,
                actor: REAPER.into(),
                reason: "overdue".into(),
                command: ControlCommand::Revoke(LeaseSelect::Job(job)),
            };
            self.inner.control(request).await?;
        }
        let query = Query::Leases {
            filter: LeaseFilter::default(),
            page: Page::first(100),
        };
        if let View::Leases(leases) = self.inner.inspect(query).await? {
            let overdue = leases.rows.iter().filter(|lease| lease.time_left.is_zero());
            self.known().overdue = overdue.map(|lease| lease.job).collect();
        }
        Ok(())
    }
}

#[async_trait]
impl Store for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        self.inner.dedicated().await
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.inner.open_session().await
    }

    async fn enqueue(&self, mut request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        request.request = self.id(request.request).await?;
        self.inner.enqueue(request).await
    }

    async fn claim(&self, mut request: ClaimRequest) -> Result<Claimed> {
        if self.variant == Variant::NothingGranted {
            return Ok(Claimed::default());
        }
        self.reap_in_two_steps().await?;
        request.request = self.id(request.request).await?;
        let mut claimed = self.inner.claim(request).await?;
        let mut known = self.known();
        for grant in &mut claimed.grants {
            for lease in &grant.leases {
                let receipt = grant.receipt(lease);
                known.current.insert(lease.job.id, receipt);
            }
            if self.variant == Variant::TokenByCounter {
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
        self.inner.renew(beats).await
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
        self.inner.reap(request).await
    }

    async fn control(&self, mut request: ControlRequest) -> Result<Controlled> {
        request.request = self.id(request.request).await?;
        self.inner.control(request).await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        let mut view = self.inner.inspect(query).await?;
        // It is its effect that must be caught, not its signature.
        if let View::Audit(records) = &mut view {
            records.rows.retain(|record| record.actor != REAPER);
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

/// A holder that counts its deadline from the reply, at the host's end of the network.
#[derive(Clone)]
pub(crate) struct FromReply {
    inner: Arc<dyn Store>,
    port: Port,
    first_sent: Arc<Mutex<HashMap<RequestId, Duration>>>,
}

impl FromReply {
    pub(crate) fn new(inner: Arc<dyn Store>, port: Port) -> Self {
        Self {
            inner,
            port,
            first_sent: Arc::default(),
        }
    }
}

#[async_trait]
impl Store for FromReply {
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

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        let now = self.port.now();
        let first = {
            let sent = self.first_sent.lock();
            let mut sent = sent.unwrap_or_else(PoisonError::into_inner);
            *sent.entry(request.request).or_insert(now)
        };
        let mut claimed = self.inner.claim(request).await?;
        for grant in &mut claimed.grants {
            grant.granted += self.port.now() - first;
        }
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        let sent = self.port.now();
        let mut renewals = self.inner.renew(beats).await?;
        for renewal in &mut renewals {
            if let Renewal::Held { granted, .. } = renewal {
                *granted += self.port.now() - sent;
            }
        }
        Ok(renewals)
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
        self.inner.wait(queues, suspects, limit).await
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        self.inner.prune(request).await
    }
}
