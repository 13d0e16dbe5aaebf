//! The `leasehold` command: the demo, the measurements, and the verbs for people.
//!
//! Data goes to stdout, everything else to stderr. Trouble is one line. Exit codes: 0 done, 1 failed
//! or an invariant broke, 2 wrong usage, 3 not found or unhealthy.
//!
//! | file | command |
//! |---|---|
//! | `demo`, `demo_stage`, `demo_view`, `demo_worker` | `leasehold demo` |
//! | `bench`, `bench_run`, `bench_raw` | `leasehold bench` |
//! | `enqueue` | `leasehold enqueue` |
//! | `migrate` | `leasehold migrate` |
//! | `stats` | `leasehold stats` |
//! | `out`, `scratch` | how things are printed; a directory for what must not stay |

use std::io;
use std::process::ExitCode;

use clap::error::ErrorKind as Clap;
use clap::{Parser, Subcommand, ValueEnum};

use crate::client::Client;
use crate::error::{Error, ErrorKind};

mod bench;
mod bench_raw;
mod bench_run;
#[cfg(unix)]
mod demo;
#[cfg(unix)]
mod demo_stage;
#[cfg(unix)]
mod demo_view;
#[cfg(unix)]
mod demo_worker;
mod enqueue;
#[cfg(feature = "postgres")]
mod migrate;
mod out;
mod scratch;
mod stats;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed, or an invariant broke
  2  wrong usage
  3  not found, or the store is unhealthy

Data goes to stdout; progress and trouble go to stderr. NO_COLOR is honoured.";

/// Background work under leases.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
struct Cli {
    /// The store: `sqlite://PATH`, `sqlite:///ABSOLUTE/PATH` or `memory:`, with `?namespace=NAME`
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
    /// For programs
    Json,
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
    /// Bring the tables of a PostgreSQL store up to date
    #[cfg(feature = "postgres")]
    Migrate(migrate::Args),
    /// Show the queues: jobs by state, the ledger, the oldest ready job
    Stats(stats::Args),
    #[cfg(unix)]
    #[command(hide = true)]
    DemoWorker(demo_worker::Args),
}

/// Why a command did not do what it was asked.
#[derive(Debug)]
enum Trouble {
    /// Exit code 1.
    Failed(String),
    /// Exit code 2.
    Usage(String),
    /// Exit code 3.
    NotFound(String),
    /// Whoever read the output is gone: there is nobody to tell.
    NobodyReads,
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error.kind() {
            ErrorKind::InvalidInput => Self::Usage(text),
            ErrorKind::Unavailable
            | ErrorKind::Contended
            | ErrorKind::Full
            | ErrorKind::Corrupt
            | ErrorKind::ReadOnly
            | ErrorKind::TooNew => Self::NotFound(text),
            _ => Self::Failed(text),
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::NobodyReads;
        }
        Self::Failed(error.to_string())
    }
}

type Done = Result<(), Trouble>;

impl Cli {
    /// The URL of the store that the command is about.
    fn url(&self) -> Result<&str, Trouble> {
        self.url.as_deref().ok_or_else(|| {
            Trouble::Usage("no store: give --url URL, or set LEASEHOLD_URL".to_owned())
        })
    }
}

/// Runs the command that the program's arguments name.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match start(&cli) {
        Ok(()) | Err(Trouble::NobodyReads) => ExitCode::SUCCESS,
        Err(Trouble::Failed(text)) => complain(&text, 1),
        Err(Trouble::Usage(text)) => complain(&text, 2),
        Err(Trouble::NotFound(text)) => complain(&text, 3),
    }
}

fn start(cli: &Cli) -> Done {
    let mut builder = match cli.command {
        // A demo worker is a small process: its handlers only sleep.
        #[cfg(unix)]
        Command::DemoWorker(_) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder.enable_all().build()?;
    let json = cli.output == Output::Json;
    let done = runtime.block_on(async {
        match &cli.command {
            #[cfg(unix)]
            Command::Demo(args) => demo::run(args, json).await,
            #[cfg(unix)]
            Command::DemoWorker(args) => demo_worker::run(args, cli.url()?).await,
            Command::Bench(args) => bench::run(args, cli, json).await,
            Command::Enqueue(args) => enqueue::run(args, cli.url()?, json).await,
            #[cfg(feature = "postgres")]
            Command::Migrate(args) => migrate::run(args, cli).await,
            Command::Stats(args) => stats::run(args, cli.url()?, json).await,
        }
    });
    // Nothing that is still under way may keep the command from ending.
    runtime.shutdown_background();
    done
}

/// Opens the store, and says so if what is stored there is gone with this command.
async fn open(url: &str) -> Result<Client, Trouble> {
    let client = Client::open(url).await?;
    if client.store().name() == "memory" {
        out::note("memory: lives no longer than this command");
    }
    Ok(client)
}

fn complain(text: &str, code: u8) -> ExitCode {
    out::note(&out::one_line(text));
    ExitCode::from(code)
}

/// Help and version as they are; wrong usage in one line.
fn refuse(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        Clap::DisplayHelp | Clap::DisplayVersion | Clap::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        let _ = error.print();
        return ExitCode::from(u8::from(error.use_stderr()) * 2);
    }
    let text = error.to_string();
    let text = text.split("\n\n").next().unwrap_or_default();
    let text = text.strip_prefix("error: ").unwrap_or(text);
    complain(&format!("{text}; try --help"), 2)
}
