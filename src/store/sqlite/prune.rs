//! prune: delete settled jobs past their retention, and unique keys past their window.
//!
//! An index on the end of the retention finds the jobs in that order; dead ones are not in it.

use rusqlite::params;

use super::fault::Done;
use super::tx::{Tx, garbled, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::store::{PruneKeys, PruneRequest};

statements! {
    UNIQUE_PAST = "
        DELETE FROM leasehold_unique WHERE (queue, key) IN (
            SELECT queue, key FROM leasehold_unique INDEXED BY leasehold_unique_until
            WHERE queue = ?1 AND until IS NOT NULL AND until <= ?2 ORDER BY until LIMIT ?3)";
    KEPT_PAST = "
        SELECT row, state FROM leasehold_aside INDEXED BY leasehold_aside_kept
        WHERE queue = ?1 AND keep_until IS NOT NULL AND keep_until <= ?2
        ORDER BY keep_until, row LIMIT ?3";
}

impl Tx<'_> {
    /// Up to `max` jobs, and as many keys. Tells how many jobs, and whether keys may be left.
    pub(super) fn prune(&mut self, request: &PruneRequest, now: Timestamp) -> Done<(u64, bool)> {
        if let Some(first) = self.recall(request.request, Verb::Prune, now)? {
            let pruned = first.first_chunk().ok_or_else(garbled)?;
            return Ok((u64::from_le_bytes(*pruned), true));
        }
        let before = time(now.before(request.overdue));
        let mut pruned = 0;
        for id in self.queue_ids()? {
            let past: Vec<(i64, i64)> = self
                .sql(KEPT_PAST)?
                .query_map(params![id, before, (request.max - pruned) as i64], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })?
                .collect::<Result<_, _>>()?;
            let Some(queue) = self.queue_of(id)?.filter(|_| !past.is_empty()) else {
                continue;
            };
            pruned += past.len();
            self.at(queue).ledger.pruned += past.len() as u64;
            for (row, state) in past {
                self.take_aside(queue, row, state)?;
            }
        }
        let pruned = pruned as u64;
        self.remember(request.request, Verb::Prune, &pruned.to_le_bytes())?;
        Ok((pruned, self.prune_keys(&request.keys(), now)?))
    }

    /// Up to `max` keys. Tells whether there may be more. It needs no request id: a key whose
    /// window is over belongs to no job.
    pub(super) fn prune_keys(&mut self, keys: &PruneKeys, now: Timestamp) -> Done<bool> {
        let before = time(now.before(keys.overdue));
        let mut left = keys.max;
        for id in self.queue_ids()? {
            let mut delete = self.sql(UNIQUE_PAST)?;
            left -= delete.execute(params![id, before, left as i64])?;
        }
        Ok(left == 0)
    }
}
