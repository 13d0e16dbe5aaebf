//! A list of payloads without leases: what the store is measured against.

use redis::Value;

use super::link::Link;
use super::wire::garbled;
use super::{RedisOptions, at};
use crate::error::{Result, Verb};
use crate::job::Namespace;

/// A list in a namespace, behind the same kind of connection as the store's.
pub struct List {
    link: Link,
    key: String,
}

impl List {
    /// # Errors
    /// As for opening a store; it connects at the first call.
    pub fn open(url: &str, namespace: &Namespace) -> Result<Self> {
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
}
