//! reap: expire overdue leases, the oldest first.

use super::State;
use crate::clock::Timestamp;
use crate::lease::FencingToken;
use crate::rules::ends;
use crate::rules::order::overdue_cause;
use crate::store::Expiry;

impl State {
    pub(super) fn reap(&mut self, max: usize, now: Timestamp) -> Vec<Expiry> {
        self.begin_step();
        let mut expired = Vec::new();
        while expired.len() < max {
            let queues = 0..self.queues.len();
            let oldest = queues.filter_map(|queue| self.oldest_overdue(queue, now));
            let Some((_, grant)) = oldest.min() else {
                break;
            };
            self.expire_grant(grant, max, now, &mut expired);
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
        self.begin_step();
        let mut expired = Vec::new();
        while expired.len() < max {
            let Some((_, grant)) = self.oldest_overdue(queue, now) else {
                break;
            };
            self.expire_grant(grant, max, now, &mut expired);
        }
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
    ) {
        let Some(grant) = self.grants.get(&id) else {
            return;
        };
        let queue = self.queues[grant.queue].name.clone();
        let cause = overdue_cause(grant.deadline, grant.granted_at, grant.max_lifetime);
        let leases = grant.live_leases(id).take(max - expired.len());
        let facts = leases.map(|(token, lease)| grant.facts(token, lease));
        for lease in facts.collect::<Vec<_>>() {
            let Some((job, cancel)) = self.take_leased(id, lease.token) else {
                continue;
            };
            let end = ends::expire(&job, cause, cancel, now);
            expired.push(Expiry::new(&queue, &job, &lease, cause, &end));
            self.end((id, lease.token), job, end, now);
        }
    }
}
