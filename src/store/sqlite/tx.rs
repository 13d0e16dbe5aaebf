//! One transaction: what it has read so far, and what it will write when it ends.
//!
//! Queue rows, grants, sessions and the issuer are read once, changed here, and written once before
//! the commit: a thousand settlements of a grant cost one write of its row. This file also answers
//! repeats: an error from a write means *unknown*, so callers repeat the call, which must count
//! once.

use std::collections::{BTreeMap, HashMap};

use rusqlite::types::{ToSql, Value};
use rusqlite::{CachedStatement, Connection, OptionalExtension, Row, params, params_from_iter};

use super::answer::Unread;
use super::fault::{Done, Fault, corrupt};
use super::stored_grant::StoredGrant;
use crate::clock::{Timestamp, micros};
use crate::error::{Error, ErrorKind, Verb};
use crate::inspect::{Counts, Ledger};
use crate::job::QueueName;
use crate::lease::FencingToken;
use crate::rules::issue::Issuer;
use crate::rules::order::TIERS;
use crate::store::codec::Kinds;
use crate::store::{RequestId, SESSION_IDLE, SessionId};

macro_rules! queue_columns {
    () => {
        "SELECT id, name, paused, relaxed, seq, n_scheduled, n_ready, n_parked, n_leased,
            n_completed, n_dead, n_cancelled, enqueued, granted, completed, retried, surrendered,
            buried, cancelled, expired_deadline, expired_stalled, expired_lifetime, revoked, live,
            late, fenced, pruned, purged, dead_by_expiry "
    };
}

statements! {
    QUEUE_NAMED = concat!(
        queue_columns!(),
        "FROM leasehold_queues WHERE namespace = ?1 AND name = ?2"
    );
    QUEUE_OF_ID = concat!(
        queue_columns!(),
        "FROM leasehold_queues WHERE namespace = ?1 AND id = ?2"
    );
    QUEUES = concat!(
        queue_columns!(),
        "FROM leasehold_queues WHERE namespace = ?1 ORDER BY name"
    );
    QUEUE_IDS = "SELECT id FROM leasehold_queues WHERE namespace = ?1 ORDER BY id";
    QUEUE_NEW = "INSERT INTO leasehold_queues (namespace, name) VALUES (?1, ?2)";
    QUEUE_SAVE = "
        UPDATE leasehold_queues
        SET paused = ?2, relaxed = ?3, seq = ?4, n_scheduled = ?5, n_ready = ?6, n_parked = ?7,
            n_leased = ?8, n_completed = ?9, n_dead = ?10, n_cancelled = ?11, enqueued = ?12,
            granted = ?13, completed = ?14, retried = ?15, surrendered = ?16, buried = ?17,
            cancelled = ?18, expired_deadline = ?19, expired_stalled = ?20,
            expired_lifetime = ?21, revoked = ?22, live = ?23, late = ?24, fenced = ?25,
            pruned = ?26, purged = ?27, dead_by_expiry = ?28
        WHERE id = ?1";
    ISSUER = "SELECT last, floor FROM leasehold_meta";
    ISSUER_SAVE = "UPDATE leasehold_meta SET last = ?1, floor = ?2";
    SESSION_OPEN = "INSERT INTO leasehold_sessions (id, namespace, used) VALUES (?1, ?2, ?3)";
    SESSIONS_BEFORE = "SELECT id FROM leasehold_sessions WHERE used < ?1";
    SESSION_FORGET = "DELETE FROM leasehold_sessions WHERE id = ?1";
    SESSION_FORGET_LANES = "DELETE FROM leasehold_lanes WHERE session = ?1";
    SESSION_USED = "SELECT used FROM leasehold_sessions WHERE id = ?1 AND namespace = ?2";
    SESSION_TOUCH = "UPDATE leasehold_sessions SET used = ?2 WHERE id = ?1";
    LANE_SEQ = "SELECT seq FROM leasehold_lanes WHERE session = ?1 AND lane = ?2";
    LANE_ANSWER = "SELECT verb, answer FROM leasehold_lanes WHERE session = ?1 AND lane = ?2";
    LANE_REMEMBER = "
        INSERT INTO leasehold_lanes (session, lane, seq, verb, answer)
        VALUES (?1, ?2, ?3, ?4, ?5)
        ON CONFLICT (session, lane) DO UPDATE
        SET seq = excluded.seq, verb = excluded.verb, answer = excluded.answer";
}

/// A wake-up to give once the transaction is committed: queue, suspects' line or not, how many.
pub(super) type Wakeup = (QueueName, bool, usize);

pub(super) struct Tx<'c> {
    pub(super) db: &'c Connection,
    pub(super) namespace: &'c str,
    pub(super) kinds: &'c mut Kinds,
    pub(super) queues: Vec<Queue>,
    pub(super) grants: BTreeMap<FencingToken, StoredGrant>,
    pub(super) sessions: HashMap<SessionId, Timestamp>,
    pub(super) wakeups: Vec<Wakeup>,
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
    /// The outermost positions of each tier, once known.
    pub(super) bounds: [Option<(i64, i64)>; TIERS],
    dirty: bool,
}

/// The number of a queue that was removed in this transaction: no row has it.
const GONE: i64 = 0;

impl<'c> Tx<'c> {
    pub(super) fn new(db: &'c Connection, namespace: &'c str, kinds: &'c mut Kinds) -> Self {
        Self {
            db,
            namespace,
            kinds,
            queues: Vec::new(),
            grants: BTreeMap::new(),
            sessions: HashMap::new(),
            wakeups: Vec::new(),
            scratch: Vec::new(),
            issuer: None,
        }
    }

    /// The statement, prepared once for each connection.
    pub(super) fn sql(&self, sql: &'static str) -> rusqlite::Result<CachedStatement<'c>> {
        self.db.prepare_cached(sql)
    }

    /// The queue of that name, which is made if it is not there.
    pub(super) fn queue(&mut self, name: &QueueName) -> Done<usize> {
        if let Some(queue) = self.known(name)? {
            return Ok(queue);
        }
        self.sql(QUEUE_NEW)?
            .execute(params![self.namespace, name.as_str()])?;
        if self.db.last_insert_rowid() > super::place::QUEUES_MAX {
            let why = "the file has as many queues as positions can name";
            return Err(Fault::Broken(Error::new(ErrorKind::Full, why)));
        }
        self.known(name)?
            .ok_or_else(|| corrupt("a new queue is not there"))
    }

    /// The queue of that name, if it is there.
    pub(super) fn known(&mut self, name: &QueueName) -> Done<Option<usize>> {
        let is_it = |queue: &Queue| queue.id != GONE && queue.name == *name;
        if let Some(at) = self.queues.iter().position(is_it) {
            return Ok(Some(at));
        }
        let queue = self
            .sql(QUEUE_NAMED)?
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
            .sql(QUEUE_OF_ID)?
            .query_row(params![self.namespace, id], Queue::read)
            .optional()?;
        self.keep(queue)
    }

    fn keep(&mut self, queue: Option<Result<Queue, Fault>>) -> Done<Option<usize>> {
        let Some(queue) = queue else { return Ok(None) };
        self.queues.push(queue?);
        Ok(Some(self.queues.len() - 1))
    }

    /// A queue whose row is gone: another of that name or number is another one.
    pub(super) fn forget_queue(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        (queue.id, queue.dirty) = (GONE, false);
    }

    /// Every queue of the namespace, by name.
    pub(super) fn all_queues(&self) -> Done<Vec<Queue>> {
        let mut select = self.sql(QUEUES)?;
        let queues = select.query_map([self.namespace], Queue::read)?;
        queues.map(|queue| queue?).collect()
    }

    /// The numbers of these queues.
    pub(super) fn queue_ids(&self) -> Done<Vec<i64>> {
        let mut select = self.sql(QUEUE_IDS)?;
        let ids = select.query_map([self.namespace], |row| row.get(0))?;
        Ok(ids.collect::<Result<_, _>>()?)
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
        let issuer = self.sql(ISSUER)?.query_row([], |row| {
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
            self.sql(ISSUER_SAVE)?
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
    pub(super) fn finish(mut self) -> Done<Vec<Wakeup>> {
        self.save_grants()?;
        self.save_sessions()?;
        for queue in self.queues.iter().filter(|queue| queue.dirty) {
            let values = queue.values();
            self.sql(QUEUE_SAVE)?.execute(params_from_iter(values))?;
        }
        Ok(self.wakeups)
    }
}

/// Sessions: a repeated call is answered with its first answer and applied once.
impl Tx<'_> {
    pub(super) fn open_session(&mut self, now: Timestamp) -> Done<SessionId> {
        self.save_sessions()?;
        let idle: Vec<[u8; 16]> = self
            .sql(SESSIONS_BEFORE)?
            .query_map([time(now.before(SESSION_IDLE))], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for id in idle {
            self.sql(SESSION_FORGET)?.execute([id])?;
            self.sql(SESSION_FORGET_LANES)?.execute([id])?;
            self.sessions.remove(&SessionId::from_bytes(id));
        }
        let id = SessionId::generate();
        self.sql(SESSION_OPEN)?
            .execute(params![id.as_bytes(), self.namespace, time(now)])?;
        Ok(id)
    }

    /// Whether a session was used so lately that it need not be written down again.
    pub(super) fn is_fresh(&self, session: SessionId, now: Timestamp) -> Done<bool> {
        let used = self
            .sql(SESSION_USED)?
            .query_row(params![session.as_bytes(), self.namespace], |row| {
                row.get(0)
            })
            .optional()?
            .map(moment);
        Ok(used.is_some_and(|used| now.since(used) < SESSION_IDLE / 4))
    }

    /// The first answer to a request that was already applied.
    pub(super) fn recall(
        &mut self,
        request: RequestId,
        verb: Verb,
        now: Timestamp,
    ) -> Done<Option<Vec<u8>>> {
        let session = request.session.as_bytes();
        let used = match self.sessions.get(&request.session) {
            Some(used) => Some(*used),
            None => self
                .sql(SESSION_USED)?
                .query_row(params![session, self.namespace], |row| row.get(0))
                .optional()?
                .map(moment),
        };
        if used.is_none_or(|used| micros(now.since(used)) > micros(SESSION_IDLE)) {
            return Err(lost("the request's session is not open"));
        }
        self.sessions.insert(request.session, now);
        let last = self
            .sql(LANE_SEQ)?
            .query_row(params![session, request.lane], |row| row.get::<_, i64>(0))
            .optional()?;
        match last.map(|seq| seq as u64) {
            Some(seq) if seq > request.seq => {
                Err(lost("a later request of the same lane has been answered"))
            }
            Some(seq) if seq == request.seq => {
                let (of, answer): (i64, Vec<u8>) = self
                    .sql(LANE_ANSWER)?
                    .query_row(params![session, request.lane], |row| {
                        Ok((row.get(0)?, row.get(1)?))
                    })?;
                if of != i64::from(verb.code()) {
                    return Err(mixed_up());
                }
                Ok(Some(answer))
            }
            _ => Ok(None),
        }
    }

    pub(super) fn remember(&mut self, request: RequestId, verb: Verb, answer: &[u8]) -> Done<()> {
        self.sql(LANE_REMEMBER)?.execute(params![
            request.session.as_bytes(),
            request.lane,
            request.seq as i64,
            verb.code(),
            answer
        ])?;
        Ok(())
    }

    /// Writes down when the sessions of this transaction were last used.
    pub(super) fn save_sessions(&mut self) -> Done<()> {
        for (id, used) in &self.sessions {
            self.sql(SESSION_TOUCH)?
                .execute(params![id.as_bytes(), time(*used)])?;
        }
        Ok(())
    }
}

impl Queue {
    /// Reads the columns of `queue_columns`.
    fn read(row: &Row<'_>) -> rusqlite::Result<Result<Self, Fault>> {
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
                dead_by_expiry: count(28)?,
            },
            bounds: [None; TIERS],
            dirty: false,
        }))
    }

    /// The columns of `QUEUE_SAVE`.
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
            ledger.dead_by_expiry,
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

fn lost(why: &str) -> Fault {
    Fault::Refused(Error::new(ErrorKind::SessionLost, why))
}

/// The refusal of an id that was another call's.
pub(super) fn mixed_up() -> Fault {
    Fault::Refused(Error::invalid(
        "request id",
        "the id of another verb's call",
        "one call per id",
    ))
}

/// A remembered answer cannot be read.
pub(super) fn garbled() -> Fault {
    corrupt("a remembered answer cannot be read")
}

impl From<Unread> for Fault {
    fn from(unread: Unread) -> Self {
        match unread {
            Unread::Garbled => garbled(),
            Unread::MixedUp => mixed_up(),
        }
    }
}
