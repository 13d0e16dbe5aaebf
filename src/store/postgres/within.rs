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
use crate::error::{Error, Result, Verb};
use crate::job::NewJob;
use crate::lease::Verdict;
use crate::store::{Checkpoint, Checkpointed, Enqueued, Settlement, named};

/// Ends the transaction of a caller that holds a grant's row and has stopped, unless the caller has
/// set a limit of its own. Only for this transaction.
const IDLE: &str = "SELECT set_config('idle_in_transaction_session_timeout', '60s', true) \
    WHERE current_setting('idle_in_transaction_session_timeout') = '0'";
/// A step of ours waits for a lock as long as any call; what the caller does next, as before.
const PATIENCE_BEFORE: &str =
    "SELECT set_config('leasehold.patience', current_setting('lock_timeout'), true)";
const KEEP: &str = "SELECT set_config('lock_timeout', current_setting('leasehold.patience'), true); \
    RELEASE SAVEPOINT leasehold_ride";
const UNDO: &str = "ROLLBACK TO SAVEPOINT leasehold_ride; RELEASE SAVEPOINT leasehold_ride";

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
        let jobs = named(jobs).map_err(|error| at(Verb::Enqueue, error))?;
        let mut step = Tx::new(tx, &self.shared.base, true);
        let done = async {
            let names = super::enqueue::names(&jobs);
            let ((), (), queues, now) = tokio::try_join!(biased;
                self.save(tx), step.is_same(), step.named(&names), step.clock())?;
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
            let wanted = super::settle::wanted(settlements);
            tokio::try_join!(biased; self.save(tx), step.is_same())?;
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
            let receipt = &checkpoint.receipt;
            tokio::try_join!(biased; self.save(tx), step.is_same())?;
            step.seek(&[(&receipt.queue, receipt.grant)]).await?;
            let answer = step.checkpoint_one(checkpoint)?;
            step.commit().await?;
            Ok(answer)
        }
        .await;
        kept(tx, Verb::Checkpoint, done).await
    }

    async fn save<C: GenericClient + Sync>(&self, tx: &C) -> Done<()> {
        let patience = self.shared.options.patience.as_millis();
        let patience = format!(
            "SELECT set_config('lock_timeout', '{patience}', true) \
             WHERE current_setting('lock_timeout') = '0'"
        );
        let save = format!("{IDLE}; SAVEPOINT leasehold_ride; {PATIENCE_BEFORE}; {patience}");
        Ok(tx.batch_execute(&save).await?)
    }
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    /// A receipt is worth nothing in another database, and a job would not be found there.
    async fn is_same(&self) -> Done<()> {
        if self.base.whose.get() == Some(&self.whose().await?) {
            return Ok(());
        }
        Err(Fault::Refused(Error::invalid(
            "transaction",
            "a transaction of another database",
            "only one of the store's own database",
        )))
    }

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

/// A step that failed half way leaves the caller's transaction as it was.
async fn kept<C: GenericClient + Sync, T>(tx: &C, verb: Verb, done: Done<T>) -> Result<T> {
    let end = if done.is_ok() { KEEP } else { UNDO };
    let ended = tx.batch_execute(end).await.map_err(Fault::from);
    let answer = done.and_then(|answer| ended.map(|()| answer));
    answer.map_err(|fault| at(verb, fault.into_error()))
}
