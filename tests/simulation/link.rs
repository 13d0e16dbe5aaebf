//! The store as a host sees it: through the network.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::inspect::{Query, View};
use leasehold::job::QueueName;
use leasehold::lease::Verdict;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, RequestId, SessionId,
    SettleRequest, Store,
};
use leasehold::{Result, async_trait};

use crate::net::{Port, Server};
use crate::oversee::Overseer;

#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) port: Port,
    pub(crate) server: Arc<Server>,
    pub(crate) overseer: Arc<Overseer>,
    first_sent: Arc<Mutex<HashMap<RequestId, Duration>>>,
}

/// Calls a method of the store at the other end, with a copy of its argument for each arrival.
macro_rules! carry {
    ($self:ident, $method:ident, $argument:expr) => {{
        let (server, argument) = (Arc::clone(&$self.server), $argument);
        let call = move || {
            let argument = argument.clone();
            server.serve(|store| async move { store.$method(argument).await })
        };
        $self.port.carry(call).await
    }};
}

impl Link {
    pub(crate) fn new(port: Port, server: &Arc<Server>, overseer: &Arc<Overseer>) -> Self {
        Self {
            port,
            server: Arc::clone(server),
            overseer: Arc::clone(overseer),
            first_sent: Arc::default(),
        }
    }
}

#[async_trait]
impl Store for Link {
    fn name(&self) -> &'static str {
        "link"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(self.clone()))
    }

    async fn open_session(&self) -> Result<SessionId> {
        let server = Arc::clone(&self.server);
        let call = move || server.serve(|store| async move { store.open_session().await });
        self.port.carry(call).await
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        carry!(self, enqueue, request)
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        let first = {
            let mut sent = self
                .first_sent
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let now = self.port.now();
            *sent.entry(request.request).or_insert(now)
        };
        let claimed: Claimed = carry!(self, claim, request)?;
        for grant in &claimed.grants {
            for lease in &grant.leases {
                self.overseer
                    .granted(lease.token, first, grant.term, grant.granted);
            }
        }
        Ok(claimed)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        let sent = self.port.now();
        let leases: Vec<_> = beats.iter().map(|beat| beat.leases.clone()).collect();
        let renewals: Vec<Renewal> = carry!(self, renew, beats)?;
        for (tokens, renewal) in leases.into_iter().zip(&renewals) {
            if let Renewal::Held { granted, .. } = renewal {
                for token in tokens {
                    self.overseer.renewed(token, sent, *granted);
                }
            }
        }
        Ok(renewals)
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        carry!(self, settle, request)
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        carry!(self, checkpoint, request)
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        carry!(self, reap, request)
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        carry!(self, control, request)
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        carry!(self, inspect, query)
    }

    async fn wait(&self, _: &[QueueName], _: bool, limit: Duration) -> Result<()> {
        tokio::time::sleep(self.port.net.sleep_time(limit)).await;
        Ok(())
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        carry!(self, prune, request)
    }
}
