//! First answers as they are stored, so that a repeated call gets the same one.

use std::time::Duration;

use crate::clock::micros;
use crate::job::{JobId, NewJob};
use crate::lease::{FencingToken, Verdict};
use crate::store::{Checkpointed, Claimed, Enqueued, Expiry};

/// Why a remembered answer is of no use.
#[derive(Debug)]
pub(super) enum Unread {
    /// It cannot be read.
    Garbled,
    /// The id was another call's.
    MixedUp,
}

type Read<T> = Result<T, Unread>;

/// What is needed to answer a claim again: its grants, the time granted, and the expiries.
pub(super) fn written_claim(claimed: &Claimed) -> Read<Vec<u8>> {
    let mut out = (claimed.grants.len() as u32).to_le_bytes().to_vec();
    for grant in &claimed.grants {
        out.extend_from_slice(&grant.id.get().to_le_bytes());
        out.extend_from_slice(&micros(grant.granted).to_le_bytes());
    }
    if !claimed.expired.is_empty() {
        serde_json::to_writer(&mut out, &claimed.expired).map_err(|_| Unread::Garbled)?;
    }
    Ok(out)
}

pub(super) type FirstClaim = (Vec<(FencingToken, Duration)>, Vec<Expiry>);

pub(super) fn read_claim(first: &[u8]) -> Read<FirstClaim> {
    let (count, mut rest) = first.split_first_chunk::<4>().ok_or(Unread::Garbled)?;
    let mut grants = Vec::new();
    for _ in 0..u32::from_le_bytes(*count) {
        let (id, after) = rest.split_first_chunk::<8>().ok_or(Unread::Garbled)?;
        let (granted, after) = after.split_first_chunk::<8>().ok_or(Unread::Garbled)?;
        rest = after;
        grants.push((
            FencingToken::new(u64::from_le_bytes(*id)),
            Duration::from_micros(u64::from_le_bytes(*granted)),
        ));
    }
    let expired = if rest.is_empty() {
        Vec::new()
    } else {
        serde_json::from_slice(rest).map_err(|_| Unread::Garbled)?
    };
    Ok((grants, expired))
}

/// Up to this many answers are remembered in full. Of a larger call only the duplicates are: the
/// ids of the new jobs are in the repeated request, which is the same, and need not be stored
/// twice.
const IN_FULL: usize = 64;

pub(super) fn written_enqueue(answers: &[Enqueued]) -> Vec<u8> {
    let mut out = (answers.len() as u32).to_le_bytes().to_vec();
    for (at, answer) in answers.iter().enumerate() {
        let new = matches!(answer, Enqueued::New(_));
        if answers.len() <= IN_FULL || !new {
            // The highest bit: new.
            out.extend_from_slice(&(at as u32 | u32::from(new) << 31).to_le_bytes());
            out.extend_from_slice(answer.id().as_bytes());
        }
    }
    out
}

pub(super) fn read_enqueue(first: &[u8], jobs: &[(JobId, NewJob)]) -> Read<Vec<Enqueued>> {
    let (count, listed) = first.split_first_chunk::<4>().ok_or(Unread::Garbled)?;
    let count = u32::from_le_bytes(*count) as usize;
    let mut answers: Vec<Enqueued> = jobs.iter().map(|(id, _)| Enqueued::New(*id)).collect();
    if count <= IN_FULL {
        answers = vec![Enqueued::New(JobId::from_bytes([0; 16])); count];
    } else if count != jobs.len() {
        return Err(Unread::MixedUp);
    }
    for entry in listed.chunks(20) {
        let (at, id) = entry.split_first_chunk::<4>().ok_or(Unread::Garbled)?;
        let id = JobId::from_bytes(*id.first_chunk::<16>().ok_or(Unread::Garbled)?);
        let at = u32::from_le_bytes(*at);
        let new = at >> 31 == 1;
        let answer = answers.get_mut((at & (u32::MAX >> 1)) as usize);
        *answer.ok_or(Unread::Garbled)? = if new {
            Enqueued::New(id)
        } else {
            Enqueued::Duplicate(id)
        };
    }
    Ok(answers)
}

pub(super) fn written_verdict(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Fenced => 0,
        Verdict::Held { late, cancel } => 1 | u8::from(late) << 1 | u8::from(cancel) << 2,
    }
}

pub(super) fn read_verdict(byte: u8) -> Read<Verdict> {
    match byte {
        0 => Ok(Verdict::Fenced),
        1 | 3 | 5 | 7 => Ok(Verdict::Held {
            late: byte & 2 != 0,
            cancel: byte & 4 != 0,
        }),
        _ => Err(Unread::Garbled),
    }
}

/// The first byte of a remembered `Behind`, before its number.
const BEHIND: u8 = 8;

pub(super) fn written_checkpoint(answers: &[Checkpointed]) -> Vec<u8> {
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

pub(super) fn read_checkpoint(mut first: &[u8]) -> Read<Vec<Checkpointed>> {
    let mut answers = Vec::new();
    while let Some((&byte, rest)) = first.split_first() {
        first = rest;
        answers.push(match byte {
            0 => Checkpointed::Fenced,
            BEHIND => {
                let (seq, rest) = first.split_first_chunk::<8>().ok_or(Unread::Garbled)?;
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
