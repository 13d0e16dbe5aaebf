//! The names of all keys.
//!
//! All keys of a queue partition share the hash tag `{namespace:queue:partition}`, and so lie in
//! one slot; those of the namespace share `{namespace}`. Names have no `:` and no braces, so that
//! no name can steer a slot or reach into another namespace. Unique and exclusive keys, which may
//! be any text, stand inside of values and never in the name of a key.
//!
//! | name behind the tag | type | content |
//! |---|---|---|
//! | `meta` | hash | counters by name: layout, partitions, paused, relaxed, sequence, last token, floor, which lines may have jobs, the ledger, what was lost |
//! | `jobs` | hash | id → state, place and record of every job |
//! | `due` | sorted set | scheduled jobs: sequence and id, by run-at |
//! | `park` | sorted set | jobs that wait behind another of their exclusive key: key, sequence, id, in that order |
//! | `excl` | hash | exclusive key → id of its head |
//! | `uniq` | hash | unique key → id of its holder, and until when if it has a window |
//! | `uwin` | sorted set | unique keys with a window, by its end |
//! | `done` `dead` `gone` | sorted sets | completed, dead and cancelled jobs: sequence and id, by time of their end |
//! | `keep` | sorted set | ids of settled jobs, by the end of their retention |
//! | `held` | hash | grant → deadline, renewals, nonce, terms, owner, task, which leases have ended; grant and zero → ids of its jobs |
//! | `note` | hash | grant and place → cancel flag, progress and checkpoint of one lease |
//! | `ends` | sorted set | live grants, by deadline |
//! | `sleep` | sorted set | sleepers, by the end of their sleep |
//! | `0s` `0` … `7s` `7` | lists | ready jobs by priority, suspects apart: sequence and id |
//! | `s:` session | hash | lane → sequence number, verb and answer of its last call |
//! | `data:` and any name | any | the users' own, changed in one step with a settlement or a checkpoint (`settle.lua`, `checkpoint.lua`) |
//!
//! In the namespace: `queues`, a hash: queue → number of partitions and layout; `audit`, a list:
//! the commands on record; `s:` session as above. Wake-ups are published on channels
//! `namespace:wake:` and a random word.
//!
//! A function makes the names of a partition's keys from the first of its keys. That is one that
//! never exists, and the second is one that usually does: while a slot moves to another node of a
//! cluster, the server refuses a call of which it has some keys and not others, so that no call
//! sees half of a partition.

use crate::job::{Namespace, QueueName};
use crate::rules::order;
use crate::store::SessionId;

/// Lists of ready jobs: of each priority the suspects' and the others'.
pub(super) const LINES: usize = order::TIERS;

/// The name of a line: the priority, and `s` if it is the suspects'.
pub(super) fn line(at: usize) -> String {
    let suffix = if order::is_suspects(at) { "s" } else { "" };
    format!("{}{suffix}", at / 2)
}

/// Keys that share a slot.
#[derive(Debug)]
pub(super) struct Keys {
    tag: String,
    /// A key that never exists, from which the functions make the names of the others.
    pub(super) none: Vec<u8>,
    pub(super) meta: Vec<u8>,
    /// The queue of a partition, and how many of them it has.
    pub(super) queue: Option<(QueueName, u16)>,
}

impl Keys {
    /// Those of one of so many partitions of a queue.
    pub(super) fn of(namespace: &Namespace, queue: &QueueName, number: u16, all: u16) -> Self {
        Self {
            queue: Some((queue.clone(), all)),
            ..Self::tagged(format!("{{{namespace}:{queue}:{number}}}:"))
        }
    }

    /// Those of the namespace.
    pub(super) fn home(namespace: &Namespace) -> Self {
        Self::tagged(format!("{{{namespace}}}:"))
    }

    fn tagged(tag: String) -> Self {
        Self {
            none: format!("{tag}none").into_bytes(),
            meta: format!("{tag}meta").into_bytes(),
            tag,
            queue: None,
        }
    }

    pub(super) fn tag(&self) -> &str {
        &self.tag
    }

    /// Where the calls of a session are remembered.
    pub(super) fn session(&self, session: SessionId) -> Vec<u8> {
        let mut key = format!("{}s:", self.tag).into_bytes();
        for byte in session.as_bytes() {
            key.extend_from_slice(format!("{byte:02x}").as_bytes());
        }
        key
    }

    pub(super) fn named(&self, part: &str) -> Vec<u8> {
        format!("{}{part}", self.tag).into_bytes()
    }
}

/// The channel on which a store handle hears of work.
pub(super) fn channel(namespace: &Namespace) -> String {
    format!("{namespace}:wake:{:016x}", fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(namespace: &str, queue: &str, partition: u16) -> Keys {
        let namespace = Namespace::new(namespace).unwrap();
        let queue = QueueName::new(queue).unwrap();
        Keys::of(&namespace, &queue, partition, 4)
    }

    #[test]
    fn no_two_namespaces_or_queues_share_a_key() {
        let mut all = Vec::new();
        for (namespace, queue, partition) in [
            ("a", "b", 0),
            ("a", "b", 1),
            ("a", "b.0", 0),
            ("a.b", "b", 0),
            ("a-b", "0", 0),
        ] {
            all.push(keys(namespace, queue, partition).meta);
            all.push(Keys::home(&Namespace::new(namespace).unwrap()).meta);
        }
        let home_of_a = 2;
        let count = all.len() - home_of_a;
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn the_keys_of_a_partition_share_their_tag() {
        let keys = keys("n", "q", 3);
        for key in [keys.none.clone(), keys.meta.clone(), keys.named("jobs")] {
            assert!(key.starts_with(b"{n:q:3}:"));
        }
    }
}
