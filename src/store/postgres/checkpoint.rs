//! checkpoint: save state under a lease, never behind what that lease has saved.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::tx::Tx;
use crate::error::Verb;
use crate::job::QueueName;
use crate::lease::FencingToken;
use crate::store::sql::answer::{read_checkpoint, written_checkpoint};
use crate::store::{Checkpoint, CheckpointRequest, Checkpointed};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn checkpoint(
        &mut self,
        request: &CheckpointRequest,
    ) -> Done<Vec<Checkpointed>> {
        let wanted: Vec<(&QueueName, FencingToken)> = request
            .checkpoints
            .iter()
            .map(|checkpoint| (&checkpoint.receipt.queue, checkpoint.receipt.grant))
            .collect();
        let verb = Verb::Checkpoint;
        if let Some(first) = self.start(request.request, verb, &wanted).await? {
            return Ok(read_checkpoint(&first)?);
        }
        let mut answers = Vec::with_capacity(request.checkpoints.len());
        for checkpoint in &request.checkpoints {
            answers.push(self.checkpoint_one(checkpoint)?);
        }
        let answer = written_checkpoint(&answers);
        self.remember(request.request, verb, answer);
        Ok(answers)
    }

    /// The grant must have been sought.
    pub(super) fn checkpoint_one(&mut self, checkpoint: &Checkpoint) -> Done<Checkpointed> {
        let Checkpoint {
            receipt,
            seq,
            bytes,
        } = checkpoint;
        let Some(current) = self.current(receipt)? else {
            self.fenced(&receipt.queue, 1);
            return Ok(Checkpointed::Fenced);
        };
        // Only what this very lease has saved counts: a new token may start over.
        let saved = self.grants[&current.grant].note(current.at);
        let saved = saved.and_then(|note| note.checkpoint.as_ref());
        if let Some((saved, _)) = saved.filter(|(saved, _)| saved > seq) {
            return Ok(Checkpointed::Behind { seq: *saved });
        }
        self.note(current.grant, current.at, |note| {
            note.checkpoint = Some((*seq, bytes.clone()));
        });
        Ok(Checkpointed::Saved {
            late: current.late,
            cancel: current.cancel,
        })
    }
}
