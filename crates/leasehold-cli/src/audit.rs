//! `leasehold audit`: who did what, when, and why.

use serde_json::json;

use super::list::{Limit, Listing, Reader, Row};
use super::{Cli, Done, out};
use leasehold::inspect::AuditView;

/// Lists the commands on record, the newest first.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Those of this actor
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,

    #[command(flatten)]
    limit: Limit,
}

const HEADER: &[&str] = &["at", "actor", "done", "command", "reason"];

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    let mut reader = Reader::new(args.limit);
    let mut listing = Listing::new(cli.output, "commands", HEADER);
    let take = |record: AuditView| {
        if args
            .actor
            .as_ref()
            .is_some_and(|actor| *actor != record.actor)
        {
            return Ok(Row::Skipped);
        }
        let object = || {
            json!({
                "at": out::precise(record.at),
                "actor": record.actor,
                "reason": record.reason,
                "command": record.command,
                "done": record.done,
                "tokens": record.tokens,
            })
        };
        let cells = || {
            let reason = if record.reason.is_empty() {
                "-"
            } else {
                &record.reason
            };
            vec![
                out::time(record.at),
                record.actor.clone(),
                record.done.to_string(),
                record.command.clone(),
                reason.to_owned(),
            ]
        };
        listing.row(object, cells)?;
        Ok(Row::Shown)
    };
    reader.read(|page| client.audit(page), take).await?;
    listing.end(reader.more())
}
