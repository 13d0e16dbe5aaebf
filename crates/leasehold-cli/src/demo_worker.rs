//! One worker of the demo: a process of its own, to be killed or frozen.
//!
//! It tells the demo what happens to it, one line of JSON each, on stdout, and drains when its
//! stdin closes: so it does not outlive the demo, however that ends. The workers are one process
//! group, and the first to see the end wakes those that are frozen.
//!
//! Its handler is a zombie on purpose. The runtime would stop a handler whose lease ran out while
//! the process was frozen. This one, when it is late, does what code without such a runtime would
//! do: it believes that it still owns the job, and settles it with the receipt it has.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Signal, kill_current_process_group};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::Done;
use leasehold::Client;
use leasehold::Context;
use leasehold::Failure;
use leasehold::Result;
use leasehold::error::Verb;
use leasehold::hooks::monotonic;
use leasehold::job::{Job, JobId};
use leasehold::lease::{FencingToken, LeaseTerms, Receipt, Verdict};
use leasehold::observe::Event;
use leasehold::store::{Outcome, RequestId, SessionId, SettleRequest, Settlement, Store};

/// How long a worker that was told to stop may still work before it exits as it is.
const LAST_CALL: Duration = Duration::from_secs(3);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[arg(long)]
    owner: String,
    #[arg(long)]
    slots: usize,
    #[arg(long)]
    term_ms: u64,
}

/// The demo's job: takes a while, and does nothing.
#[derive(Serialize, Deserialize)]
pub(super) struct Errand {
    pub(super) millis: u64,
}

impl Job for Errand {
    const KIND: &'static str = "errand";
    const QUEUE: &'static str = "demo";
}

/// What a worker tells the demo.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum News {
    /// A handler began.
    Started { job: JobId },
    /// A lease of somebody was found to have expired.
    Expired { owner: String, job: JobId },
    /// The store refused this worker.
    Fenced {
        verb: String,
        job: JobId,
        token: FencingToken,
    },
}

fn tell(news: &News) {
    if let Ok(mut line) = serde_json::to_string(news) {
        line.push('\n');
        // The demo may be gone; then stdin closes, too.
        let mut stdout = std::io::stdout().lock();
        let _ = stdout.write_all(line.as_bytes());
        let _ = stdout.flush();
    }
}

pub(super) async fn run(args: &Args, url: &str) -> Done {
    // First of all: a frozen neighbour may keep the store from opening.
    let closing = watch_stdin();
    let term = Duration::from_millis(args.term_ms);
    let client = Client::open(url).await?.observer(observe);
    let zombie = Arc::new(Zombie::new(&client, term).await?);
    let handler = move |errand: Errand, ctx: Context| {
        let zombie = Arc::clone(&zombie);
        async move { zombie.work(&errand, &ctx).await }
    };
    client
        .worker()
        .handle(handler)
        .owner(&args.owner)
        .task("demo")
        .slots(args.slots)
        .terms(LeaseTerms::of_term(term))
        .drain_grace(LAST_CALL)
        .run_until(async move {
            let _ = closing.await;
        })
        .await?;
    Ok(())
}

/// Resolves when the demo is gone or wants no more. A while later the process ends, come what may.
fn watch_stdin() -> oneshot::Receiver<()> {
    let (open, closing) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut byte = [0];
        while matches!(stdin.read(&mut byte), Ok(1)) {}
        // A frozen worker cannot see that its stdin has closed: whoever can wakes it.
        let _ = kill_current_process_group(Signal::CONT);
        drop(open);
        std::thread::sleep(2 * LAST_CALL);
        std::process::exit(1);
    });
    closing
}

fn observe(event: &Event<'_>) {
    match event {
        Event::Started { job, .. } => tell(&News::Started { job: job.id }),
        Event::Expired { expiry } => tell(&News::Expired {
            owner: expiry.owner.to_string(),
            job: expiry.job,
        }),
        Event::Fenced {
            verb, job, token, ..
        } => fenced(*verb, *job, *token),
        _ => {}
    }
}

fn fenced(verb: Verb, job: JobId, token: FencingToken) {
    tell(&News::Fenced {
        verb: verb.to_string(),
        job,
        token,
    });
}

/// A handler that settles on its own when it is late.
struct Zombie {
    store: Arc<dyn Store>,
    session: SessionId,
    lanes: AtomicU32,
    term: Duration,
}

impl Zombie {
    async fn new(client: &Client, term: Duration) -> Result<Self> {
        let store = Arc::clone(client.store());
        Ok(Self {
            session: store.open_session().await?,
            store,
            lanes: AtomicU32::new(0),
            term,
        })
    }

    async fn work(&self, errand: &Errand, ctx: &Context) -> Result<(), Failure> {
        let takes = Duration::from_millis(errand.millis);
        let began = monotonic();
        tokio::time::sleep(takes).await;
        if began.elapsed() < takes + self.term / 4 {
            return Ok(());
        }
        if self.settle(ctx.receipt()).await? == Verdict::Fenced {
            fenced(Verb::Settle, ctx.job_id(), ctx.token());
        }
        // Either way the runtime has nothing left to settle.
        Err(Failure::lost())
    }

    /// Settles past the runtime, which would know better.
    async fn settle(&self, receipt: Receipt) -> Result<Verdict> {
        let request = RequestId {
            session: self.session,
            // A lane for each call: one request is in flight per lane.
            lane: self.lanes.fetch_add(1, Ordering::Relaxed),
            seq: 1,
        };
        let settlements = vec![Settlement {
            receipt,
            outcome: Outcome::Complete { result: None },
        }];
        let request = SettleRequest {
            request,
            settlements,
        };
        let verdicts = self.store.settle(request).await?;
        Ok(verdicts.first().copied().unwrap_or(Verdict::Fenced))
    }
}
