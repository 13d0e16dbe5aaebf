//! checkpoint: save state under a lease, never behind what that lease has saved.

use std::collections::BTreeMap;

use super::RedisStore;
use super::queue::Partition;
use super::settle::place_in_grant;
use super::wire::{In, Out};
use crate::error::{Result, Verb};
use crate::job::QueueName;
use crate::store::{Checkpoint, CheckpointRequest, Checkpointed};

/// The checkpoints of one partition, packed, and where their answers go.
struct SavedShare {
    partition: Partition,
    places: Vec<usize>,
    data: Out,
}

/// Packs a checkpoint as the functions read it.
pub(super) fn put(data: &mut Out, grant: u64, checkpoint: &Checkpoint) {
    let Checkpoint {
        receipt,
        seq,
        bytes,
    } = checkpoint;
    data.raw(&grant.to_be_bytes());
    data.raw(receipt.nonce.as_bytes());
    data.u16(place_in_grant(receipt));
    data.raw(receipt.job.as_bytes()).u64(*seq).text(bytes);
}

/// The answer to one.
pub(super) fn answered(body: &mut In) -> Result<Checkpointed> {
    Ok(match body.u8()? {
        0 => Checkpointed::Fenced,
        8 => Checkpointed::Behind { seq: body.u64()? },
        bits => Checkpointed::Saved {
            late: bits & 2 != 0,
            cancel: bits & 4 != 0,
        },
    })
}

impl RedisStore {
    pub(super) async fn checkpoint_all(
        &self,
        request: &CheckpointRequest,
    ) -> Result<Vec<Checkpointed>> {
        request.validate()?;
        let id = request.request;
        self.shared.sessions.begin(id, Verb::Checkpoint)?;
        let mut answers = vec![Checkpointed::Fenced; request.checkpoints.len()];
        let mut shares = BTreeMap::<(QueueName, u16), SavedShare>::new();
        for (place, checkpoint) in request.checkpoints.iter().enumerate() {
            let receipt = &checkpoint.receipt;
            let Some(queue) = self.queue(&receipt.queue).await? else {
                continue;
            };
            let is_here = queue.partition(receipt.partition).is_some();
            let number = if is_here { receipt.partition } else { 0 };
            let Some(partition) = queue.partition(number) else {
                continue;
            };
            let share = shares
                .entry((receipt.queue.clone(), number))
                .or_insert_with(|| SavedShare {
                    partition,
                    places: Vec::new(),
                    data: Out::default(),
                });
            share.places.push(place);
            let grant = if is_here { receipt.grant.get() } else { 0 };
            put(&mut share.data, grant, checkpoint);
        }
        if shares.is_empty() {
            self.nowhere(id).await?;
        }
        for share in shares.values() {
            let function = &self.functions().checkpoint;
            let keys = share.partition.keys();
            let args: [&[u8]; 1] = [&share.data.0];
            let reply = self.request(function, keys, id, Verb::Checkpoint, &args);
            let mut body = reply.await?.body;
            for place in &share.places {
                answers[*place] = answered(&mut body)?;
            }
        }
        Ok(answers)
    }
}
