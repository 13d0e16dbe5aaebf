//! A caller with a session: the plain calls of a test in one line each.

use std::sync::Arc;
use std::time::Duration;

use leasehold::job::{Kind, QueueName};
use leasehold::lease::Verdict;
use leasehold::lease::{Grant, Nonce};
use leasehold::store::{
    Beat, ClaimQueue, ClaimRequest, Claimed, EnqueueRequest, Enqueued, Outcome, RequestId,
    SessionId, SettleRequest, Settlement,
};
use leasehold::{JobId, NewJob, Result, Store};

pub(crate) struct Client {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) session: SessionId,
    pub(crate) lane: u32,
    pub(crate) seq: u64,
}

pub(crate) fn queue(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

pub(crate) fn job(name: &str) -> NewJob {
    NewJob::raw(queue(name), Kind::new("test").unwrap(), vec![7; 100])
}

/// A renewal of everything in a grant.
pub(crate) fn beat(grant: &Grant) -> Beat {
    Beat {
        queue: grant.queue.clone(),
        partition: grant.partition,
        grant: grant.id,
        nonce: grant.nonce,
        leases: grant.leases.iter().map(|lease| lease.token).collect(),
        lapse: Vec::new(),
        progress: Vec::new(),
    }
}

impl Client {
    pub(crate) async fn new(store: impl Store) -> Self {
        Self {
            session: store.open_session().await.unwrap(),
            store: Arc::new(store),
            lane: 0,
            seq: 0,
        }
    }

    pub(crate) fn id(&mut self) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane: self.lane,
            seq: self.seq,
        }
    }

    pub(crate) async fn enqueue(&mut self, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        let jobs = jobs.into_iter().map(|job| (JobId::generate(), job));
        let request = EnqueueRequest {
            request: self.id(),
            jobs: Arc::new(jobs.collect()),
        };
        self.store.enqueue(request).await
    }

    pub(crate) fn claim_request(&mut self, name: &str, max: usize) -> ClaimRequest {
        ClaimRequest {
            request: self.id(),
            owner: "owner".into(),
            task: "task".into(),
            nonce: Nonce::draw().unwrap(),
            queues: vec![ClaimQueue {
                queue: queue(name),
                term: Duration::from_secs(30),
                max_lifetime: Duration::from_secs(300),
            }],
            max,
            admit_suspect: true,
        }
    }

    pub(crate) async fn claim(&mut self, name: &str, max: usize) -> Result<Claimed> {
        let request = self.claim_request(name, max);
        self.store.claim(request).await
    }

    pub(crate) async fn complete(&mut self, grants: &[Grant]) -> Result<Vec<Verdict>> {
        let leases = grants
            .iter()
            .flat_map(|grant| grant.leases.iter().map(|lease| grant.receipt(lease)));
        let settlements = leases.map(|receipt| Settlement {
            receipt,
            outcome: Outcome::Complete { result: None },
        });
        let request = SettleRequest {
            settlements: settlements.collect(),
            request: self.id(),
        };
        self.store.settle(request).await
    }
}
