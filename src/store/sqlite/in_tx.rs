//! Calls inside the caller's own transaction, on the caller's own connection.
//!
//! They take the same steps as the writer. What they do is undone with the rest if the caller rolls
//! back. They wake no sleepers directly: sleepers notice that the file has changed.

use rusqlite::{Connection, Transaction};

use super::fault::{Done, Fault};
use super::tx::{Tx, Wakeup};
use super::writer::{at, wake_sleepers};
use super::{Kinds, SqliteStore};
use crate::clock::Timestamp;
use crate::error::{Error, Result, Verb};
use crate::job::{JobId, NewJob};
use crate::lease::Verdict;
use crate::store::{Checkpoint, Checkpointed, Enqueued, Settlement};

statements! {
    TAKE_TURN = "UPDATE leasehold_meta SET version = version";
}

/// What a step did, and whom to wake once it is committed.
pub(crate) struct Applied<T> {
    pub(crate) answer: T,
    wakeups: Vec<Wakeup>,
}

impl SqliteStore {
    pub(crate) fn settle_in(
        &self,
        tx: &Transaction<'_>,
        settlement: &Settlement,
    ) -> Result<Applied<Verdict>> {
        self.apply(Verb::Settle, tx, |tx, now| {
            let verdicts = tx.settle_all(std::slice::from_ref(settlement), now)?;
            Ok(verdicts.first().copied().unwrap_or(Verdict::Fenced))
        })
    }

    pub(crate) fn checkpoint_in(
        &self,
        tx: &Transaction<'_>,
        checkpoint: &Checkpoint,
    ) -> Result<Checkpointed> {
        let applied = self.apply(Verb::Checkpoint, tx, |tx, now| {
            tx.checkpoint_one(checkpoint, now)
        });
        applied.map(|applied| applied.answer)
    }

    pub(crate) fn enqueue_in(
        &self,
        tx: &Transaction<'_>,
        jobs: &[(JobId, NewJob)],
    ) -> Result<Vec<Enqueued>> {
        let applied = self.apply(Verb::Enqueue, tx, |tx, now| tx.enqueue_all(jobs, now));
        applied.map(|applied| applied.answer)
    }

    /// Wakes those whom a committed step concerns.
    pub(crate) fn wake<T>(&self, applied: Applied<T>) {
        wake_sleepers(
            &self.shared.wakers,
            self.shared.poll.sleepers(),
            applied.wakeups,
        );
    }

    fn apply<T>(
        &self,
        verb: Verb,
        tx: &Transaction<'_>,
        step: impl FnOnce(&mut Tx<'_>, Timestamp) -> Done<T>,
    ) -> Result<Applied<T>> {
        self.is_same_file(tx)
            .and_then(|()| self.apply_in(tx, step).map_err(Fault::into_error))
            .map_err(|error| at(verb, error))
    }

    fn apply_in<T>(
        &self,
        db: &Connection,
        step: impl FnOnce(&mut Tx<'_>, Timestamp) -> Done<T>,
    ) -> Done<Applied<T>> {
        // The first of our statements takes the write lock, or fails if the transaction has read
        // what has changed since. The time is asked under it, so that its order is that of the
        // steps.
        db.prepare_cached(TAKE_TURN)?.execute([])?;
        // A step that fails half way leaves the caller's transaction as it was.
        db.execute_batch("SAVEPOINT leasehold_call")?;
        let mut kinds = Kinds::default();
        let namespace = self.shared.options.namespace.as_str();
        let mut tx = Tx::new(db, namespace, &mut kinds);
        let done = step(&mut tx, self.shared.options.clock.now())
            .and_then(|answer| tx.finish().map(|wakeups| Applied { answer, wakeups }));
        if done.is_err() {
            db.execute_batch("ROLLBACK TO leasehold_call")?;
        }
        db.execute_batch("RELEASE leasehold_call")?;
        done
    }

    /// A receipt is worth nothing in another file.
    fn is_same_file(&self, db: &Connection) -> Result<()> {
        let theirs = db.path().unwrap_or_default();
        let whole = |path: &std::path::Path| std::fs::canonicalize(path).ok();
        let same = whole(&self.shared.path);
        if same.is_some() && same == whole(theirs.as_ref()) {
            return Ok(());
        }
        Err(Error::invalid(
            "transaction",
            "a transaction of another file",
            "only one of the store's own file",
        ))
    }
}
