//! remove: delete a queue that has no jobs. A command of `control`, with a statement of its own.

use serde::Deserialize;
use tokio_postgres::GenericClient;

use super::fault::{Done, Fault};
use super::record::Json;
use super::tally::Count;
use super::tx::{Named, Tx, args, plain};
use crate::inspect::Counts;
use crate::job::QueueName;
use crate::limits::REASON_BYTES;
use crate::rules::issue::forgets_tokens;
use crate::store::call::check_empty;
use crate::store::{ControlRequest, Controlled};

#[derive(Deserialize)]
struct Removed {
    done: u64,
    left: Option<Vec<u64>>,
    ahead: Option<u64>,
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn remove(
        &self,
        request: &ControlRequest,
        queue: &QueueName,
    ) -> Done<Controlled> {
        let named = Named::from(request.request);
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, request.actor => TEXT,
            plain(&request.reason, REASON_BYTES) => TEXT, queue.as_str() => TEXT,
            request.command.to_string() => TEXT, self.patience(named) => TEXT
        ];
        let Json(answer): Json<Removed> = self.row("remove", args).await?.try_get(0)?;
        if let Some(left) = answer.left {
            let count = |count: Count| left.get(count as usize).copied().unwrap_or(0);
            let counts = Counts {
                scheduled: count(Count::Scheduled),
                ready: count(Count::Ready),
                parked: count(Count::Parked),
                leased: count(Count::Leased),
                completed: count(Count::Completed),
                dead: count(Count::Dead),
                cancelled: count(Count::Cancelled),
            };
            check_empty(queue, &counts).map_err(Fault::Refused)?;
        }
        if answer.ahead.is_some() {
            return Err(Fault::Refused(forgets_tokens()));
        }
        Ok(Controlled {
            done: answer.done,
            ..Controlled::default()
        })
    }
}
