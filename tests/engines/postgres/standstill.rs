//! I16: an owner that is frozen in the middle of its own transaction does not hold up its successor
//! for longer than a term and a second.

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::store::{ControlCommand, LeaseSelect, PostgresOptions, PostgresStore};
use leasehold::{Client, Context, Failure, Job, LeaseTerms, RetryPolicy};
use rustix::process::{Pid, Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tokio_postgres::{Config, NoTls};

use crate::postgres::pooler::Pooler;
use crate::postgres::server::Server;

const ROLE: &str = "LEASEHOLD_TEST_POSTGRES_STANDS_STILL";
const TERM: Duration = Duration::from_secs(2);
/// What I16 promises.
const DELAY: Duration = Duration::from_secs(3);
/// Only a successor that is held up for ever takes as long.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Serialize, Deserialize)]
struct Debit {
    cents: i64,
}

impl Job for Debit {
    const KIND: &'static str = "debit";
}

/// What a handler calls first.
#[derive(Clone, Copy, PartialEq, Debug)]
enum First {
    Begin,
    Fence,
    Checkpoint,
    /// The control: nothing that would put limits on the transaction before the first row is
    /// locked.
    Effect,
}

impl First {
    fn of(name: &str) -> Self {
        let all = [Self::Begin, Self::Fence, Self::Checkpoint, Self::Effect];
        *all.iter()
            .find(|first| format!("{first:?}") == name)
            .unwrap()
    }
}

async fn debit(
    cents: i64,
    ctx: &Context,
    first: First,
    config: &Config,
    half_way: impl Fn(),
) -> Result<(), Failure> {
    let (mut db, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    let tx = match first {
        First::Begin => ctx.begin(&mut db).await?,
        _ => db.transaction().await?,
    };
    match first {
        First::Fence => drop(ctx.fence(&tx).await?),
        First::Checkpoint => ctx.save_checkpoint_in(&tx, &"half way").await?,
        First::Begin | First::Effect => {}
    }
    let effect = format!("UPDATE account SET cents = cents - {cents}");
    tx.execute_typed(&effect, &[]).await?;
    half_way();
    ctx.complete_in(tx).await
}

fn worker(client: &Client, term: Duration) -> leasehold::Worker {
    client
        .worker()
        .terms(LeaseTerms::of_term(term))
        .owner("owner")
        .retry(RetryPolicy::constant(Duration::from_millis(1)))
        .slots(1)
}

async fn open(config: &Config) -> Client {
    let store = PostgresStore::with(config.clone(), PostgresOptions::new());
    Client::new(Arc::new(store.await.unwrap()))
}

/// The first owner, which freezes itself half way.
struct Owner(Child);

impl Owner {
    fn start(first: First, term: Duration, url: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "postgres::standstill::owner_process",
                "--ignored",
            ])
            .env(ROLE, format!("{first:?} {} {url}", term.as_secs()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    async fn stands_still(&mut self) {
        let start = Instant::now();
        let path = format!("/proc/{}/stat", self.0.id());
        loop {
            let said = std::fs::read_to_string(&path).unwrap();
            if said
                .rsplit_once(") ")
                .is_some_and(|(_, rest)| rest.starts_with('T'))
            {
                return;
            }
            assert!(self.0.try_wait().unwrap().is_none(), "it ended");
            assert!(start.elapsed() < PATIENCE, "it goes on: {said}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn thaw(&self) {
        kill_process(Pid::from_child(&self.0), Signal::CONT).unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
#[ignore = "the process that the tests of this file freeze"]
async fn owner_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let [first, term, url] = role.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let (first, config) = (First::of(first), url.parse::<Config>().unwrap());
    let term = Duration::from_secs(term.parse().unwrap());
    let client = open(&config).await;
    let freeze = || {
        kill_process(getpid(), Signal::STOP).unwrap();
        // This thread may go on for a moment until it is stopped.
        std::thread::sleep(Duration::from_millis(500));
    };
    let handler = move |job: Debit, ctx: Context| {
        let config = config.clone();
        async move { debit(job.cents, &ctx, first, &config, freeze).await }
    };
    worker(&client, term).handle(handler).run().await.unwrap();
}

/// A successor's run: when it began, and when its job was done.
struct Run {
    db: tokio_postgres::Client,
    client: Client,
    owner: Owner,
    began: Arc<Mutex<Option<Instant>>>,
    stop: tokio_util::sync::CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Run {
    /// A job whose first owner is frozen half way, and a second worker.
    async fn start(
        server: &Server,
        first: First,
        term: Duration,
        owner: &str,
        successor: &Config,
    ) -> Self {
        let db = server.client().await;
        let table = "CREATE TABLE IF NOT EXISTS account (cents bigint); TRUNCATE account;
                     INSERT INTO account VALUES (100); GRANT ALL ON account TO PUBLIC";
        db.batch_execute(table).await.unwrap();
        let client = open(successor).await;
        client.enqueue(Debit { cents: 30 }).await.unwrap();
        let mut owner = Owner::start(first, term, owner);
        owner.stands_still().await;
        let began = Arc::<Mutex<Option<Instant>>>::default();
        let noted = Arc::clone(&began);
        let config = successor.clone();
        let handler = move |job: Debit, ctx: Context| {
            noted.lock().unwrap().get_or_insert_with(Instant::now);
            let config = config.clone();
            async move { debit(job.cents, &ctx, first, &config, || {}).await }
        };
        let stop = tokio_util::sync::CancellationToken::new();
        let worker = worker(&client, term).handle(handler);
        let over = stop.clone().cancelled_owned();
        let task = tokio::spawn(async move {
            worker.run_until(over).await.unwrap();
        });
        Self {
            db,
            client,
            owner,
            began,
            stop,
            task,
        }
    }

    async fn begins(&self) -> Instant {
        let start = Instant::now();
        loop {
            if let Some(began) = *self.began.lock().unwrap() {
                return began;
            }
            assert!(start.elapsed() < PATIENCE, "it does not begin");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn balance(&self) -> i64 {
        let row = self.db.query_one("SELECT cents FROM account", &[]).await;
        row.unwrap().get(0)
    }

    async fn done(&self) -> Instant {
        let start = Instant::now();
        while self.balance().await == 100 {
            assert!(start.elapsed() < PATIENCE, "it is held up for ever");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Instant::now()
    }

    /// The first owner wakes up, and changes nothing.
    async fn thaw(self) {
        self.owner.thaw();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(self.balance().await, 70, "debited once");
        self.stop.cancel();
        self.task.await.unwrap();
        let ledger = self.client.ledger().await.unwrap();
        assert_eq!(ledger.live, 0, "{ledger:?}");
        assert!(ledger.balances(), "{ledger:?}");
    }
}

fn rounds() -> usize {
    let campaign = std::env::var_os("LEASEHOLD_CAMPAIGN").is_some();
    if campaign { 25 } else { 1 }
}

/// All three ways to have limits, on one server one after the other.
async fn held_up_for_a_term_at_most(server: &Server, owner: &str, successor: &Config) {
    for first in [First::Begin, First::Fence, First::Checkpoint] {
        for _ in 0..rounds() {
            let frozen = Instant::now();
            let run = Run::start(server, first, TERM, owner, successor).await;
            let (began, done) = (run.begins().await, run.done().await);
            let (delay, lost) = (done - began, began - frozen);
            println!("{first:?}: began after {lost:?}, done after {delay:?}");
            assert!(delay < DELAY, "{first:?}: held up for {delay:?}");
            // The lease of a job whose row is locked ends with that transaction.
            let late = TERM + DELAY;
            assert!(lost < late, "{first:?}: begun after {lost:?}");
            run.thaw().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_frozen_owner_delays_its_successor_by_a_term_at_most() {
    let server = Server::start(&["fsync=off"]);
    held_up_for_a_term_at_most(&server, &server.url(), &server.config()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql and pgbouncer: ./tests/run"]
async fn so_behind_a_pooler_whose_other_clients_are_not_hit() {
    let server = Server::start(&["fsync=off"]);
    let pooler = Pooler::start(&server).await;
    // Another client of the pooler, in one short transaction after the other.
    let (mut other, connection) = pooler.config(&server).connect(NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    let busy = tokio::spawn(async move {
        loop {
            let tx = other.transaction().await.unwrap();
            tx.query_typed("SELECT 1", &[]).await.unwrap();
            tx.commit().await.unwrap();
        }
    });
    held_up_for_a_term_at_most(&server, &pooler.url(), &pooler.config(&server)).await;
    assert!(
        !busy.is_finished() && !connection.is_finished(),
        "it was hit"
    );
    busy.abort();
}

/// How long a successor is held up that need not wait for the lease: it was revoked.
async fn held_up_after_a_revocation(
    server: &Server,
    term: Duration,
    successor: &Config,
) -> Duration {
    let run = Run::start(server, First::Begin, term, &server.url(), successor).await;
    // Long enough that it counts as standing still.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let jobs = LeaseSelect::Owner("owner".into());
    let operator = run.client.operator("test");
    operator
        .because("frozen")
        .command(ControlCommand::Revoke(jobs))
        .await
        .unwrap();
    let (began, done) = (run.begins().await, run.done().await);
    run.thaw().await;
    done - began
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_successor_ends_it_if_it_may_and_otherwise_the_limit_does() {
    let term = Duration::from_secs(6);
    let server = Server::start(&["fsync=off"]);
    let delay = held_up_after_a_revocation(&server, term, &server.config()).await;
    assert!(delay < term / 2, "not ended: {delay:?}");
    let app = less_than_the_owner(&server).await;
    let delay = held_up_after_a_revocation(&server, term, &app).await;
    assert!(delay > term / 2, "ended without the right to: {delay:?}");
    assert!(
        delay < term + Duration::from_secs(1),
        "held up for {delay:?}"
    );
}

/// Sees what the superuser does, and may not stop it.
async fn less_than_the_owner(server: &Server) -> Config {
    open(&server.config())
        .await
        .store()
        .open_session()
        .await
        .unwrap();
    let role =
        "CREATE ROLE app LOGIN IN ROLE pg_read_all_stats; GRANT USAGE ON SCHEMA leasehold TO app;
                GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO app;
                GRANT ALL ON ALL SEQUENCES IN SCHEMA leasehold TO app";
    server.client().await.batch_execute(role).await.unwrap();
    let mut app = server.config();
    app.user("app");
    app
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn so_where_the_server_lets_nobody_end_anothers_transaction() {
    let server = Server::start(&["fsync=off"]);
    let app = less_than_the_owner(&server).await;
    held_up_for_a_term_at_most(&server, &server.url(), &app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn without_limits_it_is_held_up_for_as_long_as_the_owner_is_frozen() {
    let server = Server::start(&["fsync=off"]);
    let run = Run::start(
        &server,
        First::Effect,
        TERM,
        &server.url(),
        &server.config(),
    )
    .await;
    run.begins().await;
    tokio::time::sleep(DELAY + TERM).await;
    assert_eq!(run.balance().await, 100, "nothing to protect from");
    run.owner.thaw();
    run.done().await;
    run.thaw().await;
}
