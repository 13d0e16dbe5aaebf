//! One lease of a worker, worked by hand: claimed alone, run without a slot, settled at once.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::monotonic;
use crate::error::Result;
use crate::job::JobId;
use crate::store::Store;
use crate::worker::Worker;
use crate::worker::claimer;
use crate::worker::held::HeldGrant;
use crate::worker::outcome;
use crate::worker::pool::Pool;
use crate::worker::settler::{self, Times};
use crate::worker::slots;

/// A lease that nobody renews, and whose handler nobody runs but its owner.
pub struct HeldByHand {
    pool: Arc<Pool>,
    held: Arc<HeldGrant>,
    index: usize,
}

/// How a handler ended: to be handed in.
pub struct HandlerEnd(outcome::HandlerEnd);

impl HeldByHand {
    /// Claims one lease for this worker. None if there is no job.
    ///
    /// # Errors
    /// If the worker cannot be built.
    pub async fn claim(worker: Worker) -> Result<Option<Self>> {
        let pool = worker.build()?;
        let claimed = claimer::one(&pool).await;
        Ok(claimed.map(|(held, index)| Self { pool, held, index }))
    }

    /// The handler's run, to be polled by whoever holds it.
    pub fn run(&self) -> Pin<Box<dyn Future<Output = HandlerEnd> + Send>> {
        let run = slots::alone(Arc::clone(&self.held), self.index);
        Box::pin(async { HandlerEnd(run.await) })
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.held.leases[self.index].job.id
    }

    /// The store that granted the lease.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.pool.store()
    }

    /// How long it lasts.
    pub fn term(&self) -> Duration {
        self.held.grant.term
    }

    /// Makes the holder believe that it was renewed just now.
    pub fn believe_renewed(&self) {
        self.held.extend(monotonic(), self.held.grant.term);
    }

    /// What the handler leaves behind.
    pub fn result(&self) -> Option<Bytes> {
        self.held.leases[self.index].result()
    }

    /// Settles the lease as the end of its handler says, and waits for the verdict.
    pub async fn settle(&self, end: HandlerEnd) {
        let times = Times {
            waited: Some(Duration::ZERO),
            ran: Duration::ZERO,
        };
        settler::hand_in(&self.pool, Arc::clone(&self.held), self.index, end.0, times);
        settler::settle_waiting(&self.pool, &mut self.pool.session.lane()).await;
    }
}

impl Drop for HeldByHand {
    fn drop(&mut self) {
        // The pool and what it holds know each other.
        self.pool.end(&self.held, self.index);
    }
}
