//! What a refusal does to a handler and its job, on each store that runs in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::fence::memory::Cell;
use leasehold::fence::{Fence as _, FenceError, Op, Scope};
use leasehold::inspect::Ledger;
use leasehold::job::{JobState, Key, Namespace, QueueName};
use leasehold::store::MemoryStore;
use leasehold::store::{ControlCommand, LeaseSelect};
use leasehold::{Client, Context, Failure, FencingToken, Job, NewJob, RetryPolicy, Store};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

#[derive(Serialize, Deserialize, Clone)]
struct Debit {
    amount: i64,
}

impl Job for Debit {
    const KIND: &'static str = "debit";
}

const DAY: u64 = 24 * 3600 * 1_000_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Every store that runs in this process, each with what it needs to live.
fn stores() -> Vec<(Arc<dyn Store>, Option<tempfile::TempDir>)> {
    let mut stores: Vec<(Arc<dyn Store>, _)> = vec![(Arc::new(MemoryStore::new()), None)];
    {
        let dir = tempfile::tempdir().unwrap();
        let options = leasehold::store::SqliteOptions::new()
            .namespace(Namespace::new("bank").unwrap())
            .synchronous_normal();
        let store = leasehold::store::SqliteStore::with(dir.path().join("jobs.db"), options);
        stores.push((Arc::new(store.unwrap()), Some(dir)));
    }
    stores
}

async fn ended(client: &Client, enough: impl Fn(&Ledger) -> bool) {
    let start = Instant::now();
    loop {
        let ledger = client.ledger().await.unwrap();
        if enough(&ledger) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{ledger:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Somebody has opened the account with a token this far ahead of the claim's.
async fn ahead(account: &Cell<i64>, ctx: &Context, by: u64) {
    let mark = FencingToken::new(ctx.token().get() + by);
    account.open(&ctx.scope(), mark).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_current_holder_that_is_refused_surrenders_and_comes_back_above_the_mark() {
    for (store, _dir) in stores() {
        let client = Client::new(store);
        client.enqueue(&Debit { amount: 10 }).await.unwrap();
        let account = Cell::new(100);
        let runs = Arc::new(AtomicUsize::new(0));
        let (cell, counted) = (account.clone(), runs.clone());
        let handler = move |job: Debit, ctx: Context| {
            let (account, run) = (cell.clone(), counted.fetch_add(1, Ordering::SeqCst));
            async move {
                if run == 0 {
                    ahead(&account, &ctx, DAY / 2).await;
                }
                let mut account = ctx.fence(&account).await?;
                account.write_once("debit", |balance| *balance -= job.amount)?;
                Ok::<(), Failure>(())
            }
        };
        let done = ended(&client, |ledger| ledger.completed == 1);
        let worker = client.worker().handle(handler);
        worker.run_until(done).await.unwrap();
        let ledger = client.ledger().await.unwrap();
        assert_eq!(runs.load(Ordering::SeqCst), 2, "{}", client.store().name());
        assert_eq!(
            (ledger.surrendered, ledger.retried, ledger.completed),
            (1, 0, 1)
        );
        assert_eq!(account.look(|balance| *balance), 90);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mark_that_nobody_can_believe_is_a_failure_and_does_not_loop() {
    for (store, _dir) in stores() {
        let client = Client::new(store);
        let id = client.enqueue(&Debit { amount: 10 }).await.unwrap().id();
        let account = Cell::new(100);
        let runs = Arc::new(AtomicUsize::new(0));
        let (cell, counted) = (account.clone(), runs.clone());
        // By way of another error type, as handlers often do.
        let handler = move |job: Debit, ctx: Context| {
            let (account, run) = (cell.clone(), counted.fetch_add(1, Ordering::SeqCst));
            async move {
                use anyhow::Context as _;
                if run == 0 {
                    ahead(&account, &ctx, 3 * DAY).await;
                }
                let mut account = ctx.fence(&account).await.context("the account")?;
                account.write(|balance| *balance -= job.amount)?;
                anyhow::Ok(())
            }
        };
        let done = ended(&client, |ledger| ledger.buried == 1);
        let worker = client
            .worker()
            .handle(handler)
            .max_failures(2)
            .retry(RetryPolicy::constant(Duration::from_millis(1)));
        worker.run_until(done).await.unwrap();
        let ledger = client.ledger().await.unwrap();
        assert_eq!(runs.load(Ordering::SeqCst), 2, "{}", client.store().name());
        assert_eq!(
            (ledger.surrendered, ledger.retried, ledger.buried),
            (0, 1, 1)
        );
        let job = client.job(id).await.unwrap().unwrap();
        assert_eq!(job.state, JobState::Dead);
        let why = format!("{job:?}");
        assert!(why.contains("broken fence"), "{why}");
        assert_eq!(account.look(|balance| *balance), 100);
    }
}

/// A worker whose first run stands still until the second is done, and then goes on.
async fn haunted(store: Arc<dyn Store>, fenced: bool) -> (Ledger, i64, usize) {
    let client = Client::new(store);
    let id = client.enqueue(&Debit { amount: 10 }).await.unwrap().id();
    let account = Cell::new(100);
    let refused = Arc::new(AtomicUsize::new(0));
    let runs = Arc::new(AtomicUsize::new(0));
    let [frozen, successor_done, zombie_done] = [(); 3].map(|()| Arc::new(Notify::new()));
    let signals = (frozen.clone(), successor_done, zombie_done.clone());
    let shared = (account.clone(), refused.clone(), runs);
    let handler = move |job: Debit, ctx: Context| {
        let (frozen, successor_done, zombie_done) = signals.clone();
        let (account, refused, runs) = shared.clone();
        async move {
            // In the unfenced arm everybody has a scope of his own, which refuses nobody.
            let scope = if fenced { ctx.scope() } else { alone(&ctx) };
            let mut account = account.open(&scope, ctx.token()).await?;
            let balance = account.read()?;
            if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                frozen.notify_one();
                successor_done.notified().await;
                let written = account.write(|b| *b = balance - job.amount);
                refused.fetch_add(usize::from(written.is_err()), Ordering::SeqCst);
                zombie_done.notify_one();
                return Ok(written?);
            }
            account.write(|b| *b = balance - job.amount - 1)?;
            successor_done.notify_one();
            Ok::<(), Failure>(())
        }
    };
    let worker = client.worker().handle(handler).slots(2);
    let all_over = async {
        frozen.notified().await;
        let revoke = ControlCommand::Revoke(LeaseSelect::Job(id));
        client
            .operator("test")
            .because("replaced")
            .command(revoke)
            .await
            .unwrap();
        ended(&client, |ledger| ledger.completed == 1).await;
        zombie_done.notified().await;
    };
    let report = worker.run_until(all_over).await.unwrap();
    assert_eq!(report.unsettled, 0);
    let ledger = client.ledger().await.unwrap();
    let balance = account.look(|balance| *balance);
    (ledger, balance, refused.load(Ordering::SeqCst))
}

fn alone(ctx: &Context) -> Scope {
    let name = ctx.token().to_string();
    Scope::named(&Namespace::default(), ctx.queue(), &name).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zombie_is_refused_and_its_run_counts_for_nothing() {
    for (store, _dir) in stores() {
        let (ledger, balance, refused) = haunted(store, true).await;
        assert_eq!((balance, refused), (89, 1));
        assert_eq!((ledger.completed, ledger.revoked), (1, 1));
        assert_eq!(
            (ledger.retried, ledger.surrendered, ledger.buried),
            (0, 0, 0)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_fence_the_zombie_wins() {
    for (store, _dir) in stores() {
        let (ledger, balance, refused) = haunted(store, false).await;
        assert_eq!(ledger.completed, 1);
        assert_eq!((balance, refused), (90, 0), "this test cannot fail");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scope_is_the_exclusive_key_or_else_the_job() {
    for (store, _dir) in stores() {
        let client = Client::new(store);
        let plain = client.enqueue(&Debit { amount: 1 }).await.unwrap().id();
        let keyed = NewJob::of(&Debit { amount: 2 }).unwrap();
        let keyed = keyed.exclusive("account/7").unwrap();
        client.enqueue(keyed).await.unwrap();
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let noted = seen.clone();
        let handler = move |job: Debit, ctx: Context| {
            noted.lock().unwrap().push((job.amount, ctx.scope()));
            async { Ok::<(), Failure>(()) }
        };
        let done = ended(&client, |ledger| ledger.completed == 2);
        let worker = client.worker().handle(handler);
        worker.run_until(done).await.unwrap();
        let mut seen = seen.lock().unwrap().clone();
        seen.sort_by_key(|(amount, _)| *amount);
        let (namespace, queue) = (client.store().namespace(), QueueName::default());
        let key = Key::new("account/7").unwrap();
        assert_eq!(seen[0].1, Scope::of_job(&namespace, &queue, plain));
        assert_eq!(seen[1].1, Scope::of_key(&namespace, &queue, &key));
        let name = if client.store().name() == "memory" {
            "leasehold"
        } else {
            "bank"
        };
        assert_eq!(seen[1].1.as_str(), format!("{name}/default/k:account/7"));
    }
}

#[tokio::test]
async fn a_refusal_says_what_was_refused() {
    let scope = Scope::parse("bank/default/k:account").unwrap();
    let account = Cell::new(0);
    let (old, new) = (FencingToken::new(33), FencingToken::new(34));
    let mut zombie = account.open(&scope, old).await.unwrap();
    account.open(&scope, new).await.unwrap();
    let stale = zombie.write(|balance| *balance = 1).unwrap_err();
    assert_eq!(
        (stale.token(), stale.mark(), stale.op()),
        (old, new, Op::Write)
    );
    assert_eq!(stale.scope(), &scope);
    let text = "write refused by a fence: token 33 is behind the mark 34 of bank/default/k:account";
    let refused = FenceError::from(stale.clone());
    for failure in [
        Failure::from(stale.clone()),
        Failure::from(refused),
        Failure::from(anyhow::Error::from(stale)),
    ] {
        assert!(failure.is_lost());
        assert_eq!(failure.reason(), text);
    }
    let long = "x".repeat(257);
    let mut opened = account.open(&scope, new).await.unwrap();
    let error = opened.write_once(&long, |_| ()).unwrap_err();
    assert!(matches!(&error, FenceError::Trouble(e) if e.field() == Some("operation")));
    assert!(!Failure::from(error).is_lost());
}
