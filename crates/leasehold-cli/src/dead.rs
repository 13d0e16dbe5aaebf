//! `leasehold dead`: the jobs that were given up, by kind and error.

use std::collections::BTreeMap;

use serde_json::json;

use super::act::{self, By, Consent};
use super::list::{Limit, Listing, Reader, Row};
use super::{Cli, Done, Trouble, job_view, jobs, out};
use leasehold::Client;
use leasehold::clock::Timestamp;
use leasehold::inspect::JobView;
use leasehold::job::{JobId, JobRecord, JobState, Kind, QueueName};
use leasehold::limits;
use leasehold::store::{ControlCommand, Controlled, Select};

#[derive(Debug, clap::Subcommand)]
pub(super) enum Args {
    /// List dead jobs, grouped by kind and error
    Ls(ListDead),
    /// Give dead jobs another life: ready, with their counts at zero
    Retry(RetryDead),
    /// Delete dead jobs
    Purge(PurgeDead),
}

#[derive(Debug, clap::Args)]
pub(super) struct ListDead {
    #[command(flatten)]
    filter: Filter,

    /// One row for each job
    #[arg(long)]
    ungrouped: bool,

    #[command(flatten)]
    limit: Limit,
}

#[derive(Debug, clap::Args)]
pub(super) struct RetryDead {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    by: By,
}

#[derive(Debug, clap::Args)]
pub(super) struct PurgeDead {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    by: By,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Debug, clap::Args)]
struct Filter {
    /// Of this queue
    #[arg(long)]
    queue: Option<QueueName>,

    /// Whose kind or error contains this text, as `dead ls` or `jobs show` prints it; upper and
    /// lower case are the same
    #[arg(long = "match", value_name = "TEXT")]
    text: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Which {
    /// These jobs
    #[arg(value_name = "JOB", conflicts_with_all = ["text", "queue", "all"])]
    ids: Vec<JobId>,

    #[command(flatten)]
    filter: Filter,

    /// All of them, or all of --queue
    #[arg(long, conflicts_with = "text")]
    all: bool,
}

pub(super) async fn run(args: &Args, cli: &Cli) -> Done {
    let client = cli.open_existing().await?;
    match args {
        Args::Ls(ls) if ls.ungrouped => list(ls, cli, &client).await,
        Args::Ls(ls) => groups(ls, cli, &client).await,
        Args::Retry(retry) => {
            let jobs = retry.which.find(&client).await?;
            let answer = jobs
                .act(&client, &retry.by, ControlCommand::RetryDead)
                .await?;
            act::report(cli, "retry", &answer)
        }
        Args::Purge(purge) => {
            let jobs = purge.which.find(&client).await?;
            let what = format!("purge {}", act::counted(jobs.count(), "dead job"));
            purge.consent.ask(&what)?;
            let answer = jobs.act(&client, &purge.by, ControlCommand::Purge).await?;
            act::report(cli, "purge", &answer)
        }
    }
}

impl Filter {
    /// The queues that have dead jobs, with how many.
    async fn queues(&self, client: &Client) -> Result<Vec<(QueueName, u64)>, Trouble> {
        if let Some(queue) = &self.queue {
            let view = act::known(client, queue).await?;
            return Ok(vec![(view.queue, view.counts.dead)]);
        }
        let views = client.queues().await?.into_iter();
        let dead = views.map(|view| (view.queue, view.counts.dead));
        Ok(dead.filter(|(_, dead)| *dead > 0).collect())
    }

    /// Hands on every dead job that matches.
    async fn read(
        &self,
        client: &Client,
        reader: &mut Reader,
        mut take: impl FnMut(JobView) -> Done,
    ) -> Done {
        let text = self.text.as_ref().map(|text| text.to_lowercase());
        for (queue, _) in self.queues(client).await? {
            let page = |page| client.jobs(queue.clone(), JobState::Dead, page);
            let found = |view: JobView| {
                if text.as_ref().is_some_and(|text| !matches(&view.job, text)) {
                    return Ok(Row::Skipped);
                }
                take(view)?;
                Ok(Row::Shown)
            };
            reader.read(page, found).await?;
        }
        Ok(())
    }
}

/// Whether a job's kind, its error or the name of its group contains a lower-case text.
fn matches(job: &JobRecord, text: &str) -> bool {
    let error = error(job);
    [job.kind.as_str(), &error, &masked(&error)]
        .iter()
        .any(|part| part.to_lowercase().contains(text))
}

/// Why a dead job died.
fn error(job: &JobRecord) -> String {
    job.history
        .last()
        .map_or("unknown".to_owned(), job_view::why)
}

/// The first line of an error without the numbers and ids that differ from job to job.
fn masked(error: &str) -> String {
    let line = out::one_line(error.lines().next().unwrap_or_default());
    let mut text = String::new();
    let mut word = String::new();
    for c in line.chars().chain(['\0']) {
        if c.is_alphanumeric() {
            word.push(c);
            continue;
        }
        let number = !word.is_empty() && word.chars().all(|c| c.is_ascii_digit());
        let id = word.len() >= 8
            && word.chars().all(|c| c.is_ascii_hexdigit())
            && word.chars().any(|c| c.is_ascii_digit());
        text += if number || id { "#" } else { &word };
        word.clear();
        if c != '\0' {
            text.push(c);
        }
    }
    out::clip(&text, 160)
}

async fn list(ls: &ListDead, cli: &Cli, client: &Client) -> Done {
    const HEADER: &[&str] = &["job", "kind", "queue", "attempt", "died", "error"];
    let mut reader = Reader::new(ls.limit);
    let mut listing = Listing::new(cli.output, "jobs", HEADER).or_else("no dead jobs");
    let take = |view: JobView| {
        let cells = || {
            vec![
                view.job.id.to_string(),
                view.job.kind.to_string(),
                view.queue.to_string(),
                view.attempt().to_string(),
                view.settled_at.map_or("-".to_owned(), out::time),
                out::clip(&error(&view.job), 120),
            ]
        };
        listing.row(|| jobs::object(&view), cells)
    };
    ls.filter.read(client, &mut reader, take).await?;
    listing.end(reader.more())
}

struct Group {
    jobs: u64,
    first: Timestamp,
    last: Timestamp,
    example: JobId,
}

async fn groups(ls: &ListDead, cli: &Cli, client: &Client) -> Done {
    const HEADER: &[&str] = &[
        "kind",
        "jobs",
        "first died",
        "last died",
        "example",
        "error",
    ];
    let mut groups: BTreeMap<(Kind, String), Group> = BTreeMap::new();
    let take = |view: JobView| {
        let at = view.settled_at.unwrap_or_default();
        let key = (view.job.kind.clone(), masked(&error(&view.job)));
        let new = Group {
            jobs: 0,
            first: at,
            last: at,
            example: view.job.id,
        };
        let group = groups.entry(key).or_insert(new);
        group.jobs += 1;
        group.first = group.first.min(at);
        if at >= group.last {
            (group.last, group.example) = (at, view.job.id);
        }
        Ok(())
    };
    ls.filter.read(client, &mut Reader::all(), take).await?;
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.jobs));
    let shown = ls.limit.rows().min(groups.len());
    let mut listing = Listing::new(cli.output, "groups", HEADER).or_else("no dead jobs");
    for ((kind, error), group) in &groups[..shown] {
        let object = || {
            json!({
                "kind": kind,
                "error": error,
                "jobs": group.jobs,
                "first_at": out::precise(group.first),
                "last_at": out::precise(group.last),
                "example": group.example,
            })
        };
        let cells = || {
            vec![
                kind.to_string(),
                group.jobs.to_string(),
                out::time(group.first),
                out::time(group.last),
                group.example.to_string(),
                error.clone(),
            ]
        };
        listing.row(object, cells)?;
    }
    listing.end(shown < groups.len())
}

/// Dead jobs to act on.
enum Found {
    /// One by one.
    Jobs(Vec<JobId>),
    /// All of these queues.
    Queues(Vec<(QueueName, u64)>),
}

impl Which {
    async fn find(&self, client: &Client) -> Result<Found, Trouble> {
        if !self.ids.is_empty() {
            for &id in &self.ids {
                let job = jobs::found(client, id).await?;
                if job.state != JobState::Dead {
                    return Err(Trouble::Failed(format!(
                        "job {id} is {}, not dead",
                        job.state
                    )));
                }
            }
            return Ok(Found::Jobs(self.ids.clone()));
        }
        if self.all {
            return Ok(Found::Queues(self.filter.queues(client).await?));
        }
        if self.filter.text.is_none() {
            return Err(Trouble::Usage(
                "which? give --match TEXT, job ids, or --all".to_owned(),
            ));
        }
        let mut ids = Vec::new();
        let take = |view: JobView| {
            ids.push(view.job.id);
            Ok(())
        };
        self.filter.read(client, &mut Reader::all(), take).await?;
        Ok(Found::Jobs(ids))
    }
}

impl Found {
    fn count(&self) -> u64 {
        match self {
            Self::Jobs(ids) => ids.len() as u64,
            Self::Queues(queues) => queues.iter().map(|(_, dead)| dead).sum(),
        }
    }

    async fn act(
        &self,
        client: &Client,
        by: &By,
        command: fn(Select) -> ControlCommand,
    ) -> Result<Controlled, Trouble> {
        match self {
            Self::Jobs(ids) => by.each(client, ids, |id| command(Select::Job(id))).await,
            Self::Queues(queues) => {
                let bar = act::bar(self.count());
                let mut sum = Controlled::default();
                for (queue, _) in queues {
                    let (queue, state, max) = (queue.clone(), JobState::Dead, limits::CALL_ITEMS);
                    let command = command(Select::State { queue, state, max });
                    act::add(&mut sum, by.exhaust(client, &command, &bar).await?);
                }
                bar.finish_and_clear();
                Ok(sum)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::masked;

    #[test]
    fn what_differs_from_job_to_job_is_masked() {
        assert_eq!(masked("timeout after 1203 ms"), "timeout after # ms");
        assert_eq!(
            masked("no user 01977a3e-11aa-7bcd-8f00-0123456789ab\nat line 3"),
            "no user #-11aa-7bcd-8f00-#"
        );
        assert_eq!(masked("http2: E0277 in café"), "http2: E0277 in café");
        assert_eq!(masked(""), "");
    }
}
