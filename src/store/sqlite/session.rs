//! Sessions: a repeated call is answered with its first answer and applied once.

use rusqlite::{OptionalExtension, params};

use super::fault::{Done, Fault, corrupt};
use super::tx::{Tx, moment, time};
use crate::clock::{Timestamp, micros};
use crate::error::{Error, ErrorKind, Verb};
use crate::store::answer::Unread;
use crate::store::{RequestId, SESSION_IDLE, SessionId};

fn lost(why: &str) -> Fault {
    Fault::Refused(Error::new(ErrorKind::SessionLost, why))
}

impl Tx<'_> {
    pub(super) fn open_session(&mut self, now: Timestamp) -> Done<SessionId> {
        self.save_sessions()?;
        let idle: Vec<[u8; 16]> = self
            .sql("session_idle")?
            .query_map([time(now.before(SESSION_IDLE))], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for id in idle {
            self.sql("session_forget")?.execute([id])?;
            self.sql("session_forget_lanes")?.execute([id])?;
            self.sessions.remove(&SessionId::from_bytes(id));
        }
        let id = SessionId::generate();
        self.sql("session_open")?
            .execute(params![id.as_bytes(), self.namespace, time(now)])?;
        Ok(id)
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
                .sql("session_used")?
                .query_row(params![session, self.namespace], |row| row.get(0))
                .optional()?
                .map(moment),
        };
        if used.is_none_or(|used| micros(now.since(used)) > micros(SESSION_IDLE)) {
            return Err(lost("the request's session is not open"));
        }
        self.sessions.insert(request.session, now);
        let last = self
            .sql("lane_seq")?
            .query_row(params![session, request.lane], |row| row.get::<_, i64>(0))
            .optional()?;
        match last.map(|seq| seq as u64) {
            Some(seq) if seq > request.seq => {
                Err(lost("a later request of the same lane has been answered"))
            }
            Some(seq) if seq == request.seq => {
                let (of, answer): (i64, Vec<u8>) = self
                    .sql("lane_answer")?
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
        self.sql("lane_remember")?.execute(params![
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
            self.sql("session_touch")?
                .execute(params![id.as_bytes(), time(*used)])?;
        }
        Ok(())
    }
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
