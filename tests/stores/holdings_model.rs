//! Random operations on a store of holdings and on a naive model, which compares all pairs and
//! knows nothing of the crate's rules. Every answer must be the same.
//!
//! Some 20,000 operations in every run, a million with `LEASEHOLD_CAMPAIGN=1`. A failure prints its
//! seed: `LEASEHOLD_SEED=… cargo test --test stores holdings_model`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::FencingToken;
use leasehold::clock::ManualClock;
use leasehold::lease::{HoldingReceipt, Nonce};
use leasehold::rules::holding::{FamilyName, Mode, Scope};
use leasehold::store::holding::{
    AcquireRequest, Acquired, Acquisition, Ask, BlockedBy, Busy, Check, Checked, CommitRequest,
    Committed, FamilySettings, HoldingBeat, HoldingCommand, HoldingControlRequest, HoldingLedger,
    HoldingQuery, HoldingRenewal, HoldingSelect, HoldingViews, Missing, Refusal, Release,
    ReleaseRequest, Released,
};
use leasehold::store::{HoldingStore, MemoryStore, ReapRequest, RequestId, SessionId, Store};

/// A scope, as the model sees it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum What {
    Name(u8),
    Path(Vec<u8>),
    Range(u8, u64, u64),
}

impl What {
    fn scope(&self) -> Scope {
        match self {
            Self::Name(n) => Scope::name(&format!("n{n}")).unwrap(),
            Self::Path(parts) if parts.is_empty() => Scope::path("/").unwrap(),
            Self::Path(parts) => {
                // Texts of which one is the beginning of another.
                let parts = parts
                    .iter()
                    .map(|part| format!("/{}", ["a", "a.", "ab"][*part as usize]));
                Scope::path(&parts.collect::<String>()).unwrap()
            }
            Self::Range(resource, start, end) => {
                Scope::range(&format!("r{resource}"), *start..*end).unwrap()
            }
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(a), Self::Name(b)) => a == b,
            (Self::Path(a), Self::Path(b)) => a.iter().zip(b).all(|(a, b)| a == b),
            (Self::Range(a, ..), Self::Range(b, ..)) if a != b => false,
            (Self::Range(_, start, end), Self::Range(_, from, to)) => {
                (*start..*end).any(|offset| (*from..*to).contains(&offset))
            }
            _ => false,
        }
    }

    /// The family `y` has four partitions: by FNV-1a of the text, paths all in the first.
    fn partition(&self, family: usize) -> u16 {
        let text = match self {
            Self::Name(n) => format!("n{n}"),
            Self::Range(resource, ..) => format!("r{resource}"),
            Self::Path(_) => return 0,
        };
        let mut hash: u64 = 14_695_981_039_346_656_037;
        for byte in text.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
        }
        (hash % [1, PARTITIONS][family]) as u16
    }

    fn is_within(&self, whole: &Self) -> bool {
        match (self, whole) {
            (Self::Name(a), Self::Name(b)) => a == b,
            (Self::Path(a), Self::Path(b)) => a.starts_with(b),
            (Self::Range(a, start, end), Self::Range(b, from, to)) => {
                a == b && (*start..*end).all(|offset| (*from..*to).contains(&offset))
            }
            _ => false,
        }
    }

    fn random(dice: &mut fastrand::Rng) -> Self {
        match dice.u8(..3) {
            0 => Self::Name(dice.u8(..3)),
            1 => {
                let depth = dice.usize(..4);
                Self::Path((0..depth).map(|_| dice.u8(..3)).collect())
            }
            _ => {
                let start = dice.u64(..12);
                Self::Range(dice.u8(..2), start, start + dice.u64(1..5))
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Asked {
    family: usize,
    what: Vec<What>,
    mode: Mode,
    owner: String,
    nonce: u64,
    term: u64,
    lifetime: u64,
}

impl Asked {
    fn partition(&self) -> u16 {
        self.what[0].partition(self.family)
    }

    fn overlaps(&self, other: &Self) -> bool {
        let mut pairs = self
            .what
            .iter()
            .flat_map(|a| other.what.iter().map(move |b| (a, b)));
        self.family == other.family && pairs.any(|(a, b)| a.overlaps(b))
    }

    fn excludes(&self, other: &Self) -> bool {
        let any_exclusive = [self.mode, other.mode].contains(&Mode::Exclusive);
        any_exclusive && self.overlaps(other)
    }

    fn both_count(&self, other: &Self) -> bool {
        matches!((self.mode, other.mode), (Mode::Units(_), Mode::Units(_))) && self.overlaps(other)
    }

    fn ask(&self, families: &[FamilyName; 2], wait: bool) -> Ask {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.nonce.to_be_bytes());
        Ask {
            family: families[self.family].clone(),
            scopes: self.what.iter().map(What::scope).collect(),
            mode: self.mode,
            owner: self.owner.as_str().into(),
            task: "t".into(),
            nonce: Nonce::from_bytes(nonce),
            term: Duration::from_micros(self.term),
            max_lifetime: Duration::from_micros(self.lifetime),
            wait,
        }
    }
}

#[derive(Clone, Debug)]
struct Lease {
    asked: Asked,
    token: FencingToken,
    since: u64,
    deadline: u64,
    rest: u64,
    recalled: Option<u64>,
    /// Set once it has expired or was revoked: it is closed until then.
    closed_until: Option<u64>,
}

impl Lease {
    fn last_moment(&self) -> u64 {
        let end = self.since + self.asked.lifetime;
        self.deadline
            .max(end.min(self.recalled.unwrap_or(u64::MAX)))
    }
}

/// Everything that the model knows.
#[derive(Default)]
struct Model {
    now: u64,
    units: [u32; 2],
    rest: [u64; 2],
    /// Live, overdue, and closed ones.
    leases: Vec<Lease>,
    /// In line, with their deadlines.
    line: Vec<(Asked, u64)>,
    used_up: BTreeMap<(usize, What), u64>,
    ledgers: [HoldingLedger; 2],
    /// Tokens that expired, with what they were on: the last eight of each scope.
    ended: BTreeMap<(usize, What), Vec<(FencingToken, bool)>>,
    last: Option<FencingToken>,
}

const TICKET: u64 = 3_000_000;
const PARTITIONS: u64 = 4;

impl Model {
    fn end(&mut self, at: usize, expired: bool, closes: bool) {
        let lease = &mut self.leases[at];
        let until = lease.deadline.min(self.now) + lease.rest;
        for what in &lease.asked.what {
            let ended = self
                .ended
                .entry((lease.asked.family, what.clone()))
                .or_default();
            ended.push((lease.token, expired));
            if ended.len() > 8 {
                ended.remove(0);
            }
        }
        self.ledgers[lease.asked.family].live -= 1;
        if closes && until > self.now {
            lease.closed_until = Some(until);
        } else {
            self.leases.remove(at);
        }
    }

    fn expire(&mut self, which: impl Fn(&Lease) -> bool) -> Vec<FencingToken> {
        let mut overdue: Vec<_> = self.leases.iter().collect();
        overdue.retain(|it| it.closed_until.is_none() && it.deadline <= self.now && which(it));
        let mut overdue: Vec<_> = overdue.iter().map(|it| (it.deadline, it.token)).collect();
        overdue.sort_unstable();
        for (_, token) in &overdue {
            let at = self
                .leases
                .iter()
                .position(|it| it.token == *token && it.closed_until.is_none());
            let at = at.unwrap();
            let lease = &self.leases[at];
            let ledger = &mut self.ledgers[lease.asked.family];
            if lease.deadline >= lease.since + lease.asked.lifetime {
                ledger.expired_lifetime += 1;
            } else {
                ledger.expired_deadline += 1;
            }
            self.end(at, true, true);
        }
        overdue.into_iter().map(|(_, token)| token).collect()
    }

    fn is_live(&self, lease: &Lease) -> bool {
        lease.closed_until.is_none() && lease.deadline > self.now
    }

    /// What the store must answer without looking for what is in the way: None is the holding that
    /// the nonce names.
    fn settled(&mut self, asked: &Asked) -> Result<(), Option<Acquired>> {
        let is_own = |other: &Asked| other.nonce == asked.nonce && other.family == asked.family;
        let same = |other: &Asked| other.what == asked.what && other.mode == asked.mode;
        let of_other = Acquired::Refused(Refusal::Nonce);
        let mut held = self.leases.iter().filter(|it| self.is_live(it));
        if let Some(held) = held.find(|it| is_own(&it.asked)) {
            return Err((!same(&held.asked)).then_some(of_other));
        }
        self.line.retain(|(_, deadline)| *deadline > self.now);
        let own = self.line.iter().find(|(other, _)| is_own(other));
        if own.is_some_and(|(own, _)| !same(own)) {
            return Err(Some(of_other));
        }
        let mut partitions = asked.what.iter().map(|what| what.partition(asked.family));
        if partitions.any(|partition| partition != asked.partition()) {
            return Err(Some(Acquired::Refused(Refusal::Partitions)));
        }
        let of = self.units[asked.family];
        if asked.mode.units() > u64::from(of) {
            return Err(Some(Acquired::Refused(Refusal::Units { of })));
        }
        Ok(())
    }

    /// What the store must answer, and the expiries that it must report, but for the token.
    fn acquire(&mut self, asked: &Asked, wait: bool) -> (Option<Acquired>, Vec<FencingToken>) {
        if let Err(answer) = self.settled(asked) {
            return (answer, Vec::new());
        }
        let (k, of, partition) = (
            asked.mode.units(),
            self.units[asked.family],
            asked.partition(),
        );
        let is_own = |other: &Asked| other.nonce == asked.nonce && other.family == asked.family;
        let mut expired = self.expire(|it| {
            is_own(&it.asked) || it.asked.excludes(asked) || it.asked.both_count(asked)
        });
        self.leases
            .retain(|it| it.closed_until.is_none_or(|until| until > self.now));

        let there = || {
            let leases = self.leases.iter();
            leases.filter(|it| self.is_live(it) || it.closed_until.is_some())
        };
        let mut short = Vec::new();
        for what in asked.what.iter().filter(|_| k > 0) {
            let held = there()
                .filter(|it| it.asked.what.contains(what) && it.asked.family == asked.family);
            let held: u64 = held.map(|it| it.asked.mode.units()).sum();
            let used_up = self.used_up.get(&(asked.family, what.clone())).copied();
            if held + used_up.unwrap_or_default() + k > u64::from(of) {
                short.push(what.clone());
            }
        }
        let mut blockers: Vec<&Lease> = there()
            .filter(|it| {
                let is_short = short.iter().any(|what| it.asked.what.contains(what));
                it.asked.excludes(asked) || (it.asked.both_count(asked) && is_short)
            })
            .collect();
        blockers.sort_by_key(|it| it.token);
        let own_place = self.line.iter().position(|(other, _)| is_own(other));
        let in_way =
            |other: &Asked| !is_own(other) && (other.excludes(asked) || other.both_count(asked));
        let earlier = &self.line[..own_place.unwrap_or(self.line.len())];
        let earlier: Vec<_> = earlier.iter().filter(|(other, _)| in_way(other)).collect();

        let answer = if blockers.is_empty() && short.is_empty() && earlier.is_empty() {
            None
        } else {
            let micros = |at: u64| Duration::from_micros(at.saturating_sub(self.now));
            let free_at = |it: &Lease| it.closed_until.unwrap_or(it.deadline + it.rest);
            let ends = blockers.iter().map(|it| free_at(it));
            let ends = ends.chain(earlier.iter().map(|(_, deadline)| *deadline));
            let holders = blockers.iter().take(8).map(|it| BlockedBy {
                token: it.token,
                owner: it.asked.owner.as_str().into(),
                task: "t".into(),
                mode: it.asked.mode,
                since: Duration::from_micros(self.now - it.since),
                left: micros(it.closed_until.unwrap_or(it.deadline)),
                latest: micros(it.closed_until.unwrap_or(it.last_moment())),
                resting: it.closed_until.is_some(),
            });
            let mut owners = blockers.iter().filter(|it| it.closed_until.is_none());
            Some(Acquired::Busy(Busy {
                holders: holders.collect(),
                own: owners.any(|it| it.asked.owner == asked.owner),
                waiting: self.line.iter().filter(|(other, _)| in_way(other)).count() as u64,
                place: wait.then_some(earlier.len() as u64 + 1),
                again_in: ends.min().map(micros),
            }))
        };
        match (&answer, own_place) {
            (Some(_), Some(at)) if wait => self.line[at].1 = self.now + TICKET,
            (Some(_), None) if wait => self.line.push((asked.clone(), self.now + TICKET)),
            (_, Some(at)) => drop(self.line.remove(at)),
            (_, None) => {}
        }
        if answer.is_none() {
            // Not overdue for what comes now, and the store will tell its token.
            self.leases.push(Lease {
                asked: asked.clone(),
                token: FencingToken::new(u64::MAX),
                since: self.now,
                deadline: self.now + asked.term.min(asked.lifetime),
                rest: self.rest[asked.family],
                recalled: None,
                closed_until: None,
            });
            self.ledgers[asked.family].granted += 1;
            self.ledgers[asked.family].live += 1;
        }
        let of_step = (asked.family, partition);
        expired.extend(self.expire(|it| (it.asked.family, it.asked.partition()) == of_step));
        (answer, expired)
    }

    fn find(&self, token: FencingToken) -> Option<usize> {
        let mut leases = self.leases.iter();
        leases.position(|it| it.token == token && it.closed_until.is_none())
    }

    fn selected(&self, which: impl Fn(&Lease) -> bool) -> Vec<FencingToken> {
        let leases = self.leases.iter();
        let leases = leases.filter(|it| it.closed_until.is_none() && which(it));
        leases.map(|it| it.token).collect()
    }
}

struct World {
    model: Model,
    store: Arc<dyn HoldingStore>,
    clock: ManualClock,
    families: [FamilyName; 2],
    session: SessionId,
    seq: u64,
    nonce: u64,
    /// Receipts, some of holdings that have ended.
    known: Vec<(HoldingReceipt, Asked)>,
    waiting: Vec<Asked>,
}

impl World {
    async fn new(store: &dyn Store, clock: ManualClock) -> Self {
        let holdings = store.holdings().unwrap();
        Self {
            model: Model {
                now: 1_000_000_000,
                ..Model::default()
            },
            session: holdings.open_session().await.unwrap(),
            store: holdings,
            clock,
            families: ["x", "y"].map(|name| FamilyName::new(name).unwrap()),
            seq: 0,
            nonce: 0,
            known: Vec::new(),
            waiting: Vec::new(),
        }
    }

    fn request(&mut self) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane: 0,
            seq: self.seq,
        }
    }

    fn new_ask(&mut self, dice: &mut fastrand::Rng) -> Asked {
        self.nonce += 1;
        let mut what = vec![What::random(dice)];
        for _ in 0..dice.u8(..3) {
            let more = What::random(dice);
            if !what.iter().any(|what| what.overlaps(&more)) {
                what.push(more);
            }
        }
        let only_names = what.iter().all(|what| matches!(what, What::Name(_)));
        Asked {
            family: usize::from(dice.u8(..5) == 0),
            what,
            mode: match dice.u8(..6) {
                0 | 1 => Mode::Shared,
                2..=4 if only_names => Mode::Units(dice.u32(1..4)),
                _ => Mode::Exclusive,
            },
            owner: format!("o{}", dice.u8(..4)),
            nonce: self.nonce,
            term: dice.u64(2..12) * 1_000_000,
            lifetime: dice.u64(3..30) * 1_000_000,
        }
    }

    async fn acquire(&mut self, asked: Asked, wait: bool) {
        let (expected, expired) = self.model.acquire(&asked, wait);
        let request = AcquireRequest {
            request: self.request(),
            asks: vec![asked.ask(&self.families, wait)],
        };
        let told: Acquisition = self.store.acquire(request).await.unwrap();
        let reported: Vec<_> = told.expired.iter().map(|it| it.token).collect();
        assert_eq!(reported, expired, "the expiries of {asked:?}");
        match (&told.answers[0], expected) {
            (Acquired::Granted(held), None) => {
                let token = held.receipt.token;
                let model = &mut self.model;
                let fresh = model
                    .leases
                    .iter_mut()
                    .find(|it| it.token.get() == u64::MAX);
                if let Some(fresh) = fresh {
                    fresh.token = token;
                    assert!(model.last < Some(token), "{token} after {:?}", model.last);
                    model.last = Some(token);
                    self.known.push((held.receipt.clone(), asked.clone()));
                }
                let lease = &model.leases[model.find(token).unwrap()];
                assert_eq!(lease.asked.nonce, asked.nonce);
                let left = Duration::from_micros(lease.deadline - model.now);
                assert_eq!(held.granted, left, "{asked:?}");
            }
            (told, Some(expected)) => {
                assert_eq!(*told, expected, "{asked:?}");
                if let (Acquired::Busy(_), true) = (told, wait) {
                    self.waiting.push(asked);
                }
            }
            (told, None) => panic!("{told:?} for {asked:?}, which nothing is in the way of"),
        }
    }

    /// A receipt, of a holding that has ended for all we know.
    fn any_receipt(&mut self, dice: &mut fastrand::Rng) -> Option<(HoldingReceipt, Asked)> {
        if self.known.len() > 30 {
            self.known.remove(0);
        }
        (!self.known.is_empty()).then(|| self.known[dice.usize(..self.known.len())].clone())
    }

    async fn release(&mut self, receipt: &HoldingReceipt, asked: &Asked, by_ask: bool) {
        let model = &mut self.model;
        let expected = if let Some(at) = model.find(receipt.token) {
            let late = model.leases[at].deadline <= model.now;
            let ledger = &mut model.ledgers[asked.family];
            ledger.released += 1;
            ledger.late += u64::from(late);
            model.end(at, false, false);
            Released::Ended { late, saved: false }
        } else {
            model.ledgers[asked.family].fenced += u64::from(!by_ask);
            Released::Fenced
        };
        let release = if by_ask {
            Release::withdraw(&asked.ask(&self.families, false))
        } else {
            Release::of(receipt.clone())
        };
        assert_eq!(self.send_release(release).await, expected, "{asked:?}");
    }

    async fn send_release(&mut self, release: Release) -> Released {
        let request = ReleaseRequest {
            request: self.request(),
            releases: vec![release],
        };
        self.store.release(request).await.unwrap()[0]
    }

    async fn withdraw(&mut self, asked: &Asked) {
        let model = &mut self.model;
        let is_held = model
            .leases
            .iter()
            .any(|it| it.closed_until.is_none() && it.asked.nonce == asked.nonce);
        if is_held {
            return;
        }
        // A nonce that was used for something else names no ticket here.
        let place = model.line.iter().position(|(other, _)| {
            other.nonce == asked.nonce && other.what.contains(&asked.what[0])
        });
        let ticket = place.map(|at| model.line.remove(at));
        let is_live = ticket.is_some_and(|(_, deadline)| deadline > model.now);
        let release = Release::withdraw(&asked.ask(&self.families, false));
        let expected = if is_live {
            Released::Withdrawn
        } else {
            Released::Fenced
        };
        assert_eq!(self.send_release(release).await, expected, "{asked:?}");
    }

    async fn renew(&mut self, receipt: &HoldingReceipt, lapse: bool) {
        let model = &mut self.model;
        let live = model
            .find(receipt.token)
            .filter(|at| model.is_live(&model.leases[*at]));
        let expected = match live {
            Some(at) if lapse => {
                let family = model.leases[at].asked.family;
                model.ledgers[family].expired_stalled += 1;
                model.end(at, true, true);
                HoldingRenewal::Fenced
            }
            Some(at) => {
                let now = model.now;
                let lease = &mut model.leases[at];
                let next = (now + lease.asked.term).min(lease.since + lease.asked.lifetime);
                let next = next.min(lease.recalled.unwrap_or(u64::MAX));
                lease.deadline = lease.deadline.max(next);
                let last = lease.last_moment();
                HoldingRenewal::Held {
                    granted: Duration::from_micros(lease.deadline - now),
                    recalled: lease.recalled.map(|_| Duration::from_micros(last - now)),
                }
            }
            None => HoldingRenewal::Fenced,
        };
        let mut beat = HoldingBeat::of(receipt.clone());
        beat.lapse = lapse;
        assert_eq!(self.store.renew(vec![beat]).await.unwrap(), [expected]);
    }

    async fn commit(&mut self, receipt: &HoldingReceipt, asked: &Asked) {
        let model = &mut self.model;
        let live = model
            .find(receipt.token)
            .filter(|at| model.is_live(&model.leases[*at]));
        let expected = match live {
            None => {
                model.ledgers[asked.family].fenced += 1;
                Committed::Fenced
            }
            Some(_) if asked.mode.units() == 0 => Committed::NoUnits,
            Some(at) => {
                model.ledgers[asked.family].committed += 1;
                model.end(at, false, false);
                for what in &asked.what {
                    let used_up = model
                        .used_up
                        .entry((asked.family, what.clone()))
                        .or_default();
                    *used_up += asked.mode.units();
                }
                Committed::Done
            }
        };
        let request = CommitRequest {
            request: self.request(),
            receipts: vec![receipt.clone()],
        };
        assert_eq!(self.store.commit(request).await.unwrap(), [expected]);
    }

    async fn check(&mut self, receipt: &HoldingReceipt, what: What) {
        let model = &self.model;
        let family = self
            .families
            .iter()
            .position(|it| *it == receipt.family)
            .unwrap();
        let expected = match model.find(receipt.token).map(|at| &model.leases[at]) {
            Some(lease) if lease.deadline <= model.now => Checked::Fenced(Missing::Expired),
            Some(lease) if !lease.asked.what.iter().any(|whole| what.is_within(whole)) => {
                Checked::ScopeMismatch
            }
            Some(lease) => Checked::Held {
                left: Duration::from_micros(lease.deadline - model.now),
                mode: lease.asked.mode,
            },
            None => {
                let ended = model.ended.get(&(family, what.clone()));
                let mut ended = ended.into_iter().flatten();
                Checked::Fenced(match ended.find(|(token, _)| *token == receipt.token) {
                    Some((_, true)) => Missing::Expired,
                    _ => Missing::Unknown,
                })
            }
        };
        let check = Check {
            receipt: receipt.clone(),
            scope: what.scope(),
        };
        let told = self.store.check(vec![check]).await.unwrap();
        assert_eq!(told, [expected], "{what:?}");
    }

    async fn send(&mut self, command: HoldingCommand) -> u64 {
        let request = HoldingControlRequest {
            request: self.request(),
            actor: "a".into(),
            reason: "r".into(),
            command,
        };
        self.store.control(request).await.unwrap()
    }

    async fn operate(&mut self, dice: &mut fastrand::Rng) {
        let owner = format!("o{}", dice.u8(..4));
        let what = What::random(dice);
        let family = usize::from(dice.u8(..5) == 0);
        let (select, tokens) = if dice.bool() {
            let tokens = self.model.selected(|it| it.asked.owner == owner);
            (HoldingSelect::Owner(owner.as_str().into()), tokens)
        } else {
            let tokens = self
                .model
                .selected(|it| it.asked.family == family && it.asked.what.contains(&what));
            let select = HoldingSelect::Scope {
                family: self.families[family].clone(),
                scope: what.scope(),
            };
            (select, tokens)
        };
        let now = self.model.now;
        let (mut done, command) = (0, dice.u8(..6));
        let command = match command {
            0 => {
                for token in tokens {
                    let at = self.model.find(token).unwrap();
                    if self.model.is_live(&self.model.leases[at]) {
                        let family = self.model.leases[at].asked.family;
                        self.model.ledgers[family].revoked += 1;
                        self.model.end(at, false, true);
                        done += 1;
                    } else {
                        self.model.expire(|it| it.token == token);
                    }
                }
                HoldingCommand::Revoke(select)
            }
            1 => {
                let grace = dice.u64(..8) * 1_000_000;
                for token in tokens {
                    let at = self.model.find(token).unwrap();
                    let is_live = self.model.is_live(&self.model.leases[at]);
                    let recalled = &mut self.model.leases[at].recalled;
                    if is_live && recalled.is_none_or(|until| now + grace < until) {
                        *recalled = Some(now + grace);
                        done += 1;
                    }
                }
                HoldingCommand::Recall {
                    holdings: select,
                    grace: Duration::from_micros(grace),
                }
            }
            2 => {
                self.model.line.retain(|(asked, deadline)| {
                    let is_it = match &select {
                        HoldingSelect::Owner(_) => asked.owner == owner,
                        _ => asked.family == family && asked.what.contains(&what),
                    };
                    done += u64::from(is_it && *deadline > now);
                    !is_it
                });
                HoldingCommand::DropTickets(select)
            }
            3 => {
                let units = dice.u32(..3);
                let used_up = self.model.used_up.get_mut(&(family, What::Name(0)));
                if let Some(used_up) = used_up {
                    done = u64::from(units).min(*used_up);
                    *used_up -= done;
                }
                HoldingCommand::Restock {
                    family: self.families[family].clone(),
                    scope: What::Name(0).scope(),
                    units,
                }
            }
            _ => {
                done = 1;
                let units = dice.u32(1..5);
                let rest = dice.u64(..4).saturating_sub(1) * 1_000_000;
                (self.model.units[family], self.model.rest[family]) = (units, rest);
                HoldingCommand::Configure {
                    family: self.families[family].clone(),
                    settings: FamilySettings {
                        units: Some(units),
                        rest: Some(Duration::from_micros(rest)),
                        partitions: None,
                    },
                }
            }
        };
        let text = command.to_string();
        assert_eq!(self.send(command).await, done, "{text}");
    }

    async fn reap(&mut self) {
        let expected = self.model.expire(|_| true);
        self.model
            .line
            .retain(|(_, deadline)| *deadline > self.model.now);
        let request = ReapRequest {
            request: self.request(),
            max: 1_000,
        };
        let reaped = self.store.reap(request).await.unwrap();
        let reported: Vec<_> = reaped.expired.iter().map(|it| it.token).collect();
        assert_eq!(reported, expected);
    }

    async fn compare_ledgers(&self) {
        let families = match self.store.inspect(HoldingQuery::Families).await.unwrap() {
            HoldingViews::Families(families) => families,
            other => panic!("{other:?}"),
        };
        for view in families {
            let at = self
                .families
                .iter()
                .position(|it| *it == view.family)
                .unwrap();
            assert!(view.ledger.balances(), "{view:?}");
            assert_eq!(view.ledger, self.model.ledgers[at], "{}", view.family);
            let line = self
                .model
                .line
                .iter()
                .filter(|(asked, _)| asked.family == at);
            let in_time = line.filter(|(_, deadline)| *deadline > self.model.now);
            assert_eq!(view.waiting, in_time.count() as u64);
        }
    }

    fn pass(&mut self, micros: u64) {
        self.model.now += micros;
        self.clock.advance(Duration::from_micros(micros));
    }

    async fn step(&mut self, dice: &mut fastrand::Rng) {
        match dice.u8(..20) {
            0..=4 => {
                let asked = self.new_ask(dice);
                self.acquire(asked, dice.u8(..3) > 0).await;
            }
            5..=8 if !self.waiting.is_empty() => {
                let at = dice.usize(..self.waiting.len());
                let asked = self.waiting.swap_remove(at);
                self.acquire(asked, dice.u8(..6) > 0).await;
            }
            9 => {
                if let Some((_, mut asked)) = self.any_receipt(dice) {
                    if dice.bool() {
                        asked.what = vec![What::Name(9)];
                        asked.mode = Mode::Exclusive;
                    }
                    self.acquire(asked, dice.bool()).await;
                }
            }
            10 | 11 => {
                if let Some((receipt, asked)) = self.any_receipt(dice) {
                    // By the ask alone the latest holding of a nonce would be meant.
                    let later = self.known.iter().filter(|(_, it)| it.nonce == asked.nonce);
                    let by_ask = later.count() == 1 && dice.bool();
                    let in_line = self
                        .model
                        .line
                        .iter()
                        .any(|(it, _)| it.nonce == asked.nonce);
                    self.release(&receipt, &asked, by_ask && !in_line).await;
                }
            }
            12 | 13 => {
                if let Some((receipt, _)) = self.any_receipt(dice) {
                    self.renew(&receipt, dice.u8(..5) == 0).await;
                }
            }
            14 => {
                if let Some((receipt, asked)) = self.any_receipt(dice) {
                    self.commit(&receipt, &asked).await;
                }
            }
            15 => {
                if let Some((receipt, asked)) = self.any_receipt(dice) {
                    let what = if dice.bool() {
                        asked.what[0].clone()
                    } else {
                        What::random(dice)
                    };
                    self.check(&receipt, what).await;
                }
            }
            16 if !self.waiting.is_empty() => {
                let at = dice.usize(..self.waiting.len());
                let asked = self.waiting.swap_remove(at);
                self.withdraw(&asked).await;
            }
            17 => self.operate(dice).await,
            18 if dice.bool() => self.reap().await,
            // Often to the very moment at which something is over.
            18 | 19 => {
                let model = &self.model;
                let ends = model
                    .leases
                    .iter()
                    .map(|it| it.closed_until.unwrap_or(it.deadline));
                let ends = ends.chain(model.line.iter().map(|(_, deadline)| *deadline));
                let next = ends.filter(|at| *at > model.now).min();
                match next {
                    Some(at) if dice.bool() => self.pass(at - self.model.now),
                    _ => self.pass(dice.u64(..2_500_000)),
                }
            }
            _ => self.pass(1),
        }
    }
}

async fn play(store: &dyn Store, clock: ManualClock, seed: u64, steps: usize) {
    let mut world = World::new(store, clock).await;
    let partitions = HoldingCommand::Configure {
        family: world.families[1].clone(),
        settings: FamilySettings {
            partitions: Some(PARTITIONS as u16),
            ..FamilySettings::default()
        },
    };
    world.send(partitions).await;
    let mut dice = fastrand::Rng::with_seed(seed);
    for step in 0..steps {
        world.step(&mut dice).await;
        if step % 50 == 0 {
            world.compare_ledgers().await;
        }
    }
    let ledgers = &world.model.ledgers[0];
    assert!(ledgers.granted > steps as u64 / 50, "{ledgers:?}");
}

/// The seeds to play, and how long each.
fn programs() -> (std::ops::Range<u64>, usize) {
    let campaign = std::env::var_os("LEASEHOLD_CAMPAIGN").is_some();
    let (seeds, steps) = if campaign { (100, 10_000) } else { (10, 2_000) };
    let only = std::env::var("LEASEHOLD_SEED").ok();
    let only: Option<u64> = only.map(|seed| seed.parse().unwrap());
    (only.map_or(0..seeds, |seed| seed..seed + 1), steps)
}

#[tokio::test]
async fn every_answer_of_memory_is_the_models() {
    let (seeds, steps) = programs();
    for seed in seeds {
        println!("LEASEHOLD_SEED={seed}");
        let clock = ManualClock::default();
        let store = MemoryStore::with_clock(clock.clone());
        play(&store, clock, seed, steps).await;
    }
}
