//! What a transaction of a caller's has in hand keeps nobody waiting but those who want the same.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::clock::{ManualClock, SystemClock};
use leasehold::inspect;
use leasehold::job::JobState;
use leasehold::lease::{Lease, Progress};
use leasehold::store::{
    Checkpoint, Checkpointed, Claimed, EnqueueRequest, Enqueued, Outcome, PostgresStore, Renewal,
    Settlement,
};
use leasehold::{Client, ErrorKind, JobId, NewJob, Store};

use crate::postgres::paying::{Pay, run};
use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, beat, complete, job};

const TERM: Duration = Duration::from_secs(60);
/// Less than anybody waits for a lock, and more than a call takes.
const SOON: Duration = Duration::from_secs(3);

/// The answer of somebody who does not wait for the transaction.
async fn soon<T>(call: impl Future<Output = leasehold::Result<T>>) -> T {
    let answer = tokio::time::timeout(SOON, call).await;
    answer.expect("it waits").unwrap()
}

fn progress(done: u64) -> Progress {
    Progress {
        done,
        total: None,
        note: String::new(),
    }
}

/// A handler saves a checkpoint in a transaction of its own, shows progress, and stalls there.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn renewals_go_on_beside_a_checkpoint_that_is_not_committed() {
    let mut caller = Caller::new(shared().store(SystemClock).await).await;
    caller.enqueue(3).await;
    let grant = caller.claim(2, TERM).await.remove(0);
    let sibling = caller.claim(1, TERM).await.remove(0);
    let [busy, other] = [&grant.leases[0], &grant.leases[1]];
    let mut db = shared().client().await;
    let tx = db.transaction().await.unwrap();
    let checkpoint = Checkpoint {
        receipt: grant.receipt(busy),
        seq: 1,
        bytes: "half".into(),
    };
    let saved = caller.store.checkpoint_in(&tx, &checkpoint).await;
    assert!(matches!(saved.unwrap(), Checkpointed::Saved { .. }));

    let mut shown = beat(&grant);
    shown.progress = vec![(busy.token, progress(1)), (other.token, progress(2))];
    let beats = vec![shown, beat(&sibling)];
    let renewals = soon(caller.store.renew(beats)).await;
    let is_held =
        |renewal: &Renewal| matches!(renewal, Renewal::Held { fenced, .. } if fenced.is_empty());
    assert!(renewals.iter().all(is_held), "{renewals:?}");
    let shown = async |lease: &Lease| {
        let view = inspect::job(&caller.store, lease.job.id).await.unwrap();
        view.unwrap()
            .lease
            .unwrap()
            .progress
            .map(|shown| shown.done)
    };
    assert_eq!(shown(other).await, Some(2));

    // It is let lapse, and the others of its grant are held all the same.
    let mut lapsing = beat(&grant);
    lapsing.leases = vec![other.token];
    let only_other = lapsing.clone();
    lapsing.lapse = vec![busy.token];
    let renewals = soon(caller.store.renew(vec![lapsing])).await;
    assert!(is_held(&renewals[0]), "{renewals:?}");
    let state = async |lease: &Lease| {
        let view = inspect::job(&caller.store, lease.job.id).await.unwrap();
        view.unwrap().state
    };
    assert_eq!(state(busy).await, JobState::Leased);
    tx.commit().await.unwrap();

    // Nobody says it again, and with the transaction over it lapses.
    let renewals = soon(caller.store.renew(vec![only_other])).await;
    assert!(is_held(&renewals[0]), "{renewals:?}");
    assert_eq!(state(busy).await, JobState::Ready);
    assert_eq!(state(other).await, JobState::Leased);
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.expired_stalled, ledger.live), (1, 2));
    // What the transaction saved is kept.
    let again = caller.claim(1, TERM).await.remove(0);
    assert_eq!(again.leases[0].job.id, busy.job.id);
    assert!(again.leases[0].job.checkpoint.is_some());
}

/// A job with an exclusive key, and one after it that is due in a second.
struct Keyed {
    caller: Caller,
    clock: ManualClock,
    head: Settlement,
    next: JobId,
}

impl Keyed {
    async fn new(outcome: Outcome) -> Self {
        let clock = ManualClock::default();
        let mut caller = Caller::new(shared().store(clock.clone()).await).await;
        let keyed = || job().exclusive("account 7").unwrap();
        store(&mut caller, vec![keyed()]).await;
        let receipt = caller.claim_one(TERM).await.unwrap();
        let next = store(&mut caller, vec![keyed().delay(Duration::from_secs(1))]).await[0];
        let head = Settlement { receipt, outcome };
        clock.advance(Duration::from_secs(2));
        Self {
            caller,
            clock,
            head,
            next,
        }
    }

    async fn claim(&mut self, max: usize) -> Claimed {
        let request = self.caller.claim_request(max, TERM);
        soon(self.caller.store.claim(request)).await
    }
}

async fn store(caller: &mut Caller, jobs: Vec<NewJob>) -> Vec<JobId> {
    let jobs: Vec<_> = jobs
        .into_iter()
        .map(|job| (JobId::generate(), job))
        .collect();
    let ids = jobs.iter().map(|(id, _)| *id).collect();
    let request = caller.request();
    let jobs = Arc::new(jobs);
    caller
        .store
        .enqueue(EnqueueRequest { request, jobs })
        .await
        .unwrap();
    ids
}

fn claimed(claimed: &Claimed) -> Vec<JobId> {
    let leases = claimed.grants.iter().flat_map(|grant| &grant.leases);
    leases.map(|lease| lease.job.id).collect()
}

/// The head of an exclusive key is ended in a transaction that stands still: claims go on.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn claims_go_on_beside_a_key_that_is_not_given_back() {
    let retry = Outcome::Retry {
        delay: TERM,
        reason: "again".into(),
    };
    for (outcome, is_next) in [(Outcome::Complete { result: None }, true), (retry, false)] {
        let mut scene = Keyed::new(outcome).await;
        let mut db = shared().client().await;
        let tx = db.transaction().await.unwrap();
        let settled = scene.caller.store.settle_in(&tx, &scene.head).await;
        assert!(settled.unwrap().is_held());
        // More of that key than a claim promotes in a step, ahead of one that is nobody's affair.
        for _ in 0..2 {
            let like = || {
                job()
                    .exclusive("account 7")
                    .unwrap()
                    .delay(Duration::from_millis(1))
            };
            store(&mut scene.caller, (0..600).map(|_| like()).collect()).await;
        }
        let free = store(
            &mut scene.caller,
            vec![job().delay(Duration::from_millis(2))],
        )
        .await;
        scene.clock.advance(Duration::from_secs(1));
        let answer = scene.claim(9).await;
        assert_eq!(claimed(&answer), free);
        // The next look is not at once: it would find the same.
        let next = answer.next_due.unwrap();
        assert!(
            next > Duration::from_millis(50) && next < Duration::from_secs(1),
            "{next:?}"
        );
        let answer = scene.claim(9).await;
        assert!(answer.grants.is_empty());
        assert!(answer.next_due.unwrap() > Duration::from_millis(50));

        tx.commit().await.unwrap();
        let answer = scene.claim(9).await;
        let expected = if is_next { vec![scene.next] } else { vec![] };
        assert_eq!(claimed(&answer), expected);
        let ledger = inspect::ledger(&scene.caller.store).await.unwrap();
        assert!(ledger.balances());
    }
}

/// A lease that is overdue, and that its holder settles in a transaction: whoever claims meanwhile
/// is not told to come again at once.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn an_overdue_lease_in_somebodys_hand_is_no_reason_to_hurry() {
    let clock = ManualClock::default();
    let mut caller = Caller::new(shared().store(clock.clone()).await).await;
    caller.enqueue(1).await;
    let held = caller.claim_one(TERM).await.unwrap();
    let mut db = shared().client().await;
    let tx = db.transaction().await.unwrap();
    let settled = caller.store.settle_in(&tx, &complete(held)).await;
    assert!(settled.unwrap().is_held());
    clock.advance(TERM);
    let request = caller.claim_request(1, TERM);
    let answer = soon(caller.store.claim(request)).await;
    assert!(answer.grants.is_empty() && answer.expired.is_empty());
    assert!(answer.next_deadline.unwrap() > Duration::from_millis(50));
    tx.rollback().await.unwrap();
    let request = caller.claim_request(1, TERM);
    let answer = soon(caller.store.claim(request)).await;
    assert_eq!((answer.grants.len(), answer.expired.len()), (1, 1));
}

/// Calls of one client are merged. A transaction has enqueued a job with a unique key and stays
/// open: only those who want the same key wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn enqueues_go_on_beside_a_key_that_is_not_committed() {
    let server = shared();
    let store = server.store(SystemClock).await;
    let client = Client::new(Arc::new(store.clone()));
    client.enqueue(job()).await.unwrap();
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    let keyed = |key: &str| job().unique(key).unwrap();
    let theirs = store.enqueue_in(&tx, vec![keyed("taken")]).await.unwrap();
    let enqueue = |jobs: Vec<NewJob>| {
        let client = client.clone();
        tokio::spawn(async move { client.enqueue_many(jobs).await })
    };
    let start = Instant::now();
    // All at once, so that they share calls. One that wants the key wants another job, too.
    let blocked = [
        enqueue(vec![keyed("taken")]),
        enqueue(vec![job(), keyed("taken")]),
    ];
    let free: Vec<_> = (0..40)
        .map(|n| {
            enqueue(vec![if n % 2 == 0 {
                job()
            } else {
                keyed(&n.to_string())
            }])
        })
        .collect();
    for one in free {
        let stored = tokio::time::timeout(SOON, one).await.expect("it waits");
        assert!(matches!(stored.unwrap().unwrap()[0], Enqueued::New(_)));
    }
    assert!(start.elapsed() < SOON);
    // And so do those who come later, while it is still in hand.
    soon(client.enqueue(job())).await;
    assert!(blocked.iter().all(|one| !one.is_finished()));
    tx.commit().await.unwrap();
    let [alone, with_another] = blocked;
    let alone = tokio::time::timeout(SOON, alone).await.expect("it waits");
    assert_eq!(alone.unwrap().unwrap()[0].id(), theirs[0].id());
    let both = tokio::time::timeout(SOON, with_another)
        .await
        .expect("it waits");
    let both = both.unwrap().unwrap();
    assert!(matches!(both[0], Enqueued::New(_)));
    assert_eq!(both[1].id(), theirs[0].id());
    let ledger = inspect::ledger(&store).await.unwrap();
    assert_eq!(ledger.enqueued, 1 + 40 + 1 + 1 + 1);
}

/// The same for checkpoints of one worker, one of whose jobs is locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn checkpoints_go_on_beside_a_job_that_is_locked() {
    let store = shared().store(SystemClock).await;
    let client = Client::new(Arc::new(store));
    let jobs = vec![NewJob::of(&Pay::default()).unwrap(); 4];
    client.enqueue_many(jobs).await.unwrap();
    let saved = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let handler = move |_: Pay, ctx: leasehold::Context, number: usize| {
        let saved = Arc::clone(&saved);
        async move {
            use std::sync::atomic::Ordering::SeqCst;
            if number > 0 {
                // Once it is locked: all of them at the same time.
                while saved.load(SeqCst) == 0 {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                let start = Instant::now();
                ctx.save_checkpoint(&number).await?;
                assert!(start.elapsed() < SOON, "it waits");
                saved.fetch_add(1, SeqCst);
                return Ok(());
            }
            let mut db = shared().client().await;
            let tx = db.transaction().await?;
            let lock = format!(
                "SELECT FROM leasehold.job WHERE token = {} FOR UPDATE",
                ctx.token()
            );
            tx.batch_execute(&lock).await?;
            saved.store(1, SeqCst);
            let own = ctx.save_checkpoint(&number);
            let meanwhile = async {
                while saved.load(SeqCst) < 4 {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                tx.rollback().await
            };
            let (own, rolled_back) = tokio::join!(own, meanwhile);
            rolled_back?;
            own
        }
    };
    let ledger = run(&client, 4, handler, |ledger| ledger.completed == 4).await;
    assert_eq!((ledger.granted, ledger.fenced), (4, 0));
}

/// A caller of the store itself is told, and nothing is stored.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_call_that_names_what_is_in_hand_stores_nothing() {
    let server = Server::start(&["fsync=off"]);
    let store = PostgresStore::with(server.config(), Server::options())
        .await
        .unwrap();
    let mut caller = Caller::new(store).await;
    caller.enqueue(1).await;
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    let keyed = || job().unique("taken").unwrap();
    caller.store.enqueue_in(&tx, vec![keyed()]).await.unwrap();
    let enqueue = EnqueueRequest {
        request: caller.request(),
        jobs: vec![(JobId::generate(), job()), (JobId::generate(), keyed())].into(),
    };
    let error = caller.store.enqueue(enqueue.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error:?}");
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(ledger.enqueued, 1);
    tx.rollback().await.unwrap();
    caller.store.enqueue(enqueue).await.unwrap();
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!(ledger.enqueued, 3);
}
