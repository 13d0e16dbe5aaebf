//! Saving checkpoints: those that handlers save at the same time share one call.

use std::sync::Arc;

use tracing::{Instrument as _, debug_span};

use super::merge::MergedCall;
use crate::error::{Result, Verb};
use crate::store::{Checkpoint, CheckpointRequest, Checkpointed, RequestId, Store};

/// The call that saves checkpoints.
pub(crate) struct SaveCheckpoints;

impl MergedCall for SaveCheckpoints {
    type Item = Checkpoint;
    type Sent = Checkpoint;
    type Answer = Checkpointed;

    const VERB: Verb = Verb::Checkpoint;
    /// The checkpoints of a lease stay in order.
    const LANES: usize = 1;
    /// The receipt and the number make a second copy of a checkpoint the same checkpoint.
    const SAFE_AGAIN: bool = true;

    fn add(mut items: Vec<Checkpoint>, call: &mut Vec<Checkpoint>) {
        call.append(&mut items);
    }

    async fn send(
        &self,
        store: Arc<dyn Store>,
        request: RequestId,
        checkpoints: Arc<Vec<Checkpoint>>,
    ) -> Result<Vec<Checkpointed>> {
        let span = debug_span!("store.checkpoint", leases = checkpoints.len());
        let checkpoints = Vec::clone(&checkpoints);
        let request = CheckpointRequest {
            request,
            checkpoints,
        };
        store.checkpoint(request).instrument(span).await
    }
}
