//! One transaction: what it has read so far, and what it will write when it ends.
//!
//! Grants and places are changed here and written at the end, each kind by one statement for the whole
//! call; the last of them and the commit share a round trip. A thousand settlements of a grant cost
//! one write of its row.

use std::collections::{BTreeMap, BTreeSet};

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

use super::Base;
use super::fault::{Done, Fault, corrupt};
use super::place::{Aside, Put};
use super::tally::{Count, Tally};
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::{JobId, JobRecord, QueueName};
use crate::lease::FencingToken;
use crate::rules::issue::Issuer;
use crate::store::codec::Kinds;
use crate::store::sql::grant::StoredGrant;
use crate::store::{RequestId, SessionId, codec};

/// A wake-up to give once the transaction is committed: queue, suspects' line or not, how many.
pub(super) type Bell = (QueueName, bool, usize);

/// A grant: the place of its queue in [`Tx::queues`], and its first token.
pub(super) type GrantKey = (usize, FencingToken);

/// An argument of a statement, with its type: statements are sent unnamed.
pub(super) type Arg<'a> = (&'a (dyn ToSql + Sync), Type);

macro_rules! args {
    ($($value:expr => $type:ident),* $(,)?) => {
        &[$((&$value as &(dyn tokio_postgres::types::ToSql + Sync),
             tokio_postgres::types::Type::$type)),*]
    };
}
pub(super) use args;

pub(super) struct Tx<'c, C> {
    pub(super) db: &'c C,
    pub(super) base: &'c Base,
    /// The store's present, asked once the locks of the step are held.
    pub(super) now: Timestamp,
    /// The test's hand on the clock.
    pub(super) by_hand: Option<i64>,
    /// The transaction is the caller's: it begins and ends it, and no lock of ours that others wait
    /// for may depend on when.
    pub(super) riding: bool,
    /// It looks and changes nothing: rows are not locked.
    pub(super) reads: bool,
    pub(super) kinds: Kinds,
    pub(super) queues: Vec<Queue>,
    pub(super) grants: BTreeMap<GrantKey, StoredGrant>,
    pub(super) noted: BTreeSet<(GrantKey, usize)>,
    /// Leases that ended with something noted of them: queue and token.
    pub(super) notes_over: Vec<(i32, i64)>,
    pub(super) compacted: BTreeSet<GrantKey>,
    pub(super) puts: Vec<Put>,
    pub(super) asides: Vec<Aside>,
    pub(super) freed: Vec<(i32, Vec<u8>, Uuid)>,
    pub(super) bells: Vec<Bell>,
    pub(super) answers: Vec<(RequestId, Verb, Vec<u8>)>,
    pub(super) touched: Vec<SessionId>,
}

/// A queue's row, and what this transaction adds to its counts.
pub(super) struct Queue {
    pub(super) id: i32,
    pub(super) name: QueueName,
    pub(super) paused: bool,
    pub(super) relaxed: bool,
    pub(super) issuer: Issuer,
    pub(super) issued: bool,
    pub(super) tally: Tally,
}

impl Queue {
    /// Reads the columns of `queues_named`.
    fn read(row: &Row) -> Done<Self> {
        let name: String = row.try_get(1)?;
        let name = QueueName::new(name).map_err(|_| corrupt("a queue's name is not a name"))?;
        Ok(Self {
            id: row.try_get(0)?,
            name,
            paused: row.try_get(2)?,
            relaxed: row.try_get(3)?,
            issuer: Issuer {
                last: row.try_get::<_, i64>(4)? as u64,
                floor: row.try_get::<_, i64>(5)? as u64,
            },
            issued: false,
            tally: Tally::default(),
        })
    }
}

impl<'c, C: GenericClient + Sync> Tx<'c, C> {
    pub(super) fn new(db: &'c C, base: &'c Base, riding: bool) -> Self {
        Self {
            db,
            base,
            now: Timestamp::ZERO,
            by_hand: base.by_hand(),
            riding,
            reads: false,
            kinds: Kinds::default(),
            queues: Vec::new(),
            grants: BTreeMap::new(),
            noted: BTreeSet::new(),
            notes_over: Vec::new(),
            compacted: BTreeSet::new(),
            puts: Vec::new(),
            asides: Vec::new(),
            freed: Vec::new(),
            bells: Vec::new(),
            answers: Vec::new(),
            touched: Vec::new(),
        }
    }

    pub(super) async fn rows(&self, name: &'static str, args: &[Arg<'_>]) -> Done<Vec<Row>> {
        Ok(self.db.query_typed(self.base.sql.get(name), args).await?)
    }

    pub(super) async fn run(&self, name: &'static str, args: &[Arg<'_>]) -> Done<()> {
        self.rows(name, args).await.map(|_| ())
    }

    /// To be sent with the first statement that reads.
    pub(super) async fn begin(&self) -> Done<()> {
        if self.riding {
            return Ok(());
        }
        Ok(self.db.batch_execute(&self.base.begin).await?)
    }

    pub(super) async fn clock(&self) -> Done<Timestamp> {
        let rows = self.rows("clock", args![self.by_hand => INT8]).await?;
        let row = rows.first().ok_or_else(|| corrupt("no time"))?;
        Ok(moment(row.try_get(0)?))
    }

    /// Which database this is.
    pub(super) async fn whose(&self) -> Done<Uuid> {
        let rows = self.rows("whose", &[]).await?;
        let row = rows.first().ok_or_else(|| corrupt("no identity"))?;
        Ok(row.try_get(0)?)
    }

    /// The queues of those names that are there, to be kept.
    pub(super) async fn named(&self, names: &[&str]) -> Done<Vec<Row>> {
        self.rows(
            "queues_named",
            args![self.base.namespace => TEXT, names => TEXT_ARRAY],
        )
        .await
    }

    /// Keeps rows of queues.
    pub(super) fn keep(&mut self, rows: &[Row]) -> Done<()> {
        for row in rows {
            let queue = Queue::read(row)?;
            if self.queue_of(queue.id).is_none() {
                self.queues.push(queue);
            }
        }
        Ok(())
    }

    pub(super) fn known(&self, name: &QueueName) -> Option<usize> {
        self.queues.iter().position(|queue| queue.name == *name)
    }

    pub(super) fn queue_of(&self, id: i32) -> Option<usize> {
        self.queues.iter().position(|queue| queue.id == id)
    }

    /// The queue of a row, read if it has not been. None: it is another namespace's.
    pub(super) async fn queue_of_row(&mut self, id: i32) -> Done<Option<usize>> {
        if self.queue_of(id).is_none() {
            let rows = self
                .rows(
                    "queues_of_ids",
                    args![self.base.namespace => TEXT, &[id][..] => INT4_ARRAY],
                )
                .await?;
            self.keep(&rows)?;
        }
        Ok(self.queue_of(id))
    }

    /// The queue of that name, which is made if it is not there.
    pub(super) async fn queue(&mut self, name: &QueueName) -> Done<usize> {
        if let Some(queue) = self.known(name) {
            return Ok(queue);
        }
        let rows = self.named(&[name.as_str()]).await?;
        self.keep(&rows)?;
        if let Some(queue) = self.known(name) {
            return Ok(queue);
        }
        // An issuer without memory: what an older copy of this database gave is below its floor.
        let floor = Issuer::without_memory(self.now).floor as i64;
        self.run(
            "queue_new",
            args![self.base.namespace => TEXT, name.as_str() => TEXT, floor => INT8],
        )
        .await?;
        let rows = self.named(&[name.as_str()]).await?;
        self.keep(&rows)?;
        self.known(name)
            .ok_or_else(|| corrupt("a new queue is not there"))
    }

    pub(super) fn count(&mut self, queue: usize, count: Count, n: i64) {
        self.queues[queue].tally.add(count, n);
    }

    /// Counts calls that were refused as stale.
    pub(super) fn fenced(&mut self, queue: &QueueName, calls: usize) {
        if let Some(queue) = self.known(queue) {
            self.count(queue, Count::Fenced, calls as i64);
        }
    }

    pub(super) fn decode(&mut self, record: Vec<u8>) -> Done<JobRecord> {
        codec::decode(&record.into(), &mut self.kinds).map_err(Fault::Broken)
    }

    /// Writes where jobs went: what follows looks for them.
    pub(super) async fn flush(&mut self) -> Done<()> {
        self.pass_keys().await?;
        tokio::try_join!(biased; self.save_freed(), self.save_asides(), self.save_puts())?;
        self.freed.clear();
        self.asides.clear();
        self.puts.clear();
        Ok(())
    }

    /// Writes everything and commits, in one round trip if no key changes hands.
    ///
    /// Each of what is joined sends at most one statement: a second one would be sent when the first
    /// is answered, which is after the commit.
    pub(super) async fn commit(&mut self) -> Done<Vec<Bell>> {
        self.pass_keys().await?;
        self.compact().await?;
        tokio::try_join!(biased;
            self.save_freed(),
            self.save_asides(),
            self.save_puts(),
            self.save_notes(),
            self.end_notes(),
            self.end_grants(),
            self.save_grants(),
            self.save_compacted(),
            self.save_tallies(),
            self.save_issuers(),
            self.save_answers(),
            self.save_touched(),
            self.ring_riding(),
            self.end(),
            self.ring_after(),
        )?;
        Ok(std::mem::take(&mut self.bells))
    }

    async fn end(&self) -> Done<()> {
        if self.riding {
            return Ok(());
        }
        Ok(self.db.batch_execute("COMMIT").await?)
    }

    async fn save_tallies(&self) -> Done<()> {
        let changed = self.queues.iter().filter(|queue| !queue.tally.is_nothing());
        let (ids, tallies): (Vec<i32>, Vec<&[i64]>) = changed
            .map(|queue| (queue.id, queue.tally.columns()))
            .unzip();
        if ids.is_empty() {
            return Ok(());
        }
        let tallies = tallies.concat();
        self.run("tally", args![ids => INT4_ARRAY, tallies => INT8_ARRAY])
            .await
    }

    /// The queues to whose counts this transaction has added.
    pub(super) fn tallied(&self) -> Vec<String> {
        let changed = self.queues.iter().filter(|queue| !queue.tally.is_nothing());
        changed.map(|queue| queue.name.to_string()).collect()
    }

    async fn save_issuers(&self) -> Done<()> {
        let issued = self.queues.iter().filter(|queue| queue.issued);
        let (ids, lasts): (Vec<i32>, Vec<i64>) = issued
            .map(|queue| (queue.id, queue.issuer.last as i64))
            .unzip();
        if ids.is_empty() {
            return Ok(());
        }
        self.run("issuer_save", args![ids => INT4_ARRAY, lasts => INT8_ARRAY])
            .await
    }

    /// Tells the other processes when the caller commits.
    async fn ring_riding(&self) -> Done<()> {
        if self.riding {
            self.ring(&self.bells).await?;
        }
        Ok(())
    }

    /// Tells the other processes once it is committed. Those that ring in a transaction wait for each
    /// other until it is on disk. A bell that is lost costs a second.
    async fn ring_after(&self) -> Done<()> {
        if !self.riding {
            let _ = self.ring(&self.bells).await;
        }
        Ok(())
    }

    pub(super) async fn ring(&self, bells: &[Bell]) -> Done<()> {
        let bells: BTreeSet<String> = bells
            .iter()
            .map(|(queue, suspect, jobs)| self.base.bell(queue, *suspect, *jobs))
            .collect();
        if bells.is_empty() {
            return Ok(());
        }
        let bells: Vec<String> = bells.into_iter().collect();
        self.run(
            "ring",
            args![self.base.ear.channel => TEXT, bells => TEXT_ARRAY],
        )
        .await
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

pub(super) fn uuid(id: JobId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

pub(super) fn job_id(id: Uuid) -> JobId {
    JobId::from_bytes(*id.as_bytes())
}
