//! `leasehold workers`: who works, as far as the store can see.
//!
//! A store knows no workers, only holders of leases: an idle worker is not listed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::list::{Listing, Reader, Row};
use super::{Cli, Done, out};
use leasehold::clock::Timestamp;
use leasehold::inspect::{LeaseFilter, LeaseView};
use leasehold::job::QueueName;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Args {
    /// List the workers that hold leases, with what they hold
    ///
    /// A store knows no workers, only holders of leases: an idle worker is not listed.
    Ls,
}

struct Worker {
    leases: u64,
    overdue: u64,
    oldest: Timestamp,
    least_left: Duration,
    queues: BTreeSet<QueueName>,
}

const HEADER: &[&str] = &[
    "owner",
    "task",
    "leases",
    "overdue",
    "oldest lease",
    "least time left",
    "queues",
];

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let Args::Ls = args;
    let client = cli.open_existing().await?;
    let mut workers: BTreeMap<(Arc<str>, Arc<str>), Worker> = BTreeMap::new();
    let take = |lease: LeaseView| {
        let new = || Worker {
            leases: 0,
            overdue: 0,
            oldest: lease.granted_at,
            least_left: lease.time_left,
            queues: BTreeSet::new(),
        };
        let worker = workers.entry((lease.owner, lease.task)).or_insert_with(new);
        worker.leases += 1;
        worker.overdue += u64::from(lease.time_left.is_zero());
        worker.oldest = worker.oldest.min(lease.granted_at);
        worker.least_left = worker.least_left.min(lease.time_left);
        worker.queues.insert(lease.queue);
        Ok(Row::Shown)
    };
    let page = |page| client.leases(LeaseFilter::default(), page);
    Reader::all().read(page, take).await?;
    let mut listing = Listing::new(cli.output, "workers", HEADER);
    for ((owner, task), worker) in &workers {
        let object = || {
            json!({
                "owner": owner,
                "task": task,
                "leases": worker.leases,
                "overdue": worker.overdue,
                "oldest_granted_at": out::precise(worker.oldest),
                "least_time_left_seconds": worker.least_left.as_secs_f64(),
                "queues": worker.queues,
            })
        };
        let cells = || {
            let queues: Vec<&str> = worker.queues.iter().map(QueueName::as_str).collect();
            vec![
                owner.to_string(),
                task.to_string(),
                worker.leases.to_string(),
                worker.overdue.to_string(),
                out::time(worker.oldest),
                out::short(worker.least_left),
                queues.join(" "),
            ]
        };
        listing.row(object, cells)?;
    }
    listing.end(false)
}
