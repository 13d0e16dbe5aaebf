//! What a prune reads and holds is bounded by what it deletes, not by what there is to delete.

use std::time::Duration;

use leasehold::clock::{Clock as _, ManualClock, SystemClock};
use leasehold::job::QueueName;
use leasehold::store::{
    Checkpoint, CheckpointRequest, EnqueueRequest, PruneRequest, SettleRequest,
};
use leasehold::{JobId, Store, inspect};

use crate::postgres::server::{Server, shared};
use crate::postgres::{Caller, complete, job};

/// Rows of a table that the transaction has read.
async fn read(tx: &tokio_postgres::Transaction<'_>, table: &str) -> i64 {
    let read = "SELECT coalesce(idx_tup_fetch, 0) + coalesce(seq_tup_read, 0)
                FROM pg_stat_xact_user_tables WHERE schemaname = 'leasehold' AND relname = $1";
    tx.query_one(read, &[&table]).await.unwrap().get(0)
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_prune_reads_little_of_a_long_backlog() {
    const LONG: i64 = 20_000;
    let server = Server::start(&["fsync=off", "autovacuum=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(1).await;
    let db = server.client().await;
    let fill = format!(
        "INSERT INTO leasehold.job (id, queue, version, seq, place, enqueued_at, run_at, settled_at, keep_until,
                                    max_expiries, weight, state, line, kind, payload)
         SELECT gen_random_uuid(), q.id, 1, n, n, n, n, n, {LONG} - n, 5, 0, 3, 9, 'work', ''
         FROM leasehold.queue q, generate_series(1, {LONG}) AS n;
         INSERT INTO leasehold.unique_key (queue, key, job, until)
         SELECT q.id, int8send(n), gen_random_uuid(), {LONG} - n
         FROM leasehold.queue q, generate_series(1, {LONG}) AS n"
    );
    db.batch_execute(&fill).await.unwrap();
    // As long as nobody has counted the rows, and after somebody has.
    for analysed in [false, true] {
        if analysed {
            db.batch_execute("ANALYZE").await.unwrap();
        }
        // Of a connection of its own: what the one before has read is not forgotten at once.
        let mut own = server.client().await;
        let tx = own.transaction().await.unwrap();
        let prune = "SELECT p.pruned FROM leasehold.queue AS q CROSS JOIN LATERAL
                     leasehold.prune_1(q.namespace, NULL, NULL, NULL, NULL, 0, 10) AS p";
        let gone = tx.query_one(prune, &[]).await.unwrap();
        assert_eq!(gone.get::<_, i64>(0), 10);
        for table in ["job", "unique_key"] {
            let rows = read(&tx, table).await;
            assert!(rows <= 100, "{table}: {rows} of {LONG}");
            // Control arm: the first of them by another order are not found without reading them
            // all.
            let all = format!("SELECT FROM leasehold.{table} ORDER BY md5(ctid::text) LIMIT 10");
            tx.query(&all, &[]).await.unwrap();
            assert!(read(&tx, table).await >= LONG - 20, "this test cannot fail");
        }
    }
}

/// A prune locks only the queues that have something to prune, and keeps no claim waiting.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_prune_locks_little() {
    let server = Server::start(&["fsync=off"]);
    let clock = ManualClock::default();
    let mut caller = Caller::new(server.store(clock.clone()).await).await;
    let jobs = (0..20).map(|n| {
        let mut new = job().retention(Duration::from_secs(if n < 2 { 1 } else { 60 }));
        new.queue = QueueName::new(format!("q{n}")).unwrap();
        (JobId::generate(), new)
    });
    let enqueue = EnqueueRequest {
        jobs: jobs.collect::<Vec<_>>().into(),
        request: caller.request(),
    };
    caller.store.enqueue(enqueue).await.unwrap();
    for n in 0..20 {
        let mut claim = caller.claim_request(1, Duration::from_secs(60));
        claim.queues[0].queue = QueueName::new(format!("q{n}")).unwrap();
        let grant = caller.store.claim(claim).await.unwrap().grants.remove(0);
        let settle = SettleRequest {
            request: caller.request(),
            settlements: vec![complete(grant.receipt(&grant.leases[0]))],
        };
        caller.store.settle(settle).await.unwrap();
    }
    clock.advance(Duration::from_secs(10));
    let mut own = server.client().await;
    let tx = own.transaction().await.unwrap();
    let prune = "SELECT p.pruned FROM (SELECT DISTINCT namespace FROM leasehold.queue) AS q CROSS JOIN LATERAL
                 leasehold.prune_1(q.namespace, $1, NULL, NULL, NULL, 0, 10) AS p";
    let now = clock.now().as_micros().cast_signed();
    let gone = tx.query_one(prune, &[&now]).await.unwrap();
    assert_eq!(gone.get::<_, i64>(0), 2);
    let held =
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()";
    let held: i64 = tx.query_one(held, &[]).await.unwrap().get(0);
    assert_eq!(held, 2, "one lock for each queue with something to prune");
    let other = server.client().await;
    let row = "SELECT FROM leasehold.queue FOR UPDATE NOWAIT";
    other.batch_execute(row).await.unwrap();
    // Control arm: a claim does lock the row.
    tx.batch_execute("SELECT FROM leasehold.queue FOR NO KEY UPDATE")
        .await
        .unwrap();
    other.batch_execute(row).await.unwrap_err();
    tx.commit().await.unwrap();

    // Then the counts of all are added up, of each queue in a transaction of its own.
    for _ in 0..3 {
        clock.advance(Duration::from_secs(1));
        let prune = PruneRequest {
            request: caller.request(),
            overdue: Duration::ZERO,
            max: 10,
        };
        assert_eq!(caller.store.prune(prune).await.unwrap(), 0);
    }
    let left = "SELECT count(*) FROM leasehold.tally";
    let left: i64 = other.query_one(left, &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
    let ledger = inspect::ledger(&caller.store).await.unwrap();
    assert_eq!((ledger.completed, ledger.pruned), (20, 2));
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn keys_past_their_window_go_in_transactions_of_so_many() {
    let server = Server::start(&["fsync=off", "autovacuum=off"]);
    let clock = ManualClock::default();
    let mut caller = Caller::new(server.store(clock.clone()).await).await;
    let window = Duration::from_secs(60);
    let jobs = (0..10).map(|n| {
        (
            JobId::generate(),
            job().unique_for(format!("{n}"), window).unwrap(),
        )
    });
    let enqueue = EnqueueRequest {
        jobs: jobs.collect::<Vec<_>>().into(),
        request: caller.request(),
    };
    caller.store.enqueue(enqueue).await.unwrap();
    clock.advance(window);
    // What a statement deletes is counted by the statement.
    let db = server.client().await;
    db.batch_execute(
        "CREATE TABLE public.steps (keys bigint);
         CREATE FUNCTION public.step() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN INSERT INTO public.steps SELECT count(*) FROM old; RETURN NULL; END $$;
         CREATE TRIGGER step AFTER DELETE ON leasehold.unique_key REFERENCING OLD TABLE AS old
         FOR EACH STATEMENT EXECUTE FUNCTION public.step()",
    )
    .await
    .unwrap();
    let prune = PruneRequest {
        request: caller.request(),
        overdue: Duration::ZERO,
        max: 3,
    };
    assert_eq!(caller.store.prune(prune).await.unwrap(), 0);
    let steps =
        "SELECT array_agg(keys ORDER BY keys DESC), (SELECT count(*) FROM leasehold.unique_key)
                 FROM public.steps WHERE keys > 0";
    let row = db.query_one(steps, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [3, 3, 3, 1]);
    assert_eq!(row.get::<_, i64>(1), 0);
}

#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_noted_of_a_lease_goes_with_it() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(4).await;
    let grant = caller.claim(4, Duration::from_secs(60)).await.remove(0);
    let receipts: Vec<_> = grant
        .leases
        .iter()
        .map(|lease| grant.receipt(lease))
        .collect();
    let checkpoints = receipts.iter().map(|receipt| Checkpoint {
        receipt: receipt.clone(),
        seq: 1,
        bytes: vec![7; 1_000].into(),
    });
    let request = CheckpointRequest {
        checkpoints: checkpoints.collect(),
        request: caller.request(),
    };
    caller.store.checkpoint(request).await.unwrap();
    let db = server.client().await;
    let notes = async || -> i64 {
        let count = "SELECT count(*) FROM leasehold.job WHERE checkpoint IS NOT NULL";
        db.query_one(count, &[]).await.unwrap().get(0)
    };
    assert_eq!(notes().await, 4);
    for (ended, left) in [(&receipts[..3], 1), (&receipts[3..], 0)] {
        let settle = SettleRequest {
            request: caller.request(),
            settlements: ended.iter().cloned().map(complete).collect(),
        };
        let verdicts = caller.store.settle(settle).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
        assert_eq!(notes().await, left);
    }
}

/// One slow job keeps nothing of the others of its grant.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn what_is_stored_of_a_job_goes_with_its_lease() {
    const LARGE: usize = 50_000;
    let mut caller = Caller::new(shared().store(SystemClock).await).await;
    let jobs = (0..4).map(|n| {
        let mut new = job();
        new.payload = vec![n; LARGE].into();
        (JobId::generate(), new)
    });
    let enqueue = EnqueueRequest {
        request: caller.request(),
        jobs: jobs.collect::<Vec<_>>().into(),
    };
    caller.store.enqueue(enqueue.clone()).await.unwrap();
    let grant = caller.claim(4, Duration::from_secs(60)).await.remove(0);
    let db = shared().client().await;
    let stored = async || -> usize {
        let size =
            "SELECT sum(octet_length(payload))::integer FROM leasehold.job WHERE lease_of = $1";
        let id = grant.id.get() as i64;
        let row = db.query_one(size, &[&id]).await.unwrap();
        row.get::<_, i32>(0) as usize / LARGE
    };
    assert_eq!(stored().await, 4);
    // The first and the last stay.
    for (ended, left) in [(1, 3), (2, 2)] {
        let settle = SettleRequest {
            request: caller.request(),
            settlements: vec![complete(grant.receipt(&grant.leases[ended]))],
        };
        let verdicts = caller.store.settle(settle).await.unwrap();
        assert!(verdicts[0].is_held());
        assert_eq!(stored().await, left);
    }
    for at in [0, 3] {
        let view = inspect::job(&caller.store, enqueue.jobs[at].0).await;
        let view = view.unwrap().unwrap();
        assert_eq!(view.job.payload, enqueue.jobs[at].1.payload);
    }
}
