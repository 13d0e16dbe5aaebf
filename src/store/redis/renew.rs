//! renew: extend grants, let single leases of them lapse.

use std::collections::{BTreeMap, HashSet};

use super::RedisStore;
use super::queue::Partition;
use super::wire::{In, Out, garbled};
use crate::error::Result;
use crate::job::QueueName;
use crate::lease::FencingToken;
use crate::limits;
use crate::store::{Beat, Renewal, record};

/// Beats in one script, plain ones and others: short enough for the claims beside it.
const CHUNK: usize = 500;
/// One grant in so many is the first of a chunk, by its token alone: where one ends or another is added, the
/// other chunks are renewed as the rounds that they were before.
const FIRSTS: u64 = 256;
const OTHERS: usize = 50;
/// How an answer begins that is the same for all beats.
const ALIKE: u8 = 2;
/// A run of one lease, the first of its grant.
const SINGLE: [u8; 4] = [0, 0, 1, 0];
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
            // A grant that is named twice is renewed in the order of its beats.
            let mut grants = HashSet::new();
            let once = places.iter().all(|at| grants.insert(beats[*at].grant));
            let (mut plain, others): (Vec<usize>, Vec<usize>) = places
                .into_iter()
                .partition(|at| once && is_here && plain_run(&beats[*at]).is_some());
            for chunk in plain_chunks(beats, &mut plain) {
                let [mut names, mut runs] = [Out::default(), Out::default()];
                for (beat, run) in chunk
                    .iter()
                    .filter_map(|at| Some((&beats[*at], plain_run(&beats[*at])?)))
                {
                    names.raw(&beat.grant.get().to_be_bytes());
                    names.raw(beat.nonce.as_bytes());
                    runs.u16(run.0).u16(run.1);
                }
                // What goes without saying.
                if runs.0.chunks(SINGLE.len()).all(|run| run == SINGLE) {
                    runs.0.clear();
                }
                let data = [&names.0, &runs.0, &[][..]];
                self.renew_chunk(&partition, data, beats, chunk, &mut renewals)
                    .await?;
            }
            for chunk in others.chunks(OTHERS) {
                let mut data = Out::default();
                for at in chunk {
                    put_beat(&mut data, &beats[*at], is_here);
                }
                let data = [&[][..], &[], &data.0];
                self.renew_chunk(&partition, data, beats, chunk, &mut renewals)
                    .await?;
            }
        }
        Ok(renewals)
    }

    async fn renew_chunk(
        &self,
        partition: &Partition,
        data: [&[u8]; 3],
        beats: &[Beat],
        places: &[usize],
        renewals: &mut [Renewal],
    ) -> Result<()> {
        let script = &self.scripts().renew;
        let reply = self.look(script, partition.keys(), &data).await?;
        let told = read_renewals(reply.body, places.iter().map(|place| &beats[*place]))?;
        for (place, renewal) in places.iter().zip(told) {
            renewals[*place] = renewal;
        }
        Ok(())
    }
}

/// Plain beats as they are sent. A round is found by the first of its tokens, and one of singles is renewed
/// as a whole.
fn plain_chunks<'a>(
    beats: &'a [Beat],
    plain: &'a mut [usize],
) -> impl Iterator<Item = &'a [usize]> {
    let is_single = |at: usize| beats[at].leases.len() == 1;
    plain.sort_unstable_by_key(|at| (is_single(*at), beats[*at].grant));
    let goes_on = move |at: &usize, next: &usize| {
        is_single(*at) == is_single(*next) && !is_first(beats[*next].grant)
    };
    let chunks = plain.chunk_by(goes_on);
    chunks.flat_map(|chunk| chunk.chunks(CHUNK))
}

fn is_first(grant: FencingToken) -> bool {
    // Tokens are neighbours, or multiples of something: spread over all numbers they are neither.
    let spread = grant.get().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    spread / (u64::MAX / FIRSTS) == 0
}

/// Where the leases of a beat lie, if they are neighbours and the beat says nothing else.
fn plain_run(beat: &Beat) -> Option<(usize, usize)> {
    let is_plain = beat.lapse.is_empty() && beat.progress.is_empty();
    let first = place_of(beat, *beat.leases.first().filter(|_| is_plain)?);
    let is_run = beat
        .leases
        .iter()
        .zip(first..)
        .all(|(token, place)| place != NOWHERE && place_of(beat, *token) == place);
    is_run.then_some((first, beat.leases.len()))
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
        record::put_progress(&mut raw, progress);
        data.u16(place_of(beat, *token)).text(&raw);
    }
}

pub(super) fn read_renewals<'a>(
    mut body: In,
    beats: impl Iterator<Item = &'a Beat>,
) -> Result<Vec<Renewal>> {
    let mut all = body.clone();
    if all.u8().is_ok_and(|first| first == ALIKE) {
        let granted = all.micros()?;
        let held = |_| Renewal::Held {
            granted,
            cancel: Vec::new(),
            fenced: Vec::new(),
        };
        return Ok(beats.map(held).collect());
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Nonce;

    fn beat(grant: u64, leases: u64) -> Beat {
        let tokens = (0..leases).map(|at| FencingToken::new(grant + at));
        Beat {
            queue: QueueName::default(),
            partition: 0,
            grant: FencingToken::new(grant),
            nonce: Nonce::draw().unwrap(),
            leases: tokens.collect(),
            lapse: Vec::new(),
            progress: Vec::new(),
        }
    }

    #[test]
    fn chunks_begin_where_their_tokens_say_in_whatever_order_beats_come() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut beats: Vec<Beat> = (0..3_000).map(|n| beat(10 * n + 1, 1 + n % 2)).collect();
        rng.shuffle(&mut beats);
        let mut plain: Vec<usize> = (0..beats.len()).collect();
        let chunks: Vec<Vec<&Beat>> = plain_chunks(&beats, &mut plain)
            .map(|chunk| chunk.iter().map(|at| &beats[*at]).collect())
            .collect();
        let key = |beat: &&Beat| (beat.leases.len() == 1, beat.grant);
        assert!(chunks.concat().is_sorted_by_key(key));
        assert_eq!(chunks.concat().len(), beats.len());
        for pair in chunks.windows(2) {
            let (before, chunk) = (&pair[0], &pair[1]);
            let is_other = key(&before[0]).0 != key(&chunk[0]).0;
            assert!(is_other || is_first(chunk[0].grant) || before.len() == CHUNK);
        }
        for chunk in chunks {
            assert!(!chunk[1..].iter().any(|beat| is_first(beat.grant)));
            assert!(chunk.iter().all(|beat| key(beat).0 == key(&chunk[0]).0));
        }
    }

    #[test]
    fn chunks_are_short_where_no_token_begins_one() {
        let tokens = (1..).filter(|token| !is_first(FencingToken::new(*token)));
        let beats: Vec<Beat> = tokens
            .take(2 * CHUNK + 100)
            .map(|token| beat(token, 1))
            .collect();
        let mut plain: Vec<usize> = (0..beats.len()).collect();
        let lengths: Vec<usize> = plain_chunks(&beats, &mut plain).map(<[_]>::len).collect();
        assert_eq!(lengths, [CHUNK, CHUNK, 100]);
    }

    #[test]
    fn chunks_are_neither_long_nor_many_however_tokens_follow_each_other() {
        for step in [1, 2, 100, 128, 1_000, 4_096, 1_000_003] {
            let tokens = (0..100_000).map(|n| FencingToken::new(1_790_000_000_000_000 + n * step));
            let firsts = tokens.filter(|token| is_first(*token)).count();
            assert!((300..500).contains(&firsts), "{firsts} by steps of {step}");
        }
    }
}
