//! Those who sleep: each is woken as often as another, none takes another for a producer, and none
//! writes.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use leasehold::clock::SystemClock;
use leasehold::store::{Outcome, SettleRequest, Settlement};
use leasehold::{Client, Context, Failure, NewJob, Store as _};
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, NoTls};

use crate::postgres::paying::Pay;
use crate::postgres::server::Server;
use crate::postgres::{Caller, job};

/// A job wakes one of those who sleep, whichever slots they have, and any as often as another.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn no_sleeper_is_woken_for_the_others() {
    const JOBS: usize = 300;
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(1).await;
    let (sender, mut notes) = mpsc::unbounded_channel();
    let slots = [0, 1, 9];
    let mut sleepers = Vec::new();
    for slot in slots {
        let (db, mut connection) = server.config().connect(NoTls).await.unwrap();
        let sender = sender.clone();
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(note) = message {
                    let _ = sender.send(note.channel().to_owned());
                }
            }
        });
        let sleep = format!(
            "LISTEN leasehold_leasehold_{slot};
             SELECT pg_advisory_lock('leasehold.lane'::regclass::oid::integer, leasehold.room_1(namespace, name) | {slot})
             FROM leasehold.queue"
        );
        db.batch_execute(&sleep).await.unwrap();
        sleepers.push(db);
    }
    let db = server.client().await;
    let wake = "SELECT leasehold.wake_1(namespace, id, name, 1, false) FROM leasehold.queue";
    let mut woken = [0; 3];
    for _ in 0..JOBS {
        db.batch_execute(wake).await.unwrap();
        let channel = notes.recv().await.unwrap();
        let is_its = |slot: &i32| channel == format!("leasehold_leasehold_{slot}");
        woken[slots.iter().position(is_its).unwrap()] += 1;
    }
    // A third of them each, and by chance never so few.
    assert!(woken.iter().all(|times| *times > JOBS / 5), "{woken:?}");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(notes.try_recv().is_err(), "two are woken for one job");
    // As many as there are jobs.
    db.batch_execute(&wake.replace("1, false", "2, false"))
        .await
        .unwrap();
    let (first, second) = (notes.recv().await, notes.recv().await);
    assert_ne!(first, second);
}

/// A connection that has room for the queues that there are, and what it is told.
async fn sleeper(
    server: &Server,
    slot: u8,
) -> (tokio_postgres::Client, mpsc::UnboundedReceiver<String>) {
    let (db, mut connection) = server.config().connect(NoTls).await.unwrap();
    let (sender, notes) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(note) = message {
                let _ = sender.send(note.payload().to_owned());
            }
        }
    });
    let sleep = format!(
        "LISTEN leasehold_leasehold_{slot};
         SELECT pg_advisory_lock('leasehold.lane'::regclass::oid::integer, leasehold.room_1(namespace, name) | {slot})
         FROM leasehold.queue"
    );
    db.batch_execute(&sleep).await.unwrap();
    (db, notes)
}

/// A job that joins its line at the next claim is somebody's to claim.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn jobs_with_a_key_wake_a_sleeper_when_the_callers_transaction_commits() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(1).await;
    let mut db = server.client().await;
    let (sleeper, mut notes) = sleeper(&server, 3).await;
    let namespace = caller.store.namespace().to_string();
    let sql = format!(
        r#"SELECT leasehold.enqueue('default', 'work', '1', '{{"exclusive": "sql", "namespace": "{namespace}"}}')"#
    );
    for in_sql in [false, true] {
        let tx = db.transaction().await.unwrap();
        if in_sql {
            tx.execute(&sql, &[]).await.unwrap();
        } else {
            let keyed = vec![job().exclusive("rust").unwrap()];
            caller.store.enqueue_in(&tx, keyed).await.unwrap();
        }
        tx.commit().await.unwrap();
        // It is told of all that was committed before it answers.
        sleeper.batch_execute("SELECT 1").await.unwrap();
        let note = notes.try_recv();
        assert_eq!(
            note.as_deref(),
            Ok(&*format!("0 1 {namespace} default")),
            "in SQL: {in_sql}"
        );
        assert!(notes.try_recv().is_err());
    }
    // One that is due in an hour wakes nobody twice.
    let tx = db.transaction().await.unwrap();
    let mut later = job().exclusive("later").unwrap();
    later.delay = Duration::from_secs(3600);
    caller.store.enqueue_in(&tx, vec![later]).await.unwrap();
    tx.commit().await.unwrap();
    sleeper.batch_execute("SELECT 1").await.unwrap();
    assert!(notes.try_recv().is_err());
}

/// Whoever listens without room for a queue is told nothing: where nobody sleeps, no notification
/// is sent.
#[tokio::test]
#[ignore = "needs postgresql: ./tests/run"]
async fn nothing_is_sent_where_nobody_sleeps() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(1).await;
    let (listener, mut notes) = sleeper(&server, 3).await;
    let all = (0..64).fold(String::new(), |all, slot| {
        format!("{all}LISTEN leasehold_leasehold_{slot};")
    });
    listener.batch_execute(&all).await.unwrap();
    let mut work = async || {
        caller.enqueue(2).await;
        let held = caller.claim_one(Duration::from_secs(60)).await.unwrap();
        let settle = SettleRequest {
            request: caller.request(),
            settlements: vec![Settlement {
                receipt: held,
                outcome: Outcome::Retry {
                    delay: Duration::ZERO,
                    reason: "again".into(),
                },
            }],
        };
        caller.store.settle(settle).await.unwrap();
    };
    // The control: it is told while it has room.
    work().await;
    listener.batch_execute("SELECT 1").await.unwrap();
    assert!(notes.try_recv().is_ok());
    while notes.try_recv().is_ok() {}
    listener
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .await
        .unwrap();
    work().await;
    listener.batch_execute("SELECT 1").await.unwrap();
    assert!(notes.try_recv().is_err());
}

/// How often somebody who looks takes others who look for somebody who puts jobs there.
async fn taken_for_producers(server: &Server, looks: usize) -> usize {
    let mut lookers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let db = server.client().await;
        lookers.spawn(async move {
            let look = "SELECT l.busy FROM leasehold.queue, leasehold.look_1(namespace, ARRAY[name], true) AS l";
            let mut busy = 0;
            for _ in 0..looks {
                let row = db.query_one(look, &[]).await.unwrap();
                busy += usize::from(row.get::<_, bool>(0));
            }
            busy
        });
    }
    lookers.join_all().await.into_iter().sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn sleepers_do_not_take_each_other_for_producers() {
    let server = Server::start(&["fsync=off"]);
    let mut caller = Caller::new(server.store(SystemClock).await).await;
    caller.enqueue(1).await;
    assert_eq!(taken_for_producers(&server, 1_000).await, 0);
    // Control arm: without a turn, they do.
    let db = server.client().await;
    let text = "SELECT pg_get_functiondef('leasehold.look_1'::regproc)";
    let text: String = db.query_one(text, &[]).await.unwrap().get(0);
    let turn = "pg_advisory_xact_lock(";
    assert!(text.contains(turn), "{text}");
    db.batch_execute(&text.replace(turn, "coalesce("))
        .await
        .unwrap();
    for _ in 0..20 {
        if taken_for_producers(&server, 1_000).await > 0 {
            return;
        }
    }
    panic!("the test sees nothing");
}

/// Eight processes with nothing to do. For how many seconds: `LEASEHOLD_IDLE_SECONDS`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn workers_with_nothing_to_do_hardly_write() {
    const PROCESSES: usize = 8;
    let seconds = std::env::var("LEASEHOLD_IDLE_SECONDS");
    let seconds = seconds.map_or(20, |seconds| seconds.parse().unwrap());
    let server = Server::start(&["fsync=off"]);
    let options = Server::options();
    let db = server.client().await;
    // Every transaction that writes has a number, and this statement has none.
    let written = async || -> i64 {
        let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
        db.query_one(next, &[]).await.unwrap().get(0)
    };
    let mut clients = Vec::new();
    for _ in 0..PROCESSES {
        let store = leasehold::store::PostgresStore::with(server.config(), options.clone()).await;
        clients.push(Client::new(Arc::new(store.unwrap())));
    }
    let job = || NewJob::of(&Pay::default()).unwrap();
    clients[0]
        .enqueue_many((0..PROCESSES).map(|_| job()))
        .await
        .unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(());
    let mut workers = tokio::task::JoinSet::new();
    for client in &clients {
        let worker = client
            .worker()
            .handle(|_: Pay, _: Context| async { Ok::<_, Failure>(()) });
        let mut stopped = stopped.clone();
        let until = async move {
            let _ = stopped.changed().await;
        };
        workers.spawn(async move { worker.run_until(until).await.unwrap() });
    }
    while clients[0].ledger().await.unwrap().completed < PROCESSES as u64 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = written().await;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let wrote = written().await - before;
    println!("{PROCESSES} idle processes: {wrote} transactions that write in {seconds} s");
    assert!(wrote * 2 <= seconds as i64, "{wrote} in {seconds} s");
    // They are awake at once.
    let start = std::time::Instant::now();
    clients[0].enqueue(job()).await.unwrap();
    while clients[0].ledger().await.unwrap().completed <= PROCESSES as u64 {
        assert!(start.elapsed() < Duration::from_secs(10), "nobody wakes");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(stop);
    while let Some(report) = workers.join_next().await {
        report.unwrap();
    }
}
