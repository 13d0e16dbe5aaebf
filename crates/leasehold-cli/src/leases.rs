//! `leasehold leases`: who holds what and for how much longer, and how to take it away.

use std::time::Duration;

use serde_json::{Value, json};

use super::act::{self, By, Consent};
use super::list::{Limit, Listing, Reader, Row};
use super::{Cli, Done, Trouble, out};
use leasehold::inspect::{LeaseFilter, LeaseView};
use leasehold::job::{JobId, QueueName};
use leasehold::lease::Progress;
use leasehold::store::{ControlCommand, LeaseSelect};

#[derive(Debug, clap::Subcommand)]
pub(super) enum Args {
    /// List the live leases, those that expire first at the top
    Ls(ListLeases),
    /// End leases now, without their holders: the jobs are ready again, nothing is charged
    ///
    /// The old receipt is refused from then on. Its holder may not know yet, and goes on working
    /// until its next renewal: only a fence keeps its writes out.
    Revoke(Revoke),
}

#[derive(Debug, clap::Args)]
pub(super) struct ListLeases {
    /// Of this queue
    #[arg(long)]
    queue: Option<QueueName>,

    /// Held by this worker
    #[arg(long)]
    owner: Option<String>,

    /// For this run
    #[arg(long)]
    task: Option<String>,

    /// With less time left than this: 250ms, 5s, 10m
    #[arg(long, value_name = "TIME", value_parser = out::duration)]
    expiring_within: Option<Duration>,

    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true))]
pub(super) struct Revoke {
    /// The lease of this job
    #[arg(group = "which", value_name = "JOB")]
    id: Option<JobId>,

    /// All leases of this worker
    #[arg(long, group = "which")]
    owner: Option<String>,

    /// All leases for this run
    #[arg(long, group = "which")]
    task: Option<String>,

    #[command(flatten)]
    by: By,
    #[command(flatten)]
    consent: Consent,
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    match args {
        Args::Ls(ls) => list(ls, cli).await,
        Args::Revoke(revoke) => revoke.run(cli).await,
    }
}

const HEADER: &[&str] = &[
    "job",
    "time left",
    "kind",
    "queue",
    "owner",
    "task",
    "token",
    "attempt",
    "renewals",
    "progress",
];

async fn list(ls: &ListLeases, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    let filter = LeaseFilter {
        queue: ls.queue.clone(),
        owner: ls.owner.as_deref().map(Into::into),
        task: ls.task.as_deref().map(Into::into),
    };
    let mut reader = Reader::new(ls.limit);
    let mut listing = Listing::new(cli.output, "leases", HEADER);
    let page = |page| client.leases(filter.clone(), page);
    let take = |lease: LeaseView| {
        // They come by deadline: whatever follows has more time.
        if ls
            .expiring_within
            .is_some_and(|within| lease.time_left >= within)
        {
            return Ok(Row::Past);
        }
        listing.row(|| object(&lease), || cells(&lease))?;
        Ok(Row::Shown)
    };
    reader.read(page, take).await?;
    listing.end(reader.more())
}

/// A lease, for programs.
pub(super) fn object(lease: &LeaseView) -> Value {
    json!({
        "job": lease.job,
        "kind": lease.kind,
        "queue": lease.queue,
        "owner": lease.owner,
        "task": lease.task,
        "token": lease.token,
        "attempt": lease.attempt,
        "granted_at": out::precise(lease.granted_at),
        "time_left_seconds": lease.time_left.as_secs_f64(),
        "term_seconds": lease.term.as_secs_f64(),
        "renewals": lease.renewals,
        "cancel": lease.cancel,
        "progress": lease.progress,
    })
}

fn cells(lease: &LeaseView) -> Vec<String> {
    let left = if lease.time_left.is_zero() {
        "overdue".to_owned()
    } else {
        out::short(lease.time_left)
    };
    let cancel = if lease.cancel { " (cancel)" } else { "" };
    vec![
        lease.job.to_string(),
        format!("{left}{cancel}"),
        lease.kind.to_string(),
        lease.queue.to_string(),
        lease.owner.to_string(),
        lease.task.to_string(),
        lease.token.to_string(),
        lease.attempt.to_string(),
        lease.renewals.to_string(),
        lease.progress.as_ref().map_or("-".to_owned(), progress),
    ]
}

/// Progress in a few words.
pub(super) fn progress(progress: &Progress) -> String {
    let total = progress
        .total
        .map_or(String::new(), |total| format!(" of {total}"));
    let note = out::clip(&progress.note, 40);
    format!("{}{total} {note}", progress.done)
        .trim_end()
        .to_owned()
}

impl Revoke {
    async fn run(&self, cli: &Cli) -> Done {
        self.by.must_say_why()?;
        let client = cli.open_existing().await?;
        let (select, what) = match (self.id, &self.owner, &self.task) {
            (Some(id), ..) => (LeaseSelect::Job(id), format!("the lease of job {id}")),
            (None, Some(owner), _) => (
                LeaseSelect::Owner(owner.as_str().into()),
                format!("all leases of owner {owner}"),
            ),
            (None, None, Some(task)) => (
                LeaseSelect::Task(task.as_str().into()),
                format!("all leases of task {task}"),
            ),
            (None, None, None) => {
                return Err(Trouble::Usage(
                    "which lease? give a job, --owner or --task".to_owned(),
                ));
            }
        };
        let holder = match self.id {
            None => String::new(),
            Some(id) => {
                let job = client.job(id).await?;
                let job = job.ok_or_else(|| Trouble::NotFound(format!("no job {id}")))?;
                let lease = job.lease.as_ref();
                let lease = lease.ok_or_else(|| {
                    Trouble::NotFound(format!("no lease on job {id}: it is {}", job.state))
                })?;
                format!(", held by {} for {}", lease.owner, lease.task)
            }
        };
        self.consent.ask(&format!("revoke {what}{holder}"))?;
        let answer = self
            .by
            .control(&client, ControlCommand::Revoke(select))
            .await?;
        if answer.done == 0 {
            return Err(Trouble::NotFound(format!("revoke: found none of {what}")));
        }
        act::report(cli, "revoke", &answer)
    }
}
