//! prune: delete settled jobs past their retention, and unique keys past their window.

use tokio_postgres::GenericClient;

use super::fault::{Done, garbled};
use super::tally::Count;
use super::tx::{Tx, args, time};
use crate::error::Verb;
use crate::store::PruneRequest;

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn prune(&mut self, request: &PruneRequest) -> Done<u64> {
        let ((), recalled, queues, now) = tokio::try_join!(biased;
            self.begin(),
            self.recall(request.request),
            async {
                self.rows("queue_ids", args![self.base.namespace => TEXT])
                    .await
            },
            self.clock()
        )?;
        self.now = now;
        if let Some(first) = self.recalled(request.request, Verb::Prune, &recalled)? {
            let pruned = first.first_chunk().ok_or_else(garbled)?;
            return Ok(u64::from_le_bytes(*pruned));
        }
        let before = time(now.before(request.overdue));
        let mut pruned = 0;
        for row in queues {
            let id: i32 = row.try_get(0)?;
            let left = (request.max - pruned) as i64;
            let ((), (), gone) = tokio::try_join!(biased;
                async { self.run("fold", args![id => INT4]).await },
                async {
                    let args = args![id => INT4, before => INT8];
                    self.run("unique_past", args).await
                },
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
        let pruned = pruned as u64;
        self.remember(request.request, Verb::Prune, pruned.to_le_bytes().to_vec());
        Ok(pruned)
    }
}
