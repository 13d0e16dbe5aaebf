//! A store with something of everything in it, and the command as a process.

use std::any::Any;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use leasehold::job::{JobRecord, Kind, QueueName};
use leasehold::lease::Receipt;
use leasehold::lease::{Nonce, Progress};
use leasehold::store::{
    Beat, ClaimQueue, ClaimRequest, Enqueued, Outcome, ReapRequest, Renewal, RequestId, SessionId,
    SettleRequest, Settlement,
};
use leasehold::{Client, JobId, NewJob};
use serde_json::Value;

use crate::operate::postgres_server::Server;
use crate::operate::redis_server::Standalone;

/// A place where a store can be opened by its URL, and is gone with its guard.
pub(crate) struct Place {
    pub(crate) url: String,
    _guard: Box<dyn Any + Send + Sync>,
}

/// The same tests on every store that the command can open: a module for each store. A test takes
/// what it gets a new place from.
macro_rules! on_each_store {
    ($($test:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(crate::operate::world::sqlite).await;
            })+
        }

        mod redis {
            $(#[tokio::test(flavor = "multi_thread")]
            #[ignore = "needs redis-server: ./tests/run"]
            async fn $test() {
                super::$test(crate::operate::world::redis).await;
            })+
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            #[ignore = "needs postgresql: ./tests/run"]
            async fn $test() {
                super::$test(crate::operate::world::postgres).await;
            })+
        }
    };
}
pub(crate) use on_each_store;

/// Makes a place with nothing in it.
pub(crate) type New = fn() -> Place;

pub(crate) fn sqlite() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("jobs.db").display());
    Place {
        url,
        _guard: Box::new(dir),
    }
}

/// A namespace of its own on a server that the tests share, and the last of them ends. Single jobs
/// can be asked for.
pub(crate) fn redis() -> Place {
    static SERVER: Mutex<Weak<Standalone>> = Mutex::new(Weak::new());
    static NAMESPACES: AtomicUsize = AtomicUsize::new(0);

    let mut shared = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let server = shared.upgrade().unwrap_or_else(|| {
        let server = Arc::new(Standalone::start(&[]));
        *shared = Arc::downgrade(&server);
        server
    });
    let namespace = NAMESPACES.fetch_add(1, Ordering::Relaxed);
    Place {
        url: format!("{}?namespace=n{namespace}", server.url()),
        _guard: Box::new(server),
    }
}

/// The same on PostgreSQL.
pub(crate) fn postgres() -> Place {
    static SERVER: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    static NAMESPACES: AtomicUsize = AtomicUsize::new(0);

    let mut shared = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let server = shared.upgrade().unwrap_or_else(|| {
        let server = Arc::new(Server::start(&["fsync=off", "max_connections=400"]));
        *shared = Arc::downgrade(&server);
        server
    });
    let namespace = NAMESPACES.fetch_add(1, Ordering::Relaxed);
    Place {
        url: format!("{}?namespace=n{namespace}", server.url()),
        _guard: Box::new(server),
    }
}

impl Place {
    /// The command, about this store.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = leasehold(args);
        command.args(["--url", &self.url]);
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).stdin(Stdio::null()).output().unwrap()
    }

    /// What the command prints, if all goes well.
    pub(crate) fn text(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{args:?}: {}",
            stderr(&output)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// The one JSON document that the command prints.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let text = self.text(&[args, &["--output", "json"]].concat());
        assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The JSON objects that the command prints, one a line.
    pub(crate) fn ndjson(&self, args: &[&str]) -> Vec<Value> {
        let text = self.text(&[args, &["--output", "ndjson"]].concat());
        let values = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let values: Vec<Value> = values.collect();
        assert!(values.iter().all(Value::is_object), "{args:?}: {text}");
        values
    }

    /// Trouble: nothing on stdout, one line on stderr, this exit code.
    pub(crate) fn refused(&self, args: &[&str], code: i32, says: &str) {
        refused(self.command(args), code, says);
    }

    pub(crate) async fn world(&self) -> World {
        let client = Client::open(&self.url).await.unwrap();
        let session = client.store().open_session().await.unwrap();
        World {
            client,
            session,
            seq: 0,
        }
    }
}

pub(crate) fn leasehold(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    command
        .args(args)
        .env_remove("LEASEHOLD_URL")
        .env_remove("LEASEHOLD_ACTOR")
        .env("USER", "tester");
    command
}

pub(crate) fn refused(mut command: Command, code: i32, says: &str) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{command:?}: {text}");
    assert!(text.contains(says), "{command:?}: {text}");
    assert!(output.stdout.is_empty(), "{command:?}");
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The hand that makes things happen in a store.
pub(crate) struct World {
    pub(crate) client: Client,
    session: SessionId,
    seq: u64,
}

pub(crate) struct Held {
    pub(crate) id: JobId,
    pub(crate) receipt: Receipt,
    beat: Beat,
}

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn job(queue: &str, kind: &str) -> NewJob {
    let (queue, kind) = (QueueName::new(queue).unwrap(), Kind::new(kind).unwrap());
    NewJob::raw(queue, kind, r#"{"big":12345678901234567890123}"#)
}

/// What `stage` left behind.
pub(crate) struct Stage {
    pub(crate) ready: JobId,
    pub(crate) scheduled: JobId,
    pub(crate) dead: Vec<JobId>,
    pub(crate) soon: Held,
    pub(crate) late: Held,
}

impl World {
    fn request(&mut self) -> RequestId {
        self.seq += 1;
        RequestId {
            session: self.session,
            lane: 0,
            seq: self.seq,
        }
    }

    pub(crate) async fn enqueue(&self, job: NewJob) -> JobId {
        match self.client.enqueue(job).await.unwrap() {
            Enqueued::New(id) => id,
            Enqueued::Duplicate(id) => panic!("{id} was there"),
        }
    }

    /// Claims one job of a queue: the one of the first priority.
    pub(crate) async fn claim(&mut self, queue: &str, owner: &str, term: Duration) -> Held {
        let request = ClaimRequest {
            request: self.request(),
            owner: owner.into(),
            task: "deploy-7".into(),
            nonce: Nonce::draw().unwrap(),
            queues: vec![ClaimQueue {
                queue: QueueName::new(queue).unwrap(),
                term,
                max_lifetime: 24 * HOUR,
            }],
            max: 1,
            admit_suspect: true,
        };
        let claimed = self.client.store().claim(request).await.unwrap();
        let grant = &claimed.grants[0];
        let lease = &grant.leases[0];
        Held {
            id: lease.job.id,
            receipt: grant.receipt(lease),
            beat: Beat::of(grant),
        }
    }

    pub(crate) async fn settle(&mut self, held: Held, outcome: Outcome) {
        let request = SettleRequest {
            request: self.request(),
            settlements: vec![Settlement {
                receipt: held.receipt,
                outcome,
            }],
        };
        let verdicts = self.client.store().settle(request).await.unwrap();
        assert!(verdicts.iter().all(|verdict| verdict.is_held()));
    }

    /// Whether the lease is still its holder's.
    pub(crate) async fn holds(&self, held: &Held) -> bool {
        let answers = self.client.store().renew(vec![held.beat.clone()]).await;
        matches!(answers.unwrap()[0], Renewal::Held { .. })
    }

    async fn progress(&self, held: &Held) {
        let mut beat = held.beat.clone();
        let progress = Progress {
            done: 3,
            total: Some(8),
            note: "pages".to_owned(),
        };
        beat.progress = vec![(held.receipt.token(), progress)];
        let answers = self.client.store().renew(vec![beat]).await.unwrap();
        assert!(matches!(answers[0], Renewal::Held { .. }));
    }

    /// A job of the queue `night` that is dead for this reason.
    pub(crate) async fn dead(&mut self, kind: &str, reason: &str) -> JobId {
        self.enqueue(job("night", kind).priority(0)).await;
        let held = self.claim("night", "host-9", HOUR).await;
        let id = held.id;
        let reason = reason.to_owned();
        self.settle(held, Outcome::Bury { reason }).await;
        id
    }

    /// Lets the lease of a job expire.
    async fn expire(&mut self, queue: &str, owner: &str) {
        self.claim(queue, owner, Duration::from_millis(1)).await;
        loop {
            let request = ReapRequest {
                request: self.request(),
                max: 10,
            };
            if !self.client.store().reap(request).await.unwrap().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) async fn record(&self, id: JobId) -> Arc<JobRecord> {
        self.client.job(id).await.unwrap().unwrap().job
    }

    /// Two live leases, one job in every other state that waits or is dead, and some history.
    pub(crate) async fn stage(&mut self) -> Stage {
        let retried = job("day", "report")
            .priority(0)
            .exclusive("tenant 7")
            .unwrap()
            .header("traceparent", "00-1");
        self.enqueue(retried).await;
        self.expire("day", "host-1").await;
        let held = self.claim("day", "host-1", HOUR).await;
        let retry = Outcome::Retry {
            delay: Duration::ZERO,
            reason: "no route to \x1b[31mhost\x1b[0m".to_owned(),
        };
        self.settle(held, retry).await;
        let soon = self.claim("day", "host-1", HOUR).await;
        self.progress(&soon).await;

        self.enqueue(job("day", "mail").priority(0)).await;
        let late = self.claim("day", "host-2", 4 * HOUR).await;
        let ready = self.enqueue(job("day", "mail").priority(7)).await;
        let scheduled = job("day", "mail").delay(HOUR).unique("weekly").unwrap();
        let scheduled = self.enqueue(scheduled).await;
        let dead = vec![
            self.dead("report", "timeout after 31 ms").await,
            self.dead("report", "timeout after 470 ms").await,
            self.dead("mail", "no such mailbox").await,
        ];
        Stage {
            ready,
            scheduled,
            dead,
            soon,
            late,
        }
    }
}
