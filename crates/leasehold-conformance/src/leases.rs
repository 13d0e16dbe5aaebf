//! How the checker judges leases: I1, I5, I6, I9, I12.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::checker::{Effect, Rule, Violation};
use super::history::{Answer, BeatNote, Ending, Final, Op, ReceiptNote};
use super::jobs::held;
use leasehold::clock::Timestamp;
use leasehold::job::{JobId, Key, QueueName};
use leasehold::lease::{Cause, FencingToken, Verdict};
use leasehold::store::{Checkpointed, ControlCommand, LeaseSelect, Renewal};

/// A lease that a claim gave.
struct Known<'a> {
    receipt: ReceiptNote,
    owner: &'a str,
    task: &'a str,
    key: Option<&'a Key>,
    lifetime: Option<Duration>,
    term: Duration,
    claim: &'a Effect,
    ends: Vec<End<'a>>,
}

/// Something that ended a lease, or may have.
struct End<'a> {
    by: &'a Effect,
    sure: Sure,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sure {
    /// It may have.
    Perhaps,
    /// When it was answered, the lease had ended, by this or before.
    Over,
    /// The lease lapsed, if it had not ended before.
    Lapsed,
    /// This very call ended it.
    Ended,
}

pub(super) fn check(effects: &[Effect], last: Option<&Final>, found: &mut Vec<Violation>) {
    tokens(effects, found);
    let mut leases = granted(effects);
    for effect in effects {
        ends_by(effect, &mut leases);
    }
    for lease in leases.values() {
        ended_twice(lease, found);
    }
    one_at_a_time(&leases, found);
    for effect in effects {
        authority(effect, &leases, found);
    }
    if let Some(last) = last {
        ledger(effects, &leases, last, found);
    }
}

/// I1: later claims have larger tokens, and none is given twice.
fn tokens(effects: &[Effect], found: &mut Vec<Violation>) {
    let mut given: HashMap<FencingToken, &Effect> = HashMap::new();
    // The largest token of the claims that had ended, by the time they ended.
    let mut largest: BTreeMap<u64, FencingToken> = BTreeMap::new();
    let claims = effects.iter().filter_map(|effect| match &effect.answer {
        Some(Answer::Claimed { grants, .. }) => Some((effect, grants)),
        _ => None,
    });
    let mut by_end: Vec<_> = claims.clone().collect();
    by_end.sort_by_key(|(effect, _)| effect.known_end());
    let mut most = FencingToken::new(0);
    for (effect, grants) in by_end {
        let tokens = grants.iter().flat_map(|grant| &grant.leases);
        most = tokens.map(|lease| lease.token).fold(most, Ord::max);
        largest.insert(effect.known_end(), most);
    }
    for (effect, grants) in claims {
        let before = largest.range(..effect.start).next_back();
        for lease in grants.iter().flat_map(|grant| &grant.leases) {
            if let Some((at, most)) = before.filter(|(_, most)| lease.token <= **most) {
                let events = [vec![*at], effect.events()].concat();
                let detail = format!("{most} had been given before");
                let violation = Violation::new(Rule::TokenWentBack, events, detail);
                found.push(violation.job(lease.job).token(lease.token));
            }
            if let Some(other) = given.insert(lease.token, effect) {
                let events = [other.events(), effect.events()].concat();
                let violation = Violation::new(Rule::TokenIssuedTwice, events, "two claims");
                found.push(violation.job(lease.job).token(lease.token));
            }
        }
    }
}

fn granted(effects: &[Effect]) -> BTreeMap<FencingToken, Known<'_>> {
    let mut jobs = HashMap::new();
    for effect in effects {
        if let Op::Enqueue { jobs: sent, .. } = &effect.op {
            jobs.extend(sent.iter().map(|job| (job.id, job)));
        }
    }
    let mut leases = BTreeMap::new();
    for claim in effects {
        let (
            Op::Claim {
                owner,
                task,
                queues,
                ..
            },
            Some(Answer::Claimed { grants, .. }),
        ) = (&claim.op, &claim.answer)
        else {
            continue;
        };
        for grant in grants {
            let asked = queues.iter().find(|(queue, _)| *queue == grant.queue);
            for lease in &grant.leases {
                let job = jobs.get(&lease.job);
                let own = job.and_then(|job| job.max_lifetime);
                let known = Known {
                    receipt: ReceiptNote {
                        queue: grant.queue.clone(),
                        grant: grant.id,
                        token: lease.token,
                        job: lease.job,
                        proof: grant.proof,
                    },
                    owner,
                    task,
                    key: job.and_then(|job| job.exclusive.as_ref()),
                    lifetime: own.or(asked.map(|(_, lifetime)| *lifetime)),
                    term: grant.term,
                    claim,
                    ends: Vec::new(),
                };
                leases.entry(lease.token).or_insert(known);
            }
        }
    }
    leases
}

/// Notes which leases a call ended, or may have ended.
fn ends_by<'a>(by: &'a Effect, leases: &mut BTreeMap<FencingToken, Known<'a>>) {
    let mut note = |token: FencingToken, sure| {
        if let Some(lease) = leases.get_mut(&token) {
            lease.ends.push(End { by, sure });
        }
    };
    match (&by.op, &by.answer) {
        (Op::Settle(sent), Some(Answer::Settled(verdicts))) => {
            for (at, (receipt, _)) in sent.settlements.iter().enumerate() {
                if held(verdicts, at) {
                    note(receipt.token, Sure::Ended);
                }
            }
        }
        (Op::Settle(sent), _) => {
            for (receipt, _) in &sent.settlements {
                note(receipt.token, Sure::Perhaps);
            }
        }
        (
            Op::Claim { .. } | Op::Reap { .. },
            Some(Answer::Claimed { expired, .. } | Answer::Reaped(expired)),
        ) => {
            for expiry in expired {
                note(expiry.token, Sure::Ended);
            }
        }
        (Op::Claim { queues, .. }, _) => perhaps(by, leases, |lease| {
            let mut queues = queues.iter();
            queues.any(|(queue, _)| *queue == lease.receipt.queue)
        }),
        (Op::Reap { .. }, _) => perhaps(by, leases, |_| true),
        (Op::Renew { beats }, answer) => {
            for (at, beat) in beats.iter().enumerate() {
                let renewal = match answer {
                    Some(Answer::Renewed(renewals)) => renewals.get(at),
                    _ => None,
                };
                let lapsed = match renewal {
                    Some(Renewal::Held { .. }) => Sure::Lapsed,
                    _ => Sure::Perhaps,
                };
                for token in &beat.lapse {
                    note(*token, lapsed);
                }
                if let Some(Renewal::Held { fenced, .. }) = renewal {
                    for token in fenced {
                        note(*token, Sure::Over);
                    }
                }
            }
        }
        (
            Op::Control {
                command: ControlCommand::Revoke(select),
                ..
            },
            answer,
        ) if !matches!(answer, Some(Answer::Controlled(did)) if did.done == 0) => {
            perhaps(by, leases, |lease| match select {
                LeaseSelect::Job(id) => lease.receipt.job == *id,
                LeaseSelect::Owner(owner) => lease.owner == &**owner,
                LeaseSelect::Task(task) => lease.task == &**task,
            });
        }
        _ => {}
    }
}

fn perhaps<'a>(
    by: &'a Effect,
    leases: &mut BTreeMap<FencingToken, Known<'a>>,
    hit: impl Fn(&Known<'_>) -> bool,
) {
    for lease in leases.values_mut().filter(|lease| hit(lease)) {
        lease.ends.push(End {
            by,
            sure: Sure::Perhaps,
        });
    }
}

/// I9: every lease ends once.
fn ended_twice(lease: &Known<'_>, found: &mut Vec<Violation>) {
    let sure = lease.ends.iter().filter(|end| end.sure == Sure::Ended);
    let events: Vec<Vec<u64>> = sure.map(|end| end.by.events()).collect();
    if events.len() > 1 {
        let violation = Violation::new(Rule::EndedTwice, events.concat(), "");
        found.push(violation.job(lease.receipt.job).token(lease.receipt.token));
    }
}

/// I6: a job, and an exclusive key, is granted again only after its lease may have ended.
fn one_at_a_time(leases: &BTreeMap<FencingToken, Known<'_>>, found: &mut Vec<Violation>) {
    let mut of_job: HashMap<JobId, &Known<'_>> = HashMap::new();
    let mut of_key: HashMap<(&QueueName, &Key), &Known<'_>> = HashMap::new();
    let mut look = |rule, before: Option<&Known<'_>>, lease: &Known<'_>| {
        let Some(before) = before else { return };
        let until = lease.claim.known_end();
        if !before.ends.iter().any(|end| end.by.start < until) {
            let events = [before.claim.events(), lease.claim.events()].concat();
            let detail = format!("the lease {} had not ended", before.receipt.token);
            let violation = Violation::new(rule, events, detail);
            found.push(violation.job(lease.receipt.job).token(lease.receipt.token));
        }
    };
    for lease in leases.values() {
        let before = of_job.insert(lease.receipt.job, lease);
        look(Rule::TwoLeasesOfAJob, before, lease);
        if let Some(key) = lease.key {
            let before = of_key.insert((&lease.receipt.queue, key), lease);
            let other = before.filter(|before| before.receipt.job != lease.receipt.job);
            look(Rule::TwoLeasesOfAKey, other, lease);
        }
    }
}

/// I5 and I12: who was let in, and who was not.
fn authority(
    effect: &Effect,
    leases: &BTreeMap<FencingToken, Known<'_>>,
    found: &mut Vec<Violation>,
) {
    match (&effect.op, &effect.answer) {
        (Op::Settle(note), Some(Answer::Settled(verdicts))) => {
            for ((receipt, _), verdict) in note.settlements.iter().zip(verdicts) {
                match verdict {
                    Verdict::Held { .. } => accepted(effect, receipt, leases, found),
                    Verdict::Fenced => refused(effect, receipt, leases, found),
                }
            }
        }
        (Op::Checkpoint { checkpoints, .. }, Some(Answer::Checkpointed(answers))) => {
            for ((receipt, _), answer) in checkpoints.iter().zip(answers) {
                match answer {
                    Checkpointed::Fenced => refused(effect, receipt, leases, found),
                    _ => accepted(effect, receipt, leases, found),
                }
            }
        }
        (Op::Renew { beats }, Some(Answer::Renewed(renewals))) => {
            for (beat, renewal) in beats.iter().zip(renewals) {
                if let Renewal::Held {
                    granted, fenced, ..
                } = renewal
                {
                    renewed(effect, beat, *granted, fenced, leases, found);
                }
            }
        }
        _ => {}
    }
}

fn accepted(
    effect: &Effect,
    receipt: &ReceiptNote,
    leases: &BTreeMap<FencingToken, Known<'_>>,
    found: &mut Vec<Violation>,
) {
    let report = |rule, events, detail: &str| {
        let violation = Violation::new(rule, events, detail);
        violation.job(receipt.job).token(receipt.token)
    };
    let known = leases.get(&receipt.token);
    let Some(lease) = known.filter(|lease| lease.receipt == *receipt) else {
        let rule = Rule::ForeignReceiptAccepted;
        found.push(report(rule, effect.events(), "no claim gave this receipt"));
        return;
    };
    let over = lease.ends.iter().find(|end| {
        end.sure != Sure::Perhaps
            && !std::ptr::eq(end.by, effect)
            && end.by.known_end() < effect.start
    });
    if let Some(end) = over {
        let rule = if end.sure == Sure::Lapsed {
            Rule::LapsedLeaseLived
        } else {
            Rule::AcceptedAfterEnd
        };
        let events = [end.by.events(), effect.events()].concat();
        found.push(report(rule, events, "its lease had ended"));
    }
}

fn refused(
    effect: &Effect,
    receipt: &ReceiptNote,
    leases: &BTreeMap<FencingToken, Known<'_>>,
    found: &mut Vec<Violation>,
) {
    let Some(lease) = leases.get(&receipt.token) else {
        return;
    };
    let until = effect.known_end();
    let may_have_ended = lease.ends.iter().any(|end| end.by.start < until);
    if lease.receipt == *receipt && !may_have_ended {
        let events = [lease.claim.events(), effect.events()].concat();
        let detail = "nothing had ended its lease";
        let violation = Violation::new(Rule::CurrentReceiptFenced, events, detail);
        found.push(violation.job(receipt.job).token(receipt.token));
    }
}

fn renewed(
    effect: &Effect,
    beat: &BeatNote,
    granted: Duration,
    fenced: &[FencingToken],
    leases: &BTreeMap<FencingToken, Known<'_>>,
    found: &mut Vec<Violation>,
) {
    for token in beat.leases.iter().filter(|token| !fenced.contains(token)) {
        let job = leases.get(token).map(|lease| lease.receipt.job);
        let Some(job) = job else {
            let detail = "no claim gave this lease";
            let rule = Rule::ForeignReceiptAccepted;
            found.push(Violation::new(rule, effect.events(), detail).token(*token));
            continue;
        };
        let receipt = ReceiptNote {
            queue: beat.queue.clone(),
            grant: beat.grant,
            token: *token,
            job,
            proof: beat.proof,
        };
        accepted(effect, &receipt, leases, found);
        let lease = &leases[token];
        let too_far =
            granted > lease.term || until_at_least(effect.clock.0, granted) > until_at_most(lease);
        if too_far {
            let events = [lease.claim.events(), effect.events()].concat();
            let detail = format!("{granted:?} of {:?}, {:?}", lease.term, lease.lifetime);
            let violation = Violation::new(Rule::RenewedTooFar, events, detail);
            found.push(violation.job(job).token(*token));
        }
    }
}

/// The earliest that the renewed deadline can be; without a clock, the beginning of time.
fn until_at_least(sent: Option<Timestamp>, granted: Duration) -> Timestamp {
    sent.map_or(Timestamp::ZERO, |sent| sent.after(granted))
}

/// The latest that the lease can live to; without a clock or a lifetime, forever.
fn until_at_most(lease: &Known<'_>) -> Timestamp {
    let granted_by = lease.claim.clock.1;
    match (granted_by, lease.lifetime) {
        (Some(at), Some(lifetime)) => at.after(lifetime),
        _ => Timestamp::from_micros(u64::MAX),
    }
}

/// I9: the ledgers balance, and count what happened: exactly, where every result is known.
fn ledger(
    effects: &[Effect],
    leases: &BTreeMap<FencingToken, Known<'_>>,
    last: &Final,
    found: &mut Vec<Violation>,
) {
    let mut seen: BTreeMap<&QueueName, [u64; 5]> = BTreeMap::new();
    for lease in leases.values() {
        seen.entry(&lease.receipt.queue).or_default()[0] += 1;
    }
    for effect in effects {
        match (&effect.op, &effect.answer) {
            (Op::Settle(note), Some(Answer::Settled(verdicts))) => {
                for (at, (receipt, ending)) in note.settlements.iter().enumerate() {
                    if held(verdicts, at) {
                        let counts = seen.entry(&receipt.queue).or_default();
                        counts[match ending {
                            Ending::Complete => 1,
                            Ending::Bury => 2,
                            Ending::Retry | Ending::Surrender => 3,
                        }] += 1;
                    }
                }
            }
            (_, Some(Answer::Claimed { expired, .. } | Answer::Reaped(expired))) => {
                for expiry in expired.iter().filter(|e| e.cause != Cause::Stalled) {
                    seen.entry(&expiry.queue).or_default()[4] += 1;
                }
            }
            _ => {}
        }
    }
    let all_known = effects.iter().all(|effect| effect.answer.is_some());
    // A repeated claim does not list what has ended or is overdue meanwhile: such a lease shows
    // only when it ends, or is still there.
    let unseen = |queue: &QueueName| {
        let expired = effects.iter().filter_map(|effect| match &effect.answer {
            Some(Answer::Claimed { expired, .. } | Answer::Reaped(expired)) => Some(expired),
            _ => None,
        });
        let expired = expired.flatten().filter(|expiry| expiry.queue == *queue);
        let ended = expired.map(|expiry| &expiry.token).chain(&last.leases);
        ended.filter(|token| !leases.contains_key(token)).count() as u64
    };
    for view in &last.queues {
        let ledger = &view.ledger;
        let counted = [
            ledger.granted,
            ledger.completed,
            ledger.buried,
            ledger.retried + ledger.surrendered + ledger.cancelled,
            ledger.expired_deadline + ledger.expired_lifetime,
        ];
        let seen = seen.get(&view.queue).copied().unwrap_or_default();
        let more = [ledger.revoked + unseen(&view.queue), 0, 0, 0, 0];
        let off = |((seen, counted), more): ((u64, u64), u64)| {
            seen > counted || (all_known && counted > seen + more)
        };
        let mut counts = seen.into_iter().zip(counted).zip(more);
        if !ledger.balances() || counts.any(off) {
            let detail = format!(
                "{}: {ledger:?}, seen granted, completed, buried, handed back, expired: {seen:?}",
                view.queue
            );
            found.push(Violation::new(Rule::LedgerOff, Vec::new(), detail));
        }
    }
}
