//! In PostgreSQL: the transaction of any driver's connection to the store's database.

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use super::{BeginTransaction, OwnedTransaction, TransactionRef};
use crate::context::{Context, Opening, Resource, watched};
use crate::driver::limit::{Limits, limit};
use crate::driver::{SCHEMA, SqlBegin, SqlRunner, SqlTransaction};
use crate::ending::{Ending, native};
use crate::error::{Error, Result, Verb};
use crate::fence::postgres::{OpenTransaction, opened};
use crate::handler::Failure;
use crate::job::NewJob;
use crate::store::{Enqueued, PostgresStore, Store};

type Awaited<'t, T> = Pin<Box<dyn Future<Output = T> + Send + 't>>;

/// Any driver of PostgreSQL.
#[derive(Debug)]
pub struct Postgres<'t, D>(PhantomData<(&'t (), D)>);

impl Context {
    /// What a transaction under this lease is allowed.
    fn limits(&self) -> Limits {
        Limits {
            idle: Some(self.held.grant.term),
            wait: Some(self.time_left()),
        }
    }
}

impl<'t, T: SqlRunner<D> + 't, D: 'static> TransactionRef<Postgres<'t, D>> for T {
    type Answer<A> = Awaited<'t, A>;

    fn checkpoint(
        self,
        ctx: &Context,
        state: Result<Bytes, Failure>,
    ) -> Awaited<'t, Result<(), Failure>> {
        let ctx = ctx.clone();
        Box::pin(async move {
            let checkpoint = ctx.next_checkpoint(state?);
            let store = store(&**ctx.pool().store())?;
            let saved = store.checkpoint_under(self, &checkpoint, ctx.limits());
            ctx.checkpointed(saved.await?)
        })
    }

    fn enqueue<A: 'static>(
        self,
        of: &Arc<dyn Store>,
        jobs: Result<Vec<NewJob>>,
        answer: fn(Vec<Enqueued>) -> Result<A>,
    ) -> Awaited<'t, Result<A>> {
        let of = Arc::clone(of);
        Box::pin(async move {
            let stored = store(&*of)?.enqueue_in(self, jobs?).await;
            stored.and_then(answer)
        })
    }
}

impl<'t, T: SqlTransaction<D> + 't, D: 'static> OwnedTransaction<Postgres<'t, D>> for T {
    type Answer<A> = Awaited<'t, A>;

    fn complete(mut self, ctx: &Context) -> Awaited<'t, Result<(), Failure>> {
        let ctx = ctx.clone();
        Box::pin(async move {
            let store = store(&**ctx.pool().store())?;
            let settlement = ctx.completion();
            let ending = Ending::of(&ctx);
            let settled = store.settle_under(self.runner(), &settlement, ctx.limits());
            match settled.await {
                Ok(verdict) if verdict.is_held() => {
                    // If its answer is lost, the refusal of what follows is no stale holder's.
                    ctx.lease().doubt();
                    self.commit().await.map_err(Error::from)?;
                    ending.committed(verdict);
                    Ok(())
                }
                Ok(_) => {
                    // The lease is somebody else's, whether or not the server could be told.
                    let _ = self.rollback().await;
                    Err(ctx.refused(Verb::Settle))
                }
                Err(error) => {
                    let _ = self.rollback().await;
                    Err(error.into())
                }
            }
        })
    }
}

impl<'t, B: SqlBegin<D> + 't, D: 'static> BeginTransaction<Postgres<'t, D>> for B
where
    B::Transaction: 't,
{
    type Begun = Awaited<'t, Result<B::Transaction>>;

    fn begin(self, ctx: &Context) -> Self::Begun {
        let ctx = ctx.clone();
        Box::pin(async move {
            let mut tx = SqlBegin::begin(self).await?;
            let scope = ctx.scope();
            let scopes = [scope.as_str()];
            limit(&mut tx.runner(), ctx.limits(), &scopes, ctx.token()).await?;
            Ok(tx)
        })
    }
}

impl<'t, T: SqlRunner<D> + 't, D: 'static> Resource<Postgres<'t, D>> for T {
    type Opening = Opening<'t, OpenTransaction<T, D>>;

    fn open_for(self, ctx: &Context) -> Self::Opening {
        let ctx = ctx.clone();
        Box::pin(watched(async move {
            let scopes = [ctx.scope()];
            let schema = match store(&**ctx.pool().store()) {
                Ok(store) => store.schema(),
                Err(_) => SCHEMA,
            };
            opened(self, &scopes, ctx.token(), ctx.limits(), schema).await
        }))
    }
}

fn store(store: &dyn Store) -> Result<&PostgresStore> {
    native(store, "PostgreSQL")
}
