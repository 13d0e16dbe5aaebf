//! How the checker judges jobs, checkpoints and commands: I4, I11, I14.

use std::collections::{HashMap, HashSet};

use super::checker::{Effect, Rule, Violation};
use super::history::{Answer, Ending, Final, Op};
use leasehold::inspect::AuditView;
use leasehold::job::{JobId, QueueName};
use leasehold::lease::{FencingToken, Verdict};
use leasehold::store::{Checkpointed, ControlCommand, Enqueued, Select};

pub(super) fn check(effects: &[Effect], last: Option<&Final>, found: &mut Vec<Violation>) {
    from_nowhere(effects, found);
    checkpoints(effects, found);
    if let Some(last) = last {
        lost(effects, last, found);
        audit(effects, last, found);
    }
}

/// A job that is granted was enqueued, or at least sent.
fn from_nowhere(effects: &[Effect], found: &mut Vec<Violation>) {
    let mut sent: HashSet<JobId> = HashSet::new();
    for effect in effects {
        if let Op::Enqueue { jobs, .. } = &effect.op {
            sent.extend(jobs.iter().map(|job| job.id));
        }
    }
    for effect in effects {
        if let Some(Answer::Claimed { grants, .. }) = &effect.answer {
            for lease in grants.iter().flat_map(|grant| &grant.leases) {
                if !sent.contains(&lease.job) {
                    let violation = Violation::new(Rule::JobFromNowhere, effect.events(), "");
                    found.push(violation.job(lease.job).token(lease.token));
                }
            }
        }
    }
}

/// An acknowledged job is there, or something on record took it away.
fn lost(effects: &[Effect], last: &Final, found: &mut Vec<Violation>) {
    let there: HashSet<JobId> = last.jobs.iter().map(|(id, _)| *id).collect();
    let mut completed: HashSet<JobId> = HashSet::new();
    let mut purged: HashSet<JobId> = HashSet::new();
    let mut purged_queues: HashSet<&QueueName> = HashSet::new();
    let mut pruned = false;
    for effect in effects {
        match (&effect.op, &effect.answer) {
            (Op::Settle(note), answer) => {
                let held = |at: usize| match answer {
                    Some(Answer::Settled(verdicts)) => {
                        verdicts.get(at).is_some_and(|v| v.is_held())
                    }
                    _ => true,
                };
                let ends = note.settlements.iter().enumerate();
                let done =
                    ends.filter(|(at, (_, ending))| *ending == Ending::Complete && held(*at));
                completed.extend(done.map(|(_, (receipt, _))| receipt.job));
            }
            (Op::Control { command, .. }, answer) => {
                let acted = !matches!(answer, Some(Answer::Controlled(did)) if did.done == 0);
                match command {
                    ControlCommand::Purge(Select::Job(id)) if acted => {
                        purged.insert(*id);
                    }
                    ControlCommand::Purge(Select::State { queue, .. }) if acted => {
                        purged_queues.insert(queue);
                    }
                    _ => {}
                }
            }
            (Op::Prune { .. }, answer) => pruned |= !matches!(answer, Some(Answer::Pruned(0))),
            _ => {}
        }
    }
    for effect in effects {
        let (Op::Enqueue { jobs, .. }, Some(Answer::Enqueued(answers))) =
            (&effect.op, &effect.answer)
        else {
            continue;
        };
        for (job, answer) in jobs.iter().zip(answers) {
            let excused = !matches!(answer, Enqueued::New(_))
                || there.contains(&job.id)
                || completed.contains(&job.id)
                || purged.contains(&job.id)
                || purged_queues.contains(&job.queue)
                || pruned;
            if !excused {
                let detail = "acknowledged, and neither there nor ended on record";
                let violation = Violation::new(Rule::JobLost, effect.events(), detail);
                found.push(violation.job(job.id));
            }
        }
    }
}

/// Saved state never goes back in (token, seq), and reaches the next claim.
fn checkpoints(effects: &[Effect], found: &mut Vec<Violation>) {
    type Saved<'a> = (&'a Effect, (FencingToken, u64));
    let mut saved: HashMap<JobId, Vec<Saved<'_>>> = HashMap::new();
    for effect in effects {
        let (Op::Checkpoint { checkpoints, .. }, Some(Answer::Checkpointed(answers))) =
            (&effect.op, &effect.answer)
        else {
            continue;
        };
        for ((receipt, seq), answer) in checkpoints.iter().zip(answers) {
            if !matches!(answer, Checkpointed::Saved { .. }) {
                continue;
            }
            let state = (receipt.token, *seq);
            let all = saved.entry(receipt.job).or_default();
            for (before, was) in all.iter() {
                if before.known_end() < effect.start && *was > state {
                    let events = [before.events(), effect.events()].concat();
                    let detail = format!("{state:?} after {was:?}");
                    let violation = Violation::new(Rule::CheckpointWentBack, events, detail);
                    found.push(violation.job(receipt.job).token(receipt.token));
                }
            }
            all.push((effect, state));
        }
    }
    for effect in effects {
        let Some(Answer::Claimed { grants, .. }) = &effect.answer else {
            continue;
        };
        for lease in grants.iter().flat_map(|grant| &grant.leases) {
            for (before, was) in saved.get(&lease.job).into_iter().flatten() {
                // Only what was saved under an earlier lease can be said to be lost here.
                let earlier = before.known_end() < effect.start && was.0 < lease.token;
                if earlier && lease.checkpoint.is_none_or(|got| got < *was) {
                    let events = [before.events(), effect.events()].concat();
                    let detail = format!("saved {was:?}, got {:?}", lease.checkpoint);
                    let violation = Violation::new(Rule::CheckpointLost, events, detail);
                    found.push(violation.job(lease.job).token(lease.token));
                }
            }
        }
    }
}

/// Every command is on record with who and why, and nothing else is.
fn audit(effects: &[Effect], last: &Final, found: &mut Vec<Violation>) {
    let mut records: Vec<&AuditView> = last.audit.iter().collect();
    let mut perhaps: Vec<(&str, &str, String)> = Vec::new();
    for effect in effects {
        let Op::Control {
            actor,
            reason,
            command,
            ..
        } = &effect.op
        else {
            continue;
        };
        let command = command.to_string();
        let Some(Answer::Controlled(did)) = &effect.answer else {
            perhaps.push((actor, reason, command));
            continue;
        };
        let same = records.iter().position(|record| {
            record.actor == *actor
                && record.reason == *reason
                && record.command == command
                && record.done == did.done
        });
        if let Some(at) = same {
            records.swap_remove(at);
        } else {
            let detail = format!("{actor}: {command} ({reason})");
            let rule = Rule::CommandNotOnRecord;
            found.push(Violation::new(rule, effect.events(), detail));
        }
    }
    for record in records {
        let same = perhaps.iter().position(|(actor, reason, command)| {
            record.actor == *actor && record.reason == *reason && record.command == *command
        });
        if let Some(at) = same {
            perhaps.swap_remove(at);
        } else {
            let detail = format!("{}: {} ({})", record.actor, record.command, record.reason);
            found.push(Violation::new(Rule::RecordFromNowhere, Vec::new(), detail));
        }
    }
}

/// Whether a verdict let the call take effect.
pub(super) fn held(verdicts: &[Verdict], at: usize) -> bool {
    verdicts.get(at).is_some_and(|verdict| verdict.is_held())
}
