//! renew: extend grants, let single leases of them lapse.

use std::collections::BTreeMap;

use super::RedisStore;
use super::wire::{In, Out, garbled};
use crate::error::Result;
use crate::job::QueueName;
use crate::lease::{FencingToken, Progress};
use crate::limits;
use crate::store::{Beat, Renewal, codec};

/// Beats in one call: short enough for the claims beside it.
const CHUNK: usize = 50;
/// Leases of a beat that show progress, and leases that lapse, in one part of it.
const SHOWN: usize = 200;
const LAPSES: usize = 50;
/// A place that no lease has.
const NOWHERE: usize = u16::MAX as usize;

impl RedisStore {
    pub(super) async fn renew_all(&self, beats: &[Beat]) -> Result<Vec<Renewal>> {
        Beat::validate_all(beats)?;
        let mut renewals = vec![Renewal::Fenced; beats.len()];
        let mut by_partition = BTreeMap::<(QueueName, u16), Vec<usize>>::new();
        for (at, beat) in beats.iter().enumerate() {
            let key = (beat.queue.clone(), beat.partition);
            by_partition.entry(key).or_default().push(at);
        }
        for ((name, number), places) in by_partition {
            let Some(queue) = self.queue(&name).await? else {
                continue;
            };
            let is_here = queue.partition(number).is_some();
            let Some(partition) = queue.partition(if is_here { number } else { 0 }) else {
                continue;
            };
            let parts: Vec<Part<'_>> = places
                .iter()
                .flat_map(|at| Part::all(*at, &beats[*at]))
                .collect();
            let mut left = &parts[..];
            while !left.is_empty() {
                let chunk = &left[..left.len().min(CHUNK)];
                let mut data = Out::default();
                for part in chunk {
                    put_beat(&mut data, part, is_here);
                }
                let function = &self.functions().renew;
                let reply = self.look(function, partition.keys(), &[&data.0]).await?;
                let told = read_renewals(reply.body, chunk.iter().map(|part| part.leases))?;
                // What would have taken long is left for the next call.
                left = &left[told.len()..];
                for (part, renewal) in chunk.iter().zip(told) {
                    // The last part of a beat has its leases.
                    renewals[part.at] = renewal;
                }
            }
        }
        Ok(renewals)
    }
}

/// A beat, or as much of one as a call should do.
struct Part<'b> {
    at: usize,
    beat: &'b Beat,
    leases: &'b [FencingToken],
    lapse: Vec<FencingToken>,
    progress: &'b [(FencingToken, Progress)],
}

impl<'b> Part<'b> {
    /// One, unless that is too much. Then what shows progress comes first, then what lapses, the
    /// newest first: each goes ahead of those that went to the front of their line before it.
    fn all(at: usize, beat: &'b Beat) -> Vec<Self> {
        let part = |lapse: &[FencingToken], progress| Self {
            at,
            beat,
            leases: &[],
            lapse: lapse.to_vec(),
            progress,
        };
        if beat.progress.len() <= SHOWN && beat.lapse.len() <= LAPSES {
            return vec![Self {
                leases: &beat.leases,
                ..part(&beat.lapse, &beat.progress)
            }];
        }
        let shown = beat.progress.chunks(SHOWN);
        let mut parts: Vec<_> = shown.map(|some| part(&[], some)).collect();
        let mut lapse = beat.lapse.clone();
        lapse.sort_unstable_by(|a, b| b.cmp(a));
        parts.extend(lapse.chunks(LAPSES).map(|some| part(some, &[])));
        if let Some(last) = parts.last_mut() {
            last.leases = &beat.leases;
        }
        parts
    }
}

fn place_of(beat: &Beat, token: FencingToken) -> usize {
    let place = token.get().checked_sub(beat.grant.get());
    place
        .and_then(|place| usize::try_from(place).ok())
        .filter(|place| *place < limits::GRANT_LEASES)
        .unwrap_or(NOWHERE)
}

fn put_beat(data: &mut Out, part: &Part<'_>, is_here: bool) {
    let beat = part.beat;
    let grant = if is_here { beat.grant.get() } else { 0 };
    data.raw(&grant.to_be_bytes()).raw(beat.nonce.as_bytes());
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for token in part.leases {
        let place = place_of(beat, *token);
        match runs.last_mut() {
            Some((first, count)) if *first + *count == place && place != NOWHERE => *count += 1,
            _ => runs.push((place, 1)),
        }
    }
    data.u16(runs.len());
    for (first, count) in runs {
        data.u16(first).u16(count);
    }
    data.u16(part.lapse.len());
    for token in &part.lapse {
        data.u16(place_of(beat, *token));
    }
    data.u16(part.progress.len());
    for (token, progress) in part.progress {
        let mut raw = Vec::new();
        codec::put_progress(&mut raw, progress);
        data.u16(place_of(beat, *token)).text(&raw);
    }
}

/// What was said of the first of the beats.
pub(super) fn read_renewals<'a>(
    mut body: In,
    beats: impl Iterator<Item = &'a [FencingToken]>,
) -> Result<Vec<Renewal>> {
    let answered = body.u16()?;
    let renewals = beats
        .take(answered)
        .map(|leases| read_renewal(&mut body, leases));
    let renewals = renewals.collect::<Result<Vec<_>>>()?;
    if renewals.is_empty() || renewals.len() < answered {
        return Err(garbled());
    }
    Ok(renewals)
}

fn read_renewal(body: &mut In, leases: &[FencingToken]) -> Result<Renewal> {
    if body.u8()? == 0 {
        return Ok(Renewal::Fenced);
    }
    let granted = body.micros()?;
    let mut tokens = || -> Result<Vec<FencingToken>> {
        let count = body.u16()?;
        let token = |_| leases.get(body.u16()?).copied().ok_or_else(garbled);
        (0..count).map(token).collect()
    };
    let cancel = tokens()?;
    let fenced = tokens()?;
    Ok(Renewal::Held {
        granted,
        cancel,
        fenced,
    })
}
