//! checkpoint: save state under a lease, never behind what that lease has saved.

use std::sync::Arc;

use super::{State, offset};
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
        let Some((grant, lease)) = self.held(&receipt) else {
            self.fenced(&receipt.queue, 1);
            return Checkpointed::Fenced;
        };
        let (late, cancel) = (grant.deadline <= now, lease.cancel);
        let saved = lease.job.checkpoint.as_ref();
        if let Some(saved) = saved.filter(|saved| saved.token == receipt.token && saved.seq > seq) {
            return Checkpointed::Behind { seq: saved.seq };
        }
        let lease = self.grants.get_mut(&receipt.grant).and_then(|grant| {
            grant
                .leases
                .get_mut(offset(receipt.grant, receipt.token)?)?
                .as_mut()
        });
        if let Some(lease) = lease {
            Arc::make_mut(&mut lease.job).checkpoint = Some(Box::new(SavedCheckpoint {
                token: receipt.token,
                seq,
                bytes,
            }));
        }
        Checkpointed::Saved { late, cancel }
    }
}
