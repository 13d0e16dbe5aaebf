//! Commands that can run in one step with a check, on the keys of one slot.
//!
//! The server does not roll a script back that fails half way. So the list is fixed, and
//! `commands.lua` looks at whatever could fail, the user's rights included, before the first write.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::limits::{self, at_most};

/// What a script that runs commands begins with.
pub(crate) const LUA: &str = include_str!("commands.lua");

/// Commands in one step.
const COMMANDS: usize = 1_000;
/// Bytes of keys and arguments in one step.
const BYTES: usize = limits::CALL_BYTES;

/// Commands to run in one step, from the list of those that can be fenced.
///
/// A key that one of them deletes cannot be used by a later one, and a counter that one of them
/// writes cannot be counted on by a later one: what could fail must be known before the first
/// write.
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
    writes: bool,
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
        self.writes |= writes;
        self.list.push(Command {
            name,
            key,
            args,
            writes,
        });
        self
    }

    pub(crate) fn writes(&self) -> bool {
        self.writes
    }

    /// Checks the limits, and that every key has this hash tag. `own` are keys that are not the
    /// caller's.
    pub(crate) fn check(&self, tag: &str, own: impl Fn(&str) -> bool) -> Result<()> {
        at_most("commands", self.list.len(), COMMANDS, "commands in a step")?;
        let length = |command: &Command| {
            command.key.len() + command.args.iter().map(Vec::len).sum::<usize>()
        };
        let weight = self.list.iter().map(length).sum();
        at_most("commands", weight, BYTES, "bytes in a step")?;
        for key in self.keys() {
            let found = key
                .split_once('{')
                .and_then(|(_, rest)| rest.split_once('}'));
            let limit = if found.is_none_or(|(found, _)| found != tag) {
                format!("keys with {{{tag}}} in them")
            } else if own(key) {
                "keys that are not the queue's or the fence's own".to_owned()
            } else {
                continue;
            };
            return Err(Error::invalid("key", format!("{key:?}"), limit));
        }
        Ok(())
    }

    /// Checks that nothing is read, where the answers would come to nobody.
    pub(crate) fn check_writes(&self) -> Result<()> {
        match self.list.iter().position(|command| !command.writes) {
            Some(at) => Err(self.refused(at + 1, "it only reads, and nobody is told what")),
            None => Ok(()),
        }
    }

    /// Why the script refused them: the number of the command that would have failed, and the
    /// reason.
    pub(crate) fn refused(&self, number: usize, why: &str) -> Error {
        let name = self.list.get(number.wrapping_sub(1));
        let found = format!("{} as number {number}", name.map_or("?", |c| c.name));
        Error::invalid("commands", found, format!("none that fails: {why}"))
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|command| command.key.as_str())
    }

    /// As the script reads them: how many there are; of each its name, the number of its arguments,
    /// and the arguments.
    pub(crate) fn args(&self) -> Vec<Vec<u8>> {
        let mut args = vec![self.list.len().to_string().into_bytes()];
        for command in &self.list {
            args.push(command.name.into());
            args.push(command.args.len().to_string().into_bytes());
            args.extend_from_slice(&command.args);
        }
        args
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
