//! How leases end, as a job's history tells it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::token::FencingToken;

/// Evidence that work advances.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// How much is done, in the handler's own unit.
    pub done: u64,
    /// Of how much, if known.
    pub total: Option<u64>,
    /// A few words for people.
    pub note: String,
}

/// Why a lease expired.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// Nobody renewed it in time: the holder is dead, frozen or cut off.
    Deadline,
    /// The holder let it lapse: its handler showed no progress.
    Stalled,
    /// It reached its maximum lifetime.
    Lifetime,
}

impl Cause {
    /// The cause's one spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::Stalled => "stalled",
            Self::Lifetime => "lifetime",
        }
    }

    /// The cause in words, as every view tells it.
    pub const fn why(self) -> &'static str {
        match self {
            Self::Deadline => "nobody renewed it: the holder died, froze or was cut off",
            Self::Stalled => "the handler showed no progress for its stall limit",
            Self::Lifetime => "it reached its maximum lifetime",
        }
    }
}

/// Why a worker cannot work a job, and leaves it to workers of another version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DeclineCause {
    /// It has no handler for the job's kind.
    UnknownKind,
    /// The payload's version is above the [`Job::VERSION`](crate::Job::VERSION) of its handler.
    NewerVersion,
    /// The payload cannot be decoded. After a time the job is given up:
    /// [`Worker::decode_grace`](crate::Worker::decode_grace).
    UndecodablePayload,
}

impl DeclineCause {
    /// All causes.
    pub const ALL: [Self; 3] = [
        Self::UnknownKind,
        Self::NewerVersion,
        Self::UndecodablePayload,
    ];

    /// The cause's one spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownKind => "unknown_kind",
            Self::NewerVersion => "newer_version",
            Self::UndecodablePayload => "undecodable_payload",
        }
    }
}

/// How a lease ended. Every lease ends exactly once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LeaseEnd {
    /// Settled: done.
    Completed,
    /// Settled: again later, a failure counted.
    Retried,
    /// Settled: handed back unfinished, nothing counted.
    Surrendered,
    /// Settled: given up.
    Buried,
    /// Settled by a retry or a surrender after a cancel.
    Cancelled,
    /// Expired.
    Expired(Cause),
    /// Ended by an operator.
    Revoked,
}

impl LeaseEnd {
    /// The end's one spelling, without the cause.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Retried => "retried",
            Self::Surrendered => "surrendered",
            Self::Buried => "buried",
            Self::Cancelled => "cancelled",
            Self::Expired(_) => "expired",
            Self::Revoked => "revoked",
        }
    }

    /// Whether its holder ended it: the opposite of expired.
    pub const fn is_released(self) -> bool {
        !matches!(self, Self::Expired(_) | Self::Revoked)
    }
}

/// One ended lease in a job's history.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EndedLease {
    /// Its token.
    pub token: FencingToken,
    /// The worker that held it.
    pub owner: Arc<str>,
    /// The run that the worker served.
    pub task: Arc<str>,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// When it ended.
    pub ended_at: Timestamp,
    /// How often it was renewed.
    pub renewals: u32,
    /// How it ended.
    pub end: LeaseEnd,
    /// Why, in words: the failure's reason, the revoke's.
    pub reason: Option<String>,
    /// The last progress shown.
    pub progress: Option<Progress>,
}

impl EndedLease {
    /// A lease that ended without a renewal, a reason or any progress, for stores to fill.
    pub fn new(
        token: FencingToken,
        owner: Arc<str>,
        task: Arc<str>,
        granted_at: Timestamp,
        ended_at: Timestamp,
        end: LeaseEnd,
    ) -> Self {
        Self {
            token,
            owner,
            task,
            granted_at,
            ended_at,
            renewals: 0,
            end,
            reason: None,
            progress: None,
        }
    }

    /// Why it ended, in words: the reason given, or why it expired. None if it ended well.
    pub fn why(&self) -> Option<&str> {
        match (&self.reason, self.end) {
            (Some(reason), _) => Some(reason),
            (None, LeaseEnd::Expired(cause)) => Some(cause.why()),
            (None, _) => None,
        }
    }

    /// What it adds to its job's record: eight long reasons weigh more than most payloads.
    pub(crate) fn weight(&self) -> usize {
        const NUMBERS: usize = 30;
        const LENGTH: usize = 4;
        const SHOWN: usize = 17;
        let reason = self.reason.as_ref().map_or(0, |it| LENGTH + it.len());
        let shown = self.progress.as_ref();
        let shown = shown.map_or(0, |it| SHOWN + LENGTH + it.note.len());
        NUMBERS + LENGTH + self.owner.len() + LENGTH + self.task.len() + reason + shown
    }
}
