//! Enqueuing: store jobs, in one call with those that others enqueue at the same time.
//!
//! Before: [`Client`](crate::Client). After: the [claimer](crate::worker) of some worker claims
//! them.

use std::sync::Arc;

use tracing::{Instrument as _, debug_span, info_span};

use super::merge::{MergedCall, Merger};
use super::session::Session;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::job::{JobId, Kind, NewJob, QueueName};
use crate::observe::{Event, Observers, metrics, trace};
use crate::store::{EnqueueRequest, Enqueued, RequestId, Store, weighed};

/// Enqueues for one process.
#[derive(Clone)]
pub(crate) struct Enqueuer {
    merger: Arc<Merger<EnqueueJobs>>,
}

impl Enqueuer {
    pub(crate) fn new(session: Arc<Session>, observers: Observers) -> Self {
        Self {
            merger: Merger::new(EnqueueJobs { observers }, session),
        }
    }

    /// Stores the jobs of one caller, in one call.
    pub(crate) async fn enqueue(&self, mut jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        let span = info_span!("enqueue", otel.kind = "producer", jobs = jobs.len());
        span.in_scope(|| trace::inject(&mut jobs));
        // The store checks the whole call again. This check is for the neighbours: a job that the
        // store would refuse must not take theirs with it.
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

/// The call that enqueues jobs.
struct EnqueueJobs {
    observers: Observers,
}

impl MergedCall for EnqueueJobs {
    type Item = NewJob;
    type Sent = (JobId, NewJob);
    type Answer = Enqueued;

    const VERB: Verb = Verb::Enqueue;
    /// With 2 instead of 4, eight callers of 100 jobs each reached two thirds of the throughput on
    /// Redis. So jobs of callers that do not wait for each other have no order.
    const LANES: usize = 4;
    /// Nothing would tell the second copy of a job from the first.
    const SAFE_AGAIN: bool = false;

    fn add(jobs: Vec<NewJob>, call: &mut Vec<Self::Sent>) {
        call.extend(JobId::generate_some(jobs.len()).zip(jobs));
    }

    async fn send(
        &self,
        store: Arc<dyn Store>,
        request: RequestId,
        jobs: Arc<Vec<Self::Sent>>,
    ) -> Result<Vec<Enqueued>> {
        let span = debug_span!("store.enqueue", jobs = jobs.len());
        let request = EnqueueRequest {
            request,
            jobs: Arc::clone(&jobs),
        };
        let enqueued = store.enqueue(request).instrument(span).await?;
        count(&jobs, &enqueued);
        self.observers.emit(|| Event::Enqueued {
            jobs: &jobs,
            enqueued: &enqueued,
        });
        Ok(enqueued)
    }
}

/// For a store that answers for fewer jobs than it was given.
pub(crate) fn no_answer() -> Error {
    Error::new(ErrorKind::Unexpected, "the store's answer left out the job").during(Verb::Enqueue)
}

/// Counts jobs by queue and kind; neighbours that are alike are counted together.
fn count(jobs: &[(JobId, NewJob)], enqueued: &[Enqueued]) {
    fn row<'a>((job, answer): (&'a (JobId, NewJob), &Enqueued)) -> (&'a QueueName, &'a Kind, bool) {
        let is_there = matches!(answer, Enqueued::Duplicate(_));
        (&job.1.queue, &job.1.kind, is_there)
    }
    let mut rows = jobs.iter().zip(enqueued).map(row);
    let Some(mut alike) = rows.next() else { return };
    let mut length = 1;
    for next in rows {
        if next == alike {
            length += 1;
        } else {
            metrics::enqueued(alike.0, alike.1, alike.2, length);
            (alike, length) = (next, 1);
        }
    }
    metrics::enqueued(alike.0, alike.1, alike.2, length);
}
