//! `leasehold doctor`: a check-up of the store, in plain words.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use serde_json::{Value, json};

use super::{Done, Trouble, out};
use leasehold::hooks::{Finding, Level};

const EXIT_CODES: &str = "\
Exit codes:
  0  nothing is at risk
  1  something is at risk, or could not be looked at
  2  wrong usage
  3  the store cannot be reached";

/// Looks at the store's server or file: version, durability, memory, replication, clock, rights.
///
/// Changes nothing, unless asked to repair. Says what is at risk, and what to set.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Args {
    /// The store, instead of --url: also `redis://…`, `rediss://…`, `redis+sentinel://…`,
    /// `redis+cluster://…`, `postgres://…`
    #[arg(value_name = "URL")]
    store: Option<String>,
    /// As --output json
    #[arg(long)]
    json: bool,
    /// First put back what a Redis server lost by evicted or deleted keys, and count anew
    #[arg(long)]
    repair: bool,
}

impl Args {
    /// The URL that was given here.
    pub(super) fn url(&self) -> Option<&str> {
        self.store.as_deref()
    }
}

pub(super) async fn run(args: &Args, url: &str, json: bool) -> Done {
    let mut findings = Vec::new();
    if args.repair {
        if !url.starts_with("redis") && !url.starts_with("valkey") {
            let why = "doctor: --repair is for Redis, where single keys can be lost";
            return Err(Trouble::Usage(why.to_owned()));
        }
        findings.push(leasehold::hooks::repair_redis(url).await?);
    }
    findings.extend(examine(url).await?);
    if json || args.json {
        let healthy = findings.iter().all(is_healthy);
        let findings: Vec<Value> = findings.iter().map(object).collect();
        out::data(&json!({ "healthy": healthy, "findings": findings }).to_string())?;
    } else {
        out::data(&table(&findings))?;
    }
    let bad = findings.iter().filter(|finding| !is_healthy(finding));
    match bad.count() {
        0 => Ok(()),
        1 => Err(Trouble::Failed("1 finding needs a look".to_owned())),
        n => Err(Trouble::Failed(format!("{n} findings need a look"))),
    }
}

fn is_healthy(finding: &Finding) -> bool {
    matches!(finding.level, Level::Fine | Level::Note)
}

async fn examine(url: &str) -> Result<Vec<Finding>, Trouble> {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    match address.split_once(':').map_or("", |(scheme, _)| scheme) {
        "memory" => Ok(vec![Finding::note(
            "durability",
            "none",
            "jobs and leases end with the process: right for tests, and for nothing else",
        )]),
        "sqlite" => {
            let path = address.trim_start_matches("sqlite:");
            let path = path.strip_prefix("//").unwrap_or(path);
            let full = !query.split('&').any(|pair| pair == "synchronous=normal");
            Ok(leasehold::hooks::examine_sqlite(path.as_ref(), full)?)
        }
        "postgres" | "postgresql" => Ok(leasehold::hooks::examine_postgres(url).await?),
        _ => Ok(leasehold::hooks::examine_redis(url).await?),
    }
}

fn object(finding: &Finding) -> Value {
    json!({
        "place": finding.place,
        "check": finding.check,
        "level": finding.level.as_str(),
        "found": finding.found,
        "advice": finding.advice,
    })
}

/// A line for each finding, and below it, indented, what it means.
fn table(findings: &[Finding]) -> String {
    let paint = out::Paint::new(std::io::stdout().is_terminal());
    let width = |of: fn(&Finding) -> usize| findings.iter().map(of).max().unwrap_or(0);
    let place = width(|finding| finding.place.chars().count());
    let check = width(|finding| finding.check.len());
    let mut text = String::new();
    for finding in findings {
        let level = format!("{:<6}", finding.level.as_str());
        let level = match finding.level {
            Level::Fine => paint.good(&level),
            Level::Note => paint.cold(&level),
            Level::Unseen | Level::Risk => paint.bad(&level),
        };
        let gap = if place > 0 { "  " } else { "" };
        let (place_name, check_name) = (&finding.place, finding.check);
        // Writing to a `String` does not fail.
        let _ = writeln!(
            text,
            "{level}  {place_name:<place$}{gap}{check_name:<check$}  {}",
            finding.found
        );
        if !finding.advice.is_empty() {
            let _ = writeln!(text, "        {}", finding.advice);
        }
    }
    text
}
