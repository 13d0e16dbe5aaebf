//! Calls that ride in the caller's own transaction, on the caller's own connection.
//!
//! They share the steps of the store's own calls. What they do is undone with the rest if the caller
//! rolls back; sleepers are woken when it commits. They take no lock that a claim waits for: an
//! enqueue holds its rows only, and a settlement the row of its grant, for which renewals of that
//! grant wait. A caller that is frozen is cut off by [`IDLE`].

use tokio_postgres::GenericClient;

use super::fault::{Done, Fault};
use super::tx::Tx;
use super::{PostgresStore, at};
use crate::error::{Result, Verb};
use crate::job::{JobId, NewJob, at_most, limits};
use crate::lease::Verdict;
use crate::store::{Checkpoint, Checkpointed, Enqueued, Settlement};

/// Ends the transaction of a caller that holds a grant's row and has stopped, unless the caller has
/// set a limit of its own. Only for this transaction.
const IDLE: &str = "SELECT set_config('idle_in_transaction_session_timeout', '60s', true) \
    WHERE current_setting('idle_in_transaction_session_timeout') IN ('0', '0ms')";
const SAVE: &str = "SAVEPOINT leasehold_ride";
const UNDO: &str = "ROLLBACK TO SAVEPOINT leasehold_ride";
const KEEP: &str = "RELEASE SAVEPOINT leasehold_ride";

impl PostgresStore {
    /// Stores jobs in the caller's transaction: they are there if, and when, that commits. One answer
    /// per job, in order.
    ///
    /// A job with an exclusive key joins its line at the first claim after the commit, and is shown
    /// as scheduled until then. A job with a unique key makes other enqueues of that key wait for the
    /// transaction's end.
    ///
    /// # Errors
    /// `InvalidInput` names the field and the limit. On an error nothing is stored, and the
    /// transaction is as it was before.
    pub async fn enqueue_in<C: GenericClient + Sync>(
        &self,
        tx: &C,
        jobs: Vec<NewJob>,
    ) -> Result<Vec<Enqueued>> {
        let mut weight = 0;
        for job in &jobs {
            job.validate().map_err(|e| at(Verb::Enqueue, e))?;
            weight += job.weight();
        }
        at_most("jobs", jobs.len(), limits::CALL_ITEMS, "jobs in a call")
            .and_then(|()| at_most("jobs", weight, limits::CALL_BYTES, "bytes in a call"))
            .map_err(|e| at(Verb::Enqueue, e))?;
        let jobs: Vec<(JobId, NewJob)> = jobs
            .into_iter()
            .map(|job| (JobId::generate(), job))
            .collect();
        let mut step = Tx::new(tx, &self.shared.base, true);
        let done = async {
            save(tx).await?;
            let names = super::enqueue::names(&jobs);
            let (queues, now) = tokio::try_join!(biased; step.named(&names), step.clock())?;
            step.now = now;
            step.keep(&queues)?;
            let answers = step.enqueue_all(&jobs).await?;
            step.commit().await?;
            Ok(answers)
        }
        .await;
        kept(tx, Verb::Enqueue, done).await
    }

    /// Ends a lease in the caller's transaction: the effect and the settlement commit together or
    /// not at all. On [`Verdict::Fenced`] roll the transaction back: the lease is somebody else's.
    ///
    /// Until the transaction ends, renewals of the same grant wait for it: keep it below a tenth of
    /// the term.
    ///
    /// # Errors
    /// Any; nothing is settled then, and the transaction is as it was before.
    pub async fn settle_in<C: GenericClient + Sync>(
        &self,
        tx: &C,
        settlement: &Settlement,
    ) -> Result<Verdict> {
        let settlements = std::slice::from_ref(settlement);
        let mut step = Tx::new(tx, &self.shared.base, true);
        let done = async {
            save(tx).await?;
            let wanted = super::settle::wanted(settlements);
            step.seek(&wanted).await?;
            let verdicts = step.settle_all(settlements).await?;
            step.commit().await?;
            Ok(verdicts.first().copied().unwrap_or(Verdict::Fenced))
        }
        .await;
        kept(tx, Verb::Settle, done).await
    }

    /// Saves state under a lease in the caller's transaction: it commits with the effect that it
    /// describes.
    ///
    /// # Errors
    /// As [`settle_in`](Self::settle_in).
    pub async fn checkpoint_in<C: GenericClient + Sync>(
        &self,
        tx: &C,
        checkpoint: &Checkpoint,
    ) -> Result<Checkpointed> {
        let mut step = Tx::new(tx, &self.shared.base, true);
        let done = async {
            save(tx).await?;
            let receipt = &checkpoint.receipt;
            step.seek(&[(&receipt.queue, receipt.grant)]).await?;
            let answer = step.checkpoint_one(checkpoint)?;
            step.commit().await?;
            Ok(answer)
        }
        .await;
        kept(tx, Verb::Checkpoint, done).await
    }
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// Locks and reads grants, and asks the time.
    async fn seek(
        &mut self,
        wanted: &[(&crate::job::QueueName, crate::lease::FencingToken)],
    ) -> Done<()> {
        let names: Vec<&str> = wanted.iter().map(|(queue, _)| queue.as_str()).collect();
        let (queues, grants, now) =
            tokio::try_join!(biased; self.named(&names), self.lock_grants(wanted), self.clock())?;
        self.now = now;
        self.keep(&queues)?;
        self.hold(&grants).await?;
        Ok(())
    }
}

async fn save<C: GenericClient + Sync>(tx: &C) -> Done<()> {
    Ok(tx.batch_execute(&format!("{IDLE}; {SAVE}")).await?)
}

/// A step that failed half way leaves the caller's transaction as it was.
async fn kept<C: GenericClient + Sync, T>(tx: &C, verb: Verb, done: Done<T>) -> Result<T> {
    let end = if done.is_ok() { KEEP } else { UNDO };
    let ended = tx.batch_execute(end).await.map_err(Fault::from);
    let answer = done.and_then(|answer| ended.map(|()| answer));
    answer.map_err(|fault| at(verb, fault.into_error()))
}
