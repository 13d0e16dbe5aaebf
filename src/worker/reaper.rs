//! Expiring: what is done about leases whose time has passed.
//!
//! Claims expire what is overdue in their own queues, in the same step. The reaper looks after the
//! queues that no worker claims from. All it knows is the time: a worker that was frozen for longer
//! than its term looks dead, and its job runs again. The fence, not the reaper, protects the data.

use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument as _;

use super::pool::Pool;
use crate::calls::lane::{Answer, Lane};
use crate::limits;
use crate::observe::{Event, metrics};
use crate::store::ReapRequest;

/// Between two rounds. Claims do the urgent part.
const EVERY: Duration = Duration::from_secs(10);

/// Reaps until it is dropped.
pub(crate) async fn reaper(pool: Arc<Pool>) {
    let mut lane = pool.session.lane();
    loop {
        tokio::time::sleep(EVERY.mul_f64(0.5 + fastrand::f64())).await;
        while reap(&pool, &mut lane).await == limits::STEP_JOBS {}
    }
}

async fn reap(pool: &Pool, lane: &mut Lane) -> usize {
    let call = lane.call(EVERY, |store, request| async move {
        store
            .reap(ReapRequest {
                request,
                max: limits::STEP_JOBS,
            })
            .instrument(tracing::debug_span!("store.reap"))
            .await
    });
    let Answer::Known(expired) = call.await else {
        return 0;
    };
    for expiry in &expired {
        metrics::expired(&expiry.queue, &expiry.kind, expiry.cause);
        pool.observers.emit(|| Event::Expired { expiry });
    }
    expired.len()
}
