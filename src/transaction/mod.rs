//! One transaction: the effect, the checkpoint and the settlement commit together.
//!
//! Where the queue and the data share one database, a handler works in a transaction of its own
//! connection and ends it with [`Context::complete_in`]. If it dies before the commit, nothing has
//! happened and the job is claimed again; after the commit, everything has. An owner that has been
//! replaced is refused, and its whole transaction is rolled back.
//!
//! | engine | the transaction | its calls |
//! |---|---|---|
//! | SQLite | `rusqlite::Transaction` of the store's file | answer at once |
//! | PostgreSQL | any `GenericClient` of `tokio-postgres`, to the store's database | are awaited |
//!
//! Keep it below a tenth of the term. In SQLite nobody else can write meanwhile, and that includes
//! renewals; in PostgreSQL renewals of the same grant wait from the first of these calls to the
//! commit.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;

use crate::calls::enqueue::no_answer;
use crate::client::Client;
use crate::clock::monotonic;
use crate::context::Context;
use crate::error::{Result, Verb};
use crate::handler::Failure;
use crate::job::{IntoJob, NewJob, into_jobs};
use crate::limits::{self, at_most};
use crate::store::{Checkpoint, Checkpointed, Enqueued, Outcome, Settlement, Store};
use crate::worker::held::Stop;

#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

/// A borrowed transaction in which the store can take part: `&rusqlite::Transaction`, or a
/// reference to any `GenericClient` of `tokio-postgres` that is in one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that the store can take part in",
    label = "a `&rusqlite::Transaction`, or a reference to a client of `tokio-postgres`",
    note = "of a pool's transaction, pass what it derefs to: `&*tx`"
)]
pub trait TransactionRef: Sized {
    /// What a call gives back: the answer in SQLite, a future of it in PostgreSQL.
    type Answer<T>;

    #[doc(hidden)]
    fn checkpoint(
        self,
        ctx: &Context,
        state: Result<Bytes, Failure>,
    ) -> Self::Answer<Result<(), Failure>>;

    #[doc(hidden)]
    fn enqueue<T: 'static>(
        self,
        store: &Arc<dyn Store>,
        jobs: Result<Vec<NewJob>>,
        answer: fn(Vec<Enqueued>) -> Result<T>,
    ) -> Self::Answer<Result<T>>;
}

/// A transaction that can be committed: `rusqlite::Transaction`, `tokio_postgres::Transaction`,
/// `deadpool_postgres::Transaction`, or a `&tokio_postgres::Client` whose transaction was begun by
/// a statement.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that a job can be completed in",
    label = "a transaction of `rusqlite` or `tokio-postgres`, by value",
    note = "`complete_in` commits: pass `tx`, not `&tx`"
)]
pub trait OwnedTransaction: Sized {
    /// What a call gives back: the answer in SQLite, a future of it in PostgreSQL.
    type Answer<T>;

    #[doc(hidden)]
    fn complete(self, ctx: &Context) -> Self::Answer<Result<(), Failure>>;
}

impl Context {
    /// Saves state in the caller's transaction: it commits with the effect that it describes, so
    /// that no step of a long job is done twice. In PostgreSQL, to be awaited.
    ///
    /// # Errors
    /// Ends the handler by `?`: as lost if the lease is somebody else's, as a failure if the store
    /// is not in the transaction's database. Drop the transaction then.
    pub fn save_checkpoint_in<X: TransactionRef, T: Serialize>(
        &self,
        tx: X,
        state: &T,
    ) -> X::Answer<Result<(), Failure>> {
        let bytes = serde_json::to_vec(state).map_err(Failure::from);
        let bytes = bytes.and_then(|bytes| {
            at_most("checkpoint", bytes.len(), limits::CHECKPOINT_BYTES, "bytes")?;
            Ok(Bytes::from(bytes))
        });
        tx.checkpoint(self, bytes)
    }

    /// Completes the job in the caller's transaction, and commits it: the effect, the checkpoint
    /// and the settlement together or not at all. The handler should return now; whatever it
    /// returns, the job is completed. In PostgreSQL, to be awaited.
    #[cfg_attr(
        feature = "sqlite",
        doc = "
```no_run
# use leasehold::{Context, Failure};
# struct Debit { amount: i64 }
# async fn connect() -> rusqlite::Result<rusqlite::Connection> { unreachable!() }
async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
    let mut db = connect().await?; // the queue's own file
    let tx = db.transaction()?;
    tx.execute(\"UPDATE account SET balance = balance - ?1\", [job.amount])?;
    ctx.complete_in(tx)
}
```"
    )]
    #[cfg_attr(
        feature = "postgres",
        doc = "
```no_run
# use leasehold::{Context, Failure};
# struct Debit { amount: i64 }
# async fn connect() -> Result<tokio_postgres::Client, tokio_postgres::Error> { unreachable!() }
async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
    let mut db = connect().await?; // the queue's own database
    let tx = db.transaction().await?;
    tx.execute(\"UPDATE account SET balance = balance - $1\", &[&job.amount]).await?;
    ctx.complete_in(tx).await
}
```"
    )]
    ///
    /// # Errors
    /// Ends the handler by `?`, and the transaction is rolled back: as lost if the lease is
    /// somebody else's, otherwise as a failure. If only the answer to the commit was lost and the
    /// job is completed, the settlement of that failure is refused and changes nothing.
    pub fn complete_in<T: OwnedTransaction>(&self, tx: T) -> T::Answer<Result<(), Failure>> {
        tx.complete(self)
    }

    /// Enqueues another job in the caller's transaction: it exists if, and when, that commits. The
    /// store's ledger counts it then; the counters of this process do not. In PostgreSQL, to be
    /// awaited.
    ///
    /// # Errors
    /// As [`Client::enqueue_in`].
    pub fn enqueue_in<T: TransactionRef, M>(
        &self,
        tx: T,
        job: impl IntoJob<M>,
    ) -> T::Answer<Result<Enqueued>> {
        enqueue_one(self.pool().store(), tx, job.into_job())
    }

    /// Enqueues other jobs in the caller's transaction.
    ///
    /// # Errors
    /// As [`Client::enqueue_in`].
    pub fn enqueue_many_in<T: TransactionRef, M>(
        &self,
        tx: T,
        jobs: impl IntoIterator<Item: IntoJob<M>>,
    ) -> T::Answer<Result<Vec<Enqueued>>> {
        tx.enqueue(self.pool().store(), into_jobs(jobs), Ok)
    }

    /// The checkpoint that `bytes` make.
    fn next_checkpoint(&self, bytes: Bytes) -> Checkpoint {
        Checkpoint {
            receipt: self.receipt(),
            seq: self.lease().next_seq(),
            bytes,
        }
    }

    fn checkpointed(&self, saved: Checkpointed) -> Result<(), Failure> {
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

    fn completion(&self) -> Settlement {
        Settlement {
            receipt: self.receipt(),
            outcome: Outcome::Complete {
                result: self.lease().result(),
            },
        }
    }
}

impl Client {
    /// Stores a job in the caller's transaction, on the caller's connection to the store's
    /// database: it exists if, and when, that commits. Workers of this and other processes see it
    /// within a second. The store's ledger counts it then; the counters of this process do not. In
    /// PostgreSQL, to be awaited.
    ///
    /// # Errors
    /// `InvalidInput` names the field and the limit, also for a transaction of another database;
    /// `Unsupported` for a store of another engine. Nothing is stored then.
    pub fn enqueue_in<T: TransactionRef, M>(
        &self,
        tx: T,
        job: impl IntoJob<M>,
    ) -> T::Answer<Result<Enqueued>> {
        enqueue_one(self.store(), tx, job.into_job())
    }

    /// Stores jobs in the caller's transaction: as [`enqueue_in`](Self::enqueue_in).
    ///
    /// # Errors
    /// As [`enqueue_in`](Self::enqueue_in).
    pub fn enqueue_many_in<T: TransactionRef, M>(
        &self,
        tx: T,
        jobs: impl IntoIterator<Item: IntoJob<M>>,
    ) -> T::Answer<Result<Vec<Enqueued>>> {
        tx.enqueue(self.store(), into_jobs(jobs), Ok)
    }
}

fn enqueue_one<T: TransactionRef>(
    store: &Arc<dyn Store>,
    tx: T,
    job: Result<NewJob>,
) -> T::Answer<Result<Enqueued>> {
    tx.enqueue(store, job.map(|job| vec![job]), |jobs| {
        jobs.first().copied().ok_or_else(no_answer)
    })
}
