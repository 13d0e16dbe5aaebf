//! A store that lives in real time, on a thread of its own, as one behind a server must.
//!
//! Whoever calls it stands still until it has answered. All hosts are on the caller's thread, so
//! that virtual time stands still meanwhile, however long the answer takes.

use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect::{Query, View};
use leasehold::job::QueueName;
use leasehold::lease::Verdict;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, SessionId, SettleRequest,
    Store,
};
use leasehold::{Result, async_trait};
use tokio::runtime::{Builder, Runtime};

/// The runtime goes with the store, and with it all that the store does on the side.
pub(crate) struct Apart {
    store: Arc<dyn Store>,
    runtime: Runtime,
}

impl Apart {
    /// Opens a store on a thread of its own. Its dice are not the world's: how often a store tries
    /// again is the real time's affair.
    pub(crate) fn open(
        seed: u64,
        open: impl Future<Output = Arc<dyn Store>> + Send + 'static,
    ) -> Self {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .on_thread_start(move || fastrand::seed(seed))
            .enable_all()
            .build()
            .expect("a runtime");
        let store = await_on(&runtime, open);
        Self { store, runtime }
    }
}

fn await_on<T: Send + 'static>(
    runtime: &Runtime,
    work: impl Future<Output = T> + Send + 'static,
) -> T {
    let done = runtime.block_on(runtime.spawn(work));
    done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

macro_rules! call {
    ($self:ident, $method:ident $(, $argument:expr)?) => {{
        let store = Arc::clone(&$self.store);
        await_on(&$self.runtime, async move { store.$method($($argument)?).await })
    }};
}

#[async_trait]
impl Store for Apart {
    fn name(&self) -> &'static str {
        self.store.name()
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        call!(self, dedicated)
    }

    async fn open_session(&self) -> Result<SessionId> {
        call!(self, open_session)
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        call!(self, enqueue, request)
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        call!(self, claim, request)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        call!(self, renew, beats)
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        call!(self, settle, request)
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        call!(self, checkpoint, request)
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        call!(self, reap, request)
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        call!(self, control, request)
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        call!(self, inspect, query)
    }

    async fn wait(&self, _: &[QueueName], _: bool, _: Duration) -> Result<()> {
        unreachable!("hosts wait on virtual time")
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        call!(self, prune, request)
    }
}
