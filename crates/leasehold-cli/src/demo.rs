//! `leasehold demo`: the promise, with real processes and real signals.
//!
//! Several workers share a store. One is killed with SIGKILL, one is frozen with SIGSTOP until
//! its leases are somebody else's, and then woken. Nobody cleans up. At the end the ledger must
//! balance, no job may be lost, and the settlements of the woken worker must have been refused.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::json;

use super::demo_stage::{Gone, Stage};
use super::demo_worker::Errand;
use super::out::{self, Paint};
use super::scratch::{self, Scratch};
use super::{Cli, Done, Trouble};
use leasehold::Client;
use leasehold::clock::Timestamp;
use leasehold::inspect::{self, LeaseView, Ledger, Page};
use leasehold::job::{Job as _, JobId, JobState, QueueName};
use leasehold::limits;

const WORKERS: usize = 4;
const SLOTS: usize = 3;
const TERM: Duration = Duration::from_millis(1_200);
/// Jobs at the start, and before the freeze: enough to keep everybody busy until then.
const FIRST: u64 = 72;
const SECOND: u64 = 48;
const KILLED: usize = 2;
const FROZEN: usize = 3;

/// Starts four worker processes on a temporary SQLite file, kills one with SIGKILL, freezes another
/// with SIGSTOP past its term, wakes it, and shows how the leases expire and move to the others and
/// how the store refuses what the woken worker still believes.
///
/// With a URL it plays on that store, in a namespace of its own that is purged at the end.
///
/// Ends by itself after about ten seconds. Exit code 1 if a job was lost, the ledger does not
/// balance, a lease is left over, or nothing stale was refused.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The store; a temporary SQLite file, unless this or --url names another
    #[arg(value_name = "URL")]
    target: Option<String>,

    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,

    /// Keep the jobs, and the temporary SQLite file
    #[arg(long)]
    keep: bool,
}

pub(super) async fn run(args: &Args, cli: &Cli, json: bool) -> Done {
    let place = match args.target.as_deref().or(cli.url.as_deref()) {
        Some(url) => Place::in_store(url)?,
        None => Place::in_a_file(args.keep)?,
    };
    let client = Client::open(&place.url).await?;
    let story = tell(&client, &place);
    let ending = tokio::select! {
        ending = story => ending,
        () = leasehold::hooks::shutdown_signal() => Err(Trouble::Failed("demo: interrupted".to_owned())),
    };
    if args.keep {
        out::note(&format!("kept {}", place.name));
    } else {
        scratch::purge(&client, "demo").await?;
    }
    let ending = ending?;
    if json || args.json {
        out::data(&ending.json())?;
    } else {
        out::data(&ending.text())?;
    }
    ending.verdict()
}

/// Where it plays.
struct Place {
    url: String,
    name: String,
    /// What `name` is, to people.
    is: &'static str,
    _file: Option<Scratch>,
}

impl Place {
    fn in_a_file(keep: bool) -> Result<Self, Trouble> {
        let scratch = Scratch::new(&std::env::temp_dir(), "leasehold-demo", keep)?;
        let file = scratch.path().join("demo.db").display().to_string();
        Ok(Self {
            url: format!("sqlite://{file}"),
            name: file,
            is: "a SQLite file",
            _file: Some(scratch),
        })
    }

    fn in_store(url: &str) -> Result<Self, Trouble> {
        let (url, namespace) = scratch::apart(url, "demo")?;
        let scheme = url.split(':').next().unwrap_or_default();
        let is = match scheme {
            "memory" => {
                return Err(Trouble::Usage(
                    "demo: workers are processes, which cannot share a memory store".to_owned(),
                ));
            }
            "sqlite" => "a SQLite file",
            _ if scheme.starts_with("redis") => "Redis",
            _ => "PostgreSQL",
        };
        Ok(Self {
            url,
            name: format!("namespace {namespace}"),
            is,
            _file: None,
        })
    }
}

async fn tell(client: &Client, place: &Place) -> Result<Ending, Trouble> {
    let queue = QueueName::new(Errand::QUEUE)?;
    let url = place.url.clone();
    let mut stage = Stage::new(client.clone(), queue.clone(), url, WORKERS, SLOTS, TERM);
    stage.enqueue(FIRST).await?;

    stage.view.headline(&format!(
        "{FIRST} jobs wait in {}; {WORKERS} worker processes start, {SLOTS} slots each, \
         leases of {}",
        place.is,
        out::short(TERM),
    ));
    stage.start()?;
    stage
        .watch_until("the workers to start", |seen, _| {
            (1..=WORKERS).all(|worker| seen.of(worker).count() > 1)
        })
        .await?;
    stage.watch_for(Duration::from_millis(1_200)).await?;

    let gone = stage.kill(KILLED).await?;
    stage.view.headline(&format!(
        "worker {KILLED} is killed with SIGKILL while it holds {} leases",
        gone.leases.len()
    ));
    let after_kill = taken_over(&mut stage, client, &gone).await?;
    stage.watch_for(Duration::from_millis(600)).await?;

    stage.enqueue(SECOND).await?;
    let gone = stage.freeze(FROZEN).await?;
    stage.view.headline(&format!(
        "{SECOND} more jobs; worker {FROZEN} is frozen with SIGSTOP in mid-job while it holds {} \
         leases",
        gone.leases.len()
    ));
    stage.more_to_do = false;
    let after_freeze = taken_over(&mut stage, client, &gone).await?;
    stage.watch_for(Duration::from_millis(600)).await?;

    stage.view.headline(&format!(
        "worker {FROZEN} wakes up; it does not know that it slept, and settles with its old receipts"
    ));
    stage.thaw(FROZEN)?;
    stage
        .watch_until("the woken worker to be refused", |_, reports| {
            reports.refused.iter().any(|(worker, _)| *worker == FROZEN)
        })
        .await?;
    stage.view.headline("the workers finish the rest");
    stage
        .watch_until("the rest to be done", |seen, _| {
            let counts = &seen.counts;
            counts.ready + counts.scheduled + counts.leased == 0
        })
        .await?;
    stage.end().await;

    let ledger = stage.look().await?.ledger;
    let completed = completed(client, &queue).await?;
    let jobs = &stage.jobs;
    let lost = jobs.iter().filter(|job| !completed.contains(job)).count();
    Ok(Ending {
        jobs: jobs.len(),
        ledger,
        lost,
        after_kill,
        after_freeze,
    })
}

/// Waits until every job of a worker that is gone runs elsewhere. Returns how long the last took.
async fn taken_over(stage: &mut Stage, client: &Client, gone: &Gone) -> Result<Duration, Trouble> {
    stage
        .watch_until("the leases to move", |_, reports| {
            let elsewhere = |job| {
                reports
                    .started
                    .get(job)
                    .is_some_and(|by| *by != gone.worker)
            };
            gone.leases.iter().all(|lease| elsewhere(&lease.job))
        })
        .await?;
    let mut longest = Duration::ZERO;
    for lease in &gone.leases {
        if let Some(again) = granted_again(client, lease).await? {
            longest = longest.max(again.since(gone.since));
        }
    }
    stage.view.detail(&format!(
        "nobody cleaned up: all {} jobs have new leases, the last after {}",
        gone.leases.len(),
        out::short(longest),
    ));
    Ok(longest)
}

/// When the job of a lease was granted to the next owner, as the store has it on record.
async fn granted_again(client: &Client, lease: &LeaseView) -> Result<Option<Timestamp>, Trouble> {
    let Some(view) = client.job(lease.job).await? else {
        return Ok(None);
    };
    let live = view.lease.iter().map(|now| (now.token, now.granted_at));
    let ended = view
        .job
        .history
        .iter()
        .map(|then| (then.token, then.granted_at));
    let later = live.chain(ended).filter(|(token, _)| *token > lease.token);
    Ok(later.min().map(|(_, granted_at)| granted_at))
}

async fn completed(client: &Client, queue: &QueueName) -> Result<HashSet<JobId>, Trouble> {
    let mut found = HashSet::new();
    let mut page = Page::first(limits::PAGE_ROWS);
    loop {
        let state = JobState::Completed;
        let part = inspect::jobs(&**client.store(), queue.clone(), state, page).await?;
        found.extend(part.rows.iter().map(|view| view.job.id));
        page = match part.next {
            Some(after) => Page {
                after: Some(after),
                rows: limits::PAGE_ROWS,
            },
            None => return Ok(found),
        };
    }
}

/// What is left when it is over.
struct Ending {
    jobs: usize,
    ledger: Ledger,
    lost: usize,
    after_kill: Duration,
    after_freeze: Duration,
}

impl Ending {
    fn json(&self) -> String {
        let ledger = &self.ledger;
        json!({
            "granted": ledger.granted,
            "completed": ledger.completed,
            "retried": ledger.retried,
            "surrendered": ledger.surrendered,
            "buried": ledger.buried,
            "cancelled": ledger.cancelled,
            "expired": ledger.expired(),
            "revoked": ledger.revoked,
            "live": ledger.live,
            "lost": self.lost,
            "stale_refused": ledger.fenced,
        })
        .to_string()
    }

    fn text(&self) -> String {
        let ledger = &self.ledger;
        let paint = Paint::new(std::io::IsTerminal::is_terminal(&std::io::stdout()));
        let mark = |good: bool| {
            if good {
                paint.good("✓")
            } else {
                paint.bad("✗")
            }
        };
        let ends = [
            ("completed", ledger.completed),
            ("retried", ledger.retried),
            ("surrendered", ledger.surrendered),
            ("buried", ledger.buried),
            ("cancelled", ledger.cancelled),
            ("expired", ledger.expired()),
            ("revoked", ledger.revoked),
            ("live", ledger.live),
        ];
        let ends = ends
            .map(|(word, count)| format!("{count} {word}"))
            .join(" + ");
        format!(
            "\n{} ledger         {} leases granted = {ends}\n\
             {} lost jobs      {} of {}\n\
             {} stale actions  {} refused\n  \
             takeover       {} after the kill, {} after the freeze; the term is {}\n",
            mark(ledger.balances() && ledger.live == 0),
            ledger.granted,
            mark(self.lost == 0),
            self.lost,
            self.jobs,
            mark(ledger.fenced > 0),
            ledger.fenced,
            out::short(self.after_kill),
            out::short(self.after_freeze),
            out::short(TERM),
        )
    }

    fn verdict(&self) -> Done {
        let ledger = &self.ledger;
        let broken = [
            (self.lost > 0, "a job was lost"),
            (!ledger.balances(), "the ledger does not balance"),
            (ledger.live > 0, "a lease is left over"),
            (ledger.fenced == 0, "nothing stale was refused"),
        ];
        let broken: Vec<_> = broken.iter().filter(|(broke, _)| *broke).collect();
        if broken.is_empty() {
            return Ok(());
        }
        let broken: Vec<_> = broken.iter().map(|(_, what)| *what).collect();
        Err(Trouble::Failed(format!("demo: {}", broken.join("; "))))
    }
}
