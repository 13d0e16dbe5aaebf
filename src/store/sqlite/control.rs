//! control: what operators do, each time on record.
//!
//! Jobs that wait are found by id through an index; leased ones through the id bounds of the live
//! grants, so that claims need no index entry for each lease.

use rusqlite::params;

use super::fault::{Done, Fault};
use super::place::{Location, first_position};
use super::stored_grant::{Note, offset};
use super::tx::{Tx, garbled, time};
use super::view::state_code;
use crate::clock::Timestamp;
use crate::error::Verb;
use crate::job::{JobId, JobState, QueueName};
use crate::lease::FencingToken;
use crate::limits::AUDIT_TOKENS;
use crate::rules::ends::{self, Next};
use crate::store::call::check_empty;
use crate::store::{ControlCommand, ControlRequest, Controlled, LeaseSelect, Select};

statements! {
    GRANTS_BY_OWNER = "
        SELECT g.id FROM leasehold_grants g JOIN leasehold_queues q ON q.id = g.queue
        WHERE q.namespace = ?1 AND g.owner = ?2 ORDER BY g.id";
    GRANTS_BY_TASK = "
        SELECT g.id FROM leasehold_grants g JOIN leasehold_queues q ON q.id = g.queue
        WHERE q.namespace = ?1 AND g.task = ?2 ORDER BY g.id";
    READY_IDS = "
        SELECT id FROM leasehold_ready WHERE position >= ?1 AND position < ?2
        ORDER BY position LIMIT ?3";
    PARKED_IDS = "
        SELECT id FROM leasehold_aside WHERE queue = ?1 AND state = 1
        ORDER BY key, seq LIMIT ?2";
    ASIDE_IDS = "
        SELECT id FROM leasehold_aside WHERE queue = ?1 AND state = ?2
        ORDER BY at, seq LIMIT ?3";
    GRANTS_OF_QUEUE = "SELECT id FROM leasehold_grants WHERE queue = ?1 ORDER BY id";
    UNIQUE_KEYS_GONE = "DELETE FROM leasehold_unique WHERE queue = ?1";
    EXCLUSIVE_KEYS_GONE = "DELETE FROM leasehold_exclusive WHERE queue = ?1";
    QUEUE_GONE = "DELETE FROM leasehold_queues WHERE id = ?1";
    AUDIT_NEW = "
        INSERT INTO leasehold_audit (namespace, at, actor, reason, command, done, tokens)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
}

/// A selected job; of a leased one it is known where.
type Selected = (JobId, Option<Location>);

impl Tx<'_> {
    pub(super) fn control(&mut self, request: &ControlRequest, now: Timestamp) -> Done<Controlled> {
        if let Some(first) = self.recall(request.request, Verb::Control, now)? {
            return serde_json::from_slice(&first).map_err(|_| garbled());
        }
        let mut tokens = Vec::new();
        let answer = match &request.command {
            ControlCommand::Pause(queue) => self.set_paused(queue, true)?,
            ControlCommand::Resume(queue) => self.set_paused(queue, false)?,
            ControlCommand::Configure { queue, relaxed } => {
                let queue = self.queue(queue)?;
                self.at(queue).relaxed = *relaxed;
                one()
            }
            ControlCommand::Revoke(leases) => {
                self.revoke(leases, &request.reason, now, &mut tokens)?
            }
            ControlCommand::Cancel(jobs) => {
                self.each(jobs, |tx, location| tx.cancel(location, now))?
            }
            ControlCommand::Purge(jobs) => self.each(jobs, Self::purge)?,
            ControlCommand::Reschedule { jobs, delay } => self.each(jobs, |tx, location| {
                tx.reschedule(location, now, now.after(*delay))
            })?,
            ControlCommand::RetryDead(jobs) => self.retry_dead(jobs, now)?,
            ControlCommand::Remove(queue) => self.remove(queue)?,
        };
        let tokens = serde_json::to_string(&tokens).map_err(|_| garbled())?;
        self.sql(AUDIT_NEW)?.execute(params![
            self.namespace,
            time(now),
            request.actor,
            request.reason,
            request.command.to_string(),
            answer.done as i64,
            tokens
        ])?;
        let written = serde_json::to_vec(&answer).map_err(|_| garbled())?;
        self.remember(request.request, Verb::Control, &written)?;
        Ok(answer)
    }

    fn remove(&mut self, name: &QueueName) -> Done<Controlled> {
        let Some(at) = self.known(name)? else {
            return Ok(Controlled::default());
        };
        check_empty(name, &self.queues[at].counts).map_err(Fault::Refused)?;
        let id = self.queues[at].id;
        for sql in [UNIQUE_KEYS_GONE, EXCLUSIVE_KEYS_GONE, QUEUE_GONE] {
            self.sql(sql)?.execute([id])?;
        }
        self.forget_queue(at);
        Ok(one())
    }

    fn set_paused(&mut self, queue: &QueueName, paused: bool) -> Done<Controlled> {
        let at = self.queue(queue)?;
        self.at(at).paused = paused;
        if !paused {
            self.wakeups.push((queue.clone(), false, usize::MAX));
            self.wakeups.push((queue.clone(), true, usize::MAX));
        }
        Ok(one())
    }

    fn selected(&mut self, jobs: &Select) -> Done<Vec<Selected>> {
        match jobs {
            Select::Job(id) => {
                let location = self.find(*id)?;
                Ok(location
                    .map(|location| (*id, Some(location)))
                    .into_iter()
                    .collect())
            }
            Select::State { queue, state, max } => match self.known(queue)? {
                Some(queue) => self.in_state(queue, *state, *max),
                None => Ok(Vec::new()),
            },
        }
    }

    /// The jobs of a queue in a state, in the order in which an inspection lists them.
    fn in_state(&mut self, queue: usize, state: JobState, max: usize) -> Done<Vec<Selected>> {
        let of = self.queues[queue].id;
        let mut ids = match state {
            JobState::Leased => return self.leased_in(queue, max),
            JobState::Ready => {
                let (from, to) = (first_position(of, 0), first_position(of + 1, 0));
                self.ids(READY_IDS, params![from, to, max as i64])?
            }
            state => self.ids(ASIDE_IDS, params![of, state_code(state), max as i64])?,
        };
        if state == JobState::Ready {
            let left = (max - ids.len()) as i64;
            ids.extend(self.ids(PARKED_IDS, params![of, left])?);
        }
        Ok(ids)
    }

    fn ids(&mut self, sql: &'static str, params: &[&dyn rusqlite::ToSql]) -> Done<Vec<Selected>> {
        let mut select = self.sql(sql)?;
        let ids = select.query_map(params, |row| Ok((JobId::from_bytes(row.get(0)?), None)))?;
        Ok(ids.collect::<Result<_, _>>()?)
    }

    fn leased_in(&mut self, queue: usize, max: usize) -> Done<Vec<Selected>> {
        let of = self.queues[queue].id;
        let mut found = Vec::new();
        for grant in self.grants_where(GRANTS_OF_QUEUE, params![of])? {
            self.open(grant, false)?;
            let Some(held) = self.held(grant)? else {
                continue;
            };
            let leases = held.living().filter_map(|at| {
                let id = JobId::from_bytes(held.head(at)?.id);
                Some((id, Some(Location::Leased { grant, at })))
            });
            found.extend(leases.take(max - found.len()));
            if found.len() == max {
                break;
            }
        }
        Ok(found)
    }

    fn grants_where(
        &mut self,
        sql: &'static str,
        params: &[&dyn rusqlite::ToSql],
    ) -> Done<Vec<FencingToken>> {
        self.save_grants()?;
        let ids: Vec<i64> = self
            .sql(sql)?
            .query_map(params, |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        let mut grants = Vec::with_capacity(ids.len());
        for id in ids {
            let id = FencingToken::new(id as u64);
            if self.held(id)?.is_some() {
                grants.push(id);
            }
        }
        Ok(grants)
    }

    /// Does something with each selected job; false leaves it alone.
    fn each(
        &mut self,
        jobs: &Select,
        mut act: impl FnMut(&mut Self, Location) -> Done<bool>,
    ) -> Done<Controlled> {
        let mut answer = Controlled::default();
        for (id, known) in self.selected(jobs)? {
            // A job that waits may have been moved by the one before it.
            let location = match known {
                Some(location @ Location::Leased { .. }) => Some(location),
                _ => self.find(id)?,
            };
            let done = match location {
                Some(location) => act(self, location)?,
                None => false,
            };
            answer.done += u64::from(done);
            answer.skipped += u64::from(!done);
        }
        Ok(answer)
    }

    fn cancel(&mut self, location: Location, now: Timestamp) -> Done<bool> {
        match location {
            Location::Leased { grant, at } => {
                if self.held(grant)?.is_none_or(|held| held.cancel(at)) {
                    return Ok(false);
                }
                self.note(grant, at, |note: &mut Note| note.cancel = true)?;
                Ok(true)
            }
            location if is_settled(location) => Ok(false),
            location => {
                let Some((queue, job)) = self.take(location)? else {
                    return Ok(false);
                };
                if let Next::Settled { state, keep_until } =
                    ends::settled(&job, JobState::Cancelled, now)
                {
                    self.put_settled(queue, &job, state, keep_until, now)?;
                }
                Ok(true)
            }
        }
    }

    fn purge(&mut self, location: Location) -> Done<bool> {
        if matches!(location, Location::Leased { .. }) {
            return Ok(false);
        }
        let Some((queue, job)) = self.take(location)? else {
            return Ok(false);
        };
        self.free_unique(queue, &job)?;
        self.free_exclusive(queue, &job)?;
        self.at(queue).ledger.purged += 1;
        Ok(true)
    }

    fn reschedule(&mut self, location: Location, now: Timestamp, run_at: Timestamp) -> Done<bool> {
        if is_settled(location) || matches!(location, Location::Leased { .. }) {
            return Ok(false);
        }
        let Some((queue, mut job)) = self.take(location)? else {
            return Ok(false);
        };
        self.free_exclusive(queue, &job)?;
        job.run_at = run_at;
        if run_at <= now {
            self.join(queue, &job)?;
        } else {
            self.put_scheduled(queue, &job)?;
        }
        Ok(true)
    }

    fn retry_dead(&mut self, jobs: &Select, now: Timestamp) -> Done<Controlled> {
        let mut answer = Controlled::default();
        let dead = state_code(JobState::Dead);
        for (id, known) in self.selected(jobs)? {
            let location = match known {
                Some(location) => Some(location),
                None => self.find(id)?,
            };
            let Some(location @ Location::Aside { queue, state, .. }) = location else {
                answer.skipped += 1;
                continue;
            };
            if state != dead {
                answer.skipped += 1;
                continue;
            }
            let Some(job) = self.read(location)? else {
                continue;
            };
            if let Some(holder) = self.take_unique(queue, &job, now)? {
                answer.duplicates.push((id, holder));
                continue;
            }
            if let Some((queue, mut job)) = self.take(location)? {
                ends::revive(&mut job, now);
                self.join(queue, &job)?;
                answer.done += 1;
            }
        }
        Ok(answer)
    }

    fn revoke(
        &mut self,
        leases: &LeaseSelect,
        reason: &str,
        now: Timestamp,
        tokens: &mut Vec<FencingToken>,
    ) -> Done<Controlled> {
        let namespace = self.namespace;
        let grants = match leases {
            LeaseSelect::Job(id) => {
                let Some(Location::Leased { grant, at }) = self.find_leased(*id)? else {
                    return Ok(Controlled::default());
                };
                vec![(grant, Some(at))]
            }
            LeaseSelect::Owner(owner) => {
                all(self.grants_where(GRANTS_BY_OWNER, params![namespace, owner])?)
            }
            LeaseSelect::Task(task) => {
                all(self.grants_where(GRANTS_BY_TASK, params![namespace, task])?)
            }
        };
        let mut done = 0;
        for (grant, only) in grants {
            let Some(held) = self.held(grant)? else {
                continue;
            };
            let queue = held.queue;
            let places: Vec<usize> = match only {
                Some(at) => vec![at],
                None => held.living().collect(),
            };
            for at in places {
                let Some((facts, job)) = self.leased(grant, at)? else {
                    continue;
                };
                debug_assert_eq!(offset(grant, facts.token), Some(at));
                done += 1;
                if tokens.len() < AUDIT_TOKENS {
                    tokens.push(facts.token);
                }
                let end = ends::revoke(&job, reason, facts.cancel, now);
                self.end(queue, grant, &facts, job, end, now)?;
            }
        }
        Ok(Controlled {
            done,
            ..Controlled::default()
        })
    }
}

fn all(grants: Vec<FencingToken>) -> Vec<(FencingToken, Option<usize>)> {
    grants.into_iter().map(|grant| (grant, None)).collect()
}

fn one() -> Controlled {
    Controlled {
        done: 1,
        ..Controlled::default()
    }
}

fn is_settled(location: Location) -> bool {
    matches!(location, Location::Aside { state, .. } if state >= state_code(JobState::Completed))
}
