//! reap: expire overdue leases, the oldest first.

use rusqlite::params;

use super::fault::Done;
use super::session::garbled;
use super::tx::{Tx, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::JobState;
use crate::lease::{FencingToken, overdue_cause};
use crate::lifecycle::{self, Next};
use crate::store::{Expiry, ReapRequest};

impl Tx<'_> {
    pub(super) fn reap(&mut self, request: &ReapRequest, now: Timestamp) -> Done<Vec<Expiry>> {
        if let Some(first) = self.recall(request.request, Verb::Reap, now)? {
            return serde_json::from_slice(&first).map_err(|_| garbled());
        }
        let mut expired = Vec::new();
        for queue in self.overdue_queues(now)? {
            if expired.len() == request.max {
                break;
            }
            if let Some(queue) = self.queue_of(queue)? {
                let left = request.max - expired.len();
                expired.extend(self.expire_overdue(queue, left, now)?);
            }
        }
        let answer = serde_json::to_vec(&expired).map_err(|_| garbled())?;
        self.remember(request.request, Verb::Reap, &answer)?;
        Ok(expired)
    }

    /// The queues that have overdue grants, the one with the oldest first.
    fn overdue_queues(&mut self, now: Timestamp) -> Done<Vec<i64>> {
        let mut select = self.sql("queue_ids")?;
        let ids: Vec<i64> = select
            .query_map([self.namespace], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        self.save_grants()?;
        let mut oldest = Vec::new();
        for id in ids {
            let mut select = self.sql("oldest_overdue")?;
            let mut rows = select.query(params![id, time(now)])?;
            if let Some(row) = rows.next()? {
                oldest.push((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, id));
            }
        }
        oldest.sort_unstable();
        Ok(oldest.into_iter().map(|(_, _, id)| id).collect())
    }

    /// Expires up to `max` overdue leases of a queue, by (deadline, token).
    pub(super) fn expire_overdue(
        &mut self,
        queue: usize,
        max: usize,
        now: Timestamp,
    ) -> Done<Vec<Expiry>> {
        let mut expired = Vec::new();
        let at = &self.queues[queue];
        if at.counts.leased == 0 {
            return Ok(expired);
        }
        // Each of them has at least one live lease, so this many are enough.
        let overdue: Vec<i64> = self
            .sql("overdue")?
            .query_map(params![at.id, time(now), max as i64], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        let mut front = Vec::new();
        for id in overdue.into_iter().map(|id| FencingToken::new(id as u64)) {
            let left = max - expired.len();
            let Some(held) = self.held(id)?.filter(|_| left > 0) else {
                break;
            };
            let cause = overdue_cause(held.deadline, held.granted_at, held.max_lifetime);
            let living: Vec<usize> = held.living().take(left).collect();
            for lease in living {
                let Some((facts, job)) = self.leased(id, lease)? else {
                    continue;
                };
                let step = lifecycle::expire(&job, cause, facts.cancel, now);
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
                    state: match step.next {
                        Next::Settled { state, .. } => state,
                        _ => JobState::Ready,
                    },
                });
                front.extend(self.end(queue, id, &facts, job, step, now)?);
            }
        }
        self.put_front(queue, front)?;
        // What follows looks for grants by their deadlines.
        self.save_grants()?;
        Ok(expired)
    }
}
