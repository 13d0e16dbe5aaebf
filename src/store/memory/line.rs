//! One line of ready jobs: in at either end, out at the front, or from anywhere by place.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::job::JobRecord;

/// Jobs by place. A job taken out of the middle leaves a gap; the ends are never gaps.
#[derive(Default)]
pub(super) struct Line {
    /// The place of the first job.
    first: i64,
    jobs: VecDeque<Option<Arc<JobRecord>>>,
}

impl Line {
    /// Puts a job behind the others, and tells its place.
    pub(super) fn push_back(&mut self, job: Arc<JobRecord>) -> i64 {
        self.jobs.push_back(Some(job));
        self.first + self.jobs.len() as i64 - 1
    }

    /// Puts a job ahead of the others, and tells its place.
    pub(super) fn push_front(&mut self, job: Arc<JobRecord>) -> i64 {
        self.jobs.push_front(Some(job));
        self.first -= 1;
        self.first
    }

    pub(super) fn pop_first(&mut self) -> Option<Arc<JobRecord>> {
        let job = self.jobs.pop_front()?;
        self.first += 1;
        self.trim();
        job
    }

    pub(super) fn first(&self) -> Option<&Arc<JobRecord>> {
        self.jobs.front()?.as_ref()
    }

    pub(super) fn get(&self, place: i64) -> Option<&Arc<JobRecord>> {
        self.jobs.get(self.index(place)?)?.as_ref()
    }

    pub(super) fn remove(&mut self, place: i64) -> Option<Arc<JobRecord>> {
        let index = self.index(place)?;
        let job = self.jobs.get_mut(index)?.take();
        self.trim();
        job
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<JobRecord>> {
        self.jobs.iter().flatten()
    }

    fn index(&self, place: i64) -> Option<usize> {
        usize::try_from(place - self.first).ok()
    }

    fn trim(&mut self) {
        while let Some(None) = self.jobs.front() {
            self.jobs.pop_front();
            self.first += 1;
        }
        while let Some(None) = self.jobs.back() {
            self.jobs.pop_back();
        }
    }
}
