//! What was said to a [`HoldingStore`], and what it answered.
//!
//! A history is a list of [calls](HoldingCall). The numbers of their starts and ends are real time;
//! the store's clock is noted where the recorder knows it. A call without an answer may have been
//! applied; one that certainly was not is left out.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::history::digest;
use leasehold::clock::Timestamp;
use leasehold::job::Namespace;
use leasehold::lease::{FencingToken, HoldingReceipt};
use leasehold::rules::holding::{FamilyName, Mode, Scope};
use leasehold::store::holding::{
    AcquireRequest, Acquired, Acquisition, Ask, Check, Checked, CommitRequest, Committed,
    HoldingBeat, HoldingCommand, HoldingControlRequest, HoldingExpiry, HoldingQuery,
    HoldingRenewal, HoldingStore, HoldingViews, Reaped, ReleaseBy, ReleaseRequest, Released,
    SaveRequest, SavedState, TicketName,
};
use leasehold::store::{ReapRequest, RequestId, SessionId};
use leasehold::{Error, Result};

/// One call.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HoldingCall {
    /// Who called.
    pub process: u32,
    /// When it was sent: it took effect after this.
    pub start: u64,
    /// When its answer came, if one did: it took effect before this.
    pub end: Option<u64>,
    /// The store's clock at the two moments, if the recorder can see it.
    pub clock: Option<(Timestamp, Timestamp)>,
    /// What was asked.
    pub op: HoldingOp,
    /// The answer.
    pub answer: Option<HoldingAnswer>,
}

/// A call's arguments.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the fields are those of the requests")]
pub enum HoldingOp {
    Acquire {
        request: RequestId,
        asks: Vec<AskNote>,
    },
    Renew {
        beats: Vec<(HoldingNote, bool)>,
    },
    Release {
        request: RequestId,
        releases: Vec<ReleaseNote>,
    },
    Save {
        request: RequestId,
        saves: Vec<(HoldingNote, u64)>,
    },
    Commit {
        request: RequestId,
        receipts: Vec<HoldingNote>,
    },
    Reap {
        request: RequestId,
    },
    Control {
        request: RequestId,
        command: HoldingCommand,
    },
}

impl HoldingOp {
    pub(super) fn request(&self) -> Option<RequestId> {
        match self {
            Self::Acquire { request, .. }
            | Self::Release { request, .. }
            | Self::Save { request, .. }
            | Self::Commit { request, .. }
            | Self::Reap { request }
            | Self::Control { request, .. } => Some(*request),
            Self::Renew { .. } => None,
        }
    }
}

/// A call's answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the fields are those of the answers")]
pub enum HoldingAnswer {
    Acquired {
        answers: Vec<AcquiredNote>,
        expired: Vec<HoldingExpiry>,
    },
    Renewed(Vec<HoldingRenewal>),
    Released(Vec<Released>),
    Saved(Vec<SavedState>),
    Committed(Vec<Committed>),
    Reaped(Vec<HoldingExpiry>),
    Controlled(u64),
}

/// An ask as it was sent. A nonce is noted as a digest: a history is no place for secrets.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the ask's")]
pub struct AskNote {
    pub family: FamilyName,
    pub scopes: Vec<Scope>,
    pub mode: Mode,
    pub owner: Arc<str>,
    pub task: Arc<str>,
    pub proof: u64,
    pub wait: bool,
}

impl From<&Ask> for AskNote {
    fn from(ask: &Ask) -> Self {
        Self {
            family: ask.family.clone(),
            scopes: ask.scopes.clone(),
            mode: ask.mode,
            owner: Arc::clone(&ask.owner),
            task: Arc::clone(&ask.task),
            proof: digest(&ask.nonce),
            wait: ask.wait,
        }
    }
}

/// The answer to one ask.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the fields are the answer's")]
pub enum AcquiredNote {
    Granted {
        token: FencingToken,
        granted: Duration,
        state: Option<(FencingToken, u64)>,
    },
    Busy {
        place: Option<u64>,
        again_in: Option<Duration>,
    },
    Refused,
    Ended,
}

impl From<&Acquired> for AcquiredNote {
    fn from(answer: &Acquired) -> Self {
        match answer {
            Acquired::Granted(holding) => Self::Granted {
                token: holding.receipt.token,
                granted: holding.granted,
                state: holding.state.as_ref().map(|state| (state.token, state.seq)),
            },
            Acquired::Busy(busy) => Self::Busy {
                place: busy.place,
                again_in: busy.again_in,
            },
            Acquired::Refused(_) => Self::Refused,
            Acquired::Ended => Self::Ended,
        }
    }
}

/// A receipt, with a digest of its proof.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the receipt's")]
pub struct HoldingNote {
    pub family: FamilyName,
    pub token: FencingToken,
    pub proof: u64,
}

impl From<&HoldingReceipt> for HoldingNote {
    fn from(receipt: &HoldingReceipt) -> Self {
        Self {
            family: receipt.family.clone(),
            token: receipt.token,
            proof: digest(&receipt.nonce),
        }
    }
}

/// A release as it was sent; without a token it is that of an ask.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the release's")]
pub struct ReleaseNote {
    pub family: FamilyName,
    pub token: Option<FencingToken>,
    pub proof: u64,
    pub seq: Option<u64>,
}

/// A history that is being written. Clones write to the same one.
#[derive(Clone, Default)]
pub struct HoldingHistory {
    written: Arc<Mutex<Written>>,
}

#[derive(Default)]
struct Written {
    calls: Vec<HoldingCall>,
    events: u64,
    clock: Option<Timestamp>,
}

impl fmt::Debug for HoldingHistory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldingHistory")
            .field("calls", &self.lock().calls.len())
            .finish_non_exhaustive()
    }
}

impl HoldingHistory {
    fn lock(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells what the store's clock shows from now on.
    pub fn set_clock(&self, now: Timestamp) {
        self.lock().clock = Some(now);
    }

    /// What was written so far.
    pub fn calls(&self) -> Vec<HoldingCall> {
        self.lock().calls.clone()
    }

    async fn call<T>(
        &self,
        process: u32,
        op: HoldingOp,
        work: impl Future<Output = Result<T, Error>>,
        note: impl FnOnce(&T) -> HoldingAnswer,
    ) -> Result<T, Error> {
        let place = {
            let mut written = self.lock();
            written.events += 1;
            let call = HoldingCall {
                process,
                start: written.events,
                end: None,
                clock: written.clock.map(|now| (now, now)),
                op,
                answer: None,
            };
            written.calls.push(call);
            written.calls.len() - 1
        };
        let result = work.await;
        let mut written = self.lock();
        written.events += 1;
        let (now, event) = (written.clock, written.events);
        let call = &mut written.calls[place];
        if let (Some(clock), Some(now)) = (&mut call.clock, now) {
            clock.1 = now;
        }
        match &result {
            Ok(answer) => {
                call.end = Some(event);
                call.answer = Some(note(answer));
            }
            // Certainly nothing was asked.
            Err(error) if error.kind().is_certain() => {
                call.op = HoldingOp::Renew { beats: Vec::new() };
                call.end = Some(event);
                call.answer = Some(HoldingAnswer::Renewed(Vec::new()));
            }
            Err(_) => {}
        }
        result
    }
}

/// A [`HoldingStore`] that notes the calls of one process in a [`HoldingHistory`]. Looking and
/// waiting change nothing and are passed on unnoted.
#[derive(Clone)]
pub struct RecordingHoldings {
    inner: Arc<dyn HoldingStore>,
    history: HoldingHistory,
    process: u32,
}

impl RecordingHoldings {
    /// Notes the calls of `process` to `inner`.
    pub fn new(inner: Arc<dyn HoldingStore>, history: HoldingHistory, process: u32) -> Self {
        Self {
            inner,
            history,
            process,
        }
    }
}

impl fmt::Debug for RecordingHoldings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingHoldings")
            .field("store", &self.inner.name())
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl HoldingStore for RecordingHoldings {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn namespace(&self) -> Namespace {
        self.inner.namespace()
    }

    async fn dedicated(&self) -> Result<Arc<dyn HoldingStore>> {
        let inner = self.inner.dedicated().await?;
        let history = self.history.clone();
        Ok(Arc::new(Self::new(inner, history, self.process)))
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.inner.open_session().await
    }

    async fn acquire(&self, request: AcquireRequest) -> Result<Acquisition> {
        let op = HoldingOp::Acquire {
            request: request.request,
            asks: request.asks.iter().map(AskNote::from).collect(),
        };
        let work = self.inner.acquire(request);
        let note = |answer: &Acquisition| HoldingAnswer::Acquired {
            answers: answer.answers.iter().map(AcquiredNote::from).collect(),
            expired: answer.expired.clone(),
        };
        self.history.call(self.process, op, work, note).await
    }

    async fn renew(&self, beats: Vec<HoldingBeat>) -> Result<Vec<HoldingRenewal>> {
        let notes = beats
            .iter()
            .map(|beat| ((&beat.receipt).into(), beat.lapse));
        let op = HoldingOp::Renew {
            beats: notes.collect(),
        };
        let work = self.inner.renew(beats);
        let note = |answer: &Vec<_>| HoldingAnswer::Renewed(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn release(&self, request: ReleaseRequest) -> Result<Vec<Released>> {
        let notes = request.releases.iter().map(|release| {
            let seq = release.state.as_ref().map(|(seq, _)| *seq);
            match &release.by {
                ReleaseBy::Receipt(receipt) => ReleaseNote {
                    family: receipt.family.clone(),
                    token: Some(receipt.token),
                    proof: digest(&receipt.nonce),
                    seq,
                },
                ReleaseBy::Ask(ask) => ReleaseNote {
                    family: ask.family.clone(),
                    token: None,
                    proof: digest(&ask.nonce),
                    seq,
                },
            }
        });
        let op = HoldingOp::Release {
            request: request.request,
            releases: notes.collect(),
        };
        let work = self.inner.release(request);
        let note = |answer: &Vec<_>| HoldingAnswer::Released(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn save(&self, request: SaveRequest) -> Result<Vec<SavedState>> {
        let saves = request.saves.iter();
        let op = HoldingOp::Save {
            request: request.request,
            saves: saves
                .map(|save| ((&save.receipt).into(), save.seq))
                .collect(),
        };
        let work = self.inner.save(request);
        let note = |answer: &Vec<_>| HoldingAnswer::Saved(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn commit(&self, request: CommitRequest) -> Result<Vec<Committed>> {
        let op = HoldingOp::Commit {
            request: request.request,
            receipts: request.receipts.iter().map(HoldingNote::from).collect(),
        };
        let work = self.inner.commit(request);
        let note = |answer: &Vec<_>| HoldingAnswer::Committed(answer.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn check(&self, checks: Vec<Check>) -> Result<Vec<Checked>> {
        self.inner.check(checks).await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Reaped> {
        let op = HoldingOp::Reap {
            request: request.request,
        };
        let work = self.inner.reap(request);
        let note = |answer: &Reaped| HoldingAnswer::Reaped(answer.expired.clone());
        self.history.call(self.process, op, work, note).await
    }

    async fn wait(&self, tickets: &[TicketName], limit: Duration) -> Result<()> {
        self.inner.wait(tickets, limit).await
    }

    async fn control(&self, request: HoldingControlRequest) -> Result<u64> {
        let op = HoldingOp::Control {
            request: request.request,
            command: request.command.clone(),
        };
        let work = self.inner.control(request);
        let note = |answer: &u64| HoldingAnswer::Controlled(*answer);
        self.history.call(self.process, op, work, note).await
    }

    async fn inspect(&self, query: HoldingQuery) -> Result<HoldingViews> {
        self.inner.inspect(query).await
    }
}
