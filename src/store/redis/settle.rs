//! settle: end held leases; refuse every other receipt.

use std::collections::BTreeMap;

use super::RedisStore;
use super::queue::Partition;
use super::wire::{Out, garbled};
use crate::clock::micros;
use crate::error::{Result, Verb};
use crate::job::{QueueName, clip, limits};
use crate::lease::{Issuer, Receipt, Verdict};
use crate::store::{Outcome, SettleRequest, Settlement};

/// A place that no lease has.
const NOWHERE: usize = u16::MAX as usize;
/// No mark that could be believed is as large; a larger one has no exact double.
const MARK_MAX: u64 = 1 << 53;

/// The settlements of one partition, packed, and where their verdicts go.
pub(super) struct Share {
    pub(super) partition: Partition,
    pub(super) places: Vec<usize>,
    pub(super) data: Out,
    run: Option<Run>,
}

/// Neighbouring leases of one grant that complete.
struct Run {
    grant: u64,
    nonce: [u8; 16],
    first: usize,
    ids: Vec<u8>,
}

/// The place of a receipt's lease in its grant.
pub(super) fn place_in_grant(receipt: &Receipt) -> usize {
    let place = receipt.token.get().checked_sub(receipt.grant.get());
    place
        .and_then(|place| usize::try_from(place).ok())
        .filter(|place| *place < limits::GRANT_LEASES)
        .unwrap_or(NOWHERE)
}

impl Share {
    fn add(&mut self, place: usize, receipt: &Receipt, outcome: &Outcome, is_here: bool) {
        self.places.push(place);
        // A receipt for a partition that is not there names no grant.
        let grant = if is_here { receipt.grant.get() } else { 0 };
        let nonce = *receipt.nonce.as_bytes();
        let at = place_in_grant(receipt);
        if matches!(outcome, Outcome::Complete { result: None }) && at != NOWHERE {
            let follows = self.run.as_ref().is_some_and(|run| {
                run.grant == grant && run.nonce == nonce && run.first + run.ids.len() / 16 == at
            });
            if !follows {
                self.close();
            }
            let run = self.run.get_or_insert_with(|| Run {
                grant,
                nonce,
                first: at,
                ids: Vec::new(),
            });
            run.ids.extend_from_slice(receipt.job.as_bytes());
            return;
        }
        self.close();
        let data = &mut self.data;
        data.raw(&grant.to_be_bytes()).raw(&nonce);
        data.u8(1).u16(at).u16(1).raw(receipt.job.as_bytes());
        put_outcome(data, outcome);
    }

    fn close(&mut self) {
        if let Some(run) = self.run.take() {
            self.data.raw(&run.grant.to_be_bytes()).raw(&run.nonce);
            self.data.u8(0).u16(run.first).u16(run.ids.len() / 16);
            self.data.raw(&run.ids);
        }
    }

    /// Reads the verdicts.
    pub(super) fn verdicts(&self, bytes: &[u8], verdicts: &mut [Verdict]) -> Result<()> {
        if bytes.len() != self.places.len() {
            return Err(garbled());
        }
        for (place, byte) in self.places.iter().zip(bytes) {
            verdicts[*place] = match byte {
                0 => Verdict::Fenced,
                bits => Verdict::Held {
                    late: bits & 2 != 0,
                    cancel: bits & 4 != 0,
                },
            };
        }
        Ok(())
    }
}

fn put_outcome(data: &mut Out, outcome: &Outcome) {
    let (kind, delay, mark, result, reason) = match outcome {
        Outcome::Complete { result } => (0, 0, 0, result.as_deref(), String::new()),
        Outcome::Retry { delay, reason } => (1, micros(*delay), 0, None, clipped(reason)),
        Outcome::Surrender { delay, mark } => {
            let number = mark.map_or(0, |mark| mark.get().min(MARK_MAX));
            let reason = mark.map_or(String::new(), |mark| {
                format!(
                    "broken fence: its mark {mark} is more than {:?} ahead of the store's clock",
                    Issuer::BELIEF
                )
            });
            (2, micros(*delay), number, None, reason)
        }
        Outcome::Bury { reason } => (3, 0, 0, None, clipped(reason)),
    };
    data.u8(kind).u64(delay).u64(mark);
    match result {
        // As it stands in a record: behind its length.
        Some(result) => data.u32(result.len() + 4).text(result),
        None => data.u32(0),
    };
    data.text(reason.as_bytes());
}

fn clipped(reason: &str) -> String {
    clip(reason, limits::REASON_BYTES).to_owned()
}

impl RedisStore {
    /// The settlements, by partition. Those of queues that are not there are in none.
    pub(super) async fn shares(&self, settlements: &[Settlement]) -> Result<Vec<Share>> {
        let mut shares = BTreeMap::<(QueueName, u16), Share>::new();
        for (place, Settlement { receipt, outcome }) in settlements.iter().enumerate() {
            let key = (receipt.queue.clone(), receipt.partition);
            if !shares.contains_key(&key) {
                let Some(queue) = self.queue(&receipt.queue).await? else {
                    continue;
                };
                let partition = queue
                    .partition(receipt.partition)
                    .or_else(|| queue.partition(0));
                let Some(partition) = partition else { continue };
                shares.insert(
                    key.clone(),
                    Share {
                        partition,
                        places: Vec::new(),
                        data: Out::default(),
                        run: None,
                    },
                );
            }
            if let Some(share) = shares.get_mut(&key) {
                let is_here = share.partition.number == receipt.partition;
                share.add(place, receipt, outcome, is_here);
            }
        }
        let mut shares: Vec<Share> = shares.into_values().collect();
        shares.iter_mut().for_each(Share::close);
        Ok(merged(shares))
    }

    pub(super) async fn settle_all(&self, request: &SettleRequest) -> Result<Vec<Verdict>> {
        request.validate()?;
        let id = request.request;
        self.shared.sessions.begin(id, Verb::Settle)?;
        let mut verdicts = vec![Verdict::Fenced; request.settlements.len()];
        let shares = self.shares(&request.settlements).await?;
        if shares.is_empty() {
            self.nowhere(id).await?;
        }
        for share in shares {
            let keys = share.partition.keys();
            let script = &self.scripts().settle;
            let args: [&[u8]; 1] = [&share.data.0];
            let mut reply = self.request(script, keys, id, Verb::Settle, &args).await?;
            share.verdicts(&reply.body.rest(), &mut verdicts)?;
        }
        Ok(verdicts)
    }
}

/// One share per partition: receipts of partitions that are not there go to the first.
fn merged(shares: Vec<Share>) -> Vec<Share> {
    let mut merged: Vec<Share> = Vec::with_capacity(shares.len());
    for share in shares {
        let tag = share.partition.keys().tag();
        match merged
            .iter_mut()
            .find(|other| other.partition.keys().tag() == tag)
        {
            Some(other) => {
                other.places.extend(share.places);
                other.data.raw(&share.data.0);
            }
            None => merged.push(share),
        }
    }
    merged
}
