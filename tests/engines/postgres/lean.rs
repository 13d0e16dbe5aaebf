//! What a call costs: one statement, on connections that are kept, and no write for nothing.

use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::{ManualClock, SystemClock};
use leasehold::job::{Kind, QueueName};
use leasehold::lease::Receipt;
use leasehold::lease::{Nonce, Progress};
use leasehold::limits;
use leasehold::store::{
    Beat, ClaimQueue, ClaimRequest, EnqueueRequest, PostgresStore, ReapRequest, Renewal, RequestId,
    SettleRequest,
};
use leasehold::{FencingToken, JobId, NewJob, Store, inspect};
use tokio_postgres::Client;

use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, beat, complete};

const TERM: Duration = Duration::from_secs(60);

/// A caller, and a witness of the statements that write its answers and renew its grants.
struct Scene {
    server: Server,
    caller: Caller,
    witness: Client,
}

impl Scene {
    async fn new() -> Self {
        let server = Server::start(&["fsync=off"]);
        // Others are about: in another namespace, in another queue, and in the same one.
        for _ in 0..2 {
            let mut other = Caller::new(server.store(SystemClock).await).await;
            crowd(&mut other, &QueueName::default()).await;
        }
        let mut caller = Caller::new(server.store(SystemClock).await).await;
        crowd(&mut caller, &QueueName::new("other").unwrap()).await;
        crowd(&mut caller, &QueueName::default()).await;
        let witness = server.client().await;
        witness
            .batch_execute(
                "CREATE TABLE seen (statement text);
                 CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
                     $$ BEGIN INSERT INTO public.seen VALUES (current_query()); RETURN NEW; END $$;
                 CREATE TRIGGER see AFTER INSERT OR UPDATE ON leasehold.lane
                     FOR EACH ROW EXECUTE FUNCTION see();
                 CREATE TRIGGER see AFTER UPDATE OF deadline ON leasehold.grants
                     FOR EACH ROW EXECUTE FUNCTION see()",
            )
            .await
            .unwrap();
        Self {
            server,
            caller,
            witness,
        }
    }

    /// The functions that were called since, of those that wrote something.
    async fn seen(&self) -> Vec<String> {
        let seen = "WITH gone AS (DELETE FROM seen RETURNING statement)
                    SELECT substring(statement FROM '(\\w+_1)[(]') FROM gone";
        let rows = self.witness.query(seen, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}

/// Jobs in all states, and answers in lanes that are further on.
async fn crowd(caller: &mut Caller, queue: &QueueName) {
    let of = || NewJob::raw(queue.clone(), Kind::new("work").unwrap(), "{}");
    let later = of().delay(Duration::from_secs(3_600));
    for new in [of().retention(TERM), of(), of(), later] {
        let request = RequestId {
            lane: 7,
            seq: 1_000 + caller.request().seq,
            ..caller.request()
        };
        let jobs = vec![(JobId::generate(), new)].into();
        let enqueue = EnqueueRequest { request, jobs };
        caller.store.enqueue(enqueue).await.unwrap();
    }
    for _ in 0..2 {
        let mut claim = caller.claim_request(1, TERM);
        claim.queues[0].queue = queue.clone();
        let claimed = caller.store.claim(claim).await.unwrap();
        assert_eq!(claimed.grants.len(), 1);
    }
}

async fn settle(caller: &mut Caller, receipts: Vec<Receipt>) {
    let settle = SettleRequest {
        request: caller.request(),
        settlements: receipts.into_iter().map(complete).collect(),
    };
    let verdicts = caller.store.settle(settle).await.unwrap();
    assert!(verdicts.iter().all(|verdict| verdict.is_held()));
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn each_verb_has_its_statement() {
    let mut scene = Scene::new().await;
    scene.caller.enqueue(8).await;
    assert_eq!(scene.seen().await, ["enqueue_1"]);
    let first = scene.caller.claim(5, TERM).await.remove(0);
    assert_eq!(scene.seen().await, ["claim_1"]);
    let second = scene.caller.claim(1, TERM).await.remove(0);
    assert_eq!(scene.seen().await, ["claim_1"]);
    let beats = vec![beat(&first), beat(&second)];
    scene.caller.store.renew(beats).await.unwrap();
    assert_eq!(scene.seen().await, ["renew_1", "renew_1"]);
    // A part of a grant, then parts of two, then the rest.
    let mut receipts = first.leases.iter().map(|lease| first.receipt(lease));
    settle(&mut scene.caller, vec![receipts.next().unwrap()]).await;
    assert_eq!(scene.seen().await, ["settle_1"]);
    settle(&mut scene.caller, receipts.by_ref().take(2).collect()).await;
    assert_eq!(scene.seen().await, ["settle_1"]);
    let two = vec![second.receipt(&second.leases[0]), receipts.next().unwrap()];
    settle(&mut scene.caller, two).await;
    assert_eq!(scene.seen().await, ["settle_1"]);
    settle(&mut scene.caller, receipts.collect()).await;
    assert_eq!(scene.seen().await, ["settle_1"]);
    let claim = scene.caller.claim_request(9, TERM);
    let claimed = scene.caller.store.claim(claim).await.unwrap();
    assert_eq!(claimed.grants[0].leases.len(), 3);
    assert_eq!(scene.seen().await, ["claim_1"]);
    // Nothing is left to be claimed: a claim writes nothing, and neither does a look.
    for _ in 0..3 {
        let claim = scene.caller.claim_request(9, TERM);
        let claimed = scene.caller.store.claim(claim).await.unwrap();
        assert!(claimed.grants.is_empty());
        assert!(scene.seen().await.is_empty());
        let queues = [QueueName::default()];
        let wait = Duration::from_millis(10);
        scene.caller.store.wait(&queues, true, wait).await.unwrap();
        assert!(scene.seen().await.is_empty());
    }

    let ledger = inspect::ledger(&scene.caller.store).await.unwrap();
    assert_eq!((ledger.granted, ledger.completed), (13, 6));
}

/// To connect costs more than any call.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn calls_keep_their_connections() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let witness = server.client().await;
    let connected = async || -> Vec<i32> {
        let all = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'";
        let rows = witness.query(all, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    caller.enqueue(1).await;
    let before = connected().await;
    for _ in 0..3 {
        caller.enqueue(1).await;
        let grant = caller.claim(1, TERM).await.remove(0);
        settle(&mut caller, vec![grant.receipt(&grant.leases[0])]).await;
    }
    let after = connected().await;
    assert!(before.len() > 1, "{before:?}");
    assert!(
        before.iter().all(|pid| after.contains(pid)),
        "{before:?} {after:?}"
    );
}

/// A claim whose first copy had no answer may be under way still. Once another copy has found
/// nothing, it must not grant what nobody waits for.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_late_copy_of_a_claim_grants_nothing() {
    let mut scene = Scene::new().await;
    while !scene.caller.claim(9, TERM).await.is_empty() {}
    let store = scene.caller.store.clone();
    // Neither handle knows what the other has sent.
    let options = Server::options().namespace(store.namespace());
    let late = PostgresStore::with(scene.server.config(), options);
    let late = late.await.unwrap();
    let mut producer = Caller::new(late.clone()).await;
    let copies_of = async |request: ClaimRequest, producer: &mut Caller| {
        let claimed = store.claim(request.clone()).await.unwrap();
        assert!(claimed.grants.is_empty());
        producer.enqueue(1).await;
        let claimed = late.claim(request).await.unwrap();
        claimed.grants.len()
    };

    let request = scene.caller.claim_request(9, TERM);
    let hold = "BEGIN; LOCK TABLE leasehold.session";
    scene.witness.batch_execute(hold).await.unwrap();
    let first = store.claim(request.clone());
    let first = tokio::time::timeout(Duration::from_millis(300), first).await;
    assert!(first.is_err(), "it was answered");
    scene.witness.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(copies_of(request, &mut producer).await, 0);

    // Control arm: where the first copy was answered, there is no other, and none is looked for.
    let found = scene.caller.claim(9, TERM).await;
    assert_eq!(found[0].leases.len(), 1);
    let request = scene.caller.claim_request(9, TERM);
    assert_eq!(copies_of(request, &mut producer).await, 1);
}

/// A claim that finds nothing waits for nobody who has its queue in hand, whatever others have in
/// line.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_claim_that_finds_nothing_waits_for_no_lock() {
    let mut scene = Scene::new().await;
    while !scene.caller.claim(9, TERM).await.is_empty() {}
    let other = QueueName::new("other").unwrap();
    let other = NewJob::raw(other, Kind::new("work").unwrap(), "{}");
    let enqueue = EnqueueRequest {
        request: scene.caller.request(),
        jobs: vec![(JobId::generate(), other)].into(),
    };
    scene.caller.store.enqueue(enqueue).await.unwrap();
    let hold = "BEGIN; SELECT FROM leasehold.queue FOR UPDATE";
    scene.witness.batch_execute(hold).await.unwrap();
    let claim = scene.caller.claim_request(9, TERM);
    let claiming = scene.caller.store.claim(claim);
    let claimed = tokio::time::timeout(Duration::from_secs(3), claiming).await;
    assert!(claimed.expect("it waits").unwrap().grants.is_empty());
    // Control arm: one that has something to take waits.
    scene.caller.enqueue(1).await;
    let claim = scene.caller.claim_request(9, TERM);
    let claiming = scene.caller.store.claim(claim);
    let claimed = tokio::time::timeout(Duration::from_millis(300), claiming).await;
    assert!(claimed.is_err(), "the queue is not in hand");
    scene.witness.batch_execute("COMMIT").await.unwrap();
}

/// What is shown with a foreign proof, by another grant or from the deadline on is not kept, also
/// in a grant that has something to keep.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn fenced_progress_is_kept_by_no_grant() {
    let clock = ManualClock::default();
    let mut caller = Caller::new(shared().store(clock.clone()).await).await;
    caller.enqueue(4).await;
    let before = caller.claim(1, TERM).await.remove(0);
    let grant = caller.claim(2, TERM).await.remove(0);
    let after = caller.claim(1, TERM).await.remove(0);
    let (quiet, loud) = (grant.leases[0].token, grant.leases[1].token);
    let show = async |mut beat: Beat, token: FencingToken| {
        let progress = Progress {
            done: 9,
            total: None,
            note: String::new(),
        };
        beat.progress = vec![(token, progress)];
        caller.store.renew(vec![beat]).await.unwrap().remove(0)
    };
    let is_held = |renewal: Renewal| matches!(renewal, Renewal::Held { .. });
    assert!(is_held(show(beat(&grant), loud).await));
    let mut foreign = beat(&grant);
    foreign.nonce = Nonce::draw().unwrap();
    assert_eq!(show(foreign, quiet).await, Renewal::Fenced);
    assert!(is_held(show(beat(&before), quiet).await));
    assert!(is_held(show(beat(&after), quiet).await));
    clock.advance(TERM);
    assert_eq!(show(beat(&grant), quiet).await, Renewal::Fenced);
    let (request, max) = (caller.request(), 9);
    let expired = caller.store.reap(ReapRequest { request, max }).await;
    let shown = expired
        .unwrap()
        .into_iter()
        .filter_map(|expiry| expiry.progress.is_some().then_some(expiry.token));
    assert_eq!(shown.collect::<Vec<_>>(), [loud]);
}

/// A claim takes jobs of any of its queues until they weigh as much as a call may, and then no
/// more; also where the last of them weighs more than was left.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_claim_takes_as_much_as_a_call_may_weigh() {
    const FITS: usize = limits::CALL_BYTES / limits::PAYLOAD_BYTES;
    for (weight, fits) in [
        (limits::PAYLOAD_BYTES, FITS),
        (limits::PAYLOAD_BYTES - 1, FITS + 1),
    ] {
        let mut caller = Caller::new(shared().store(SystemClock).await).await;
        let mut queues = Vec::new();
        for (name, jobs) in [("a", fits - 4), ("b", 6), ("c", 1)] {
            let queue = QueueName::new(name).unwrap();
            let big = NewJob::raw(queue.clone(), Kind::new("work").unwrap(), vec![1; weight]);
            let jobs = (0..jobs).map(|_| (JobId::generate(), big.clone()));
            let enqueue = EnqueueRequest {
                request: caller.request(),
                jobs: Arc::new(jobs.collect()),
            };
            caller.store.enqueue(enqueue).await.unwrap();
            queues.push(queue);
        }
        for expected in [[fits - 4, 4, 0], [0, 2, 1]] {
            let mut claim = caller.claim_request(1_000, TERM);
            let first = claim.queues.remove(0);
            claim.queues.extend(queues.iter().map(|queue| ClaimQueue {
                queue: queue.clone(),
                ..first.clone()
            }));
            let claimed = caller.store.claim(claim).await.unwrap();
            let got = queues.iter().map(|queue| {
                let grants = claimed.grants.iter();
                let grants = grants.filter(|grant| grant.queue == *queue);
                grants.map(|grant| grant.leases.len()).sum()
            });
            assert_eq!(got.collect::<Vec<usize>>(), expected);
        }
    }
}
