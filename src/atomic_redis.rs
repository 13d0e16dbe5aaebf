//! Effect and settlement, or effect and checkpoint, in one script of the Redis server that has the
//! queue: [`RedisContext`] adds this to a handler's [`Context`].
//!
//! A script is to a Redis server what a transaction is to a database, except that it cannot be
//! rolled back. So the effect is a fixed list of commands, all of them checked before the first is
//! run. The receipt is compared in the same step, so no fence has to be opened: a replaced owner
//! cannot change these keys in this way.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::Store;
use crate::calls::lane::Answer;
use crate::context::Context;
use crate::ending::{Ending, native};
use crate::error::Verb;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::redis::Commands;
use crate::handler::Failure;
use crate::lease::Verdict;
use crate::store::{Checkpoint, Checkpointed, RedisStore, RequestId};

/// How long the call is repeated before the handler is told that it is unknown what came of it.
const CALL_LIMIT: Duration = Duration::from_secs(30);

const COMPLETED_OR_NOT: &str = "the job may or may not have been completed";

/// What a handler awaits is part of its own type: one as deep as a store's step is more than the
/// compiler looks into.
fn boxed<'a, T>(
    call: impl Future<Output = T> + Send + 'a,
) -> Pin<Box<dyn Future<Output = T> + Send + 'a>> {
    Box::pin(call)
}

/// What a handler can do where its queue is on Redis. On another store these calls fail.
pub trait RedisContext: sealed::Sealed {
    /// The key of that name beside the job, in the slot of its queue partition:
    /// `{namespace:queue:partition}:data:name`.
    ///
    /// A queue with several partitions has a key of that name in each. A job with an exclusive key
    /// is always in the same one.
    ///
    /// # Errors
    /// If the store is not on Redis.
    fn data_key(&self, name: impl fmt::Display) -> Result<String>;

    /// Runs commands and completes the job, in one step on the Redis server that has the queue: the
    /// effect and the settlement are both there or neither is. The handler should return now;
    /// whatever it returns, the job is completed.
    ///
    /// ```no_run
    /// # use leasehold::fence::redis::Commands;
    /// # use leasehold::atomic_redis::RedisContext as _;
    /// # use leasehold::{Context, Failure};
    /// # struct Debit { amount: i64 }
    /// async fn debit(job: Debit, ctx: Context) -> Result<(), Failure> {
    ///     let account = ctx.data_key("account:7")?; // "{leasehold:default:0}:data:account:7"
    ///     ctx.complete_with(Commands::new().incr_by(account, -job.amount)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// Ends the handler by `?`. As lost if the lease is somebody else's: nothing was written. As a
    /// failure if a key is not in the job's slot (see [`data_key`](Self::data_key)), if a command
    /// only reads or would fail, or if the store is not on Redis: nothing was written either. As a
    /// failure too if the server did not answer for long: then it may have been done, and if so the
    /// job is completed.
    fn complete_with(&self, commands: Commands)
    -> impl Future<Output = Result<(), Failure>> + Send;

    /// Runs commands and saves state under the lease, in one step on the Redis server that has the
    /// queue: the next run starts from a state that tells exactly what has been done. For the steps
    /// of a long job; the last one can be [`complete_with`](Self::complete_with). Counts as
    /// progress.
    ///
    /// ```no_run
    /// # use leasehold::fence::redis::Commands;
    /// # use leasehold::atomic_redis::RedisContext as _;
    /// # use leasehold::{Context, Failure};
    /// # struct Payout { accounts: Vec<String>, cents: i64 }
    /// async fn pay(job: Payout, ctx: Context) -> Result<(), Failure> {
    ///     let paid: usize = ctx.last_checkpoint()?.unwrap_or_default();
    ///     for (n, account) in job.accounts.iter().enumerate().skip(paid) {
    ///         let credit = Commands::new().incr_by(ctx.data_key(account)?, job.cents);
    ///         ctx.save_checkpoint_with(&(n + 1), credit).await?; // no account is paid twice
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`complete_with`](Self::complete_with). Also a failure, and nothing was written, if a
    /// later checkpoint of this run has been saved meanwhile.
    fn save_checkpoint_with<T: Serialize + Sync>(
        &self,
        state: &T,
        commands: Commands,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::context::Context {}
}

impl RedisContext for Context {
    fn data_key(&self, name: impl fmt::Display) -> Result<String> {
        let partition = self.receipt().partition;
        Ok(self.redis_store()?.data_key(self.queue(), partition, name))
    }

    async fn complete_with(&self, commands: Commands) -> Result<(), Failure> {
        self.redis_store()?;
        #[cfg(feature = "testing")]
        crate::point::await_point().await;
        let ending = Ending::of(self);
        // Until its answer is known, also if the handler is dropped meanwhile.
        self.lease().doubt();
        let completed = self.complete_by(&commands).await;
        let in_doubt = match &completed {
            Ok((_, was_lost)) => *was_lost,
            Err(error) => error.kind() == ErrorKind::Unknown,
        };
        if !in_doubt {
            self.lease().clear_doubt();
        }
        let (verdict, _) = completed?;
        if !verdict.is_held() {
            let refused = self.refused(Verb::Settle);
            let unknown = || Error::new(ErrorKind::Unknown, COMPLETED_OR_NOT).into();
            return Err(if in_doubt { unknown() } else { refused });
        }
        ending.committed(verdict);
        Ok(())
    }

    async fn save_checkpoint_with<T: Serialize + Sync>(
        &self,
        state: &T,
        commands: Commands,
    ) -> Result<(), Failure> {
        self.redis_store()?;
        let bytes = serde_json::to_vec(state)?;
        #[cfg(feature = "testing")]
        crate::point::await_point().await;
        let seq = self.lease().next_seq();
        let checkpoint = Checkpoint {
            receipt: self.receipt(),
            seq,
            bytes: bytes.into(),
        };
        let (checkpoint, commands) = (&checkpoint, &commands);
        let call = |store: Arc<dyn Store>, request| async move {
            let store = redis_store(&*store)?;
            boxed(store.checkpoint_with(request, checkpoint, commands)).await
        };
        // Its number makes it safe to go again under a new id: what is saved is not done again.
        let why = "the commands may or may not have been run";
        match self.until_known(why, call).await?.0 {
            Checkpointed::Saved { cancel, .. } => {
                self.was_saved(seq, cancel);
                Ok(())
            }
            Checkpointed::Behind { seq } => {
                let why = format!("checkpoint {seq} of this run is saved: nothing was written");
                Err(Failure::from(why))
            }
            Checkpointed::Fenced => Err(self.refused(Verb::Checkpoint)),
        }
    }
}

impl Context {
    async fn complete_by(&self, commands: &Commands) -> Result<(Verdict, bool)> {
        let (receipt, result) = (&self.receipt(), self.lease().result());
        let call = |store: Arc<dyn Store>, request| {
            let result = result.clone();
            async move {
                let store = redis_store(&*store)?;
                boxed(store.complete_with(request, receipt, result, commands)).await
            }
        };
        // The receipt makes it safe to go again under a new id: what was done is refused.
        self.until_known(COMPLETED_OR_NOT, call).await
    }

    /// Sends a call until its answer is known. Also tells whether an earlier copy of it may have
    /// been applied, the answer to which is lost for good.
    async fn until_known<T, F>(
        &self,
        in_doubt: &'static str,
        call: impl Fn(Arc<dyn Store>, RequestId) -> F,
    ) -> Result<(T, bool)>
    where
        F: Future<Output = Result<T>>,
    {
        let mut lane = self.pool().session.lane();
        let mut was_lost = false;
        loop {
            match lane.call(CALL_LIMIT, &call).await {
                Answer::Known(answer) => return Ok((answer, was_lost)),
                Answer::Lost => was_lost = true,
                Answer::Refused(error) if !was_lost => return Err(error),
                Answer::Refused(error) | Answer::GaveUp(error) => {
                    return Err(Error::new(ErrorKind::Unknown, in_doubt).caused_by(error));
                }
            }
        }
    }

    fn redis_store(&self) -> Result<&RedisStore> {
        redis_store(&**self.pool().store())
    }
}

fn redis_store(store: &dyn Store) -> Result<&RedisStore> {
    native(store, "Redis")
}
