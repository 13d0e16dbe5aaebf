//! Enqueuing: store jobs, merged with those of others.
//!
//! After: [`claim`](super::claim) takes the job.

use std::sync::Arc;

use super::lane::Session;
use super::merge::Merger;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::{JobId, NewJob, at_most, limits};
use crate::observe::{Event, Observers, metrics};
use crate::store::{EnqueueRequest, Enqueued};

/// Enqueues for one process.
#[derive(Clone)]
pub(crate) struct Enqueuer {
    merger: Arc<Merger<(JobId, NewJob), Enqueued>>,
}

impl Enqueuer {
    pub(crate) fn new(session: Arc<Session>, observers: Observers) -> Self {
        // An enqueue whose answer is lost with its session must not go again: nothing would tell
        // the second job from the first.
        let safe_again = false;
        let merger = Merger::new(
            Verb::Enqueue,
            session,
            safe_again,
            move |store, request, jobs| {
                let observers = observers.clone();
                Box::pin(async move {
                    let request = EnqueueRequest {
                        request,
                        jobs: jobs.to_vec(),
                    };
                    let enqueued = store.enqueue(request).await?;
                    count(&jobs, &enqueued);
                    observers.emit(|| Event::Enqueued {
                        jobs: &jobs,
                        enqueued: &enqueued,
                    });
                    Ok(enqueued)
                })
            },
        );
        Self { merger }
    }

    /// Stores the jobs of one caller, together.
    pub(crate) async fn enqueue(&self, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        let (jobs, weight) = named(jobs)?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        self.merger.submit(jobs, weight).await
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        self.merger.session()
    }
}

/// Checks the jobs of one call, and gives them their ids. Also returns what they weigh.
pub(crate) fn named(jobs: Vec<NewJob>) -> Result<(Vec<(JobId, NewJob)>, usize)> {
    let mut weight = 0;
    for job in &jobs {
        job.validate().map_err(|e| e.during(Verb::Enqueue))?;
        weight += job.weight();
    }
    at_most("jobs", jobs.len(), limits::CALL_ITEMS, "jobs in a call")
        .and_then(|()| at_most("jobs", weight, limits::CALL_BYTES, "bytes in a call"))
        .map_err(|e| e.during(Verb::Enqueue))?;
    let named = jobs.into_iter().map(|job| (JobId::generate(), job));
    Ok((named.collect(), weight))
}

/// A store that answers for fewer jobs than it was given.
pub(crate) fn no_answer() -> Error {
    Error::new(ErrorKind::Unexpected, "the store answered for no job").during(Verb::Enqueue)
}

/// Counts jobs by queue and kind, each run of equal ones at once.
fn count(jobs: &[(JobId, NewJob)], enqueued: &[Enqueued]) {
    let row = |((_, job), answer): (&(JobId, NewJob), &Enqueued)| {
        (
            job.queue.clone(),
            job.kind.clone(),
            matches!(answer, Enqueued::Duplicate(_)),
        )
    };
    let mut rows = jobs.iter().zip(enqueued).map(row);
    let Some(mut run) = rows.next() else { return };
    let mut length = 1;
    for next in rows {
        if next == run {
            length += 1;
        } else {
            metrics::enqueued(&run.0, &run.1, run.2, length);
            (run, length) = (next, 1);
        }
    }
    metrics::enqueued(&run.0, &run.1, run.2, length);
}
