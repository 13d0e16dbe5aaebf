//! Pruning: delete settled jobs past their retention, a bounded number at a time.

use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument as _;

use super::pool::Pool;
use crate::calls::lane::Answer;
use crate::observe::Event;
use crate::store::PruneRequest;

/// Between two rounds.
const EVERY: Duration = Duration::from_secs(60);

/// Rows in one call: few enough that concurrent claims do not notice.
const ROWS: usize = 1_000;

/// Prunes until it is dropped.
pub(crate) async fn pruner(pool: Arc<Pool>) {
    let mut lane = pool.session.lane();
    loop {
        tokio::time::sleep(EVERY.mul_f64(0.5 + fastrand::f64())).await;
        loop {
            let call = lane.call(EVERY, |store, request| async move {
                let overdue = Duration::ZERO;
                store
                    .prune(PruneRequest {
                        request,
                        overdue,
                        max: ROWS,
                    })
                    .instrument(tracing::debug_span!("store.prune"))
                    .await
            });
            let Answer::Known(jobs) = call.await else {
                break;
            };
            pool.observers.emit(|| Event::Pruned { jobs });
            if jobs < ROWS as u64 {
                break;
            }
        }
    }
}
