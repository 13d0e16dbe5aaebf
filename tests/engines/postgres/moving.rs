//! Commands about jobs that move at the same moment: a settlement does not wait for a command, so
//! that a job may be elsewhere by the time the command takes it. It is found there.

use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::ManualClock;
use leasehold::job::JobState;
use leasehold::store::{ControlCommand, Controlled, Outcome, PostgresStore, Select, Settlement};
use leasehold::{JobId, Store};
use leasehold_conformance::{Driver, Held, ManualFixture, job};

use crate::postgres::server::{Server, shared};

/// How long a lock may be waited for. Only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(60);

struct World {
    server: &'static Server,
    store: PostgresStore,
    d: Driver,
}

impl World {
    async fn new() -> Self {
        let server = shared();
        let clock = ManualClock::default();
        let store = server.store(clock.clone()).await;
        let fixture = ManualFixture::new(store.clone(), clock);
        let d = Driver::new(Arc::new(fixture)).await;
        Self { server, store, d }
    }

    /// Sends a command that has to wait for a settlement in the caller's transaction, which commits
    /// then.
    async fn meanwhile(
        &self,
        held: &Held,
        outcome: Outcome,
        command: ControlCommand,
    ) -> Controlled {
        let mut db = self.server.client().await;
        let tx = db.transaction().await.unwrap();
        let pid = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap();
        let pid: i32 = pid.get(0);
        let settlement = Settlement {
            receipt: held.receipt.clone(),
            outcome,
        };
        let verdict = self.store.settle_in(&tx, &settlement).await.unwrap();
        assert!(verdict.is_held());
        let request = self.d.control_request(command);
        let store = self.store.clone();
        let sent = tokio::spawn(async move { store.control(request).await });
        self.waited_for(pid).await;
        tx.commit().await.unwrap();
        sent.await.unwrap().unwrap()
    }

    async fn waited_for(&self, pid: i32) {
        let observer = self.server.client().await;
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))";
        let wait = async {
            loop {
                let waiting = observer.query_one(waiting, &[&pid]).await.unwrap();
                if waiting.get::<_, i64>(0) > 0 {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        waited.expect("the command waits for the transaction");
    }

    async fn is_in_order(&self) {
        assert!(self.d.claim(9).await.is_empty(), "it is there twice");
        self.d.snapshot().await.assert_in_order();
    }
}

/// What can be done with a job, and where it is then.
fn commands(id: JobId) -> [(ControlCommand, Option<JobState>); 3] {
    let delay = Duration::from_secs(3600);
    let jobs = Select::Job(id);
    [
        (
            ControlCommand::Cancel(jobs.clone()),
            Some(JobState::Cancelled),
        ),
        (ControlCommand::Purge(jobs.clone()), None),
        (
            ControlCommand::Reschedule { jobs, delay },
            Some(JobState::Scheduled),
        ),
    ]
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_parked_job_that_its_head_lets_go_is_dealt_with_once() {
    for nth in 0..3 {
        let world = World::new().await;
        let keyed = || job().exclusive("key").unwrap();
        let head = world.d.held(keyed()).await;
        let parked = world.d.enqueue(keyed()).await;
        let (command, state) = commands(parked)[nth].clone();
        let outcome = Outcome::Complete { result: None };
        let done = world.meanwhile(&head, outcome, command.clone()).await;
        assert_eq!((done.done, done.skipped), (1, 0), "{command}");
        assert_eq!(world.d.state(parked).await, state, "{command}");
        world.is_in_order().await;
    }
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_job_whose_lease_ends_at_the_moment_is_found() {
    for nth in 0..3 {
        let world = World::new().await;
        let held = world.d.held(job()).await;
        let (command, state) = commands(held.id())[nth].clone();
        let outcome = Outcome::Retry {
            delay: Duration::from_secs(10),
            reason: "it failed".into(),
        };
        let done = world.meanwhile(&held, outcome, command.clone()).await;
        assert_eq!((done.done, done.skipped), (1, 0), "{command}");
        assert_eq!(world.d.state(held.id()).await, state, "{command}");
        world.is_in_order().await;
    }
}
