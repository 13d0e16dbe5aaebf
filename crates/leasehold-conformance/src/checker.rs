//! The one judge of recorded histories: invariants I1–I6, I9–I12 and I14.
//!
//! [`check`] reads a [history](super::history) that begins with an empty store, and what is left at
//! its end. It does not know the right answers; it knows which answers no correct store can give.
//! Where a result is unknown it assumes whatever excuses the store, so that everything it reports
//! is a violation. Events are real time: one call is later than another if it was sent after the
//! other had ended.
//!
//! Not judged here, because a history of calls cannot show them: I7, I8, I13, I15.

use std::collections::HashMap;
use std::fmt;

use super::history::{Answer, Event, Final, Op, What};
use super::{fences, jobs, leases};
use leasehold::clock::Timestamp;
use leasehold::job::JobId;
use leasehold::lease::FencingToken;
use leasehold::store::RequestId;

/// A rule that no history of a correct store breaks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// I1: of two grants, the later has the smaller token.
    TokenWentBack,
    /// I1: two grants have one token.
    TokenIssuedTwice,
    /// I2: a resource that was open for a larger token accepted this one.
    StaleTokenAccepted,
    /// I3: an accepted write is not in the final state.
    WriteLost,
    /// I4: an acknowledged job is gone, and nothing on record took it away.
    JobLost,
    /// I4: a job was granted that nobody enqueued.
    JobFromNowhere,
    /// I5: a receipt that no claim gave was accepted.
    ForeignReceiptAccepted,
    /// I5: a receipt was accepted although its lease had ended.
    AcceptedAfterEnd,
    /// I5: the current receipt was refused although nothing could have ended its lease.
    CurrentReceiptFenced,
    /// I6: a job was granted while its lease lived.
    TwoLeasesOfAJob,
    /// I6: a job was granted while another of its exclusive key was leased.
    TwoLeasesOfAKey,
    /// I9: a lease ended twice.
    EndedTwice,
    /// I9: a ledger does not balance, or does not count what happened.
    LedgerOff,
    /// I10: a repeat got another answer.
    RepeatAnsweredAnew,
    /// I11: a checkpoint was accepted that is behind an earlier one.
    CheckpointWentBack,
    /// I11: a claim got a checkpoint that is behind the one that was saved.
    CheckpointLost,
    /// I12: a renewal went beyond the maximum lifetime, or beyond the term.
    RenewedTooFar,
    /// I12: a lease lived on after it lapsed.
    LapsedLeaseLived,
    /// I14: a command is not on record.
    CommandNotOnRecord,
    /// I14: a record is of no command.
    RecordFromNowhere,
}

impl Rule {
    /// The number of the invariant.
    pub const fn invariant(self) -> u8 {
        match self {
            Self::TokenWentBack | Self::TokenIssuedTwice => 1,
            Self::StaleTokenAccepted => 2,
            Self::WriteLost => 3,
            Self::JobLost | Self::JobFromNowhere => 4,
            Self::ForeignReceiptAccepted | Self::AcceptedAfterEnd | Self::CurrentReceiptFenced => 5,
            Self::TwoLeasesOfAJob | Self::TwoLeasesOfAKey => 6,
            Self::EndedTwice | Self::LedgerOff => 9,
            Self::RepeatAnsweredAnew => 10,
            Self::CheckpointWentBack | Self::CheckpointLost => 11,
            Self::RenewedTooFar | Self::LapsedLeaseLived => 12,
            Self::CommandNotOnRecord | Self::RecordFromNowhere => 14,
        }
    }
}

/// A broken rule, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The job concerned.
    pub job: Option<JobId>,
    /// The lease concerned.
    pub token: Option<FencingToken>,
    /// The events that show it, by [`Event::at`].
    pub events: Vec<u64>,
    /// The same in words.
    pub detail: String,
}

impl Violation {
    pub(super) fn new(rule: Rule, events: Vec<u64>, detail: impl Into<String>) -> Self {
        Self {
            rule,
            job: None,
            token: None,
            events,
            detail: detail.into(),
        }
    }

    pub(super) fn job(mut self, job: JobId) -> Self {
        self.job = Some(job);
        self
    }

    pub(super) fn token(mut self, token: FencingToken) -> Self {
        self.token = Some(token);
        self
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "I{} {:?}", self.rule.invariant(), self.rule)?;
        if let Some(job) = self.job {
            write!(f, " job {job}")?;
        }
        if let Some(token) = self.token {
            write!(f, " token {token}")?;
        }
        write!(f, " at {:?}: {}", self.events, self.detail)
    }
}

/// Judges a history. Empty: nothing is wrong.
pub fn check(events: &[Event], last: Option<&Final>) -> Vec<Violation> {
    let mut found = Vec::new();
    let effects = effects(events, &mut found);
    leases::check(&effects, last, &mut found);
    jobs::check(&effects, last, &mut found);
    fences::check(events, last, &mut found);
    found
}

/// Judges a history, and panics with all that is wrong.
pub fn assert_correct(events: &[Event], last: Option<&Final>) {
    let found = check(events, last);
    let text: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "{}", text.join("\n"));
}

/// One request, however often it was sent, and the answer if there was one.
pub(super) struct Effect {
    /// When it was first sent: it took effect after this.
    pub(super) start: u64,
    /// When its answer came: it took effect before this. Without an answer: it may never have.
    pub(super) end: Option<u64>,
    pub(super) op: Op,
    pub(super) answer: Option<Answer>,
    /// The store's clock when it was first sent, and when the answer came.
    pub(super) clock: (Option<Timestamp>, Option<Timestamp>),
}

impl Effect {
    pub(super) fn events(&self) -> Vec<u64> {
        std::iter::once(self.start).chain(self.end).collect()
    }

    /// The end, or never.
    pub(super) fn known_end(&self) -> u64 {
        self.end.unwrap_or(u64::MAX)
    }
}

/// How one sending of a request ended.
struct Sent {
    start: u64,
    op: Op,
    end: u64,
    answer: Option<Answer>,
    failed: bool,
    clock: (Option<Timestamp>, Option<Timestamp>),
}

/// Joins invocations with their ends, and repeats with their first sending (I10).
fn effects(events: &[Event], found: &mut Vec<Violation>) -> Vec<Effect> {
    let mut groups: Vec<Vec<Sent>> = Vec::new();
    let mut of_request: HashMap<RequestId, usize> = HashMap::new();
    for sent in sendings(events) {
        match request_of(&sent.op) {
            Some(request) => {
                let group = *of_request.entry(request).or_insert_with(|| {
                    groups.push(Vec::new());
                    groups.len() - 1
                });
                groups[group].push(sent);
            }
            None => groups.push(vec![sent]),
        }
    }
    let effects = groups.into_iter().filter_map(|group| joined(group, found));
    let mut effects: Vec<Effect> = effects.collect();
    effects.sort_by_key(|effect| effect.start);
    effects
}

fn sendings(events: &[Event]) -> Vec<Sent> {
    let ends = events
        .iter()
        .filter(|event| !matches!(event.what, What::Invoke(_)));
    let ends: HashMap<u64, &Event> = ends.map(|event| (event.call, event)).collect();
    let mut all = Vec::new();
    for event in events {
        let What::Invoke(op) = &event.what else {
            continue;
        };
        let end = ends.get(&event.call);
        let mut sent = Sent {
            start: event.at,
            op: op.clone(),
            end: end.map_or(u64::MAX, |end| end.at),
            answer: None,
            failed: false,
            clock: (event.clock, end.and_then(|end| end.clock)),
        };
        match end.map(|end| &end.what) {
            Some(What::Ok(answer)) => sent.answer = Some(answer.clone()),
            Some(What::Fail(_)) => sent.failed = true,
            _ => {}
        }
        all.push(sent);
    }
    all
}

fn request_of(op: &Op) -> Option<RequestId> {
    match op {
        Op::Enqueue { request, .. }
        | Op::Claim { request, .. }
        | Op::Checkpoint { request, .. }
        | Op::Reap { request }
        | Op::Control { request, .. }
        | Op::Prune { request } => Some(*request),
        Op::Settle(note) => Some(note.request),
        Op::OpenSession | Op::Renew { .. } | Op::FenceOpen { .. } | Op::FenceWrite { .. } => None,
    }
}

/// One effect out of all sendings of a request; none if each was certainly refused.
fn joined(mut group: Vec<Sent>, found: &mut Vec<Violation>) -> Option<Effect> {
    group.retain(|sent| !sent.failed);
    group.sort_by_key(|sent| sent.end);
    let start = group.iter().map(|sent| sent.start).min()?;
    let first_clock = group.iter().min_by_key(|sent| sent.start)?.clock.0;
    let answers = group.iter().filter(|sent| sent.answer.is_some());
    let answers: Vec<&Sent> = answers.collect();
    for pair in answers.windows(2) {
        if let (Some(a), Some(b)) = (&pair[0].answer, &pair[1].answer)
            && !is_repeat_of(a, b)
        {
            let events = vec![start, pair[0].end, pair[1].end];
            let detail = format!("{a:?} and then {b:?}");
            found.push(Violation::new(Rule::RepeatAnsweredAnew, events, detail));
        }
    }
    let answered = group.iter().position(|sent| sent.answer.is_some());
    let first = group.swap_remove(answered.unwrap_or(0));
    Some(Effect {
        start,
        end: first.answer.is_some().then_some(first.end),
        op: first.op,
        answer: first.answer,
        clock: (first_clock, first.clock.1),
    })
}

/// Whether `b` can be the answer to the same request as `a`, a moment later.
fn is_repeat_of(a: &Answer, b: &Answer) -> bool {
    let (
        Answer::Claimed {
            grants: before,
            expired: was,
        },
        Answer::Claimed {
            grants: after,
            expired: is,
        },
    ) = (a, b)
    else {
        return a == b;
    };
    // A claim lists what is left of its grants, with the time originally granted.
    was == is
        && after.iter().all(|grant| {
            let same = before.iter().find(|same| same.id == grant.id);
            same.is_some_and(|same| {
                let known = |token| same.leases.iter().any(|lease| lease.token == token);
                same.granted == grant.granted
                    && same.proof == grant.proof
                    && grant.leases.iter().all(|lease| known(lease.token))
            })
        })
}
