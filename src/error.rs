//! Errors: a call to the store that failed, or was never answered.
//!
//! Three kinds of "no", three types. A [`Verdict`](crate::lease::Verdict) is an answer: the call
//! worked and says "you are fenced". A [`Failure`](crate::Failure) is what a handler asks for. An
//! [`Error`] is neither: the store could not be reached, or rejected the request.
//!
//! **An error from a write means *unknown*, not *no*.** The write may have been applied; repeat the
//! same request, with the same request id, until it answers. The exceptions are the kinds for which
//! [`ErrorKind::is_certain`] is true: then nothing was applied.
//!
//! There is one error type for the whole crate, because a caller does the same three things with
//! any of them: ask whether it is worth repeating, look at the kind, print it.

use std::error::Error as StdError;
use std::fmt;

use crate::job::JobId;

/// `Result` with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A verb of the store contract: says where an error came from and labels events.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the verbs are the glossary's")]
pub enum Verb {
    Open,
    Enqueue,
    Claim,
    Run,
    Renew,
    Settle,
    Checkpoint,
    Fence,
    Reap,
    Control,
    Inspect,
    Wait,
    Prune,
    Acquire,
    Release,
    Save,
    Commit,
    Check,
}

impl Verb {
    /// As it is stored with the answer to a call.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Enqueue => 1,
            Self::Claim => 2,
            Self::Settle => 3,
            Self::Checkpoint => 4,
            Self::Reap => 5,
            Self::Control => 6,
            Self::Prune => 7,
            Self::Acquire => 8,
            Self::Release => 9,
            Self::Save => 10,
            Self::Commit => 11,
            _ => 0,
        }
    }

    /// The verb's one spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Enqueue => "enqueue",
            Self::Claim => "claim",
            Self::Run => "run",
            Self::Renew => "renew",
            Self::Settle => "settle",
            Self::Checkpoint => "checkpoint",
            Self::Fence => "fence",
            Self::Reap => "reap",
            Self::Control => "control",
            Self::Inspect => "inspect",
            Self::Wait => "wait",
            Self::Prune => "prune",
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::Save => "save",
            Self::Commit => "commit",
            Self::Check => "check",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What went wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store did not answer: it is down, cannot be reached, took too long, or hung up.
    Unavailable,
    /// Another process has held the store's write lock for too long.
    Contended,
    /// The store has no room left: disk or memory.
    Full,
    /// The issuer's tokens have run too far ahead of its clock. They fit again a moment later, or,
    /// after the clock of a strict store was set back, once it has caught up. A queue cannot be
    /// removed while its clock is behind.
    TokensAhead,
    /// The request's session is not open (idle too long, store restored), or its sequence number
    /// was overtaken. Nothing was applied by *this* call; an earlier copy of it may have been.
    SessionLost,
    /// The call may or may not have been applied, and that can no longer be found out.
    Unknown,
    /// An argument is outside its limits. Nothing was stored.
    InvalidInput,
    /// The store does not offer this.
    Unsupported,
    /// The stored data makes no sense.
    Corrupt,
    /// The store can be read but not written.
    ReadOnly,
    /// The server rejects the user or password, the user lacks a permission, or the server's
    /// certificate is not trusted.
    Denied,
    /// The store was written by a newer version of this crate.
    TooNew,
    /// The store's file was removed or replaced while it was open. Only a restart helps.
    Replaced,
    /// The store handle was closed.
    Closed,
    /// Anything else.
    Unexpected,
}

impl ErrorKind {
    /// Whether simply repeating the call later may succeed.
    pub const fn is_transient(self) -> bool {
        matches!(
            self,
            Self::Unavailable | Self::Contended | Self::Full | Self::TokensAhead
        )
    }

    /// Whether it is certain that this call changed nothing.
    pub const fn is_certain(self) -> bool {
        matches!(
            self,
            Self::Contended
                | Self::Full
                | Self::TokensAhead
                | Self::SessionLost
                | Self::InvalidInput
                | Self::Unsupported
                | Self::ReadOnly
                | Self::Denied
                | Self::TooNew
                | Self::Replaced
        )
    }

    /// One word, for labels and machine-readable output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Contended => "contended",
            Self::Full => "full",
            Self::TokensAhead => "tokens_ahead",
            Self::SessionLost => "session_lost",
            Self::Unknown => "unknown",
            Self::InvalidInput => "invalid_input",
            Self::Unsupported => "unsupported",
            Self::Corrupt => "corrupt",
            Self::ReadOnly => "read_only",
            Self::Denied => "denied",
            Self::TooNew => "too_new",
            Self::Replaced => "replaced",
            Self::Closed => "closed",
            Self::Unexpected => "unexpected",
        }
    }
}

/// A call that got no answer: what was attempted, where, and why it failed.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    verb: Option<Verb>,
    job: Option<JobId>,
    store: Option<&'static str>,
    field: Option<&'static str>,
    detail: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind`, with one lower-case line that says why.
    pub fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            verb: None,
            job: None,
            store: None,
            field: None,
            detail: detail.into(),
            source: None,
        }))
    }

    /// Bad input: names the field, what was found, and the limit.
    pub fn invalid(
        field: &'static str,
        found: impl fmt::Display,
        limit: impl fmt::Display,
    ) -> Self {
        let mut error = Self::new(
            ErrorKind::InvalidInput,
            format!("{field}: found {found}, allowed {limit}"),
        );
        error.0.field = Some(field);
        error
    }

    /// Adds the verb that was attempted.
    #[must_use]
    pub fn during(mut self, verb: Verb) -> Self {
        self.0.verb.get_or_insert(verb);
        self
    }

    /// Adds the store that was asked.
    #[must_use]
    pub fn in_store(mut self, store: &'static str) -> Self {
        self.0.store.get_or_insert(store);
        self
    }

    /// Adds the job concerned.
    #[must_use]
    pub fn for_job(mut self, job: JobId) -> Self {
        self.0.job.get_or_insert(job);
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The verb that was attempted.
    pub fn verb(&self) -> Option<Verb> {
        self.0.verb
    }

    /// The job concerned, if any.
    pub fn job(&self) -> Option<JobId> {
        self.0.job
    }

    /// The store that was asked.
    pub fn store(&self) -> Option<&'static str> {
        self.0.store
    }

    /// The argument at fault, for [`ErrorKind::InvalidInput`].
    pub fn field(&self) -> Option<&'static str> {
        self.0.field
    }

    /// Whether the same call may succeed later, although nothing was changed.
    pub fn is_transient(&self) -> bool {
        self.0.kind.is_transient()
    }

    /// A copy, for each of the calls that shared a round trip.
    #[doc(hidden)]
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let mut copy = Self::new(self.0.kind, self.0.detail.clone());
        copy.0.verb = self.0.verb;
        copy.0.job = self.0.job;
        copy.0.store = self.0.store;
        copy.0.field = self.0.field;
        copy.0.source = self
            .0
            .source
            .as_ref()
            .map(|source| source.to_string().into());
        copy
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(verb) = self.0.verb {
            write!(f, "{verb}")?;
            if let Some(job) = self.0.job {
                write!(f, " job {job}")?;
            }
            if let Some(store) = self.0.store {
                write!(f, " in {store}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.0.detail)?;
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("verb", &self.0.verb)
            .field("job", &self.0.job)
            .field("store", &self.0.store)
            .field("field", &self.0.field)
            .field("detail", &self.0.detail)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
