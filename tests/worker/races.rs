//! Renew ∥ settle ∥ cancel ∥ revoke ∥ drain ∥ drop inside the runtime, on real threads.
//!
//! Nobody knows the right answers here: the shared checker judges the history of every round. The
//! same meetings, one await at a time and replayable, are in `tests/simulation`; those that no
//! await separates, one step of a lock or an atomic at a time, in `tests/shuttle`.

use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect::{self, Query, View};
use leasehold::job::QueueName;
use leasehold::lease::{Receipt, Verdict};
use leasehold::store::MemoryStore;
use leasehold::store::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlCommand, ControlRequest,
    Controlled, EnqueueRequest, Enqueued, Expiry, LeaseSelect, PruneRequest, ReapRequest, Renewal,
    Select, SessionId, SettleRequest,
};
use leasehold::worker::executor::SameRuntime;
use leasehold::{
    Client, Context, Failure, Job, LeaseTerms, NewJob, Result, RetryPolicy, Store, async_trait,
};
use leasehold_conformance::RecordingStore;
use leasehold_conformance::checker::{Rule, check};
use leasehold_conformance::history::{Final, History};
use serde::{Deserialize, Serialize};
use tokio::runtime::Builder;

#[derive(Serialize, Deserialize)]
struct Race {
    n: u64,
}

impl Job for Race {
    const KIND: &'static str = "race";
}

async fn handle(job: Race, ctx: Context) -> Result<(), Failure> {
    match job.n % 4 {
        0 => {}
        1 => {
            ctx.save_checkpoint(&job.n).await?;
            tokio::time::sleep(Duration::from_millis(job.n % 7)).await;
        }
        2 => {
            // Until it is told to stop.
            let limit = Duration::from_millis(20);
            let _ = tokio::time::timeout(limit, ctx.cancelled()).await;
        }
        _ => {
            tokio::time::sleep(Duration::from_millis(job.n % 5)).await;
            if ctx.job().failures == 0 {
                return Err("once more".into());
            }
        }
    }
    Ok(())
}

/// Two workers, of which one is drained and the other dropped while an operator cancels and
/// revokes.
async fn storm(store: Arc<dyn Store>, round: u64) {
    let mut dice = fastrand::Rng::with_seed(round);
    let client = Client::new(Arc::clone(&store));
    let jobs = (0..40).map(|n| NewJob::of(&Race { n }).unwrap());
    let ids: Vec<_> = client.enqueue_many(jobs).await.unwrap();
    let worker = |owner: &str| {
        Client::new(Arc::clone(&store))
            .worker()
            .handle(handle)
            .executor(SameRuntime)
            .owner(owner)
            .slots(3)
            .terms(LeaseTerms::of_term(Duration::from_millis(40)))
            .retry(RetryPolicy::constant(Duration::from_millis(2)))
            .grace(Duration::from_millis(2))
            .drain_grace(Duration::from_millis(5))
    };
    let (drain, draining) = tokio::sync::oneshot::channel::<()>();
    let drained = tokio::spawn(worker("drained").run_until(async move { drop(draining.await) }));
    let dropped = tokio::spawn(worker("dropped").run_until(std::future::pending()));
    for _ in 0..12 {
        tokio::time::sleep(Duration::from_millis(dice.u64(0..4))).await;
        let one = ids[dice.usize(0..ids.len())].id();
        let command = match dice.u8(0..4) {
            0 => ControlCommand::Cancel(Select::Job(one)),
            1 => ControlCommand::Revoke(LeaseSelect::Job(one)),
            2 => ControlCommand::Revoke(LeaseSelect::Owner("drained".into())),
            _ => ControlCommand::Revoke(LeaseSelect::Owner("dropped".into())),
        };
        client
            .operator("operator")
            .because("a race")
            .command(command)
            .await
            .unwrap();
    }
    drain.send(()).unwrap();
    tokio::time::sleep(Duration::from_millis(dice.u64(0..6))).await;
    dropped.abort();
    drained.await.unwrap().unwrap();
}

/// One round on threads of its own. Returns the rules that were broken.
fn round(number: u64, racy: bool) -> Vec<Rule> {
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let history = History::new();
    let inner = if racy {
        Arc::new(CheckThenAct(Arc::clone(&memory)))
    } else {
        Arc::clone(&memory)
    };
    let recorded = RecordingStore::new(inner, history.clone(), 1);
    let runtime = Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(storm(Arc::new(recorded), number));
    // Waits until no thread of it runs any longer.
    drop(runtime);
    let look = Builder::new_current_thread().build().unwrap();
    let last = look.block_on(Final::of(&*memory));
    let found = check(&history.events(), Some(&last));
    if !racy {
        let text: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert!(found.is_empty(), "round {number}: {}", text.join("\n"));
    }
    found.iter().map(|violation| violation.rule).collect()
}

#[test]
fn renewals_settlements_commands_drain_and_drop_may_meet() {
    let rounds = match std::env::var_os("LEASEHOLD_CAMPAIGN") {
        Some(_) => 2_000,
        None => 40,
    };
    for number in 0..rounds {
        round(number, false);
    }
}

/// Control arm: with a gap between the look at a receipt and its effect, the same storm is caught.
#[test]
fn a_settlement_that_checks_and_then_acts_is_caught() {
    let caught = (0..500).find(|number| !round(*number, true).is_empty());
    println!("caught in round {caught:?}");
    assert!(caught.is_some());
}

/// Compares the receipt in one step, and ends the lease that the job has by then in another.
struct CheckThenAct(Arc<dyn Store>);

impl CheckThenAct {
    async fn current(&self, receipt: &Receipt) -> Result<Option<u64>> {
        let view = inspect::job(&*self.0, receipt.job()).await?;
        let lease = view.and_then(|view| view.lease);
        Ok(lease.map(|lease| lease.token.get()))
    }
}

#[async_trait]
impl Store for CheckThenAct {
    fn name(&self) -> &'static str {
        "racy"
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        self.0.dedicated().await
    }

    async fn open_session(&self) -> Result<SessionId> {
        self.0.open_session().await
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        self.0.enqueue(request).await
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        self.0.claim(request).await
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        self.0.renew(beats).await
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        let mut was_held = Vec::new();
        for settlement in &request.settlements {
            let token = settlement.receipt.token().get();
            was_held.push(self.current(&settlement.receipt).await? == Some(token));
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
        let mut verdicts = self.0.settle(request).await?;
        for (verdict, was_held) in verdicts.iter_mut().zip(was_held) {
            if was_held {
                *verdict = Verdict::Held {
                    late: false,
                    cancel: false,
                };
            }
        }
        Ok(verdicts)
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        self.0.checkpoint(request).await
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        self.0.reap(request).await
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        self.0.control(request).await
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.0.inspect(query).await
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        self.0.wait(queues, suspects, limit).await
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        self.0.prune(request).await
    }
}
