//! claim: expire what is overdue, promote what is due, grant.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_postgres::{GenericClient, Row};

use super::fault::{Done, corrupt};
use super::record::{Json, record};
use super::tx::{Named, Tx, args, moment};
use crate::clock::nanos;
use crate::lease::{FencingToken, Grant, Lease};
use crate::rules::issue::WhenBehind;
use crate::store::{ClaimRequest, Claimed, Expiry};

/// Where the columns of the job begin, and those of the last row, which is about the claim.
const JOB: usize = 6;
const SUM: usize = JOB + 20;

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// Tells also whether all leases were granted that were asked for.
    pub(super) async fn claim(
        &self,
        request: &ClaimRequest,
        is_repeat: bool,
    ) -> Done<(Claimed, bool)> {
        let of_call = Named::from(request.request);
        let wanted = request.queues.iter();
        let names: Vec<&str> = wanted.clone().map(|q| q.queue.as_str()).collect();
        let terms: Vec<i64> = wanted.clone().map(|q| nanos(q.term)).collect();
        let lifetimes: Vec<i64> = wanted.map(|q| nanos(q.max_lifetime)).collect();
        let seen = self.base.seen.load(Ordering::Relaxed).cast_signed();
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, of_call.session => UUID,
            of_call.lane => INT8, of_call.seq => INT8, &*request.owner => TEXT, &*request.task => TEXT,
            &request.nonce.as_bytes()[..] => BYTEA, names => TEXT_ARRAY, terms => INT8_ARRAY,
            lifetimes => INT8_ARRAY, request.max as i32 => INT4, request.admit_suspect => BOOL,
            seen => INT8, (self.base.when_behind == WhenBehind::Refuse) => BOOL,
            self.patience(of_call) => TEXT, is_repeat => BOOL
        ];
        let rows = self.rows("claim", args).await?;
        let Some((sum, leases)) = rows.split_last() else {
            return Err(corrupt("no answer"));
        };
        let mut claimed = Claimed::default();
        for row in leases {
            self.lease(request, row, &mut claimed)?;
        }
        let span = |at: usize| -> Done<Option<Duration>> {
            let micros: Option<i64> = sum.try_get(SUM + at)?;
            let ahead = micros.map(|micros| micros.max(0).cast_unsigned());
            Ok(ahead.map(Duration::from_micros))
        };
        claimed.next_due = span(0)?;
        claimed.next_deadline = span(1)?;
        claimed.clock_behind = span(2)?;
        let Json(expired): Json<Vec<Expiry>> = sum.try_get(SUM + 3)?;
        claimed.expired = expired;
        Ok((claimed, sum.try_get(SUM + 4)?))
    }

    fn lease(&self, request: &ClaimRequest, row: &Row, claimed: &mut Claimed) -> Done<()> {
        let nth: i32 = row.try_get(0)?;
        let number =
            |at: usize| Ok::<u64, super::fault::Fault>(row.try_get::<_, i64>(at)?.cast_unsigned());
        let id = FencingToken::new(number(1)?);
        let of = usize::try_from(nth - 1).ok();
        let of = of.and_then(|at| request.queues.get(at));
        let of = of.ok_or_else(|| corrupt("a lease of another queue"))?;
        let token = FencingToken::new(number(5)?);
        self.base.seen.fetch_max(token.get(), Ordering::Relaxed);
        let lease = Lease {
            token,
            job: Arc::new(record(row, JOB)?),
        };
        match claimed.grants.last_mut() {
            Some(grant) if grant.id == id && grant.queue == of.queue => grant.leases.push(lease),
            _ => claimed.grants.push(Grant {
                queue: of.queue.clone(),
                partition: 0,
                id,
                nonce: request.nonce,
                granted_at: moment(row.try_get(3)?),
                term: Duration::from_nanos(number(4)?),
                granted: Duration::from_micros(number(2)?),
                leases: vec![lease],
            }),
        }
        Ok(())
    }
}
