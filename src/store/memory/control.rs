//! control: what operators do, each time on record.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::State;
use super::place::{Location, Queue, Stored};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::inspect::AuditView;
use crate::job::{JobId, JobState, QueueName};
use crate::lease::FencingToken;
use crate::limits::AUDIT_TOKENS;
use crate::rules::ends::{self, Next};
use crate::store::call::check_empty;
use crate::store::{ControlCommand, ControlRequest, Controlled, LeaseSelect, Select};

impl State {
    pub(super) fn control(
        &mut self,
        request: &ControlRequest,
        now: Timestamp,
    ) -> Result<Controlled> {
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
            ControlCommand::Remove(queue) => self.remove(queue)?,
        };
        self.audit.push(AuditView {
            at: now,
            actor: request.actor.clone(),
            reason: request.reason.clone(),
            command: request.command.to_string(),
            done: answer.done,
            tokens,
        });
        Ok(answer)
    }

    fn remove(&mut self, name: &QueueName) -> Result<Controlled> {
        let Some(&at) = self.names.get(name) else {
            return Ok(Controlled::default());
        };
        check_empty(name, &self.queues[at].counts())?;
        self.names.remove(name);
        // Its place stays: the others are known by theirs.
        self.queues[at] = Queue::new(name.clone());
        Ok(Controlled {
            done: 1,
            ..Controlled::default()
        })
    }

    fn set_paused(&mut self, queue: &QueueName, paused: bool) -> Controlled {
        let queue = self.queue(queue);
        self.queues[queue].paused = paused;
        if !paused {
            for suspects in [false, true] {
                let everybody = usize::MAX;
                self.wakeups.insert((queue, suspects), everybody);
            }
        }
        Controlled {
            done: 1,
            ..Controlled::default()
        }
    }

    fn selected(&self, jobs: &Select) -> Vec<JobId> {
        match jobs {
            Select::Job(id) => self.jobs.get(id).map(|_| *id).into_iter().collect(),
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
        let location = self.jobs.get(&id).map(|stored| stored.location);
        match location {
            None | Some(Location::Settled { .. }) => return false,
            Some(Location::Leased { grant, token }) => {
                let lease = self.lease_mut(grant, token);
                return lease.is_some_and(|lease| !std::mem::replace(&mut lease.cancel, true));
            }
            Some(_) => {}
        }
        let Some(Stored { queue, job, .. }) = self.take(id) else {
            return false;
        };
        let next = ends::settled(&job, JobState::Cancelled, now);
        if let Next::Settled { state, keep_until } = next {
            self.put_settled(queue, job, state, keep_until, now);
        }
        true
    }

    fn purge(&mut self, id: JobId) -> bool {
        let Some(Stored { queue, job, .. }) = self.take(id) else {
            return false;
        };
        self.free_unique(queue, &job);
        self.free_exclusive(queue, &job);
        self.queues[queue].ledger.purged += 1;
        true
    }

    fn reschedule(&mut self, id: JobId, now: Timestamp, run_at: Timestamp) -> bool {
        let location = self.jobs.get(&id).map(|stored| stored.location);
        if let None | Some(Location::Settled { .. } | Location::Leased { .. }) = location {
            return false;
        }
        let Some(Stored { queue, mut job, .. }) = self.take(id) else {
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
            let stored = self.jobs.get(&id);
            let dead = stored.filter(|stored| stored.location.state() == JobState::Dead);
            let Some((queue, job)) = dead.map(|dead| (dead.queue, Arc::clone(&dead.job))) else {
                answer.skipped += 1;
                continue;
            };
            if let Some(holder) = self.take_unique(queue, &job, now) {
                answer.duplicates.push((id, holder));
                continue;
            }
            if let Some(Stored { mut job, .. }) = self.take(id) {
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
            for (token, lease) in grant.live_leases(id) {
                let named = matches!(leases, LeaseSelect::Job(job) if *job == lease.job);
                if all || named {
                    found.insert(token, id);
                }
            }
        }
        let done = found.len() as u64;
        tokens.extend(found.keys().copied().take(AUDIT_TOKENS));
        for (token, id) in found {
            let Some((job, cancel)) = self.take_leased(id, token) else {
                continue;
            };
            let end = ends::revoke(&job, reason, cancel, now);
            self.end((id, token), job, end, now);
        }
        Controlled {
            done,
            ..Controlled::default()
        }
    }
}
