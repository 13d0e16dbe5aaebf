//! `leasehold jobs`: find a job, read its history, cancel it, run it again.

use serde_json::{Value, json};

use super::act::{self, By, Consent};
use super::list::{Limit, Listing, Reader, Row};
use super::{Cli, Done, Trouble, job_view, out};
use leasehold::Client;
use leasehold::inspect::JobView;
use leasehold::job::{JobId, JobState, Kind, QueueName};
use leasehold::store::{ControlCommand, Controlled, Select};

#[derive(Debug, clap::Subcommand)]
pub(super) enum Args {
    /// List jobs, queue by queue and state by state
    Ls(ListJobs),
    /// Show one job: its lease, and how its last leases ended and why
    Show(Show),
    /// Call jobs off; of a leased one the holder is told to stop
    Cancel(Cancel),
    /// Run jobs again: dead ones with their counts at zero, scheduled ones now
    Retry(RetryJobs),
}

#[derive(Debug, clap::Args)]
pub(super) struct ListJobs {
    /// Of this queue
    #[arg(long)]
    queue: Option<QueueName>,

    /// In this state: scheduled, ready, leased, completed, dead, cancelled
    #[arg(long)]
    state: Option<JobState>,

    /// Of this type
    #[arg(long)]
    kind: Option<Kind>,

    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, clap::Args)]
pub(super) struct Show {
    /// The job
    #[arg(value_name = "JOB")]
    id: JobId,
}

#[derive(Debug, clap::Args)]
pub(super) struct Cancel {
    /// The jobs
    #[arg(value_name = "JOB", required = true)]
    ids: Vec<JobId>,
    #[command(flatten)]
    by: By,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Debug, clap::Args)]
pub(super) struct RetryJobs {
    /// The jobs
    #[arg(value_name = "JOB", required = true)]
    ids: Vec<JobId>,
    #[command(flatten)]
    by: By,
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    match args {
        Args::Ls(ls) => list(ls, cli, &client).await,
        Args::Show(show) => job_view::show(&*found(&client, show.id).await?, cli),
        Args::Cancel(cancel) => cancel.run(cli, &client).await,
        Args::Retry(retry) => retry.run(cli, &client).await,
    }
}

/// A job that is there.
pub(super) async fn found(client: &Client, id: JobId) -> Result<Box<JobView>, Trouble> {
    let job = client.job(id).await?;
    job.ok_or_else(|| {
        Trouble::NotFound(format!(
            "no job {id}; completed jobs are kept only if they have a retention"
        ))
    })
}

const HEADER: &[&str] = &[
    "job",
    "state",
    "kind",
    "queue",
    "attempt",
    "run at",
    "last lease",
];

async fn list(ls: &ListJobs, cli: &Cli, client: &Client) -> Done {
    let views = client.queues().await?;
    if let Some(queue) = &ls.queue {
        act::known(client, queue).await?;
    }
    let mut reader = Reader::new(ls.limit);
    let mut listing = Listing::new(cli.output, "jobs", HEADER);
    for view in views
        .iter()
        .filter(|view| ls.queue.as_ref().is_none_or(|queue| view.queue == *queue))
    {
        let states = JobState::ALL
            .into_iter()
            .filter(|state| ls.state.is_none_or(|wanted| wanted == *state));
        for state in states.filter(|state| view.counts.of(*state) > 0) {
            let page = |page| client.jobs(view.queue.clone(), state, page);
            let take = |job: JobView| {
                if ls.kind.as_ref().is_some_and(|kind| job.job.kind != *kind) {
                    return Ok(Row::Skipped);
                }
                listing.row(|| object(&job), || cells(&job))?;
                Ok(Row::Shown)
            };
            reader.read(page, take).await?;
        }
    }
    listing.end(reader.more())
}

/// A job at a glance, for programs.
pub(super) fn object(view: &JobView) -> Value {
    let job = &view.job;
    json!({
        "id": job.id,
        "kind": job.kind,
        "queue": view.queue,
        "state": view.state,
        "parked": view.parked,
        "attempt": view.attempt(),
        "failures": job.failures,
        "expiries": job.expiries,
        "priority": job.options.priority,
        "enqueued_at": out::precise(job.enqueued_at),
        "run_at": out::precise(job.run_at),
        "settled_at": view.settled_at.map(out::precise),
        "owner": view.lease.as_ref().map(|lease| &lease.owner),
        "last_end": job.history.last().map(job_view::end),
        "error": job.history.last().map(job_view::why),
    })
}

fn cells(view: &JobView) -> Vec<String> {
    let job = &view.job;
    let parked = if view.parked { " (parked)" } else { "" };
    let last = match (&view.lease, job.history.last()) {
        (Some(lease), _) => format!(
            "held by {}, {} left",
            lease.owner,
            out::short(lease.time_left)
        ),
        (None, Some(ended)) => format!(
            "{}: {}",
            job_view::end(ended),
            out::clip(&job_view::why(ended), 60)
        ),
        (None, None) => "-".to_owned(),
    };
    vec![
        job.id.to_string(),
        format!("{}{parked}", view.state),
        job.kind.to_string(),
        view.queue.to_string(),
        view.attempt().to_string(),
        out::time(job.run_at),
        last,
    ]
}

impl Cancel {
    async fn run(&self, cli: &Cli, client: &Client) -> Done {
        for &id in &self.ids {
            let job = found(client, id).await?;
            if job.state.is_settled() {
                return Err(Trouble::Failed(format!(
                    "job {id} is {}: nothing to cancel",
                    job.state
                )));
            }
        }
        self.consent.ask(&format!("cancel {}", named(&self.ids)))?;
        let cancel = |id| ControlCommand::Cancel(Select::Job(id));
        let answer = self.by.each(client, &self.ids, cancel).await?;
        act::report(cli, "cancel", &answer)
    }
}

impl RetryJobs {
    async fn run(&self, cli: &Cli, client: &Client) -> Done {
        let mut commands = Vec::new();
        for &id in &self.ids {
            let job = found(client, id).await?;
            let now = std::time::Duration::ZERO;
            commands.push(match job.state {
                JobState::Dead => ControlCommand::RetryDead(Select::Job(id)),
                JobState::Scheduled => ControlCommand::Reschedule {
                    jobs: Select::Job(id),
                    delay: now,
                },
                state => {
                    let why =
                        format!("job {id} is {state}: only dead and scheduled jobs can be retried");
                    return Err(Trouble::Failed(why));
                }
            });
        }
        let mut sum = Controlled::default();
        for command in commands {
            act::add(&mut sum, self.by.control(client, command).await?);
        }
        act::report(cli, "retry", &sum)
    }
}

fn named(ids: &[JobId]) -> String {
    match ids {
        [id] => format!("job {id}"),
        ids => act::counted(ids.len() as u64, "job"),
    }
}
