//! claim: expire what is overdue, promote what is due, grant.

use std::sync::Arc;
use std::time::Duration;

use super::{FirstClaim, GrantState, LINES, LeaseState, State, is_suspects};
use crate::clock::Timestamp;
use crate::job::JobRecord;
use crate::lease::{Grant, Lease};
use crate::limits;
use crate::rules::order::deadline;
use crate::store::{ClaimQueue, ClaimRequest, Claimed};

impl State {
    pub(super) fn claim(&mut self, request: &ClaimRequest, now: Timestamp) -> Claimed {
        let mut claimed = Claimed::default();
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
            claimed
                .expired
                .extend(self.expire_overdue(queue, limits::STEP_JOBS, now));
            self.promote(queue, now);
            let jobs = self.pick(queue, left, &mut suspect, &mut bytes);
            left -= jobs.len();
            self.grant(queue, jobs, wanted, request, now, &mut claimed.grants);
            self.hints(queue, now, &mut claimed);
        }
        claimed
    }

    /// Answers a repeated claim: what is left of its grants, with the time originally granted.
    pub(super) fn claim_again(
        &self,
        first: &FirstClaim,
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Claimed {
        let mut claimed = Claimed {
            expired: first.expired.clone(),
            ..Claimed::default()
        };
        for &(id, granted) in &first.grants {
            let Some(held) = self.grants.get(&id).filter(|held| held.deadline > now) else {
                continue;
            };
            let leases = held.leases.iter().zip(0..).filter_map(|(lease, at)| {
                let job = Arc::clone(&lease.as_ref()?.job);
                Some(Lease {
                    token: id.plus(at),
                    job,
                })
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
            let at = &mut self.queues[queue];
            let Some(first) = at
                .scheduled
                .first_entry()
                .filter(|first| first.key().0 <= now)
            else {
                break;
            };
            let job = first.remove();
            at.counts.scheduled -= 1;
            self.join(queue, job);
        }
    }

    /// Takes up to `max` ready jobs by (priority, place), at most one of them a suspect.
    fn pick(
        &mut self,
        queue: usize,
        max: usize,
        suspect: &mut bool,
        bytes: &mut usize,
    ) -> Vec<Arc<JobRecord>> {
        let at = &mut self.queues[queue];
        let mut jobs = Vec::with_capacity(max);
        if at.paused {
            return jobs;
        }
        for line in 0..LINES {
            let suspects = is_suspects(line);
            while jobs.len() < max && *bytes < limits::CALL_BYTES && (!suspects || *suspect) {
                let Some(job) = at.lines[line].pop_first() else {
                    break;
                };
                *suspect &= !suspects;
                *bytes += job.weight();
                jobs.push(job);
            }
        }
        at.counts.ready -= jobs.len() as u64;
        jobs
    }

    /// Grants leases on the jobs: one grant for each run of jobs with the same terms.
    fn grant(
        &mut self,
        queue: usize,
        jobs: Vec<Arc<JobRecord>>,
        wanted: &ClaimQueue,
        request: &ClaimRequest,
        now: Timestamp,
        grants: &mut Vec<Grant>,
    ) {
        let mut run: Vec<Arc<JobRecord>> = Vec::new();
        let mut run_terms = (wanted.term, wanted.max_lifetime);
        let mut run_bytes = 0;
        for job in jobs {
            let terms = (
                job.options.term.unwrap_or(wanted.term),
                job.options.max_lifetime.unwrap_or(wanted.max_lifetime),
            );
            if terms != run_terms || run_bytes + job.weight() > limits::GRANT_BYTES {
                grants.extend(self.grant_run(queue, &mut run, run_terms, request, now));
                run_terms = terms;
                run_bytes = 0;
            }
            run_bytes += job.weight();
            run.push(job);
        }
        grants.extend(self.grant_run(queue, &mut run, run_terms, request, now));
    }

    fn grant_run(
        &mut self,
        queue: usize,
        jobs: &mut Vec<Arc<JobRecord>>,
        (term, max_lifetime): (Duration, Duration),
        request: &ClaimRequest,
        now: Timestamp,
    ) -> Option<Grant> {
        if jobs.is_empty() {
            return None;
        }
        let id = self.issuer.issue(jobs.len() as u64, now);
        let deadline = deadline(now, term, now, max_lifetime);
        let leases: Vec<Lease> = jobs
            .drain(..)
            .zip(0..)
            .map(|(job, at)| Lease {
                token: id.plus(at),
                job,
            })
            .collect();
        let at = &mut self.queues[queue];
        at.ledger.granted += leases.len() as u64;
        at.ledger.live += leases.len() as u64;
        at.counts.leased += leases.len() as u64;
        at.deadlines.insert((deadline, id));
        let held = leases
            .iter()
            .map(|Lease { job, .. }| LeaseState {
                job: Arc::clone(job),
                cancel: false,
                progress: None,
            })
            .map(Some);
        let grant = GrantState {
            queue,
            nonce: request.nonce,
            owner: Arc::clone(&request.owner),
            task: Arc::clone(&request.task),
            granted_at: now,
            deadline,
            term,
            max_lifetime,
            renewals: 0,
            leases: held.collect(),
            live: leases.len(),
        };
        self.grants.insert(id, grant);
        Some(Grant {
            queue: at.name.clone(),
            partition: 0,
            id,
            nonce: request.nonce,
            granted_at: now,
            term,
            granted: deadline.since(now),
            leases,
        })
    }

    /// When this queue is worth a claim again.
    fn hints(&self, queue: usize, now: Timestamp, claimed: &mut Claimed) {
        let at = &self.queues[queue];
        let due = at
            .scheduled
            .first_key_value()
            .map(|((due, _), _)| due.since(now));
        let deadline = at
            .deadlines
            .first()
            .map(|(deadline, _)| deadline.since(now));
        claimed.next_due = earliest(claimed.next_due, due);
        claimed.next_deadline = earliest(claimed.next_deadline, deadline);
    }
}

fn earliest(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}
