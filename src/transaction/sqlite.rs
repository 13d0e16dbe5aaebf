//! In SQLite: the transaction of a connection to the store's file.

use std::sync::Arc;

use bytes::Bytes;
use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::{BeginTransaction, OwnedTransaction, TransactionRef};
use crate::context::Context;
use crate::ending::{Ending, native};
use crate::error::{Result, Verb};
use crate::fence::{FenceError, sqlite};
use crate::handler::Failure;
use crate::job::NewJob;
use crate::store::{Enqueued, SqliteStore, Store, named};

impl Context {
    /// Opens the transaction's fence under this lease's scope and token, and with it the right to
    /// read and write: see [`fence::sqlite`](crate::fence::sqlite). The data may be in any file.
    ///
    /// # Errors
    /// As [`fence`](Self::fence).
    pub fn fence_in<'t>(
        &self,
        tx: &'t Transaction<'_>,
    ) -> Result<sqlite::OpenConnection<'t>, FenceError> {
        let opened = sqlite::open(tx, &self.scope(), self.token())?;
        #[cfg(feature = "testing")]
        crate::point::opened();
        Ok(opened)
    }
}

/// `rusqlite`, and a file.
#[derive(Debug)]
pub enum Rusqlite {}

impl<'c> BeginTransaction<Rusqlite> for &'c mut Connection {
    type Begun = rusqlite::Result<Transaction<'c>>;

    fn begin(self, _: &Context) -> rusqlite::Result<Transaction<'c>> {
        self.transaction_with_behavior(TransactionBehavior::Immediate)
    }
}

impl TransactionRef<Rusqlite> for &Transaction<'_> {
    type Answer<T> = T;

    fn checkpoint(self, ctx: &Context, state: Result<Bytes, Failure>) -> Result<(), Failure> {
        let checkpoint = ctx.next_checkpoint(state?);
        let saved = store(&**ctx.pool().store())?.checkpoint_in(self, &checkpoint)?;
        ctx.checkpointed(saved)
    }

    fn enqueue<T: 'static>(
        self,
        of: &Arc<dyn Store>,
        jobs: Result<Vec<NewJob>>,
        answer: fn(Vec<Enqueued>) -> Result<T>,
    ) -> Result<T> {
        let jobs = named(jobs?)?;
        store(&**of)?.enqueue_in(self, &jobs).and_then(answer)
    }
}

impl OwnedTransaction<Rusqlite> for Transaction<'_> {
    type Answer<T> = T;

    fn complete(self, ctx: &Context) -> Result<(), Failure> {
        let store = store(&**ctx.pool().store())?;
        let settlement = ctx.completion();
        let ending = Ending::of(ctx);
        match store.settle_in(&self, &settlement) {
            Ok(ridden) if ridden.answer.is_held() => {
                self.commit()?;
                ending.committed(ridden.answer);
                store.wake(ridden);
                Ok(())
            }
            Ok(_) => {
                // Also if the caller has it committed when it is dropped.
                self.rollback()?;
                Err(ctx.refused(Verb::Settle))
            }
            Err(error) => {
                self.rollback()?;
                Err(error.into())
            }
        }
    }
}

fn store(store: &dyn Store) -> Result<&SqliteStore> {
    native(store, "SQLite")
}
