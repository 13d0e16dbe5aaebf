//! Locks of others: calls wait, give up in time, or are done again; each counts once.

use std::time::Duration;

use leasehold::clock::{ManualClock, SystemClock};
use leasehold::inspect;
use leasehold::job::{JobState, QueueName};
use leasehold::lease::Lease;
use leasehold::store::{
    Checkpoint, CheckpointRequest, Checkpointed, ClaimQueue, ControlCommand, ControlRequest,
    EnqueueRequest, LeaseSelect, Outcome, PostgresStore, ReapRequest, Renewal, Select,
    SettleRequest, Settlement,
};
use leasehold::{ErrorKind, FencingToken, JobId, Store};
use rustix::process::{Pid, Signal, kill_process};
use tokio_postgres::Client;

use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, answered, beat, complete, job};

const TERM: Duration = Duration::from_secs(60);

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_call_gives_up_in_time_and_its_repeat_counts_once() {
    let server = Server::start(&["fsync=off"]);
    let options = Server::options().patience(Duration::from_millis(100));
    // A connection that calls a function for the first time waits for tables without a limit.
    let store = PostgresStore::with(server.config(), options.connections(1));
    let mut caller = Caller::new(store.await.unwrap()).await;
    caller.enqueue(2).await;
    let other = caller.claim_one(TERM).await.unwrap();
    let settle = SettleRequest {
        request: caller.request(),
        settlements: vec![complete(other)],
    };
    caller.store.settle(settle).await.unwrap();
    let grant = caller.claim(1, TERM).await.remove(0);
    let (held, beat) = (grant.receipt(&grant.leases[0]), beat(&grant));
    caller.store.renew(vec![beat.clone()]).await.unwrap();
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    let tables = "LOCK TABLE leasehold.job, leasehold.grants, leasehold.queue";
    tx.batch_execute(tables).await.unwrap();

    let enqueue = EnqueueRequest {
        request: caller.request(),
        jobs: vec![(JobId::generate(), job())].into(),
    };
    let error = caller.store.enqueue(enqueue.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error:?}");
    let settle = SettleRequest {
        request: caller.request(),
        settlements: vec![complete(held)],
    };
    let error = caller.store.settle(settle.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error:?}");
    let error = caller.store.renew(vec![beat]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Contended, "{error:?}");
    tx.rollback().await.unwrap();

    // An older request of the lane is not applied any more; the last one is, once.
    assert!(caller.store.settle(settle.clone()).await.unwrap()[0].is_held());
    assert!(caller.store.settle(settle).await.unwrap()[0].is_held());
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.enqueued, ledger.completed), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_deadlock_is_not_the_callers_business() {
    let server = Server::start(&["fsync=off", "deadlock_timeout=2s"]);
    let options = Server::options();
    let store = PostgresStore::with(server.config(), options).await.unwrap();
    let mut caller = Caller::new(store).await;
    let other = QueueName::new("other").unwrap();
    let mut elsewhere = job();
    elsewhere.queue = other.clone();
    let enqueue = EnqueueRequest {
        request: caller.request(),
        jobs: vec![(JobId::generate(), job()), (JobId::generate(), elsewhere)].into(),
    };
    caller.store.enqueue(enqueue).await.unwrap();

    // Somebody locks the second queue, then the first; the claim locks them in order.
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    tx.batch_execute("SET LOCAL deadlock_timeout = '1h'")
        .await
        .unwrap();
    let lock = "SELECT FROM leasehold.queue WHERE id = (SELECT {} FROM leasehold.queue) FOR UPDATE";
    tx.batch_execute(&lock.replace("{}", "max(id)"))
        .await
        .unwrap();
    let mut request = caller.claim_request(2, TERM);
    request.queues.push(ClaimQueue {
        queue: other,
        ..request.queues[0].clone()
    });
    let claiming = tokio::spawn({
        let store = caller.store.clone();
        async move { store.claim(request).await }
    });
    let observer = server.client().await;
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    while observer
        .query_one(waiting, &[])
        .await
        .unwrap()
        .get::<_, i64>(0)
        == 0
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tx.batch_execute(&lock.replace("{}", "min(id)"))
        .await
        .unwrap();
    tx.rollback().await.unwrap();

    let claimed = claiming.await.unwrap().unwrap();
    let leases: usize = claimed.grants.iter().map(|grant| grant.leases.len()).sum();
    assert_eq!(leases, 2);
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.granted, ledger.live), (2, 2));
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'";
    while server
        .client()
        .await
        .query_one(deadlocks, &[])
        .await
        .unwrap()
        .get::<_, i64>(0)
        == 0
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Grants that are overdue, one lease in each, and a hand on the oldest of them: a settlement that
/// has locked it and is not done yet.
struct InHand {
    caller: Caller,
    hand: Client,
    oldest: FencingToken,
}

impl InHand {
    async fn new(server: &Server, grants: usize) -> Self {
        let clock = ManualClock::default();
        let options = Server::options()
            .patience(Duration::from_secs(5))
            .clock(clock.clone());
        let store = PostgresStore::with(server.config(), options).await.unwrap();
        let mut caller = Caller::new(store).await;
        caller.enqueue(grants).await;
        let oldest = caller.claim(1, TERM).await[0].id;
        for _ in 1..grants {
            caller.claim_one(TERM).await.unwrap();
        }
        clock.advance(TERM);
        let hand = server.client().await;
        Self {
            caller,
            hand,
            oldest,
        }
    }

    async fn take(&self) {
        let id = self.oldest;
        let take = format!("BEGIN; SELECT FROM leasehold.job WHERE token = {id} FOR UPDATE");
        self.hand.batch_execute(&take).await.unwrap();
    }

    async fn let_go(&self) {
        self.hand.batch_execute("COMMIT").await.unwrap();
    }

    fn reap(&mut self) -> ReapRequest {
        let request = self.caller.request();
        ReapRequest { request, max: 100 }
    }
}

/// A reaper takes what nobody has in hand, and waits for no one: neither is a lease counted twice,
/// nor can one who is frozen keep the others from theirs.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_reap_passes_over_what_somebody_has_in_hand() {
    let server = Server::start(&["fsync=off"]);
    let mut scene = InHand::new(&server, 4).await;
    scene.take().await;
    let reap = scene.reap();
    let expired = scene.caller.store.reap(reap).await.unwrap();
    assert_eq!(expired.len(), 3);
    assert!(expired.iter().all(|end| end.token != scene.oldest));
    // A claim does the same.
    let request = scene.caller.claim_request(9, TERM);
    let claimed = scene.caller.store.claim(request).await.unwrap();
    assert_eq!((claimed.expired.len(), claimed.grants.len()), (0, 1));
    scene.let_go().await;
    let reap = scene.reap();
    let expired = scene.caller.store.reap(reap).await.unwrap();
    let tokens: Vec<_> = expired.iter().map(|end| end.token).collect();
    assert_eq!(tokens, [scene.oldest]);
    let ledger = inspect::ledger(&scene.caller.store).await.unwrap();
    assert_eq!((ledger.expired_deadline, ledger.live), (4, 3));
}

/// What is let go of in a moment is waited for: the oldest are not passed over for nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_reap_waits_a_moment_for_what_somebody_has_in_hand() {
    let server = Server::start(&["fsync=off"]);
    let observer = server.client().await;
    let has_looked = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    // On a busy machine the moment may be over before the hand is gone. A reaper that does not wait
    // never finds it gone.
    for _ in 0..20 {
        let mut scene = InHand::new(&server, 2).await;
        scene.take().await;
        let reap = scene.reap();
        let store = scene.caller.store.clone();
        let reaping = tokio::spawn(async move { store.reap(reap).await });
        while !reaping.is_finished() {
            let row = observer.query_one(has_looked, &[]).await.unwrap();
            if row.get(0) {
                break;
            }
        }
        scene.let_go().await;
        let expired = reaping.await.unwrap().unwrap();
        let tokens: Vec<_> = expired.iter().map(|end| end.token).collect();
        if tokens.len() == 2 {
            assert_eq!(tokens[0], scene.oldest);
            return;
        }
    }
    panic!("it never waited");
}

/// A call that meets a lease which somebody is ending waits, and finds it ended: nothing slips
/// between the test of a receipt and its effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_lease_that_ends_meanwhile_is_fenced() {
    let server = Server::start(&["fsync=off"]);
    let observer = server.client().await;
    let is_waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted";
    for call in ["renew", "complete", "bury", "checkpoint", "revoke"] {
        let store = PostgresStore::with(server.config(), Server::options()).await;
        let mut caller = Caller::new(store.unwrap()).await;
        caller.enqueue(1).await;
        let grant = caller.claim(1, TERM).await.remove(0);
        let id = grant.id;
        let mut db = server.client().await;
        let tx = db.transaction().await.unwrap();
        for row in ["job WHERE token", "grants WHERE id"] {
            let end = format!("DELETE FROM leasehold.{row} = {id}");
            assert_eq!(tx.execute(&end, &[]).await.unwrap(), 1);
        }
        let (request, store) = (caller.request(), caller.store.clone());
        let calling = tokio::spawn(async move {
            let receipt = grant.receipt(&grant.leases[0]);
            let settle = async |outcome| {
                let settlements = vec![Settlement {
                    receipt: receipt.clone(),
                    outcome,
                }];
                let request = SettleRequest {
                    request,
                    settlements,
                };
                store.settle(request).await.unwrap()[0].is_fenced()
            };
            match call {
                "renew" => store.renew(vec![beat(&grant)]).await.unwrap() == [Renewal::Fenced],
                "complete" => settle(Outcome::Complete { result: None }).await,
                "bury" => {
                    let reason = "no more".to_owned();
                    settle(Outcome::Bury { reason }).await
                }
                "revoke" => {
                    let job = LeaseSelect::Job(grant.leases[0].job.id);
                    let request = ControlRequest {
                        request,
                        actor: "operator".to_owned(),
                        reason: "a test".to_owned(),
                        command: ControlCommand::Revoke(job),
                    };
                    store.control(request).await.unwrap().done == 0
                }
                _ => {
                    let checkpoints = vec![Checkpoint {
                        receipt: receipt.clone(),
                        seq: 1,
                        bytes: "half".into(),
                    }];
                    let request = CheckpointRequest {
                        request,
                        checkpoints,
                    };
                    store.checkpoint(request).await.unwrap() == [Checkpointed::Fenced]
                }
            }
        });
        while !calling.is_finished() {
            let row = observer.query_one(is_waiting, &[]).await.unwrap();
            if row.get(0) {
                break;
            }
        }
        tx.commit().await.unwrap();
        assert!(calling.await.unwrap(), "{call}");
    }
}

/// Who looks at a job waits for nobody who has it in hand.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_look_waits_for_no_lock() {
    let mut caller = Caller::new(shared().store(SystemClock).await).await;
    let ids = caller.enqueue(1).await;
    let grant = caller.claim(1, TERM).await.remove(0);
    let hand = shared().client().await;
    let take = format!(
        "BEGIN; SELECT FROM leasehold.job WHERE token = {} FOR UPDATE",
        grant.id
    );
    hand.batch_execute(&take).await.unwrap();
    let looking = inspect::job(&caller.store, ids[0]);
    let view = tokio::time::timeout(Duration::from_secs(3), looking).await;
    let view = view.expect("it waits").unwrap().unwrap();
    assert_eq!(view.state, JobState::Leased);
    // Control arm: a command waits.
    let cancel = ControlRequest {
        request: caller.request(),
        actor: "operator".to_owned(),
        reason: "a test".to_owned(),
        command: ControlCommand::Cancel(Select::Job(ids[0])),
    };
    let cancelling = caller.store.control(cancel);
    let cancelled = tokio::time::timeout(Duration::from_millis(300), cancelling).await;
    assert!(cancelled.is_err(), "the job is not in hand");
    hand.batch_execute("COMMIT").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn copies_of_a_request_that_run_at_once_count_once() {
    let mut caller = Caller::new(shared().store(SystemClock).await).await;
    for round in 1..=20 {
        let enqueue = EnqueueRequest {
            request: caller.request(),
            jobs: vec![(JobId::generate(), job())].into(),
        };
        let copies: Vec<_> = (0..4)
            .map(|_| {
                let (store, enqueue) = (caller.store.clone(), enqueue.clone());
                tokio::spawn(async move { answered(|| store.enqueue(enqueue.clone())).await })
            })
            .collect();
        let mut answers = Vec::new();
        for copy in copies {
            answers.push(copy.await.unwrap());
        }
        assert!(answers.iter().all(|answer| *answer == answers[0]));
        let ledger = inspect::ledger(&caller.store).await.unwrap();
        assert_eq!(ledger.enqueued, round);
    }
}

/// Another copy of a request, in a backend that stands still while the request is answered, what it
/// stored is done and gone, and the lane goes on: it is refused, not applied a second time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_copy_that_was_overtaken_is_refused() {
    let server = Server::start(&["fsync=off"]);
    let hand = server.client().await;
    let backend = "SELECT pid FROM pg_locks WHERE NOT granted AND locktype = 'advisory'";
    // The lane's first request, and one that has another before it.
    for earlier in [0, 1] {
        let options = Server::options().patience(Duration::from_secs(600));
        let store = PostgresStore::with(server.config(), options).await;
        let mut caller = Caller::new(store.unwrap()).await;
        let namespace = caller.store.namespace().to_string();
        let mut maker = Caller::new(caller.store.clone()).await;
        maker.enqueue(1).await;
        let first = maker.claim_one(TERM).await.unwrap();
        let settle = SettleRequest {
            request: maker.request(),
            settlements: vec![complete(first)],
        };
        maker.store.settle(settle).await.unwrap();
        for _ in 0..earlier {
            assert!(caller.claim_one(TERM).await.is_none());
        }
        let enqueue = EnqueueRequest {
            request: caller.request(),
            jobs: vec![(JobId::generate(), job())].into(),
        };
        // The copy has looked for its answer, and waits for the locks of the queue's epochs.
        let epochs = |lock: &str| {
            format!(
                "SELECT {lock}('leasehold.queue'::regclass::oid::integer, id * 2 + parity)
                 FROM leasehold.queue, generate_series(0, 1) AS parity WHERE namespace = '{namespace}'"
            )
        };
        hand.batch_execute(&epochs("pg_advisory_lock"))
            .await
            .unwrap();
        let copy = tokio::spawn({
            let (store, enqueue) = (caller.store.clone(), enqueue.clone());
            async move { store.enqueue(enqueue).await }
        });
        let pid = loop {
            if let Some(row) = hand.query_opt(backend, &[]).await.unwrap() {
                break Pid::from_raw(row.get(0)).unwrap();
            }
        };
        kill_process(pid, Signal::STOP).unwrap();
        hand.batch_execute(&epochs("pg_advisory_unlock"))
            .await
            .unwrap();
        // The other copy is answered, and its job is done.
        assert_eq!(caller.store.enqueue(enqueue).await.unwrap().len(), 1);
        let held = caller.claim_one(TERM).await.unwrap();
        let settle = SettleRequest {
            request: caller.request(),
            settlements: vec![complete(held)],
        };
        assert!(caller.store.settle(settle).await.unwrap()[0].is_held());
        kill_process(pid, Signal::CONT).unwrap();
        let refused = copy.await.unwrap();
        assert!(refused.is_err(), "{earlier}: {refused:?}");
        let ledger = inspect::ledger(&caller.store).await.unwrap();
        assert_eq!((ledger.enqueued, ledger.completed), (2, 2), "{earlier}");
        assert!(caller.claim_one(TERM).await.is_none());
    }
}

/// A queue that is removed while a claim waits for its lock is none of the claim's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_claim_beside_the_removal_of_a_queue_finds_nothing() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let namespace = caller.store.namespace().to_string();
    caller.enqueue(1).await;
    let mut hand = server.client().await;
    let tx = hand.transaction().await.unwrap();
    let take = "SELECT FROM leasehold.queue FOR UPDATE";
    tx.batch_execute(take).await.unwrap();
    let request = caller.claim_request(1, TERM);
    let claiming = tokio::spawn({
        let store = caller.store.clone();
        async move { store.claim(request).await }
    });
    let observer = server.client().await;
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    while observer
        .query_one(waiting, &[])
        .await
        .unwrap()
        .get::<_, i64>(0)
        == 0
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Somebody has taken and completed its last job meanwhile.
    let remove = format!(
        "DELETE FROM leasehold.job;
         SELECT leasehold.remove_1('{namespace}', NULL, NULL, NULL, NULL, 'ann', 'unused', 'default', 'remove')"
    );
    tx.batch_execute(&remove).await.unwrap();
    tx.commit().await.unwrap();
    let claimed = claiming.await.unwrap().unwrap();
    assert_eq!(claimed.grants, []);
    let left = observer.query("SELECT FROM leasehold.head", &[]).await;
    assert_eq!(left.unwrap().len(), 0);
}

/// What a claim did and that it did it must be stored together: otherwise a repeat after a cut
/// connection would claim a second time.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_claim_is_remembered_in_the_transaction_that_carries_it_out() {
    let mut caller = Caller::new(shared().store(SystemClock).await).await;
    caller.enqueue(1).await;
    let request = caller.claim_request(1, TERM);
    let session = request.request.session;
    let claimed = caller.store.claim(request).await.unwrap();
    let grant = claimed.grants[0].id.get() as i64;
    let session = u128::from_be_bytes(*session.as_bytes());
    let session = format!("{session:032x}");
    let rows = shared()
        .client()
        .await
        .query(
            "SELECT xmin::text FROM leasehold.lane WHERE session = $1::text::uuid
             UNION ALL SELECT xmin::text FROM leasehold.grants WHERE id = $2",
            &[&session, &grant],
        )
        .await
        .unwrap();
    let mut transactions: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(transactions.len(), 2);
    transactions.dedup();
    assert_eq!(transactions.len(), 1, "{transactions:?}");
}

/// Settlements of one grant that have waited are all held, and what is kept of the jobs is all
/// there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn settlements_of_one_grant_may_wait_for_each_other() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    let mut other = Caller::new(caller.store.clone()).await;
    let jobs = (0..4).map(|n| {
        let mut new = job();
        new.payload = format!("\"{}\"", "x".repeat(100 * n)).into();
        (JobId::generate(), new)
    });
    let enqueue = EnqueueRequest {
        request: caller.request(),
        jobs: jobs.collect::<Vec<_>>().into(),
    };
    caller.store.enqueue(enqueue.clone()).await.unwrap();
    let grant = caller.claim(4, TERM).await.remove(0);
    let bury = |caller: &mut Caller, leases: &[Lease]| {
        let settlements = leases.iter().map(|lease| Settlement {
            receipt: grant.receipt(lease),
            outcome: Outcome::Bury {
                reason: "no more".into(),
            },
        });
        let settle = SettleRequest {
            request: caller.request(),
            settlements: settlements.collect(),
        };
        let store = caller.store.clone();
        tokio::spawn(async move { store.settle(settle).await })
    };
    let mut db = server.client().await;
    let observer = server.client().await;
    let tx = db.transaction().await.unwrap();
    let take = "SELECT FROM leasehold.job FOR UPDATE";
    tx.batch_execute(take).await.unwrap();
    let waiting = async |calls: i64| {
        let count = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        while observer
            .query_one(count, &[])
            .await
            .unwrap()
            .get::<_, i64>(0)
            < calls
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let most = bury(&mut caller, &grant.leases[..3]);
    waiting(1).await;
    let last = bury(&mut other, &grant.leases[3..]);
    waiting(2).await;
    tx.commit().await.unwrap();
    for settled in [most, last] {
        let verdicts = settled.await.unwrap().unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    }
    for (id, new) in enqueue.jobs.iter() {
        let view = inspect::job(&caller.store, *id).await.unwrap().unwrap();
        assert_eq!(
            (view.state, &view.job.payload),
            (JobState::Dead, &new.payload)
        );
    }
}
