//! reap: expire overdue leases, the oldest first.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::State;
use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::lease::FencingToken;
use crate::rules::ends;
use crate::rules::order::overdue_cause;
use crate::store::Expiry;

/// Jobs of one step that go to the front, with the token that each had.
type Front = Vec<(FencingToken, Arc<JobRecord>)>;

impl State {
    pub(super) fn reap(&mut self, max: usize, now: Timestamp) -> Vec<Expiry> {
        let mut expired = Vec::new();
        let mut fronts = BTreeMap::<usize, Front>::new();
        while expired.len() < max {
            let queues = 0..self.queues.len();
            let oldest = queues.filter_map(|queue| Some((self.oldest_overdue(queue, now)?, queue)));
            let Some(((_, grant), queue)) = oldest.min() else {
                break;
            };
            let front = fronts.entry(queue).or_default();
            self.expire_grant(grant, max, now, &mut expired, front);
        }
        for (queue, front) in fronts {
            self.put_front(queue, front);
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
        let mut front = Front::new();
        while expired.len() < max {
            let Some((_, grant)) = self.oldest_overdue(queue, now) else {
                break;
            };
            self.expire_grant(grant, max, now, &mut expired, &mut front);
        }
        self.put_front(queue, front);
        expired
    }

    fn oldest_overdue(&self, queue: usize, now: Timestamp) -> Option<(Timestamp, FencingToken)> {
        let oldest = self.queues[queue].deadlines.first().copied();
        oldest.filter(|(deadline, _)| *deadline <= now)
    }

    /// Expires the leases of an overdue grant in token order, until `expired` has `max`.
    fn expire_grant(
        &mut self,
        id: FencingToken,
        max: usize,
        now: Timestamp,
        expired: &mut Vec<Expiry>,
        front: &mut Front,
    ) {
        let Some(grant) = self.grants.get(&id) else {
            return;
        };
        let queue = grant.queue;
        let cause = overdue_cause(grant.deadline, grant.granted_at, grant.max_lifetime);
        let live = grant.leases.iter().zip(0..);
        let overdue: Vec<_> = live
            .filter_map(|(lease, at)| {
                let lease = lease.as_ref()?;
                Some((grant.facts(id.plus(at), lease), lease.job.clone()))
            })
            .take(max - expired.len())
            .collect();
        for (facts, job) in overdue {
            let step = ends::expire(&job, cause, facts.cancel, now);
            let name = &self.queues[queue].name;
            expired.push(Expiry::new(name, &job, &facts, cause, &step));
            front.extend(self.end(id, facts.token, step, now));
        }
    }
}
