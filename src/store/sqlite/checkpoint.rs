//! checkpoint: save state under a lease, never behind what that lease has saved.

use super::fault::Done;
use super::session::garbled;
use super::tx::Tx;
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::store::{Checkpoint, CheckpointRequest, Checkpointed};

/// The first byte of a remembered `Behind`, before its number.
const BEHIND: u8 = 8;

impl Tx<'_> {
    pub(super) fn checkpoint(
        &mut self,
        request: &CheckpointRequest,
        now: Timestamp,
    ) -> Done<Vec<Checkpointed>> {
        if let Some(first) = self.recall(request.request, Verb::Checkpoint, now)? {
            return read(&first);
        }
        let mut answers = Vec::with_capacity(request.checkpoints.len());
        for checkpoint in &request.checkpoints {
            answers.push(self.checkpoint_one(checkpoint, now)?);
        }
        self.remember(request.request, Verb::Checkpoint, &written(&answers))?;
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

fn written(answers: &[Checkpointed]) -> Vec<u8> {
    let mut out = Vec::with_capacity(answers.len());
    for answer in answers {
        match answer {
            Checkpointed::Fenced => out.push(0),
            Checkpointed::Saved { late, cancel } => {
                out.push(1 | u8::from(*late) << 1 | u8::from(*cancel) << 2);
            }
            Checkpointed::Behind { seq } => {
                out.push(BEHIND);
                out.extend_from_slice(&seq.to_le_bytes());
            }
        }
    }
    out
}

fn read(mut first: &[u8]) -> Done<Vec<Checkpointed>> {
    let mut answers = Vec::new();
    while let Some((&byte, rest)) = first.split_first() {
        first = rest;
        answers.push(match byte {
            0 => Checkpointed::Fenced,
            BEHIND => {
                let (seq, rest) = first.split_first_chunk::<8>().ok_or_else(garbled)?;
                first = rest;
                Checkpointed::Behind {
                    seq: u64::from_le_bytes(*seq),
                }
            }
            byte => Checkpointed::Saved {
                late: byte & 2 != 0,
                cancel: byte & 4 != 0,
            },
        });
    }
    Ok(answers)
}
