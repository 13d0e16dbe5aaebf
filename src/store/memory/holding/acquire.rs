//! acquire: expire what is in the way, then grant, or tell what is in the way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Acquired, Acquisition, Ask, Family, Hold, State, Ticket};
use crate::clock::Timestamp;
use crate::lease::{FencingToken, HoldingReceipt, Nonce};
use crate::limits;
use crate::rules::holding::{self, FamilyName, Mode, Scope};
use crate::rules::issue::Issuer;
use crate::rules::order;
use crate::store::holding::{BlockedBy, Busy, GrantedHolding, HoldingExpiry, Refusal};

/// What one call has done so far, by family partition: how many expiries are left to each step.
#[derive(Default)]
struct Steps {
    left: BTreeMap<(FamilyName, u16), usize>,
    expired: Vec<HoldingExpiry>,
}

impl Steps {
    fn left(&mut self, family: &FamilyName, partition: u16) -> &mut usize {
        let step = self.left.entry((family.clone(), partition));
        step.or_insert(limits::STEP_JOBS)
    }
}

/// All that is in the way of an ask.
pub(super) struct Blockers {
    /// The holdings, and those that rest until then.
    holds: BTreeMap<FencingToken, Option<Timestamp>>,
    earlier: Vec<u64>,
    units_short: bool,
}

impl Blockers {
    pub(super) fn is_none(&self) -> bool {
        self.holds.is_empty() && self.earlier.is_empty() && !self.units_short
    }
}

impl State {
    pub(super) fn acquire(&mut self, asks: &[Ask], now: Timestamp) -> Acquisition {
        let mut steps = Steps::default();
        let asks = asks.iter();
        let answers = asks
            .map(|ask| self.acquire_one(ask, &mut steps, now))
            .collect();
        let mut touched = BTreeSet::new();
        for ((name, partition), left) in steps.left {
            if let Some(family) = self.families.get_mut(&name) {
                let oldest = family.overdue(now, |hold| hold.partition == partition);
                let oldest = oldest.into_iter().take(left);
                let expired = oldest.filter_map(|token| family.expire(&name, token, None, now));
                steps.expired.extend(expired);
                family.tickets.retain(|_, ticket| ticket.is_live(now));
                family.rests.retain(|(_, _, until)| *until > now);
            }
            touched.insert(name);
        }
        for name in touched {
            self.wake_tickets(&name, now);
        }
        Acquisition {
            answers,
            expired: steps.expired,
            clock_behind: self.issuer.clock_behind(now),
        }
    }

    fn acquire_one(&mut self, ask: &Ask, steps: &mut Steps, now: Timestamp) -> Acquired {
        let default = Family::default();
        let family = self.families.get(&ask.family).unwrap_or(&default);
        if let Some(answer) = family.known(ask, now) {
            return answer;
        }
        if let Some(refusal) = family.refusal(ask) {
            return Acquired::Refused(refusal);
        }
        let partition = ask.partition(family.partitions());
        let left = steps.left(&ask.family, partition);
        let most = *left;
        let family = self.families.entry(ask.family.clone()).or_default();

        let asked = (&ask.scopes[..], ask.mode);
        let in_the_way = family.overdue(now, |hold| {
            hold.nonce.matches(&ask.nonce) || hold.may_block(asked)
        });
        let is_too_much = in_the_way.len() > most;
        let expired = in_the_way.into_iter().take(most);
        let expired = expired.filter_map(|token| family.expire(&ask.family, token, None, now));
        let expired: Vec<_> = expired.collect();
        *left -= expired.len();
        steps.expired.extend(expired);
        family.tickets.retain(|_, ticket| ticket.is_live(now));

        let place = family.place_of(&ask.nonce);
        let blockers = family.blockers(asked, place, now);
        if blockers.is_none() && !is_too_much {
            if let Some(place) = place {
                family.tickets.remove(&place);
            }
            let granted = family.grant(ask, partition, &mut self.issuer, now);
            return Acquired::Granted(granted);
        }
        let mut busy = family.busy(ask, place, &blockers, now);
        if is_too_much {
            busy.again_in = Some(Duration::ZERO);
        }
        if ask.wait {
            family.queue_up(ask, place, partition, now);
            let earlier = blockers.earlier.len() as u64;
            busy.place = Some((earlier + 1).min(limits::WAITING));
        } else if let Some(place) = place {
            family.tickets.remove(&place);
        }
        Acquired::Busy(busy)
    }

    /// A repeat does not hand out what has ended.
    pub(super) fn without_ended(&self, answers: &mut [Acquired], now: Timestamp) {
        for answer in answers {
            if let Acquired::Granted(GrantedHolding { receipt, .. }) = answer {
                let family = self.families.get(&receipt.family);
                let held = family.and_then(|family| family.held(receipt));
                if !held.is_some_and(|hold| hold.is_live(now)) {
                    *answer = Acquired::Ended;
                }
            }
        }
    }
}

impl Family {
    pub(super) fn place_of(&self, nonce: &Nonce) -> Option<u64> {
        let mut tickets = self.tickets.iter();
        let found = tickets.find(|(_, ticket)| ticket.nonce.matches(nonce));
        found.map(|(place, _)| *place)
    }

    /// The holding or the refusal of an ask that was made before.
    fn known(&self, ask: &Ask, now: Timestamp) -> Option<Acquired> {
        let whose = (&ask.owner, &ask.task);
        let holds = self.holdings.iter();
        let mut holds = holds.filter(|(_, hold)| hold.is_live(now));
        if let Some((token, hold)) = holds.find(|(_, hold)| hold.nonce.matches(&ask.nonce)) {
            let same = hold.scopes == ask.scopes
                && hold.mode == ask.mode
                && (&hold.owner, &hold.task) == whose;
            return Some(if same {
                let granted = self.granted(&ask.family, *token, hold, now);
                Acquired::Granted(granted)
            } else {
                Acquired::Refused(Refusal::Nonce)
            });
        }
        let ticket = self.tickets.get(&self.place_of(&ask.nonce)?)?;
        let same =
            ticket.asked() == (&ask.scopes[..], ask.mode) && (&ticket.owner, &ticket.task) == whose;
        let is_other = ticket.is_live(now) && !same;
        is_other.then_some(Acquired::Refused(Refusal::Nonce))
    }

    fn refusal(&self, ask: &Ask) -> Option<Refusal> {
        let partitions = self.partitions();
        let mut scopes = ask.scopes.iter();
        if scopes.any(|scope| scope.partition(partitions) != ask.partition(partitions)) {
            return Some(Refusal::Partitions);
        }
        let of = self.units;
        (ask.mode.units() > of.into()).then_some(Refusal::Units { of })
    }

    /// The overdue holdings that `which` chooses, by (deadline, token).
    pub(super) fn overdue(
        &self,
        now: Timestamp,
        which: impl Fn(&Hold) -> bool,
    ) -> Vec<FencingToken> {
        let holds = self.holdings.iter();
        let overdue = holds.filter(|(_, hold)| !hold.is_live(now) && which(hold));
        let mut overdue: Vec<_> = overdue
            .map(|(token, hold)| (hold.deadline, *token))
            .collect();
        overdue.sort_unstable();
        overdue.into_iter().map(|(_, token)| token).collect()
    }

    /// All that is in the way of an ask, which has a place in line or none.
    pub(super) fn blockers(
        &self,
        asked: (&[Scope], Mode),
        place: Option<u64>,
        now: Timestamp,
    ) -> Blockers {
        let live = self.holdings.iter().filter(|(_, hold)| hold.is_live(now));
        let live = live.map(|(token, hold)| (*token, hold, None));
        let resting = self.rests.iter().filter(|(_, _, until)| *until > now);
        let resting = resting.map(|(token, hold, until)| (*token, hold, Some(*until)));
        let there: Vec<_> = live.chain(resting).collect();

        let mut holds = BTreeMap::new();
        for (token, hold, until) in &there {
            if holding::conflict(hold.held(), asked) {
                holds.insert(*token, *until);
            }
        }
        let mut units_short = false;
        for scope in asked.0.iter().filter(|_| asked.1.units() > 0) {
            let of_name = || {
                there
                    .iter()
                    .filter(|(_, hold, _)| hold.scopes.contains(scope))
            };
            let held = of_name().map(|(_, hold, _)| hold.mode.units()).sum();
            let committed = self.scopes.get(scope).map_or(0, |scope| scope.committed);
            if holding::free_units(self.units, committed, held) < asked.1.units() {
                units_short = true;
                let of_name = of_name().filter(|(_, hold, _)| hold.mode.units() > 0);
                holds.extend(of_name.map(|(token, _, until)| (*token, *until)));
            }
        }
        let earlier = self.tickets.range(..place.unwrap_or(u64::MAX));
        let earlier = earlier.filter(|(_, ticket)| {
            ticket.is_live(now) && holding::ticket_conflict(ticket.asked(), asked)
        });
        Blockers {
            holds,
            earlier: earlier.map(|(place, _)| *place).collect(),
            units_short,
        }
    }

    fn busy(&self, ask: &Ask, place: Option<u64>, blockers: &Blockers, now: Timestamp) -> Busy {
        let asked = (&ask.scopes[..], ask.mode);
        let mut busy = Busy::default();
        let mut ends = Vec::new();
        for (token, until) in &blockers.holds {
            let resting = self.rests.iter().find(|(rests, _, _)| rests == token);
            let resting = resting.map(|(_, hold, _)| hold);
            let Some(hold) = self.holdings.get(token).or(resting) else {
                continue;
            };
            ends.push(until.unwrap_or_else(|| hold.deadline.after(hold.rest)));
            busy.own |= until.is_none() && (&hold.owner, &hold.task) == (&ask.owner, &ask.task);
            if busy.holders.len() < limits::BUSY_HOLDERS {
                busy.holders.push(BlockedBy {
                    token: *token,
                    owner: Arc::clone(&hold.owner),
                    task: Arc::clone(&hold.task),
                    mode: hold.mode,
                    since: now.since(hold.granted_at),
                    left: until.unwrap_or(hold.deadline).since(now),
                    latest: until.unwrap_or_else(|| hold.latest()).since(now),
                    resting: until.is_some(),
                });
            }
        }
        ends.extend(
            blockers
                .earlier
                .iter()
                .map(|place| self.tickets[place].deadline),
        );
        busy.again_in = ends.into_iter().min().map(|end| end.since(now));
        let others = self.tickets.iter().filter(|(at, ticket)| {
            Some(**at) != place
                && ticket.is_live(now)
                && holding::ticket_conflict(ticket.asked(), asked)
        });
        busy.waiting = (others.count() as u64).min(limits::WAITING);
        busy
    }

    fn grant(
        &mut self,
        ask: &Ask,
        partition: u16,
        issuer: &mut Issuer,
        now: Timestamp,
    ) -> GrantedHolding {
        let token = issuer.issue(1, now);
        let hold = Hold {
            partition,
            scopes: ask.scopes.clone(),
            mode: ask.mode,
            owner: Arc::clone(&ask.owner),
            task: Arc::clone(&ask.task),
            nonce: ask.nonce,
            granted_at: now,
            deadline: order::deadline(now, ask.term, now, ask.max_lifetime),
            term: ask.term,
            max_lifetime: ask.max_lifetime,
            rest: self.rest,
            recalled_until: None,
            renewals: 0,
            progress: None,
        };
        self.is_asked = true;
        self.ledger.granted += 1;
        self.ledger.live += 1;
        self.use_scopes(&ask.scopes, now);
        for scope in &ask.scopes {
            self.scopes.entry(scope.clone()).or_default().last = Some(token);
        }
        let granted = self.granted(&ask.family, token, &hold, now);
        self.holdings.insert(token, hold);
        granted
    }

    fn granted(
        &self,
        family: &FamilyName,
        token: FencingToken,
        hold: &Hold,
        now: Timestamp,
    ) -> GrantedHolding {
        let first = hold.scopes.first().and_then(|scope| self.scopes.get(scope));
        GrantedHolding {
            receipt: HoldingReceipt {
                family: family.clone(),
                partition: hold.partition,
                token,
                nonce: hold.nonce,
            },
            granted: hold.deadline.since(now),
            state: first.and_then(|scope| scope.state.clone()),
        }
    }

    /// Leaves a ticket, or refreshes the one that is there.
    fn queue_up(&mut self, ask: &Ask, place: Option<u64>, partition: u16, now: Timestamp) {
        let deadline = now.after(limits::TICKET_TERM);
        self.is_asked = true;
        self.use_scopes(&ask.scopes, now);
        if let Some(ticket) = place.and_then(|place| self.tickets.get_mut(&place)) {
            ticket.deadline = deadline;
            return;
        }
        self.last_place += 1;
        let ticket = Ticket {
            partition,
            scopes: ask.scopes.clone(),
            mode: ask.mode,
            owner: Arc::clone(&ask.owner),
            task: Arc::clone(&ask.task),
            nonce: ask.nonce,
            since: now,
            deadline,
            woken: false,
        };
        self.tickets.insert(self.last_place, ticket);
    }
}
