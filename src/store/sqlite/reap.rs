//! reap: expire overdue leases, the oldest first.
//!
//! Two reapers are two transactions, so no expiry is counted twice.

use std::collections::BTreeMap;

use rusqlite::params;

use super::fault::Done;
use super::tx::{Tx, garbled, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::JobRecord;
use crate::lease::FencingToken;
use crate::rules::ends;
use crate::rules::order::overdue_cause;
use crate::store::{Expiry, ReapRequest};

statements! {
    OVERDUE = "
        SELECT deadline, id FROM leasehold_grants WHERE queue = ?1 AND deadline <= ?2
        ORDER BY deadline, id LIMIT ?3";
}

/// Jobs of one step that go to the front, with the token that each had.
type Front = Vec<(FencingToken, JobRecord)>;

impl Tx<'_> {
    pub(super) fn reap(&mut self, request: &ReapRequest, now: Timestamp) -> Done<Vec<Expiry>> {
        if let Some(first) = self.recall(request.request, Verb::Reap, now)? {
            return serde_json::from_slice(&first).map_err(|_| garbled());
        }
        self.save_grants()?;
        let mut overdue = Vec::new();
        for id in self.queue_ids()? {
            overdue.extend(self.overdue(id, request.max, now)?);
        }
        overdue.sort_unstable();
        let mut expired = Vec::new();
        let mut fronts = BTreeMap::<usize, Front>::new();
        for (_, grant) in overdue {
            if let Some(held) = self.held(grant)? {
                let front = fronts.entry(held.queue).or_default();
                self.expire_grant(grant, request.max, now, &mut expired, front)?;
            }
        }
        for (queue, front) in fronts {
            self.put_front(queue, front)?;
        }
        let answer = serde_json::to_vec(&expired).map_err(|_| garbled())?;
        self.remember(request.request, Verb::Reap, &answer)?;
        Ok(expired)
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
        let mut front = Front::new();
        for (_, grant) in self.overdue(at.id, max, now)? {
            self.expire_grant(grant, max, now, &mut expired, &mut front)?;
        }
        self.put_front(queue, front)?;
        // What follows looks for grants by their deadlines.
        self.save_grants()?;
        Ok(expired)
    }

    /// The overdue grants of a queue by (deadline, token). Each has a live lease, so that `max` of
    /// them are enough for `max` leases.
    fn overdue(&mut self, of: i64, max: usize, now: Timestamp) -> Done<Vec<(i64, FencingToken)>> {
        let mut select = self.sql(OVERDUE)?;
        let overdue = select.query_map(params![of, time(now), max as i64], |row| {
            Ok((row.get(0)?, FencingToken::new(row.get::<_, i64>(1)? as u64)))
        })?;
        Ok(overdue.collect::<Result<_, _>>()?)
    }

    /// Expires the leases of an overdue grant in token order, until `expired` has `max`.
    fn expire_grant(
        &mut self,
        grant: FencingToken,
        max: usize,
        now: Timestamp,
        expired: &mut Vec<Expiry>,
        front: &mut Front,
    ) -> Done<()> {
        let Some(held) = self.held(grant)? else {
            return Ok(());
        };
        let queue = held.queue;
        let cause = overdue_cause(held.deadline, held.granted_at, held.max_lifetime);
        let living: Vec<usize> = held.living().take(max - expired.len()).collect();
        for at in living {
            let Some((facts, job)) = self.leased(grant, at)? else {
                continue;
            };
            let end = ends::expire(&job, cause, facts.cancel, now);
            let name = &self.queues[queue].name;
            expired.push(Expiry::new(name, &job, &facts, cause, &end));
            front.extend(self.end(queue, grant, &facts, job, end, now)?);
        }
        Ok(())
    }
}
