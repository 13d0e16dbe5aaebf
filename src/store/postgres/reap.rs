//! reap: expire overdue leases, the oldest first.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::record::Json;
use super::tx::{Named, Tx, args};
use crate::store::{Expiry, ReapRequest};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn reap(&self, request: &ReapRequest) -> Done<Vec<Expiry>> {
        let named = Named::from(request.request);
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, request.max as i32 => INT4,
            self.patience(named) => TEXT
        ];
        let Json(expired) = self.row("reap", args).await?.try_get(0)?;
        Ok(expired)
    }
}
