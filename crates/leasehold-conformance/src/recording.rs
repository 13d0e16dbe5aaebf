//! A store that notes every call.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::history::{
    Answer, History, Op, checkpoint_op, claim_answer, claim_op, enqueue_op, renew_op, settle_note,
};
use leasehold::Result;
use leasehold::inspect::{Query, View};
use leasehold::job::{Namespace, QueueName};
use leasehold::lease::Verdict;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, SessionId, SettleRequest,
    Store,
};

/// Notes the calls of one process to a store in a [`History`]. Looking and waiting change nothing
/// and are passed on unnoted.
#[derive(Clone)]
pub struct RecordingStore {
    inner: Arc<dyn Store>,
    history: History,
    process: u32,
}

impl RecordingStore {
    /// Notes the calls of `process` to `inner`.
    pub fn new(inner: Arc<dyn Store>, history: History, process: u32) -> Self {
        Self {
            inner,
            history,
            process,
        }
    }
}

impl fmt::Debug for RecordingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingStore")
            .field("store", &self.inner.name())
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for RecordingStore {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn namespace(&self) -> Namespace {
        self.inner.namespace()
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        let inner = self.inner.dedicated().await?;
        Ok(Arc::new(Self::new(
            inner,
            self.history.clone(),
            self.process,
        )))
    }

    async fn open_session(&self) -> Result<SessionId> {
        let work = self.inner.open_session();
        let note = |_: &SessionId| Answer::Done;
        self.history
            .call(self.process, Op::OpenSession, work, note)
            .await
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        let op = enqueue_op(&request);
        let work = self.inner.enqueue(request);
        let note = |answer: &Vec<_>| Answer::Enqueued(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        let op = claim_op(&request);
        let work = self.inner.claim(request);
        self.history
            .call(self.process, op, work, claim_answer)
            .await
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        let op = renew_op(&beats);
        let work = self.inner.renew(beats);
        let note = |answer: &Vec<_>| Answer::Renewed(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        let op = Op::Settle(settle_note(&request));
        let work = self.inner.settle(request);
        let note = |answer: &Vec<_>| Answer::Settled(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        let op = checkpoint_op(&request);
        let work = self.inner.checkpoint(request);
        let note = |answer: &Vec<_>| Answer::Checkpointed(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        let op = Op::Reap {
            request: request.request,
        };
        let work = self.inner.reap(request);
        let note = |answer: &Vec<_>| Answer::Reaped(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        let op = Op::Control {
            request: request.request,
            actor: request.actor.clone(),
            reason: request.reason.clone(),
            command: request.command.clone(),
        };
        let work = self.inner.control(request);
        let note = |answer: &Controlled| Answer::Controlled(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.inner.inspect(query).await
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        self.inner.wait(queues, suspects, limit).await
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        let op = Op::Prune {
            request: request.request,
        };
        let work = self.inner.prune(request);
        self.history
            .call(self.process, op, work, |n: &u64| Answer::Pruned(*n))
            .await
    }
}
