//! What is said to a [`HoldingStore`](super::HoldingStore) and what it answers.
//!
//! These are exhaustive on purpose, as those of the jobs' verbs.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Cause, FencingToken, HoldingReceipt, Nonce, Progress};
use crate::limits::{self, at_most, duration, positive, without_zero};
use crate::rules::holding::{self, FamilyName, Mode, Scope, ScopeKind};
use crate::store::RequestId;

/// Arguments of [`HoldingStore::acquire`](super::HoldingStore::acquire).
#[derive(Clone, Debug)]
pub struct AcquireRequest {
    /// The name of this call.
    pub request: RequestId,
    /// The asks, independent of each other. Served in order.
    pub asks: Vec<Ask>,
}

impl AcquireRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most(
            "asks",
            self.asks.len(),
            limits::CALL_ITEMS,
            "asks in a call",
        )?;
        let scopes = self.asks.iter().flat_map(|ask| &ask.scopes);
        let bytes = scopes.map(|scope| scope.key().len()).sum();
        at_most("scopes", bytes, limits::CALL_BYTES, "bytes in a call")?;
        self.asks.iter().try_for_each(Ask::validate)
    }
}

/// One ask for a holding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// The family.
    pub family: FamilyName,
    /// What to hold: 1 to 16 scopes of one partition that do not overlap. All or none.
    pub scopes: Vec<Scope>,
    /// How to hold each of them.
    pub mode: Mode,
    /// Who may renew. No zero byte, as in all names and reasons.
    pub owner: Arc<str>,
    /// The run that it serves.
    pub task: Arc<str>,
    /// Fresh randomness: names the ask, and makes the receipt unguessable.
    pub nonce: Nonce,
    /// The term of the holding.
    pub term: Duration,
    /// Its maximum lifetime.
    pub max_lifetime: Duration,
    /// Whether to leave or refresh a ticket if it is busy.
    pub wait: bool,
}

impl Ask {
    fn validate(&self) -> Result<()> {
        holding::check_ask(&self.scopes, self.mode)?;
        at_most("owner", self.owner.len(), limits::OWNER_BYTES, "bytes")?;
        at_most("task", self.task.len(), limits::OWNER_BYTES, "bytes")?;
        without_zero("owner", &self.owner)?;
        without_zero("task", &self.task)?;
        positive("term", self.term)?;
        positive("max_lifetime", self.max_lifetime)
    }

    /// The partition of its first scope.
    pub fn partition(&self, partitions: u16) -> u16 {
        let first = self.scopes.first();
        first.map_or(0, |scope| scope.partition(partitions))
    }

    /// The name of the ticket that it leaves.
    pub fn ticket(&self) -> TicketName {
        TicketName {
            family: self.family.clone(),
            scope: self.scopes.first().cloned().unwrap_or_else(Scope::root),
            nonce: self.nonce,
        }
    }
}

/// The answer to an acquire. Durations count from the store's now.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Acquisition {
    /// One per ask, in order.
    pub answers: Vec<Acquired>,
    /// The expiries that this call recorded.
    pub expired: Vec<HoldingExpiry>,
    /// How far the store's clock is behind the tokens that the families had given before, if by
    /// more than speed can explain. A clock that was ahead has been set back.
    pub clock_behind: Option<Duration>,
}

/// The answer to one ask.
#[derive(Clone, PartialEq, Debug)]
#[must_use = "an ask may be busy"]
pub enum Acquired {
    /// It is held.
    Granted(GrantedHolding),
    /// Something conflicts with it.
    Busy(Busy),
    /// The family's settings, or the store, rule it out. Nothing was changed.
    Refused(Refusal),
    /// Only of a repeat: it was granted, and has ended since or is overdue.
    Ended,
}

/// A holding as it was granted.
#[derive(Clone, PartialEq, Debug)]
pub struct GrantedHolding {
    /// The proof, with the token.
    pub receipt: HoldingReceipt,
    /// How long it is granted, from the store's now.
    pub granted: Duration,
    /// The state that was saved under its first scope.
    pub state: Option<HoldingState>,
}

/// State that was saved under a holding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HoldingState {
    /// The token of the holding that wrote it.
    pub token: FencingToken,
    /// The writer's own count.
    pub seq: u64,
    /// The state.
    pub bytes: Bytes,
}

/// What stands in the way of an ask.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Busy {
    /// Those that hold what it conflicts with, or held it until it expired or was revoked and now
    /// rests. The first 8 by token; none if only tickets are in the way, or units used up.
    pub holders: Vec<BlockedBy>,
    /// Whether its own owner and task are among all who hold.
    pub own: bool,
    /// How many other live tickets conflict with it. 1,000 stands for that many or more.
    pub waiting: u64,
    /// Its place in line, from 1, if it has a ticket now: how many of those are earlier, and it.
    pub place: Option<u64>,
    /// The earliest deadline (with the rest behind it) among all that is directly in the way,
    /// earlier tickets included. Zero: again, now. None: nothing that ends by the passage of time.
    pub again_in: Option<Duration>,
}

/// One holder, as an ask is told of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlockedBy {
    /// Its token.
    pub token: FencingToken,
    /// Who holds.
    pub owner: Arc<str>,
    /// For which run.
    pub task: Arc<str>,
    /// How it holds.
    pub mode: Mode,
    /// How long ago it was granted.
    pub since: Duration,
    /// Until its deadline, unless it is renewed; of one that rests, until the rest is over.
    pub left: Duration,
    /// Until the last moment at which it can still be held, however it is renewed.
    pub latest: Duration,
    /// It expired or was revoked, and what it held is closed for its family's rest.
    pub resting: bool,
}

/// Why an ask is ruled out, whoever holds what.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// More units than the family gives one name.
    Units {
        /// How many it gives.
        of: u32,
    },
    /// The scopes are of different partitions.
    Partitions,
    /// The nonce names an ask for something else.
    Nonce,
    /// The store has no scopes of this kind.
    Unsupported,
}

impl Refusal {
    /// The refusal as the error of bad input, for callers who have only one ask.
    pub fn error(self, ask: &Ask) -> Error {
        match self {
            Self::Units { of } => {
                let limit = format!("at most {of} units in family {}", ask.family);
                Error::invalid("units", ask.mode.units(), limit)
            }
            Self::Partitions => {
                Error::invalid("scopes", "several partitions", "scopes of one partition")
            }
            Self::Unsupported => Error::new(ErrorKind::Unsupported, "the store holds names only"),
            Self::Nonce => Error::invalid("nonce", "that of another ask", "a new one per ask"),
        }
    }
}

/// One recorded expiry: a crash report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HoldingExpiry {
    /// The family.
    pub family: FamilyName,
    /// What was held.
    pub scopes: Vec<Scope>,
    /// The token of the holding.
    pub token: FencingToken,
    /// Who held it.
    pub owner: Arc<str>,
    /// For which run.
    pub task: Arc<str>,
    /// Why it expired.
    pub cause: Cause,
    /// The last progress shown.
    pub progress: Option<Progress>,
}

/// A sign of life for one holding.
#[derive(Clone, PartialEq, Debug)]
pub struct HoldingBeat {
    /// The proof of the holding.
    pub receipt: HoldingReceipt,
    /// It expires now: its work shows no progress.
    pub lapse: bool,
    /// Progress shown since the last beat.
    pub progress: Option<Progress>,
}

impl HoldingBeat {
    /// A beat that keeps the holding.
    pub fn of(receipt: HoldingReceipt) -> Self {
        Self {
            receipt,
            lapse: false,
            progress: None,
        }
    }

    pub(crate) fn validate_all(beats: &[Self]) -> Result<()> {
        at_most("beats", beats.len(), limits::CALL_ITEMS, "beats in a call")?;
        for progress in beats.iter().filter_map(|beat| beat.progress.as_ref()) {
            let length = progress.note.len();
            at_most("progress note", length, limits::REASON_BYTES, "bytes")?;
        }
        Ok(())
    }
}

/// The answer to one beat.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a fenced holder must stop"]
pub enum HoldingRenewal {
    /// The holding lives on.
    Held {
        /// From the store's now.
        granted: Duration,
        /// It was recalled: the time that is left to it, which no renewal passes.
        recalled: Option<Duration>,
    },
    /// It is no longer the holder's.
    Fenced,
}

/// The end of one holding or ticket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Release {
    /// Which.
    pub by: ReleaseBy,
    /// State to be saved with it: the writer's count, and the bytes.
    pub state: Option<(u64, Bytes)>,
    /// The mark of a fence that refused this holder although it is the current one: the store
    /// raises its floor above it, unless it is too far ahead to be believed.
    pub mark: Option<FencingToken>,
}

impl Release {
    /// A plain release.
    pub fn of(receipt: HoldingReceipt) -> Self {
        Self::by(ReleaseBy::Receipt(receipt))
    }

    /// Takes an ask back, whatever became of it.
    pub fn withdraw(ask: &Ask) -> Self {
        Self::by(ReleaseBy::Ask(ask.ticket()))
    }

    fn by(by: ReleaseBy) -> Self {
        Self {
            by,
            state: None,
            mark: None,
        }
    }
}

/// What a release ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReleaseBy {
    /// The holding of this receipt.
    Receipt(HoldingReceipt),
    /// The ticket or the holding of an ask, whichever there is.
    Ask(TicketName),
}

/// What a waiter knows of its ask without an answer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TicketName {
    /// The family.
    pub family: FamilyName,
    /// One of the ask's scopes.
    pub scope: Scope,
    /// The ask's nonce.
    pub nonce: Nonce,
}

/// Arguments of [`HoldingStore::release`](super::HoldingStore::release).
#[derive(Clone, Debug)]
pub struct ReleaseRequest {
    /// The name of this call.
    pub request: RequestId,
    /// What to end.
    pub releases: Vec<Release>,
}

impl ReleaseRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        let releases = self.releases.len();
        at_most(
            "releases",
            releases,
            limits::CALL_ITEMS,
            "releases in a call",
        )?;
        let states = self
            .releases
            .iter()
            .filter_map(|release| release.state.as_ref());
        check_states(states.map(|(_, bytes)| bytes))
    }
}

/// The answer to one release.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Released {
    /// The holding has ended.
    Ended {
        /// Its deadline had passed, but its expiry had not been recorded.
        late: bool,
        /// Whether state came along and was saved.
        saved: bool,
    },
    /// The ticket is gone.
    Withdrawn,
    /// There is no such holding or ticket, or no longer.
    Fenced,
}

/// State to be saved under a holding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Save {
    /// The proof of the holding.
    pub receipt: HoldingReceipt,
    /// The writer's own count; under one token it must not fall.
    pub seq: u64,
    /// The state, 64 KiB at most.
    pub bytes: Bytes,
}

/// Arguments of [`HoldingStore::save`](super::HoldingStore::save).
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// The name of this call.
    pub request: RequestId,
    /// What to save.
    pub saves: Vec<Save>,
}

impl SaveRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most(
            "saves",
            self.saves.len(),
            limits::CALL_ITEMS,
            "saves in a call",
        )?;
        check_states(self.saves.iter().map(|save| &save.bytes))
    }
}

fn check_states<'a>(states: impl Iterator<Item = &'a Bytes>) -> Result<()> {
    let mut total = 0;
    for bytes in states {
        at_most("state", bytes.len(), limits::STATE_BYTES, "bytes")?;
        total += bytes.len();
    }
    at_most("state", total, limits::CALL_BYTES, "bytes in a call")
}

/// The answer to one save.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "fenced state was not saved"]
pub enum SavedState {
    /// The next holder gets it.
    Saved {
        /// The deadline had passed, but the expiry had not been recorded.
        late: bool,
    },
    /// Not saved: a later state is there.
    Behind {
        /// The token that wrote it.
        token: FencingToken,
        /// Its sequence number.
        seq: u64,
    },
    /// Not saved: the holding was not the caller's, or no longer.
    Fenced,
}

/// Arguments of [`HoldingStore::commit`](super::HoldingStore::commit).
#[derive(Clone, Debug)]
pub struct CommitRequest {
    /// The name of this call.
    pub request: RequestId,
    /// The holdings whose units are used up.
    pub receipts: Vec<HoldingReceipt>,
}

impl CommitRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        let receipts = self.receipts.len();
        at_most(
            "receipts",
            receipts,
            limits::CALL_ITEMS,
            "receipts in a call",
        )
    }
}

/// The answer to one commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a fenced commit used nothing up"]
pub enum Committed {
    /// The holding has ended, and its units are used up.
    Done,
    /// It holds no units. It lives on.
    NoUnits,
    /// It is no longer the holder's. Nothing was used up.
    Fenced,
}

/// A question of [`HoldingStore::check`](super::HoldingStore::check).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    /// The proof that somebody showed.
    pub receipt: HoldingReceipt,
    /// What it has to be good for.
    pub scope: Scope,
}

impl Check {
    pub(crate) fn validate_all(checks: &[Self]) -> Result<()> {
        at_most(
            "checks",
            checks.len(),
            limits::CALL_ITEMS,
            "checks in a call",
        )
    }
}

/// The answer to one check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "it may not be held"]
pub enum Checked {
    /// It is held, and the scope is all within it.
    Held {
        /// Until its deadline, from the store's now.
        left: Duration,
        /// How it is held.
        mode: Mode,
    },
    /// It is held, and the scope is not, or not all, within it.
    ScopeMismatch,
    /// It is not held.
    Fenced(Missing),
}

/// Why a receipt is not good for anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// It expired: its deadline has passed, or its expiry is among the last 8 ends of the scope.
    Expired,
    /// It was never given, it ended in another way, or nobody remembers.
    Unknown,
}

/// What a reap did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reaped {
    /// The expiries that it recorded.
    pub expired: Vec<HoldingExpiry>,
    /// How many scopes it forgot.
    pub forgotten: u64,
}

/// Which holdings, or tickets, a command is about.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldingSelect {
    /// The one with this token.
    Token {
        /// The family.
        family: FamilyName,
        /// The partition of the family.
        partition: u16,
        /// The token.
        token: FencingToken,
    },
    /// All that name this very scope.
    Scope {
        /// The family.
        family: FamilyName,
        /// The scope.
        scope: Scope,
    },
    /// All of an owner.
    Owner(Arc<str>),
    /// All that serve a task.
    Task(Arc<str>),
}

impl fmt::Display for HoldingSelect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token { family, token, .. } => write!(f, "token {token} of family {family}"),
            Self::Scope { family, scope } => write!(f, "{scope} of family {family}"),
            Self::Owner(owner) => write!(f, "owner {owner}"),
            Self::Task(task) => write!(f, "task {task}"),
        }
    }
}

/// How a family behaves. In a command, None leaves a setting as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FamilySettings {
    /// How many units there are of each name. At first 0. Lowering it ends nothing.
    pub units: Option<u32>,
    /// How long a scope stays closed after an expiry or a revoke, from the deadline or the revoke
    /// on. At first zero. Holds for what is granted from then on.
    pub rest: Option<Duration>,
    /// How many issuers there are. At first 1; fixed once something was asked of the family.
    pub partitions: Option<u16>,
}

/// What an operator can do with holdings.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HoldingCommand {
    /// End holdings now, without their holders.
    Revoke(HoldingSelect),
    /// Ask holders to give up: no renewal goes beyond the grace, and no holding ends sooner than it
    /// would have without one. A second recall can only shorten it.
    Recall {
        /// Which.
        holdings: HoldingSelect,
        /// How long from now.
        grace: Duration,
    },
    /// Take tickets out of line. Their waiters may ask again.
    DropTickets(HoldingSelect),
    /// Change how a family behaves.
    Configure {
        /// The family.
        family: FamilyName,
        /// The settings to change.
        settings: FamilySettings,
    },
    /// Make used-up units of a name free again.
    Restock {
        /// The family.
        family: FamilyName,
        /// The name.
        scope: Scope,
        /// How many at most.
        units: u32,
    },
}

impl HoldingCommand {
    /// The command's one word.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Revoke(_) => "revoke",
            Self::Recall { .. } => "recall",
            Self::DropTickets(_) => "drop_tickets",
            Self::Configure { .. } => "configure",
            Self::Restock { .. } => "restock",
        }
    }
}

impl fmt::Display for HoldingCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Revoke(holdings) => write!(f, "revoke {holdings}"),
            Self::Recall { holdings, grace } => write!(f, "recall {holdings} within {grace:?}"),
            Self::DropTickets(tickets) => write!(f, "drop tickets of {tickets}"),
            Self::Configure { family, settings } => {
                write!(f, "configure family {family}")?;
                if let Some(units) = settings.units {
                    write!(f, " units={units}")?;
                }
                if let Some(rest) = settings.rest {
                    write!(f, " rest={rest:?}")?;
                }
                if let Some(partitions) = settings.partitions {
                    write!(f, " partitions={partitions}")?;
                }
                Ok(())
            }
            Self::Restock {
                family,
                scope,
                units,
            } => write!(f, "restock {units} of {scope} of family {family}"),
        }
    }
}

/// Arguments of [`HoldingStore::control`](super::HoldingStore::control).
#[derive(Clone, Debug)]
pub struct HoldingControlRequest {
    /// The name of this call.
    pub request: RequestId,
    /// Who asks.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// For what.
    pub command: HoldingCommand,
}

impl HoldingControlRequest {
    /// Checks every limit.
    pub fn validate(&self) -> Result<()> {
        at_most("actor", self.actor.len(), limits::OWNER_BYTES, "bytes")?;
        at_most("reason", self.reason.len(), limits::REASON_BYTES, "bytes")?;
        without_zero("actor", &self.actor)?;
        without_zero("reason", &self.reason)?;
        if self.actor.is_empty() {
            let limit = "a name: every command is on record";
            return Err(Error::invalid("actor", "nothing", limit));
        }
        match &self.command {
            HoldingCommand::Revoke(holdings) => {
                if self.reason.is_empty() {
                    let limit = "a reason: a revoke overrides a live holder";
                    return Err(Error::invalid("reason", "nothing", limit));
                }
                check_select(holdings)
            }
            HoldingCommand::Recall { holdings, grace } => {
                duration("grace", *grace)?;
                check_select(holdings)
            }
            HoldingCommand::DropTickets(tickets) => {
                if let HoldingSelect::Token { .. } = tickets {
                    let limit = "a scope, an owner or a task";
                    return Err(Error::invalid("tickets", "a token", limit));
                }
                check_select(tickets)
            }
            HoldingCommand::Configure { settings, .. } => check_settings(settings),
            HoldingCommand::Restock { scope, .. } if scope.kind() != ScopeKind::Name => {
                Err(Error::invalid("scope", scope.kind().as_str(), "a name"))
            }
            HoldingCommand::Restock { .. } => Ok(()),
        }
    }
}

fn check_select(select: &HoldingSelect) -> Result<()> {
    match select {
        HoldingSelect::Owner(owner) => without_zero("owner", owner),
        HoldingSelect::Task(task) => without_zero("task", task),
        HoldingSelect::Token { .. } | HoldingSelect::Scope { .. } => Ok(()),
    }
}

fn check_settings(settings: &FamilySettings) -> Result<()> {
    if let Some(rest) = settings.rest {
        duration("rest", rest)?;
    }
    match settings.partitions {
        Some(partitions) if !(1..=limits::PARTITIONS).contains(&partitions) => {
            let limit = format!("1 to {}", limits::PARTITIONS);
            Err(Error::invalid("partitions", partitions, limit))
        }
        _ => Ok(()),
    }
}
