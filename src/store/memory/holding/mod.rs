//! Holdings in memory: the reference model of [`HoldingStore`].
//!
//! Plain maps, and every question is answered by looking at all holdings and tickets of the family:
//! what other stores find by an index, this one finds by comparing all pairs. `acquire.rs` grants,
//! `ends.rs` is what holders do with what they have.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;

use super::{MemoryStore, State, at};
use crate::clock::Timestamp;
use crate::error::{Result, Verb};
use crate::lease::{Cause, FencingToken, HoldingReceipt, Nonce, Progress};
use crate::limits;
use crate::rules::holding::{self, FamilyName, Mode, Scope};
use crate::rules::order::overdue_cause;
use crate::store::holding::{
    AcquireRequest, Acquired, Acquisition, Ask, Check, Checked, CommitRequest, Committed,
    EndedHolding, HoldingBeat, HoldingControlRequest, HoldingEnd, HoldingExpiry, HoldingLedger,
    HoldingQuery, HoldingRenewal, HoldingState, HoldingStore, HoldingViews, Reaped, ReleaseRequest,
    Released, SaveRequest, SavedState, TicketName,
};
use crate::store::{ReapRequest, SessionId, Store, bounded};

mod acquire;
mod control;
mod ends;
mod inspect;

#[async_trait]
impl HoldingStore for MemoryStore {
    fn name(&self) -> &'static str {
        Store::name(self)
    }

    async fn dedicated(&self) -> Result<Arc<dyn HoldingStore>> {
        Ok(Arc::new(self.clone()))
    }

    async fn open_session(&self) -> Result<SessionId> {
        Store::open_session(self).await
    }

    async fn acquire(&self, request: AcquireRequest) -> Result<Acquisition> {
        request.validate().map_err(at(Verb::Acquire))?;
        let (mut state, now) = self.lock();
        let first = state
            .recall(request.request, |last| &mut last.acquire, now)
            .map_err(at(Verb::Acquire))?;
        if let Some(mut first) = first {
            state.without_ended(&mut first.answers, now);
            return Ok(first);
        }
        let answer = state.acquire(&request.asks, now);
        state.remember(request.request, |last| &mut last.acquire, answer.clone());
        self.wake(state);
        Ok(answer)
    }

    async fn renew(&self, beats: Vec<HoldingBeat>) -> Result<Vec<HoldingRenewal>> {
        HoldingBeat::validate_all(&beats).map_err(at(Verb::Renew))?;
        let (mut state, now) = self.lock();
        let beats = beats.into_iter();
        let renewals = beats.map(|beat| state.renew_holding(beat, now)).collect();
        self.wake(state);
        Ok(renewals)
    }

    async fn release(&self, request: ReleaseRequest) -> Result<Vec<Released>> {
        request.validate().map_err(at(Verb::Release))?;
        self.call(
            Verb::Release,
            request.request,
            |last| &mut last.release,
            |state, now| {
                let releases = request.releases.iter();
                releases
                    .map(|release| state.release(release, now))
                    .collect()
            },
        )
    }

    async fn save(&self, request: SaveRequest) -> Result<Vec<SavedState>> {
        request.validate().map_err(at(Verb::Save))?;
        self.call(
            Verb::Save,
            request.request,
            |last| &mut last.save,
            |state, now| {
                let saves = request.saves.iter();
                saves.map(|save| state.save(save, now)).collect()
            },
        )
    }

    async fn commit(&self, request: CommitRequest) -> Result<Vec<Committed>> {
        request.validate().map_err(at(Verb::Commit))?;
        self.call(
            Verb::Commit,
            request.request,
            |last| &mut last.commit,
            |state, now| {
                let receipts = request.receipts.iter();
                receipts.map(|receipt| state.commit(receipt, now)).collect()
            },
        )
    }

    async fn check(&self, checks: Vec<Check>) -> Result<Vec<Checked>> {
        Check::validate_all(&checks).map_err(at(Verb::Check))?;
        let (state, now) = self.lock();
        Ok(checks.iter().map(|check| state.check(check, now)).collect())
    }

    async fn reap(&self, request: ReapRequest) -> Result<Reaped> {
        bounded("max", request.max, limits::STEP_JOBS).map_err(at(Verb::Reap))?;
        self.call(
            Verb::Reap,
            request.request,
            |last| &mut last.reap_holdings,
            |state, now| state.reap_holdings(request.max, now),
        )
    }

    async fn wait(&self, tickets: &[TicketName], limit: Duration) -> Result<()> {
        let woken = {
            let (state, now) = self.lock();
            if tickets.iter().any(|ticket| state.may_go(ticket, now)) {
                return Ok(());
            }
            self.shared.waiters.sleep(tickets)
        };
        let _ = tokio::time::timeout(limit, woken).await;
        Ok(())
    }

    async fn control(&self, request: HoldingControlRequest) -> Result<u64> {
        request.validate().map_err(at(Verb::Control))?;
        self.try_call(
            Verb::Control,
            request.request,
            |last| &mut last.holding_control,
            |state, now| state.control_holdings(&request, now),
        )
    }

    async fn inspect(&self, query: HoldingQuery) -> Result<HoldingViews> {
        let (state, now) = self.lock();
        state
            .inspect_holdings(&query, now)
            .map_err(at(Verb::Inspect))
    }
}

/// All that one family is.
#[derive(Default)]
pub(super) struct Family {
    units: u32,
    rest: Duration,
    /// None: nobody has said how many.
    partitions: Option<u16>,
    /// Something was asked of it, so that the partitions are what they are.
    is_asked: bool,
    ledger: HoldingLedger,
    holdings: BTreeMap<FencingToken, Hold>,
    /// In line.
    tickets: BTreeMap<u64, Ticket>,
    /// What expired or was revoked, and until when it stays closed.
    rests: Vec<(FencingToken, Hold, Timestamp)>,
    scopes: BTreeMap<Scope, Remembered>,
    last_place: u64,
}

#[derive(Clone)]
struct Hold {
    partition: u16,
    scopes: Vec<Scope>,
    mode: Mode,
    owner: Arc<str>,
    task: Arc<str>,
    nonce: Nonce,
    granted_at: Timestamp,
    deadline: Timestamp,
    term: Duration,
    max_lifetime: Duration,
    rest: Duration,
    recalled_until: Option<Timestamp>,
    renewals: u32,
    progress: Option<Progress>,
}

impl Hold {
    fn is_live(&self, now: Timestamp) -> bool {
        self.deadline > now
    }

    fn age(&self) -> (Timestamp, Duration) {
        (self.granted_at, self.max_lifetime)
    }

    fn held(&self) -> (&[Scope], Mode) {
        (&self.scopes, self.mode)
    }

    /// Whether it can be in the way of an ask, if only by its units.
    fn may_block(&self, asked: (&[Scope], Mode)) -> bool {
        let both_units = self.mode.units() > 0 && asked.1.units() > 0;
        holding::conflict(self.held(), asked)
            || (both_units && holding::overlap(&self.scopes, asked.0))
    }

    fn latest(&self) -> Timestamp {
        holding::latest(self.deadline, self.age(), self.recalled_until)
    }
}

struct Ticket {
    partition: u16,
    scopes: Vec<Scope>,
    mode: Mode,
    owner: Arc<str>,
    task: Arc<str>,
    nonce: Nonce,
    since: Timestamp,
    deadline: Timestamp,
    /// It was told that it may be granted, and may be still.
    woken: bool,
}

impl Ticket {
    fn is_live(&self, now: Timestamp) -> bool {
        self.deadline > now
    }

    fn asked(&self) -> (&[Scope], Mode) {
        (&self.scopes, self.mode)
    }
}

/// What is left of a scope when nobody holds it.
#[derive(Default)]
struct Remembered {
    used_at: Timestamp,
    last: Option<FencingToken>,
    committed: u64,
    state: Option<HoldingState>,
    ended: Vec<EndedHolding>,
}

impl Family {
    fn partitions(&self) -> u16 {
        self.partitions.unwrap_or(1)
    }

    /// The holding of a receipt, overdue or not.
    fn held(&self, receipt: &HoldingReceipt) -> Option<&Hold> {
        let hold = self.holdings.get(&receipt.token)?;
        let is_proven = hold.partition == receipt.partition && hold.nonce.matches(&receipt.nonce);
        is_proven.then_some(hold)
    }

    fn use_scopes(&mut self, scopes: &[Scope], now: Timestamp) {
        for scope in scopes {
            self.scopes.entry(scope.clone()).or_default().used_at = now;
        }
    }

    /// Ends a holding: counts it, and writes it into the history of its scopes.
    fn end(
        &mut self,
        token: FencingToken,
        end: HoldingEnd,
        reason: Option<&str>,
        now: Timestamp,
    ) -> Option<Hold> {
        let hold = self.holdings.remove(&token)?;
        self.ledger.count(end);
        let whose = (Arc::clone(&hold.owner), Arc::clone(&hold.task));
        let mut ended = EndedHolding::new(token, whose, hold.mode, (hold.granted_at, now), end);
        ended.renewals = hold.renewals;
        ended.reason = reason.map(str::to_owned);
        ended.progress.clone_from(&hold.progress);
        self.use_scopes(&hold.scopes, now);
        for scope in &hold.scopes {
            let history = &mut self.scopes.entry(scope.clone()).or_default().ended;
            history.push(ended.clone());
            if history.len() > limits::HISTORY {
                history.remove(0);
            }
        }
        let ended_at = hold.deadline.min(now);
        let rests_until = ended_at.after(hold.rest);
        let has_rest = matches!(end, HoldingEnd::Expired(_) | HoldingEnd::Revoked);
        if has_rest && rests_until > now {
            self.rests.push((token, hold.clone(), rests_until));
        }
        Some(hold)
    }

    fn expire(
        &mut self,
        family: &FamilyName,
        token: FencingToken,
        cause: Option<Cause>,
        now: Timestamp,
    ) -> Option<HoldingExpiry> {
        let hold = self.holdings.get(&token)?;
        let cause = cause
            .unwrap_or_else(|| overdue_cause(hold.deadline, hold.granted_at, hold.max_lifetime));
        let hold = self.end(token, HoldingEnd::Expired(cause), None, now)?;
        Some(HoldingExpiry {
            family: family.clone(),
            scopes: hold.scopes,
            token,
            owner: hold.owner,
            task: hold.task,
            cause,
            progress: hold.progress,
        })
    }

    /// Whether a ticket can be granted now: nothing live or resting, and no earlier ticket
    /// conflicts.
    fn is_grantable(&self, place: u64, now: Timestamp) -> bool {
        self.tickets.get(&place).is_some_and(|ticket| {
            let blockers = self.blockers(ticket.asked(), Some(place), now);
            ticket.is_live(now) && blockers.is_none()
        })
    }

    /// The nonces of tickets that can be granted and were not told so yet, in line.
    fn newly_grantable(&mut self, now: Timestamp) -> Vec<Nonce> {
        let mut woken = Vec::new();
        for place in self.tickets.keys().copied().collect::<Vec<_>>() {
            let is_grantable = self.is_grantable(place, now);
            let Some(ticket) = self.tickets.get_mut(&place) else {
                continue;
            };
            if !is_grantable {
                ticket.woken = false;
            } else if !ticket.woken && woken.len() < limits::STEP_WAKES {
                ticket.woken = true;
                woken.push(ticket.nonce);
            }
        }
        woken
    }
}

impl State {
    /// Something of the family has ended or was granted: wakes the tickets that may go.
    fn wake_tickets(&mut self, name: &FamilyName, now: Timestamp) {
        if let Some(family) = self.families.get_mut(name) {
            let woken = family.newly_grantable(now);
            let names = woken.into_iter().map(|nonce| (name.clone(), nonce));
            self.woken.extend(names);
        }
    }

    /// Whether a waiter has nothing to wait for: its ticket can be granted, or is gone.
    fn may_go(&self, name: &TicketName, now: Timestamp) -> bool {
        let Some(family) = self.families.get(&name.family) else {
            return true;
        };
        let place = family.place_of(&name.nonce);
        place.is_none_or(|place| {
            !family.tickets[&place].is_live(now) || family.is_grantable(place, now)
        })
    }
}

/// Those who sleep until their tickets may be granted.
#[derive(Default)]
pub(super) struct Waiters {
    asleep: Mutex<Vec<(Vec<TicketName>, oneshot::Sender<()>)>>,
}

impl Waiters {
    fn sleep(&self, tickets: &[TicketName]) -> oneshot::Receiver<()> {
        let (wakeup, woken) = oneshot::channel();
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        asleep.retain(|(_, wakeup)| !wakeup.is_closed());
        asleep.push((tickets.to_vec(), wakeup));
        woken
    }

    pub(super) fn wake(&self, family: &FamilyName, nonce: &Nonce) {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |ticket: &TicketName| ticket.family == *family && ticket.nonce.matches(nonce);
        let awake = asleep.extract_if(.., |(tickets, _)| tickets.iter().any(is_it));
        for (_, wakeup) in awake {
            // A sleeper that is gone needs no waking.
            let _ = wakeup.send(());
        }
    }
}
