//! The names of all keys.
//!
//! All keys of a queue partition share the hash tag `{namespace:queue:partition}`, and so lie in one
//! slot; those of the namespace share `{namespace}`. Names have no `:` and no braces, so that no name can
//! steer a slot or reach into another namespace. Unique and exclusive keys, which may be any text,
//! stand inside of values and never in the name of a key.
//!
//! | name behind the tag | type | content |
//! |---|---|---|
//! | `meta` | string | 46 counters of 8 bytes: layout, paused, relaxed, sequence, last token, floor, counts by state, ledger, jobs in each line, deaths by expiry |
//! | `due` | sorted set | scheduled jobs: sequence and id, by run-at |
//! | `jobs` | hash | id → state, place and record of every job |
//! | `park` | sorted set | jobs that wait behind another of their exclusive key: key, sequence, id, in that order |
//! | `excl` | hash | exclusive key → id of its head |
//! | `uniq` | hash | unique key → id of its holder, and until when if it has a window |
//! | `uwin` | sorted set | unique keys with a window, by its end |
//! | `done` `dead` `gone` | sorted sets | completed, dead and cancelled jobs: sequence and id, by time of their end |
//! | `keep` | sorted set | ids of settled jobs, by the end of their retention |
//! | `held` | hash | grant → terms, deadline, renewals, nonce, owner, task, which leases have ended; grant and zero → ids of its jobs |
//! | `note` | hash | grant and place → cancel flag, progress and checkpoint of one lease |
//! | `ends` | sorted set | live grants, by deadline |
//! | `doze` `doze2` | sorted sets | sleepers by the end of their sleep; the second those who take suspects |
//! | `0s` `0` … `7s` `7` | lists | ready jobs by priority, suspects apart: sequence and id |
//! | `s:` session | hash | lane → sequence number, verb and answer of its last call |
//! | `data:` and any name | any | the users' own, changed by `complete.lua` |
//!
//! In the namespace: `queues`, a hash: queue → number of partitions; `audit`, a list: the
//! commands on record; `s:` session as above. Wake-ups are published on channels
//! `namespace:bell:` and a random word.

use crate::job::{Namespace, QueueName};
use crate::store::SessionId;

const PARTS: [&str; 32] = [
    "meta", "due", "jobs", "park", "excl", "uniq", "uwin", "done", "dead", "gone", "keep", "held",
    "note", "ends", "doze", "doze2", "0s", "0", "1s", "1", "2s", "2", "3s", "3", "4s", "4", "5s",
    "5", "6s", "6", "7s", "7",
];

/// Keys that share a slot.
#[derive(Debug)]
pub(super) struct Keys {
    tag: String,
    /// In the order in which the scripts number them.
    pub(super) all: Vec<Vec<u8>>,
}

impl Keys {
    /// Those of a queue partition.
    pub(super) fn of(namespace: &Namespace, queue: &QueueName, partition: u16) -> Self {
        Self::tagged(format!("{{{namespace}:{queue}:{partition}}}:"), &PARTS)
    }

    /// Those of the namespace.
    pub(super) fn home(namespace: &Namespace) -> Self {
        Self::tagged(format!("{{{namespace}}}:"), &["audit"])
    }

    fn tagged(tag: String, parts: &[&str]) -> Self {
        let all = parts.iter().map(|part| format!("{tag}{part}").into_bytes());
        Self {
            all: all.collect(),
            tag,
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
    format!("{namespace}:bell:{:016x}", fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(namespace: &str, queue: &str, partition: u16) -> Vec<Vec<u8>> {
        let namespace = Namespace::new(namespace).unwrap();
        let queue = QueueName::new(queue).unwrap();
        let keys = Keys::of(&namespace, &queue, partition);
        let mut all = keys.all;
        all.extend(Keys::home(&namespace).all);
        all
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
            all.extend(keys(namespace, queue, partition));
        }
        let home_of_a = 2;
        let count = all.len() - home_of_a;
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn the_keys_of_a_partition_share_their_tag() {
        for key in &keys("n", "q", 3)[..PARTS.len()] {
            assert!(key.starts_with(b"{n:q:3}:"));
        }
    }
}
