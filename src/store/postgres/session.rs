//! Sessions: a repeated call is answered with its first answer and applied once.
//!
//! When a session was last used is kept with its lanes, where each call writes anyway. Its own row is
//! touched once a minute, so that the calls of one process do not wait for each other there.

use std::time::Duration;

use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

use super::fault::{Done, Fault, mixed_up};
use super::tx::{Tx, args, moment, time};
use crate::error::{Error, ErrorKind, Verb};
use crate::store::{RequestId, SESSION_IDLE, SessionId};

const TOUCH_EVERY: Duration = Duration::from_secs(60);

fn lost(why: &str) -> Fault {
    Fault::Refused(Error::new(ErrorKind::SessionLost, why))
}

fn uuid(session: SessionId) -> Uuid {
    Uuid::from_bytes(*session.as_bytes())
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn open_session(&mut self) -> Done<SessionId> {
        let ((), now) = tokio::try_join!(biased; self.begin(), self.clock())?;
        let id = SessionId::generate();
        tokio::try_join!(biased;
            async {
                let idle = time(now.before(SESSION_IDLE));
                let args = args![idle => INT8, self.base.namespace => TEXT];
                self.run("session_forget", args).await
            },
            async {
                let args = args![uuid(id) => UUID, self.base.namespace => TEXT, time(now) => INT8];
                self.run("session_open", args).await
            }
        )?;
        Ok(id)
    }

    /// Reads what is known of a request, for [`recalled`](Self::recalled).
    pub(super) async fn recall(&self, request: RequestId) -> Done<Vec<Row>> {
        // Of a session that seems idle, all lanes are looked at: the others are too many.
        let args = args![uuid(request.session) => UUID, self.base.namespace => TEXT,
                         i64::from(request.lane) => INT8, request.seq as i64 => INT8, self.by_hand => INT8];
        self.rows("recall", args).await
    }

    /// The first answer to a request that was already applied.
    pub(super) fn recalled(
        &mut self,
        request: RequestId,
        verb: Verb,
        rows: &[Row],
    ) -> Done<Option<Vec<u8>>> {
        let row = rows.first();
        let row = row.ok_or_else(|| lost("the request's session is not open"))?;
        let used = moment(row.try_get(0)?);
        if self.now.since(used) > SESSION_IDLE {
            return Err(lost("the request's session is not open"));
        }
        let last: Option<i64> = row.try_get(2)?;
        let last = last.map(|seq| seq as u64);
        if last.is_some_and(|last| last >= request.seq)
            || self.now.since(moment(row.try_get(1)?)) > TOUCH_EVERY
        {
            self.touched.push(request.session);
        }
        match last {
            Some(seq) if seq > request.seq => {
                Err(lost("a later request of the same lane has been answered"))
            }
            Some(seq) if seq == request.seq => {
                if row.try_get::<_, i16>(3)? != i16::from(verb.code()) {
                    return Err(mixed_up());
                }
                Ok(row.try_get(4)?)
            }
            _ => Ok(None),
        }
    }

    pub(super) fn remember(&mut self, request: RequestId, verb: Verb, answer: Vec<u8>) {
        self.answers.push((request, verb, answer));
    }

    /// One statement for all: the commit is sent behind it without waiting, and what came after that
    /// would not be part of the transaction.
    pub(super) async fn save_answers(&self) -> Done<()> {
        if self.answers.is_empty() {
            return Ok(());
        }
        let (mut sessions, mut lanes, mut seqs) = (Vec::new(), Vec::new(), Vec::new());
        let (mut verbs, mut answers) = (Vec::new(), Vec::new());
        for (request, verb, answer) in &self.answers {
            sessions.push(uuid(request.session));
            lanes.push(i64::from(request.lane));
            seqs.push(request.seq as i64);
            verbs.push(i16::from(verb.code()));
            answers.push(&answer[..]);
        }
        let args = args![sessions => UUID_ARRAY, lanes => INT8_ARRAY, seqs => INT8_ARRAY,
                         verbs => INT2_ARRAY, time(self.now) => INT8, answers => BYTEA_ARRAY];
        self.run("remember", args).await
    }

    pub(super) async fn touch_sessions(&self) -> Done<()> {
        if self.touched.is_empty() {
            return Ok(());
        }
        let sessions: Vec<Uuid> = self.touched.iter().map(|session| uuid(*session)).collect();
        let args = args![sessions => UUID_ARRAY, time(self.now) => INT8];
        self.run("session_touch", args).await
    }
}
