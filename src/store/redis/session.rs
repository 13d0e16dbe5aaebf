//! Sessions: which calls have been sent where, so that a repeat is told from a first send.
//!
//! A session belongs to the handle that opened it. A partition remembers the last answer of each
//! lane in its own slot, under a key that is made before the first request goes there. So a request
//! that finds no memory is refused: it may have been applied, and forgotten. No partition has to
//! look into another slot to know whether the session lives; the handle shows it the time that the
//! last answer of the session carried.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::queue::Partition;
use super::wire::Out;
use crate::clock::{Timestamp, micros, monotonic};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::store::{RequestId, SESSION_IDLE, SessionId};

/// A partition remembers a session for twenty minutes from each introduction: time enough for a
/// request that was sent just before the next one is due to be repeated until the session itself is
/// over.
const INTRODUCE_AGAIN: Duration = Duration::from_secs(300);

/// What a call does where, fixed when it is first sent.
pub(super) type Plan = Arc<Vec<(Partition, usize)>>;

#[derive(Default)]
pub(super) struct Sessions {
    open: Mutex<HashMap<SessionId, Session>>,
}

struct Session {
    /// The store's time in the last answer.
    used: Timestamp,
    /// When the session was last introduced to each partition.
    introduced: HashMap<String, Instant>,
    lanes: HashMap<u32, Lane>,
}

struct Lane {
    seq: u64,
    verb: Verb,
    sent: HashSet<String>,
    plan: Option<Plan>,
    /// The answers to the steps of a call, by partition: a repeat goes on behind them.
    steps: HashMap<String, Vec<Bytes>>,
    /// Which steps have been answered where, and whether one of them first in this send.
    answered: HashSet<(String, usize)>,
    has_acted: bool,
    /// The request before this one.
    before: Option<Box<Lane>>,
}

fn lost(why: &str) -> Error {
    Error::new(ErrorKind::SessionLost, why)
}

pub(super) fn not_open() -> Error {
    lost("the request's session is not open")
}

pub(super) fn overtaken() -> Error {
    lost("a later request of the same lane has been answered")
}

pub(super) fn mixed_up() -> Error {
    Error::invalid(
        "request id",
        "the id of another verb's call",
        "one call per id",
    )
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Session>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, now: Timestamp) -> SessionId {
        let mut open = self.lock();
        open.retain(|_, session| now.since(session.used) <= SESSION_IDLE);
        let id = SessionId::generate();
        let session = Session {
            used: now,
            introduced: HashMap::new(),
            lanes: HashMap::new(),
        };
        open.insert(id, session);
        id
    }

    /// Ends a session whose requests may go to other partitions from here on: a repeat would do a
    /// part of them twice, and another part not at all.
    pub(super) fn leave(&self, session: SessionId, why: &Error) {
        if why.kind() == ErrorKind::SessionLost {
            self.lock().remove(&session);
        }
    }

    /// Takes in a request. True if it has been sent before.
    pub(super) fn begin(&self, request: RequestId, verb: Verb) -> Result<bool> {
        let mut open = self.lock();
        let session = open.get_mut(&request.session).ok_or_else(not_open)?;
        let lane = session.lanes.entry(request.lane).or_insert_with(|| Lane {
            seq: 0,
            verb,
            sent: HashSet::new(),
            plan: None,
            steps: HashMap::new(),
            answered: HashSet::new(),
            has_acted: false,
            before: None,
        });
        if lane.seq > request.seq {
            return Err(overtaken());
        }
        lane.has_acted = false;
        if lane.seq == request.seq {
            return if lane.verb == verb {
                Ok(true)
            } else {
                Err(mixed_up())
            };
        }
        lane.before = Some(Box::new(Lane {
            seq: lane.seq,
            verb: lane.verb,
            sent: std::mem::take(&mut lane.sent),
            plan: lane.plan.take(),
            steps: std::mem::take(&mut lane.steps),
            answered: std::mem::take(&mut lane.answered),
            has_acted: false,
            before: None,
        }));
        lane.seq = request.seq;
        lane.verb = verb;
        Ok(false)
    }

    /// A request that was refused has not been answered: the one before it is the last of its lane.
    pub(super) fn withdraw(&self, request: RequestId) {
        let mut open = self.lock();
        let session = open.get_mut(&request.session);
        let lane = session.and_then(|session| session.lanes.get_mut(&request.lane));
        if let Some(lane) = lane.filter(|lane| lane.seq == request.seq)
            && let Some(before) = lane.before.take()
        {
            *lane = *before;
        }
    }

    /// The plan of a request that has one.
    pub(super) fn plan(&self, request: RequestId) -> Option<Plan> {
        let open = self.lock();
        let lane = open.get(&request.session)?.lanes.get(&request.lane)?;
        lane.plan.clone().filter(|_| lane.seq == request.seq)
    }

    pub(super) fn set_plan(&self, request: RequestId, plan: &Plan) {
        let mut open = self.lock();
        let session = open.get_mut(&request.session);
        let lane = session.and_then(|session| session.lanes.get_mut(&request.lane));
        if let Some(lane) = lane.filter(|lane| lane.seq == request.seq) {
            lane.plan = Some(Arc::clone(plan));
        }
    }

    /// The answers that a partition has given to the steps of a request so far.
    pub(super) fn steps(&self, request: RequestId, tag: &str) -> Vec<Bytes> {
        let open = self.lock();
        let session = open.get(&request.session);
        let lane = session.and_then(|session| session.lanes.get(&request.lane));
        let lane = lane.filter(|lane| lane.seq == request.seq);
        lane.and_then(|lane| lane.steps.get(tag))
            .cloned()
            .unwrap_or_default()
    }

    pub(super) fn stepped(&self, request: RequestId, tag: &str, answer: Bytes) {
        let mut open = self.lock();
        let session = open.get_mut(&request.session);
        let lane = session.and_then(|session| session.lanes.get_mut(&request.lane));
        if let Some(lane) = lane.filter(|lane| lane.seq == request.seq) {
            lane.steps.entry(tag.to_owned()).or_default().push(answer);
        }
    }

    /// When the session was last used, if it must be introduced to the partition before the
    /// request.
    pub(super) fn introduction(&self, request: RequestId, tag: &str) -> Result<Option<Timestamp>> {
        let open = self.lock();
        let session = open.get(&request.session).ok_or_else(not_open)?;
        let is_repeat = session
            .lanes
            .get(&request.lane)
            .is_some_and(|lane| lane.seq == request.seq && lane.sent.contains(tag));
        let is_known = session
            .introduced
            .get(tag)
            .is_some_and(|at| monotonic() - *at < INTRODUCE_AGAIN);
        Ok((!is_repeat && !is_known).then_some(session.used))
    }

    /// The request as the functions read it, about to be sent to a partition.
    pub(super) fn sending(
        &self,
        request: RequestId,
        verb: Verb,
        step: usize,
        tag: &str,
    ) -> Result<Vec<u8>> {
        let mut open = self.lock();
        let session = open.get_mut(&request.session).ok_or_else(not_open)?;
        if let Some(lane) = session.lanes.get_mut(&request.lane)
            && lane.seq == request.seq
            && !lane.sent.contains(tag)
        {
            lane.sent.insert(tag.to_owned());
        }
        let mut out = Out::default();
        out.u32(request.lane as usize).u64(request.seq);
        out.u8(verb.code()).u16(step).u64(session.used.as_micros());
        Ok(out.0)
    }

    /// A partition has answered an introduction: from here on it remembers.
    pub(super) fn introduced(&self, session: SessionId, tag: &str, now: Timestamp) {
        if let Some(session) = self.lock().get_mut(&session) {
            session.used = now;
            session.introduced.insert(tag.to_owned(), monotonic());
        }
    }

    /// A partition has answered a step of a request.
    pub(super) fn note_answer(&self, request: RequestId, tag: &str, step: usize, now: Timestamp) {
        let mut open = self.lock();
        let Some(session) = open.get_mut(&request.session) else {
            return;
        };
        session.used = now;
        let lane = session.lanes.get_mut(&request.lane);
        if let Some(lane) = lane.filter(|lane| lane.seq == request.seq) {
            lane.has_acted |= lane.answered.insert((tag.to_owned(), step));
        }
    }

    /// A partition refuses for itself alone: when another one has carried out its share in the same
    /// send, the call as a whole is not certain to have done nothing. Its repeat is, and says why.
    pub(super) fn of_whole_call(&self, request: RequestId, error: Error) -> Error {
        // A claim that finds no token says so only if it was granted nothing anywhere.
        if !error.kind().is_certain() || error.kind() == ErrorKind::TokensAhead {
            return error;
        }
        let open = self.lock();
        let session = open.get(&request.session);
        let lane = session.and_then(|session| session.lanes.get(&request.lane));
        if lane.is_none_or(|lane| lane.seq != request.seq || !lane.has_acted) {
            return error;
        }
        let why = "one partition refused its share of the call and another has carried out its own; \
                   repeat the call";
        Error::new(ErrorKind::Unavailable, why).caused_by(error)
    }

    /// A call that went nowhere keeps its session alive, unless it came too late.
    pub(super) fn touch(&self, request: RequestId, now: Timestamp) -> Result<()> {
        let mut open = self.lock();
        let session = open.get_mut(&request.session).ok_or_else(not_open)?;
        if micros(now.since(session.used)) > micros(SESSION_IDLE) {
            return Err(not_open());
        }
        session.used = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_request_leaves_its_lane_as_it_was() {
        let sessions = Sessions::default();
        let session = sessions.open(Timestamp::ZERO);
        let request = |seq| RequestId {
            session,
            lane: 0,
            seq,
        };
        let begin = |seq| sessions.begin(request(seq), Verb::Claim);
        assert!(!begin(1).unwrap());
        assert!(!begin(2).unwrap());
        assert!(begin(1).is_err());
        sessions.withdraw(request(2));
        assert!(begin(1).unwrap());
        assert!(!begin(2).unwrap());
        assert!(begin(1).is_err());
    }
}
