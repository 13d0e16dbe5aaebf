//! In PostgreSQL: the transaction of any connection to the store's database.

use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::{Client, GenericClient, Transaction};

use super::{OwnedTransaction, TransactionRef};
use crate::context::Context;
use crate::ending::{Ending, native};
use crate::error::{Result, Verb};
use crate::handler::Failure;
use crate::job::NewJob;
use crate::store::{Enqueued, PostgresStore, Store};

type Awaited<'t, T> = Pin<Box<dyn Future<Output = T> + Send + 't>>;

macro_rules! within {
    ($($client:ty => $generic:ty),*) => {$(
        impl<'t> TransactionRef for &'t $client {
            type Answer<T> = Awaited<'t, T>;

            fn checkpoint(
                self,
                ctx: &Context,
                state: Result<Bytes, Failure>,
            ) -> Awaited<'t, Result<(), Failure>> {
                let ctx = ctx.clone();
                Box::pin(async move {
                    let checkpoint = ctx.next_checkpoint(state?);
                    let store = store(&**ctx.pool().store())?;
                    let saved = store.checkpoint_in::<$generic>(self, &checkpoint).await?;
                    ctx.checkpointed(saved)
                })
            }

            fn enqueue<T: 'static>(
                self,
                of: &Arc<dyn Store>,
                jobs: Result<Vec<NewJob>>,
                answer: fn(Vec<Enqueued>) -> Result<T>,
            ) -> Awaited<'t, Result<T>> {
                let of = Arc::clone(of);
                Box::pin(async move {
                    let stored = store(&*of)?.enqueue_in::<$generic>(self, jobs?).await;
                    stored.and_then(answer)
                })
            }
        }
    )*};
}

// Every `GenericClient` there is, and what derefs to one in a pool of ours.
within!(
    Client => Client,
    Transaction<'_> => Transaction<'_>,
    deadpool_postgres::Client => Client,
    deadpool_postgres::Transaction<'_> => Transaction<'_>
);

macro_rules! whole {
    ($($transaction:ty),*) => {$(
        impl<'t> OwnedTransaction for $transaction {
            type Answer<T> = Awaited<'t, T>;

            fn complete(self, ctx: &Context) -> Awaited<'t, Result<(), Failure>> {
                let ctx = ctx.clone();
                Box::pin(async move { complete(self, &ctx).await })
            }
        }
    )*};
}

whole!(
    Transaction<'t>,
    deadpool_postgres::Transaction<'t>,
    &'t Client
);

/// The end of a transaction, which a [`GenericClient`] alone does not know.
#[async_trait]
trait Commit: Send + Sync {
    type Client: GenericClient + Sync;

    fn client(&self) -> &Self::Client;
    async fn commit(self) -> Result<(), tokio_postgres::Error>;
    async fn rollback(self) -> Result<(), tokio_postgres::Error>;
}

#[async_trait]
impl Commit for Transaction<'_> {
    type Client = Self;

    fn client(&self) -> &Self {
        self
    }

    async fn commit(self) -> Result<(), tokio_postgres::Error> {
        self.commit().await
    }

    async fn rollback(self) -> Result<(), tokio_postgres::Error> {
        self.rollback().await
    }
}

#[async_trait]
impl<'t> Commit for deadpool_postgres::Transaction<'t> {
    type Client = Transaction<'t>;

    fn client(&self) -> &Transaction<'t> {
        self
    }

    async fn commit(self) -> Result<(), tokio_postgres::Error> {
        self.commit().await
    }

    async fn rollback(self) -> Result<(), tokio_postgres::Error> {
        self.rollback().await
    }
}

#[async_trait]
impl Commit for &Client {
    type Client = Client;

    fn client(&self) -> &Client {
        self
    }

    async fn commit(self) -> Result<(), tokio_postgres::Error> {
        self.batch_execute("COMMIT").await
    }

    async fn rollback(self) -> Result<(), tokio_postgres::Error> {
        self.batch_execute("ROLLBACK").await
    }
}

async fn complete(tx: impl Commit, ctx: &Context) -> Result<(), Failure> {
    let store = store(&**ctx.pool().store())?;
    let settlement = ctx.completion();
    let ending = Ending::of(ctx);
    match store.settle_in(tx.client(), &settlement).await {
        Ok(verdict) if verdict.is_held() => {
            tx.commit().await?;
            ending.committed(verdict);
            Ok(())
        }
        Ok(_) => {
            // The lease is somebody else's, whether or not the server could be told.
            let _ = tx.rollback().await;
            Err(ctx.refused(Verb::Settle))
        }
        Err(error) => {
            let _ = tx.rollback().await;
            Err(error.into())
        }
    }
}

fn store(store: &dyn Store) -> Result<&PostgresStore> {
    native(store, "PostgreSQL")
}
