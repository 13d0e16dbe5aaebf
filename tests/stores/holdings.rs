//! Every case of the suite for holdings on every store that has them, and the proof that the
//! suite's checker catches a store that breaks the rules.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::async_trait;
use leasehold::clock::ManualClock;
use leasehold::lease::{HoldingReceipt, Nonce};
use leasehold::rules::holding::{FamilyName, Mode, Scope};
use leasehold::rules::vectors::{self, ConflictVector};
use leasehold::store::holding::{
    AcquireRequest, Acquired, Acquisition, Ask, Check, Checked, CommitRequest, Committed,
    FamilySettings, HoldingBeat, HoldingCommand, HoldingControlRequest, HoldingQuery,
    HoldingRenewal, HoldingSelect, HoldingViews, Reaped, ReleaseBy, ReleaseRequest, Released,
    SaveRequest, SavedState, TicketName,
};
use leasehold::store::{HoldingStore, MemoryStore, ReapRequest, RequestId, SessionId};
use leasehold::{FencingToken, Result};
use leasehold_conformance::ManualFixture;
use leasehold_conformance::holding::checker::{HoldingRule, check};
use leasehold_conformance::holding::history::{
    AcquiredNote, HoldingAnswer, HoldingCall, HoldingOp,
};
use leasehold_conformance::holding::{HoldingDriver, HoldingFixture, random};

#[expect(clippy::unused_async, reason = "other stores have to wait for theirs")]
async fn memory() -> ManualFixture {
    let clock = ManualClock::default();
    ManualFixture::new(MemoryStore::with_clock(clock.clone()), clock)
}

leasehold_conformance::holding_conformance!(memory, memory);

/// What a careless store gets wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    /// None: the same wrapper, and a good store.
    None,
    /// It takes every ask for a shared one.
    IgnoresExclusive,
    /// It grants what nothing live is in the way of, whoever waits.
    OvertakesTickets,
    /// A released unit does not come back.
    LeaksUnits,
    /// A state is taken, whatever was saved before.
    SavesAnything,
    /// A release is answered, and not carried out.
    ForgetsReleases,
}

struct Broken {
    inner: Arc<dyn HoldingStore>,
    mistake: Mistake,
    /// Its own calls.
    session: SessionId,
    seq: AtomicU64,
    /// Receipts of units.
    units: std::sync::Mutex<Vec<HoldingReceipt>>,
}

impl fmt::Debug for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Broken").field(&self.mistake).finish()
    }
}

impl Broken {
    async fn new(inner: Arc<dyn HoldingStore>, mistake: Mistake) -> Self {
        Self {
            session: inner.open_session().await.unwrap(),
            inner,
            mistake,
            seq: AtomicU64::default(),
            units: std::sync::Mutex::default(),
        }
    }

    fn request(&self) -> RequestId {
        RequestId {
            session: self.session,
            lane: 0,
            seq: self.seq.fetch_add(1, Ordering::SeqCst),
        }
    }

    async fn overtake(&self, ask: &Ask) -> Result<Acquired> {
        for scope in &ask.scopes {
            let select = HoldingSelect::Scope {
                family: ask.family.clone(),
                scope: scope.clone(),
            };
            let request = HoldingControlRequest {
                request: self.request(),
                actor: "nobody".into(),
                reason: String::new(),
                command: HoldingCommand::DropTickets(select),
            };
            self.inner.control(request).await?;
        }
        let request = AcquireRequest {
            request: self.request(),
            asks: vec![ask.clone()],
        };
        let mut answers = self.inner.acquire(request).await?.answers;
        Ok(answers.remove(0))
    }
}

#[async_trait]
impl HoldingStore for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    async fn dedicated(&self) -> Result<Arc<dyn HoldingStore>> {
        self.inner.dedicated().await
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.inner.open_session().await
    }

    async fn acquire(&self, mut request: AcquireRequest) -> Result<Acquisition> {
        let asks = request.asks.clone();
        for ask in &mut request.asks {
            if self.mistake == Mistake::IgnoresExclusive && ask.mode == Mode::Exclusive {
                ask.mode = Mode::Shared;
            }
        }
        let mut answer = self.inner.acquire(request).await?;
        for (ask, answer) in asks.iter().zip(&mut answer.answers) {
            match answer {
                Acquired::Busy(busy)
                    if self.mistake == Mistake::OvertakesTickets && busy.holders.is_empty() =>
                {
                    *answer = self.overtake(ask).await?;
                }
                Acquired::Granted(held) if ask.mode.units() > 0 => {
                    self.units.lock().unwrap().push(held.receipt.clone());
                }
                _ => {}
            }
        }
        Ok(answer)
    }

    async fn renew(&self, beats: Vec<HoldingBeat>) -> Result<Vec<HoldingRenewal>> {
        self.inner.renew(beats).await
    }

    async fn release(&self, request: ReleaseRequest) -> Result<Vec<Released>> {
        let ended = Released::Ended {
            late: false,
            saved: false,
        };
        let [release] = &request.releases[..] else {
            return self.inner.release(request).await;
        };
        let ReleaseBy::Receipt(receipt) = &release.by else {
            return self.inner.release(request).await;
        };
        let is_unit = self.units.lock().unwrap().contains(receipt);
        if self.mistake == Mistake::LeaksUnits && is_unit {
            let commit = CommitRequest {
                request: request.request,
                receipts: vec![receipt.clone()],
            };
            return Ok(match self.inner.commit(commit).await?[0] {
                Committed::Done => vec![ended],
                _ => vec![Released::Fenced],
            });
        }
        if self.mistake == Mistake::ForgetsReleases {
            return Ok(vec![ended]);
        }
        self.inner.release(request).await
    }

    async fn save(&self, request: SaveRequest) -> Result<Vec<SavedState>> {
        let mut told = self.inner.save(request).await?;
        if self.mistake == Mistake::SavesAnything {
            for told in &mut told {
                if let SavedState::Behind { .. } = told {
                    *told = SavedState::Saved { late: false };
                }
            }
        }
        Ok(told)
    }

    async fn commit(&self, request: CommitRequest) -> Result<Vec<Committed>> {
        self.inner.commit(request).await
    }

    async fn check(&self, checks: Vec<Check>) -> Result<Vec<Checked>> {
        self.inner.check(checks).await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Reaped> {
        self.inner.reap(request).await
    }

    async fn wait(&self, tickets: &[TicketName], limit: Duration) -> Result<()> {
        self.inner.wait(tickets, limit).await
    }

    async fn control(&self, request: HoldingControlRequest) -> Result<u64> {
        self.inner.control(request).await
    }

    async fn inspect(&self, query: HoldingQuery) -> Result<HoldingViews> {
        self.inner.inspect(query).await
    }
}

/// The rules that a store with this mistake breaks in some random programs.
async fn broken_by(mistake: Mistake) -> BTreeSet<HoldingRule> {
    let mut broken = BTreeSet::new();
    for seed in 0..4 {
        let fixture = Arc::new(memory().await);
        let store = Broken::new(fixture.holdings(), mistake).await;
        let driver = HoldingDriver::with(fixture, Arc::new(store)).await;
        let scope = |dice: &mut fastrand::Rng| {
            Scope::path(["/", "/a", "/a/b", "/c"][dice.usize(..4)]).unwrap()
        };
        random::program(&driver, seed, scope).await;
        let found = check(&driver.history().calls(), &driver.families().await);
        broken.extend(found.into_iter().map(|violation| violation.rule));
    }
    broken
}

#[tokio::test]
async fn a_good_store_behind_the_same_wrapper_breaks_nothing() {
    assert_eq!(broken_by(Mistake::None).await, BTreeSet::new());
}

#[tokio::test]
async fn a_store_that_ignores_exclusive_is_caught() {
    let broken = broken_by(Mistake::IgnoresExclusive).await;
    assert!(broken.contains(&HoldingRule::TwoHoldings), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_overtakes_tickets_is_caught() {
    let broken = broken_by(Mistake::OvertakesTickets).await;
    assert!(broken.contains(&HoldingRule::Overtaken), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_leaks_a_unit_is_caught() {
    let broken = broken_by(Mistake::LeaksUnits).await;
    assert!(broken.contains(&HoldingRule::BusyForNothing), "{broken:?}");
    assert!(broken.contains(&HoldingRule::LedgerOff), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_saves_anything_is_caught() {
    let broken = broken_by(Mistake::SavesAnything).await;
    assert!(broken.contains(&HoldingRule::StateWentBack), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_forgets_releases_is_caught() {
    let broken = broken_by(Mistake::ForgetsReleases).await;
    assert!(broken.contains(&HoldingRule::BusyForNothing), "{broken:?}");
    assert!(broken.contains(&HoldingRule::LedgerOff), "{broken:?}");
}

/// Units given away twice: the settings of another family do not count.
#[tokio::test]
async fn a_store_that_gives_too_many_units_is_caught() {
    let fixture = Arc::new(memory().await);
    let driver = HoldingDriver::new(fixture).await;
    let configure = |family: &str, units| HoldingCommand::Configure {
        family: FamilyName::new(family).unwrap(),
        settings: FamilySettings {
            units: Some(units),
            ..FamilySettings::default()
        },
    };
    driver.control(configure("api", 3)).await;
    let ask = |nonce| Ask {
        family: FamilyName::new("api").unwrap(),
        scopes: vec![Scope::name("a").unwrap()],
        mode: Mode::Units(2),
        owner: "w".into(),
        task: "t".into(),
        nonce: Nonce::from_bytes([nonce; 16]),
        term: Duration::from_secs(9),
        max_lifetime: Duration::from_secs(9),
        wait: false,
    };
    driver.held(&ask(1)).await;
    driver.control(configure("api", 4)).await;
    driver.held(&ask(2)).await;
    let mut calls = driver.history().calls();
    assert_eq!(check(&calls, &[]), []);
    // The same history, had the number not been raised.
    calls.remove(2);
    let rules: Vec<_> = check(&calls, &[]).into_iter().map(|it| it.rule).collect();
    assert_eq!(rules, [HoldingRule::TooManyUnits]);
}

/// A history of two holders, one after the other, with a repeat; and the same, told wrongly.
#[tokio::test]
async fn histories_that_are_told_wrongly_are_caught() {
    let driver = HoldingDriver::new(Arc::new(memory().await)).await;
    let ask = |nonce| Ask {
        family: FamilyName::new("merge").unwrap(),
        scopes: vec![Scope::name("a").unwrap()],
        mode: Mode::Exclusive,
        owner: "w".into(),
        task: "t".into(),
        nonce: Nonce::from_bytes([nonce; 16]),
        term: Duration::from_secs(9),
        max_lifetime: Duration::from_secs(9),
        wait: false,
    };
    let first = driver.held(&ask(1)).await;
    driver.release(&first).await;
    let request = driver.acquire_request(&[&ask(2)]);
    for _ in 0..2 {
        driver.store().acquire(request.clone()).await.unwrap();
    }
    let calls = driver.history().calls();
    assert_eq!(check(&calls, &driver.families().await), []);
    let rules = |calls: &[HoldingCall]| -> Vec<HoldingRule> {
        check(calls, &[]).into_iter().map(|it| it.rule).collect()
    };
    let with_token = |call: &HoldingCall, number| {
        let mut call = call.clone();
        if let Some(HoldingAnswer::Acquired { answers, .. }) = &mut call.answer
            && let AcquiredNote::Granted { token, .. } = &mut answers[0]
        {
            *token = FencingToken::new(number);
        }
        call
    };
    let smaller = with_token(&calls[2], 7);
    let went_back = [calls[0].clone(), calls[1].clone(), smaller];
    assert_eq!(rules(&went_back), [HoldingRule::TokenWentBack]);
    let another = [&calls[..3], &[with_token(&calls[3], u64::MAX)]].concat();
    assert_eq!(rules(&another), [HoldingRule::RepeatAnsweredAnew]);
    let mut twice = calls[1].clone();
    (twice.start, twice.end) = (90, Some(91));
    if let HoldingOp::Release { request, .. } = &mut twice.op {
        request.seq = 90;
    }
    let twice = [&calls[..2], &[twice]].concat();
    assert_eq!(rules(&twice), [HoldingRule::EndedTwice]);
    let no_release = [calls[0].clone(), calls[2].clone()];
    assert_eq!(rules(&no_release), [HoldingRule::TwoHoldings]);
}

/// Every row of the rules' table of conflicts, for a holding and for a ticket that comes first.
async fn play_conflicts(d: &HoldingDriver) {
    let family = FamilyName::new("v").unwrap();
    let mut nonce = 0_u64;
    let mut ask = |(scopes, mode): &(Vec<Scope>, Mode), wait| {
        nonce += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&nonce.to_be_bytes());
        Ask {
            family: family.clone(),
            scopes: scopes.clone(),
            mode: *mode,
            owner: "w".into(),
            task: "t".into(),
            nonce: Nonce::from_bytes(bytes),
            term: Duration::from_secs(60),
            max_lifetime: Duration::from_secs(60),
            wait,
        }
    };
    let rows = vectors::conflicts();
    let units = HoldingCommand::Configure {
        family: FamilyName::new("v").unwrap(),
        settings: FamilySettings {
            units: Some(rows[0].units),
            ..FamilySettings::default()
        },
    };
    d.control(units).await;
    let is_busy = |answer: &Acquired| matches!(answer, Acquired::Busy(_));
    for row in &rows {
        let held = d.held(&ask(&row.first, false)).await;
        let second = ask(&row.second, false);
        let answer = d.acquire(&second).await;
        assert_eq!(is_busy(&answer), row.holding_blocks, "a holding: {row:?}");
        d.withdraw(&second).await;
        for scope in &row.second.0 {
            let covers = row.first.0.iter().any(|whole| whole.covers(scope));
            let told = d.check(&held.receipt, scope.clone()).await;
            assert_eq!(told != Checked::ScopeMismatch, covers, "{row:?}");
        }
        d.release(&held).await;

        // The ticket waits for something else as well, which nobody else wants.
        let other = Scope::name("other").unwrap();
        let in_the_way = d
            .held(&ask(&(vec![other.clone()], Mode::Exclusive), false))
            .await;
        let mut first = row.first.clone();
        first.0.push(other);
        let first = ask(&first, true);
        assert!(is_busy(&d.acquire(&first).await), "{row:?}");
        let second = ask(&row.second, false);
        let answer = d.acquire(&second).await;
        assert_eq!(is_busy(&answer), row.ticket_blocks, "a ticket: {row:?}");
        d.withdraw(&second).await;
        d.withdraw(&first).await;
        d.release(&in_the_way).await;
    }
    assert!(d.holdings().await.is_empty() && d.tickets().await.is_empty());
    for blocks in [
        |row: &ConflictVector| row.holding_blocks,
        |row: &ConflictVector| row.ticket_blocks,
        |row: &ConflictVector| row.covers,
    ] {
        assert!(rows.iter().any(blocks) && !rows.iter().all(blocks));
    }
}

#[tokio::test]
async fn the_table_of_conflicts_on_memory() {
    let driver = HoldingDriver::new(Arc::new(memory().await)).await;
    play_conflicts(&driver).await;
}
