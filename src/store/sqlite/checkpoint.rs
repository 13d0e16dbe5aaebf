//! checkpoint: save state under a lease, never behind what that lease has saved.

use super::answer::{read_checkpoint, written_checkpoint};
use super::fault::Done;
use super::tx::Tx;
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::store::{Checkpoint, CheckpointRequest, Checkpointed};

impl Tx<'_> {
    pub(super) fn checkpoint(
        &mut self,
        request: &CheckpointRequest,
        now: Timestamp,
    ) -> Done<Vec<Checkpointed>> {
        if let Some(first) = self.recall(request.request, Verb::Checkpoint, now)? {
            return Ok(read_checkpoint(&first)?);
        }
        let mut answers = Vec::with_capacity(request.checkpoints.len());
        for checkpoint in &request.checkpoints {
            answers.push(self.checkpoint_one(checkpoint, now)?);
        }
        self.remember(
            request.request,
            Verb::Checkpoint,
            &written_checkpoint(&answers),
        )?;
        Ok(answers)
    }

    pub(super) fn checkpoint_one(
        &mut self,
        checkpoint: &Checkpoint,
        now: Timestamp,
    ) -> Done<Checkpointed> {
        let Checkpoint {
            receipt,
            seq,
            bytes,
        } = checkpoint;
        let Some(current) = self.current(receipt, now)? else {
            self.fenced(&receipt.queue, 1)?;
            return Ok(Checkpointed::Fenced);
        };
        // Only what this very lease has saved counts: a new token may start over.
        let saved = self.grants[&receipt.grant].note(current.at);
        let saved = saved.and_then(|note| note.checkpoint.as_ref());
        if let Some((saved, _)) = saved.filter(|(saved, _)| saved > seq) {
            return Ok(Checkpointed::Behind { seq: *saved });
        }
        self.note(receipt.grant, current.at, |note| {
            note.checkpoint = Some((*seq, bytes.clone()));
        })?;
        Ok(Checkpointed::Saved {
            late: current.late,
            cancel: current.cancel,
        })
    }
}
