//! Exclusive keys: jobs of one account one at a time and in order, accounts beside each other.
//! Unique keys: no second job while the first one lives.
//!
//! Run it: `cargo run --example exclusive_keys`

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::store::Enqueued;
use leasehold::{Client, Context, Failure, Job, NewJob};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
struct Transfer {
    account: String,
    step: u32,
}

impl Job for Transfer {
    const KIND: &'static str = "transfer";
}

/// What runs now, and what was ever seen to run together.
#[derive(Default)]
struct Seen {
    running: BTreeMap<String, usize>,
    most_per_account: usize,
    most_at_once: usize,
    order: BTreeMap<String, Vec<u32>>,
}

impl Seen {
    fn enter(&mut self, job: &Transfer) {
        *self.running.entry(job.account.clone()).or_default() += 1;
        let together = self.running.values().sum();
        self.most_at_once = self.most_at_once.max(together);
        let same = self.running[&job.account];
        self.most_per_account = self.most_per_account.max(same);
        let order = self.order.entry(job.account.clone()).or_default();
        order.push(job.step);
    }

    fn leave(&mut self, job: &Transfer) {
        *self.running.entry(job.account.clone()).or_default() -= 1;
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let client = Client::open("memory:").await?;
    let mut jobs = Vec::new();
    for step in 1..=4 {
        for account in ["ann", "bob", "cid"] {
            let job = Transfer {
                account: account.into(),
                step,
            };
            jobs.push(NewJob::of(&job)?.exclusive(account)?);
        }
    }
    client.enqueue_many(jobs).await?;

    let report = Transfer {
        account: "daily report".into(),
        step: 1,
    };
    let first = client
        .enqueue(NewJob::of(&report)?.unique("report 2026-11-02")?)
        .await?;
    let second = client
        .enqueue(NewJob::of(&report)?.unique("report 2026-11-02")?)
        .await?;
    assert_eq!(second, Enqueued::Duplicate(first.id()));
    println!("the second report is a duplicate of the first");

    let seen = Arc::new(Mutex::new(Seen::default()));
    let (done, mut ended) = mpsc::unbounded_channel();
    let shared = Arc::clone(&seen);
    let transfer = move |job: Transfer, _ctx: Context| {
        let (seen, done) = (Arc::clone(&shared), done.clone());
        async move {
            let lost = |_| Failure::bury("another handler panicked");
            seen.lock().map_err(lost)?.enter(&job);
            tokio::time::sleep(Duration::from_millis(30)).await;
            seen.lock().map_err(lost)?.leave(&job);
            Ok::<_, Failure>(done.send(())?)
        }
    };
    client
        .worker()
        .handle(transfer)
        .run_until(async move {
            for _ in 0..13 {
                ended.recv().await;
            }
        })
        .await?;

    let seen = seen
        .lock()
        .map_err(|_| anyhow::anyhow!("a handler panicked"))?;
    println!("most of one account at once: {}", seen.most_per_account);
    println!("accounts ran beside each other: {}", seen.most_at_once > 1);
    println!("order for ann: {:?}", seen.order["ann"]);
    Ok(())
}
