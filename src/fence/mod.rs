//! Fences: stop the old owner where the effect happens.
//!
//! A holder can stand still between any check and any act, and be replaced meanwhile. So the check
//! belongs into the resource, in one step with the effect. A resource keeps a *mark* for each
//! [`Scope`]: the largest token it was opened for. What comes with a smaller token is refused.
//!
//! The mark is raised *before the first read*. A check on writes alone is not enough: an old owner
//! could still write between the read of the new one and its write, and be overwritten although it
//! was told that it had succeeded. So a resource is [opened](Fence::open) first, and only what that
//! returns can read or write.
//!
//! ```
//! use leasehold::fence::memory::Cell;
//! use leasehold::{Context, Failure};
//! # use serde::{Deserialize, Serialize};
//! # #[derive(Serialize, Deserialize)] struct Limit { most: i64 }
//! # impl leasehold::Job for Limit { const KIND: &'static str = "limit"; }
//!
//! async fn raise(job: Limit, ctx: Context, limit: Cell<i64>) -> Result<(), Failure> {
//!     let mut limit = ctx.fence(&limit).await?;
//!     if limit.read()? < job.most {
//!         limit.write(|most| *most = job.most)?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! What was not opened cannot be written to:
//!
//! ```compile_fail,E0599
//! # async fn handler(ctx: leasehold::Context, limit: leasehold::fence::memory::Cell<i64>) {
//! limit.write(|most| *most = 1);
//! # }
//! ```
//!
//! A refusal is a [`Stale`]. By `?` it ends the handler as *lost*: nothing is counted against the
//! job. If the lease is still the current one, the issuer has fallen behind the resource; the job
//! is handed back with the mark, and the store issues tokens above it from then on.
//!
//! | resource | adapter |
//! |---|---|
//! | a value in this process | [`memory`] |
//! | a file | [`file`](mod@file) |
//! | rows of an SQLite file, in your transaction | `sqlite` (feature `sqlite`) |
//! | rows of a PostgreSQL database, in your transaction | `postgres` (feature `postgres`) |
//! | keys of a Redis server, by a fixed list of commands | `redis` (feature `redis`) |
//! | another service, over HTTP | `http` (feature `http`) |
//!
//! For anything else implement [`Fence`], with [`Marks`] if the resource has no rule of its own,
//! and run the suite of the crate `leasehold-conformance` on it.

use std::error::Error as StdError;
use std::fmt;

use async_trait::async_trait;

use crate::error::{Error, Verb};
use crate::lease::FencingToken;
use crate::limits::{self, at_most};

#[cfg(feature = "redis")]
pub(crate) mod commands;
pub mod file;
#[cfg(feature = "http")]
pub mod http;
mod marks;
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
mod scope;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use marks::Marks;
pub use scope::Scope;

/// The one metric that is counted outside of `observe`: a fence can refuse in a process that has
/// neither client nor worker.
pub(crate) const STALE_WRITES_REJECTED: &str = "leasehold_stale_writes_rejected_total";

/// A resource that refuses the token of an owner that has been replaced.
///
/// # Contract
///
/// **Opening** raises the mark of the scope to the token, in one atomic step with the comparison,
/// and before anything is read. Opening again with the same token changes nothing.
///
/// **What it returns** is the only way to read or write. Each of its operations compares the token
/// with the mark and takes effect in one atomic step in the resource. An equal token passes.
///
/// **Named operations** are applied once per (token, operation).
///
/// **Pruning** below a token forgets smaller marks and refuses every smaller token from then on.
#[async_trait]
pub trait Fence: Send + Sync {
    /// What can read and write.
    type Opened: Send;

    /// Raises the mark of `scope` to `token`.
    ///
    /// # Errors
    /// [`FenceError::Stale`] if the mark is above the token. [`FenceError::Trouble`]: unknown; open
    /// again.
    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<Self::Opened, FenceError>;
}

#[async_trait]
impl<F: Fence + ?Sized> Fence for &F {
    type Opened = F::Opened;

    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<Self::Opened, FenceError> {
        (**self).open(scope, token).await
    }
}

/// What was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Opening.
    Open,
    /// A read.
    Read,
    /// A write.
    Write,
}

impl Op {
    /// One word, for labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A fence's refusal: the token is behind the mark, so its owner has been replaced.
///
/// By `?` it ends a handler as lost, also from inside another error that names it as its source.
#[derive(Clone, PartialEq, Eq)]
pub struct Stale(Box<Behind>);

/// A refusal's facts. They are the *source* of [`Stale`], so that they can be found in an error of
/// whatever type a handler's author has put it into.
#[derive(Clone, PartialEq, Eq)]
struct Behind {
    scope: Scope,
    token: FencingToken,
    mark: FencingToken,
    op: Op,
}

impl Stale {
    /// A refusal, which is counted here. For adapters.
    pub fn refuse(scope: &Scope, token: FencingToken, mark: FencingToken, op: Op) -> Self {
        let queue = scope.queue().to_owned();
        metrics::counter!(STALE_WRITES_REJECTED, "queue" => queue, "op" => op.as_str())
            .increment(1);
        tracing::debug!(%scope, %token, %mark, op = op.as_str(), "refused as stale");
        let scope = scope.clone();
        Self(Box::new(Behind {
            scope,
            token,
            mark,
            op,
        }))
    }

    /// The scope.
    pub fn scope(&self) -> &Scope {
        &self.0.scope
    }

    /// The token that was refused.
    pub fn token(&self) -> FencingToken {
        self.0.token
    }

    /// The resource's mark: a token that it has already been opened for.
    pub fn mark(&self) -> FencingToken {
        self.0.mark
    }

    /// What was refused.
    pub fn op(&self) -> Op {
        self.0.op
    }

    /// The mark of a refusal that an error is, or is caused by.
    pub(crate) fn mark_in(error: &(dyn StdError + 'static)) -> Option<FencingToken> {
        std::iter::successors(Some(error), |&error| error.source()).find_map(|error| {
            let stale = error.downcast_ref::<Self>().map(|stale| &*stale.0);
            let behind = stale.or_else(|| error.downcast_ref::<Behind>());
            behind.map(|behind| behind.mark)
        })
    }
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} refused by a fence", self.0.op.as_str())
    }
}

impl fmt::Display for Behind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            scope, token, mark, ..
        } = self;
        write!(f, "token {token} is behind the mark {mark} of {scope}")
    }
}

impl fmt::Debug for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stale({}: {})", self.0.op.as_str(), self.0)
    }
}

impl fmt::Debug for Behind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StdError for Stale {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.0)
    }
}

impl StdError for Behind {}

/// Why a fenced resource did not do what it was asked for.
#[derive(Debug)]
pub enum FenceError {
    /// It refused: the token is behind its mark. Nothing was changed.
    Stale(Stale),
    /// It could not be asked, or what it was asked for is not allowed.
    Trouble(Error),
}

impl FenceError {
    /// The refusal, if it is one.
    pub fn stale(&self) -> Option<&Stale> {
        match self {
            Self::Stale(stale) => Some(stale),
            Self::Trouble(_) => None,
        }
    }
}

impl From<Stale> for FenceError {
    fn from(stale: Stale) -> Self {
        Self::Stale(stale)
    }
}

impl From<Error> for FenceError {
    fn from(error: Error) -> Self {
        Self::Trouble(error.during(Verb::Fence))
    }
}

impl fmt::Display for FenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale(stale) => fmt::Display::fmt(stale, f),
            Self::Trouble(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl StdError for FenceError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Stale(stale) => stale.source(),
            Self::Trouble(error) => error.source(),
        }
    }
}

/// Checks an operation's name. For adapters.
///
/// # Errors
/// If it has more bytes than a key may have.
pub fn operation_name(operation: &str) -> Result<(), Error> {
    at_most("operation", operation.len(), limits::KEY_BYTES, "bytes")
        .map_err(|e| e.during(Verb::Fence))
}
