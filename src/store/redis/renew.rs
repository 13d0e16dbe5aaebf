//! renew: extend grants, let single leases of them lapse.

use std::collections::BTreeMap;

use super::RedisStore;
use super::wire::{In, Out, garbled};
use crate::error::Result;
use crate::job::QueueName;
use crate::lease::FencingToken;
use crate::limits;
use crate::store::{Beat, Renewal, codec};

/// Beats in one script: short enough for the claims beside it.
const CHUNK: usize = 50;
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
            for chunk in places.chunks(CHUNK) {
                let mut data = Out::default();
                for at in chunk {
                    put_beat(&mut data, &beats[*at], is_here);
                }
                let script = &self.scripts().renew;
                let reply = self.look(script, partition.keys(), &[&data.0]).await?;
                let told = read_renewals(reply.body, chunk.iter().map(|at| &beats[*at]))?;
                for (at, renewal) in chunk.iter().zip(told) {
                    renewals[*at] = renewal;
                }
            }
        }
        Ok(renewals)
    }
}

fn place_of(beat: &Beat, token: FencingToken) -> usize {
    let place = token.get().checked_sub(beat.grant.get());
    place
        .and_then(|place| usize::try_from(place).ok())
        .filter(|place| *place < limits::GRANT_LEASES)
        .unwrap_or(NOWHERE)
}

fn put_beat(data: &mut Out, beat: &Beat, is_here: bool) {
    let grant = if is_here { beat.grant.get() } else { 0 };
    data.raw(&grant.to_be_bytes()).raw(beat.nonce.as_bytes());
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for token in &beat.leases {
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
    data.u16(beat.lapse.len());
    for token in &beat.lapse {
        data.u16(place_of(beat, *token));
    }
    data.u16(beat.progress.len());
    for (token, progress) in &beat.progress {
        let mut raw = Vec::new();
        codec::put_progress(&mut raw, progress);
        data.u16(place_of(beat, *token)).text(&raw);
    }
}

pub(super) fn read_renewals<'a>(
    mut body: In,
    beats: impl Iterator<Item = &'a Beat>,
) -> Result<Vec<Renewal>> {
    beats.map(|beat| read_renewal(&mut body, beat)).collect()
}

fn read_renewal(body: &mut In, beat: &Beat) -> Result<Renewal> {
    if body.u8()? == 0 {
        return Ok(Renewal::Fenced);
    }
    let granted = body.micros()?;
    let mut tokens = || -> Result<Vec<FencingToken>> {
        let count = body.u16()?;
        let token = |_| beat.leases.get(body.u16()?).copied().ok_or_else(garbled);
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
