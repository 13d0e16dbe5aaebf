//! `leasehold queues`: what waits; pause, resume, purge and remove.

use serde_json::json;

use super::act::{self, By, Consent};
use super::list::{Limit, Listing, Reader, Row};
use super::{Cli, Done, Trouble, out, stats};
use leasehold::Client;
use leasehold::inspect::{ParkedView, QueueView};
use leasehold::job::{JobState, QueueName};
use leasehold::limits;
use leasehold::store::{ControlCommand, Controlled, Select};

#[derive(Debug, clap::Subcommand)]
pub(super) enum Args {
    /// List the queues
    Ls,
    /// List the exclusive keys that jobs wait behind, those with the most jobs first
    Parked(Parked),
    /// Grant nothing more from a queue; what is leased goes on
    Pause(One),
    /// Grant again
    Resume(One),
    /// Delete the jobs of a queue; leased ones are left alone
    Purge(PurgeQueue),
    /// Delete a queue that has no jobs in any state
    Rm(One),
}

#[derive(Debug, clap::Args)]
pub(super) struct One {
    /// The queue
    queue: QueueName,
    #[command(flatten)]
    by: By,
}

#[derive(Debug, clap::Args)]
pub(super) struct Parked {
    /// The queue
    queue: QueueName,
    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, clap::Args)]
pub(super) struct PurgeQueue {
    /// The queue
    queue: QueueName,

    /// Jobs in this state: scheduled, ready, completed, dead, cancelled; can be given many times
    /// [default: scheduled and ready]
    #[arg(long = "state", value_name = "STATE", value_parser = purgeable)]
    states: Vec<JobState>,

    #[command(flatten)]
    by: By,
    #[command(flatten)]
    consent: Consent,
}

fn purgeable(text: &str) -> Result<JobState, String> {
    match text.parse() {
        Ok(JobState::Leased) => {
            Err("a leased job cannot be purged: revoke or cancel it".to_owned())
        }
        Ok(state) => Ok(state),
        Err(_) => Err("scheduled, ready, completed, dead or cancelled".to_owned()),
    }
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    match args {
        Args::Ls => list(cli, &client.queues().await?),
        Args::Parked(args) => parked(args, cli, &client).await,
        Args::Pause(one) => {
            act::known(&client, &one.queue).await?;
            let answer = one
                .by
                .control(&client, ControlCommand::Pause(one.queue.clone()))
                .await?;
            act::report(cli, "pause", &answer)
        }
        Args::Resume(one) => {
            act::known(&client, &one.queue).await?;
            let answer = one
                .by
                .control(&client, ControlCommand::Resume(one.queue.clone()))
                .await?;
            act::report(cli, "resume", &answer)
        }
        Args::Rm(one) => {
            act::known(&client, &one.queue).await?;
            let command = ControlCommand::Remove(one.queue.clone());
            let answer = one.by.control(&client, command).await?;
            act::report(cli, "remove", &answer)
        }
        Args::Purge(purge) => {
            let view = act::known(&client, &purge.queue).await?;
            let default = [JobState::Scheduled, JobState::Ready];
            let states = if purge.states.is_empty() {
                &default
            } else {
                &purge.states[..]
            };
            let jobs = states.iter().map(|state| view.counts.of(*state)).sum();
            let words: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
            let what = format!(
                "purge {} ({}) of queue {}",
                act::counted(jobs, "job"),
                words.join(", "),
                purge.queue
            );
            purge.consent.ask(&what)?;
            let bar = act::bar(jobs);
            let mut sum = Controlled::default();
            for &state in states {
                let (queue, max) = (purge.queue.clone(), limits::CALL_ITEMS);
                let command = ControlCommand::Purge(Select::State { queue, state, max });
                act::add(&mut sum, purge.by.exhaust(&client, &command, &bar).await?);
            }
            bar.finish_and_clear();
            act::report(cli, "purge", &sum)
        }
    }
}

async fn parked(args: &Parked, cli: &Cli, client: &Client) -> Done {
    act::known(client, &args.queue).await?;
    let mut keys: Vec<ParkedView> = Vec::new();
    let page = |page| client.parked(args.queue.clone(), page);
    let take = |view| {
        keys.push(view);
        Ok(Row::Shown)
    };
    Reader::all().read(page, take).await?;
    keys.sort_by(|a, b| b.jobs.cmp(&a.jobs).then_with(|| a.key.cmp(&b.key)));
    let mut listing = Listing::new(cli.output, "keys", &["key", "parked"]);
    let most = args.limit.rows();
    for view in keys.iter().take(most) {
        let or_more = if view.jobs == ParkedView::MOST {
            "+"
        } else {
            ""
        };
        let cells = || vec![view.key.to_string(), format!("{}{or_more}", view.jobs)];
        listing.row(|| json!({ "key": view.key, "jobs": view.jobs }), cells)?;
    }
    listing.end(keys.len() > most)
}

const HEADER: &[&str] = &[
    "queue",
    "ready",
    "parked",
    "leased",
    "scheduled",
    "dead",
    "oldest ready",
    "failed",
    "released : expired",
    "paused",
];

fn list(cli: &Cli, queues: &[QueueView]) -> Result<(), Trouble> {
    let mut listing = Listing::new(cli.output, "queues", HEADER);
    for view in queues {
        let counts = &view.counts;
        listing.row(
            || stats::object(view),
            || {
                let figures = [
                    counts.ready,
                    counts.parked,
                    counts.leased,
                    counts.scheduled,
                    counts.dead,
                ];
                let oldest = view.oldest_ready.map_or("-".to_owned(), out::short);
                let paused = if view.paused { "paused" } else { "-" };
                [view.queue.to_string()]
                    .into_iter()
                    .chain(figures.map(|figure| figure.to_string()))
                    .chain([oldest, stats::failed(&view.ledger)])
                    .chain([stats::ratio(&view.ledger), paused.to_owned()])
                    .collect()
            },
        )?;
    }
    listing.end(false)
}
