//! One step: the effect and the settlement in one script of the Redis server that has the queue.
//!
//! What a transaction is to a database, a script is to this server, but for one thing: it is not
//! rolled back. So the effect is a fixed list of commands, all of them looked at before the first is
//! run. The receipt is compared in the same step, so no fence has to be opened: since the claim,
//! nobody who was replaced could change these keys by this way.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::context::Context;
use crate::ending::{Ending, native};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::redis::Commands;
use crate::handler::Failure;
use crate::lease::Verdict;
use crate::lifecycle::lane::Answer;
use crate::store::RedisStore;
use crate::{Store, Verb};

/// How long the call is repeated before the handler is told that it is unknown what came of it.
const CALL_LIMIT: Duration = Duration::from_secs(30);

impl Context {
    /// The key of that name beside the job, in the slot of its queue partition:
    /// `{namespace:queue:partition}:data:name`.
    ///
    /// A queue with several partitions has a key of that name in each. A job with an exclusive key is
    /// always in the same one.
    pub fn data_key(&self, name: impl fmt::Display) -> Result<String> {
        let partition = self.receipt().partition;
        Ok(self.redis_store()?.data_key(self.queue(), partition, name))
    }

    /// Runs commands and completes the job, in one step on the Redis server that has the queue: the
    /// effect and the settlement are both there or neither is. The handler should return now;
    /// whatever it returns, the job is completed.
    ///
    /// ```no_run
    /// # use leasehold::fence::redis::Commands;
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
    pub async fn complete_with(&self, commands: Commands) -> Result<(), Failure> {
        self.redis_store()?;
        #[cfg(feature = "testing")]
        crate::testing::await_point().await;
        let ending = Ending::of(self);
        let verdict = self.complete_by(&commands).await?;
        if !verdict.is_held() {
            return Err(self.refused(Verb::Settle));
        }
        ending.committed(verdict);
        Ok(())
    }

    /// Sends the call until its answer is known.
    async fn complete_by(&self, commands: &Commands) -> Result<Verdict> {
        let pool = self.pool();
        let (receipt, result) = (self.receipt(), self.lease().result());
        let spare = pool.spare_lanes.take();
        let mut lane = spare.unwrap_or_else(|| pool.session.lane());
        let completed = loop {
            let call = lane.call(CALL_LIMIT, |store: Arc<dyn Store>, request| {
                let (receipt, result) = (&receipt, result.clone());
                async move {
                    let store = redis_store(&*store)?;
                    store
                        .complete_with(request, receipt, result, commands)
                        .await
                }
            });
            match call.await {
                Answer::Known(verdict) => break Ok(verdict),
                // The receipt makes it safe to go again under a new id: what was done is fenced.
                Answer::Lost => {}
                Answer::Refused(error) => break Err(error),
                Answer::GaveUp(error) => {
                    let why = "the job may or may not have been completed";
                    break Err(Error::new(ErrorKind::Unknown, why).caused_by(error));
                }
            }
        };
        pool.spare_lanes.give(lane);
        completed
    }

    fn redis_store(&self) -> Result<&RedisStore> {
        redis_store(&**self.pool().store())
    }
}

fn redis_store(store: &dyn Store) -> Result<&RedisStore> {
    native(store, "Redis")
}
