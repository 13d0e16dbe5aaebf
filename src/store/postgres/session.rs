//! Sessions: the names under which calls are repeated, and the database in which they are kept.

use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::fault::Done;
use super::tx::{Tx, args};
use crate::store::SessionId;

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn open_session(&self) -> Done<SessionId> {
        let args = args![self.base.namespace => TEXT, self.base.by_hand() => INT8];
        let id: Uuid = self.row("open_session", args).await?.try_get(0)?;
        Ok(SessionId::from_bytes(id.into_bytes()))
    }

    /// Which database this is.
    pub(super) async fn whose(&self) -> Done<Uuid> {
        Ok(self.row("whose", &[]).await?.try_get(0)?)
    }
}
