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
//! | PostgreSQL | of any driver, to the store's database: `tokio-postgres`, `deadpool-postgres`, and by their adapters sqlx (`leasehold-sqlx`) and diesel-async (`leasehold-diesel`) | are awaited |
//!
//! Begin it with [`Context::begin`], so that an owner that is frozen in the middle of it does not
//! hold up its successor. Keep it below a tenth of the term. In SQLite nobody else can write
//! meanwhile, and that includes renewals.

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

/// A transaction in which the store can take part: `&rusqlite::Transaction`, a reference to a
/// client or a transaction of `tokio-postgres` or `deadpool-postgres`, or what another driver's
/// adapter makes one (`leasehold-sqlx`, `leasehold-diesel`).
///
/// `Driver` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that the store can take part in",
    label = "a `&rusqlite::Transaction`, a reference to a client or transaction of `tokio-postgres`, or \
             `&mut tx` of a driver with an adapter",
    note = "of a pool's transaction, pass what it derefs to: `&*tx`",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
pub trait TransactionRef<Driver>: Sized {
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
/// `deadpool_postgres::Transaction`, a `&tokio_postgres::Client` whose transaction was begun by a
/// statement, or what another driver's adapter makes one.
///
/// `Driver` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that a job can be completed in",
    label = "a transaction of `rusqlite`, `tokio-postgres` or a driver with an adapter, by value",
    note = "`complete_in` commits: pass `tx`, not `&tx`",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
pub trait OwnedTransaction<Driver>: Sized {
    /// What a call gives back: the answer in SQLite, a future of it in PostgreSQL.
    type Answer<T>;

    #[doc(hidden)]
    fn complete(self, ctx: &Context) -> Self::Answer<Result<(), Failure>>;
}

/// What a transaction can be begun on: `&mut` a connection of `rusqlite`, `tokio-postgres` or
/// `deadpool-postgres`, or what another driver's adapter makes one.
///
/// `Driver` is found by the compiler.
#[diagnostic::on_unimplemented(
    message = "no transaction can be begun on `{Self}`",
    label = "`&mut` a connection of `rusqlite` or `tokio-postgres`, or of a driver with an adapter",
    note = "with sqlx or diesel-async, depend on `leasehold-sqlx` or `leasehold-diesel` and name it once: \
            `use leasehold_sqlx as _;`"
)]
pub trait BeginTransaction<Driver>: Sized {
    /// The transaction, or a future of it.
    type Begun;

    #[doc(hidden)]
    fn begin(self, ctx: &Context) -> Self::Begun;
}

impl Context {
    /// Begins a transaction in which a frozen owner does not hold up its successor. In PostgreSQL,
    /// to be awaited.
    ///
    /// An owner that stops in the middle of a transaction keeps the rows that it has written, and
    /// its successor would wait for them for as long as it stands still. A transaction begun here
    /// is ended by the server once it has stood still for a term; its statements take no longer,
    /// and wait no longer for a lock, than the lease has left; and the owner of a later lease of
    /// the same [scope](Self::scope) that begins here too ends it at once. Stricter limits of your
    /// own stay. [`fence`](Self::fence) and [`save_checkpoint_in`](Self::save_checkpoint_in) put
    /// the same limits on a transaction, from that call on.
    ///
    /// In SQLite it takes the file's write lock at once. One who is frozen then holds it, and with
    /// it every other process, until it is thawed or killed: no file can end that.
    ///
    /// # Errors
    /// If the database does not answer.
    pub fn begin<B: BeginTransaction<D>, D>(&self, db: B) -> B::Begun {
        db.begin(self)
    }

    /// Saves state in the caller's transaction: it commits with the effect that it describes, so
    /// that no step of a long job is done twice. In PostgreSQL, to be awaited.
    ///
    /// # Errors
    /// Ends the handler by `?`: as lost if the lease is somebody else's, as a failure if the store
    /// is not in the transaction's database. Drop the transaction then.
    pub fn save_checkpoint_in<X: TransactionRef<D>, D, T: Serialize>(
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
    let tx = ctx.begin(&mut db)?;
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
    let tx = ctx.begin(&mut db).await?;
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
    pub fn complete_in<T: OwnedTransaction<D>, D>(&self, tx: T) -> T::Answer<Result<(), Failure>> {
        tx.complete(self)
    }

    /// Enqueues another job in the caller's transaction: it exists if, and when, that commits. The
    /// store's ledger counts it then; the counters of this process do not. In PostgreSQL, to be
    /// awaited.
    ///
    /// # Errors
    /// As [`Client::enqueue_in`].
    pub fn enqueue_in<T: TransactionRef<D>, D, M>(
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
    pub fn enqueue_many_in<T: TransactionRef<D>, D, M>(
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
    pub fn enqueue_in<T: TransactionRef<D>, D, M>(
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
    pub fn enqueue_many_in<T: TransactionRef<D>, D, M>(
        &self,
        tx: T,
        jobs: impl IntoIterator<Item: IntoJob<M>>,
    ) -> T::Answer<Result<Vec<Enqueued>>> {
        tx.enqueue(self.store(), into_jobs(jobs), Ok)
    }
}

fn enqueue_one<T: TransactionRef<D>, D>(
    store: &Arc<dyn Store>,
    tx: T,
    job: Result<NewJob>,
) -> T::Answer<Result<Enqueued>> {
    tx.enqueue(store, job.map(|job| vec![job]), |jobs| {
        jobs.first().copied().ok_or_else(no_answer)
    })
}
