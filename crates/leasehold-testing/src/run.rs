//! One run of a handler, by hand.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::stage::Stage;
use leasehold::handler::IntoHandler;
use leasehold::job::{Job, NewJob};
use leasehold::lease::FencingToken;
use leasehold::store;
use leasehold::{Handler, Result, Worker};

/// How a run of a handler ends for its job.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ended {
    /// The job is done.
    Completed,
    /// It failed or panicked, and is tried again.
    Retried {
        /// How long it waits. Drawn at random, unless the handler said how long.
        delay: Duration,
        /// Why.
        reason: String,
    },
    /// It comes back later; nothing is counted.
    Snoozed {
        /// How long it waits.
        delay: Duration,
    },
    /// The handler cannot read this job, and leaves it to workers of another version.
    Declined {
        /// Why.
        reason: String,
    },
    /// It is dead.
    Buried {
        /// Why.
        reason: String,
    },
    /// A fence refused the handler, though its lease is the current one: the job is handed back.
    Refused {
        /// The fence's mark.
        mark: FencingToken,
    },
    /// The handler takes its lease to be lost: nothing is settled.
    Lost,
}

impl Ended {
    pub(super) fn of(outcome: Option<&store::Outcome>) -> Self {
        match outcome.cloned() {
            None => Self::Lost,
            Some(store::Outcome::Complete { .. }) => Self::Completed,
            Some(store::Outcome::Retry { delay, reason }) => Self::Retried { delay, reason },
            Some(store::Outcome::Decline { reason, .. }) => Self::Declined { reason },
            Some(store::Outcome::Bury { reason }) => Self::Buried { reason },
            Some(store::Outcome::Surrender {
                mark: Some(mark), ..
            }) => Self::Refused { mark },
            Some(store::Outcome::Surrender { delay, .. }) => Self::Snoozed { delay },
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => write!(f, "completed"),
            Self::Retried { reason, .. } => write!(f, "retried: {reason}"),
            Self::Snoozed { delay } => write!(f, "snoozed for {delay:?}"),
            Self::Declined { reason } => write!(f, "declined: {reason}"),
            Self::Buried { reason } => write!(f, "buried: {reason}"),
            Self::Refused { mark } => write!(f, "refused by a fence with the mark {mark}"),
            Self::Lost => write!(f, "lost"),
        }
    }
}

/// What one run did, apart from its effects.
#[derive(Debug)]
pub struct Ran {
    ended: Ended,
    result: Option<Bytes>,
    checkpoint: Option<Bytes>,
    enqueued: Vec<NewJob>,
}

/// Runs a handler on a job: no store, no worker, attempt 1.
///
/// ```
/// use leasehold::{Context, Failure, Job};
/// # use serde::{Deserialize, Serialize};
/// # use std::time::Duration;
/// #[derive(Serialize, Deserialize)]
/// struct Mail { to: String }
/// # impl Job for Mail { const KIND: &'static str = "mail"; }
///
/// async fn mail(mail: Mail, _ctx: Context) -> Result<(), Failure> {
///     match mail.to.as_str() {
///         "busy" => Err(Failure::snooze(Duration::from_secs(60))),
///         to if !to.contains('@') => Err(Failure::bury("not an address")),
///         _ => Ok(()),
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// leasehold_testing::run(mail, &Mail { to: "a@example.org".into() }).await?.assert_completed();
/// leasehold_testing::run(mail, &Mail { to: "ann".into() }).await?.assert_buried("not an address");
/// let busy = leasehold_testing::run(mail, &Mail { to: "busy".into() }).await?;
/// busy.assert_snoozed(Duration::from_secs(60));
/// # Ok(()) }
/// ```
///
/// # Errors
/// If the job breaks a limit. What the handler returns is no error here.
pub async fn run<J: Job, M>(
    handler: impl IntoHandler<J, M, Handler: Handler<J>>,
    job: &J,
) -> Result<Ran> {
    run_with(handler, job, |worker| worker).await
}

/// As [`run`], with what the handler's worker has around it: shared state, layers.
///
/// ```
/// use leasehold::{Context, Failure, Job, State};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)]
/// # struct Mail { to: String }
/// # impl Job for Mail { const KIND: &'static str = "mail"; }
/// #[derive(Clone)]
/// struct Domain(&'static str);
///
/// async fn mail(mail: Mail, _: Context, State(domain): State<Domain>) -> Result<(), Failure> {
///     if mail.to.ends_with(domain.0) { Ok(()) } else { Err(Failure::bury("not one of ours")) }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let ann = Mail { to: "ann@example.org".into() };
/// let ran = leasehold_testing::run_with(mail, &ann, |worker| worker.state(Domain("example.com")));
/// ran.await?.assert_buried("not one of ours");
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`run`]; and if the handler takes state that the worker was not given.
pub async fn run_with<J: Job, M>(
    handler: impl IntoHandler<J, M, Handler: Handler<J>>,
    job: &J,
    around: impl FnOnce(Worker) -> Worker,
) -> Result<Ran> {
    let job = NewJob::of(job)?;
    let queue = job.queue.clone();
    let stage = Stage::new(Arc::default());
    stage.enqueue(job).await?;
    let mut actor = stage
        .claim(|worker| around(worker).handle_in(queue.as_str(), handler))
        .await?;
    actor.go_to(usize::MAX).await;
    let (result, checkpoint) = (actor.result(), actor.checkpoint().await?);
    let ended = actor.settle().await.unwrap_or(Ended::Lost);
    Ok(Ran {
        ended,
        result,
        checkpoint,
        enqueued: stage.enqueued(),
    })
}

impl Ran {
    /// How it ended.
    pub fn ended(&self) -> &Ended {
        &self.ended
    }

    /// The jobs that it enqueued.
    pub fn enqueued(&self) -> &[NewJob] {
        &self.enqueued
    }

    /// What it left by [`Context::set_result`](leasehold::Context::set_result).
    ///
    /// # Panics
    /// If it cannot be decoded as `T`.
    #[track_caller]
    pub fn result<T: DeserializeOwned>(&self) -> Option<T> {
        decode(self.result.as_ref(), "result")
    }

    /// What it saved last by [`Context::save_checkpoint`](leasehold::Context::save_checkpoint).
    ///
    /// # Panics
    /// If it cannot be decoded as `T`.
    #[track_caller]
    pub fn checkpoint<T: DeserializeOwned>(&self) -> Option<T> {
        decode(self.checkpoint.as_ref(), "checkpoint")
    }

    /// # Panics
    /// Unless the job is done.
    #[track_caller]
    pub fn assert_completed(&self) {
        assert_eq!(self.ended, Ended::Completed, "the handler ended otherwise");
    }

    /// # Panics
    /// Unless the job is tried again, for a reason that contains `part`.
    #[track_caller]
    pub fn assert_retried(&self, part: &str) {
        let found = matches!(&self.ended, Ended::Retried { reason, .. } if reason.contains(part));
        assert!(found, "not retried because of {part:?}, but {}", self.ended);
    }

    /// # Panics
    /// Unless the job is dead, for a reason that contains `part`.
    #[track_caller]
    pub fn assert_buried(&self, part: &str) {
        let found = matches!(&self.ended, Ended::Buried { reason } if reason.contains(part));
        assert!(found, "not buried because of {part:?}, but {}", self.ended);
    }

    /// # Panics
    /// Unless the job comes back after this long.
    #[track_caller]
    pub fn assert_snoozed(&self, delay: Duration) {
        assert_eq!(
            self.ended,
            Ended::Snoozed { delay },
            "the handler ended otherwise"
        );
    }

    /// # Panics
    /// Unless the handler stopped because its lease was lost, or a fence refused it.
    #[track_caller]
    pub fn assert_lost(&self) {
        let found = matches!(self.ended, Ended::Lost | Ended::Refused { .. });
        assert!(found, "not lost, but {}", self.ended);
    }
}

#[track_caller]
fn decode<T: DeserializeOwned>(bytes: Option<&Bytes>, what: &str) -> Option<T> {
    let decoded = serde_json::from_slice(bytes?);
    Some(decoded.unwrap_or_else(|error| panic!("undecodable {what}: {error}")))
}
