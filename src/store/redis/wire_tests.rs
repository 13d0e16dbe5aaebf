//! Answers that no script gives: cut, overwritten, made up. Each is read to its end or refused as
//! corrupt; none panics.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::answers::{READERS, Reader, read_claim};
use super::garbled;
use super::inspect::LOSSES;
use super::wire::{Out, exact};
use crate::clock::Timestamp;
use crate::error::{ErrorKind, Result};
use crate::job::{JobId, JobRecord, Kind, NewJob, QueueName};
use crate::lease::Progress;
use crate::store::codec;

const TERM: Duration = Duration::from_millis(60_500);

fn job() -> JobRecord {
    let kind = Kind::new("resize").unwrap();
    let new = NewJob::raw(QueueName::default(), kind, vec![b'x'; 30]).header("name", "value");
    JobRecord::new(JobId::generate(), new, Timestamp::from_micros(7))
}

/// A job as it lies in the store.
fn packed(job: &JobRecord) -> Vec<u8> {
    let mut record = Vec::new();
    codec::encode(job, &mut record);
    record
}

/// The records of four jobs.
fn records() -> Vec<u8> {
    (0..4).flat_map(|_| packed(&job())).collect()
}

fn shown() -> Vec<u8> {
    let mut shown = Vec::new();
    let note = "half".to_owned();
    codec::put_progress(
        &mut shown,
        &Progress {
            done: 1,
            total: Some(2),
            note,
        },
    );
    shown
}

fn expiries(out: &mut Out) {
    out.u32(1).u64(1_000).raw(JobId::generate().as_bytes());
    out.u8(6).raw(b"resize").text(b"owner").text(b"task");
    out.u8(0).raw(b"f").u32(2).text(&shown());
}

/// What a claim answers, with what it granted as the last lease of a grant.
fn claimed() -> Vec<u8> {
    let mut out = Out::default();
    out.u16(4).u32(120).u8(0);
    out.u8(1).u64(5).u8(1).u64(7).u8(1).u64(9);
    out.u16(2);
    for map in [vec![], vec![0, 2, 3, 5]] {
        out.raw(&1_000_u64.to_be_bytes()).u64(60_500_000).u64(9);
        out.raw(&exact(TERM)).u16(map.len());
        for place in map {
            out.u16(place);
        }
        out.text(&records());
    }
    expiries(&mut out);
    // Whether the caller sleeps.
    out.u8(0);
    out.0
}

/// One answer of each form, and how it is read.
type Form = (&'static str, Vec<u8>, fn(Vec<u8>) -> Result<()>);

fn forms() -> Vec<Form> {
    let with = |(name, read): &Reader| (*name, whole(name), *read);
    READERS.iter().map(with).collect()
}

/// An answer as a script gives it.
fn whole(form: &str) -> Vec<u8> {
    let mut out = Out::default();
    match form {
        "claim" => return claimed(),
        "reap" => expiries(&mut out),
        "renew" => {
            out.u16(2)
                .u8(1)
                .u64(60_500_000)
                .u16(1)
                .u16(3)
                .u16(2)
                .u16(0)
                .u16(1);
            out.u8(0);
        }
        "reply" => {
            out.u8(0).u64(9).u8(1).raw(b"body");
        }
        "enqueue" => {
            out.u32(1).u32(1).raw(JobId::generate().as_bytes());
        }
        "control" => {
            out.u64(3).u64(1).u32(1).raw(&[7; 32]).u32(1).u64(1_000);
        }
        "queue" => {
            for field in 0..27 + LOSSES as u64 {
                out.u64(field);
            }
            out.u8(1).u64(5);
        }
        "job" => {
            out.raw(b"l").u64(0).text(&packed(&job())).u8(1).u64(1_000);
            out.text(b"owner").text(b"task").u64(3).u64(9);
            out.raw(&exact(TERM)).u32(2).u8(0).text(&shown());
        }
        other => panic!("no answer of the form {other}"),
    }
    out.0
}

/// What can be done to an answer on its way.
#[derive(Clone, Debug)]
enum Harm {
    Cut(prop::sample::Index),
    Fill(prop::sample::Index, usize, u8),
    Lengthen(prop::sample::Index, Vec<u8>),
}

fn harm() -> impl Strategy<Value = Harm> {
    let at = any::<prop::sample::Index>;
    let byte = prop_oneof![Just(0xff), Just(0), Just(0x7f), any::<u8>()];
    prop_oneof![
        at().prop_map(Harm::Cut),
        (at(), 1..17_usize, byte).prop_map(|(at, n, byte)| Harm::Fill(at, n, byte)),
        (at(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, b)| Harm::Lengthen(at, b)),
    ]
}

fn harmed(mut answer: Vec<u8>, harms: &[Harm]) -> Vec<u8> {
    for harm in harms {
        match harm {
            Harm::Cut(at) => answer.truncate(at.index(answer.len() + 1)),
            Harm::Fill(at, n, byte) => {
                let from = at.index(answer.len() + 1);
                let till = (from + n).min(answer.len());
                answer[from..till].fill(*byte);
            }
            Harm::Lengthen(at, bytes) => {
                let at = at.index(answer.len() + 1);
                answer.splice(at..at, bytes.iter().copied());
            }
        }
    }
    answer
}

/// Neither a panic nor any other trouble than this.
fn judge(name: &str, read: Result<()>) {
    if let Err(error) = read {
        let kind = error.kind();
        let is_refusal = matches!(kind, ErrorKind::SessionLost | ErrorKind::TokensAhead)
            || matches!(kind, ErrorKind::InvalidInput | ErrorKind::Unsupported);
        assert!(
            kind == ErrorKind::Corrupt || name == "reply" && is_refusal,
            "{name}: {error}"
        );
    }
}

#[test]
fn whole_answers_are_read() {
    for (name, answer, read) in forms() {
        assert!(read(answer).is_ok(), "{name}");
    }
    let read = read_claim(claimed()).unwrap();
    let tokens = |grant: usize| {
        let leases = read.grants[grant].leases.iter();
        leases.map(|lease| lease.token.get()).collect::<Vec<_>>()
    };
    assert_eq!(tokens(0), [1_000, 1_001, 1_002, 1_003]);
    assert_eq!(tokens(1), [1_000, 1_002, 1_003, 1_005]);
    assert_eq!(read.grants[0].term, TERM);
    assert_eq!(read.expired.len(), 1);
    assert_eq!(read.clock_behind, Some(Duration::from_micros(9)));
}

#[test]
fn no_part_of_an_answer_passes_for_it() {
    for (name, answer, read) in forms() {
        // What stands behind the head of a reply is any text.
        if name == "reply" {
            continue;
        }
        for cut in 0..answer.len() {
            let Err(error) = read(answer[..cut].to_vec()) else {
                panic!("{name} cut to {cut} of {} is read", answer.len());
            };
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{name} cut to {cut}");
        }
    }
}

/// Where the first grant of [`claimed`] begins.
const GRANT: usize = 7 + 27 + 2;

fn refused(at: usize, bytes: &[u8]) {
    let mut answer = claimed();
    answer[at..at + bytes.len()].copy_from_slice(bytes);
    let error = read_claim(answer).unwrap_err();
    assert_eq!(error.kind(), garbled().kind());
}

#[test]
fn a_term_that_no_duration_can_hold_is_refused() {
    refused(GRANT + 24, &[0xff; 12]);
    // Nor one that would be carried over.
    refused(GRANT + 32, &1_000_000_000_u32.to_le_bytes());
}

#[test]
fn a_grant_at_the_end_of_all_tokens_is_refused() {
    refused(GRANT, &(u64::MAX - 1).to_be_bytes());
}

#[test]
fn more_time_than_the_term_is_refused() {
    refused(GRANT + 8, &60_500_001_u64.to_le_bytes());
}

proptest! {
    #[test]
    fn a_harmed_answer_is_corrupt_and_never_a_panic(harms in prop::collection::vec(harm(), 1..4)) {
        for (name, answer, read) in forms() {
            judge(name, read(harmed(answer, &harms)));
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(answer in prop::collection::vec(any::<u8>(), 0..400)) {
        for (name, _, read) in forms() {
            judge(name, read(answer.clone()));
        }
    }
}

#[test]
fn a_job_that_failed_more_often_than_can_be_counted_is_shown() {
    let mut job = job();
    (job.failures, job.expiries) = (u32::MAX, u32::MAX);
    assert_eq!(Arc::new(job).attempt(), u32::MAX);
}
