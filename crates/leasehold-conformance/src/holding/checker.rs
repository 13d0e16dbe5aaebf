//! The judge of recorded histories of holdings: invariants H1, H2, H4, H5, H7 and H8.
//!
//! [`check`] reads a [history](super::history) that begins with an empty store. It knows no right
//! answers; it knows what no correct store can have answered. Where a result is unknown it assumes
//! whatever excuses the store. Rules about time (H1, H5, H8) are judged where the clock is noted.
//!
//! Not judged here: H3 follows from H5 and the term of tickets, and H6 is the holder's.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use super::history::{
    AcquiredNote, AskNote, HoldingAnswer, HoldingCall, HoldingNote, HoldingOp, ReleaseNote,
};
use leasehold::clock::Timestamp;
use leasehold::lease::FencingToken;
use leasehold::limits;
use leasehold::rules::holding::{self, FamilyName, Mode, Scope, ScopeKind};
use leasehold::store::RequestId;
use leasehold::store::holding::{
    Committed, FamilyView, HoldingCommand, HoldingExpiry, HoldingRenewal, HoldingSelect, Released,
    SavedState,
};

/// A rule that no history of a correct store breaks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum HoldingRule {
    /// H1: a holding was granted while one that conflicts with it was live.
    TwoHoldings,
    /// H1: more units of a name were held and used up than there are.
    TooManyUnits,
    /// H2: of two grants that conflict, or of one name, the later has the smaller token.
    TokenWentBack,
    /// H4: a ledger does not balance, or does not count what happened.
    LedgerOff,
    /// H4: a holding ended twice.
    EndedTwice,
    /// H5: a later ask was granted before a ticket that conflicts with it.
    Overtaken,
    /// H7: a state was accepted, or handed out, that is behind one that was saved.
    StateWentBack,
    /// H8: an ask was busy although nothing can have been in its way.
    BusyForNothing,
    /// A repeat got another answer.
    RepeatAnsweredAnew,
}

/// A broken rule, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HoldingViolation {
    /// The rule.
    pub rule: HoldingRule,
    /// The starts of the calls that show it.
    pub calls: Vec<u64>,
    /// The same in words.
    pub detail: String,
}

impl fmt::Display for HoldingViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}: {}", self.rule, self.calls, self.detail)
    }
}

/// Judges a history, and the families that are left. Empty: nothing is wrong.
pub fn check(calls: &[HoldingCall], last: &[FamilyView]) -> Vec<HoldingViolation> {
    let mut found = Vec::new();
    let calls = joined(calls, &mut found);
    let known = Evidence::of(&calls);
    known.conflicts(&mut found);
    known.units(&mut found);
    known.tokens(&mut found);
    known.overtaking(&mut found);
    known.busy(&mut found);
    known.states(&mut found);
    known.ledgers(last, &mut found);
    found
}

/// Judges a history, and panics with all that is wrong.
pub fn assert_correct(calls: &[HoldingCall], last: &[FamilyView]) {
    let found = check(calls, last);
    let text: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "{}", text.join("\n"));
}

fn violation(
    rule: HoldingRule,
    calls: &[&HoldingCall],
    detail: impl Into<String>,
) -> HoldingViolation {
    HoldingViolation {
        rule,
        calls: calls.iter().map(|call| call.start).collect(),
        detail: detail.into(),
    }
}

/// Joins the repeats of a request: it was sent when it was first sent, and has the first answer.
fn joined(calls: &[HoldingCall], found: &mut Vec<HoldingViolation>) -> Vec<HoldingCall> {
    let mut all: Vec<HoldingCall> = Vec::new();
    let mut of_request: HashMap<RequestId, usize> = HashMap::new();
    for call in calls {
        let first = call
            .op
            .request()
            .and_then(|id| of_request.get(&id).copied());
        let Some(first) = first.map(|at| &mut all[at]) else {
            of_request.extend(call.op.request().map(|id| (id, all.len())));
            all.push(call.clone());
            continue;
        };
        match (&first.answer, &call.answer) {
            (None, Some(answer)) => {
                first.answer = Some(answer.clone());
                first.end = call.end;
                if let (Some(clock), Some(later)) = (&mut first.clock, call.clock) {
                    clock.1 = later.1;
                }
            }
            (Some(before), Some(after)) if !is_repeat_of(before, after) => {
                let detail = format!("{before:?} and then {after:?}");
                found.push(violation(
                    HoldingRule::RepeatAnsweredAnew,
                    &[first, call],
                    detail,
                ));
            }
            _ => {}
        }
    }
    all
}

/// Whether `after` can be the answer to the same request as `before`, a moment later.
fn is_repeat_of(before: &HoldingAnswer, after: &HoldingAnswer) -> bool {
    let (HoldingAnswer::Acquired { answers: was, .. }, HoldingAnswer::Acquired { answers: is, .. }) =
        (before, after)
    else {
        return before == after;
    };
    let has_ended = |was: &AcquiredNote, is: &AcquiredNote| {
        matches!(
            (was, is),
            (AcquiredNote::Granted { .. }, AcquiredNote::Ended)
        )
    };
    was.len() == is.len()
        && was
            .iter()
            .zip(is)
            .all(|(was, is)| was == is || has_ended(was, is))
}

/// A holding that an acquire gave.
struct Grant<'a> {
    ask: &'a AskNote,
    call: &'a HoldingCall,
    token: FencingToken,
    granted: Duration,
    state: Option<(FencingToken, u64)>,
    renewals: Vec<(&'a HoldingCall, Duration)>,
    ends: Vec<PossibleEnd<'a>>,
}

/// Something that ended a holding, or may have.
struct PossibleEnd<'a> {
    call: &'a HoldingCall,
    /// This very call ended it.
    is_sure: bool,
}

impl Grant<'_> {
    fn asked(&self) -> (&[Scope], Mode) {
        (&self.ask.scopes, self.ask.mode)
    }

    /// Whether it was live throughout a call, whatever is unknown.
    fn is_surely_live(&self, call: &HoldingCall) -> bool {
        let (Some(end), Some(clock)) = (call.end, call.clock) else {
            return false;
        };
        let promised = std::iter::once((self.call, self.granted));
        let promised = promised.chain(self.renewals.iter().copied());
        let promised = promised.filter(|(by, _)| by.end.is_some_and(|end| end < call.start));
        let deadline = promised.filter_map(|(by, granted)| Some(by.clock?.0.after(granted)));
        deadline.max().is_some_and(|deadline| deadline > clock.1)
            && self.ends.iter().all(|by| by.call.start > end)
    }

    /// Whether it, or the rest after it, can have been there at some moment of a call.
    fn may_be_there(&self, call: &HoldingCall, rest: Duration) -> bool {
        let (Some(clock), Some(end)) = (call.clock, call.end) else {
            return true;
        };
        if self.call.start > end {
            return false;
        }
        let may_rest = !rest.is_zero();
        let is_gone = |by: &PossibleEnd<'_>| {
            let kept = may_rest && !is_release(&by.call.op);
            by.is_sure && !kept && by.call.end.is_some_and(|end| end < call.start)
        };
        if self.ends.iter().any(is_gone) {
            return false;
        }
        let promised = std::iter::once((self.call, self.granted));
        let promised = promised.chain(self.renewals.iter().copied());
        let promised = promised.filter(|(by, _)| by.start < end);
        let last = promised.filter_map(|(by, granted)| Some(by.clock?.1.after(granted)));
        last.max().is_none_or(|last| last.after(rest) > clock.0)
    }
}

fn is_release(op: &HoldingOp) -> bool {
    matches!(op, HoldingOp::Release { .. } | HoldingOp::Commit { .. })
}

/// One ask, as often as it was made.
struct Asked<'a> {
    ask: &'a AskNote,
    /// Each call, with what it was told.
    calls: Vec<(&'a HoldingCall, Option<&'a AcquiredNote>)>,
}

impl Asked<'_> {
    /// When an ask can have come into line, at the earliest, for its grant in a call.
    fn line_since(&self, granted: &HoldingCall) -> Option<u64> {
        let mut since = None;
        for (call, answer) in &self.calls {
            if call.start >= granted.start {
                break;
            }
            match answer {
                Some(AcquiredNote::Busy { place: Some(_), .. }) | None => {
                    since = since.or(Some(call.start));
                }
                Some(_) => since = None,
            }
        }
        since.or(Some(granted.start))
    }
}

struct Evidence<'a> {
    calls: &'a [HoldingCall],
    grants: Vec<Grant<'a>>,
    asks: Vec<Asked<'a>>,
    /// Longer than any rest that was configured; zero if none was.
    rest: HashMap<&'a FamilyName, Duration>,
}

impl<'a> Evidence<'a> {
    fn of(calls: &'a [HoldingCall]) -> Self {
        let mut known = Self {
            calls,
            grants: Vec::new(),
            asks: Vec::new(),
            rest: HashMap::new(),
        };
        let mut of_proof: HashMap<(&FamilyName, u64), usize> = HashMap::new();
        let mut of_token: HashMap<(&FamilyName, FencingToken), usize> = HashMap::new();
        for call in calls {
            if let HoldingOp::Control {
                command: HoldingCommand::Configure { family, settings },
                ..
            } = &call.op
            {
                let rest = known.rest.entry(family).or_default();
                *rest = settings.rest.unwrap_or_default().max(*rest);
            }
            let HoldingOp::Acquire { asks, .. } = &call.op else {
                continue;
            };
            for (at, ask) in asks.iter().enumerate() {
                let answer = match &call.answer {
                    Some(HoldingAnswer::Acquired { answers, .. }) => answers.get(at),
                    _ => None,
                };
                let index = *of_proof.entry((&ask.family, ask.proof)).or_insert_with(|| {
                    known.asks.push(Asked {
                        ask,
                        calls: Vec::new(),
                    });
                    known.asks.len() - 1
                });
                known.asks[index].calls.push((call, answer));
                if let Some(AcquiredNote::Granted {
                    token,
                    granted,
                    state,
                }) = answer
                {
                    of_token.entry((&ask.family, *token)).or_insert_with(|| {
                        known.grants.push(Grant {
                            ask,
                            call,
                            token: *token,
                            granted: *granted,
                            state: *state,
                            renewals: Vec::new(),
                            ends: Vec::new(),
                        });
                        known.grants.len() - 1
                    });
                }
            }
        }
        for call in calls {
            known.note(call);
        }
        known
    }

    fn grant_mut(&mut self, family: &FamilyName, token: FencingToken) -> Option<&mut Grant<'a>> {
        let mut grants = self.grants.iter_mut();
        grants.find(|grant| grant.token == token && grant.ask.family == *family)
    }

    /// What a call did to holdings, or may have done.
    fn note(&mut self, call: &'a HoldingCall) {
        let end = |is_sure| PossibleEnd { call, is_sure };
        match (&call.op, &call.answer) {
            (HoldingOp::Renew { beats }, answer) => {
                for (at, (note, lapse)) in beats.iter().enumerate() {
                    let told = match answer {
                        Some(HoldingAnswer::Renewed(told)) => told.get(at),
                        _ => None,
                    };
                    let Some(grant) = self.grant_mut(&note.family, note.token) else {
                        continue;
                    };
                    if grant.ask.proof != note.proof {
                        continue;
                    }
                    match told {
                        Some(HoldingRenewal::Held { granted, .. }) => {
                            grant.renewals.push((call, *granted));
                        }
                        Some(HoldingRenewal::Fenced) => grant.ends.push(end(false)),
                        // It may have been extended by any time.
                        None => grant.renewals.push((call, limits::DURATION_MAX)),
                    }
                    if *lapse {
                        grant.ends.push(end(false));
                    }
                }
            }
            (HoldingOp::Release { releases, .. }, answer) => {
                for (at, note) in releases.iter().enumerate() {
                    let told = match answer {
                        Some(HoldingAnswer::Released(told)) => told.get(at),
                        _ => None,
                    };
                    self.note_release(note, told, call);
                }
            }
            (HoldingOp::Commit { receipts, .. }, answer) => {
                for (at, note) in receipts.iter().enumerate() {
                    let told = match answer {
                        Some(HoldingAnswer::Committed(told)) => told.get(at),
                        _ => None,
                    };
                    let is_its = |grant: &&mut Grant<'_>| grant.ask.proof == note.proof;
                    let grant = self.grant_mut(&note.family, note.token).filter(is_its);
                    match (grant, told) {
                        (Some(grant), Some(Committed::Done)) => grant.ends.push(end(true)),
                        (Some(grant), None) => grant.ends.push(end(false)),
                        _ => {}
                    }
                }
            }
            (
                HoldingOp::Control {
                    command: HoldingCommand::Revoke(select),
                    ..
                },
                _,
            ) => {
                let grants = self.grants.iter_mut();
                for grant in grants.filter(|grant| is_selected(select, grant)) {
                    grant.ends.push(end(false));
                }
            }
            (HoldingOp::Acquire { .. }, Some(HoldingAnswer::Acquired { expired, .. }))
            | (HoldingOp::Reap { .. }, Some(HoldingAnswer::Reaped(expired))) => {
                for HoldingExpiry { family, token, .. } in expired {
                    if let Some(grant) = self.grant_mut(family, *token) {
                        grant.ends.push(end(true));
                    }
                }
            }
            _ => {}
        }
    }

    fn note_release(&mut self, note: &ReleaseNote, told: Option<&Released>, call: &'a HoldingCall) {
        let mut grants = self.grants.iter_mut().filter(|grant| {
            grant.ask.proof == note.proof
                && grant.ask.family == note.family
                && note.token.is_none_or(|token| token == grant.token)
        });
        // Of several with one nonce only the latest can be meant.
        let is_sure = matches!(told, Some(Released::Ended { .. }));
        if is_sure || told.is_none() {
            let last = grants
                .by_ref()
                .filter(|grant| grant.call.start < call.start)
                .last();
            if let Some(grant) = last {
                grant.ends.push(PossibleEnd { call, is_sure });
            }
        }
    }

    /// H1.
    fn conflicts(&self, found: &mut Vec<HoldingViolation>) {
        for later in &self.grants {
            for earlier in self
                .grants
                .iter()
                .filter(|it| it.ask.family == later.ask.family)
            {
                if earlier.call.start < later.call.start
                    && earlier.call.end < Some(later.call.start)
                    && holding::conflict(earlier.asked(), later.asked())
                    && earlier.is_surely_live(later.call)
                {
                    let detail = format!("{} and {} are both live", earlier.token, later.token);
                    let calls = [earlier.call, later.call];
                    found.push(violation(HoldingRule::TwoHoldings, &calls, detail));
                }
            }
        }
    }

    /// How many units the family may have given at a moment of a call: at least and at most.
    fn units_of(&self, family: &FamilyName, call: &HoldingCall) -> (u32, u32) {
        let (mut least, mut most) = (0, 0);
        for by in self.calls.iter().filter(|by| Some(by.start) < call.end) {
            if let HoldingOp::Control {
                command:
                    HoldingCommand::Configure {
                        family: of,
                        settings,
                    },
                ..
            } = &by.op
                && of == family
                && let Some(units) = settings.units
            {
                let is_before = by.end.is_some_and(|end| end < call.start);
                (least, most) = if is_before {
                    (units, units)
                } else {
                    (units.min(least), units.max(most))
                };
            }
        }
        (least, most)
    }

    /// Units of a name that were used up: those that surely are, and those that can be.
    fn used_up(&self, family: &FamilyName, name: &Scope, call: &HoldingCall) -> (u64, u64) {
        let (mut sure, mut possible) = (0, 0);
        for grant in &self.grants {
            let is_its = grant.ask.family == *family && grant.ask.scopes.contains(name);
            for end in grant.ends.iter().filter(|_| is_its) {
                if matches!(end.call.op, HoldingOp::Commit { .. }) {
                    let is_before = end.is_sure && end.call.end.is_some_and(|at| at < call.start);
                    sure += if is_before { grant.ask.mode.units() } else { 0 };
                    possible += grant.ask.mode.units();
                }
            }
        }
        for by in self.calls.iter().filter(|by| Some(by.start) < call.end) {
            if let HoldingOp::Control {
                command:
                    HoldingCommand::Restock {
                        family: of,
                        scope,
                        units,
                    },
                ..
            } = &by.op
                && of == family
                && scope == name
            {
                sure = sure.saturating_sub((*units).into());
                if let Some(HoldingAnswer::Controlled(done)) = by.answer
                    && by.end.is_some_and(|end| end < call.start)
                {
                    possible = possible.saturating_sub(done);
                }
            }
        }
        (sure, possible)
    }

    /// H1 for units.
    fn units(&self, found: &mut Vec<HoldingViolation>) {
        for grant in self
            .grants
            .iter()
            .filter(|grant| grant.ask.mode.units() > 0)
        {
            let (_, most) = self.units_of(&grant.ask.family, grant.call);
            for name in &grant.ask.scopes {
                let others = self.grants.iter().filter(|other| {
                    other.ask.family == grant.ask.family
                        && other.ask.scopes.contains(name)
                        && other.call.end < Some(grant.call.start)
                        && other.is_surely_live(grant.call)
                });
                let held: u64 = others.map(|other| other.ask.mode.units()).sum();
                let (used_up, _) = self.used_up(&grant.ask.family, name, grant.call);
                let all = held + used_up + grant.ask.mode.units();
                if all > most.into() {
                    let detail = format!("{all} of {most} units of {name}");
                    found.push(violation(HoldingRule::TooManyUnits, &[grant.call], detail));
                }
            }
        }
    }

    /// H2.
    fn tokens(&self, found: &mut Vec<HoldingViolation>) {
        for later in &self.grants {
            for earlier in self
                .grants
                .iter()
                .filter(|it| it.ask.family == later.ask.family)
            {
                let in_order = earlier.call.end.is_some_and(|end| end < later.call.start);
                if in_order && earlier.token >= later.token && are_ordered(earlier.ask, later.ask) {
                    let detail = format!("{} after {}", later.token, earlier.token);
                    let calls = [earlier.call, later.call];
                    found.push(violation(HoldingRule::TokenWentBack, &calls, detail));
                }
            }
        }
    }

    /// H5.
    fn overtaking(&self, found: &mut Vec<HoldingViolation>) {
        for grant in &self.grants {
            let own = self.asks.iter().find(|asked| {
                asked.ask.proof == grant.ask.proof && asked.ask.family == grant.ask.family
            });
            for other in &self.asks {
                if other.ask.family != grant.ask.family
                    || other.ask.proof == grant.ask.proof
                    || !holding::ticket_conflict((&other.ask.scopes, other.ask.mode), grant.asked())
                {
                    continue;
                }
                if let (Some(own), Some(left)) = (own, self.ticket_since(other, grant.call))
                    && own
                        .line_since(grant.call)
                        .is_none_or(|start| left.end < Some(start))
                {
                    let detail = format!("{} was granted before an earlier ticket", grant.token);
                    found.push(violation(
                        HoldingRule::Overtaken,
                        &[left, grant.call],
                        detail,
                    ));
                }
            }
        }
    }

    /// The call that left a ticket that was surely there throughout a call, if there is one.
    fn ticket_since(&self, asked: &Asked<'a>, call: &HoldingCall) -> Option<&'a HoldingCall> {
        let (end, clock) = (call.end?, call.clock?);
        let mut since: Option<&HoldingCall> = None;
        let mut refreshed: Option<Timestamp> = None;
        for (by, answer) in &asked.calls {
            if by.start > end {
                break;
            }
            let is_before = by.end.is_some_and(|at| at < call.start);
            match answer {
                Some(AcquiredNote::Busy { place: Some(_), .. }) if is_before => {
                    let now = by.clock?;
                    let lives = refreshed.is_some_and(|at| at.after(limits::TICKET_TERM) > now.1);
                    since = since.filter(|_| lives).or(Some(by));
                    refreshed = Some(now.0);
                }
                // It may have gone.
                _ => since = None,
            }
        }
        let left = since?;
        let lives = refreshed.is_some_and(|at| at.after(limits::TICKET_TERM) > clock.1);
        let taken_back = self.calls.iter().any(|by| {
            by.start > left.start
                && by.start < end
                && match &by.op {
                    HoldingOp::Release { releases, .. } => {
                        releases.iter().any(|it| it.proof == asked.ask.proof)
                    }
                    HoldingOp::Control { command, .. } => {
                        matches!(command, HoldingCommand::DropTickets(_))
                    }
                    _ => false,
                }
        });
        (lives && !taken_back).then_some(left)
    }

    /// H8: what is in nobody's way is granted.
    fn busy(&self, found: &mut Vec<HoldingViolation>) {
        if self.calls.iter().any(|call| call.answer.is_none()) {
            return;
        }
        for asked in &self.asks {
            for (call, answer) in &asked.calls {
                if let Some(AcquiredNote::Busy { again_in, .. }) = answer
                    && *again_in != Some(Duration::ZERO)
                    && !self.may_be_busy(asked.ask, call)
                {
                    let detail = format!("{:?} {}", asked.ask.scopes, asked.ask.mode);
                    found.push(violation(HoldingRule::BusyForNothing, &[call], detail));
                }
            }
        }
    }

    fn may_be_busy(&self, ask: &AskNote, call: &HoldingCall) -> bool {
        let asked = (&ask.scopes[..], ask.mode);
        let rest = self.rest.get(&ask.family).copied().unwrap_or_default();
        let others = || {
            let grants = self.grants.iter();
            grants.filter(|grant| grant.ask.family == ask.family && grant.may_be_there(call, rest))
        };
        let tickets = self.asks.iter().any(|other| {
            other.ask.family == ask.family
                && other.ask.proof != ask.proof
                && holding::ticket_conflict((&other.ask.scopes, other.ask.mode), asked)
                && self.may_wait(other, call)
        });
        let short = ask.mode.units() > 0 && {
            let (least, _) = self.units_of(&ask.family, call);
            ask.scopes.iter().any(|name| {
                let of_name = others().filter(|grant| grant.ask.scopes.contains(name));
                let held: u64 = of_name.map(|grant| grant.ask.mode.units()).sum();
                let (_, used_up) = self.used_up(&ask.family, name, call);
                holding::free_units(least, used_up, held) < ask.mode.units()
            })
        };
        tickets || short || others().any(|grant| holding::conflict(grant.asked(), asked))
    }

    /// Whether an ask can have had a ticket at some moment of a call.
    fn may_wait(&self, asked: &Asked<'_>, call: &HoldingCall) -> bool {
        let (Some(clock), Some(end)) = (call.clock, call.end) else {
            return true;
        };
        let calls = asked.calls.iter().filter(|(by, _)| by.start < end);
        let Some((by, answer)) = calls.max_by_key(|(by, _)| by.start) else {
            return false;
        };
        let is_over = by.end.is_some_and(|at| at < call.start)
            && !matches!(answer, Some(AcquiredNote::Busy { place: Some(_), .. }));
        let is_late = by
            .clock
            .is_some_and(|at| at.1.after(limits::TICKET_TERM) <= clock.0);
        let is_withdrawn = self.calls.iter().any(|back| match &back.op {
            HoldingOp::Release { releases, .. } => {
                back.start > by.start
                    && back.end.is_some_and(|at| at < call.start)
                    && releases.iter().any(|it| it.proof == asked.ask.proof)
            }
            _ => false,
        });
        !is_over && !is_late && !is_withdrawn
    }

    /// H7.
    fn states(&self, found: &mut Vec<HoldingViolation>) {
        let mut saved: Vec<(&HoldingCall, &FamilyName, &Scope, (FencingToken, u64))> = Vec::new();
        let first_scope = |note: &HoldingNote| {
            let mut grants = self.grants.iter();
            let grant = grants.find(|it| it.token == note.token && it.ask.family == note.family)?;
            Some((&grant.ask.family, grant.ask.scopes.first()?))
        };
        for call in self.calls {
            match (&call.op, &call.answer) {
                (HoldingOp::Save { saves, .. }, Some(HoldingAnswer::Saved(told))) => {
                    for ((note, seq), told) in saves.iter().zip(told) {
                        if let (SavedState::Saved { .. }, Some((family, scope))) =
                            (told, first_scope(note))
                        {
                            saved.push((call, family, scope, (note.token, *seq)));
                        }
                    }
                }
                (HoldingOp::Release { releases, .. }, Some(HoldingAnswer::Released(told))) => {
                    for (note, told) in releases.iter().zip(told) {
                        let token = note
                            .token
                            .filter(|_| matches!(told, Released::Ended { saved: true, .. }));
                        if let (Some(token), Some(seq)) = (token, note.seq) {
                            let note = HoldingNote {
                                family: note.family.clone(),
                                token,
                                proof: note.proof,
                            };
                            let of = first_scope(&note);
                            saved.extend(
                                of.map(|(family, scope)| (call, family, scope, (token, seq))),
                            );
                        }
                    }
                }
                _ => {}
            }
        }
        for (at, (call, family, scope, state)) in saved.iter().enumerate() {
            for (before, of, earlier_scope, earlier) in &saved[..at] {
                let in_order = before.end.is_some_and(|end| end < call.start);
                if in_order && of == family && earlier_scope == scope && state < earlier {
                    let detail = format!("{state:?} over {earlier:?}");
                    found.push(violation(
                        HoldingRule::StateWentBack,
                        &[before, call],
                        detail,
                    ));
                }
            }
        }
        for grant in &self.grants {
            for (before, family, scope, state) in &saved {
                let in_order = before.end.is_some_and(|end| end < grant.call.start);
                let is_its =
                    grant.ask.scopes.first() == Some(*scope) && grant.ask.family == **family;
                let forgotten = match (before.clock, grant.call.clock) {
                    (Some(then), Some(now)) => then.0.after(limits::STATE_RETENTION) <= now.1,
                    _ => false,
                };
                if in_order && is_its && !forgotten && grant.state < Some(*state) {
                    let detail = format!("{:?} instead of {state:?}", grant.state);
                    let calls = [*before, grant.call];
                    found.push(violation(HoldingRule::StateWentBack, &calls, detail));
                }
            }
        }
    }

    /// H4.
    fn ledgers(&self, last: &[FamilyView], found: &mut Vec<HoldingViolation>) {
        let mut off = |detail: String| found.push(violation(HoldingRule::LedgerOff, &[], detail));
        let all_known = self.calls.iter().all(|call| call.answer.is_some());
        for view in last {
            let (name, ledger) = (&view.family, view.ledger);
            if !ledger.balances() {
                off(format!("{name} does not balance: {ledger:?}"));
            }
            let grants = self.grants.iter().filter(|grant| grant.ask.family == *name);
            let ended_by = |is_it: fn(&HoldingOp) -> bool| -> u64 {
                let grants = self.grants.iter().filter(|grant| grant.ask.family == *name);
                let ends = grants.flat_map(|grant| &grant.ends);
                ends.filter(|end| end.is_sure && is_it(&end.call.op))
                    .count() as u64
            };
            let granted = grants.count() as u64;
            let released = ended_by(|op| matches!(op, HoldingOp::Release { .. }));
            let committed = ended_by(|op| matches!(op, HoldingOp::Commit { .. }));
            let counts = [
                ("granted", ledger.granted, granted),
                ("released", ledger.released, released),
                ("committed", ledger.committed, committed),
            ];
            for (what, counted, seen) in counts {
                if counted < seen || (all_known && counted > seen) {
                    off(format!("{name}: {counted} {what}, and {seen} were seen"));
                }
            }
        }
        for grant in &self.grants {
            let sure: Vec<_> = grant.ends.iter().filter(|end| end.is_sure).collect();
            if let [first, second, ..] = sure[..] {
                let detail = format!("token {}", grant.token);
                let calls = [first.call, second.call];
                found.push(violation(HoldingRule::EndedTwice, &calls, detail));
            }
        }
    }
}

fn is_selected(select: &HoldingSelect, grant: &Grant<'_>) -> bool {
    match select {
        HoldingSelect::Token { family, token, .. } => {
            (family, *token) == (&grant.ask.family, grant.token)
        }
        HoldingSelect::Scope { family, scope } => {
            *family == grant.ask.family && grant.ask.scopes.contains(scope)
        }
        HoldingSelect::Owner(owner) => *owner == grant.ask.owner,
        HoldingSelect::Task(task) => *task == grant.ask.task,
    }
}

/// Whether the tokens of two grants are ordered: they conflict, or have a name in common.
fn are_ordered(a: &AskNote, b: &AskNote) -> bool {
    let share = |scope: &Scope| scope.kind() == ScopeKind::Name && b.scopes.contains(scope);
    holding::conflict((&a.scopes, a.mode), (&b.scopes, b.mode)) || a.scopes.iter().any(share)
}
