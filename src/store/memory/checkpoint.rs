//! checkpoint: save state under a lease, never behind what that lease has saved.

use std::sync::Arc;

use super::State;
use crate::clock::Timestamp;
use crate::job::SavedCheckpoint;
use crate::store::{Checkpoint, Checkpointed};

impl State {
    pub(super) fn checkpoint(
        &mut self,
        checkpoints: Vec<Checkpoint>,
        now: Timestamp,
    ) -> Vec<Checkpointed> {
        checkpoints
            .into_iter()
            .map(|checkpoint| self.checkpoint_one(checkpoint, now))
            .collect()
    }

    fn checkpoint_one(&mut self, checkpoint: Checkpoint, now: Timestamp) -> Checkpointed {
        let Checkpoint {
            receipt,
            seq,
            bytes,
        } = checkpoint;
        let held = self.held(&receipt);
        let held = held.map(|(grant, lease)| (grant.deadline <= now, lease.cancel));
        let Some(((late, cancel), stored)) = held.zip(self.jobs.get_mut(&receipt.job)) else {
            self.fenced(&receipt.queue, 1);
            return Checkpointed::Fenced;
        };
        let token = receipt.token;
        let saved = stored.job.checkpoint.as_ref();
        if let Some(saved) = saved.filter(|saved| saved.token == token && saved.seq > seq) {
            return Checkpointed::Behind { seq: saved.seq };
        }
        let saved = SavedCheckpoint { token, seq, bytes };
        Arc::make_mut(&mut stored.job).checkpoint = Some(Box::new(saved));
        Checkpointed::Saved { late, cancel }
    }
}
