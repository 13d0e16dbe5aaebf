//! A fence for keys of a Redis server: one script compares the token and runs the caller's commands.
//!
//! All keys of a [`RedisFence`] have its hash tag and so share one slot: marks and data are changed
//! in one step, on a cluster too. The commands come from a fixed list ([`Commands`]). A script that
//! fails half way is not rolled back by the server, so whatever could fail is looked at before the
//! first write.
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
//! An error from a write means *unknown*: it may have been applied, and clients below repeat calls of
//! their own accord. Give writes that must not be repeated an operation's name.
//!
//! A server that loses acknowledged writes, by a failover or a restart without its log, loses marks
//! with the data. Needs Redis 7.0.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::ConnectionLike;
use redis::{RedisError, Script, Value};

use super::{Fence, FenceError, Op, Scope, Stale, operation_name};
use crate::error::{Error, ErrorKind};
use crate::job::{at_most, limits};
use crate::lease::FencingToken;

static RUN: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("redis.lua")));
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
/// Commands in one step.
const COMMANDS: usize = 1_000;
/// Bytes of keys and arguments in one step.
const BYTES: usize = limits::CALL_BYTES;

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
    /// As [`open`](Fence::open) and [`Opened::run_all`].
    pub async fn open_with(
        &self,
        scope: &Scope,
        token: FencingToken,
        commands: Commands,
    ) -> Result<(Opened<C>, Vec<Value>), FenceError> {
        let mut opened = Opened {
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

    /// Checks that a key is in the fence's slot, and not the fence's own.
    fn check_key(&self, key: &str) -> Result<(), Error> {
        let tag = key
            .split_once('{')
            .and_then(|(_, rest)| rest.split_once('}'));
        if tag.is_none_or(|(tag, _)| tag != &*self.tag) {
            let limit = format!("keys with {{{}}} in them", self.tag);
            return Err(Error::invalid("key", format!("{key:?}"), limit));
        }
        if key.starts_with(&self.key("fence:")) {
            let found = format!("{key:?}");
            return Err(Error::invalid(
                "key",
                found,
                "keys that are not the fence's",
            ));
        }
        Ok(())
    }
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync> Fence for RedisFence<C> {
    type Opened = Opened<C>;

    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<Opened<C>, FenceError> {
        let (opened, _) = self.open_with(scope, token, Commands::new()).await?;
        Ok(opened)
    }
}

/// Keys that were opened under a token.
#[derive(Clone, Debug)]
pub struct Opened<C> {
    fence: RedisFence<C>,
    scope: Scope,
    token: FencingToken,
}

impl<C: ConnectionLike + Clone + Send + Sync> Opened<C> {
    /// Runs commands in one step. One answer per command, in order.
    ///
    /// # Errors
    /// [`Stale`](FenceError::Stale) if the keys have been opened for a larger token since, and
    /// `InvalidInput` if one of the commands could fail: nothing was changed. Others: unknown.
    pub async fn run_all(&mut self, commands: Commands) -> Result<Vec<Value>, FenceError> {
        let op = if commands.writes { Op::Write } else { Op::Read };
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
        let list = commands.list;
        at_most("commands", list.len(), COMMANDS, "commands in a step")?;
        let length = |command: &Command| {
            command.key.len() + command.args.iter().map(Vec::len).sum::<usize>()
        };
        let weight = list.iter().map(length).sum();
        at_most("commands", weight, BYTES, "bytes in a step")?;
        let fence = &self.fence;
        let mut call = RUN.prepare_invoke();
        call.key(fence.key("fence:marks"));
        call.key(fence.key("fence:floor"));
        call.key(fence.done(self.scope.as_str()));
        call.arg(self.scope.as_str()).arg(self.token.get());
        call.arg(if once.is_some() { "once" } else { "always" });
        call.arg(once.unwrap_or_default());
        for command in &list {
            fence.check_key(&command.key)?;
            call.key(&command.key);
            call.arg(command.name).arg(command.args.len());
            for arg in &command.args {
                call.arg(arg);
            }
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
                let name = list.get(number.wrapping_sub(1)).map_or("?", |c| c.name);
                let found = format!("{name} as number {number}");
                Err(Error::invalid("commands", found, format!("none that fails: {why}")).into())
            }
        }
    }
}

/// Commands to run in one step, from the list of those that can be fenced.
///
/// A key that one of them deletes cannot be used by a later one, and a counter that one of them
/// writes cannot be counted on by a later one: what could fail must be known before the first write.
#[derive(Clone, Default, Debug)]
#[must_use]
pub struct Commands {
    list: Vec<Command>,
    writes: bool,
}

#[derive(Clone, Debug)]
struct Command {
    name: &'static str,
    key: String,
    args: Vec<Vec<u8>>,
}

macro_rules! commands {
    ($($(#[$doc:meta])* $kind:ident $method:ident($($arg:ident: $type:ty => $shown:ident),*) = $name:literal;)*) => {
        impl Commands {
            $(
                $(#[$doc])*
                pub fn $method(self, key: impl Into<String>, $($arg: $type),*) -> Self {
                    let args = vec![$($shown($arg)),*];
                    self.with(stringify!($kind) == "write", $name, key.into(), args)
                }
            )*
        }
    };
}

commands! {
    /// `GET`: the string.
    read get() = "GET";
    /// `SET`: the key becomes a string.
    write set(value: impl AsRef<[u8]> => bytes) = "SET";
    /// `INCRBY`: adds to the counter.
    write incr_by(by: i64 => number) = "INCRBY";
    /// `DEL`: deletes the key.
    write del() = "DEL";
    /// `PEXPIRE`: deletes the key after this long.
    write expire(after: Duration => millis) = "PEXPIRE";
    /// `HGET`: one field of the hash.
    read hget(field: impl AsRef<[u8]> => bytes) = "HGET";
    /// `HGETALL`: all fields of the hash.
    read hgetall() = "HGETALL";
    /// `HSET`: sets a field of the hash.
    write hset(field: impl AsRef<[u8]> => bytes, value: impl AsRef<[u8]> => bytes) = "HSET";
    /// `HDEL`: deletes a field of the hash.
    write hdel(field: impl AsRef<[u8]> => bytes) = "HDEL";
    /// `HINCRBY`: adds to a counter in the hash.
    write hincr_by(field: impl AsRef<[u8]> => bytes, by: i64 => number) = "HINCRBY";
    /// `LPUSH`: puts a value at the head of the list.
    write lpush(value: impl AsRef<[u8]> => bytes) = "LPUSH";
    /// `RPUSH`: puts a value at the end of the list.
    write rpush(value: impl AsRef<[u8]> => bytes) = "RPUSH";
    /// `LRANGE`: a part of the list, both ends included.
    read lrange(from: i64 => number, to: i64 => number) = "LRANGE";
    /// `SADD`: adds a member to the set.
    write sadd(member: impl AsRef<[u8]> => bytes) = "SADD";
    /// `SREM`: removes a member from the set.
    write srem(member: impl AsRef<[u8]> => bytes) = "SREM";
    /// `SMEMBERS`: the members of the set.
    read smembers() = "SMEMBERS";
    /// `ZADD`: gives a member of the sorted set its score.
    write zadd(score: i64 => number, member: impl AsRef<[u8]> => bytes) = "ZADD";
    /// `ZREM`: removes a member from the sorted set.
    write zrem(member: impl AsRef<[u8]> => bytes) = "ZREM";
    /// `ZRANGE`: a part of the sorted set, both ends included.
    read zrange(from: i64 => number, to: i64 => number) = "ZRANGE";
}

impl Commands {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn with(mut self, writes: bool, name: &'static str, key: String, args: Vec<Vec<u8>>) -> Self {
        self.list.push(Command { name, key, args });
        self.writes |= writes;
        self
    }
}

fn bytes(value: impl AsRef<[u8]>) -> Vec<u8> {
    value.as_ref().to_vec()
}

fn number(value: i64) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn millis(value: Duration) -> Vec<u8> {
    let millis = value.min(limits::DURATION_MAX).as_millis();
    millis.max(1).to_string().into_bytes()
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
