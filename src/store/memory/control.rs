//! control: what operators do, each time on record.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Place, State};
use crate::clock::Timestamp;
use crate::inspect::AuditView;
use crate::job::{JobId, JobState};
use crate::lease::FencingToken;
use crate::rules::ends::{self, Next};
use crate::store::{ControlCommand, ControlRequest, Controlled, LeaseSelect, Select};

/// Tokens listed in one audit record.
const AUDIT_TOKENS: usize = 100;

impl State {
    pub(super) fn control(&mut self, request: &ControlRequest, now: Timestamp) -> Controlled {
        let mut tokens = Vec::new();
        let answer = match &request.command {
            ControlCommand::Pause(queue) => self.set_paused(queue, true),
            ControlCommand::Resume(queue) => self.set_paused(queue, false),
            ControlCommand::Configure { queue, relaxed } => {
                let queue = self.queue(queue);
                self.queues[queue].relaxed = *relaxed;
                Controlled {
                    done: 1,
                    ..Controlled::default()
                }
            }
            ControlCommand::Revoke(leases) => {
                self.revoke(leases, &request.reason, now, &mut tokens)
            }
            ControlCommand::Cancel(jobs) => self.each(jobs, |state, id| state.cancel(id, now)),
            ControlCommand::Purge(jobs) => self.each(jobs, Self::purge),
            ControlCommand::Reschedule { jobs, delay } => self.each(jobs, |state, id| {
                state.reschedule(id, now, now.after(*delay))
            }),
            ControlCommand::RetryDead(jobs) => self.retry_dead(jobs, now),
        };
        self.audit.push(AuditView {
            at: now,
            actor: request.actor.clone(),
            reason: request.reason.clone(),
            command: request.command.to_string(),
            done: answer.done,
            tokens,
        });
        answer
    }

    fn set_paused(&mut self, queue: &crate::job::QueueName, paused: bool) -> Controlled {
        let queue = self.queue(queue);
        let at = &mut self.queues[queue];
        at.paused = paused;
        if !paused {
            let name = at.name.clone();
            self.bells.push((name.clone(), false, usize::MAX));
            self.bells.push((name, true, usize::MAX));
        }
        Controlled {
            done: 1,
            ..Controlled::default()
        }
    }

    fn selected(&self, jobs: &Select) -> Vec<JobId> {
        match jobs {
            Select::Job(id) => self.places.get(id).map(|_| *id).into_iter().collect(),
            Select::State { queue, state, max } => self.ids(queue, *state).take(*max).collect(),
        }
    }

    /// Does something with each selected job; false leaves it alone.
    fn each(&mut self, jobs: &Select, mut act: impl FnMut(&mut Self, JobId) -> bool) -> Controlled {
        let mut answer = Controlled::default();
        for id in self.selected(jobs) {
            let done = act(self, id);
            answer.done += u64::from(done);
            answer.skipped += u64::from(!done);
        }
        answer
    }

    fn cancel(&mut self, id: JobId, now: Timestamp) -> bool {
        match self.place(id) {
            Some(Place::Leased { grant, token }) => {
                let held = self.grants.get_mut(&grant);
                let lease = held
                    .and_then(|held| held.leases.get_mut(super::offset(grant, token)?)?.as_mut());
                lease.is_some_and(|lease| !std::mem::replace(&mut lease.cancel, true))
            }
            None | Some(Place::Settled { .. }) => false,
            Some(_) => {
                let Some((queue, _, job)) = self.take(id) else {
                    return false;
                };
                if let Next::Settled { state, keep_until } =
                    ends::settled(&job, JobState::Cancelled, now)
                {
                    self.put_settled(queue, job, state, keep_until, now);
                }
                true
            }
        }
    }

    fn purge(&mut self, id: JobId) -> bool {
        let Some((queue, _, job)) = self.take(id) else {
            return false;
        };
        self.free_unique(queue, &job);
        self.free_exclusive(queue, &job);
        self.queues[queue].ledger.purged += 1;
        true
    }

    fn reschedule(&mut self, id: JobId, now: Timestamp, run_at: Timestamp) -> bool {
        if matches!(
            self.place(id),
            None | Some(Place::Settled { .. } | Place::Leased { .. })
        ) {
            return false;
        }
        let Some((queue, _, mut job)) = self.take(id) else {
            return false;
        };
        self.free_exclusive(queue, &job);
        Arc::make_mut(&mut job).run_at = run_at;
        if run_at <= now {
            self.join(queue, job);
        } else {
            self.put_scheduled(queue, job);
        }
        true
    }

    fn retry_dead(&mut self, jobs: &Select, now: Timestamp) -> Controlled {
        let mut answer = Controlled::default();
        for id in self.selected(jobs) {
            let Some(Place::Settled {
                queue,
                state: JobState::Dead,
                at,
                seq,
            }) = self.place(id)
            else {
                answer.skipped += 1;
                continue;
            };
            let dead = self.queues[queue].settled.get(&(JobState::Dead, at, seq));
            let Some(job) = dead.map(|kept| Arc::clone(&kept.job)) else {
                continue;
            };
            if let Some(holder) = self.take_unique(queue, &job, now) {
                answer.duplicates.push((id, holder));
                continue;
            }
            if let Some((queue, _, mut job)) = self.take(id) {
                ends::revive(Arc::make_mut(&mut job), now);
                self.join(queue, job);
                answer.done += 1;
            }
        }
        answer
    }

    fn revoke(
        &mut self,
        leases: &LeaseSelect,
        reason: &str,
        now: Timestamp,
        tokens: &mut Vec<FencingToken>,
    ) -> Controlled {
        let mut found = BTreeMap::new();
        for (&id, grant) in &self.grants {
            let all = match leases {
                LeaseSelect::Owner(owner) => *owner == grant.owner,
                LeaseSelect::Task(task) => *task == grant.task,
                LeaseSelect::Job(_) => false,
            };
            for (lease, at) in grant.leases.iter().zip(0..) {
                let Some(lease) = lease else { continue };
                if all || matches!(leases, LeaseSelect::Job(job) if *job == lease.job.id) {
                    let step = ends::revoke(&lease.job, reason, lease.cancel, now);
                    found.insert(id.plus(at), (id, step));
                }
            }
        }
        let done = found.len() as u64;
        tokens.extend(found.keys().copied().take(AUDIT_TOKENS));
        for (token, (id, step)) in found {
            self.end(id, token, step, now);
        }
        Controlled {
            done,
            ..Controlled::default()
        }
    }
}
