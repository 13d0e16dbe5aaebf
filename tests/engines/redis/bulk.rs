//! Jobs in bulk: a transaction in which they go past the scripts. They come back as they went in, and what
//! keeps the script from running keeps them out.
//!
//! Which way a call went is told by the number of transactions that the server ran.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold::clock::{Clock as _, ManualClock};
use leasehold::job::Namespace;
use leasehold::store::{Enqueued, RedisOptions, RedisStore, acl_rule};
use leasehold::{ErrorKind, JobId, NewJob};
use leasehold_conformance::{Driver, Held, ManualFixture, job};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::redis::support::proxy::Proxy;
use crate::redis::support::redis::Standalone;

const TRANSACTION: [&str; 4] = ["multi", "exec", "rpushx", "renamenx"];

/// What the scripts of a bulk need, and no other script of an enqueue.
const INSIDE: [&str; 3] = ["llen", "lindex", "lset"];

struct Scene {
    server: Standalone,
    clock: ManualClock,
    d: Driver,
}

impl Scene {
    async fn new() -> Self {
        Self::on(Standalone::start(&[])).await
    }

    async fn on(server: Standalone) -> Self {
        let url = server.url().to_owned();
        Self::by(&url, server).await
    }

    /// All plain jobs go in bulk. The partition is there.
    async fn by(url: &str, server: Standalone) -> Self {
        let clock = ManualClock::default();
        let options = RedisOptions::new(url)
            .namespace(namespace())
            .bulk(1)
            .clock(clock.clone());
        let store = RedisStore::open(options).unwrap();
        let d = Driver::new(Arc::new(ManualFixture::new(store, clock.clone()))).await;
        let scene = Self { server, clock, d };
        scene.d.enqueue(job()).await;
        scene.d.claim_one().await;
        scene
    }

    /// After a call that was not plain the next few do without an attempt.
    async fn detour(&self) -> Vec<JobId> {
        let mut sent = Vec::new();
        for _ in 0..8 {
            sent.push(self.d.enqueue(job()).await);
        }
        sent
    }

    fn transactions(&self) -> u64 {
        self.server.server.calls("exec")
    }

    /// Enqueues, and returns in how many transactions.
    async fn enqueue(&self, jobs: Vec<NewJob>) -> (Vec<JobId>, u64) {
        let before = self.transactions();
        let ids = self.d.enqueue_all(jobs).await;
        (ids, self.transactions() - before)
    }

    fn key(part: &str) -> String {
        let (namespace, queue) = (namespace(), leasehold_conformance::queue());
        format!("{{{namespace}:{queue}:0}}:{part}")
    }

    /// The books are right, and no line is left under its other name.
    async fn is_in_order(&self) {
        let snapshot = self.d.snapshot().await;
        snapshot.assert_in_order();
        let left: Vec<String> = self.server.server.tell(&["KEYS", &Self::key("fill*")]);
        assert_eq!(left, Vec::<String>::new());
    }

    /// Three calls' jobs come back, each once.
    async fn serves(&self) {
        let mut sent = Vec::new();
        for _ in 0..3 {
            sent.extend(self.enqueue(jobs(120, 100)).await.0);
        }
        self.is_in_order().await;
        self.claims(&sent).await;
    }

    async fn claims(&self, ids: &[JobId]) -> Vec<Held> {
        let mut held = Vec::new();
        while held.len() < ids.len() {
            let more = self.d.claim(ids.len() - held.len()).await;
            assert!(!more.is_empty(), "{} of {} jobs", held.len(), ids.len());
            held.extend(more);
        }
        let claimed: Vec<JobId> = held.iter().map(Held::id).collect();
        assert_eq!(claimed, ids);
        assert_eq!(self.d.claim(1).await.len(), 0, "nothing else is there");
        held
    }
}

fn namespace() -> Namespace {
    Namespace::new("bulk").unwrap()
}

/// Jobs of which each has its own payload.
fn jobs(count: usize, bytes: usize) -> Vec<NewJob> {
    let numbered = |n: usize| {
        let mut job = job();
        let mut payload = vec![b'x'; bytes];
        payload.extend_from_slice(n.to_string().as_bytes());
        job.payload = payload.into();
        job
    };
    (0..count).map(numbered).collect()
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn jobs_in_bulk_come_back_as_they_went_in() {
    let scene = Scene::new().await;
    // One segment, a few, more than are stamped at once, some larger than a node of a list.
    for (count, bytes) in [
        (1, 10),
        (3, 100),
        (230, 100),
        (16, 9_000),
        (17, 9_000),
        (40, 9_000),
    ] {
        for priority in [0, 4, 7] {
            let (mut sent, mut expected) = (Vec::new(), Vec::new());
            // Into a line that is not there, and behind what is.
            for _ in 0..3 {
                scene.d.advance(Duration::from_millis(7)).await;
                let batch = jobs(count, bytes);
                let batch = batch.into_iter().map(|job| job.priority(priority));
                let batch: Vec<NewJob> = batch.collect();
                let payloads = batch.iter().map(|job| job.payload.clone());
                let now = scene.clock.now();
                expected.extend(payloads.map(|payload| (payload, now)));
                let (ids, transactions) = scene.enqueue(batch).await;
                assert_eq!(transactions, 1);
                sent.extend(ids);
            }
            scene.is_in_order().await;
            for (held, (payload, now)) in scene.claims(&sent).await.iter().zip(expected) {
                assert_eq!(held.job.payload, payload);
                assert_eq!((held.job.enqueued_at, held.job.run_at), (now, now));
                assert_eq!(held.job.options.priority, priority);
            }
        }
    }
    scene.is_in_order().await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn only_plain_jobs_of_one_priority_go_in_bulk() {
    let scene = Scene::new().await;
    let mut mixed = jobs(5, 10);
    mixed.push(job().priority(1));
    let (ids, transactions) = scene.enqueue(mixed).await;
    assert_eq!((ids.len(), transactions), (6, 0));
    let unique = job().unique("key").unwrap();
    assert_eq!(scene.enqueue(vec![job(), unique]).await.1, 0);
    assert_eq!(scene.enqueue(vec![job()]).await.1, 1);
    scene.is_in_order().await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_repeat_in_bulk_gets_the_first_answer() {
    let scene = Scene::new().await;
    let call = scene.d.enqueue_request(jobs(120, 100));
    let first = scene.d.store().enqueue(call.clone()).await.unwrap();
    let ids = |answers: &[Enqueued]| answers.iter().map(|answer| answer.id()).collect::<Vec<_>>();
    for _ in 0..3 {
        let again = scene.d.store().enqueue(call.clone()).await.unwrap();
        assert_eq!(ids(&again), ids(&first));
    }
    scene.is_in_order().await;
    scene.claims(&ids(&first)).await;
}

/// A transaction of six requests: the connection ends when the first few of them have been answered, or all.
/// A call that is repeated goes under its own name, or, which is the flaw, under a new one. Returns what is
/// known to have been stored.
async fn cut_short(scene: &Scene, proxy: &Proxy, answered: usize, forgets: bool) -> Vec<JobId> {
    let transactions = scene.transactions();
    let mut call = scene.d.enqueue_request(jobs(120, 100));
    proxy.lose_replies(answered, 1);
    let answers = loop {
        match scene.d.store().enqueue(call.clone()).await {
            Ok(answers) => break answers,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        if forgets {
            call = scene.d.enqueue_request(jobs(120, 100));
        }
    };
    assert!(scene.transactions() > transactions, "it goes in bulk");
    answers.iter().map(|answer| answer.id()).collect()
}

async fn by_proxy() -> (Scene, Proxy) {
    let server = Standalone::start(&[]);
    let proxy = Proxy::start(server.server.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    (Scene::by(&url, server).await, proxy)
}

/// The last of the requests of a transaction is the one that makes it happen.
const LAST: usize = 5;

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_connection_that_ends_in_a_bulk_costs_nothing() {
    let rounds = if crate::redis::in_campaign() { 60 } else { 5 };
    let (scene, proxy) = by_proxy().await;
    for round in 0..rounds {
        let mut sent = Vec::new();
        for answered in 0..=LAST {
            sent.extend(cut_short(&scene, &proxy, answered, false).await);
            sent.extend(scene.detour().await);
        }
        assert_eq!(proxy.lost(), (round + 1) * (LAST + 1));
        // Tokens are microseconds of it.
        scene.d.advance(Duration::from_millis(2)).await;
        scene.is_in_order().await;
        scene.claims(&sent).await;
    }
}

/// Control arm: without request ids the one that happened happens again.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn without_request_ids_a_bulk_is_stored_twice() {
    let (scene, proxy) = by_proxy().await;
    for answered in 0..=LAST {
        let before = scene.d.ledger().await.enqueued;
        let known = cut_short(&scene, &proxy, answered, true).await;
        let enqueued = scene.d.ledger().await.enqueued - before;
        let times = if answered == LAST { 2 } else { 1 };
        assert_eq!(enqueued, times * known.len() as u64, "{answered} answered");
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_that_forgot_the_script_stores_a_bulk_once() {
    let scene = Scene::new().await;
    let mut sent = Vec::new();
    for _ in 0..3 {
        scene.server.server.tell::<()>(&["SCRIPT", "FLUSH"]);
        let (ids, transactions) = scene.enqueue(jobs(120, 100)).await;
        assert_eq!(
            transactions, 2,
            "the first finds no script, and does nothing"
        );
        sent.extend(ids);
    }
    scene.is_in_order().await;
    scene.claims(&sent).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_session_that_the_server_forgot_stores_no_bulk() {
    let scene = Scene::new().await;
    let (sent, _) = scene.enqueue(jobs(120, 100)).await;
    let before = scene.d.ledger().await.enqueued;
    let sessions: Vec<String> = scene.server.server.tell(&["KEYS", &Scene::key("s:*")]);
    assert_eq!(sessions.len(), 1);
    scene.server.server.tell::<()>(&["DEL", &sessions[0]]);
    let refused = scene.d.try_enqueue(jobs(120, 100)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::SessionLost, "{refused}");
    assert_eq!(scene.d.ledger().await.enqueued, before);
    let other = scene.d.other().await;
    let claimed: Vec<JobId> = other.claim(500).await.iter().map(Held::id).collect();
    assert_eq!(claimed, sent);
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_full_server_takes_no_bulk() {
    let scene = Scene::new().await;
    let memory = |limit| {
        let words = ["CONFIG", "SET", "maxmemory", limit];
        scene.server.server.tell::<()>(&words);
    };
    let (mut sent, _) = scene.enqueue(jobs(120, 100)).await;
    memory("1");
    for _ in 0..3 {
        let refused = scene.d.try_enqueue(jobs(120, 100)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
    }
    memory("0");
    scene.is_in_order().await;
    let (ids, transactions) = scene.enqueue(jobs(120, 100)).await;
    assert_eq!(transactions, 1, "it was not refused for good");
    sent.extend(ids);
    scene.claims(&sent).await;
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn who_may_run_no_transactions_goes_by_scripts() {
    for lacking in TRANSACTION {
        let rule = acl_rule(&namespace()).replace(&format!("+{lacking} "), "");
        let scene = Scene::on(Standalone::with_acl(&rule)).await;
        scene.serves().await;
        let refused = scene
            .server
            .server
            .info(&["INFO", "commandstats"], &format!("cmdstat_{lacking}"));
        let refused = refused.unwrap();
        let once = "rejected_calls=1,";
        assert!(refused.contains(once), "{lacking}, tried once: {refused}");
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_server_without_transactions_is_served_by_scripts() {
    for unknown in TRANSACTION {
        let line = format!("rename-command {unknown} \"\"");
        let scene = Scene::on(Standalone::start(&[&line])).await;
        scene.serves().await;
    }
}

#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn who_lacks_what_the_scripts_of_a_bulk_need_goes_by_others() {
    for lacking in INSIDE {
        let rule = acl_rule(&namespace()).replace(&format!("+{lacking} "), "");
        let scene = Scene::on(Standalone::with_acl(&rule)).await;
        let mut sent = Vec::new();
        for _ in 0..12 {
            sent.extend(scene.enqueue(jobs(80, 100)).await.0);
        }
        for held in scene.claims(&sent).await {
            assert_eq!(held.job.enqueued_at, scene.clock.now());
        }
    }
}

/// It begins transactions and ends none, so that what others sent behind one was never run.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_transaction_without_an_end_costs_nobody_a_job() {
    let server = Standalone::start(&["rename-command exec \"\""]);
    let scene = Scene::on(server).await;
    let options = RedisOptions::new(scene.server.url())
        .namespace(namespace())
        .bulk(1)
        .clock(scene.clock.clone());
    let store = RedisStore::open(options).unwrap();
    let fixture = ManualFixture::new(store, scene.clock.clone());
    let first = Driver::new(Arc::new(fixture)).await;
    let mut others = Vec::new();
    for _ in 0..8 {
        others.push(first.other().await);
    }
    let mut callers = tokio::task::JoinSet::new();
    for (n, d) in others.into_iter().enumerate() {
        callers.spawn(async move {
            for _ in 0..10 {
                let mut jobs = jobs(120, 100);
                // Every second caller has no use for a transaction.
                if n % 2 == 1 {
                    jobs[0] = job().priority(1);
                }
                let call = d.enqueue_request(jobs);
                while let Err(error) = d.store().enqueue(call.clone()).await {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                }
            }
        });
    }
    callers.join_all().await;
    let begun = scene.server.server.calls("multi");
    assert!((1..=1 + 4).contains(&begun), "remembered: {begun}");
    scene.is_in_order().await;
    assert_eq!(scene.d.queue().await.counts.ready, 8 * 10 * 120);
}

/// Passes everything on, but holds back the end of one transaction until something has been done.
async fn held_back(port: u16, until: impl Fn() + Send + Sync + 'static) -> u16 {
    const EXEC: &[u8] = b"*1\r\n$4\r\nEXEC\r\n";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = listener.local_addr().unwrap().port();
    let until = Arc::new(until);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            let until = Arc::clone(&until);
            tokio::spawn(async move {
                let mut bytes = vec![0; 1 << 20];
                while let Ok(n @ 1..) = from_client.read(&mut bytes).await {
                    let end = n - if bytes[..n].ends_with(EXEC) {
                        EXEC.len()
                    } else {
                        0
                    };
                    to_server.write_all(&bytes[..end]).await.unwrap();
                    if end < n {
                        // The server has read, and taken, what came before.
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        until();
                        to_server.write_all(EXEC).await.unwrap();
                    }
                }
            });
        }
    });
    own
}

/// Between the beginning of a transaction and its end.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_right_that_is_taken_away_in_a_bulk_costs_no_job() {
    let inside = [&TRANSACTION[..], &INSIDE[..]].concat();
    for (taken, before) in inside.iter().flat_map(|taken| [(*taken, 0), (*taken, 5)]) {
        let server = Standalone::with_acl(&acl_rule(&namespace()));
        let (port, url) = (server.server.port(), server.url().to_owned());
        let admin = server.server.address();
        let armed = Arc::new(AtomicBool::new(false));
        let fuse = Arc::clone(&armed);
        let between = held_back(port, move || {
            if fuse.swap(false, Ordering::SeqCst) {
                let admin = redis::Client::open(format!("redis://admin:admin@{admin}")).unwrap();
                let mut admin = admin.get_connection().unwrap();
                let mut words = redis::cmd("ACL");
                words.arg("SETUSER").arg("app").arg(format!("-{taken}"));
                words.exec(&mut admin).unwrap();
            }
        });
        let between = url.replace(&port.to_string(), &between.await.to_string());
        let scene = Scene::by(&between, server).await;
        let mut sent = Vec::new();
        if before > 0 {
            sent.extend(scene.enqueue(jobs(before, 100)).await.0);
        }
        armed.store(true, Ordering::SeqCst);
        let call = scene.d.enqueue_request(jobs(120, 100));
        for _ in 0..3 {
            let answers = scene.d.store().enqueue(call.clone()).await.unwrap();
            assert_eq!(answers.len(), 120);
        }
        assert!(!armed.load(Ordering::SeqCst), "{taken} was taken away");
        sent.extend(call.jobs.iter().map(|(id, _)| *id));
        scene
            .server
            .server
            .tell::<()>(&["ACL", "SETUSER", "app", &format!("+{taken}")]);
        scene.is_in_order().await;
        for held in scene.claims(&sent).await {
            assert_eq!(held.job.enqueued_at, scene.clock.now(), "{taken}");
        }
    }
}

/// While a connection is open, and has been used for it.
#[tokio::test]
#[ignore = "needs redis-server: ./tests/run"]
async fn a_right_that_is_taken_away_costs_no_job() {
    let mut takings: Vec<Vec<&str>> = TRANSACTION.iter().map(|name| vec![*name]).collect();
    takings.extend(TRANSACTION[1..].iter().map(|name| vec!["multi", name]));
    takings.push(TRANSACTION.to_vec());
    for taken in takings {
        let scene = Scene::on(Standalone::with_acl(&acl_rule(&namespace()))).await;
        let (mut sent, transactions) = scene.enqueue(jobs(120, 100)).await;
        assert_eq!(transactions, 1);
        for name in &taken {
            let words = ["ACL", "SETUSER", "app", &format!("-{name}")];
            scene.server.server.tell::<()>(&words);
        }
        for _ in 0..2 {
            sent.extend(scene.enqueue(jobs(120, 100)).await.0);
        }
        scene.is_in_order().await;
        scene.claims(&sent).await;
        println!("without {taken:?}: {} jobs", sent.len());
    }
}
