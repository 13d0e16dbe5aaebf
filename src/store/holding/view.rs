//! Looking at holdings without touching them.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::inspect::{AuditView, Page, Paged};
use crate::lease::{Cause, FencingToken, Progress};
use crate::rules::holding::{FamilyName, Mode, Scope};

/// A question for a [`HoldingStore`](super::HoldingStore).
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum HoldingQuery {
    /// All families, by name: [`HoldingViews::Families`].
    Families,
    /// The holdings, by (deadline, token): [`HoldingViews::Holdings`].
    Holdings {
        /// Which.
        filter: HoldingFilter,
        /// Which part of them.
        page: Page,
    },
    /// Who waits, in line: [`HoldingViews::Tickets`].
    Tickets {
        /// Which.
        filter: HoldingFilter,
        /// Which part of them.
        page: Page,
    },
    /// One scope: [`HoldingViews::Scope`].
    Scope {
        /// The family.
        family: FamilyName,
        /// The scope.
        scope: Scope,
    },
    /// A sample of the scopes that most tickets name, at most 100: [`HoldingViews::Contended`].
    Contended,
    /// The commands on record, newest first, those about jobs included: [`HoldingViews::Audit`].
    Audit {
        /// Which part of them.
        page: Page,
    },
}

/// Which holdings or tickets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HoldingFilter {
    /// Of this family.
    pub family: Option<FamilyName>,
    /// Of this owner.
    pub owner: Option<Arc<str>>,
    /// For this task.
    pub task: Option<Arc<str>>,
}

/// The answer to a [`HoldingQuery`], of the same name.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum HoldingViews {
    /// One row per family, by name.
    Families(Vec<FamilyView>),
    /// A page of holdings.
    Holdings(Paged<HoldingView>),
    /// A page of tickets.
    Tickets(Paged<TicketView>),
    /// One scope, if it is remembered.
    Scope(Option<Box<ScopeView>>),
    /// Scopes, by how many wait.
    Contended(Vec<ContendedView>),
    /// A page of the audit trail.
    Audit(Paged<AuditView>),
}

/// One family at a glance.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FamilyView {
    /// Its name.
    pub family: FamilyName,
    /// How many units there are of each name.
    pub units: u32,
    /// How long a scope stays closed after an expiry or a revoke.
    pub rest: Duration,
    /// How many issuers it has.
    pub partitions: u16,
    /// What became of its holdings.
    pub ledger: HoldingLedger,
    /// Tickets that are there.
    pub waiting: u64,
}

impl FamilyView {
    /// A family with nothing in it, for stores to fill.
    pub fn new(family: FamilyName) -> Self {
        Self {
            family,
            units: 0,
            rest: Duration::ZERO,
            partitions: 1,
            ledger: HoldingLedger::default(),
            waiting: 0,
        }
    }
}

/// The ledger of a family: every holding ends exactly once, and is counted where it ended, in the
/// same step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HoldingLedger {
    /// Holdings granted.
    pub granted: u64,
    /// Ended by their holders.
    pub released: u64,
    /// Expired because they were not renewed.
    pub expired_deadline: u64,
    /// Expired because their work showed no progress.
    pub expired_stalled: u64,
    /// Expired because they reached their maximum lifetime.
    pub expired_lifetime: u64,
    /// Ended by an operator.
    pub revoked: u64,
    /// Ended because their units were used up.
    pub committed: u64,
    /// Holdings that have not ended, overdue ones included until their expiry is recorded: a count
    /// of its own.
    pub live: u64,
    /// Releases that came after the deadline, and before the expiry was recorded.
    pub late: u64,
    /// Releases, saves and commits refused as stale: what a holder tried that had been replaced.
    /// Asks that were taken back in vain are not among them.
    pub fenced: u64,
}

impl HoldingLedger {
    /// Expired, whatever the cause.
    pub const fn expired(&self) -> u64 {
        self.expired_deadline + self.expired_stalled + self.expired_lifetime
    }

    /// Invariant H4: granted = released + expired + revoked + committed + live.
    pub const fn balances(&self) -> bool {
        self.granted == self.released + self.expired() + self.revoked + self.committed + self.live
    }

    /// Counts one end.
    pub(crate) fn count(&mut self, end: HoldingEnd) {
        *match end {
            HoldingEnd::Released => &mut self.released,
            HoldingEnd::Expired(Cause::Deadline) => &mut self.expired_deadline,
            HoldingEnd::Expired(Cause::Stalled) => &mut self.expired_stalled,
            HoldingEnd::Expired(Cause::Lifetime) => &mut self.expired_lifetime,
            HoldingEnd::Revoked => &mut self.revoked,
            HoldingEnd::Committed => &mut self.committed,
        } += 1;
        self.live -= 1;
    }
}

/// How a holding ended. Every holding ends exactly once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HoldingEnd {
    /// Its holder gave it back.
    Released,
    /// Time did it.
    Expired(Cause),
    /// An operator did.
    Revoked,
    /// Its units were used up.
    Committed,
}

/// One holding.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HoldingView {
    /// Its family.
    pub family: FamilyName,
    /// The partition of the family.
    pub partition: u16,
    /// What is held.
    pub scopes: Vec<Scope>,
    /// How.
    pub mode: Mode,
    /// Its token.
    pub token: FencingToken,
    /// Who may renew it.
    pub owner: Arc<str>,
    /// The run that it serves.
    pub task: Arc<str>,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// Until its deadline; zero if it is overdue.
    pub left: Duration,
    /// Until the last moment at which it can still be held.
    pub latest: Duration,
    /// What each renewal extends it by.
    pub term: Duration,
    /// How often it was renewed.
    pub renewals: u32,
    /// Whether it was recalled.
    pub recalled: bool,
    /// The last progress shown.
    pub progress: Option<Progress>,
}

impl HoldingView {
    /// A holding of which nothing is known but what it is on and whose it is, for stores to fill.
    pub fn new(
        family: FamilyName,
        scopes: Vec<Scope>,
        mode: Mode,
        token: FencingToken,
        (owner, task): (Arc<str>, Arc<str>),
    ) -> Self {
        Self {
            family,
            partition: 0,
            scopes,
            mode,
            token,
            owner,
            task,
            granted_at: Timestamp::ZERO,
            left: Duration::ZERO,
            latest: Duration::ZERO,
            term: Duration::ZERO,
            renewals: 0,
            recalled: false,
            progress: None,
        }
    }
}

/// One ticket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TicketView {
    /// Its family.
    pub family: FamilyName,
    /// The partition of the family.
    pub partition: u16,
    /// What is asked for.
    pub scopes: Vec<Scope>,
    /// How.
    pub mode: Mode,
    /// Who waits.
    pub owner: Arc<str>,
    /// For which run.
    pub task: Arc<str>,
    /// Since when.
    pub since: Timestamp,
    /// Until it ends unless the waiter asks again.
    pub left: Duration,
}

impl TicketView {
    /// A ticket of which nothing is known but what it is for and whose it is, for stores to fill.
    pub fn new(
        family: FamilyName,
        scopes: Vec<Scope>,
        mode: Mode,
        (owner, task): (Arc<str>, Arc<str>),
    ) -> Self {
        Self {
            family,
            partition: 0,
            scopes,
            mode,
            owner,
            task,
            since: Timestamp::ZERO,
            left: Duration::ZERO,
        }
    }
}

/// One ended holding in a scope's history.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EndedHolding {
    /// Its token.
    pub token: FencingToken,
    /// Who held it.
    pub owner: Arc<str>,
    /// For which run.
    pub task: Arc<str>,
    /// How.
    pub mode: Mode,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// When its end was recorded.
    pub ended_at: Timestamp,
    /// How often it was renewed.
    pub renewals: u32,
    /// How it ended.
    pub end: HoldingEnd,
    /// Why, in words: the revoke's reason.
    pub reason: Option<String>,
    /// The last progress shown.
    pub progress: Option<Progress>,
}

impl EndedHolding {
    /// A holding that ended without a renewal, a reason or any progress, for stores to fill.
    pub fn new(
        token: FencingToken,
        (owner, task): (Arc<str>, Arc<str>),
        mode: Mode,
        (granted_at, ended_at): (Timestamp, Timestamp),
        end: HoldingEnd,
    ) -> Self {
        Self {
            token,
            owner,
            task,
            mode,
            granted_at,
            ended_at,
            renewals: 0,
            end,
            reason: None,
            progress: None,
        }
    }
}

/// One scope, with everything known about it.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct ScopeView {
    /// The holdings that name this very scope, by token.
    pub holdings: Vec<HoldingView>,
    /// How many tickets name this very scope. 1,000 stands for that many or more.
    pub waiting: u64,
    /// The last 8 holdings that ended, the latest last.
    pub ended: Vec<EndedHolding>,
    /// Token and sequence number of the saved state, and its bytes' number.
    pub state: Option<(FencingToken, u64, usize)>,
    /// Units that are used up.
    pub committed: u64,
}

/// One scope that is waited for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ContendedView {
    /// Its family.
    pub family: FamilyName,
    /// The scope.
    pub scope: Scope,
    /// How many tickets name it. 1,000 stands for that many or more.
    pub waiting: u64,
}

impl ContendedView {
    /// A scope, and how many tickets name it.
    pub fn new(family: FamilyName, scope: Scope, waiting: u64) -> Self {
        Self {
            family,
            scope,
            waiting,
        }
    }
}
