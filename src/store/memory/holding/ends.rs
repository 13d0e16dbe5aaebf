//! renew, release, save, commit, check: what holders do with what they have. reap: what time does.

use super::{
    Check, Checked, Committed, Family, HoldingBeat, HoldingEnd, HoldingReceipt, HoldingRenewal,
    HoldingState, Reaped, Released, SavedState, State, TicketName,
};
use crate::clock::Timestamp;
use crate::lease::{Cause, FencingToken};
use crate::rules::holding::{self, FamilyName};
use crate::store::holding::{Missing, Release, ReleaseBy, Save};

impl State {
    pub(super) fn renew_holding(&mut self, beat: HoldingBeat, now: Timestamp) -> HoldingRenewal {
        let HoldingBeat {
            receipt,
            lapse,
            progress,
        } = beat;
        let Some((name, family)) = self.held_holding(&receipt) else {
            return HoldingRenewal::Fenced;
        };
        let hold = family.holdings.get_mut(&receipt.token);
        // Past its deadline a holding is gone, whether or not its expiry has been recorded.
        let Some(hold) = hold.filter(|hold| hold.is_live(now)) else {
            return HoldingRenewal::Fenced;
        };
        if progress.is_some() {
            hold.progress = progress;
        }
        if lapse {
            family.expire(&name, receipt.token, Some(Cause::Stalled), now);
            self.wake_tickets(&name, now);
            return HoldingRenewal::Fenced;
        }
        let until = hold.recalled_until;
        hold.deadline = holding::renewed(hold.deadline, now, hold.term, hold.age(), until);
        hold.renewals += 1;
        HoldingRenewal::Held {
            granted: hold.deadline.since(now),
            recalled: until.map(|_| hold.latest().since(now)),
        }
    }

    /// The family of a receipt that is good, overdue or not.
    fn held_holding(&mut self, receipt: &HoldingReceipt) -> Option<(FamilyName, &mut Family)> {
        let family = self.families.get_mut(&receipt.family)?;
        family.held(receipt)?;
        Some((receipt.family.clone(), family))
    }

    fn count_fenced(&mut self, family: &FamilyName) {
        if let Some(family) = self.families.get_mut(family) {
            family.ledger.fenced += 1;
        }
    }

    pub(super) fn release(&mut self, release: &Release, now: Timestamp) -> Released {
        let receipt = match &release.by {
            ReleaseBy::Receipt(receipt) => receipt.clone(),
            ReleaseBy::Ask(ask) => match self.holding_of(ask) {
                Some(receipt) => receipt,
                None => return self.withdraw(ask, now),
            },
        };
        let Some((name, family)) = self.held_holding(&receipt) else {
            self.count_fenced(&receipt.family);
            return Released::Fenced;
        };
        let saved = release.state.as_ref().is_some_and(|(seq, bytes)| {
            let state = HoldingState {
                token: receipt.token,
                seq: *seq,
                bytes: bytes.clone(),
            };
            family.save(receipt.token, state).is_ok()
        });
        let late = !family.holdings[&receipt.token].is_live(now);
        family.ledger.late += u64::from(late);
        family.end(receipt.token, HoldingEnd::Released, None, now);
        if let Some(mark) = release.mark {
            // One that is not believed changes nothing.
            self.issuer.raise(mark, now);
        }
        self.wake_tickets(&name, now);
        Released::Ended { late, saved }
    }

    /// The holding of an ask, overdue or not.
    fn holding_of(&self, ask: &TicketName) -> Option<HoldingReceipt> {
        let family = self.families.get(&ask.family)?;
        let mut holds = family.holdings.iter();
        let (token, hold) = holds
            .find(|(_, hold)| hold.nonce.matches(&ask.nonce) && hold.scopes.contains(&ask.scope))?;
        Some(HoldingReceipt {
            family: ask.family.clone(),
            partition: hold.partition,
            token: *token,
            nonce: hold.nonce,
        })
    }

    fn withdraw(&mut self, ask: &TicketName, now: Timestamp) -> Released {
        let taken = self.families.get_mut(&ask.family).and_then(|family| {
            let place = family.place_of(&ask.nonce)?;
            let is_its = family.tickets[&place].scopes.contains(&ask.scope);
            is_its.then(|| family.tickets.remove(&place)).flatten()
        });
        let Some(ticket) = taken.filter(|ticket| ticket.is_live(now)) else {
            return Released::Fenced;
        };
        if let Some(family) = self.families.get_mut(&ask.family) {
            family.use_scopes(&ticket.scopes, now);
        }
        self.wake_tickets(&ask.family, now);
        Released::Withdrawn
    }

    pub(super) fn save(&mut self, save: &Save, now: Timestamp) -> SavedState {
        let token = save.receipt.token;
        let Some((_, family)) = self.held_holding(&save.receipt) else {
            self.count_fenced(&save.receipt.family);
            return SavedState::Fenced;
        };
        let late = !family.holdings[&token].is_live(now);
        let state = HoldingState {
            token,
            seq: save.seq,
            bytes: save.bytes.clone(),
        };
        match family.save(token, state) {
            Ok(()) => SavedState::Saved { late },
            Err((token, seq)) => SavedState::Behind { token, seq },
        }
    }

    pub(super) fn commit(&mut self, receipt: &HoldingReceipt, now: Timestamp) -> Committed {
        let held = self.held_holding(receipt);
        let Some((name, family)) =
            held.filter(|(_, family)| family.holdings[&receipt.token].is_live(now))
        else {
            self.count_fenced(&receipt.family);
            return Committed::Fenced;
        };
        let units = family.holdings[&receipt.token].mode.units();
        if units == 0 {
            return Committed::NoUnits;
        }
        if let Some(hold) = family.end(receipt.token, HoldingEnd::Committed, None, now) {
            for scope in hold.scopes {
                family.scopes.entry(scope).or_default().committed += units;
            }
        }
        self.wake_tickets(&name, now);
        Committed::Done
    }

    pub(super) fn check(&self, check: &Check, now: Timestamp) -> Checked {
        let Check { receipt, scope } = check;
        let family = self.families.get(&receipt.family);
        let Some(hold) = family.and_then(|family| family.held(receipt)) else {
            let scope = family.and_then(|family| family.scopes.get(scope));
            let ended = scope.and_then(|scope| {
                let mut ended = scope.ended.iter();
                ended.find(|ended| ended.token == receipt.token)
            });
            let missing = match ended.map(|ended| ended.end) {
                Some(HoldingEnd::Expired(_)) => Missing::Expired,
                _ => Missing::Unknown,
            };
            return Checked::Fenced(missing);
        };
        if !hold.is_live(now) {
            return Checked::Fenced(Missing::Expired);
        }
        if !hold.scopes.iter().any(|held| held.covers(scope)) {
            return Checked::ScopeMismatch;
        }
        Checked::Held {
            left: hold.deadline.since(now),
            mode: hold.mode,
        }
    }

    pub(super) fn reap_holdings(&mut self, max: usize, now: Timestamp) -> Reaped {
        let mut overdue = Vec::new();
        for (name, family) in &self.families {
            let holds = family
                .holdings
                .iter()
                .filter(|(_, hold)| !hold.is_live(now));
            overdue.extend(holds.map(|(token, hold)| (hold.deadline, *token, name.clone())));
        }
        overdue.sort_unstable();
        overdue.truncate(max);
        let mut reaped = Reaped::default();
        for (_, token, name) in overdue {
            if let Some(family) = self.families.get_mut(&name) {
                reaped
                    .expired
                    .extend(family.expire(&name, token, None, now));
            }
        }
        for family in self.families.values_mut() {
            family.tickets.retain(|_, ticket| ticket.is_live(now));
            family.rests.retain(|(_, _, until)| *until > now);
            reaped.forgotten += family.forget(max - reaped.forgotten as usize, now);
        }
        for name in self.families.keys().cloned().collect::<Vec<_>>() {
            self.wake_tickets(&name, now);
        }
        reaped
    }
}

impl Family {
    /// Saves state under the first scope of a holding, or tells what is there instead.
    fn save(
        &mut self,
        token: FencingToken,
        state: HoldingState,
    ) -> Result<(), (FencingToken, u64)> {
        let first = self.holdings[&token].scopes[0].clone();
        let scope = self.scopes.entry(first).or_default();
        let saved = scope.state.as_ref().map(|saved| (saved.token, saved.seq));
        if !holding::may_save(saved, token, state.seq) {
            return Err(saved.unwrap_or((token, state.seq)));
        }
        scope.state = Some(state);
        Ok(())
    }

    /// Forgets scopes past their retention, and returns how many.
    fn forget(&mut self, max: usize, now: Timestamp) -> u64 {
        let holds = self
            .holdings
            .values()
            .chain(self.rests.iter().map(|(_, hold, _)| hold));
        let tickets = self.tickets.values().map(|ticket| &ticket.scopes);
        let used = holds.map(|hold| &hold.scopes).chain(tickets);
        let used: Vec<_> = used.flatten().collect();
        let past = self.scopes.iter().filter(|(scope, known)| {
            let last = known.last.unwrap_or(FencingToken::new(0));
            let has_state = known.state.is_some();
            !used.contains(scope)
                && holding::is_forgotten(known.used_at, has_state, known.committed, last, now)
        });
        let past: Vec<_> = past.map(|(scope, _)| scope.clone()).take(max).collect();
        for scope in &past {
            self.scopes.remove(scope);
        }
        past.len() as u64
    }
}
