//! reap: expire overdue leases, the oldest first.

use super::State;
use crate::clock::Timestamp;
use crate::job::JobState;
use crate::lease::overdue_cause;
use crate::lifecycle::{self, Next};
use crate::store::Expiry;

impl State {
    pub(super) fn reap(&mut self, max: usize, now: Timestamp) -> Vec<Expiry> {
        let mut expired = Vec::new();
        while expired.len() < max {
            let oldest = self.queues.iter().enumerate().filter_map(|(queue, at)| {
                at.deadlines
                    .first()
                    .filter(|(deadline, _)| *deadline <= now)
                    .map(|first| (first, queue))
            });
            let Some((_, queue)) = oldest.min() else {
                break;
            };
            expired.extend(self.expire_overdue(queue, max - expired.len(), now));
        }
        expired
    }

    /// Expires up to `max` overdue leases of a queue, by (deadline, token).
    pub(super) fn expire_overdue(
        &mut self,
        queue: usize,
        max: usize,
        now: Timestamp,
    ) -> Vec<Expiry> {
        let mut expired = Vec::new();
        let mut front = Vec::new();
        while expired.len() < max {
            let oldest = self.queues[queue].deadlines.first().copied();
            let Some((deadline, id)) = oldest.filter(|(deadline, _)| *deadline <= now) else {
                break;
            };
            let Some(grant) = self.grants.get(&id) else {
                break;
            };
            let cause = overdue_cause(deadline, grant.granted_at, grant.max_lifetime);
            let live = grant.leases.iter().zip(0..);
            let overdue: Vec<_> = live
                .filter_map(|(lease, at)| {
                    let lease = lease.as_ref()?;
                    Some((grant.facts(id.plus(at), lease), lease.job.clone()))
                })
                .take(max - expired.len())
                .collect();
            for (facts, job) in overdue {
                let step = lifecycle::expire(&job, cause, facts.cancel, now);
                let state = match step.next {
                    Next::Settled { state, .. } => state,
                    _ => JobState::Ready,
                };
                expired.push(Expiry {
                    queue: self.queues[queue].name.clone(),
                    job: job.id,
                    kind: job.kind.clone(),
                    token: facts.token,
                    owner: facts.owner.clone(),
                    task: facts.task.clone(),
                    cause,
                    progress: facts.progress.clone(),
                    expiries: job.expiries + 1,
                    state,
                });
                front.extend(self.end(id, &facts, step, now));
            }
        }
        self.put_front(queue, front);
        expired
    }
}
