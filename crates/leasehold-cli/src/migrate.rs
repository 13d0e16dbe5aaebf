//! `leasehold migrate`: the tables of a PostgreSQL store.

use std::io::Write as _;

use super::{Cli, Done, Trouble};
use leasehold::store::PostgresStore;

/// Makes the schema or brings it up to date. Where there is none, the first call that writes makes
/// it, if its role may; one of an earlier version changes only by this, or by `migrate=true` in the
/// URL.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print the statements and connect to nothing
    #[arg(long)]
    show_sql: bool,

    /// Print statements that make roles for producers, workers, readers and operators, and connect
    /// to nothing
    #[arg(long, conflicts_with = "show_sql")]
    roles: bool,

    /// The schema to print the statements for
    #[arg(long, default_value = "leasehold")]
    schema: String,
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let mut out = std::io::stdout().lock();
    if args.show_sql {
        out.write_all(PostgresStore::migrations(&args.schema)?.as_bytes())?;
        return Ok(());
    }
    if args.roles {
        out.write_all(PostgresStore::roles(&args.schema)?.as_bytes())?;
        return Ok(());
    }
    let url = cli.url()?;
    if !url.starts_with("postgres:") && !url.starts_with("postgresql:") {
        let why =
            "url: only PostgreSQL has tables to migrate; other stores do it when they are opened";
        return Err(Trouble::Usage(why.into()));
    }
    PostgresStore::open(&asking(url)).await?;
    writeln!(out, "the schema is up to date")?;
    Ok(())
}

/// The URL with the wish to migrate, whatever it says itself.
fn asking(url: &str) -> String {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let settings = query
        .split('&')
        .filter(|pair| !pair.is_empty() && !pair.starts_with("migrate="));
    let settings: Vec<&str> = settings.chain(["migrate=true"]).collect();
    format!("{address}?{}", settings.join("&"))
}
