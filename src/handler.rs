//! Handlers: the code that works a job, and what it can ask for when it does not complete it.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::context::Context;
use crate::fence::Stale;
use crate::job::{Job, JobRecord};
use crate::lease::{DeclineCause, FencingToken};
use crate::state::StateType;

pub use crate::context::Resource;
pub use crate::state::{Argument, State};

/// Works jobs of one type.
///
/// Implement it for a struct that carries what the work needs. A plain
/// `async fn(job: J, ctx: Context) -> Result<(), E>` needs no implementation: a worker takes it as
/// it is, for any error type ([`IntoHandler`]).
///
/// `Ok` completes the job. `Err` retries it according to the queue's policy, unless the [`Failure`]
/// says otherwise. A panic and a time-out are failures, with their cause on record. When the lease
/// is lost, [`Context::cancelled`] resolves, and the future is dropped a moment later: whatever it
/// does must be safe to run again, and what it writes to should be opened by [`Context::fence`].
///
/// ```
/// use leasehold::{Context, Failure, Handler, Job, async_trait};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)] struct Mail { to: String }
/// # impl Job for Mail { const KIND: &'static str = "mail"; }
/// struct Mailer { from: String }
///
/// #[async_trait]
/// impl Handler<Mail> for Mailer {
///     async fn handle(&self, mail: Mail, ctx: Context) -> Result<(), Failure> {
///         if !mail.to.contains('@') {
///             return Err(Failure::bury("not an address"));
///         }
///         println!("{} → {} (attempt {})", self.from, mail.to, ctx.attempt());
///         Ok(())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot handle `{J}` jobs",
    label = "not a handler for `{J}`",
    note = "a handler is an `async fn(job: {J}, ctx: leasehold::Context) -> Result<(), E>`,",
    note = "or a type with `#[async_trait] impl leasehold::Handler<{J}> for …`"
)]
#[async_trait]
pub trait Handler<J: Job>: Send + Sync + 'static {
    /// Works one job under one lease.
    async fn handle(&self, job: J, ctx: Context) -> Result<(), Failure>;

    /// What the worker must have been given by [`Worker::state`](crate::Worker::state).
    #[doc(hidden)]
    fn needs(&self) -> Vec<StateType> {
        Vec::new()
    }
}

#[async_trait]
impl<J: Job, H: Handler<J> + ?Sized> Handler<J> for Arc<H> {
    async fn handle(&self, job: J, ctx: Context) -> Result<(), Failure> {
        (**self).handle(job, ctx).await
    }

    fn needs(&self) -> Vec<StateType> {
        (**self).needs()
    }
}

/// What [`Worker::handle`](crate::Worker::handle) takes: a [`Handler`], or a plain function.
///
/// The function is asynchronous and takes the job, its [`Context`] and up to four values of
/// [`State`]. Its error is anything that `?` can convert into a [`Failure`]. `M` tells the two
/// apart, and is always inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "neither a function that a worker can call, nor a `leasehold::Handler`",
    note = "a handler is an `async fn(job: J, ctx: leasehold::Context) -> Result<(), E>`,",
    note = "with up to four more arguments, each a `leasehold::State<…>`,",
    note = "or a type with `#[async_trait] impl leasehold::Handler<J> for …`"
)]
pub trait IntoHandler<J, M = ByTrait> {
    /// The handler that it becomes.
    type Handler;

    /// The handler.
    fn into_handler(self) -> Self::Handler;
}

/// How a handler was given: see [`IntoHandler`].
#[doc(hidden)]
#[derive(Debug)]
pub enum ByTrait {}

impl<J: Job, H: Handler<J>> IntoHandler<J, ByTrait> for H {
    type Handler = H;

    fn into_handler(self) -> H {
        self
    }
}

/// A function that works jobs, and the types of its arguments after the job and its context.
#[doc(hidden)]
pub struct Function<F, A> {
    function: F,
    arguments: PhantomData<fn() -> A>,
}

impl<F, A> fmt::Debug for Function<F, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<F>())
    }
}

/// Functions with this many arguments after the job and its context.
///
/// What else makes a function a handler (its future is `Send`, its arguments are `State`s) is asked
/// by `Handler`, not by `IntoHandler`: there, the compiler would say only that no arity fits.
macro_rules! functions {
    ($($Argument:ident $argument:ident),*) => {
        impl<J, F, Fut, $($Argument),*> IntoHandler<J, ($($Argument,)*)> for F
        where
            F: Fn(J, Context, $($Argument),*) -> Fut,
        {
            type Handler = Function<F, ($($Argument,)*)>;

            fn into_handler(self) -> Self::Handler {
                let (function, arguments) = (self, PhantomData);
                Function { function, arguments }
            }
        }

        #[async_trait]
        impl<J, F, Fut, E, $($Argument),*> Handler<J> for Function<F, ($($Argument,)*)>
        where
            J: Job,
            F: Fn(J, Context, $($Argument),*) -> Fut + Send + Sync + 'static,
            Fut: Future<Output = Result<(), E>> + Send,
            E: Into<Failure>,
            $($Argument: Argument + 'static,)*
        {
            async fn handle(&self, job: J, ctx: Context) -> Result<(), Failure> {
                $(let $argument = $Argument::of(&ctx)?;)*
                (self.function)(job, ctx, $($argument),*).await.map_err(Into::into)
            }

            fn needs(&self) -> Vec<StateType> {
                vec![$($Argument::needed()),*]
            }
        }
    };
}

functions!();
functions!(A a);
functions!(A a, B b);
functions!(A a, B b, C c);
functions!(A a, B b, C c, D d);

/// Why a handler did not complete its job, and what should become of the job.
///
/// `?` converts any error into a failure that retries according to the queue's policy. The one
/// exception is a fence's refusal, or an error with such a refusal as its source: it means what
/// [`fenced`](Self::fenced) does.
pub struct Failure {
    pub(crate) wish: Wish,
    reason: Box<dyn StdError + Send + Sync>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wish {
    /// Again according to the queue's policy, or dead if there were too many failures.
    Policy,
    /// Again after this long.
    RetryIn(Duration),
    /// Later; nothing counted.
    Snooze(Duration),
    /// Never again.
    Bury,
    /// This handler no longer holds the lease: settle nothing.
    Lost,
    /// A fence refused a holder that is still the current one: hand the job back, with the mark.
    Behind(FencingToken),
    /// This worker cannot work the job: hand it back for others.
    Decline(DeclineCause),
}

impl Failure {
    fn new(wish: Wish, reason: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self {
            wish,
            reason: reason.into(),
        }
    }

    /// Retry after `delay`, whatever the policy says. Counts as a failure.
    pub fn retry_in(delay: Duration, reason: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::new(Wish::RetryIn(delay), reason)
    }

    /// Not now: come back after `delay`. Does not count as a failure.
    pub fn snooze(delay: Duration) -> Self {
        Self::new(Wish::Snooze(delay), "snoozed")
    }

    /// Give up: the job is dead. It stays until an operator retries or purges it.
    pub fn bury(reason: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::new(Wish::Bury, reason)
    }

    /// The lease is lost: stop, and settle nothing. [`Context::save_checkpoint`] returns it to a
    /// fenced holder, so that `?` ends the handler.
    pub fn lost() -> Self {
        Self::new(Wish::Lost, "the lease was lost")
    }

    /// A fence whose mark is `mark` refused this handler's token. If the lease is still the current
    /// one, the job is handed back and the store raises its tokens above the mark.
    pub fn fenced(mark: FencingToken) -> Self {
        Self::new(
            Wish::Behind(mark),
            format!("refused by a fence with the mark {mark}"),
        )
    }

    /// This worker cannot work the job. Does not count as a failure.
    pub(crate) fn declined(cause: DeclineCause, reason: impl Into<String>) -> Self {
        Self::new(Wish::Decline(cause), reason.into())
    }

    /// Whether the handler stops because its lease is lost, or because a fence refused it.
    pub fn is_lost(&self) -> bool {
        matches!(self.wish, Wish::Lost | Wish::Behind(_))
    }

    /// The reason and its causes, in one line.
    pub fn reason(&self) -> String {
        let mut text = self.reason.to_string();
        let mut cause = self.reason.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failure")
            .field("wish", &self.wish)
            .field("reason", &self.reason())
            .finish()
    }
}

// `Failure` does not implement `std::error::Error`: this conversion, which makes `?` work on any
// error, would then conflict with the one from a type into itself.
impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        let reason = error.into();
        let mark = Stale::mark_in(&*reason);
        Self::new(mark.map_or(Wish::Policy, Wish::Behind), reason)
    }
}

pub(crate) type Running<'a> = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send + 'a>>;

/// A handler whose job type is known only to itself.
pub(crate) trait AnyHandler: Send + Sync + 'static {
    /// Decodes the payload and starts the work.
    fn start(&self, ctx: Context) -> Result<Running<'_>, Failure>;
}

pub(crate) struct Typed<J, H> {
    handler: H,
    job: PhantomData<fn() -> J>,
}

impl<J: Job, H: Handler<J>> Typed<J, H> {
    pub(crate) fn new(handler: H) -> Self {
        Self {
            handler,
            job: PhantomData,
        }
    }
}

impl<J: Job, H: Handler<J>> AnyHandler for Typed<J, H> {
    fn start(&self, ctx: Context) -> Result<Running<'_>, Failure> {
        let job = decoded(ctx.job())?;
        Ok(self.handler.handle(job, ctx))
    }
}

/// Reads a payload of the type's own version, or of an older one.
fn decoded<J: Job>(job: &JobRecord) -> Result<J, Failure> {
    let (payload, version) = (&job.payload, job.version);
    if version > J::VERSION {
        let reason = format!(
            "payload version {version}, this worker reads up to {}",
            J::VERSION
        );
        return Err(Failure::declined(DeclineCause::NewerVersion, reason));
    }
    let read = if version == J::VERSION {
        serde_json::from_slice(payload).map_err(|e| e.to_string())
    } else {
        upgraded(version, payload)
    };
    read.map_err(|why| {
        let reason = format!("undecodable payload of {} bytes: {why}", payload.len());
        Failure::declined(DeclineCause::UndecodablePayload, reason)
    })
}

/// Reads a payload of an older version, step by step.
fn upgraded<J: Job>(version: u32, payload: &[u8]) -> Result<J, String> {
    let mut value = serde_json::from_slice(payload).map_err(|e| e.to_string())?;
    for from in version..J::VERSION {
        value = J::upgrade(from, value)
            .map_err(|e| format!("version {from} does not become {}: {e}", from + 1))?;
    }
    let read = serde_json::from_value(value);
    read.map_err(|e| format!("upgraded from version {version}: {e}"))
}
