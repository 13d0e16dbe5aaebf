//! Effect and settlement under `kill -9` of workers and of the server: every effect exactly once.
//!
//! The control arm does the same work with effect and settlement apart, under the same kills. It
//! must show an effect twice.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect::QueueView;
use leasehold::job::{JobOptions, JobState};
use leasehold::store::PostgresStore;
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob, RetryPolicy};
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;
use tokio_util::sync::CancellationToken;

use crate::postgres::answered;
use crate::postgres::server::Server;

const ROLE: &str = "LEASEHOLD_TEST_POSTGRES_WORKER";
/// Jobs of a round: more than are done until the kill.
const JOBS: usize = 10;
/// How often the control arm may be lucky.
const CONTROL: usize = 30;

fn kills() -> usize {
    let long = std::env::var("LEASEHOLD_CAMPAIGN").is_ok_and(|value| value == "1");
    if long { 200 } else { 20 }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arm {
    Together,
    Apart,
}

impl Arm {
    fn namespace(self) -> &'static str {
        match self {
            Self::Together => "together",
            Self::Apart => "apart",
        }
    }
}

#[derive(Serialize, Deserialize, Clone, Default)]
struct Pay;

impl Job for Pay {
    const KIND: &'static str = "pay";

    /// Kills are not the job's fault: it is tried for as long as it takes.
    fn options(&self) -> JobOptions {
        let mut options = JobOptions::default();
        options.runs.max_failures = Some(100_000);
        options.max_expiries = 10_000;
        options
    }
}

/// Writes the effect, takes a moment, and ends the job, in one transaction or not.
async fn pay(server: &Server, arm: Arm, ctx: Context) -> Result<(), Failure> {
    let (mut db, connection) = server.config().connect(NoTls).await?;
    let connection = tokio::spawn(connection);
    let effect = format!("INSERT INTO {}_effects (job) VALUES ($1)", arm.namespace());
    let id = ctx.job_id().to_string();
    let moment = "SELECT pg_sleep(0.03)";
    match arm {
        Arm::Together => {
            let tx = db.transaction().await?;
            tx.execute(&effect, &[&id]).await?;
            tx.execute(moment, &[]).await?;
            ctx.save_checkpoint_in(&tx, &"paid").await?;
            ctx.complete_in(tx).await?;
        }
        Arm::Apart => {
            db.execute(&effect, &[&id]).await?;
            db.execute(moment, &[]).await?;
        }
    }
    drop(db);
    let _ = connection.await;
    Ok(())
}

/// A namespace of an arm, and what its jobs have done.
struct World {
    client: Client,
    arm: Arm,
    jobs: usize,
}

impl World {
    async fn new(server: &Server, arm: Arm) -> Self {
        let table = format!("CREATE TABLE {}_effects (job text)", arm.namespace());
        server.client().await.batch_execute(&table).await.unwrap();
        Self {
            client: client(server, arm).await,
            arm,
            jobs: 0,
        }
    }

    async fn enqueue(&mut self) {
        let jobs = vec![NewJob::of(&Pay).unwrap(); JOBS];
        self.client.enqueue_many(jobs).await.unwrap();
        self.jobs += JOBS;
    }

    async fn effects(&self, server: &Server) -> (i64, i64) {
        let table = self.arm.namespace();
        let count = format!("SELECT count(*), count(DISTINCT job) FROM {table}_effects");
        let row = server.client().await.query_one(&count, &[]).await.unwrap();
        (row.get(0), row.get(1))
    }

    /// Waits until somebody is at work: from here on any moment will do.
    async fn moment(&self, server: &Server) {
        let before = self.effects(server).await;
        while self.effects(server).await == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..40_000))).await;
    }

    /// Works until nothing is left, and asserts one effect per job, or for the control arm more.
    async fn ends(&mut self, server: &Arc<Server>, kills: usize) {
        let client = self.client.clone();
        let over = async {
            while !is_done(&answered(|| client.queues()).await) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        work(&self.client, server, self.arm, over).await;
        let queues = self.client.queues().await.unwrap();
        assert_eq!(queues[0].counts.of(JobState::Dead), 0, "no job was to die");
        assert!(queues[0].ledger.balances());
        let (effects, paid) = self.effects(server).await;
        println!(
            "{:?}: {kills} kills, {} jobs, {effects} effects, {} leases expired",
            self.arm, self.jobs, queues[0].ledger.expired_deadline
        );
        assert_eq!(paid, self.jobs as i64, "every job has an effect");
        match self.arm {
            Arm::Together => assert_eq!(effects, paid, "an effect more than once"),
            Arm::Apart => assert!(effects > paid, "the control arm was to show one twice"),
        }
    }
}

fn is_done(queues: &[QueueView]) -> bool {
    let counts = queues[0].counts;
    counts.ready + counts.leased + counts.scheduled == 0
}

async fn client(server: &Server, arm: Arm) -> Client {
    let url = format!("{}?namespace={}", server.url(), arm.namespace());
    Client::new(Arc::new(PostgresStore::open(&url).await.unwrap()))
}

async fn work(
    client: &Client,
    server: &Arc<Server>,
    arm: Arm,
    until: impl Future<Output = ()> + Send,
) {
    let server = Arc::clone(server);
    let handler = move |_: Pay, ctx: Context| {
        let server = Arc::clone(&server);
        async move { pay(&server, arm, ctx).await }
    };
    let worker = client
        .worker()
        .handle(handler)
        .slots(2)
        .terms(LeaseTerms::of_term(Duration::from_secs(10)))
        .retry(RetryPolicy::constant(Duration::from_millis(1)));
    worker.run_until(until).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn every_effect_once_when_workers_are_killed() {
    let server = Arc::new(Server::start(&["fsync=off"]));
    for (arm, kills) in [(Arm::Together, kills()), (Arm::Apart, CONTROL)] {
        let mut world = World::new(&server, arm).await;
        let mut killed = 0;
        for _ in 0..kills {
            world.enqueue().await;
            let mut worker = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "postgres::kill::worker_process", "--ignored"])
                .env(ROLE, format!("{} {}", arm.namespace(), server.url()))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            world.moment(&server).await;
            worker.kill().unwrap();
            worker.wait().unwrap();
            killed += 1;
            let (effects, paid) = world.effects(&server).await;
            if arm == Arm::Apart && effects > paid {
                break;
            }
        }
        world.ends(&server, killed).await;
    }
}

/// Not a test: the process that the test above kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the process that another test kills"]
async fn worker_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (arm, url) = role.split_once(' ').unwrap();
    let arm = [Arm::Together, Arm::Apart]
        .into_iter()
        .find(|known| known.namespace() == arm)
        .unwrap();
    let server = Arc::new(Server::elsewhere(url));
    let client = client(&server, arm).await;
    work(&client, &server, arm, std::future::pending()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn every_effect_once_when_the_server_is_killed() {
    let mut server = Server::start(&["fsync=off"]);
    for (arm, kills) in [(Arm::Together, kills()), (Arm::Apart, CONTROL)] {
        let mut world = World::new(&server, arm).await;
        let address = Arc::new(Server::elsewhere(&server.url()));
        let over = CancellationToken::new();
        let working = tokio::spawn({
            let (client, address, over) = (world.client.clone(), address.clone(), over.clone());
            async move { work(&client, &address, arm, over.cancelled()).await }
        });
        let mut killed = 0;
        for _ in 0..kills {
            world.enqueue().await;
            world.moment(&server).await;
            server.kill();
            server.launch();
            killed += 1;
            let (effects, paid) = world.effects(&server).await;
            if arm == Arm::Apart && effects > paid {
                break;
            }
        }
        over.cancel();
        working.await.unwrap();
        world.ends(&address, killed).await;
    }
}
