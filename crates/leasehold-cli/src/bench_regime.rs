//! `leasehold bench --regime`: several worker processes, and jobs that come one by one.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::bench::Target;
use super::bench_worker::{Runs, Stamped};
use super::{Trouble, out, scratch};
use leasehold::Client;
use leasehold::clock::{Clock as _, SystemClock};
use leasehold::hooks::{List, ProcessStat, ServerLoad, Table, monotonic};
use leasehold::job::{Job as _, QueueName};

/// How long the workers are watched before the first job comes.
const IDLE: Duration = Duration::from_secs(5);
/// Jobs that come before it counts, at the same rate.
const WARM_UP: Duration = Duration::from_secs(1);
/// How long the last jobs may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Jobs of about 95 bytes.
const PAD: usize = 50;

/// What is asked for.
pub(super) struct Regime {
    pub(super) rate: u64,
    pub(super) processes: u64,
    pub(super) slots: u64,
    pub(super) job_ms: u64,
    pub(super) seconds: u64,
}

/// What it came to.
pub(super) struct Measured {
    store: &'static str,
    jobs: u64,
    /// While the jobs ran, and in the idle time before them.
    server: ServerLoad,
    idle: ServerLoad,
    /// CPU time of the worker processes while the jobs ran.
    workers: Option<Duration>,
    /// Of all runs, ascending, in microseconds.
    waits: Vec<u64>,
    pub(super) lost: u64,
    pub(super) duplicates: u64,
}

/// A worker process. It is gone with its guard.
struct WorkerProcess {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl WorkerProcess {
    fn start(url: &str, regime: &Regime) -> Result<Self, Trouble> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("bench-worker")
            // It may hold a password, and everybody can read arguments.
            .env("LEASEHOLD_URL", url)
            .args(["--slots", &regime.slots.to_string()])
            .args(["--job-ms", &regime.job_ms.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().map(BufReader::new);
        let stdout = stdout.ok_or_else(|| failed("a worker has no stdout"))?;
        Ok(Self { child, stdout })
    }

    fn line(&mut self) -> Result<String, Trouble> {
        let mut line = String::new();
        match self.stdout.read_line(&mut line) {
            Ok(read) if read > 0 => Ok(line),
            _ => Err(failed("a worker ended early")),
        }
    }

    /// Lets it drain, and returns what it ran.
    fn end(mut self) -> Result<Runs, Trouble> {
        drop(self.child.stdin.take());
        let runs = self.line()?;
        serde_json::from_str(&runs).map_err(|_| failed("a worker told nothing of its runs"))
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Where the server's counters are read.
enum Meter {
    Redis(List),
    Postgres(Table),
    /// No server.
    None,
}

impl Meter {
    async fn of(target: &Target) -> Result<Self, Trouble> {
        Ok(match target {
            Target::Redis { url, namespace } => {
                let queue = QueueName::new(Stamped::QUEUE)?;
                Self::Redis(List::open(url, namespace, &queue)?)
            }
            Target::Postgres { url } => Self::Postgres(Table::create(url).await?),
            Target::Memory | Target::Sqlite { .. } => Self::None,
        })
    }

    async fn read(&self) -> Result<ServerLoad, Trouble> {
        Ok(match self {
            Self::Redis(list) => list.load().await?,
            Self::Postgres(table) => table.load().await?,
            Self::None => ServerLoad::default(),
        })
    }

    async fn end(self) -> Result<(), Trouble> {
        if let Self::Postgres(table) = self {
            table.drop().await?;
        }
        Ok(())
    }
}

pub(super) async fn measure(
    target: &Target,
    regime: &Regime,
    bar: &ProgressBar,
) -> Result<Measured, Trouble> {
    let Some(url) = target.url() else {
        let why = "bench: a memory store lives in one process, and --regime runs several";
        return Err(Trouble::Usage(why.to_owned()));
    };
    let client = target.open().await?;
    let meter = Meter::of(target).await?;
    let mut workers = Vec::new();
    for _ in 0..regime.processes {
        workers.push(WorkerProcess::start(url, regime)?);
    }
    for worker in &mut workers {
        worker.line()?;
    }
    bar.set_message("warm-up");
    let warm_up = regime.rate * WARM_UP.as_secs();
    let jobs = regime.rate * regime.seconds;
    produce(&client, regime.rate, jobs..jobs + warm_up).await?;
    completed(&client, warm_up).await?;

    bar.set_message("idle");
    let began = meter.read().await?;
    tokio::time::sleep(IDLE).await;
    let idle = meter.read().await?.since(&began);

    bar.set_message(format!("{} jobs a second", regime.rate));
    let (began, cpu) = (meter.read().await?, cpu_of(&workers));
    produce(&client, regime.rate, 0..jobs).await?;
    let all_done = completed(&client, warm_up + jobs).await;
    let (server, used) = (meter.read().await?.since(&began), cpu_of(&workers));
    meter.end().await?;

    let mut times_run = vec![0_u64; (jobs + warm_up) as usize];
    let mut waits = Vec::new();
    for worker in workers {
        for (n, waited) in worker.end()?.0 {
            if let Some(times) = times_run.get_mut(n as usize) {
                *times += 1;
            }
            if n < jobs {
                waits.push(waited);
            }
        }
    }
    waits.sort_unstable();
    scratch::purge(&client, "bench").await?;
    let lost = times_run.iter().filter(|times| **times == 0).count() as u64;
    if lost == 0 {
        // All ran; if some are not completed, that is trouble of another kind.
        all_done?;
    }
    Ok(Measured {
        store: client.store().name(),
        jobs,
        server,
        idle,
        workers: used
            .zip(cpu)
            .map(|(used, before)| used.saturating_sub(before)),
        waits,
        lost,
        duplicates: times_run.iter().map(|times| times.saturating_sub(1)).sum(),
    })
}

/// Enqueues jobs one by one at a fixed rate, whether or not the one before is answered.
async fn produce(client: &Client, rate: u64, numbers: std::ops::Range<u64>) -> Result<(), Trouble> {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate as u32);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut calls = JoinSet::new();
    for n in numbers {
        ticks.tick().await;
        let client = client.clone();
        calls.spawn(async move {
            let job = Stamped {
                n,
                sent: SystemClock.now().as_micros(),
                pad: "x".repeat(PAD),
            };
            client.enqueue(&job).await.map(drop)
        });
        while let Some(call) = calls.try_join_next() {
            call.unwrap_or(Ok(()))?;
        }
    }
    while let Some(call) = calls.join_next().await {
        call.unwrap_or(Ok(()))?;
    }
    Ok(())
}

/// Waits until so many jobs are completed.
async fn completed(client: &Client, jobs: u64) -> Result<(), Trouble> {
    let until = monotonic() + PATIENCE;
    while monotonic() < until {
        let queues = client.queues().await?;
        let queue = queues
            .iter()
            .find(|view| view.queue.as_str() == Stamped::QUEUE);
        if queue.is_some_and(|view| view.ledger.completed >= jobs) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Err(failed("the workers did not complete all jobs in a minute"))
}

/// CPU time of all workers, where the system tells it.
fn cpu_of(workers: &[WorkerProcess]) -> Option<Duration> {
    let stats = workers
        .iter()
        .map(|worker| ProcessStat::of(worker.child.id()));
    stats.map(|stat| stat.map(|stat| stat.own)).sum()
}

fn failed(why: &str) -> Trouble {
    Trouble::Failed(format!("bench: {why}"))
}

impl Measured {
    fn per_job(&self, count: Option<u64>) -> Option<f64> {
        count.map(|count| count as f64 / self.jobs as f64)
    }

    fn micros_per_job(&self, cpu: Option<Duration>) -> Option<f64> {
        cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / self.jobs as f64)
    }

    fn wait_ms(&self, percent: usize) -> Option<f64> {
        let at = (self.waits.len() * percent / 100).min(self.waits.len().saturating_sub(1));
        self.waits.get(at).map(|micros| *micros as f64 / 1e3)
    }

    /// Every figure with its name, in the order in which they are printed.
    fn figures(&self) -> [(&'static str, Option<f64>); 9] {
        let a_second = |count: Option<u64>| count.map(|n| n as f64 / IDLE.as_secs_f64());
        [
            ("store_us_per_job", self.micros_per_job(self.server.cpu)),
            ("requests_per_job", self.per_job(self.server.requests)),
            ("commands_per_job", self.per_job(self.server.commands)),
            ("writes_per_job", self.per_job(self.server.writes)),
            ("idle_commands_per_s", a_second(self.idle.commands)),
            ("idle_writes_per_s", a_second(self.idle.writes)),
            ("worker_us_per_job", self.micros_per_job(self.workers)),
            ("wait_ms_p50", self.wait_ms(50)),
            ("wait_ms_p99", self.wait_ms(99)),
        ]
    }

    pub(super) fn json(&self, regime: &Regime) -> String {
        let mut all = json!({
            "store": self.store,
            "rate": regime.rate,
            "seconds": regime.seconds,
            "processes": regime.processes,
            "slots": regime.slots,
            "job_ms": regime.job_ms,
            "jobs": self.jobs,
            "lost": self.lost,
            "duplicates": self.duplicates,
        });
        for (name, figure) in self.figures() {
            all[name] = figure.map_or(Value::Null, |figure| json!((figure * 1e3).round() / 1e3));
        }
        all.to_string()
    }

    pub(super) fn text(&self, regime: &Regime) -> String {
        let row = |(name, figure): &(&str, Option<f64>)| {
            let figure =
                figure.map_or("not known here".to_owned(), |figure| format!("{figure:.2}"));
            vec![(*name).to_owned(), figure]
        };
        let rows: Vec<_> = self.figures().iter().map(row).collect();
        format!(
            "{}: {} processes of {} slots, jobs of {} ms, {} a second for {} s\n\n{}\n\
             lost {}, duplicates {}\n",
            self.store,
            regime.processes,
            regime.slots,
            regime.job_ms,
            regime.rate,
            regime.seconds,
            out::table(&["", "value"], &rows),
            self.lost,
            self.duplicates,
        )
    }
}
