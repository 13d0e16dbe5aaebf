//! Enqueuing: store jobs, merged with those of others.
//!
//! After: [`claim`](crate::worker) takes the job.

use std::sync::Arc;

use tracing::{Instrument as _, debug_span, info_span};

use super::lane::Session;
use super::merge::{Item, Merger};
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::{JobId, Kind, NewJob, QueueName};
use crate::limits::{self, at_most};
use crate::observe::{Event, Observers, metrics, trace};
use crate::store::{EnqueueRequest, Enqueued};

/// Calls beside each other: some are packed or answered while others are stored. With two, eight callers of a
/// hundred jobs each had two thirds of the rate on Redis. Jobs of callers that do not wait for each other have
/// no order.
const LANES: usize = 4;

/// Enqueues for one process.
#[derive(Clone)]
pub(crate) struct Enqueuer {
    merger: Arc<Merger<NewJob, Enqueued>>,
}

impl Enqueuer {
    pub(crate) fn new(session: Arc<Session>, observers: Observers) -> Self {
        // An enqueue whose answer is lost with its session must not go again: nothing would tell
        // the second job from the first.
        let safe_again = false;
        let merger = Merger::new(
            Verb::Enqueue,
            session,
            LANES,
            safe_again,
            move |store, request, jobs| {
                let observers = observers.clone();
                Box::pin(async move {
                    let request = EnqueueRequest {
                        request,
                        jobs: Arc::clone(&jobs),
                    };
                    let span = debug_span!("store.enqueue", jobs = jobs.len());
                    let enqueued = store.enqueue(request).instrument(span).await?;
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
    pub(crate) async fn enqueue(&self, mut jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        let span = info_span!("enqueue", otel.kind = "producer", jobs = jobs.len());
        span.in_scope(|| trace::inject(&mut jobs));
        let weight = weighed(&jobs)?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        self.merger.submit(jobs, weight).instrument(span).await
    }

    /// Stores one job, if it could be described.
    pub(crate) async fn enqueue_one(&self, job: Result<NewJob>) -> Result<Enqueued> {
        let enqueued = self.enqueue(vec![job?]).await?;
        enqueued.first().copied().ok_or_else(no_answer)
    }

    /// Stores several jobs, if all could be described.
    pub(crate) async fn enqueue_many(&self, jobs: Result<Vec<NewJob>>) -> Result<Vec<Enqueued>> {
        self.enqueue(jobs?).await
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        self.merger.session()
    }
}

impl Item for NewJob {
    type Sent = (JobId, Self);

    fn join(jobs: Vec<Self>, call: &mut Vec<Self::Sent>) {
        call.extend(JobId::generate_some(jobs.len()).zip(jobs));
    }
}

/// Checks the jobs of one call, and gives them their ids.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn named(jobs: Vec<NewJob>) -> Result<Vec<(JobId, NewJob)>> {
    weighed(&jobs)?;
    let mut named = Vec::with_capacity(jobs.len());
    NewJob::join(jobs, &mut named);
    Ok(named)
}

/// Checks the jobs of one call, and returns what they weigh.
fn weighed(jobs: &[NewJob]) -> Result<usize> {
    let mut weight = 0;
    for job in jobs {
        job.validate().map_err(|e| e.during(Verb::Enqueue))?;
        weight += job.weight();
    }
    at_most("jobs", jobs.len(), limits::CALL_ITEMS, "jobs in a call")
        .and_then(|()| at_most("jobs", weight, limits::CALL_BYTES, "bytes in a call"))
        .map_err(|e| e.during(Verb::Enqueue))?;
    Ok(weight)
}

/// A store that answers for fewer jobs than it was given.
pub(crate) fn no_answer() -> Error {
    Error::new(ErrorKind::Unexpected, "the store answered for no job").during(Verb::Enqueue)
}

/// Counts jobs by queue and kind, each run of equal ones at once.
fn count(jobs: &[(JobId, NewJob)], enqueued: &[Enqueued]) {
    fn row<'a>((job, answer): (&'a (JobId, NewJob), &Enqueued)) -> (&'a QueueName, &'a Kind, bool) {
        let is_there = matches!(answer, Enqueued::Duplicate(_));
        (&job.1.queue, &job.1.kind, is_there)
    }
    let mut rows = jobs.iter().zip(enqueued).map(row);
    let Some(mut run) = rows.next() else { return };
    let mut length = 1;
    for next in rows {
        if next == run {
            length += 1;
        } else {
            metrics::enqueued(run.0, run.1, run.2, length);
            (run, length) = (next, 1);
        }
    }
    metrics::enqueued(run.0, run.1, run.2, length);
}
