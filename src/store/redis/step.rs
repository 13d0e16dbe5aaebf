//! Steps: a call that would take the server long is sent to a partition in several.
//!
//! Each step has a number under the call's request, and its answer is kept here. So a repeat of the
//! call goes on where it was cut off, and a partition need not remember more than the last step.

use std::collections::VecDeque;

use bytes::Bytes;

use super::RedisStore;
use super::keys::Keys;
use super::link::Function;
use super::wire::In;
use crate::clock::Timestamp;
use crate::error::{Result, Verb};
use crate::store::RequestId;

/// The steps of one call to one partition.
pub(super) struct Steps<'a> {
    store: &'a RedisStore,
    keys: &'a Keys,
    request: RequestId,
    verb: Verb,
    /// Answers of an earlier send.
    known: VecDeque<Bytes>,
    next: usize,
    /// Whether the partition has been asked in this send.
    asked: bool,
}

impl<'a> Steps<'a> {
    pub(super) fn new(
        store: &'a RedisStore,
        keys: &'a Keys,
        request: RequestId,
        verb: Verb,
    ) -> Self {
        let known = store.shared.sessions.steps(request, keys.tag());
        Self {
            store,
            keys,
            request,
            verb,
            known: known.into(),
            next: 0,
            asked: false,
        }
    }

    pub(super) fn is_begun(&self) -> bool {
        self.next > 0
    }

    /// Whether a step has been answered in an earlier send, and is still to come.
    pub(super) fn are_known(&self) -> bool {
        !self.known.is_empty()
    }

    /// Takes the next step, or gives the answer that it had.
    pub(super) async fn take(&mut self, function: &Function, args: &[&[u8]]) -> Result<In> {
        if let Some(answer) = self.known.pop_front() {
            self.next += 1;
            return Ok(In::new(answer));
        }
        let answer = self.send(function, args).await?.0.rest();
        self.asked = true;
        self.keep(answer.clone());
        Ok(In::new(answer))
    }

    /// There are no more. If all answers were known from an earlier send, the partition is asked
    /// for the last one again: it may have forgotten the session since.
    pub(super) async fn end(mut self, function: &Function) -> Result<()> {
        if !self.asked && self.next > 0 {
            self.next -= 1;
            self.send(function, &[]).await?;
        }
        Ok(())
    }

    /// Takes the next step, which is the last if nobody keeps its answer.
    pub(super) async fn send(
        &self,
        function: &Function,
        args: &[&[u8]],
    ) -> Result<(In, Timestamp)> {
        let (request, verb) = (self.request, self.verb);
        let store = self.store;
        let reply = store.request_step(function, (self.keys, &[]), request, verb, self.next, args);
        let reply = reply.await?;
        Ok((reply.body, reply.now))
    }

    pub(super) fn keep(&mut self, answer: Bytes) {
        let sessions = &self.store.shared.sessions;
        sessions.stepped(self.request, self.keys.tag(), answer);
        self.next += 1;
    }
}
