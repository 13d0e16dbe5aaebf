//! prune: delete settled jobs past their retention, and unique keys past their window.

use tokio_postgres::{GenericClient, Row};

use super::fault::{Done, garbled};
use super::tally::Count;
use super::tx::{Tx, args, time};
use crate::error::Verb;
use crate::store::{PruneKeys, PruneRequest};

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// Up to `max` jobs, and as many keys. Tells how many jobs, and whether keys may be left.
    pub(super) async fn prune(&mut self, request: &PruneRequest) -> Done<(u64, bool)> {
        let ((), recalled, queues, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request.request),
            self.queue_ids(),
            self.clock()
        )?;
        self.now = now;
        if let Some(first) = self.recalled(request.request, Verb::Prune, &recalled)? {
            let pruned = first.first_chunk().ok_or_else(garbled)?;
            return Ok((u64::from_le_bytes(*pruned), true));
        }
        let before = time(now.before(request.overdue));
        let mut pruned = 0;
        for row in &queues {
            let id: i32 = row.try_get(0)?;
            let left = (request.max - pruned) as i64;
            let ((), gone) = tokio::try_join!(biased;
                async { self.run("fold", args![id => INT4]).await },
                async {
                    let args = args![id => INT4, before => INT8, left => INT8];
                    self.rows("take_kept", args).await
                }
            )?;
            if gone.is_empty() {
                continue;
            }
            pruned += gone.len();
            if let Some(queue) = self.queue_of_row(id).await? {
                self.count(queue, Count::Pruned, gone.len() as i64);
                for row in gone {
                    let state: i16 = row.try_get(0)?;
                    self.count(queue, Count::aside(state.into()), -1);
                }
            }
        }
        let more = self.take_keys(&queues, &request.keys()).await?;
        let pruned = pruned as u64;
        self.remember(request.request, Verb::Prune, pruned.to_le_bytes().to_vec());
        Ok((pruned, more))
    }

    /// Up to `max` keys. Tells whether there may be more. It needs no request id: a key whose window
    /// is over is nobody's.
    pub(super) async fn prune_keys(&mut self, keys: &PruneKeys) -> Done<bool> {
        let ((), queues, now) =
            tokio::try_join!(biased; self.begin(), self.queue_ids(), self.clock())?;
        self.now = now;
        self.take_keys(&queues, keys).await
    }

    async fn take_keys(&self, queues: &[Row], keys: &PruneKeys) -> Done<bool> {
        let before = time(self.now.before(keys.overdue));
        let mut left = keys.max;
        for row in queues {
            let id: i32 = row.try_get(0)?;
            let args = args![id => INT4, before => INT8, left as i64 => INT8];
            left -= self.rows("unique_past", args).await?.len();
        }
        Ok(left == 0)
    }

    async fn queue_ids(&self) -> Done<Vec<Row>> {
        let args = args![self.base.namespace => TEXT];
        self.rows("queue_ids", args).await
    }
}
