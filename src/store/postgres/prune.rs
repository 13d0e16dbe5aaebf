//! prune: delete settled jobs past their retention, and unique keys past their window.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::tx::{Named, Tx, args};
use crate::clock::micros;
use crate::store::{PruneKeys, PruneRequest};

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// Up to `max` jobs, and as many keys. Tells how many jobs, and whether keys may be left.
    pub(super) async fn prune(&self, request: &PruneRequest) -> Done<(u64, bool)> {
        let named = Named::from(request.request);
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, micros(request.overdue).cast_signed() => INT8,
            request.max as i32 => INT4, self.patience(named) => TEXT
        ];
        let row = self.row("prune", args).await?;
        let pruned: i64 = row.try_get(0)?;
        Ok((pruned.cast_unsigned(), row.try_get(1)?))
    }

    /// Adds up the counts of one queue: the next one after `after`. None: there is none left.
    pub(super) async fn add_up(&self, after: i32) -> Done<Option<i32>> {
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, after => INT4
        ];
        Ok(self.row("add_up", args).await?.try_get(0)?)
    }

    /// Up to `max` keys. Tells whether there may be more.
    pub(super) async fn prune_keys(&self, keys: &PruneKeys) -> Done<bool> {
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8,
            micros(keys.overdue).cast_signed() => INT8, keys.max as i32 => INT4
        ];
        Ok(self.row("prune_keys", args).await?.try_get(0)?)
    }
}
