//! A fence for keys of a Redis server: one script compares the token and runs the caller's
//! commands.
//!
//! All keys of a [`RedisFence`] have its hash tag and so share one slot: marks and data are changed
//! in one step, on a cluster too. The commands come from a fixed list ([`Commands`]). A script that
//! fails half way is not rolled back by the server, so whatever could fail is looked at before the
//! first write.
//!
//! Where the data can lie beside the queue, [`complete_with`]
//! goes further: it runs the commands and completes the job in one step.
//!
//! ```no_run
//! # use leasehold::fence::redis::{Commands, RedisFence};
//! # use leasehold::{Context, Failure};
//! # struct Debit { amount: i64 }
//! # type Connection = redis::aio::MultiplexedConnection;
//! async fn debit(job: Debit, ctx: Context, bank: RedisFence<Connection>) -> Result<(), Failure> {
//!     let account = bank.key("account:7"); // "{bank}:account:7"
//!     let mut bank = ctx.fence(&bank).await?;
//!     bank.write_once("debit", Commands::new().incr_by(account, -job.amount)).await?;
//!     Ok(())
//! }
//! ```
//!
//! An error from a write means *unknown*: it may have been applied, and clients below repeat calls
//! of their own accord. Give writes that must not be repeated an operation's name: they are applied
//! once per token. The job's next run, if this one dies before its lease is settled, has another
//! token and does it again; where that is wrong, `complete_with` is right.
//!
//! A server that loses acknowledged writes, by a failover or a restart without its log, loses marks
//! with the data. Needs Redis 7.0.
//!
//! [`complete_with`]: crate::atomic_redis::RedisContext::complete_with

use std::fmt;
use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use redis::aio::ConnectionLike;
use redis::{RedisError, Script, Value};

pub use super::commands::Commands;
use super::{Fence, FenceError, Op, Scope, Stale, commands, operation_name};
use crate::error::{Error, ErrorKind};
use crate::lease::FencingToken;
use crate::limits::{self, at_most};

static RUN: LazyLock<Script> = LazyLock::new(|| {
    let parts = ["#!lua\n", commands::LUA, include_str!("redis.lua")];
    Script::new(&parts.concat())
});
static PRUNE: LazyLock<Script> = LazyLock::new(|| Script::new(PRUNE_LUA));

/// The scopes to forget are found by the caller, so that the keys of their operations can be named;
/// each is looked at again here.
const PRUNE_LUA: &str = "#!lua
local marks, floor, below = KEYS[1], KEYS[2], tonumber(ARGV[1])
if tonumber(redis.call('GET', floor) or '0') < below then
  redis.call('SET', floor, ARGV[1])
end
for n = 2, #ARGV do
  local mark = redis.call('ZSCORE', marks, ARGV[n])
  if mark and tonumber(mark) < below then
    redis.call('ZREM', marks, ARGV[n])
    redis.call('DEL', KEYS[n + 1])
  end
end
return 'done'";

/// Scopes forgotten in one step: bounds how long it holds the server.
const PRUNE_STEP: isize = 500;

/// Keys with one hash tag, under a fence. Clones share them.
#[derive(Clone)]
pub struct RedisFence<C> {
    connection: C,
    tag: Arc<str>,
}

impl<C> fmt::Debug for RedisFence<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fence = f.debug_struct("RedisFence");
        fence.field("tag", &self.tag).finish_non_exhaustive()
    }
}

impl<C: ConnectionLike + Clone + Send + Sync> RedisFence<C> {
    /// The keys whose hash tag is `tag`, over a connection whose clones share it.
    ///
    /// # Errors
    /// If the tag is empty, longer than a name may be, or has a brace in it.
    pub fn new(connection: C, tag: impl AsRef<str>) -> Result<Self, Error> {
        let tag = tag.as_ref();
        at_most("tag", tag.len(), limits::NAME_BYTES, "bytes")?;
        if tag.is_empty() || tag.contains(['{', '}']) {
            let limit = "at least one character, and no braces";
            return Err(Error::invalid("tag", format!("{tag:?}"), limit));
        }
        Ok(Self {
            connection,
            tag: tag.into(),
        })
    }

    /// The key of that name: `{tag}:name`.
    pub fn key(&self, name: impl fmt::Display) -> String {
        format!("{{{}}}:{name}", self.tag)
    }

    /// Opens and runs commands in one round trip.
    ///
    /// # Errors
    /// As [`open`](Fence::open) and [`OpenKeys::run_all`].
    pub async fn open_with(
        &self,
        scope: &Scope,
        token: FencingToken,
        commands: Commands,
    ) -> Result<(OpenKeys<C>, Vec<Value>), FenceError> {
        let mut opened = OpenKeys {
            fence: self.clone(),
            scope: scope.clone(),
            token,
        };
        let answers = opened.run(Op::Open, None, commands).await?;
        Ok((opened, answers.unwrap_or_default()))
    }

    /// Forgets the marks below `below`, and lets nobody below it in from now on.
    ///
    /// # Errors
    /// Unknown; prune again.
    pub async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        exact(below)?;
        let mut connection = self.connection.clone();
        loop {
            let mut page = redis::cmd("ZRANGEBYSCORE");
            page.arg(self.key("fence:marks")).arg("-inf");
            page.arg(format!("({below}"));
            page.arg("LIMIT").arg(0).arg(PRUNE_STEP);
            let scopes: Vec<String> = page.query_async(&mut connection).await.map_err(trouble)?;
            let mut call = PRUNE.prepare_invoke();
            call.key(self.key("fence:marks"));
            call.key(self.key("fence:floor")).arg(below.get());
            for scope in &scopes {
                call.key(self.done(scope)).arg(scope);
            }
            let done: Result<String, _> = call.invoke_async(&mut connection).await;
            done.map_err(trouble)?;
            if (scopes.len() as isize) < PRUNE_STEP {
                return Ok(());
            }
        }
    }

    fn done(&self, scope: &str) -> String {
        self.key(format_args!("fence:done:{scope}"))
    }
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync> Fence for RedisFence<C> {
    type Opened = OpenKeys<C>;

    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<OpenKeys<C>, FenceError> {
        let (opened, _) = self.open_with(scope, token, Commands::new()).await?;
        Ok(opened)
    }
}

/// Keys that were opened under a token.
#[derive(Clone, Debug)]
pub struct OpenKeys<C> {
    fence: RedisFence<C>,
    scope: Scope,
    token: FencingToken,
}

impl<C: ConnectionLike + Clone + Send + Sync> OpenKeys<C> {
    /// Runs commands in one step. One answer per command, in order.
    ///
    /// # Errors
    /// [`Stale`](FenceError::Stale) if the keys have been opened for a larger token since, and
    /// `InvalidInput` if one of the commands could fail: nothing was changed. Others: unknown.
    pub async fn run_all(&mut self, commands: Commands) -> Result<Vec<Value>, FenceError> {
        let op = if commands.writes() {
            Op::Write
        } else {
            Op::Read
        };
        Ok(self.run(op, None, commands).await?.unwrap_or_default())
    }

    /// Runs commands in one step, once per token and operation. None if this token has done it
    /// before.
    ///
    /// # Errors
    /// As [`run_all`](Self::run_all), and if the operation's name is too long.
    pub async fn write_once(
        &mut self,
        operation: &str,
        commands: Commands,
    ) -> Result<Option<Vec<Value>>, FenceError> {
        operation_name(operation)?;
        self.run(Op::Write, Some(operation), commands).await
    }

    async fn run(
        &mut self,
        op: Op,
        once: Option<&str>,
        commands: Commands,
    ) -> Result<Option<Vec<Value>>, FenceError> {
        exact(self.token)?;
        let fence = &self.fence;
        let own = fence.key("fence:");
        commands.check(&fence.tag, |key| key.starts_with(&own))?;
        let mut call = RUN.prepare_invoke();
        call.key(fence.key("fence:marks"));
        call.key(fence.key("fence:floor"));
        call.key(fence.done(self.scope.as_str()));
        call.arg(self.scope.as_str()).arg(self.token.get());
        call.arg(if once.is_some() { "once" } else { "always" });
        call.arg(once.unwrap_or_default());
        for key in commands.keys() {
            call.key(key);
        }
        for arg in commands.args() {
            call.arg(arg);
        }
        let mut connection = fence.connection.clone();
        let said: Vec<Value> = call.invoke_async(&mut connection).await.map_err(trouble)?;
        let mut said = said.into_iter();
        let word: String = read(said.next())?;
        match word.as_str() {
            "done" => Ok(Some(said.collect())),
            "before" => Ok(None),
            "stale" => {
                let mark: String = read(said.next())?;
                Err(Stale::refuse(&self.scope, self.token, mark.parse()?, op).into())
            }
            _ => {
                let (number, why): (usize, String) = (read(said.next())?, read(said.next())?);
                Err(commands.refused(number, &why).into())
            }
        }
    }
}

/// The server keeps marks as doubles.
fn exact(token: FencingToken) -> Result<(), Error> {
    if token.get() < 1 << 53 {
        return Ok(());
    }
    Err(Error::invalid("token", token, "below 2^53"))
}

fn read<T: redis::FromRedisValue>(value: Option<Value>) -> Result<T, FenceError> {
    let value = value.and_then(|value| redis::from_redis_value(value).ok());
    value.ok_or_else(|| Error::new(ErrorKind::Unexpected, "the script answered nonsense").into())
}

fn trouble(error: RedisError) -> FenceError {
    let (kind, detail) = match error.code() {
        Some("OOM") => (ErrorKind::Full, "the server has no memory left"),
        Some("READONLY") => (ErrorKind::ReadOnly, "the server is a replica"),
        Some("NOPERM") => (ErrorKind::Unsupported, "the user may not do this"),
        Some("LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY") => {
            (ErrorKind::Unavailable, "the server is not ready")
        }
        Some(_) => (ErrorKind::Unexpected, "the server refused the script"),
        None => (ErrorKind::Unavailable, "the server did not answer"),
    };
    Error::new(kind, detail)
        .caused_by(error)
        .in_store("redis")
        .into()
}
