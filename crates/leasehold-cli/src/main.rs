//! The `leasehold` command: the demo, the measurements, and the verbs for people.
//!
//! Everything goes through `inspect` and `control`, so it works on every store. Data goes to
//! stdout, everything else to stderr. An error is one line; `exit` has the codes.
//!
//! | file | command |
//! |---|---|
//! | `demo`, `demo_stage`, `demo_view`, `demo_worker` | `leasehold demo` |
//! | `bench`, `bench_run`, `bench_raw` | `leasehold bench` |
//! | `enqueue`, `stats`, `queues`, `leases`, `dead`, `workers`, `audit`, `doctor`, `serve`, `migrate` | the command of that name |
//! | `jobs`, `job_view` | `leasehold jobs` |
//! | `top`, `top_view` | `leasehold top` |
//! | `shell` | `leasehold completions`, `leasehold man` |
//! | `list`, `act`, `out` | how lists are read and printed, how commands are recorded, how output is formatted |
//! | `exit`, `scratch` | how a command ends; where temporary data goes |

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use self::exit::{Done, Trouble};
use leasehold::Client;
use leasehold::inspect::Page;
use leasehold::store::PostgresStore;

mod act;
mod audit;
mod bench;
mod bench_raw;
mod bench_regime;
mod bench_run;
mod bench_worker;
mod dead;
#[cfg(unix)]
mod demo;
#[cfg(unix)]
mod demo_stage;
#[cfg(unix)]
mod demo_view;
#[cfg(unix)]
mod demo_worker;
mod doctor;
mod enqueue;
mod exit;
mod job_view;
mod jobs;
mod leases;
mod list;
mod migrate;
mod out;
mod queues;
mod scratch;
mod serve;
mod shell;
mod stats;
mod top;
mod top_view;
mod workers;

/// Background work under leases.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_help = exit::CODES, disable_help_subcommand = true)]
struct Cli {
    /// The store, if `LEASEHOLD_URL` does not name it: `sqlite://PATH`, `sqlite:///ABSOLUTE/PATH`,
    /// `redis://HOST`, `postgres://HOST/DATABASE` or `memory:`, with `?namespace=NAME`
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_URL",
        hide_env_values = true,
        value_name = "URL"
    )]
    url: Option<String>,

    /// How to print the result
    #[arg(long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Output {
    /// For people
    Table,
    /// One JSON document
    Json,
    /// A JSON object on a line of its own for each row
    Ndjson,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Kill one worker, freeze another, and watch the leases move
    #[cfg(unix)]
    Demo(demo::Args),
    /// Measure a store through the worker runtime, beside its bare engine
    Bench(bench::Args),
    /// Store a job
    Enqueue(enqueue::Args),
    /// Serve the dashboard and /metrics of a store
    Serve(serve::Args),
    /// Bring the tables of a PostgreSQL store up to date
    Migrate(migrate::Args),
    /// Show the queues: jobs by state, the ledger, the oldest ready job
    Stats(stats::Args),
    /// List, pause, resume and purge queues
    #[command(subcommand)]
    Queues(queues::Args),
    /// List live leases, and revoke them
    #[command(subcommand)]
    Leases(leases::Args),
    /// List, show, cancel and retry jobs
    #[command(subcommand)]
    Jobs(jobs::Args),
    /// List, retry and purge dead jobs
    #[command(subcommand)]
    Dead(dead::Args),
    /// List the workers that hold leases
    #[command(subcommand)]
    Workers(workers::Args),
    /// List the commands on record: who, when, what and why
    Audit(audit::Args),
    /// Watch leases, queues and the ratio in the terminal
    Top(top::Args),
    /// Print a script that completes the command's words
    Completions(shell::Completions),
    /// Print the manual page
    Man(shell::Man),
    /// Check the store's server or file: what is at risk, and what to set
    Doctor(doctor::Args),
    #[cfg(unix)]
    #[command(hide = true)]
    DemoWorker(demo_worker::Args),
    #[command(hide = true)]
    BenchWorker(bench_worker::Args),
}

impl Cli {
    /// The URL of the store that the command is about.
    fn url(&self) -> Result<&str, Trouble> {
        self.url.as_deref().ok_or_else(|| {
            Trouble::Usage("no store: give --url URL, or set LEASEHOLD_URL".to_owned())
        })
    }

    /// Opens a store that must be there: looking at one must not create it.
    async fn open_existing(&self) -> Result<Client, Trouble> {
        let url = self.url()?;
        must_exist(url)?;
        let client = open(url).await?;
        let native = client.store().native();
        if let Some(store) = native.and_then(|native| native.downcast_ref::<PostgresStore>())
            && !store.is_there().await?
        {
            let why = "no store in this database yet: the first enqueue or worker makes its tables, or run \
                       `leasehold migrate`";
            return Err(Trouble::NotFound(why.to_owned()));
        }
        Ok(client)
    }
}

/// Runs the command that the program's arguments name.
fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::refuse(&error),
    };
    exit::code(start(&cli))
}

fn start(cli: &Cli) -> Done {
    let mut builder = match cli.command {
        // A demo worker is a small process: its handlers only sleep.
        #[cfg(unix)]
        Command::DemoWorker(_) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder.enable_all().build()?;
    let json = cli.output != Output::Table;
    let done = runtime.block_on(async {
        match &cli.command {
            #[cfg(unix)]
            Command::Demo(args) => demo::run(args, cli, json).await,
            #[cfg(unix)]
            Command::DemoWorker(args) => demo_worker::run(args, cli.url()?).await,
            Command::Bench(args) => bench::run(args, cli, json).await,
            Command::BenchWorker(args) => bench_worker::run(args, cli.url()?).await,
            Command::Enqueue(args) => enqueue::run(args, cli.url()?, json).await,
            Command::Stats(args) => stats::run(args, cli).await,
            Command::Queues(args) => queues::run(args, cli).await,
            Command::Leases(args) => leases::run(args, cli).await,
            Command::Jobs(args) => jobs::run(args, cli).await,
            Command::Dead(args) => dead::run(args, cli).await,
            Command::Workers(args) => workers::run(args, cli).await,
            Command::Audit(args) => audit::run(args, cli).await,
            Command::Top(args) => top::run(args, cli).await,
            Command::Completions(args) => shell::completions(args),
            Command::Man(args) => shell::man(args),
            Command::Doctor(args) => {
                let url = args.url().map_or_else(|| cli.url(), Ok)?;
                doctor::run(args, url, json).await
            }
            Command::Serve(args) => match args.store() {
                Some(url) => serve::run(args, url).await,
                None => serve::run(args, cli.url()?).await,
            },
            Command::Migrate(args) => migrate::run(args, cli).await,
        }
    });
    // Nothing that is still under way may keep the command from ending.
    runtime.shutdown_background();
    done
}

/// Opens the store, and says so if what is stored there is gone with this command.
///
/// Asks it something small: a store that does not answer is trouble now. A worker would repeat its
/// calls until the store is back; whoever typed a command wants to know.
async fn open(url: &str) -> Result<Client, Trouble> {
    let client = Client::open(url).await?;
    client.audit(Page::first(1)).await?;
    if client.store().name() == "memory" {
        out::note("memory: lives no longer than this command");
    }
    Ok(client)
}

/// A SQLite store is a file, and opening it would make one.
fn must_exist(url: &str) -> Done {
    let address = url.split('?').next().unwrap_or_default();
    let Some(path) = address.strip_prefix("sqlite:") else {
        return Ok(());
    };
    let path = path.strip_prefix("//").unwrap_or(path);
    if path.is_empty() || std::path::Path::new(path).exists() {
        return Ok(());
    }
    Err(Trouble::NotFound(format!("no store at {path}")))
}
