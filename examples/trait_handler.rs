//! A handler as a struct, for when the work needs something: a pool, a client, a configuration.
//!
//! Run it: `cargo run --example trait_handler`

use std::sync::Mutex;
use std::time::Duration;

use leasehold::{Client, Context, Failure, Handler, Job, NewJob, async_trait};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
struct Mail {
    to: String,
}

impl Job for Mail {
    const KIND: &'static str = "mail";
    // Jobs of this type go to a queue of their own, and the worker below finds it by itself.
    const QUEUE: &'static str = "outgoing";
}

#[derive(Serialize, Deserialize)]
struct Bounce {
    from: String,
}

impl Job for Bounce {
    const KIND: &'static str = "bounce";
    const QUEUE: &'static str = "incoming";
}

/// One value, shared by all slots: what it keeps must be `Send + Sync`.
struct Mailer {
    sender: String,
    blocked: Mutex<Vec<String>>,
    done: mpsc::UnboundedSender<String>,
}

#[async_trait]
impl Handler<Mail> for Mailer {
    async fn handle(&self, mail: Mail, ctx: Context) -> Result<(), Failure> {
        if self
            .blocked
            .lock()
            .is_ok_and(|list| list.contains(&mail.to))
        {
            // Retrying will not help, so the job is dead at once, with the reason on record.
            return Err(Failure::bury("the address is blocked"));
        }
        let line = format!("{} -> {} from queue {}", self.sender, mail.to, ctx.queue());
        // Any error is retried by the queue's policy: `?` is enough.
        self.done.send(line)?;
        Ok(())
    }
}

/// Another handler in the same worker. What two handlers share goes behind an `Arc` inside each.
struct Bouncer {
    done: mpsc::UnboundedSender<String>,
}

#[async_trait]
impl Handler<Bounce> for Bouncer {
    async fn handle(&self, bounce: Bounce, _ctx: Context) -> Result<(), Failure> {
        self.done.send(format!("bounced by {}", bounce.from))?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    let mail = |to: &str| NewJob::of(&Mail { to: to.into() });
    let from = "d@example.org".to_owned();
    client
        .enqueue_many(vec![
            mail("a@example.org")?,
            mail("b@example.org")?,
            NewJob::of(&Bounce { from })?,
        ])
        .await?;

    let (done, mut lines) = mpsc::unbounded_channel();
    let mailer = Mailer {
        sender: "me@example.org".into(),
        blocked: Mutex::new(vec!["b@example.org".into()]),
        done: done.clone(),
    };
    client
        .worker()
        .handle(mailer)
        .handle(Bouncer { done })
        .run_until(all_settled(client.clone()))
        .await?;
    while let Ok(line) = lines.try_recv() {
        println!("{line}");
    }

    for queue in client.queues().await? {
        let (completed, buried) = (queue.ledger.completed, queue.ledger.buried);
        println!("{}: {completed} completed, {buried} buried", queue.queue);
    }
    Ok(())
}

/// Resolves when no job waits and none is leased.
async fn all_settled(client: Client) {
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let queues = client.queues().await.unwrap_or_default();
        let open = queues
            .iter()
            .map(|queue| queue.counts.ready + queue.counts.scheduled + queue.counts.leased);
        if !queues.is_empty() && open.sum::<u64>() == 0 {
            return;
        }
    }
}
