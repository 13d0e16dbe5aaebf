//! The calls to a store and its answers: one format for all tests that record.
//!
//! A history is a list of [`Event`]s in real-time order, one JSON object per line. A call is two
//! events: its invocation and its end, `ok`, `fail` (certainly not applied) or `unknown` (perhaps
//! applied). A call without an end is unknown: its caller died. The place of an event in the list
//! is its time; the store's clock is noted where the recorder knows it.
//!
//! [`RecordingStore`](super::RecordingStore) writes the calls of one process. Fenced resources are
//! written by hand with [`History::open`] and [`History::write`]. The [checker](super::checker)
//! reads all of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Snapshot;
use leasehold::Error;
use leasehold::clock::{Clock, Timestamp};
use leasehold::inspect::{AuditView, QueueView};
use leasehold::job::{JobId, JobState, Key, QueueName};
use leasehold::lease::{FencingToken, Nonce, Receipt, Verdict};
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlCommand, Controlled,
    EnqueueRequest, Enqueued, Expiry, Outcome, Renewal, RequestId, SettleRequest, Store,
};

/// One line of a history.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Its place in real-time order.
    pub at: u64,
    /// Who called.
    pub process: u32,
    /// Joins the two events of a call.
    pub call: u64,
    /// The store's clock, if the recorder can see it.
    pub clock: Option<Timestamp>,
    /// What happened.
    pub what: What,
}

/// What an event says.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A call was sent.
    Invoke(Op),
    /// It was answered.
    Ok(Answer),
    /// It was certainly not applied; the error's kind.
    Fail(String),
    /// It may have been applied; the error's kind.
    Unknown(String),
}

/// A call.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(
    missing_docs,
    reason = "the fields are those of the contract's requests"
)]
pub enum Op {
    OpenSession,
    Enqueue {
        request: RequestId,
        jobs: Vec<JobNote>,
    },
    Claim {
        request: RequestId,
        owner: Arc<str>,
        task: Arc<str>,
        queues: Vec<(QueueName, Duration)>,
    },
    Renew {
        beats: Vec<BeatNote>,
    },
    Settle(SettleNote),
    Checkpoint {
        request: RequestId,
        checkpoints: Vec<(ReceiptNote, u64)>,
    },
    Reap {
        request: RequestId,
    },
    Control {
        request: RequestId,
        actor: String,
        reason: String,
        command: ControlCommand,
    },
    Prune {
        request: RequestId,
    },
    /// A resource is opened for a token: its mark rises.
    FenceOpen {
        resource: String,
        token: FencingToken,
    },
    /// A value is written under a token.
    FenceWrite {
        resource: String,
        token: FencingToken,
        value: String,
    },
}

/// An answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(
    missing_docs,
    reason = "the fields are those of the contract's answers"
)]
pub enum Answer {
    Done,
    Enqueued(Vec<Enqueued>),
    Claimed {
        grants: Vec<GrantNote>,
        expired: Vec<Expiry>,
    },
    Renewed(Vec<Renewal>),
    Settled(Vec<Verdict>),
    Checkpointed(Vec<Checkpointed>),
    Reaped(Vec<Expiry>),
    Controlled(Controlled),
    Pruned(u64),
    /// Whether a fenced resource accepted the token.
    Fence {
        accepted: bool,
    },
}

/// A job as it was enqueued.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the job's")]
pub struct JobNote {
    pub id: JobId,
    pub queue: QueueName,
    pub exclusive: Option<Key>,
    pub max_lifetime: Option<Duration>,
}

/// A receipt, with a digest of its proof: a history is no place for secrets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the receipt's")]
pub struct ReceiptNote {
    pub queue: QueueName,
    pub grant: FencingToken,
    pub token: FencingToken,
    pub job: JobId,
    pub proof: u64,
}

impl From<&Receipt> for ReceiptNote {
    fn from(receipt: &Receipt) -> Self {
        Self {
            queue: receipt.queue.clone(),
            grant: receipt.grant,
            token: receipt.token,
            job: receipt.job,
            proof: digest(&receipt.nonce),
        }
    }
}

/// Settlements as they were sent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the request")]
pub struct SettleNote {
    pub request: RequestId,
    pub settlements: Vec<(ReceiptNote, Ending)>,
}

/// How a holder ends a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the outcomes are the glossary's")]
pub enum Ending {
    Complete,
    Retry,
    Surrender,
    Bury,
}

/// A beat as it was sent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the beat's")]
pub struct BeatNote {
    pub queue: QueueName,
    pub grant: FencingToken,
    pub proof: u64,
    pub leases: Vec<FencingToken>,
    pub lapse: Vec<FencingToken>,
}

/// A grant as it was given.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the grant's")]
pub struct GrantNote {
    pub queue: QueueName,
    pub id: FencingToken,
    pub proof: u64,
    pub term: Duration,
    pub granted: Duration,
    pub leases: Vec<LeaseNote>,
}

/// A lease as it was given, with the checkpoint that came with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the lease's")]
pub struct LeaseNote {
    pub token: FencingToken,
    pub job: JobId,
    pub checkpoint: Option<(FencingToken, u64)>,
}

/// What is left at the end: the views of the store, and the contents of the fenced resources.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Final {
    /// The jobs that are there.
    pub jobs: Vec<(JobId, JobState)>,
    /// The tokens of the live leases.
    pub leases: Vec<FencingToken>,
    /// The queues with their ledgers.
    pub queues: Vec<QueueView>,
    /// The commands on record.
    pub audit: Vec<AuditView>,
    /// The values in each fenced resource.
    pub resources: BTreeMap<String, Vec<String>>,
}

impl Final {
    /// The views of a store.
    pub async fn of(store: &dyn Store) -> Self {
        let snapshot = Snapshot::of(store).await;
        let jobs = snapshot.jobs.iter().map(|view| (view.job.id, view.state));
        Self {
            jobs: jobs.collect(),
            leases: snapshot.leases.iter().map(|lease| lease.token).collect(),
            queues: snapshot.queues,
            audit: snapshot.audit,
            resources: BTreeMap::new(),
        }
    }
}

/// A history that is being written. Clones write to the same one.
#[derive(Clone, Default)]
pub struct History {
    events: Arc<Mutex<Vec<Event>>>,
    clock: Option<Arc<dyn Clock>>,
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("History")
            .field("events", &self.lock().len())
            .finish_non_exhaustive()
    }
}

impl History {
    /// An empty history, without the store's clock.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty history that notes the store's clock with each event.
    pub fn with_clock(clock: impl Clock) -> Self {
        Self {
            events: Arc::default(),
            clock: Some(Arc::new(clock)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a call is sent, and returns its number.
    pub fn invoke(&self, process: u32, op: Op) -> u64 {
        let mut events = self.lock();
        let at = events.len() as u64;
        events.push(Event {
            at,
            process,
            call: at,
            clock: self.clock.as_ref().map(|clock| clock.now()),
            what: What::Invoke(op),
        });
        at
    }

    /// Notes how a call ended.
    pub fn end(&self, process: u32, call: u64, what: What) {
        let mut events = self.lock();
        let at = events.len() as u64;
        events.push(Event {
            at,
            process,
            call,
            clock: self.clock.as_ref().map(|clock| clock.now()),
            what,
        });
    }

    /// Notes a whole call.
    pub async fn call<T>(
        &self,
        process: u32,
        op: Op,
        work: impl Future<Output = Result<T, Error>>,
        note: impl FnOnce(&T) -> Answer,
    ) -> Result<T, Error> {
        let call = self.invoke(process, op);
        let result = work.await;
        let what = match &result {
            Ok(answer) => What::Ok(note(answer)),
            Err(error) if error.kind().is_certain() => What::Fail(error.kind().as_str().into()),
            Err(error) => What::Unknown(error.kind().as_str().into()),
        };
        self.end(process, call, what);
        result
    }

    /// Notes that a fenced resource was opened for a token, or refused it.
    pub fn open(&self, process: u32, resource: &str, token: FencingToken, accepted: bool) {
        let resource = resource.to_owned();
        let call = self.invoke(process, Op::FenceOpen { resource, token });
        self.end(process, call, What::Ok(Answer::Fence { accepted }));
    }

    /// Notes that a fenced resource accepted a write under a token, or refused it.
    pub fn write(
        &self,
        process: u32,
        resource: &str,
        token: FencingToken,
        value: &str,
        accepted: bool,
    ) {
        let op = Op::FenceWrite {
            resource: resource.to_owned(),
            token,
            value: value.to_owned(),
        };
        let call = self.invoke(process, op);
        self.end(process, call, What::Ok(Answer::Fence { accepted }));
    }

    /// What was written so far.
    pub fn events(&self) -> Vec<Event> {
        self.lock().clone()
    }

    /// The history as text, one event per line.
    pub fn to_lines(&self) -> String {
        let events = self.lock();
        let lines = events.iter().map(|event| {
            let mut line = serde_json::to_string(event).expect("an event encodes");
            line.push('\n');
            line
        });
        lines.collect()
    }
}

/// Reads a history from text.
///
/// # Errors
/// If a line is no event.
pub fn from_lines(text: &str) -> serde_json::Result<Vec<Event>> {
    text.lines().map(serde_json::from_str).collect()
}

/// A digest that tells proofs apart and does not give them away.
pub fn digest(nonce: &Nonce) -> u64 {
    // FNV-1a: stable across versions, so that stored histories stay readable.
    let bytes = nonce.as_bytes().iter();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

pub(super) fn enqueue_op(request: &EnqueueRequest) -> Op {
    let jobs = request.jobs.iter().map(|(id, job)| JobNote {
        id: *id,
        queue: job.queue.clone(),
        exclusive: job.exclusive.clone(),
        max_lifetime: job.options.max_lifetime,
    });
    Op::Enqueue {
        request: request.request,
        jobs: jobs.collect(),
    }
}

pub(super) fn settle_note(request: &SettleRequest) -> SettleNote {
    let settlements = request.settlements.iter().map(|settlement| {
        let ending = match settlement.outcome {
            Outcome::Complete { .. } => Ending::Complete,
            Outcome::Retry { .. } => Ending::Retry,
            Outcome::Surrender { .. } | Outcome::Decline { .. } => Ending::Surrender,
            Outcome::Bury { .. } => Ending::Bury,
        };
        (ReceiptNote::from(&settlement.receipt), ending)
    });
    SettleNote {
        request: request.request,
        settlements: settlements.collect(),
    }
}

pub(super) fn claim_op(request: &ClaimRequest) -> Op {
    let queues = request.queues.iter();
    Op::Claim {
        request: request.request,
        owner: Arc::clone(&request.owner),
        task: Arc::clone(&request.task),
        queues: queues
            .map(|wanted| (wanted.queue.clone(), wanted.max_lifetime))
            .collect(),
    }
}

pub(super) fn claim_answer(claimed: &Claimed) -> Answer {
    let grants = claimed.grants.iter().map(|grant| GrantNote {
        queue: grant.queue.clone(),
        id: grant.id,
        proof: digest(&grant.nonce),
        term: grant.term,
        granted: grant.granted,
        leases: grant
            .leases
            .iter()
            .map(|lease| LeaseNote {
                token: lease.token,
                job: lease.job.id,
                checkpoint: lease.job.checkpoint.as_ref().map(|c| (c.token, c.seq)),
            })
            .collect(),
    });
    Answer::Claimed {
        grants: grants.collect(),
        expired: claimed.expired.clone(),
    }
}

pub(super) fn renew_op(beats: &[Beat]) -> Op {
    let beats = beats.iter().map(|beat| BeatNote {
        queue: beat.queue.clone(),
        grant: beat.grant,
        proof: digest(&beat.nonce),
        leases: beat.leases.clone(),
        lapse: beat.lapse.clone(),
    });
    Op::Renew {
        beats: beats.collect(),
    }
}

pub(super) fn checkpoint_op(request: &CheckpointRequest) -> Op {
    let checkpoints = request.checkpoints.iter();
    Op::Checkpoint {
        request: request.request,
        checkpoints: checkpoints
            .map(|checkpoint| (ReceiptNote::from(&checkpoint.receipt), checkpoint.seq))
            .collect(),
    }
}
