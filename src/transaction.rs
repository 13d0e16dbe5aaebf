//! One transaction: the effect, the checkpoint and the settlement commit together.
//!
//! Where the queue and the data share one SQLite file, a handler works in a transaction of its own
//! connection and ends it with [`Context::complete_in`]. If it dies before the commit, nothing has
//! happened and the job is claimed again; after the commit, everything has. An owner that has been
//! replaced is refused, and its whole transaction is rolled back.
//!
//! While the transaction writes, nobody else can, and that includes renewals: keep it below a tenth
//! of the term. The store warns when it has waited for a second.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use rusqlite::Transaction;
use serde::Serialize;

use crate::client::Client;
use crate::clock::monotonic;
use crate::context::Context;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::fence::{FenceError, sqlite};
use crate::handler::Failure;
use crate::job::{Job, NewJob, at_most, limits};
use crate::lifecycle::enqueue::{named, no_answer};
use crate::lifecycle::fence::Stop;
use crate::store::{Checkpoint, Checkpointed, Enqueued, Outcome, Settlement, SqliteStore, Store};

impl Context {
    /// Opens the transaction's fence under this lease's scope and token, and with it the right to
    /// read and write: see [`fence::sqlite`](crate::fence::sqlite). The data may be in any file.
    ///
    /// # Errors
    /// As [`fence`](Self::fence).
    pub fn fence_in<'t>(&self, tx: &'t Transaction<'_>) -> Result<sqlite::Fenced<'t>, FenceError> {
        let opened = sqlite::open(tx, &self.scope(), self.token())?;
        #[cfg(feature = "testing")]
        crate::testing::opened();
        Ok(opened)
    }

    /// Saves state in the caller's transaction: it commits with the effect that it describes, so that
    /// no step of a long job is done twice.
    ///
    /// # Errors
    /// Ends the handler by `?`: as lost if the lease is somebody else's, as a failure if the store is
    /// not in the transaction's file. Drop the transaction then.
    pub fn checkpoint_in<T: Serialize>(
        &self,
        tx: &Transaction<'_>,
        state: &T,
    ) -> Result<(), Failure> {
        let bytes = Bytes::from(serde_json::to_vec(state)?);
        at_most("checkpoint", bytes.len(), limits::CHECKPOINT_BYTES, "bytes")?;
        let checkpoint = Checkpoint {
            receipt: self.receipt(),
            seq: self.lease().seq.fetch_add(1, Ordering::Relaxed) + 1,
            bytes,
        };
        let saved = sqlite_store(&**self.pool().store())?.checkpoint_in(tx, &checkpoint)?;
        match saved {
            Checkpointed::Saved { cancel, .. } => {
                if cancel {
                    self.lease().stop(Stop::Cancel);
                }
                self.held.touch(self.index, monotonic());
                Ok(())
            }
            Checkpointed::Behind { .. } => Ok(()),
            Checkpointed::Fenced => Err(self.refused(Verb::Checkpoint)),
        }
    }

    /// Completes the job in the caller's transaction, and commits it: the effect, the checkpoint and
    /// the settlement together or not at all. The handler should return now; whatever it returns,
    /// the job is completed.
    ///
    /// ```no_run
    /// # use leasehold::{Context, Failure};
    /// # struct Debit { amount: i64 }
    /// # async fn connect() -> rusqlite::Result<rusqlite::Connection> { unreachable!() }
    /// async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
    ///     let mut db = connect().await?; // the queue's own file
    ///     let tx = db.transaction()?;
    ///     tx.execute("UPDATE account SET balance = balance - ?1", [job.amount])?;
    ///     ctx.complete_in(tx)
    /// }
    /// ```
    ///
    /// # Errors
    /// Ends the handler by `?`, and the transaction is rolled back: as lost if the lease is somebody
    /// else's, otherwise as a failure.
    pub fn complete_in(&self, tx: Transaction<'_>) -> Result<(), Failure> {
        let lease = self.lease();
        let settlement = Settlement {
            receipt: self.receipt(),
            outcome: Outcome::Complete {
                result: lease.result(),
            },
        };
        let store = sqlite_store(&**self.pool().store())?;
        // A renewal that sees the committed end must not take it for a loss.
        lease.hand_in();
        let settled = store.settle_in(&tx, &settlement);
        let committed = match settled {
            Ok(ridden) if ridden.answer.is_held() => match tx.commit() {
                Ok(()) => Ok(ridden),
                Err(error) => Err(Failure::from(error)),
            },
            Ok(_) => {
                // Also if the caller has it committed when it is dropped.
                tx.rollback()?;
                Err(self.refused(Verb::Settle))
            }
            Err(error) => {
                tx.rollback()?;
                Err(Failure::from(error))
            }
        };
        match committed {
            Ok(ridden) => {
                lease.complete(ridden.answer);
                store.wake(ridden);
                self.pool().end(&self.held, self.index);
                Ok(())
            }
            Err(failure) => {
                lease.take_back();
                Err(failure)
            }
        }
    }

    /// Enqueues another job in the caller's transaction: it is there if, and when, that commits. The
    /// store's ledger counts it then; the counters of this process do not.
    ///
    /// # Errors
    /// As [`Client::enqueue_in`].
    pub fn enqueue_in<J: Job>(&self, tx: &Transaction<'_>, job: &J) -> Result<Enqueued> {
        let jobs = enqueue_in(&**self.pool().store(), tx, vec![NewJob::of(job)?])?;
        jobs.first().copied().ok_or_else(no_answer)
    }
}

impl Client {
    /// Stores jobs in the caller's transaction, on the caller's connection to the store's file: they
    /// are there if, and when, that commits. Workers of this and other processes see them within a
    /// second. The store's ledger counts them then; the counters of this process do not.
    ///
    /// # Errors
    /// `InvalidInput` names the field and the limit, also for a transaction of another file;
    /// `Unsupported` for a store that is not a file. Nothing is stored then.
    pub fn enqueue_in(&self, tx: &Transaction<'_>, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        enqueue_in(&**self.store(), tx, jobs)
    }
}

fn enqueue_in(store: &dyn Store, tx: &Transaction<'_>, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
    let (jobs, _) = named(jobs)?;
    sqlite_store(store)?.enqueue_in(tx, &jobs)
}

fn sqlite_store(store: &dyn Store) -> Result<&SqliteStore> {
    let native = store.native().and_then(|native| native.downcast_ref());
    native.ok_or_else(|| {
        let why = format!(
            "the store is {}, and the transaction SQLite's",
            store.name()
        );
        Error::new(ErrorKind::Unsupported, why)
    })
}
