//! Drives a store through a case: one line per call.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::{Fixture, Snapshot};
use leasehold::inspect::{self, JobView, Ledger, QueueView};
use leasehold::job::{JobId, JobRecord, JobState, Kind, NewJob, QueueName};
use leasehold::lease::{FencingToken, Grant, Nonce, Receipt, Verdict};
use leasehold::store::{
    Beat, Checkpoint, CheckpointRequest, Checkpointed, ClaimQueue, ClaimRequest, Claimed,
    ControlCommand, ControlRequest, Controlled, EnqueueRequest, Enqueued, Expiry, Outcome,
    PruneRequest, ReapRequest, Renewal, RequestId, SessionId, SettleRequest, Settlement, Store,
};
use leasehold::{Error, ErrorKind, Result};

/// The term of the driver's claims.
pub const TERM: Duration = Duration::from_secs(60);
/// The maximum lifetime of the driver's claims.
pub const LIFETIME: Duration = Duration::from_secs(3600);

/// The queue of most cases.
pub fn queue() -> QueueName {
    QueueName::default()
}

/// A queue by name.
pub fn queue_named(name: &str) -> QueueName {
    QueueName::new(name).expect("a good name")
}

/// A plain job of the default queue.
pub fn job() -> NewJob {
    NewJob::raw(queue(), Kind::new("work").expect("a good name"), "{}")
}

/// What was asked is refused, and the error says which field is wrong.
#[track_caller]
pub(crate) fn names_the_field(error: &Error, field: &str) {
    assert_eq!(
        (error.kind(), error.field()),
        (ErrorKind::InvalidInput, Some(field)),
        "{error}"
    );
}

/// One lease in the hands of a case.
#[derive(Clone, Debug)]
pub struct Held {
    /// The proof.
    pub receipt: Receipt,
    /// The job as the claim gave it.
    pub job: Arc<JobRecord>,
    /// What the claim granted.
    pub granted: Duration,
    /// The term of the grant.
    pub term: Duration,
}

impl Held {
    /// The job's id.
    pub fn id(&self) -> JobId {
        self.job.id
    }

    /// The token.
    pub fn token(&self) -> FencingToken {
        self.receipt.token()
    }

    /// A beat for this lease alone.
    pub fn beat(&self) -> Beat {
        Beat {
            queue: self.receipt.queue().clone(),
            partition: self.receipt.partition(),
            grant: self.receipt.grant(),
            nonce: *self.receipt.nonce(),
            leases: vec![self.token()],
            lapse: Vec::new(),
            progress: Vec::new(),
        }
    }

    /// A beat that lets this lease lapse.
    pub fn lapse(&self) -> Beat {
        let mut beat = self.beat();
        beat.lapse = std::mem::take(&mut beat.leases);
        beat
    }

    /// The leases of a grant, each on its own.
    pub fn of(grant: &Grant) -> Vec<Self> {
        let held = grant.leases.iter().map(|lease| Self {
            receipt: grant.receipt(lease),
            job: Arc::clone(&lease.job),
            granted: grant.granted,
            term: grant.term,
        });
        held.collect()
    }

    /// All leases of a claim, in the order granted.
    pub fn all(claimed: &Claimed) -> Vec<Self> {
        claimed.grants.iter().flat_map(Self::of).collect()
    }
}

/// Calls a store under one session, and knows what comes next in each lane.
///
/// Its short forms panic on errors and on surprises; `try_` forms return what the store said.
pub struct Driver {
    fixture: Arc<dyn Fixture>,
    store: Arc<dyn Store>,
    session: SessionId,
    lanes: Mutex<HashMap<u32, u64>>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("store", &self.store.name())
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// A driver with a session of its own.
    pub async fn new(fixture: Arc<dyn Fixture>) -> Self {
        let store = fixture.store();
        let session = store.open_session().await.expect("a session");
        Self {
            fixture,
            store,
            session,
            lanes: Mutex::default(),
        }
    }

    /// Another process: the same store, another session.
    pub async fn other(&self) -> Self {
        Self::new(Arc::clone(&self.fixture)).await
    }

    /// The store.
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Moves the store's clock forward.
    pub async fn advance(&self, by: Duration) {
        self.fixture.advance(by).await;
    }

    /// Puts the store's clock back.
    pub async fn set_back(&self, by: Duration) {
        self.fixture.set_back(by).await;
    }

    /// The next request id of a lane.
    pub fn request_on(&self, lane: u32) -> RequestId {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let seq = lanes.entry(lane).or_default();
        *seq += 1;
        RequestId {
            session: self.session,
            lane,
            seq: *seq,
        }
    }

    /// The next request id of the first lane.
    pub fn request(&self) -> RequestId {
        self.request_on(0)
    }

    /// Jobs with new ids, ready to be sent.
    pub fn enqueue_request(&self, jobs: Vec<NewJob>) -> EnqueueRequest {
        let jobs = jobs.into_iter().map(|job| (JobId::generate(), job));
        EnqueueRequest {
            request: self.request(),
            jobs: Arc::new(jobs.collect()),
        }
    }

    /// Enqueues, and returns what the store says.
    pub async fn try_enqueue(&self, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        self.store.enqueue(self.enqueue_request(jobs)).await
    }

    /// Enqueues jobs that must all be new.
    pub async fn enqueue_all(&self, jobs: Vec<NewJob>) -> Vec<JobId> {
        let answers = self.try_enqueue(jobs).await.expect("enqueue");
        let new = answers.into_iter().map(|answer| match answer {
            Enqueued::New(id) => id,
            Enqueued::Duplicate(id) => panic!("a duplicate of {id}"),
        });
        new.collect()
    }

    /// Enqueues a job that must be new.
    pub async fn enqueue(&self, job: NewJob) -> JobId {
        self.enqueue_all(vec![job]).await[0]
    }

    /// Enqueues `n` plain jobs.
    pub async fn enqueue_many(&self, n: usize) -> Vec<JobId> {
        self.enqueue_all(vec![job(); n]).await
    }

    /// Asserts that an enqueue is refused for this field, and that nothing was stored.
    pub async fn refuses(&self, jobs: Vec<NewJob>, field: &str) {
        let before = self.snapshot().await;
        let error = self.try_enqueue(jobs).await.expect_err("over a limit");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert_eq!(error.field(), Some(field), "{error}");
        assert_eq!(self.snapshot().await, before, "something was stored");
    }

    /// A claim of up to `max` leases from the default queue.
    pub fn claim_request(&self, max: usize) -> ClaimRequest {
        ClaimRequest {
            request: self.request(),
            owner: "worker-1".into(),
            task: "run-1".into(),
            nonce: Nonce::draw().expect("randomness"),
            queues: vec![ClaimQueue {
                queue: queue(),
                term: TERM,
                max_lifetime: LIFETIME,
            }],
            max,
            admit_suspect: false,
        }
    }

    /// Sends a claim.
    pub async fn claim_as(&self, request: ClaimRequest) -> Claimed {
        self.store.claim(request).await.expect("claim")
    }

    /// Claims up to `max` leases, and returns them one by one.
    pub async fn claim(&self, max: usize) -> Vec<Held> {
        Held::all(&self.claim_as(self.claim_request(max)).await)
    }

    /// The ids of the jobs that a claim of up to `max` leases gets, in order.
    pub async fn claim_ids(&self, max: usize) -> Vec<JobId> {
        self.claim(max).await.iter().map(Held::id).collect()
    }

    /// Claims one lease, which must be there; a suspect will do.
    pub async fn claim_one(&self) -> Held {
        let mut request = self.claim_request(1);
        request.admit_suspect = true;
        let held = Held::all(&self.claim_as(request).await);
        held.into_iter().next().expect("a job to claim")
    }

    /// Enqueues a job and claims it.
    pub async fn held(&self, job: NewJob) -> Held {
        let id = self.enqueue(job).await;
        let held = self.claim_one().await;
        assert_eq!(held.id(), id, "another job was in the way");
        held
    }

    /// Settlements, ready to be sent.
    pub fn settle_request(&self, settlements: Vec<(&Held, Outcome)>) -> SettleRequest {
        let settlements = settlements
            .into_iter()
            .map(|(held, outcome)| Settlement {
                receipt: held.receipt.clone(),
                outcome,
            })
            .collect();
        SettleRequest {
            request: self.request(),
            settlements,
        }
    }

    /// Settles one lease by its receipt.
    pub async fn settle_receipt(&self, receipt: &Receipt, outcome: Outcome) -> Verdict {
        let request = SettleRequest {
            request: self.request(),
            settlements: vec![Settlement {
                receipt: receipt.clone(),
                outcome,
            }],
        };
        self.store.settle(request).await.expect("settle")[0]
    }

    /// Settles one lease.
    pub async fn settle(&self, held: &Held, outcome: Outcome) -> Verdict {
        self.settle_receipt(&held.receipt, outcome).await
    }

    /// Settles one lease, which must be held, neither late nor cancelled.
    pub async fn settled(&self, held: &Held, outcome: Outcome) {
        assert_eq!(self.settle(held, outcome).await, HELD);
    }

    /// Renews by one beat.
    pub async fn renew(&self, beat: Beat) -> Renewal {
        let renewals = self.store.renew(vec![beat]).await.expect("renew");
        renewals.into_iter().next().expect("one answer per beat")
    }

    /// Saves state under a lease.
    pub async fn checkpoint(&self, held: &Held, seq: u64, bytes: &'static str) -> Checkpointed {
        let request = CheckpointRequest {
            request: self.request(),
            checkpoints: vec![Checkpoint {
                receipt: held.receipt.clone(),
                seq,
                bytes: Bytes::from_static(bytes.as_bytes()),
            }],
        };
        self.store.checkpoint(request).await.expect("checkpoint")[0]
    }

    /// Expires up to `max` overdue leases.
    pub async fn reap(&self, max: usize) -> Vec<Expiry> {
        let request = self.request();
        let reaped = self.store.reap(ReapRequest { request, max }).await;
        reaped.expect("reap")
    }

    /// Lets time pass until the leases of the driver's claims are overdue, and expires them.
    pub async fn expire_all(&self) -> Vec<Expiry> {
        self.advance(TERM).await;
        self.reap(1_000).await
    }

    /// A command, ready to be sent.
    pub fn control_request(&self, command: ControlCommand) -> ControlRequest {
        ControlRequest {
            request: self.request(),
            actor: "operator".into(),
            reason: "a test".into(),
            command,
        }
    }

    /// Carries out a command.
    pub async fn control(&self, command: ControlCommand) -> Controlled {
        let request = self.control_request(command);
        self.store.control(request).await.expect("control")
    }

    /// Deletes what is past its retention.
    pub async fn prune(&self, max: usize) -> u64 {
        let request = PruneRequest {
            request: self.request(),
            overdue: Duration::ZERO,
            max,
        };
        self.store.prune(request).await.expect("prune")
    }

    /// Where a job stands, if it is there.
    pub async fn state(&self, id: JobId) -> Option<JobState> {
        let view = inspect::job(self.store(), id).await.expect("a job");
        view.map(|view| view.state)
    }

    /// All that is known of a job, which must be there.
    pub async fn view(&self, id: JobId) -> JobView {
        let view = inspect::job(self.store(), id).await.expect("a job");
        *view.expect("the job is there")
    }

    /// The default queue at a glance.
    pub async fn queue(&self) -> QueueView {
        let view = inspect::queue(self.store(), &queue()).await;
        view.expect("the queues").expect("the queue is there")
    }

    /// The ledger of the default queue.
    pub async fn ledger(&self) -> Ledger {
        self.queue().await.ledger
    }

    /// The jobs of the default queue in a state, in order.
    pub async fn jobs(&self, state: JobState) -> Vec<JobId> {
        let page = |page| inspect::jobs(self.store(), queue(), state, page);
        let views = super::snapshot::all(page).await;
        views.iter().map(|view| view.job.id).collect()
    }

    /// Everything that the store shows.
    pub async fn snapshot(&self) -> Snapshot {
        Snapshot::of(self.store()).await
    }

    /// Asserts that what is done meanwhile changes nothing but the count of refused calls.
    pub async fn unchanged(&self, act: impl AsyncFnOnce()) {
        let before = self.snapshot().await.without_fenced();
        act().await;
        let after = self.snapshot().await.without_fenced();
        assert_eq!(before, after, "a refused call changed something");
    }

    /// Asserts that what is done meanwhile changes nothing at all.
    pub async fn untouched(&self, act: impl AsyncFnOnce()) {
        let before = self.snapshot().await;
        act().await;
        let after = self.snapshot().await;
        assert_eq!(before, after, "a refused renewal changed something");
    }
}

/// The plain yes.
pub(super) const HELD: Verdict = Verdict::Held {
    late: false,
    cancel: false,
};

/// Done, without a result.
pub(super) fn complete() -> Outcome {
    Outcome::Complete { result: None }
}

/// Again after `delay`.
pub(super) fn retry(delay: Duration) -> Outcome {
    Outcome::Retry {
        delay,
        reason: "it failed".into(),
    }
}

/// Handed back.
pub(super) fn surrender() -> Outcome {
    snooze(Duration::ZERO)
}

/// Handed back for later.
pub(super) fn snooze(delay: Duration) -> Outcome {
    Outcome::Surrender { delay, mark: None }
}

/// Handed back by a worker that cannot work it.
pub(super) fn decline(delay: Duration) -> Outcome {
    Outcome::Decline {
        delay,
        reason: "unknown here".into(),
    }
}

/// Given up.
pub(super) fn bury() -> Outcome {
    Outcome::Bury {
        reason: "hopeless".into(),
    }
}

/// Seconds.
pub(super) const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}
