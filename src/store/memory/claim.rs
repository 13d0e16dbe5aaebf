//! claim: expire what is overdue, promote what is due, grant.

use std::sync::Arc;
use std::time::Duration;

use super::place::{Location, Stored};
use super::{GrantState, LeaseState, State};
use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::lease::{FencingToken, Grant, Lease};
use crate::limits;
use crate::rules::order::{GrantSpan, TIERS, deadline, earliest, grant_spans, is_suspects};
use crate::store::{ClaimRequest, Claimed, Expiry};

/// What is needed to answer a claim again.
#[derive(Clone)]
pub(super) struct FirstClaim {
    grants: Vec<(FencingToken, Duration)>,
    expired: Vec<Expiry>,
}

impl FirstClaim {
    pub(super) fn of(claimed: &Claimed) -> Self {
        Self {
            grants: claimed.grants.iter().map(|g| (g.id, g.granted)).collect(),
            expired: claimed.expired.clone(),
        }
    }
}

impl State {
    pub(super) fn claim(&mut self, request: &ClaimRequest, now: Timestamp) -> Claimed {
        let mut claimed = Claimed {
            clock_behind: self.issuer.clock_behind(now),
            ..Claimed::default()
        };
        let mut left = request.max;
        let mut suspect = request.admit_suspect;
        let mut bytes = 0;
        for wanted in &request.queues {
            if left == 0 {
                break;
            }
            let Some(&queue) = self.names.get(&wanted.queue) else {
                continue;
            };
            let expired = self.expire_overdue(queue, limits::STEP_JOBS, now);
            claimed.expired.extend(expired);
            self.promote(queue, now);
            let jobs = self.pick(queue, left, &mut suspect, &mut bytes);
            left -= jobs.len();
            let terms = (wanted.term, wanted.max_lifetime);
            let spans = grant_spans(jobs.iter().map(|job| &**job), terms);
            let mut jobs = jobs.into_iter();
            for span in spans {
                let jobs = jobs.by_ref().take(span.jobs.len());
                claimed
                    .grants
                    .push(self.grant(queue, jobs, &span, request, now));
            }
            self.hints(queue, now, &mut claimed);
        }
        claimed
    }

    /// Answers a repeated claim: what is left of its grants, with the time originally granted.
    pub(super) fn claim_again(
        &self,
        first: FirstClaim,
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Claimed {
        let mut claimed = Claimed {
            expired: first.expired,
            clock_behind: self.issuer.clock_behind(now),
            ..Claimed::default()
        };
        for (id, granted) in first.grants {
            let Some(held) = self.grants.get(&id).filter(|held| held.deadline > now) else {
                continue;
            };
            let leases = held.live_leases(id).filter_map(|(token, lease)| {
                let job = Arc::clone(&self.jobs.get(&lease.job)?.job);
                Some(Lease { token, job })
            });
            claimed.grants.push(Grant {
                queue: self.queues[held.queue].name.clone(),
                partition: 0,
                id,
                nonce: held.nonce,
                granted_at: held.granted_at,
                term: held.term,
                granted,
                leases: leases.collect(),
            });
        }
        for wanted in &request.queues {
            if let Some(&queue) = self.names.get(&wanted.queue) {
                self.hints(queue, now, &mut claimed);
            }
        }
        claimed
    }

    /// Scheduled jobs whose time has come fall due, the earliest first.
    fn promote(&mut self, queue: usize, now: Timestamp) {
        for _ in 0..limits::STEP_JOBS {
            let first = self.queues[queue].scheduled.first_key_value();
            let due = first.filter(|((run_at, _), _)| *run_at <= now);
            let Some(Stored { job, .. }) = due.map(|(_, id)| *id).and_then(|id| self.take(id))
            else {
                break;
            };
            self.join(queue, job);
        }
    }

    /// Takes up to `max` ready jobs by (priority, position), at most one of them a suspect.
    fn pick(
        &mut self,
        queue: usize,
        max: usize,
        suspect: &mut bool,
        bytes: &mut usize,
    ) -> Vec<Arc<JobRecord>> {
        let mut jobs = Vec::new();
        if self.queues[queue].paused {
            return jobs;
        }
        for tier in 0..TIERS {
            let suspects = is_suspects(tier);
            while jobs.len() < max && *bytes < limits::CALL_BYTES && (!suspects || *suspect) {
                let Some((_, job)) = self.queues[queue].ready[tier].pop_first() else {
                    break;
                };
                *suspect &= !suspects;
                *bytes += job.weight();
                jobs.push(job);
            }
        }
        jobs
    }

    fn grant(
        &mut self,
        queue: usize,
        jobs: impl Iterator<Item = Arc<JobRecord>>,
        span: &GrantSpan,
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Grant {
        let id = self.issuer.issue(span.jobs.len() as u64, now);
        let deadline = deadline(now, span.term, now, span.max_lifetime);
        let tokens = (0..).map(|at| id.plus(at));
        let leases: Vec<Lease> = tokens
            .zip(jobs)
            .map(|(token, job)| Lease { token, job })
            .collect();
        for Lease { token, job } in &leases {
            if let Some(stored) = self.jobs.get_mut(&job.id) {
                let (grant, token) = (id, *token);
                stored.location = Location::Leased { grant, token };
            }
        }
        let at = &mut self.queues[queue];
        at.ledger.granted += leases.len() as u64;
        at.ledger.live += leases.len() as u64;
        at.deadlines.insert((deadline, id));
        let live = leases.iter().map(|Lease { job, .. }| LeaseState {
            job: job.id,
            cancel: false,
            progress: None,
        });
        let grant = GrantState {
            queue,
            nonce: request.nonce,
            owner: Arc::clone(&request.owner),
            task: Arc::clone(&request.task),
            granted_at: now,
            deadline,
            term: span.term,
            max_lifetime: span.max_lifetime,
            renewals: 0,
            live: leases.len(),
            leases: live.map(Some).collect(),
        };
        self.grants.insert(id, grant);
        Grant {
            queue: at.name.clone(),
            partition: 0,
            id,
            nonce: request.nonce,
            granted_at: now,
            term: span.term,
            granted: deadline.since(now),
            leases,
        }
    }

    /// When this queue is worth a claim again.
    fn hints(&self, queue: usize, now: Timestamp, claimed: &mut Claimed) {
        let at = &self.queues[queue];
        let due = at.scheduled.first_key_value();
        let due = due.map(|((due, _), _)| due.since(now));
        let deadline = at.deadlines.first();
        let deadline = deadline.map(|(deadline, _)| deadline.since(now));
        claimed.next_due = earliest(claimed.next_due, due);
        claimed.next_deadline = earliest(claimed.next_deadline, deadline);
    }
}
