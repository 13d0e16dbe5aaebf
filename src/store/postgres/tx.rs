//! One call of a function, on a connection of the store or in a transaction of its user's.
//!
//! Statements are sent unnamed, with the types of their arguments: one round trip each, and nothing
//! that is left behind in the session. That is what a pooler in transaction mode needs.

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

use super::Base;
use super::fault::{Done, corrupt};
use crate::clock::Timestamp;
use crate::job::JobId;
use crate::lease::Receipt;
use crate::limits::clip;
use crate::store::RequestId;

/// An argument of a statement, with its type.
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
}

/// A request id as the functions take it. All null: a call that is not repeated.
#[derive(Clone, Copy, Default)]
pub(super) struct Named {
    pub(super) session: Option<Uuid>,
    pub(super) lane: Option<i64>,
    pub(super) seq: Option<i64>,
}

impl From<RequestId> for Named {
    fn from(request: RequestId) -> Self {
        Self {
            session: Some(Uuid::from_bytes(*request.session.as_bytes())),
            lane: Some(request.lane.into()),
            seq: Some(request.seq.cast_signed()),
        }
    }
}

impl<'c, C: GenericClient + Sync> Tx<'c, C> {
    pub(super) fn new(db: &'c C, base: &'c Base) -> Self {
        Self { db, base }
    }

    pub(super) async fn rows(&self, name: &'static str, args: &[Arg<'_>]) -> Done<Vec<Row>> {
        Ok(self.db.query_typed(self.base.sql.get(name), args).await?)
    }

    pub(super) async fn row(&self, name: &'static str, args: &[Arg<'_>]) -> Done<Row> {
        let rows = self.rows(name, args).await?;
        rows.into_iter().next().ok_or_else(|| corrupt("no answer"))
    }

    /// How long a call of the store waits for a lock. In a user's transaction the user decides.
    pub(super) fn patience(&self, named: Named) -> Option<&str> {
        named.session.map(|_| &*self.base.patience)
    }
}

/// Receipts as the functions take them.
#[derive(Default)]
pub(super) struct Receipts<'r> {
    pub(super) queues: Vec<&'r str>,
    pub(super) jobs: Vec<Uuid>,
    pub(super) grants: Vec<i64>,
    pub(super) tokens: Vec<i64>,
    pub(super) nonces: Vec<&'r [u8]>,
}

impl<'r> FromIterator<&'r Receipt> for Receipts<'r> {
    fn from_iter<I: IntoIterator<Item = &'r Receipt>>(receipts: I) -> Self {
        let mut all = Self::default();
        for receipt in receipts {
            all.queues.push(receipt.queue.as_str());
            all.jobs.push(uuid(receipt.job));
            // This store has no partitions: no grant has the number of one that says so.
            let grant = receipt.grant.get().cast_signed();
            all.grants
                .push(if receipt.partition == 0 { grant } else { -1 });
            all.tokens.push(receipt.token.get().cast_signed());
            all.nonces.push(receipt.nonce.as_bytes());
        }
        all
    }
}

/// A moment as a column's value.
pub(super) fn time(at: Timestamp) -> i64 {
    i64::try_from(at.as_micros()).unwrap_or(i64::MAX)
}

/// Text without zero bytes, which no text of the server holds, and no longer than it may be.
pub(super) fn plain(text: &str, limit: usize) -> String {
    clip(text, limit).replace('\0', "\u{fffd}")
}

/// A column's value as a moment.
pub(super) fn moment(value: i64) -> Timestamp {
    Timestamp::from_micros(value.cast_unsigned())
}

pub(super) fn job_id(id: Uuid) -> JobId {
    JobId::from_bytes(*id.as_bytes())
}

pub(super) fn uuid(id: JobId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}
