//! enqueue: store jobs, all of a call together.

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::fault::{Done, corrupt};
use super::record::Json;
use super::tx::{Named, Tx, args, job_id, uuid};
use crate::clock::nanos;
use crate::job::{FIRST_VERSION, Headers, JobId, JobOptions, NewJob};
use crate::retry::RetryPolicy;
use crate::store::Enqueued;

/// Jobs as the function takes them. None: no job has any.
pub(super) struct NewJobs<'j> {
    pub(super) ids: Vec<Uuid>,
    pub(super) queues: Vec<&'j str>,
    pub(super) kinds: Vec<&'j str>,
    pub(super) payloads: Vec<&'j [u8]>,
    pub(super) delays: Option<Vec<Option<i64>>>,
    pub(super) unique_keys: Option<Vec<Option<&'j [u8]>>>,
    pub(super) exclusive_keys: Option<Vec<Option<&'j [u8]>>>,
    pub(super) options: Option<Vec<Option<Json<Options<'j>>>>>,
}

impl<'j> NewJobs<'j> {
    pub(super) fn of(jobs: &'j [(JobId, NewJob)]) -> Self {
        Self {
            ids: jobs.iter().map(|(id, _)| uuid(*id)).collect(),
            queues: jobs.iter().map(|(_, job)| job.queue.as_str()).collect(),
            kinds: jobs.iter().map(|(_, job)| job.kind.as_str()).collect(),
            payloads: jobs.iter().map(|(_, job)| &*job.payload).collect(),
            delays: any(jobs, |job| (!job.delay.is_zero()).then(|| nanos(job.delay))),
            unique_keys: any(jobs, |job| {
                Some(job.unique.as_ref()?.key.as_str().as_bytes())
            }),
            exclusive_keys: any(jobs, |job| {
                Some(job.exclusive.as_ref()?.as_str().as_bytes())
            }),
            options: any(jobs, |job| Options::of(job).map(Json)),
        }
    }
}

fn any<'j, T>(
    jobs: &'j [(JobId, NewJob)],
    of: impl Fn(&'j NewJob) -> Option<T>,
) -> Option<Vec<Option<T>>> {
    let all: Vec<Option<T>> = jobs.iter().map(|(_, job)| of(job)).collect();
    all.iter().any(Option::is_some).then_some(all)
}

/// What is unusual of a job. Durations are nanoseconds.
#[derive(Default, PartialEq, Debug, Serialize)]
pub(super) struct Options<'j> {
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_expiries: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    headers: Option<&'j Headers>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_window: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    term: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_lifetime: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retention: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stall_limit: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_failures: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry: Option<RetryPolicy>,
}

impl<'j> Options<'j> {
    fn of(job: &'j NewJob) -> Option<Self> {
        let (usual, options) = (JobOptions::default(), &job.options);
        let span = |given: Option<Duration>| given.map(nanos);
        let unique = job.unique.as_ref();
        let said = Self {
            version: Some(job.version).filter(|version| *version != FIRST_VERSION),
            priority: Some(options.priority).filter(|given| *given != usual.priority),
            max_expiries: Some(options.max_expiries).filter(|given| *given != usual.max_expiries),
            headers: Some(&job.headers).filter(|headers| !headers.is_empty()),
            unique_window: span(unique.and_then(|unique| unique.window)),
            term: span(options.term),
            max_lifetime: span(options.max_lifetime),
            retention: span(options.retention),
            timeout: span(options.runs.timeout),
            stall_limit: span(options.runs.stall_limit),
            max_failures: options.runs.max_failures,
            retry: options.runs.retry,
        };
        (said != Self::default()).then_some(said)
    }
}

impl<C: GenericClient + Sync> Tx<'_, C> {
    pub(super) async fn enqueue(
        &self,
        named: Named,
        jobs: &[(JobId, NewJob)],
    ) -> Done<Vec<Enqueued>> {
        let new = NewJobs::of(jobs);
        let args = args![
            self.base.namespace => TEXT, self.base.by_hand() => INT8, named.session => UUID,
            named.lane => INT8, named.seq => INT8, new.ids => UUID_ARRAY, new.queues => TEXT_ARRAY,
            new.kinds => TEXT_ARRAY, new.payloads => BYTEA_ARRAY, new.delays => INT8_ARRAY,
            new.unique_keys => BYTEA_ARRAY, new.exclusive_keys => BYTEA_ARRAY,
            new.options => JSONB_ARRAY, self.patience(named) => TEXT
        ];
        let mut answers: Vec<Enqueued> = jobs.iter().map(|(id, _)| Enqueued::New(*id)).collect();
        for row in self.rows("enqueue", args).await? {
            let nth: i32 = row.try_get(0)?;
            let at = usize::try_from(nth - 1).ok();
            let answer = at.and_then(|at| answers.get_mut(at));
            let answer = answer.ok_or_else(|| corrupt("an answer for no job"))?;
            *answer = Enqueued::Duplicate(job_id(row.try_get(1)?));
        }
        Ok(answers)
    }
}
