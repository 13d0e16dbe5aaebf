//! How each form of answer is read, for those who make up answers: tests and fuzzers.

use std::sync::Arc;

use super::Reply;
use super::claim::{Left, take_in};
use super::control::read_step;
use super::enqueue::read_duplicates;
use super::inspect::{add_partition, row};
use super::queue::{Partition, Queue};
use super::reap::reports;
use super::renew::read_renewals;
use super::wire::In;
use crate::clock::Timestamp;
use crate::error::Result;
use crate::inspect::QueueView;
use crate::job::{JobId, Namespace, QueueName};
use crate::lease::{FencingToken, Nonce};
use crate::limits;
use crate::store::codec::Kinds;
use crate::store::{Beat, ClaimRequest, Claimed, Controlled, Enqueued, RequestId, SessionId};

/// A form of answer by its name, and how one is read to its end.
pub(crate) type Reader = (&'static str, fn(Vec<u8>) -> Result<()>);

pub(crate) const READERS: [Reader; 8] = [
    ("claim", |answer| read_claim(answer).map(drop)),
    ("reap", |answer| {
        reports(&mut In::new(answer.into()), &QueueName::default()).map(drop)
    }),
    ("renew", |answer| {
        let beats = [beat(), beat()];
        let leases = beats.iter().map(|beat| &*beat.leases);
        read_renewals(In::new(answer.into()), leases).map(drop)
    }),
    ("reply", |answer| Reply::read(answer).map(drop)),
    ("enqueue", |answer| {
        let mut answers = [Enqueued::New(JobId::from_bytes([1; 16])); 2];
        read_duplicates(&mut In::new(answer.into()), &[1, 0], &mut answers)
    }),
    ("control", |answer| {
        let (mut done, mut tokens) = (Controlled::default(), Vec::new());
        let mut body = In::new(answer.into());
        let once = read_step(&mut body.clone(), &mut done, &mut tokens)?;
        // A second step adds to what the first has done.
        let twice = read_step(&mut body, &mut done, &mut tokens)?;
        assert_eq!(once, twice);
        Ok(())
    }),
    ("queue", |answer| {
        let mut view = view();
        for _ in 0..2 {
            let mut body = In::new(answer.clone().into());
            add_partition(&mut view, &mut body, Timestamp::from_micros(9))?;
        }
        Ok(())
    }),
    ("job", |answer| {
        let queue: Arc<Queue> = partition().queue;
        let (now, mut kinds) = (Timestamp::from_micros(5), Kinds::default());
        row(&mut In::new(answer.into()), &queue, now, &mut kinds).map(drop)
    }),
];

fn partition() -> Partition {
    let queue = Queue::new(&Namespace::default(), &QueueName::default(), 1);
    Partition { queue, number: 0 }
}

pub(super) fn read_claim(answer: Vec<u8>) -> Result<Claimed> {
    let request = ClaimRequest {
        request: RequestId {
            session: SessionId::from_bytes([1; 16]),
            lane: 0,
            seq: 1,
        },
        owner: "owner".into(),
        task: "task".into(),
        nonce: Nonce::from_bytes([2; 16]),
        queues: Vec::new(),
        max: 10,
        admit_suspect: false,
    };
    let mut left = Left {
        leases: 10,
        bytes: limits::CALL_BYTES,
        suspect: true,
    };
    let mut read = Claimed::default();
    let mut body = In::new(answer.into());
    take_in(&mut body, &partition(), &request, &mut left, &mut read)?;
    body.u8()?;
    Ok(read)
}

fn beat() -> Beat {
    Beat {
        queue: QueueName::default(),
        partition: 0,
        grant: FencingToken::new(1_000),
        nonce: Nonce::from_bytes([2; 16]),
        leases: (1_000..1_004).map(FencingToken::new).collect(),
        lapse: Vec::new(),
        progress: Vec::new(),
    }
}

fn view() -> QueueView {
    QueueView::new(QueueName::default())
}
