//! prune: delete settled jobs past their retention, and unique keys past their window.

use rusqlite::params;

use super::fault::Done;
use super::place::count_of;
use super::session::garbled;
use super::tx::{Tx, time};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::store::PruneRequest;

impl Tx<'_> {
    pub(super) fn prune(&mut self, request: &PruneRequest, now: Timestamp) -> Done<u64> {
        if let Some(first) = self.recall(request.request, Verb::Prune, now)? {
            let pruned = first.first_chunk().ok_or_else(garbled)?;
            return Ok(u64::from_le_bytes(*pruned));
        }
        let before = time(now.before(request.overdue));
        let queues: Vec<i64> = self
            .sql("queue_ids")?
            .query_map([self.namespace], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        let mut pruned = 0;
        for id in queues {
            self.sql("unique_past")?.execute(params![id, before])?;
            let past: Vec<(i64, i64)> = self
                .sql("kept_past")?
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
                self.sql("take_aside")?.execute([row])?;
                *count_of(&mut self.at(queue).counts, state) -= 1;
            }
        }
        let pruned = pruned as u64;
        self.remember(request.request, Verb::Prune, &pruned.to_le_bytes())?;
        Ok(pruned)
    }
}
