//! `leasehold bench`: what a store does through the worker runtime, beside its bare engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::bench_raw::{self, Rates};
use super::bench_regime::{self, Regime};
use super::bench_run::{self, Waits};
use super::scratch::{self, Scratch};
use super::{Cli, Done, Trouble, out};
use leasehold::Client;
use leasehold::job::Namespace;
use leasehold::limits;
use leasehold::store::MemoryStore;
use leasehold_web::prometheus::Exporter;

/// Rounds of bare engine and worker, in turn: the machine's mood hits both.
const ROUNDS: usize = 3;

/// Measures a store through the worker runtime, in a namespace of its own that is purged at the
/// end.
///
/// In three rounds, a third of the jobs each, the bare engine and the store are measured in turn;
/// the figures are medians.
///
/// enqueue  8 callers enqueue typed jobs, 100 in a call.
///
/// drain    All jobs wait before one worker starts. The rate counts from the start of the worker
///          until the last completion is settled. Metrics are recorded, by a Prometheus recorder.
///
/// wait     From the call of enqueue to the start of the handler, at 200 jobs a second for 3
/// seconds.
///
/// raw      The bare engine, without leases. memory: one loop pops the payload from a locked deque,
///          decodes it and awaits the same handler, boxed. sqlite: one connection to a file in the
///          same directory, WAL, `synchronous` as for the store, inserts and then deletes
///          (DELETE … RETURNING) rows with the same payload, 100 in a transaction. redis: one
///          connection, 8 calls in flight, RPUSH of 100 payloads, which are encoded from the same
///          jobs in the time that counts, and then LPOP of 100, which are not decoded. postgres:
///          one table with a key that counts up, one connection, INSERT of 100 payloads and then
///          DELETE … SKIP LOCKED RETURNING of 100, each a transaction, as durable as the store.
///
/// With --regime it measures what most services do: worker processes of their own, and one producer
/// that enqueues jobs of about 95 bytes one by one at a fixed rate. After a warm-up of one second
/// the workers stand idle for five, then the jobs come.
///
/// `store_us_per_job`    CPU time of the server, all of it. Of PostgreSQL only on this machine.
/// `requests_per_job`    What clients sent (Redis).
/// `commands_per_job`    What the server ran, inside scripts too (Redis).
/// `writes_per_job`      Transactions that wrote (PostgreSQL), of the whole server.
/// `idle_commands_per_s`, `idle_writes_per_s`: the same of all workers while no job comes.
/// `worker_us_per_job`   CPU time of the worker processes.
/// `wait_ms_p50`, `_p99` From before the call of enqueue to the start of the handler.
///
/// Others who use the server at the same time are in its figures.
///
/// Exit code 1 if a job was lost or ran twice.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(super) struct Args {
    /// The store; `sqlite:` without a path is a temporary file [default: --url]
    #[arg(value_name = "URL")]
    target: Option<String>,

    /// How many jobs, in all rounds together
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(3..=50_000_000))]
    jobs: u64,

    /// How many handlers may run at once in a worker [default: 16, with --regime 10]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    slots: Option<u64>,

    /// Bytes of JSON in each payload, roughly
    #[arg(long, default_value_t = 100, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..=limits::PAYLOAD_BYTES as u64))]
    payload: u64,

    /// Measure worker processes and jobs that come one by one
    #[arg(long, conflicts_with_all = ["jobs", "payload"])]
    regime: bool,

    /// Jobs a second
    #[arg(long, requires = "regime", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rate: u64,

    /// Worker processes
    #[arg(long, requires = "regime", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=256))]
    processes: u64,

    /// How long each handler sleeps
    #[arg(long, requires = "regime", default_value_t = 5, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=60_000))]
    job_ms: u64,

    /// How long jobs come
    #[arg(long, requires = "regime", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,

    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    fn slots(&self) -> u64 {
        self.slots.unwrap_or(16)
    }
}

/// What is measured, and where.
pub(super) enum Target {
    Memory,
    Sqlite {
        url: String,
        file: PathBuf,
        full: bool,
        /// Where the bare engine's file is, and the store's if it is temporary.
        scratch: Scratch,
        /// The store's file was not there before.
        made: bool,
    },
    Redis {
        url: String,
        namespace: Namespace,
    },
    Postgres {
        url: String,
    },
}

pub(super) async fn run(args: &Args, cli: &Cli, json: bool) -> Done {
    let url = args.target.as_deref().or(cli.url.as_deref());
    let url = url.ok_or_else(|| Trouble::Usage("no store: give a URL".to_owned()))?;
    let target = Target::of(url)?;
    let json = json || args.json;
    let (lost, duplicates) = if args.regime {
        regime(args, &target, json).await
    } else {
        drains(args, &target, json).await
    }?;
    if lost > 0 || duplicates > 0 {
        return Err(Trouble::Failed(format!(
            "bench: {lost} jobs lost, {duplicates} runs too many"
        )));
    }
    Ok(())
}

/// Measures worker processes, prints what was measured, and returns how many jobs were lost and how
/// many runs were too many.
async fn regime(args: &Args, target: &Target, json: bool) -> Result<(u64, u64), Trouble> {
    let regime = Regime {
        rate: args.rate,
        processes: args.processes,
        slots: args.slots.unwrap_or(10),
        job_ms: args.job_ms,
        seconds: args.seconds,
    };
    let bar = ProgressBar::new_spinner();
    let measured = bench_regime::measure(target, &regime, &bar).await;
    bar.finish_and_clear();
    target.remove();
    let measured = measured?;
    let text = if json {
        measured.json(&regime)
    } else {
        measured.text(&regime)
    };
    out::data(&text)?;
    Ok((measured.lost, measured.duplicates))
}

/// Measures enqueues and drains by the hundred, and the rest as [`regime`] does.
async fn drains(args: &Args, target: &Target, json: bool) -> Result<(u64, u64), Trouble> {
    // What a service would have.
    Exporter::install()?;
    let measured = measure(args, target).await;
    target.remove();
    let report = measured?;
    let text = if json {
        report.json(args)
    } else {
        report.text(args)
    };
    out::data(&text)?;
    Ok((report.lost, report.duplicates))
}

async fn measure(args: &Args, target: &Target) -> Result<Report, Trouble> {
    let bar = ProgressBar::new(2 * ROUNDS as u64 + 1);
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {msg}") {
        bar.set_style(style);
    }
    let mut client = target.open().await?;
    let mut report = Report {
        store: client.store().name(),
        ..Report::default()
    };
    let jobs = args.jobs as usize / ROUNDS;
    let (slots, payload) = (args.slots() as usize, args.payload as usize);
    for round in 1..=ROUNDS {
        bar.set_message(format!("round {round}: bare engine"));
        report.raw.push(target.raw(jobs, payload).await?);
        bar.inc(1);
        bar.set_message(format!("round {round}: {}", report.store));
        if matches!(target, Target::Memory) {
            client = target.open().await?;
        }
        let round = bench_run::round(&client, jobs, slots, payload).await?;
        report.lost += round.lost;
        report.duplicates += round.duplicates;
        report.rates.push(round.rates);
        bar.inc(1);
    }
    bar.set_message("wait");
    report.waits = bench_run::waits(&client, slots, payload).await?;
    report.lost += report.waits.lost;
    report.duplicates += report.waits.duplicates;
    scratch::purge(&client, "bench").await?;
    bar.finish_and_clear();
    Ok(report)
}

impl Target {
    fn of(url: &str) -> Result<Self, Trouble> {
        let (url, namespace) = scratch::apart(url, "bench")?;
        let (address, query) = url.split_once('?').unwrap_or((&url, ""));
        let Some(path) = address.strip_prefix("sqlite:") else {
            // The address may hold a password: only its scheme is shown.
            let scheme = address.split(':').next().unwrap_or_default();
            return match scheme {
                "memory" => Ok(Self::Memory),
                _ if scheme.starts_with("redis") => Ok(Self::Redis { url, namespace }),
                _ if scheme.starts_with("postgres") => Ok(Self::Postgres { url }),
                _ => Err(Trouble::Usage(format!(
                    "bench: cannot measure {scheme:?} stores; memory:, sqlite:, redis: and postgres: \
                     can be measured"
                ))),
            };
        };
        let path = path.strip_prefix("//").unwrap_or(path);
        let given = (!path.is_empty()).then(|| PathBuf::from(path));
        let parent = match &given {
            None => std::env::temp_dir(),
            Some(file) => match file.parent() {
                Some(dir) if dir != Path::new("") => dir.to_owned(),
                _ => PathBuf::from("."),
            },
        };
        let scratch = Scratch::new(&parent, "leasehold-bench", false)?;
        let file = given.unwrap_or_else(|| scratch.path().join("store.db"));
        Ok(Self::Sqlite {
            url: format!("sqlite://{}?{query}", file.display()),
            full: !query.split('&').any(|pair| pair == "synchronous=normal"),
            made: !file.exists(),
            file,
            scratch,
        })
    }

    /// What another process opens. None: it could not.
    pub(super) fn url(&self) -> Option<&str> {
        match self {
            Self::Memory => None,
            Self::Sqlite { url, .. } | Self::Redis { url, .. } | Self::Postgres { url } => {
                Some(url)
            }
        }
    }

    pub(super) async fn open(&self) -> Result<Client, Trouble> {
        match self.url() {
            None => Ok(Client::new(Arc::new(MemoryStore::new()))),
            Some(url) => Ok(Client::open(url).await?),
        }
    }

    async fn raw(&self, jobs: usize, payload: usize) -> Result<Rates, Trouble> {
        match self {
            Self::Memory => bench_raw::memory(jobs, payload).await,
            Self::Sqlite { scratch, full, .. } => {
                let (file, full) = (scratch.path().join("raw.db"), *full);
                let raw = move || bench_raw::sqlite(&file, full, jobs, payload);
                tokio::task::spawn_blocking(raw)
                    .await
                    .map_err(|error| Trouble::Failed(format!("bench: {error}")))?
            }
            Self::Redis { url, namespace } => bench_raw::redis(url, namespace, jobs, payload).await,
            Self::Postgres { url } => bench_raw::postgres(url, jobs, payload).await,
        }
    }

    /// Removes a file that this command has made.
    fn remove(&self) {
        if let Self::Sqlite {
            file, made: true, ..
        } = self
        {
            let beside = |end: &str| {
                let mut path = file.clone().into_os_string();
                path.push(end);
                path
            };
            for end in ["", "-wal", "-shm", "-turn", "-reserve"] {
                let _ = std::fs::remove_file(beside(end));
            }
            let _ = std::fs::remove_dir_all(beside("-sleepers"));
        }
    }
}

#[derive(Default)]
struct Report {
    store: &'static str,
    rates: Vec<Rates>,
    raw: Vec<Rates>,
    waits: Waits,
    lost: u64,
    duplicates: u64,
}

impl Report {
    fn drain_over_raw(&self) -> f64 {
        let pairs = self.rates.iter().zip(&self.raw);
        median(pairs.map(|(ours, raw)| ours.drain / raw.drain))
    }

    fn json(&self, args: &Args) -> String {
        let whole = |rate: f64| rate.round() as u64;
        let thousandths = |figure: f64| (figure * 1e3).round() / 1e3;
        json!({
            "store": self.store,
            "jobs": args.jobs / ROUNDS as u64 * ROUNDS as u64,
            "slots": args.slots(),
            "payload_bytes": args.payload,
            "enqueue_per_s": whole(median(self.rates.iter().map(|rates| rates.enqueue))),
            "drain_per_s": whole(median(self.rates.iter().map(|rates| rates.drain))),
            "wait_ms_p50": thousandths(self.waits.p50),
            "wait_ms_p99": thousandths(self.waits.p99),
            "lost": self.lost,
            "duplicates": self.duplicates,
            "raw_enqueue_per_s": whole(median(self.raw.iter().map(|rates| rates.enqueue))),
            "raw_drain_per_s": whole(median(self.raw.iter().map(|rates| rates.drain))),
            "drain_over_raw": thousandths(self.drain_over_raw()),
        })
        .to_string()
    }

    fn text(&self, args: &Args) -> String {
        let row = |name: &str, of: fn(&Rates) -> f64| {
            let ours = median(self.rates.iter().map(of));
            let raw = median(self.raw.iter().map(of));
            let pairs = self.rates.iter().zip(&self.raw);
            let ratio = median(pairs.map(|(ours, raw)| of(ours) / of(raw)));
            vec![
                name.to_owned(),
                format!("{}/s", out::grouped(ours)),
                format!("{}/s", out::grouped(raw)),
                format!("{ratio:.2}"),
            ]
        };
        let rows = [
            row("enqueue", |rates| rates.enqueue),
            row("drain", |rates| rates.drain),
        ];
        format!(
            "{} jobs of {} bytes, {} slots, medians of {ROUNDS} rounds\n\n{}\n\
             wait from enqueue to start: p50 {:.2} ms, p99 {:.2} ms\n\
             lost {}, duplicates {}\n",
            out::grouped(args.jobs as f64),
            args.payload,
            args.slots(),
            out::table(&["", self.store, "raw", "ratio"], &rows),
            self.waits.p50,
            self.waits.p99,
            self.lost,
            self.duplicates,
        )
    }
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}
