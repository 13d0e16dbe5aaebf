//! One transaction: what it has read so far, and what it will write when it ends.
//!
//! Queue rows, grants, sessions and the issuer are read once, changed here, and written once before
//! the commit: a thousand settlements of a grant cost one write of its row.

use std::collections::{BTreeMap, HashMap};

use rusqlite::types::{ToSql, Value};
use rusqlite::{CachedStatement, Connection, OptionalExtension, Row, params, params_from_iter};

use super::fault::{Done, Fault, corrupt};
use super::sql::statement;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind};
use crate::inspect::{Counts, Ledger};
use crate::job::QueueName;
use crate::lease::FencingToken;
use crate::limits;
use crate::rules::issue::Issuer;
use crate::store::SessionId;
use crate::store::held::Held;
use crate::store::record::Kinds;

pub(super) const LINES: usize = 2 * (limits::PRIORITY_MAX as usize + 1);

/// A wake-up to give once the transaction is committed: queue, suspects' line or not, how many.
pub(super) type Bell = (QueueName, bool, usize);

pub(super) struct Tx<'c> {
    pub(super) db: &'c Connection,
    pub(super) namespace: &'c str,
    pub(super) kinds: &'c mut Kinds,
    pub(super) queues: Vec<Queue>,
    pub(super) grants: BTreeMap<FencingToken, Held>,
    pub(super) sessions: HashMap<SessionId, Timestamp>,
    pub(super) bells: Vec<Bell>,
    /// Reused for every record that is written.
    pub(super) scratch: Vec<u8>,
    issuer: Option<Issuer>,
}

/// A queue's row.
pub(super) struct Queue {
    pub(super) id: i64,
    pub(super) name: QueueName,
    pub(super) paused: bool,
    pub(super) relaxed: bool,
    pub(super) counts: Counts,
    pub(super) ledger: Ledger,
    seq: u64,
    /// The outermost slots of each line, once known.
    pub(super) ends: [Option<(i64, i64)>; LINES],
    dirty: bool,
}

impl<'c> Tx<'c> {
    pub(super) fn new(db: &'c Connection, namespace: &'c str, kinds: &'c mut Kinds) -> Self {
        Self {
            db,
            namespace,
            kinds,
            queues: Vec::new(),
            grants: BTreeMap::new(),
            sessions: HashMap::new(),
            bells: Vec::new(),
            scratch: Vec::new(),
            issuer: None,
        }
    }

    pub(super) fn sql(&self, name: &'static str) -> rusqlite::Result<CachedStatement<'c>> {
        statement(self.db, name)
    }

    /// The queue of that name, which is made if it is not there.
    pub(super) fn queue(&mut self, name: &QueueName) -> Done<usize> {
        if let Some(queue) = self.known(name)? {
            return Ok(queue);
        }
        self.sql("queue_new")?
            .execute(params![self.namespace, name.as_str()])?;
        if self.db.last_insert_rowid() > super::place::QUEUES_MAX {
            let why = "the file has as many queues as slots can name";
            return Err(Fault::Broken(Error::new(ErrorKind::Full, why)));
        }
        self.known(name)?
            .ok_or_else(|| corrupt("a new queue is not there"))
    }

    /// The queue of that name, if it is there.
    pub(super) fn known(&mut self, name: &QueueName) -> Done<Option<usize>> {
        if let Some(at) = self.queues.iter().position(|queue| queue.name == *name) {
            return Ok(Some(at));
        }
        let queue = self
            .sql("queue_named")?
            .query_row(params![self.namespace, name.as_str()], Queue::read)
            .optional()?;
        self.keep(queue)
    }

    /// The queue with that number, if it belongs to this namespace.
    pub(super) fn queue_of(&mut self, id: i64) -> Done<Option<usize>> {
        if let Some(at) = self.queues.iter().position(|queue| queue.id == id) {
            return Ok(Some(at));
        }
        let queue = self
            .sql("queue_of_id")?
            .query_row(params![self.namespace, id], Queue::read)
            .optional()?;
        self.keep(queue)
    }

    fn keep(&mut self, queue: Option<Result<Queue, Fault>>) -> Done<Option<usize>> {
        let Some(queue) = queue else { return Ok(None) };
        self.queues.push(queue?);
        Ok(Some(self.queues.len() - 1))
    }

    /// A queue that is about to change.
    pub(super) fn at(&mut self, queue: usize) -> &mut Queue {
        let queue = &mut self.queues[queue];
        queue.dirty = true;
        queue
    }

    /// Grows with every job that is put somewhere: ties are broken in the order of arrival.
    pub(super) fn next_seq(&mut self, queue: usize) -> i64 {
        let queue = self.at(queue);
        queue.seq += 1;
        queue.seq as i64
    }

    pub(super) fn issuer(&mut self) -> Done<Issuer> {
        if let Some(issuer) = self.issuer {
            return Ok(issuer);
        }
        let issuer = self.sql("issuer")?.query_row([], |row| {
            Ok(Issuer {
                last: row.get::<_, i64>(0)? as u64,
                floor: row.get::<_, i64>(1)? as u64,
            })
        })?;
        Ok(*self.issuer.insert(issuer))
    }

    /// Writes the issuer down at once: no token may be known before it is.
    pub(super) fn set_issuer(&mut self, issuer: Issuer) -> Done<()> {
        if self.issuer != Some(issuer) {
            self.sql("issuer_save")?
                .execute(params![issuer.last as i64, issuer.floor as i64])?;
            self.issuer = Some(issuer);
        }
        Ok(())
    }

    /// Counts calls that were refused as stale.
    pub(super) fn fenced(&mut self, queue: &QueueName, calls: usize) -> Done<()> {
        if calls > 0
            && let Some(queue) = self.known(queue)?
        {
            self.at(queue).ledger.fenced += calls as u64;
        }
        Ok(())
    }

    /// Writes what was changed. The transaction is ready to be committed.
    pub(super) fn finish(mut self) -> Done<Vec<Bell>> {
        self.save_grants()?;
        self.save_sessions()?;
        for queue in self.queues.iter().filter(|queue| queue.dirty) {
            let values = queue.values();
            self.sql("queue_save")?.execute(params_from_iter(values))?;
        }
        Ok(self.bells)
    }
}

impl Queue {
    /// Reads the columns of `queue_named`.
    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Result<Self, Fault>> {
        let count = |at: usize| row.get::<_, i64>(at).map(|count| count as u64);
        let name: String = row.get(1)?;
        let Ok(name) = QueueName::new(name) else {
            return Ok(Err(corrupt("a queue's name is not a name")));
        };
        Ok(Ok(Self {
            id: row.get(0)?,
            name,
            paused: row.get(2)?,
            relaxed: row.get(3)?,
            seq: count(4)?,
            counts: Counts {
                scheduled: count(5)?,
                ready: count(6)?,
                parked: count(7)?,
                leased: count(8)?,
                completed: count(9)?,
                dead: count(10)?,
                cancelled: count(11)?,
            },
            ledger: Ledger {
                enqueued: count(12)?,
                granted: count(13)?,
                completed: count(14)?,
                retried: count(15)?,
                surrendered: count(16)?,
                buried: count(17)?,
                cancelled: count(18)?,
                expired_deadline: count(19)?,
                expired_stalled: count(20)?,
                expired_lifetime: count(21)?,
                revoked: count(22)?,
                live: count(23)?,
                late: count(24)?,
                fenced: count(25)?,
                pruned: count(26)?,
                purged: count(27)?,
            },
            ends: [None; LINES],
            dirty: false,
        }))
    }

    /// The columns of `queue_save`.
    fn values(&self) -> impl Iterator<Item = impl ToSql> {
        let Counts {
            scheduled,
            ready,
            parked,
            leased,
            completed,
            dead,
            cancelled,
        } = self.counts;
        let ledger = &self.ledger;
        [
            self.id as u64,
            u64::from(self.paused),
            u64::from(self.relaxed),
            self.seq,
            scheduled,
            ready,
            parked,
            leased,
            completed,
            dead,
            cancelled,
            ledger.enqueued,
            ledger.granted,
            ledger.completed,
            ledger.retried,
            ledger.surrendered,
            ledger.buried,
            ledger.cancelled,
            ledger.expired_deadline,
            ledger.expired_stalled,
            ledger.expired_lifetime,
            ledger.revoked,
            ledger.live,
            ledger.late,
            ledger.fenced,
            ledger.pruned,
            ledger.purged,
        ]
        .into_iter()
        .map(|value| Value::Integer(value as i64))
    }
}

/// A moment as a column's value.
pub(super) fn time(at: Timestamp) -> i64 {
    i64::try_from(at.as_micros()).unwrap_or(i64::MAX)
}

/// A column's value as a moment.
pub(super) fn moment(value: i64) -> Timestamp {
    Timestamp::from_micros(value as u64)
}
