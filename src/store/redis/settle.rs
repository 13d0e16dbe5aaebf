//! settle: end held leases; refuse every other receipt.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use super::RedisStore;
use super::queue::Partition;
use super::step::Steps;
use super::wire::{Out, garbled};
use crate::clock::micros;
use crate::error::{Result, Verb};
use crate::job::QueueName;
use crate::lease::{FencingToken, Receipt, Verdict};
use crate::limits::{self, clip};
use crate::rules::issue::Issuer;
use crate::store::{Outcome, RequestId, SettleRequest, Settlement};

/// A place that no lease has.
const NOWHERE: usize = u16::MAX as usize;
/// No mark that could be believed is as large; a larger one has no exact double.
const MARK_MAX: u64 = 1 << 53;

/// The work of one step: a completion that leaves nothing behind is one, other ends are four.
const CHUNK: usize = 200;
const OTHERS: usize = 4;
/// A lease's place in its grant, and its job: how a settlement begins.
const LEASE: usize = 2 + 16;
/// A completion without a result, for the functions.
const PLAIN: u8 = 255;

/// The settlements of one partition, each packed, and where their verdicts go.
pub(super) struct Share {
    pub(super) partition: Partition,
    places: Vec<usize>,
    entries: Vec<Packed>,
}

/// A settlement as it is sent, but for its grant, which those that follow each other share.
struct Packed {
    grant: [u8; 24],
    data: Out,
    work: usize,
    /// The token, if the job goes to the front of its line.
    front: Option<FencingToken>,
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
        let id = if is_here { receipt.grant.get() } else { 0 };
        let mut grant = [0; 24];
        grant[..8].copy_from_slice(&id.to_be_bytes());
        grant[8..].copy_from_slice(receipt.nonce.as_bytes());
        let is_front = matches!(outcome, Outcome::Surrender { delay, .. } if delay.is_zero());
        let front = is_front.then_some(receipt.token);
        let mut data = Out::default();
        data.u16(place_in_grant(receipt))
            .raw(receipt.job.as_bytes());
        let is_plain = matches!(outcome, Outcome::Complete { result: None });
        if is_plain {
            data.u8(PLAIN);
        } else {
            put_outcome(&mut data, outcome);
        }
        let work = if is_plain { 1 } else { OTHERS };
        self.entries.push(Packed {
            grant,
            data,
            work,
            front,
        });
    }

    /// The settlements, packed one behind the other.
    pub(super) fn data(&self) -> Out {
        packed(&self.entries)
    }

    /// Puts what goes to the front of its line behind the rest, the newest first: each step goes
    /// ahead of what the one before put there, and so the oldest come first in the end. What names
    /// a lease once more stays behind the first that does.
    fn sort_fronts(&mut self) {
        let all: usize = self.entries.iter().map(|entry| entry.work).sum();
        if all <= CHUNK || self.entries.iter().all(|entry| entry.front.is_none()) {
            return;
        }
        let mut seen = HashSet::new();
        let places = std::mem::take(&mut self.places).into_iter();
        let mut entries: Vec<_> = places.zip(std::mem::take(&mut self.entries)).collect();
        entries.sort_by_cached_key(|(_, entry)| {
            let again = !seen.insert((entry.grant, entry.data.0[..LEASE].to_vec()));
            (again, entry.front.map(Reverse))
        });
        (self.places, self.entries) = entries.into_iter().unzip();
    }

    /// The settlements, packed for one step after the other.
    fn chunks(&self) -> Vec<Out> {
        let mut chunks = Vec::new();
        let (mut from, mut work) = (0, 0);
        for (at, entry) in self.entries.iter().enumerate() {
            if work + entry.work > CHUNK {
                chunks.push(packed(&self.entries[from..at]));
                (from, work) = (at, 0);
            }
            work += entry.work;
        }
        chunks.push(packed(&self.entries[from..]));
        chunks
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

fn packed(entries: &[Packed]) -> Out {
    let mut data = Out::default();
    for run in entries.chunk_by(|one, next| one.grant == next.grant) {
        data.raw(&run[0].grant).u16(run.len());
        for entry in run {
            data.raw(&entry.data.0);
        }
    }
    data
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
        Outcome::Decline { delay, reason } => (4, micros(*delay), 0, None, clipped(reason)),
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
                        entries: Vec::new(),
                    },
                );
            }
            if let Some(share) = shares.get_mut(&key) {
                let is_here = share.partition.number == receipt.partition;
                share.add(place, receipt, outcome, is_here);
            }
        }
        Ok(merged(shares.into_values().collect()))
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
        for mut share in shares {
            share.sort_fronts();
            let part = self.settle_share(&share, id).await?;
            share.verdicts(&part, &mut verdicts)?;
        }
        Ok(verdicts)
    }

    async fn settle_share(&self, share: &Share, id: RequestId) -> Result<Vec<u8>> {
        let function = &self.functions().settle;
        let mut steps = Steps::new(self, share.partition.keys(), id, Verb::Settle);
        let mut verdicts = Vec::with_capacity(share.places.len());
        for chunk in share.chunks() {
            let part = steps.take(function, &[&chunk.0]).await?.rest();
            verdicts.extend_from_slice(&part);
        }
        steps.end(function).await?;
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
                other.entries.extend(share.entries);
            }
            None => merged.push(share),
        }
    }
    merged
}
