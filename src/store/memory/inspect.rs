//! inspect: look, and change nothing.
//!
//! A page's cursor is the number of rows before it: plain, and good enough for a model.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::place::{Location, Queue, Stored};
use super::{GrantState, LeaseState, State};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::inspect::{
    JobView, LeaseFilter, LeaseView, Page, Paged, ParkedView, Query, QueueView, View,
};
use crate::job::{JobId, JobState, Key, QueueName};
use crate::lease::FencingToken;
use crate::limits;
use crate::store::bounded;

impl State {
    pub(super) fn inspect(&self, query: &Query, now: Timestamp) -> Result<View> {
        Ok(match query {
            Query::Queues => View::Queues(
                self.names
                    .values()
                    .map(|&queue| self.queue_view(&self.queues[queue], now))
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
                let mut keys = BTreeMap::<&Key, u64>::new();
                for (key, _) in queue.iter().flat_map(|queue| queue.parked.keys()) {
                    *keys.entry(key).or_default() += 1;
                }
                let views = keys.into_iter().map(|(key, jobs)| ParkedView {
                    key: key.clone(),
                    jobs: jobs.min(ParkedView::MOST),
                });
                View::Parked(paged(views, page)?)
            }
            Query::Job(id) => View::Job(self.job_view(*id, now).map(Box::new)),
            Query::Audit { page } => View::Audit(paged(self.audit.iter().rev().cloned(), page)?),
        })
    }

    fn queue_view(&self, queue: &Queue, now: Timestamp) -> QueueView {
        let first = queue.ready.iter().filter_map(BTreeMap::first_key_value);
        QueueView {
            queue: queue.name.clone(),
            paused: queue.paused,
            relaxed: queue.relaxed,
            counts: queue.counts(),
            ledger: queue.ledger,
            oldest_ready: first.map(|(_, job)| now.since(job.run_at)).max(),
            clock_behind: self.issuer.clock_behind(now),
        }
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
                let tiers = queue.ready.iter().flat_map(BTreeMap::values);
                let parked = queue.parked.values().copied();
                Box::new(tiers.map(|job| job.id).chain(parked))
            }
            JobState::Scheduled => Box::new(queue.scheduled.values().copied()),
            JobState::Leased => {
                let grants = self.grants.values();
                let grants = grants.filter(move |grant| grant.queue == index);
                let leases = grants.flat_map(|grant| grant.leases.iter().flatten());
                Box::new(leases.map(|lease| lease.job))
            }
            JobState::Completed | JobState::Dead | JobState::Cancelled => {
                let settled = queue.settled.get(&state).into_iter();
                Box::new(settled.flat_map(BTreeMap::values).copied())
            }
        }
    }

    fn job_view(&self, id: JobId, now: Timestamp) -> Option<JobView> {
        let Stored {
            queue,
            job,
            location,
        } = self.jobs.get(&id)?;
        let name = self.queues[*queue].name.clone();
        let mut view = JobView::new(name, location.state(), Arc::clone(job));
        view.parked = matches!(location, Location::Parked(_));
        match location {
            Location::Leased { grant: id, token } => {
                let grant = self.grants.get(id)?;
                let lease = grant.lease(*id, *token)?;
                view.lease = self.lease_view(grant, *token, lease, now);
            }
            Location::Settled { at, .. } => view.settled_at = Some(*at),
            _ => {}
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
        for (id, grant) in &self.grants {
            let name = &self.queues[grant.queue].name;
            let wanted = filter.queue.as_ref().is_none_or(|queue| queue == name)
                && filter
                    .owner
                    .as_ref()
                    .is_none_or(|owner| *owner == grant.owner)
                && filter.task.as_ref().is_none_or(|task| *task == grant.task);
            if wanted {
                let leases = grant.live_leases(*id);
                rows.extend(leases.map(|(token, lease)| (grant.deadline, token, grant, lease)));
            }
        }
        rows.sort_unstable_by_key(|(deadline, token, ..)| (*deadline, *token));
        // Only those of the page are made.
        let views = rows
            .into_iter()
            .filter_map(|(_, token, grant, lease)| self.lease_view(grant, token, lease, now));
        paged(views, page)
    }

    fn lease_view(
        &self,
        grant: &GrantState,
        token: FencingToken,
        lease: &LeaseState,
        now: Timestamp,
    ) -> Option<LeaseView> {
        let job = &self.jobs.get(&lease.job)?.job;
        Some(LeaseView {
            queue: self.queues[grant.queue].name.clone(),
            job: job.id,
            kind: job.kind.clone(),
            token,
            owner: Arc::clone(&grant.owner),
            task: Arc::clone(&grant.task),
            attempt: job.attempt(),
            granted_at: grant.granted_at,
            time_left: grant.deadline.since(now),
            term: grant.term,
            renewals: grant.renewals,
            cancel: lease.cancel,
            progress: lease.progress.as_deref().cloned(),
        })
    }
}

pub(super) fn paged<T>(rows: impl Iterator<Item = T>, page: &Page) -> Result<Paged<T>> {
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
