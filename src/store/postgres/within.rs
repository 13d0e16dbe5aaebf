//! Calls in the caller's own transaction, on the caller's own connection, of any driver.
//!
//! Each is one statement that calls the function which the store's own calls use. What it does is
//! undone with the rest if the caller rolls back; sleepers are woken when it commits. An enqueue
//! holds its own rows, a settlement or a checkpoint the row of its job: a claim steps over a lease
//! that is held so, and nobody else waits for it.
//!
//! A call under a lease puts limits on the transaction ([`limit`](crate::driver::limit)), so that a
//! caller that is frozen does not hold the job for longer than a term (I16).

use std::time::Duration;

use super::enqueue::NewJobs;
use super::record::Json;
use super::settle::{code, verdict};
use super::{PostgresStore, at};
use crate::clock::nanos;
use crate::driver::limit::{Limits, limited};
use crate::driver::{SqlArg, SqlError, SqlRow, SqlRunner};
use crate::error::{Error, Result, Verb};
use crate::job::{JobId, NewJob};
use crate::lease::{Receipt, Verdict};
use crate::store::{Checkpoint, Checkpointed, Enqueued, Outcome, Settlement, named};

/// How long a transaction may stand still that settles or checkpoints a lease whose term is not
/// known.
const IDLE: Limits = Limits {
    idle: Some(Duration::from_secs(60)),
    wait: None,
};

/// No row: a transaction of another database.
const ENQUEUE: &str = "
    SELECT ARRAY[nth::text, holder::text] AS answer
    FROM (SELECT FROM leasehold.meta WHERE id = $1::text::uuid) AS here
    CROSS JOIN LATERAL (
        SELECT 0 AS nth, NULL::uuid AS holder
        UNION ALL
        SELECT d.nth, d.holder FROM leasehold.enqueue_1(
            $2::text, $3::int8, NULL, NULL, NULL, $4::text[]::uuid[], $5::text[], $6::text[], $7::bytea[],
            $8::int8[], $9::bytea[], $10::bytea[], $11::text[]::jsonb[]) AS d
    ) AS done";

const SETTLE: &str = concat!(
    "WITH ",
    limited!(idle "$10", wait "$11"),
    " SELECT ARRAY[(leasehold.settle_1(
        $2::text, $3::int8, NULL, NULL, NULL, ARRAY[$4::text], ARRAY[$5::text::uuid], ARRAY[$6::int8],
        ARRAY[$7::int8], ARRAY[$8::bytea], ARRAY[$9::int8]::int2[], ARRAY[$12::int8], ARRAY[$13::text],
        CASE WHEN $14::int8 IS NOT NULL THEN ARRAY[$14::int8] END, ARRAY[$15::bytea]))[1]::text] AS answer
    FROM (SELECT count(*) FROM limits) AS first, leasehold.meta WHERE id = $1::text::uuid"
);

const CHECKPOINT: &str = concat!(
    "WITH ",
    limited!(idle "$9", wait "$10"),
    " SELECT ARRAY[done.verdict::text, done.seq::text] AS answer
    FROM (SELECT count(*) FROM limits) AS first
    CROSS JOIN (SELECT FROM leasehold.meta WHERE id = $1::text::uuid) AS here
    CROSS JOIN LATERAL leasehold.checkpoint_1(
        $2::text, $3::int8, NULL, NULL, NULL, ARRAY[$4::text], ARRAY[$5::text::uuid], ARRAY[$6::int8],
        ARRAY[$7::int8], ARRAY[$8::bytea], ARRAY[$11::int8], ARRAY[$12::bytea]) AS done"
);

impl PostgresStore {
    /// Stores jobs in the caller's transaction: they are there if, and when, that commits. One
    /// answer per job, in order.
    ///
    /// A job with an exclusive key joins its line at the first claim after the commit, and is shown
    /// as scheduled until then. A job with a unique key makes other enqueues of that key wait for
    /// the transaction's end.
    ///
    /// # Errors
    /// `InvalidInput` names the field and the limit, before anything is sent. After any other error
    /// roll back.
    pub async fn enqueue_in<T: SqlRunner<D>, D>(
        &self,
        mut tx: T,
        jobs: Vec<NewJob>,
    ) -> Result<Vec<Enqueued>> {
        let verb = Verb::Enqueue;
        let jobs = named(jobs).map_err(|error| at(verb, error))?;
        let ready = self.ready().await;
        ready.map_err(|fault| at(verb, fault.into_error()))?;
        let new = NewJobs::of(&jobs);
        let ids: Vec<String> = new.ids.iter().map(ToString::to_string).collect();
        let texts = |texts: Vec<_>| Some(texts.into_iter().map(Some).collect());
        let option = |option: &Option<Json<_>>| {
            let option = option
                .as_ref()
                .map(|Json(option)| serde_json::to_string(option));
            option.and_then(std::result::Result::ok)
        };
        let options = new.options.iter().flatten().map(option).collect::<Vec<_>>();
        let options = options.iter().map(Option::as_deref).collect();
        let whose = self.whose();
        let args = [
            SqlArg::Text(Some(&whose)),
            SqlArg::Text(Some(&self.shared.base.namespace)),
            SqlArg::Int(self.shared.base.by_hand()),
            SqlArg::Texts(Some(ids.iter().map(|id| Some(&**id)).collect())),
            SqlArg::Texts(texts(new.queues)),
            SqlArg::Texts(texts(new.kinds)),
            SqlArg::Blobs(Some(new.payloads.into_iter().map(Some).collect())),
            SqlArg::Ints(new.delays),
            SqlArg::Blobs(new.unique_keys),
            SqlArg::Blobs(new.exclusive_keys),
            SqlArg::Texts(new.options.is_some().then_some(options)),
        ];
        let rows = self.run(&mut tx, verb, ENQUEUE, &args).await?;
        if rows.is_empty() {
            return Err(at(verb, elsewhere()));
        }
        let id = |id: &String| id.parse::<JobId>().ok();
        let mut answers: Vec<_> = ids.iter().filter_map(id).map(Enqueued::New).collect();
        for row in &rows {
            // The first row is there to say that this is the database.
            if let [Some(nth), Some(holder)] = &row[..]
                && let (Ok(nth), Some(holder)) = (nth.parse::<usize>(), id(holder))
                && let Some(answer) = nth.checked_sub(1).and_then(|nth| answers.get_mut(nth))
            {
                *answer = Enqueued::Duplicate(holder);
            }
        }
        Ok(answers)
    }

    /// Ends a lease in the caller's transaction: the effect and the settlement commit together or
    /// not at all. On [`Verdict::Fenced`] roll the transaction back: the lease is somebody else's.
    ///
    /// # Errors
    /// Any: then roll back.
    pub async fn settle_in<T: SqlRunner<D>, D>(
        &self,
        tx: T,
        settlement: &Settlement,
    ) -> Result<Verdict> {
        self.settle_under(tx, settlement, IDLE).await
    }

    pub(crate) async fn settle_under<T: SqlRunner<D>, D>(
        &self,
        mut tx: T,
        settlement: &Settlement,
        limits: Limits,
    ) -> Result<Verdict> {
        let code = i64::from(code(&settlement.outcome));
        let (delay, reason, result) = match &settlement.outcome {
            Outcome::Complete { result } => (None, None, result.as_deref()),
            Outcome::Retry { delay, reason } | Outcome::Decline { delay, reason } => {
                (Some(delay), Some(reason), None)
            }
            Outcome::Surrender { delay, .. } => (Some(delay), None, None),
            Outcome::Bury { reason } => (None, Some(reason), None),
        };
        let delay = delay.map(|delay| nanos(*delay));
        let mark = settlement
            .outcome
            .mark()
            .map(|mark| mark.get().cast_signed());
        let [idle, wait] = limits.args();
        let ids = [self.whose(), settlement.receipt.job.to_string()];
        let mut args = self.of_receipt(&settlement.receipt, &ids);
        args.extend([SqlArg::Int(Some(code)), idle, wait]);
        args.extend([
            SqlArg::Int(delay),
            SqlArg::Text(reason.map(|reason| &**reason)),
        ]);
        args.extend([SqlArg::Int(mark), SqlArg::Bytes(result)]);
        let rows = self.run(&mut tx, Verb::Settle, SETTLE, &args).await?;
        let code = cell(&rows, 0).ok_or_else(|| at(Verb::Settle, elsewhere()))?;
        Ok(verdict(code as i16))
    }

    /// Saves state under a lease in the caller's transaction: it commits with the effect that it
    /// describes.
    ///
    /// # Errors
    /// As [`settle_in`](Self::settle_in).
    pub async fn checkpoint_in<T: SqlRunner<D>, D>(
        &self,
        tx: T,
        checkpoint: &Checkpoint,
    ) -> Result<Checkpointed> {
        self.checkpoint_under(tx, checkpoint, IDLE).await
    }

    pub(crate) async fn checkpoint_under<T: SqlRunner<D>, D>(
        &self,
        mut tx: T,
        checkpoint: &Checkpoint,
        limits: Limits,
    ) -> Result<Checkpointed> {
        let [idle, wait] = limits.args();
        let ids = [self.whose(), checkpoint.receipt.job.to_string()];
        let mut args = self.of_receipt(&checkpoint.receipt, &ids);
        args.extend([idle, wait, SqlArg::Int(Some(checkpoint.seq as i64))]);
        args.push(SqlArg::Bytes(Some(&checkpoint.bytes)));
        let verb = Verb::Checkpoint;
        let rows = self.run(&mut tx, verb, CHECKPOINT, &args).await?;
        match cell(&rows, 0) {
            Some(8) => Ok(Checkpointed::Behind {
                seq: cell(&rows, 1).unwrap_or_default() as u64,
            }),
            Some(code) => Ok(match verdict(code as i16) {
                Verdict::Held { late, cancel } => Checkpointed::Saved { late, cancel },
                Verdict::Fenced => Checkpointed::Fenced,
            }),
            None => Err(at(verb, elsewhere())),
        }
    }

    pub(crate) fn schema(&self) -> &str {
        &self.shared.options.schema
    }

    /// Which database the store is in, as text.
    fn whose(&self) -> String {
        let whose = self.shared.base.whose.get();
        whose.map(ToString::to_string).unwrap_or_default()
    }

    /// The database, the namespace, the test's hand on the clock, and a receipt.
    fn of_receipt<'a>(
        &'a self,
        receipt: &'a Receipt,
        [whose, job]: &'a [String; 2],
    ) -> Vec<SqlArg<'a>> {
        vec![
            SqlArg::Text(Some(whose)),
            SqlArg::Text(Some(&self.shared.base.namespace)),
            SqlArg::Int(self.shared.base.by_hand()),
            SqlArg::Text(Some(receipt.queue.as_str())),
            SqlArg::Text(Some(job)),
            SqlArg::Int(Some(receipt.grant.get().cast_signed())),
            SqlArg::Int(Some(receipt.token.get().cast_signed())),
            SqlArg::Bytes(Some(receipt.nonce.as_bytes())),
        ]
    }

    async fn run<T: SqlRunner<D>, D>(
        &self,
        tx: &mut T,
        verb: Verb,
        sql: &str,
        args: &[SqlArg<'_>],
    ) -> Result<Vec<SqlRow>> {
        let sql = crate::driver::in_schema(sql, self.schema());
        let rows = tx.run(&sql, args).await;
        rows.map_err(|error: SqlError| at(verb, error.into()))
    }
}

fn cell(rows: &[SqlRow], column: usize) -> Option<i64> {
    rows.first()?.get(column)?.as_ref()?.parse().ok()
}

/// A receipt is worth nothing in another database, and a job would not be found there.
fn elsewhere() -> Error {
    Error::invalid(
        "transaction",
        "a transaction of another database",
        "only one of the store's own database",
    )
}
