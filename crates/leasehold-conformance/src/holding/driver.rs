//! The hand that drives a store of holdings through a case: one line per call.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::HoldingFixture;
use super::checker;
use super::history::{HoldingHistory, RecordingHoldings};
use leasehold::ErrorKind;
use leasehold::clock::Timestamp;
use leasehold::inspect::{AuditView, Page, Paged};
use leasehold::lease::{HoldingReceipt, Nonce};
use leasehold::rules::holding::{FamilyName, Mode, Scope};
use leasehold::store::holding::{
    AcquireRequest, Acquired, Acquisition, Ask, Busy, Check, Checked, CommitRequest, Committed,
    FamilySettings, FamilyView, GrantedHolding, HoldingBeat, HoldingCommand, HoldingControlRequest,
    HoldingFilter, HoldingLedger, HoldingQuery, HoldingRenewal, HoldingStore, HoldingView,
    HoldingViews, Reaped, Release, ReleaseRequest, Released, Save, SaveRequest, SavedState,
    ScopeView, TicketView,
};
use leasehold::store::{ReapRequest, RequestId, SESSION_IDLE, SessionId};

/// The term of the driver's asks.
pub(super) const TERM: Duration = Duration::from_secs(60);
/// The maximum lifetime of the driver's asks.
pub(super) const LIFETIME: Duration = Duration::from_secs(3600);

/// What the history calls the beginning: only differences count.
const START: Timestamp = Timestamp::from_micros(1_000_000_000_000);

/// The family of most cases.
pub(super) fn family() -> FamilyName {
    FamilyName::new("merge").expect("a good name")
}

/// A name.
pub(super) fn name(text: &str) -> Scope {
    Scope::name(text).expect("a good name")
}

/// A path.
pub(super) fn path(text: &str) -> Scope {
    Scope::path(text).expect("a good path")
}

/// A range of the resource `file`.
pub(super) fn range(start: u64, end: u64) -> Scope {
    Scope::range("file", start..end).expect("a good range")
}

/// Seconds.
pub(super) const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// An exclusive ask that does not wait.
pub(super) fn ask(scope: Scope) -> Ask {
    ask_all(vec![scope])
}

/// The same for several scopes.
pub(super) fn ask_all(scopes: Vec<Scope>) -> Ask {
    Ask {
        family: family(),
        scopes,
        mode: Mode::Exclusive,
        owner: "worker-1".into(),
        task: "run-1".into(),
        nonce: Nonce::draw().expect("randomness"),
        term: TERM,
        max_lifetime: LIFETIME,
        wait: false,
    }
}

/// A shared ask that does not wait.
pub(super) fn shared(scope: Scope) -> Ask {
    Ask {
        mode: Mode::Shared,
        ..ask(scope)
    }
}

/// An ask for units.
pub(super) fn units(text: &str, units: u32) -> Ask {
    Ask {
        mode: Mode::Units(units),
        ..ask(name(text))
    }
}

/// The same ask, which waits.
pub(super) fn waiting(ask: Ask) -> Ask {
    Ask { wait: true, ..ask }
}

/// The same ask, of somebody else.
pub(super) fn by(owner: &str, ask: Ask) -> Ask {
    Ask {
        owner: owner.into(),
        ..ask
    }
}

/// Everything that a store shows of its holdings. Two are equal if nothing that can be seen has
/// changed.
#[derive(Clone, PartialEq, Debug)]
pub struct HoldingSnapshot {
    /// The families, by name.
    pub families: Vec<FamilyView>,
    /// The holdings, by (deadline, token).
    pub holdings: Vec<HoldingView>,
    /// Who waits, in line.
    pub tickets: Vec<TicketView>,
    /// The commands on record, newest first.
    pub audit: Vec<AuditView>,
}

/// Calls a store under one session, and records every call.
pub struct HoldingDriver {
    fixture: Arc<dyn HoldingFixture>,
    store: Arc<dyn HoldingStore>,
    session: Mutex<(SessionId, Timestamp)>,
    seq: Mutex<u64>,
    history: HoldingHistory,
    now: Mutex<Timestamp>,
}

impl fmt::Debug for HoldingDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldingDriver")
            .field("store", &self.store.name())
            .finish_non_exhaustive()
    }
}

impl HoldingDriver {
    /// A driver with a session of its own.
    pub async fn new(fixture: Arc<dyn HoldingFixture>) -> Self {
        let store = fixture.holdings();
        Self::with(fixture, store).await
    }

    /// A driver of another store than the fixture's: one that stands in front of it.
    pub async fn with(fixture: Arc<dyn HoldingFixture>, store: Arc<dyn HoldingStore>) -> Self {
        let history = HoldingHistory::default();
        history.set_clock(START);
        let store = Arc::new(RecordingHoldings::new(store, history.clone(), 0));
        let session = store.open_session().await.expect("a session");
        Self {
            fixture,
            store,
            session: Mutex::new((session, START)),
            seq: Mutex::default(),
            history,
            now: Mutex::new(START),
        }
    }

    /// The store, recorded.
    pub fn store(&self) -> &dyn HoldingStore {
        &*self.store
    }

    /// What was recorded.
    pub fn history(&self) -> &HoldingHistory {
        &self.history
    }

    /// Moves the store's clock forward. Opens another session before this one is idle for too long.
    pub async fn advance(&self, by: Duration) {
        self.fixture.advance_holdings(by).await;
        let now = {
            let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
            *now = now.after(by);
            *now
        };
        self.history.set_clock(now);
        let session = || self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = session().1;
        if now.since(opened) >= SESSION_IDLE / 2 {
            let id = self.store.open_session().await.expect("a session");
            *session() = (id, now);
        }
    }

    /// Puts the store's clock back.
    pub async fn set_back(&self, by: Duration) {
        self.fixture.set_back_holdings(by).await;
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        *now = now.before(by);
        self.history.set_clock(*now);
    }

    /// The next request id.
    pub fn request(&self) -> RequestId {
        let mut seq = self.seq.lock().unwrap_or_else(PoisonError::into_inner);
        *seq += 1;
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        RequestId {
            session: session.0,
            lane: 0,
            seq: *seq,
        }
    }

    /// Asks, ready to be sent.
    pub fn acquire_request(&self, asks: &[&Ask]) -> AcquireRequest {
        AcquireRequest {
            request: self.request(),
            asks: asks.iter().copied().cloned().collect(),
        }
    }

    /// Sends asks.
    pub async fn acquire_all(&self, asks: &[&Ask]) -> Acquisition {
        let request = self.acquire_request(asks);
        self.store.acquire(request).await.expect("acquire")
    }

    /// Sends one ask.
    pub async fn acquire(&self, ask: &Ask) -> Acquired {
        let answers = self.acquire_all(&[ask]).await.answers;
        answers.into_iter().next().expect("one answer per ask")
    }

    /// Sends an ask that must be granted.
    pub async fn held(&self, ask: &Ask) -> GrantedHolding {
        match self.acquire(ask).await {
            Acquired::Granted(held) => held,
            other => panic!("{other:?} for {:?} {}", ask.scopes, ask.mode),
        }
    }

    /// Sends an ask that must be busy.
    pub async fn busy(&self, ask: &Ask) -> Busy {
        match self.acquire(ask).await {
            Acquired::Busy(busy) => busy,
            other => panic!("{other:?} for {:?} {}", ask.scopes, ask.mode),
        }
    }

    /// Renews.
    pub async fn renew(&self, held: &GrantedHolding) -> HoldingRenewal {
        self.beat(HoldingBeat::of(held.receipt.clone())).await
    }

    /// Renews by one beat.
    pub async fn beat(&self, beat: HoldingBeat) -> HoldingRenewal {
        self.store.renew(vec![beat]).await.expect("renew")[0]
    }

    /// Lets a holding lapse.
    pub async fn lapse(&self, held: &GrantedHolding) -> HoldingRenewal {
        let mut beat = HoldingBeat::of(held.receipt.clone());
        beat.lapse = true;
        self.beat(beat).await
    }

    /// A release, ready to be sent.
    pub fn release_request(&self, release: Release) -> ReleaseRequest {
        ReleaseRequest {
            request: self.request(),
            releases: vec![release],
        }
    }

    /// Sends one release.
    pub async fn release_as(&self, release: Release) -> Released {
        let request = self.release_request(release);
        self.store.release(request).await.expect("release")[0]
    }

    /// Releases a holding.
    pub async fn release(&self, held: &GrantedHolding) -> Released {
        self.release_as(Release::of(held.receipt.clone())).await
    }

    /// Takes an ask back.
    pub async fn withdraw(&self, ask: &Ask) -> Released {
        self.release_as(Release::withdraw(ask)).await
    }

    /// Saves state under a holding.
    pub async fn save(&self, held: &GrantedHolding, seq: u64, text: &'static str) -> SavedState {
        let request = SaveRequest {
            request: self.request(),
            saves: vec![Save {
                receipt: held.receipt.clone(),
                seq,
                bytes: Bytes::from_static(text.as_bytes()),
            }],
        };
        self.store.save(request).await.expect("save")[0]
    }

    /// Uses units up.
    pub async fn commit(&self, held: &GrantedHolding) -> Committed {
        let request = CommitRequest {
            request: self.request(),
            receipts: vec![held.receipt.clone()],
        };
        self.store.commit(request).await.expect("commit")[0]
    }

    /// Checks a receipt.
    pub async fn check(&self, receipt: &HoldingReceipt, scope: Scope) -> Checked {
        let receipt = receipt.clone();
        let checks = vec![Check { receipt, scope }];
        self.store.check(checks).await.expect("check")[0]
    }

    /// Records what time has done.
    pub async fn reap(&self) -> Reaped {
        let request = ReapRequest {
            request: self.request(),
            max: 1_000,
        };
        self.store.reap(request).await.expect("reap")
    }

    /// A command, ready to be sent.
    pub fn control_request(&self, command: HoldingCommand) -> HoldingControlRequest {
        HoldingControlRequest {
            request: self.request(),
            actor: "operator".into(),
            reason: "a test".into(),
            command,
        }
    }

    /// Carries out a command.
    pub async fn control(&self, command: HoldingCommand) -> u64 {
        let request = self.control_request(command);
        self.store.control(request).await.expect("control")
    }

    /// Says how many units there are of each name, and how long a scope rests.
    pub async fn configure(&self, units: Option<u32>, rest: Option<Duration>) {
        let settings = FamilySettings {
            units,
            rest,
            partitions: None,
        };
        let family = family();
        self.control(HoldingCommand::Configure { family, settings })
            .await;
    }

    /// The families.
    pub async fn families(&self) -> Vec<FamilyView> {
        match self.store.inspect(HoldingQuery::Families).await {
            Ok(HoldingViews::Families(families)) => families,
            other => panic!("{other:?} for the families"),
        }
    }

    /// The ledger of the family of most cases.
    pub async fn ledger(&self) -> HoldingLedger {
        let families = self.families().await;
        let view = families.into_iter().find(|view| view.family == family());
        view.expect("the family").ledger
    }

    /// What is known of a scope.
    pub async fn scope(&self, scope: Scope) -> Option<ScopeView> {
        let family = family();
        match self
            .store
            .inspect(HoldingQuery::Scope { family, scope })
            .await
        {
            Ok(HoldingViews::Scope(view)) => view.map(|view| *view),
            other => panic!("{other:?} for a scope"),
        }
    }

    /// The holdings.
    pub async fn holdings(&self) -> Vec<HoldingView> {
        all(async |page| {
            let filter = HoldingFilter::default();
            match self
                .store
                .inspect(HoldingQuery::Holdings { filter, page })
                .await
            {
                Ok(HoldingViews::Holdings(paged)) => paged,
                other => panic!("{other:?} for the holdings"),
            }
        })
        .await
    }

    /// Who waits.
    pub async fn tickets(&self) -> Vec<TicketView> {
        all(async |page| {
            let filter = HoldingFilter::default();
            match self
                .store
                .inspect(HoldingQuery::Tickets { filter, page })
                .await
            {
                Ok(HoldingViews::Tickets(paged)) => paged,
                other => panic!("{other:?} for the tickets"),
            }
        })
        .await
    }

    /// The commands on record.
    pub async fn audit(&self) -> Vec<AuditView> {
        all(
            async |page| match self.store.inspect(HoldingQuery::Audit { page }).await {
                Ok(HoldingViews::Audit(paged)) => paged,
                other => panic!("{other:?} for the audit"),
            },
        )
        .await
    }

    /// Everything that the store shows.
    pub async fn snapshot(&self) -> HoldingSnapshot {
        HoldingSnapshot {
            families: self.families().await,
            holdings: self.holdings().await,
            tickets: self.tickets().await,
            audit: self.audit().await,
        }
    }

    /// Asserts that what is done meanwhile changes nothing but the count of refused calls.
    pub async fn unchanged(&self, act: impl AsyncFnOnce()) {
        let snapshot = async || {
            let mut snapshot = self.snapshot().await;
            for family in &mut snapshot.families {
                family.ledger.fenced = 0;
            }
            snapshot
        };
        let before = snapshot().await;
        act().await;
        assert_eq!(before, snapshot().await, "a refused call changed something");
    }

    /// Asserts that asks are refused for a field, and that nothing changes.
    pub async fn refuses(&self, ask: Ask, field: &str) {
        self.unchanged(async || {
            let request = self.acquire_request(&[&ask]);
            let error = self.store.acquire(request).await.expect_err("bad input");
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert_eq!(error.field(), Some(field), "{error}");
        })
        .await;
    }

    /// Asserts that the ledgers balance and count what is there, and that the history is one that a
    /// correct store can have.
    pub async fn assert_in_order(&self) {
        let families = self.families().await;
        let holdings = self.holdings().await;
        for view in &families {
            let of_family = holdings.iter().filter(|it| it.family == view.family);
            assert_eq!(view.ledger.live, of_family.count() as u64, "{view:?}");
        }
        checker::assert_correct(&self.history.calls(), &families);
    }
}

async fn all<T>(ask: impl AsyncFn(Page) -> Paged<T>) -> Vec<T> {
    let mut rows = Vec::new();
    let mut page = Page::first(100);
    loop {
        let paged = ask(page).await;
        rows.extend(paged.rows);
        match paged.next {
            Some(next) => {
                page = Page {
                    after: Some(next),
                    rows: 100,
                };
            }
            None => return rows,
        }
    }
}
