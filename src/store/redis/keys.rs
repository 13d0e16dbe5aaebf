//! The names of all keys.
//!
//! All keys of a queue partition share the hash tag `{namespace:queue:partition}`, and so lie in one
//! slot; those of the namespace share `{namespace}`. Names have no `:` and no braces, so that no name can
//! steer a slot or reach into another namespace. Unique and exclusive keys, which may be any text,
//! stand inside of values and never in the name of a key.
//!
//! | name behind the tag | type | content |
//! |---|---|---|
//! | `meta` | string | 46 counters of 8 bytes: format, index, paused, relaxed, sequence, last token, floor, counts by state, ledger, jobs in each line |
//! | `due` | sorted set | scheduled jobs: sequence and id, by run-at |
//! | `jobs` | hash | id → state, place and record of every job that is neither in a line nor leased; with an index, of all jobs |
//! | `park` | sorted set | jobs that wait behind another of their exclusive key: key, sequence, id, in that order |
//! | `excl` | hash | exclusive key → id of its head |
//! | `uniq` | hash | unique key → id of its holder, and until when if it has a window |
//! | `uwin` | sorted set | unique keys with a window, by its end |
//! | `done` `dead` `gone` | sorted sets | completed, dead and cancelled jobs: sequence and id, by time of their end |
//! | `keep` | sorted set | ids of settled jobs, by the end of their retention |
//! | `held` | hash | grant and nonce → deadline (of a single none, as long as it is as given), renewals, round, terms, leases alive; grant → nonce, owner, task, which leases have ended, or the id of its only job; grant and zero → ids of its jobs; grant and number → segments of its jobs, or their starts and their rests; round → its grants, and the deadline that they share |
//! | `note` | hash | grant and place → cancel flag, progress and checkpoint of one lease |
//! | `ends` | sorted set | live grants, and rounds of them, by deadline |
//! | `doze` `doze2` | sorted sets | sleepers by the end of their sleep; the second those who take suspects |
//! | `0s` `0` … `7s` `7` | lists | ready jobs by priority, suspects apart: segments of records, each one element or two; with an index, sequence and id |
//! | `fill:` and a random word | list | a line while an enqueue in bulk adds to it; outside of its transaction never there |
//! | `s:` session | hash | lane → sequence number, verb and answer of its last call |
//! | `data:` and any name | any | the users' own, changed by `complete.lua` |
//!
//! In the namespace: `queues`, a hash: queue → number of partitions and index; `audit`, a list: the
//! commands on record; `s:` session as above. Wake-ups are published on channels
//! `namespace:bell:` and a random word.

use crate::error::Verb;
use crate::job::{Namespace, QueueName};
use crate::store::SessionId;

const PARTS: [&str; 32] = [
    "meta", "due", "jobs", "park", "excl", "uniq", "uwin", "done", "dead", "gone", "keep", "held",
    "note", "ends", "doze", "doze2", "0s", "0", "1s", "1", "2s", "2", "3s", "3", "4s", "4", "5s",
    "5", "6s", "6", "7s", "7",
];

/// Where some of them stand in that list; the lines without suspects are every second from the
/// first on.
const META: usize = 0;
const DUE: usize = 1;
const HELD: usize = 11;
const ENDS: usize = 13;
const DOZE: usize = 14;
const FIRST_LINE: usize = 17;

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

    /// Those that a plain call of a verb needs, in the order in which its script numbers them; the
    /// session comes behind the first.
    pub(super) fn plain(&self, verb: Verb) -> Vec<&[u8]> {
        let own: &[usize] = match verb {
            Verb::Claim => &[META, HELD, ENDS, DUE],
            Verb::Enqueue => &[META, DOZE],
            _ => &[META, HELD, ENDS],
        };
        let lines = match verb {
            Verb::Claim | Verb::Enqueue => FIRST_LINE..PARTS.len(),
            _ => 0..0,
        };
        let all = own.iter().copied().chain(lines.step_by(2));
        all.map(|at| &self.all[at][..]).collect()
    }

    /// Those that an enqueue in bulk needs, as for [`plain`](Self::plain): the last is the line.
    pub(super) fn bulk(&self, priority: u8) -> [&[u8]; 3] {
        let line = FIRST_LINE + 2 * usize::from(priority);
        [META, DOZE, line].map(|at| &self.all[at][..])
    }

    /// A name for a line that nothing else has.
    pub(super) fn fill(&self) -> Vec<u8> {
        self.named(&format!("fill:{:016x}", fastrand::u64(..)))
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
    fn a_plain_call_has_the_keys_that_its_script_names() {
        let queue = QueueName::new("q").unwrap();
        let keys = Keys::of(&Namespace::new("n").unwrap(), &queue, 0);
        let named = |verb| {
            let keys = keys.plain(verb);
            let names = keys.iter().map(|key| String::from_utf8_lossy(&key[8..]));
            names.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(named(Verb::Settle), "meta held ends");
        assert_eq!(named(Verb::Claim), "meta held ends due 0 1 2 3 4 5 6 7");
        assert_eq!(named(Verb::Enqueue), "meta doze 0 1 2 3 4 5 6 7");
        let bulk = keys.bulk(3).map(|key| &key[8..]);
        assert_eq!(bulk.join(&b' '), b"meta doze 3");
    }

    #[test]
    fn the_keys_of_a_partition_share_their_tag() {
        for key in &keys("n", "q", 3)[..PARTS.len()] {
            assert!(key.starts_with(b"{n:q:3}:"));
        }
    }
}
