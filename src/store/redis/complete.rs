//! complete: run the caller's commands and complete the job, in one step; or save a checkpoint with
//! them.

use std::fmt;

use bytes::Bytes;

use super::wire::{In, Out};
use super::{RedisStore, at, checkpoint};
use crate::error::{Result, Verb};
use crate::fence::redis::Commands;
use crate::job::QueueName;
use crate::lease::{Receipt, Verdict};
use crate::limits::{self, at_most};
use crate::store::{Checkpoint, Checkpointed, Outcome, RequestId, Settlement};

/// The function's word for commands of which one would fail.
const REFUSED: u8 = 255;

/// The part of a partition's keys that is left to its users, behind the tag.
const DATA: &str = "data:";

impl RedisStore {
    /// The key of that name beside the jobs of a queue's partition, for
    /// [`complete_with`](Self::complete_with): `{namespace:queue:partition}:data:name`.
    pub fn data_key(&self, queue: &QueueName, partition: u16, name: impl fmt::Display) -> String {
        let namespace = &self.shared.options.namespace;
        format!("{{{namespace}:{queue}:{partition}}}:{DATA}{name}")
    }

    /// Runs commands and completes a job in one step: the effect and the settlement are both there
    /// or neither is. On [`Verdict::Fenced`] the lease is somebody else's, and nothing was written.
    ///
    /// All keys must share the slot of the receipt's partition: their hash tag is that of
    /// [`data_key`](Self::data_key). The user of the connection needs the right to each of the
    /// commands, and to `TYPE`.
    ///
    /// # Errors
    /// `InvalidInput` for a key of another slot or of the queue's own, and for a command that would
    /// fail: nothing was written, and the lease is still held. Others: unknown; send the same
    /// request again.
    pub async fn complete_with(
        &self,
        request: RequestId,
        receipt: &Receipt,
        result: Option<Bytes>,
        commands: &Commands,
    ) -> Result<Verdict> {
        let completed = self.complete_one(request, receipt, result, commands);
        completed.await.map_err(at(Verb::Settle))
    }

    async fn complete_one(
        &self,
        request: RequestId,
        receipt: &Receipt,
        result: Option<Bytes>,
        commands: &Commands,
    ) -> Result<Verdict> {
        let bytes = result.as_ref().map_or(0, Bytes::len);
        at_most("result", bytes, limits::CHECKPOINT_BYTES, "bytes")?;
        self.check(receipt, commands)?;
        self.shared.sessions.begin(request, Verb::Settle)?;
        let settlement = Settlement {
            receipt: receipt.clone(),
            outcome: Outcome::Complete { result },
        };
        let shares = self.shares(std::slice::from_ref(&settlement)).await?;
        let here = |share: &&super::settle::Share| share.partition.number == receipt.partition;
        let Some(share) = shares.first().filter(here) else {
            self.nowhere(request).await?;
            return Ok(Verdict::Fenced);
        };
        let keys: Vec<&[u8]> = commands.keys().map(str::as_bytes).collect();
        let (words, data) = (commands.args(), share.data());
        let mut args: Vec<&[u8]> = vec![&data.0];
        args.extend(words.iter().map(Vec::as_slice));
        let function = &self.functions().complete;
        let own = share.partition.keys();
        let reply = self.request_step(function, (own, &keys), request, Verb::Settle, 0, &args);
        let said = done(commands, &reply.await?.body.rest())?;
        let mut verdict = [Verdict::Fenced];
        share.verdicts(&said, &mut verdict)?;
        Ok(verdict[0])
    }

    /// Runs commands and saves a checkpoint in one step: the effect and the state that tells of it
    /// are both there or neither is. On [`Checkpointed::Fenced`] the lease is somebody else's, on
    /// [`Checkpointed::Behind`] a later checkpoint of it is saved: then nothing was written. A
    /// number that is saved already has had its commands run, and none are run again.
    ///
    /// # Errors
    /// As [`complete_with`](Self::complete_with).
    pub async fn checkpoint_with(
        &self,
        request: RequestId,
        checkpoint: &Checkpoint,
        commands: &Commands,
    ) -> Result<Checkpointed> {
        let saved = self.checkpoint_one(request, checkpoint, commands);
        saved.await.map_err(at(Verb::Checkpoint))
    }

    async fn checkpoint_one(
        &self,
        request: RequestId,
        checkpoint: &Checkpoint,
        commands: &Commands,
    ) -> Result<Checkpointed> {
        let (receipt, bytes) = (&checkpoint.receipt, checkpoint.bytes.len());
        at_most("checkpoint", bytes, limits::CHECKPOINT_BYTES, "bytes")?;
        self.check(receipt, commands)?;
        self.shared.sessions.begin(request, Verb::Checkpoint)?;
        let queue = self.queue(&receipt.queue).await?;
        let Some(partition) = queue.and_then(|queue| queue.partition(receipt.partition)) else {
            self.nowhere(request).await?;
            return Ok(Checkpointed::Fenced);
        };
        let mut data = Out::default();
        checkpoint::put(&mut data, receipt.grant.get(), checkpoint);
        let keys: Vec<&[u8]> = commands.keys().map(str::as_bytes).collect();
        let words = commands.args();
        let mut args: Vec<&[u8]> = vec![&data.0];
        args.extend(words.iter().map(Vec::as_slice));
        let function = &self.functions().checkpoint_with;
        let keys = (partition.keys(), &*keys);
        let reply = self.request_step(function, keys, request, Verb::Checkpoint, 0, &args);
        let said = done(commands, &reply.await?.body.rest())?;
        checkpoint::answered(&mut In::new(said))
    }

    /// Checks that the commands only write, and only where the receipt's partition is.
    fn check(&self, receipt: &Receipt, commands: &Commands) -> Result<()> {
        let Receipt {
            queue, partition, ..
        } = receipt;
        let namespace = &self.shared.options.namespace;
        let own = self.data_key(queue, *partition, "");
        let own = own.trim_end_matches(DATA);
        commands.check(&format!("{namespace}:{queue}:{partition}"), |key| {
            let part = key.strip_prefix(own);
            part.is_some_and(|part| !part.starts_with(DATA))
        })?;
        commands.check_writes()
    }
}

/// What the function said, unless it said why it ran none of the commands.
fn done(commands: &Commands, said: &Bytes) -> Result<Bytes> {
    if said.first() != Some(&REFUSED) {
        return Ok(said.clone());
    }
    let mut why = In::new(said.slice(1..));
    let number = why.u16()?;
    Err(commands.refused(number, &String::from_utf8_lossy(&why.rest())))
}
