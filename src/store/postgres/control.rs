//! control: what operators do, each time on record.

use tokio_postgres::GenericClient;

use super::fault::Done;
use super::record::Json;
use super::tx::{Named, Tx, args, plain};
use crate::limits::REASON_BYTES;
use crate::store::{ControlCommand, ControlRequest, Controlled};

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn control(&self, request: &ControlRequest) -> Done<Controlled> {
        if let ControlCommand::Remove(queue) = &request.command {
            return self.remove(request, queue).await;
        }
        let named = Named::from(request.request);
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, request.actor => TEXT,
            plain(&request.reason, REASON_BYTES) => TEXT, Json(&request.command) => JSONB,
            request.command.to_string() => TEXT, self.patience(named) => TEXT
        ];
        let Json(answer) = self.row("control", args).await?.try_get(0)?;
        Ok(answer)
    }
}
