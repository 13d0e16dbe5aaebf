//! inspect: look, and change nothing.
//!
//! A page's cursor is the number of rows before it: plain, and good enough for a model.

use std::sync::Arc;

use super::line::Line;
use super::{GrantState, LeaseState, Place, Queue, State, offset};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::inspect::{
    JobView, LeaseFilter, LeaseView, Page, Paged, ParkedView, Query, QueueView, View,
};
use crate::job::{JobId, JobState, QueueName};
use crate::lease::FencingToken;
use crate::limits;
use crate::store::bounded;

impl State {
    pub(super) fn inspect(&self, query: &Query, now: Timestamp) -> Result<View> {
        Ok(match query {
            Query::Queues => View::Queues(
                self.names
                    .values()
                    .map(|&queue| queue_view(&self.queues[queue], now))
                    .collect(),
            ),
            Query::Leases { filter, page } => View::Leases(self.leases(filter, page, now)?),
            Query::Jobs { queue, state, page } => {
                let views = self
                    .ids(queue, *state)
                    .filter_map(|id| self.job_view(id, now));
                View::Jobs(paged(views, page)?)
            }
            Query::Parked { queue, page } => {
                let queue = self.names.get(queue).map(|&at| &self.queues[at]);
                let keys = queue.iter().flat_map(|queue| &queue.exclusive);
                let parked = keys.filter(|(_, line)| !line.parked.is_empty());
                let views = parked.map(|(key, line)| ParkedView {
                    key: key.clone(),
                    jobs: (line.parked.len() as u64).min(ParkedView::MOST),
                });
                View::Parked(paged(views, page)?)
            }
            Query::Job(id) => View::Job(self.job_view(*id, now).map(Box::new)),
            Query::Audit { page } => View::Audit(paged(self.audit.iter().rev().cloned(), page)?),
        })
    }

    /// The jobs of a queue in a state, in order.
    pub(super) fn ids(
        &self,
        queue: &QueueName,
        state: JobState,
    ) -> Box<dyn Iterator<Item = JobId> + '_> {
        let Some(&index) = self.names.get(queue) else {
            return Box::new(std::iter::empty());
        };
        let queue = &self.queues[index];
        match state {
            JobState::Ready => {
                let lines = queue.lines.iter().flat_map(Line::iter);
                let parked = queue
                    .exclusive
                    .values()
                    .flat_map(|line| line.parked.values());
                Box::new(lines.chain(parked).map(|job| job.id))
            }
            JobState::Scheduled => Box::new(queue.scheduled.values().map(|job| job.id)),
            JobState::Leased => {
                let grants = self
                    .grants
                    .values()
                    .filter(move |grant| grant.queue == index);
                Box::new(
                    grants
                        .flat_map(|grant| grant.leases.iter().flatten())
                        .map(|lease| lease.job.id),
                )
            }
            JobState::Completed | JobState::Dead | JobState::Cancelled => {
                let settled = queue
                    .settled
                    .iter()
                    .filter(move |((of, ..), _)| *of == state);
                Box::new(settled.map(|(_, kept)| kept.job.id))
            }
        }
    }

    fn job_view(&self, id: JobId, now: Timestamp) -> Option<JobView> {
        let place = &self.place(id)?;
        let mut view = match place {
            Place::Line { queue, line, place } => {
                let job = self.queues[*queue].lines[*line].get(*place)?;
                pending(&self.queues[*queue], JobState::Ready, job)
            }
            Place::Parked { queue, key, seq } => {
                let job = self.queues[*queue].exclusive.get(key)?.parked.get(seq)?;
                pending(&self.queues[*queue], JobState::Ready, job)
            }
            Place::Scheduled { queue, at, seq } => {
                let job = self.queues[*queue].scheduled.get(&(*at, *seq))?;
                pending(&self.queues[*queue], JobState::Scheduled, job)
            }
            Place::Settled {
                queue,
                state,
                at,
                seq,
            } => {
                let kept = self.queues[*queue].settled.get(&(*state, *at, *seq))?;
                pending(&self.queues[*queue], *state, &kept.job)
            }
            Place::Leased { grant, token } => {
                let held = self.grants.get(grant)?;
                let lease = held.leases.get(offset(*grant, *token)?)?.as_ref()?;
                let mut view = pending(&self.queues[held.queue], JobState::Leased, &lease.job);
                view.lease = Some(self.lease_view(held, *token, lease, now));
                view
            }
        };
        view.parked = matches!(place, Place::Parked { .. });
        if let Place::Settled { at, .. } = place {
            view.settled_at = Some(*at);
        }
        Some(view)
    }

    fn leases(
        &self,
        filter: &LeaseFilter,
        page: &Page,
        now: Timestamp,
    ) -> Result<Paged<LeaseView>> {
        let mut rows = Vec::new();
        for (&id, grant) in &self.grants {
            let name = &self.queues[grant.queue].name;
            let wanted = filter.queue.as_ref().is_none_or(|queue| queue == name)
                && filter
                    .owner
                    .as_ref()
                    .is_none_or(|owner| *owner == grant.owner)
                && filter.task.as_ref().is_none_or(|task| *task == grant.task);
            for (lease, at) in grant.leases.iter().zip(0..) {
                if let Some(lease) = lease.as_ref().filter(|_| wanted) {
                    rows.push((grant.deadline, id.plus(at), grant, lease));
                }
            }
        }
        rows.sort_unstable_by_key(|(deadline, token, ..)| (*deadline, *token));
        let views = rows.into_iter().map(|(_, token, grant, lease)| {
            // Only those of the page are made.
            self.lease_view(grant, token, lease, now)
        });
        paged(views, page)
    }

    fn lease_view(
        &self,
        grant: &GrantState,
        token: FencingToken,
        lease: &LeaseState,
        now: Timestamp,
    ) -> LeaseView {
        LeaseView {
            queue: self.queues[grant.queue].name.clone(),
            job: lease.job.id,
            kind: lease.job.kind.clone(),
            token,
            owner: Arc::clone(&grant.owner),
            task: Arc::clone(&grant.task),
            attempt: lease.job.attempt(),
            granted_at: grant.granted_at,
            time_left: grant.deadline.since(now),
            term: grant.term,
            renewals: grant.renewals,
            cancel: lease.cancel,
            progress: lease.progress.as_deref().cloned(),
        }
    }
}

fn queue_view(queue: &Queue, now: Timestamp) -> QueueView {
    let heads = queue.lines.iter().filter_map(Line::first);
    QueueView {
        queue: queue.name.clone(),
        paused: queue.paused,
        relaxed: queue.relaxed,
        counts: queue.counts,
        ledger: queue.ledger,
        oldest_ready: heads.map(|job| now.since(job.run_at)).max(),
    }
}

fn pending(queue: &Queue, state: JobState, job: &Arc<crate::job::JobRecord>) -> JobView {
    JobView {
        queue: queue.name.clone(),
        state,
        parked: false,
        job: Arc::clone(job),
        lease: None,
        settled_at: None,
    }
}

fn paged<T>(rows: impl Iterator<Item = T>, page: &Page) -> Result<Paged<T>> {
    bounded("rows", page.rows, limits::PAGE_ROWS)?;
    let start = match &page.after {
        None => 0,
        Some(cursor) => cursor.parse::<usize>().map_err(|_| {
            Error::invalid(
                "page",
                format!("{} bytes of text", cursor.len()),
                "a cursor of this store",
            )
        })?,
    };
    let mut rows: Vec<T> = rows.skip(start).take(page.rows + 1).collect();
    let next = (rows.len() > page.rows).then(|| (start + page.rows).to_string());
    rows.truncate(page.rows);
    Ok(Paged { rows, next })
}
