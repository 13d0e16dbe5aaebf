//! A list of payloads without leases: what the store is measured against.

use std::time::Duration;

use redis::Value;

use super::link::Link;
use super::wire::garbled;
use super::{RedisOptions, at};
use crate::error::{Result, Verb};
use crate::job::{Namespace, QueueName};
use crate::store::load::ServerLoad;

/// What clients send and functions do not run. The rest may be either's, and is not counted: a
/// client sends `HGET` once for each queue, and `ZREM` when it is full and sleeps in other
/// partitions.
const REQUESTS: [&str; 15] = [
    "auth",
    "client",
    "eval",
    "evalsha",
    "fcall",
    "function",
    "hello",
    "hgetall",
    "hsetnx",
    "info",
    "ping",
    "scan",
    "script",
    "subscribe",
    "ssubscribe",
];

/// A list in a namespace, behind the same kind of connection as the store's.
pub struct List {
    link: Link,
    key: String,
    /// A key that lies where the queue's jobs do.
    beside: String,
}

impl List {
    /// # Errors
    /// As for opening a store; it connects at the first call.
    pub fn open(url: &str, namespace: &Namespace, queue: &QueueName) -> Result<Self> {
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        let ours = ["namespace=", "partitions="];
        let theirs = query
            .split('&')
            .filter(|pair| !pair.is_empty() && !ours.iter().any(|name| pair.starts_with(name)));
        let mut url = address.to_owned();
        for (at, pair) in theirs.enumerate() {
            url.push(if at == 0 { '?' } else { '&' });
            url.push_str(pair);
        }
        let options = RedisOptions::new(url);
        Ok(Self {
            link: Link::open(&options).map_err(at(Verb::Open))?,
            key: format!("{{{namespace}}}:raw"),
            beside: format!("{{{namespace}:{queue}:0}}:none"),
        })
    }

    /// # Errors
    /// As for any call.
    pub async fn push(&self, payloads: &[Vec<u8>]) -> Result<()> {
        let mut push = redis::cmd("RPUSH");
        push.arg(&self.key).arg(payloads);
        let pushed = self.link.run(self.key.as_bytes(), push).await;
        pushed.map(drop).map_err(at(Verb::Enqueue))
    }

    /// Takes up to `max` payloads, and says how many there were.
    ///
    /// # Errors
    /// As for any call.
    pub async fn pop(&self, max: usize) -> Result<usize> {
        let mut pop = redis::cmd("LPOP");
        pop.arg(&self.key).arg(max);
        let popped = self.link.run(self.key.as_bytes(), pop).await;
        match popped.map_err(at(Verb::Claim))? {
            Value::Array(payloads) => Ok(payloads.len()),
            Value::Nil => Ok(0),
            _ => Err(at(Verb::Claim)(garbled())),
        }
    }

    /// What the server that has the queue's first partition has done since it started.
    ///
    /// # Errors
    /// As for any call.
    pub async fn load(&self) -> Result<ServerLoad> {
        let mut info = redis::cmd("INFO");
        info.arg("cpu").arg("commandstats");
        let answer = self.link.run(self.beside.as_bytes(), info).await;
        let answer = answer.map_err(at(Verb::Inspect))?;
        let text: String =
            redis::from_redis_value(answer).map_err(|_| at(Verb::Inspect)(garbled()))?;
        Ok(read_load(&text))
    }
}

fn read_load(info: &str) -> ServerLoad {
    let mut load = ServerLoad::default();
    for line in info.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if matches!(name, "used_cpu_sys" | "used_cpu_user") {
            let seconds = value.trim().parse().ok();
            let more = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            load.cpu = Some(load.cpu.unwrap_or_default() + more.unwrap_or_default());
        } else if let Some(command) = name.strip_prefix("cmdstat_") {
            let calls = value
                .strip_prefix("calls=")
                .and_then(|v| v.split(',').next());
            let calls: u64 = calls.and_then(|calls| calls.parse().ok()).unwrap_or(0);
            let command = command.split('|').next().unwrap_or_default();
            let is_request = REQUESTS.contains(&command);
            *load.commands.get_or_insert(0) += calls;
            *load.requests.get_or_insert(0) += if is_request { calls } else { 0 };
        }
    }
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_from_what_scripts_do() {
        let info = "# CPU\r\nused_cpu_sys:1.250000\r\nused_cpu_user:2.500000\r\n\
                    used_cpu_sys_children:9.0\r\n# Commandstats\r\n\
                    cmdstat_evalsha:calls=7,usec=1,usec_per_call=0.1\r\n\
                    cmdstat_script|load:calls=2,usec=1\r\ncmdstat_hset:calls=30,usec=1\r\n";
        let load = read_load(info);
        assert_eq!(load.cpu, Some(Duration::from_millis(3_750)));
        assert_eq!((load.requests, load.commands), (Some(9), Some(39)));
    }
}
