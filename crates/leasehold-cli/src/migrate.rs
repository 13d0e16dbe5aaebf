//! `leasehold migrate`: the tables of a PostgreSQL store.

use std::io::Write as _;

use super::{Cli, Done, Trouble};
use leasehold::store::PostgresStore;

/// Makes the schema or brings it up to date. Stores do that when they are opened, unless their role
/// may not: then somebody who may runs this first.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print the statements and connect to nothing
    #[arg(long)]
    show_sql: bool,

    /// The schema to print the statements for
    #[arg(long, requires = "show_sql", default_value = "leasehold")]
    schema: String,
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let mut out = std::io::stdout().lock();
    if args.show_sql {
        out.write_all(PostgresStore::migrations(&args.schema)?.as_bytes())?;
        return Ok(());
    }
    let url = cli.url()?;
    if !url.starts_with("postgres:") && !url.starts_with("postgresql:") {
        let why =
            "url: only PostgreSQL has tables to migrate; other stores do it when they are opened";
        return Err(Trouble::Usage(why.into()));
    }
    PostgresStore::open(url).await?;
    writeln!(out, "the schema is up to date")?;
    Ok(())
}
