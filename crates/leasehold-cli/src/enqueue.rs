//! `leasehold enqueue`: store a job by hand.

use std::io::Read as _;
use std::time::Duration;

use serde::de::IgnoredAny;
use serde_json::json;

use super::{Done, Trouble, out};
use leasehold::job::{Kind, NewJob, QueueName};
use leasehold::limits;
use leasehold::store::Enqueued;

/// Prints the job's id, and `new`, or `duplicate` if its unique key was held: then the id is that
/// of the job that holds it.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The job's type
    kind: String,

    /// The payload: JSON, @FILE to read it from a file, - to read it from stdin
    #[arg(default_value = "{}", allow_hyphen_values = true)]
    payload: String,

    /// The version of the payload, if the kind has more than one [default: 1]
    #[arg(long, value_name = "N")]
    payload_version: Option<u32>,

    /// The queue that it joins
    #[arg(long, default_value = "default")]
    queue: String,

    /// How long until it falls due: 250ms, 5s, 10m, 2h, 1d
    #[arg(long, value_parser = out::duration, value_name = "TIME")]
    delay: Option<Duration>,

    /// 0, served first, to 7 [default: 4]
    #[arg(long, value_name = "N")]
    priority: Option<u8>,

    /// Refuse a second job with this key while this one lives
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,

    /// Run the jobs of this key one at a time
    #[arg(long, value_name = "KEY")]
    exclusive_key: Option<String>,

    /// A header that travels with the job; can be given many times
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

pub(super) async fn run(args: &Args, url: &str, json: bool) -> Done {
    // The job first: a wrong argument must not create a store.
    let job = args.job()?;
    let client = super::open(url).await?;
    let enqueued = client.enqueue(job).await?;
    let (id, word) = match enqueued {
        Enqueued::New(id) => (id, "new"),
        Enqueued::Duplicate(id) => (id, "duplicate"),
    };
    if json {
        out::data(&json!({ "id": id, "enqueued": word }).to_string())?;
    } else {
        out::data(&format!("{id} {word}"))?;
    }
    Ok(())
}

impl Args {
    fn job(&self) -> Result<NewJob, Trouble> {
        let payload = read(&self.payload)?;
        if let Err(error) = serde_json::from_slice::<IgnoredAny>(&payload) {
            return Err(Trouble::Usage(format!("payload: not JSON: {error}")));
        }
        let mut job = NewJob::raw(
            QueueName::new(&self.queue)?,
            Kind::new(&self.kind)?,
            payload,
        );
        job.headers.clone_from(&self.headers);
        job.delay = self.delay.unwrap_or_default();
        if let Some(version) = self.payload_version {
            job = job.version(version);
        }
        if let Some(priority) = self.priority {
            job = job.priority(priority);
        }
        if let Some(key) = &self.unique_key {
            job = job.unique(key)?;
        }
        if let Some(key) = &self.exclusive_key {
            job = job.exclusive(key)?;
        }
        job.validate()?;
        Ok(job)
    }
}

/// The payload's bytes, at most one more than are allowed.
fn read(payload: &str) -> Result<Vec<u8>, Trouble> {
    let most = limits::PAYLOAD_BYTES as u64 + 1;
    let mut bytes = Vec::new();
    if payload == "-" {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)?;
    } else if let Some(path) = payload.strip_prefix('@') {
        let trouble = |error| Trouble::NotFound(format!("payload: {path}: {error}"));
        let file = std::fs::File::open(path).map_err(trouble)?;
        file.take(most).read_to_end(&mut bytes).map_err(trouble)?;
    } else {
        bytes = payload.as_bytes().to_vec();
    }
    Ok(bytes)
}
