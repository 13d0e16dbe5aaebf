//! What is PostgreSQL's own: the caller's transaction, a server that dies, a copy that lags behind.

mod beside;
mod clients;
use leasehold_support::certs;
mod complete;
use leasehold_support::disk;
mod faults;
mod freeze;
mod full;
mod in_hand;
use leasehold_support::issuer;
mod kill;
mod lean;
mod locks;
mod looking;
mod moving;
use leasehold_support::paying;
mod pooler;
mod prune;
mod public;
mod schema;
use leasehold_support::postgres as server;
mod standstill;
mod starts;
mod tls;
mod tokens;
mod transaction;
mod waking;

use std::sync::Arc;
use std::time::Duration;

use leasehold::job::{Kind, QueueName};
use leasehold::lease::Receipt;
use leasehold::lease::{Grant, Nonce};
use leasehold::store::{
    Beat, ClaimQueue, ClaimRequest, EnqueueRequest, Enqueued, Outcome, PostgresStore, RequestId,
    SessionId, Settlement,
};
use leasehold::{JobId, NewJob, Store};

/// A caller of a store, with a session of its own.
pub(crate) struct Caller {
    pub(crate) store: PostgresStore,
    session: SessionId,
    seq: u64,
}

pub(crate) fn job() -> NewJob {
    NewJob::raw(QueueName::default(), Kind::new("work").unwrap(), "{}")
}

pub(crate) fn complete(receipt: Receipt) -> Settlement {
    Settlement {
        receipt,
        outcome: Outcome::Complete { result: None },
    }
}

/// A beat for all leases of a grant.
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

/// Calls until there is an answer: a connection that died with its server is noticed when it is
/// used.
pub(crate) async fn answered<T, F>(mut call: impl FnMut() -> F) -> T
where
    F: Future<Output = leasehold::Result<T>>,
{
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => assert!(error.is_transient(), "{error:?}"),
        }
    }
}

impl Caller {
    pub(crate) async fn new(store: PostgresStore) -> Self {
        let session = answered(|| store.open_session()).await;
        Self {
            store,
            session,
            seq: 0,
        }
    }

    pub(crate) fn request(&mut self) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane: 0,
            seq: self.seq,
        }
    }

    pub(crate) async fn enqueue(&mut self, n: usize) -> Vec<JobId> {
        let request = self.request();
        let jobs = (0..n).map(|_| (JobId::generate(), job()));
        let jobs = Arc::new(jobs.collect());
        let request = EnqueueRequest { request, jobs };
        let stored = answered(|| self.store.enqueue(request.clone())).await;
        stored.into_iter().map(Enqueued::id).collect()
    }

    pub(crate) fn claim_request(&mut self, max: usize, term: Duration) -> ClaimRequest {
        ClaimRequest {
            request: self.request(),
            owner: "worker".into(),
            task: "test".into(),
            nonce: Nonce::draw().unwrap(),
            queues: vec![ClaimQueue {
                queue: QueueName::default(),
                term,
                max_lifetime: Duration::from_secs(3600),
            }],
            max,
            admit_suspect: true,
        }
    }

    pub(crate) async fn claim(&mut self, max: usize, term: Duration) -> Vec<Grant> {
        let request = self.claim_request(max, term);
        answered(|| self.store.claim(request.clone())).await.grants
    }

    pub(crate) async fn claim_one(&mut self, term: Duration) -> Option<Receipt> {
        let grants = self.claim(1, term).await;
        let grant = grants.first()?;
        Some(grant.receipt(grant.leases.first()?))
    }
}
