//! A store with something in it of everything: live leases, expiries, retries, dead letters.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use leasehold::job::{JobOptions, Kind, QueueName};
use leasehold::lease::{Grant, Nonce};
use leasehold::store::MemoryStore;
use leasehold::store::{ClaimQueue, ClaimRequest, ControlCommand, RequestId, Store};
use leasehold::{Client, Context, Failure, Job, LeaseTerms, NewJob};
use leasehold_web::Dashboard;
use serde::{Deserialize, Serialize};

/// What must do nothing, wherever it is shown.
pub const SCRIPT: &str =
    "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">\r\n&'\"";

pub fn memory() -> Client {
    Client::new(Arc::new(MemoryStore::new()))
}

pub fn job(queue: &str, kind: &str, payload: &str) -> NewJob {
    NewJob::raw(
        QueueName::new(queue).unwrap(),
        Kind::new(kind).unwrap(),
        payload.to_owned(),
    )
}

/// Serves until the process ends, on a free port.
pub async fn serve(dashboard: Dashboard, prefix: &'static str) -> SocketAddr {
    let (address, _task) = serve_at(dashboard, prefix, 0).await;
    address
}

/// Serves on a port, until the task is aborted.
pub async fn serve_at(
    dashboard: Dashboard,
    prefix: &'static str,
    port: u16,
) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let (ready, listening) = tokio::sync::oneshot::channel();
    let serve = async move {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let ready = |address| ready.send(address).unwrap();
        let never = std::future::pending();
        dashboard
            .serve(address, prefix, ready, never)
            .await
            .unwrap();
    };
    let task = tokio::spawn(serve);
    (listening.await.unwrap(), task)
}

/// A claim by an owner that never renews: what a killed worker leaves behind.
pub async fn abandon(
    store: &dyn Store,
    owner: &str,
    queue: &str,
    term: Duration,
    most: usize,
) -> Vec<Grant> {
    let session = store.open_session().await.unwrap();
    let request = RequestId {
        session,
        lane: 0,
        seq: 1,
    };
    let claimed = store
        .claim(ClaimRequest {
            request,
            owner: owner.into(),
            task: "nightly".into(),
            nonce: Nonce::draw().unwrap(),
            queues: vec![ClaimQueue {
                queue: QueueName::new(queue).unwrap(),
                term,
                max_lifetime: Duration::from_secs(3_600),
            }],
            max: most,
            admit_suspect: true,
        })
        .await
        .unwrap();
    claimed.grants
}

/// Waits for a fact about the ledger.
pub async fn until(client: &Client, fact: impl Fn(&leasehold::inspect::Ledger) -> bool) {
    let wait = async {
        while !fact(&client.ledger().await.unwrap()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let done = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(done.is_ok(), "{:?}", client.ledger().await);
}

macro_rules! kinds {
    ($($name:ident = $kind:literal),*) => { $(
        #[derive(Serialize, Deserialize)]
        struct $name(serde_json::Value);

        impl Job for $name {
            const KIND: &'static str = $kind;
        }
    )* };
}

kinds!(
    Export = "export_ledger",
    Mail = "send_mail",
    Import = "import_feed",
    Sanitize = "sanitize",
    Report = "render_report"
);

async fn import(job: Import, _: Context) -> Result<(), Failure> {
    let cause = std::io::Error::other(format!("connection to 10.0.0.{} refused", job.0["feed"]));
    Err(Failure::from(
        Box::<dyn std::error::Error + Send + Sync>::from(cause),
    ))
}

/// Runs until it is told to stop.
async fn report(_: Report, ctx: Context) -> Result<(), Failure> {
    for page in 0.. {
        ctx.progress(page, 400, "pages");
        tokio::select! {
            () = ctx.cancelled() => break,
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
        }
    }
    Ok(())
}

/// A pool at work.
pub struct Playing {
    stop: tokio_util::sync::CancellationToken,
    task: tokio::task::JoinHandle<leasehold::Result<()>>,
}

impl Playing {
    /// Drains the pool: after this, nothing changes any more.
    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

/// The scene: dead letters of two kinds, real expiries, retries, a paused queue; and, while the
/// guard lives, a pool that holds leases and completes jobs.
pub async fn play(client: &Client) -> Playing {
    let store = Arc::clone(client.store());
    // Leases that expire: their owner is gone.
    let exports = (0..6).map(|n| {
        let export = job("exports", "export_ledger", &format!("{{\"month\":{n}}}"));
        export.retention(Duration::from_secs(3_600))
    });
    client.enqueue_many(exports).await.unwrap();
    abandon(
        &*store,
        "worker-7.gone",
        "exports",
        Duration::from_millis(40),
        6,
    )
    .await;

    let imports = (0..12).map(|n| {
        let options = JobOptions::default().max_failures(1);
        job("imports", "import_feed", &format!("{{\"feed\":{n}}}")).options(options)
    });
    client.enqueue_many(imports).await.unwrap();
    let options = JobOptions::default().max_failures(1);
    let payload = serde_json::to_string(SCRIPT).unwrap();
    let scripts = job("imports", "sanitize", &payload).options(options);
    client.enqueue(scripts).await.unwrap();
    let mails = (0..40).map(|n| job("mail", "send_mail", &format!("{{\"to\":{n}}}")));
    client.enqueue_many(mails).await.unwrap();
    let reports = (0..8).map(|n| job("reports", "render_report", &format!("{{\"report\":{n}}}")));
    client.enqueue_many(reports).await.unwrap();
    let later = (0..5).map(|n| {
        job("mail", "send_mail", &format!("{{\"later\":{n}}}")).delay(Duration::from_secs(3_600))
    });
    client.enqueue_many(later).await.unwrap();
    client
        .enqueue(job("billing", "charge", "{\"invoice\":42}"))
        .await
        .unwrap();
    let billing = QueueName::new("billing").unwrap();
    client
        .operator("ada")
        .because("the bank is closed")
        .command(ControlCommand::Pause(billing))
        .await
        .unwrap();

    let stop = tokio_util::sync::CancellationToken::new();
    let terms = LeaseTerms::of_term(Duration::from_secs(10));
    let pool = client
        .worker()
        .owner("worker-1.eu")
        .task("release-42")
        .queue("exports")
        .queue("imports")
        .queue("mail")
        .queue("reports")
        .slots(16)
        .terms(terms)
        .handle_in("exports", |_: Export, _: Context| async {
            Ok::<(), Failure>(())
        })
        .handle_in("mail", |_: Mail, _: Context| async {
            Ok::<(), Failure>(())
        })
        .handle_in("imports", import)
        .handle_in("imports", |_: Sanitize, _: Context| async {
            Err::<(), Failure>(SCRIPT.into())
        })
        .handle_in("reports", report);
    let until_stopped = stop.clone().cancelled_owned();
    let task = tokio::spawn(async move { pool.run_until(until_stopped).await.map(|_| ()) });
    until(client, |ledger| {
        ledger.completed >= 46 && ledger.buried >= 13 && ledger.expired() >= 6 && ledger.live >= 8
    })
    .await;
    Playing { stop, task }
}
