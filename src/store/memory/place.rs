//! Where jobs are put, and how they are found and taken out again.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::line::Line;
use super::{Kept, KeyLine, LeaseState, Place, State};
use crate::clock::Timestamp;
use crate::inspect::Counts;
use crate::job::{JobId, JobRecord, JobState};
use crate::lease::FencingToken;

impl State {
    /// A job falls due: it goes to the back of its line, or behind the others of its exclusive key.
    pub(super) fn join(&mut self, queue: usize, job: Arc<JobRecord>) {
        if let Some(key) = &job.exclusive {
            let seq = self.next_seq();
            let lines = &mut self.queues[queue].exclusive;
            let line = lines.entry(key.clone()).or_insert_with(|| KeyLine {
                head: job.id,
                parked: BTreeMap::new(),
            });
            if line.head != job.id {
                self.places.insert(
                    job.id,
                    Place::Parked {
                        queue,
                        key: key.clone(),
                        seq,
                    },
                );
                line.parked.insert(seq, job);
                self.queues[queue].counts.ready += 1;
                self.queues[queue].counts.parked += 1;
                return;
            }
        }
        self.put_back(queue, job);
    }

    pub(super) fn put_back(&mut self, queue: usize, job: Arc<JobRecord>) {
        self.put(queue, job, Line::push_back);
    }

    /// Puts jobs ahead of everything in their lines, in token order.
    pub(super) fn put_front(
        &mut self,
        queue: usize,
        mut jobs: Vec<(FencingToken, Arc<JobRecord>)>,
    ) {
        jobs.sort_by_key(|(token, _)| *token);
        for (_, job) in jobs.into_iter().rev() {
            self.put(queue, job, Line::push_front);
        }
    }

    fn put(
        &mut self,
        queue: usize,
        job: Arc<JobRecord>,
        push: fn(&mut Line, Arc<JobRecord>) -> i64,
    ) {
        let (id, line) = (job.id, line_of(&job));
        let at = &mut self.queues[queue];
        let place = push(&mut at.lines[line], job);
        self.places.insert(id, Place::Line { queue, line, place });
        at.counts.ready += 1;
        let suspect = is_suspects(line);
        match self.bells.last_mut() {
            Some((name, same, jobs)) if *name == at.name && *same == suspect => *jobs += 1,
            _ => self.bells.push((at.name.clone(), suspect, 1)),
        }
    }

    pub(super) fn put_scheduled(&mut self, queue: usize, job: Arc<JobRecord>) {
        let seq = self.next_seq();
        let at = job.run_at;
        self.places
            .insert(job.id, Place::Scheduled { queue, at, seq });
        let line = &mut self.queues[queue];
        if line
            .scheduled
            .first_key_value()
            .is_none_or(|((first, _), _)| at < *first)
        {
            self.bells.push((line.name.clone(), false, 1));
        }
        line.scheduled.insert((at, seq), job);
        line.counts.scheduled += 1;
    }

    /// A job's life is over: its keys are free, and the next of its exclusive key is ready.
    pub(super) fn put_settled(
        &mut self,
        queue: usize,
        job: Arc<JobRecord>,
        state: JobState,
        keep_until: Option<Timestamp>,
        now: Timestamp,
    ) {
        self.free_unique(queue, &job);
        self.free_exclusive(queue, &job);
        let Some(keep_until) = keep_until else {
            self.places.remove(&job.id);
            self.gone.push(job);
            return;
        };
        let seq = self.next_seq();
        self.places.insert(
            job.id,
            Place::Settled {
                queue,
                state,
                at: now,
                seq,
            },
        );
        let at = &mut self.queues[queue];
        *count_of(&mut at.counts, state) += 1;
        at.settled
            .insert((state, now, seq), Kept { job, keep_until });
    }

    pub(super) fn free_unique(&mut self, queue: usize, job: &JobRecord) {
        let Some(unique) = &job.unique else { return };
        let held = &mut self.queues[queue].unique;
        if held
            .get(&unique.key)
            .is_some_and(|(id, until)| *id == job.id && until.is_none())
        {
            held.remove(&unique.key);
        }
    }

    /// If the job is the head of its exclusive key, the next one takes its place.
    pub(super) fn free_exclusive(&mut self, queue: usize, job: &JobRecord) {
        let Some(key) = &job.exclusive else { return };
        let at = &mut self.queues[queue];
        let Some(line) = at.exclusive.get_mut(key).filter(|line| line.head == job.id) else {
            return;
        };
        match line.parked.pop_first() {
            Some((_, next)) => {
                line.head = next.id;
                at.counts.ready -= 1;
                at.counts.parked -= 1;
                self.put_back(queue, next);
            }
            None => {
                at.exclusive.remove(key);
            }
        }
    }

    /// Where a job is. A claim leaves the place of a job in its line as it was: what is no longer
    /// there is leased.
    pub(super) fn place(&self, id: JobId) -> Option<Place> {
        let place = self.places.get(&id)?.clone();
        if let Place::Line { queue, line, place } = place {
            let there = self.queues[queue].lines[line].get(place);
            if there.is_none_or(|job| job.id != id) {
                return self.leased(id);
            }
        }
        Some(place)
    }

    fn leased(&self, id: JobId) -> Option<Place> {
        self.grants.iter().find_map(|(&grant, held)| {
            let is_it = |lease: &Option<LeaseState>| lease.as_ref().is_some_and(|l| l.job.id == id);
            let at = held.leases.iter().position(is_it)?;
            let token = grant.plus(at as u64);
            Some(Place::Leased { grant, token })
        })
    }

    /// Takes a pending or settled job out of where it is. Its keys stay as they are.
    pub(super) fn take(&mut self, id: JobId) -> Option<(usize, JobState, Arc<JobRecord>)> {
        let place = self.place(id)?;
        let (queue, state, job) = match place {
            Place::Line { queue, line, place } => {
                let at = &mut self.queues[queue];
                at.counts.ready -= 1;
                (queue, JobState::Ready, at.lines[line].remove(place)?)
            }
            Place::Parked { queue, key, seq } => {
                let at = &mut self.queues[queue];
                at.counts.ready -= 1;
                at.counts.parked -= 1;
                (
                    queue,
                    JobState::Ready,
                    at.exclusive.get_mut(&key)?.parked.remove(&seq)?,
                )
            }
            Place::Scheduled { queue, at, seq } => {
                let line = &mut self.queues[queue];
                line.counts.scheduled -= 1;
                (
                    queue,
                    JobState::Scheduled,
                    line.scheduled.remove(&(at, seq))?,
                )
            }
            Place::Settled {
                queue,
                state,
                at,
                seq,
            } => {
                let line = &mut self.queues[queue];
                *count_of(&mut line.counts, state) -= 1;
                (queue, state, line.settled.remove(&(state, at, seq))?.job)
            }
            Place::Leased { .. } => return None,
        };
        self.places.remove(&id);
        Some((queue, state, job))
    }
}

pub(super) fn is_suspects(line: usize) -> bool {
    line.is_multiple_of(2)
}

/// The line of a ready job: suspects wait in a line of their own, ahead of the others of their
/// priority.
fn line_of(job: &JobRecord) -> usize {
    usize::from(job.options.priority) * 2 + usize::from(!job.is_suspect())
}

pub(super) fn count_of(counts: &mut Counts, state: JobState) -> &mut u64 {
    match state {
        JobState::Scheduled => &mut counts.scheduled,
        JobState::Ready => &mut counts.ready,
        JobState::Leased => &mut counts.leased,
        JobState::Completed => &mut counts.completed,
        JobState::Dead => &mut counts.dead,
        JobState::Cancelled => &mut counts.cancelled,
    }
}
