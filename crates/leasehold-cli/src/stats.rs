//! `leasehold stats`: the queues at a glance.

use std::io::IsTerminal as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Cli, Done, Output, out};
use leasehold::Client;
use leasehold::inspect::{Ledger, QueueView};

/// Shows each queue: jobs by state, what became of its leases, how long the next job has waited.
///
/// Two figures are the health of a queue. Failed is the share of the runs that were retried or
/// buried. released : expired is how the workers are: leases expire when workers die, freeze or
/// work longer than the term without renewing.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Show again every so many seconds (1 if none are given), until interrupted; with --output
    /// json one document a line
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = interval
    )]
    watch: Option<Duration>,
}

/// A number of seconds that the store can bear.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let every = out::duration(text)?;
    if every < Duration::from_millis(100) {
        return Err("at least 0.1 seconds".to_owned());
    }
    Ok(every)
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    let Some(every) = args.watch else {
        return show(&client, cli.output, false).await;
    };
    let clear = std::io::stdout().is_terminal();
    loop {
        show(&client, cli.output, clear).await?;
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

async fn show(client: &Client, output: Output, clear: bool) -> Done {
    let queues = client.queues().await?;
    let objects = || queues.iter().map(object);
    match output {
        Output::Table => {
            let clear = if clear { "\x1b[2J\x1b[H" } else { "" };
            out::data(&format!("{clear}{}", tables(&queues)))?;
        }
        Output::Json => {
            let queues: Vec<Value> = objects().collect();
            out::data(&json!({ "queues": queues }).to_string())?;
        }
        Output::Ndjson => {
            for object in objects() {
                out::data(&object.to_string())?;
            }
        }
    }
    Ok(())
}

/// A queue, for programs.
pub(super) fn object(view: &QueueView) -> Value {
    json!({
        "queue": view.queue,
        "paused": view.paused,
        "relaxed": view.relaxed,
        "counts": view.counts,
        "ledger": view.ledger,
        "released": view.ledger.released(),
        "expired": view.ledger.expired(),
        "failed": view.ledger.failed(),
        "failed_share": view.ledger.failed_share(),
        "died": view.ledger.died(),
        "balances": view.ledger.balances(),
        "oldest_ready_seconds": view.oldest_ready.map(|age| age.as_secs_f64()),
    })
}

fn tables(queues: &[QueueView]) -> String {
    if queues.is_empty() {
        return "no queues\n".to_owned();
    }
    let jobs = queues.iter().map(|view| {
        let counts = &view.counts;
        let paused = if view.paused { " (paused)" } else { "" };
        let name = format!("{}{paused}", view.queue);
        let oldest = view.oldest_ready.map_or("-".to_owned(), out::short);
        let figures = [
            counts.scheduled,
            counts.ready,
            counts.parked,
            counts.leased,
            counts.completed,
            counts.dead,
            counts.cancelled,
        ];
        let figures = figures.map(|count| count.to_string());
        [name].into_iter().chain(figures).chain([oldest]).collect()
    });
    let jobs = out::table(
        &[
            "jobs",
            "scheduled",
            "ready",
            "parked",
            "leased",
            "completed",
            "dead",
            "cancelled",
            "oldest ready",
        ],
        &jobs.collect::<Vec<_>>(),
    );
    let leases = queues.iter().map(|view| {
        let ledger = &view.ledger;
        let figures = [
            ledger.granted,
            ledger.completed,
            ledger.retried,
            ledger.surrendered,
            ledger.buried,
            ledger.cancelled,
            ledger.expired(),
            ledger.revoked,
            ledger.live,
            ledger.fenced,
        ];
        let figures = figures.map(|count| count.to_string());
        [view.queue.to_string()]
            .into_iter()
            .chain(figures)
            .chain([failed(ledger), ratio(ledger)])
            .collect()
    });
    let leases = out::table(
        &[
            "leases",
            "granted",
            "completed",
            "retried",
            "surrendered",
            "buried",
            "cancelled",
            "expired",
            "revoked",
            "live",
            "fenced",
            "failed",
            "released : expired",
        ],
        &leases.collect::<Vec<_>>(),
    );
    format!("{jobs}\n{leases}")
}

/// The share of the runs that failed.
pub(super) fn failed(ledger: &Ledger) -> String {
    match ledger.failed_share() {
        None => "-".to_owned(),
        Some(share) => out::percent(share),
    }
}

/// How many leases were released for each that expired.
pub(super) fn ratio(ledger: &Ledger) -> String {
    match (ledger.released(), ledger.expired()) {
        (0, 0) => "-".to_owned(),
        (released, 0) => format!("{released} : 0"),
        (released, expired) => format!("{:.1} : 1", released as f64 / expired as f64),
    }
}
