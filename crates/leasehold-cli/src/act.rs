//! Interventions: each is recorded with who and why, and a destructive one asks first.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::{Cli, Done, Output, Trouble, out};
use leasehold::Client;
use leasehold::job::{JobId, QueueName};
use leasehold::store::{ControlCommand, Controlled};

/// Who acts, and why.
#[derive(Debug, clap::Args)]
pub(super) struct By {
    /// Who asks: goes on record [default: the user's name]
    #[arg(long, env = "LEASEHOLD_ACTOR", value_name = "NAME")]
    actor: Option<String>,

    /// Why: goes on record
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "TEXT"
    )]
    reason: String,
}

impl By {
    fn actor(&self) -> String {
        let user = || {
            ["USER", "LOGNAME", "USERNAME"]
                .into_iter()
                .find_map(|name| std::env::var(name).ok())
        };
        let actor = self
            .actor
            .clone()
            .or_else(user)
            .filter(|name| !name.is_empty());
        actor.unwrap_or_else(|| "cli".to_owned())
    }

    /// Refuses to go on without a reason.
    pub(super) fn must_say_why(&self) -> Done {
        if self.reason.trim().is_empty() {
            let why = "give --reason TEXT: it overrides a live holder, and goes on record";
            return Err(Trouble::Usage(why.to_owned()));
        }
        Ok(())
    }

    /// Carries out one command.
    pub(super) async fn control(
        &self,
        client: &Client,
        command: ControlCommand,
    ) -> Result<Controlled, Trouble> {
        Ok(client
            .operator(self.actor())
            .because(&*self.reason)
            .command(command)
            .await?)
    }

    /// Carries out one command for each job, and shows how far it is.
    pub(super) async fn each(
        &self,
        client: &Client,
        jobs: &[JobId],
        command: impl Fn(JobId) -> ControlCommand,
    ) -> Result<Controlled, Trouble> {
        let bar = bar(jobs.len() as u64);
        let mut sum = Controlled::default();
        for &id in jobs {
            add(&mut sum, self.control(client, command(id)).await?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(sum)
    }

    /// Repeats a command about many jobs until it finds nothing more to do.
    pub(super) async fn exhaust(
        &self,
        client: &Client,
        command: &ControlCommand,
        bar: &ProgressBar,
    ) -> Result<Controlled, Trouble> {
        let mut sum = Controlled::default();
        loop {
            let answer = self.control(client, command.clone()).await?;
            let done = answer.done;
            bar.inc(done);
            // What is left alone is left alone again, and counted once.
            (sum.skipped, sum.duplicates) = (0, Vec::new());
            add(&mut sum, answer);
            if done == 0 {
                return Ok(sum);
            }
        }
    }
}

/// Leave to destroy.
#[derive(Debug, clap::Args)]
pub(super) struct Consent {
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

impl Consent {
    /// Asks on the terminal. Without one, only `--yes` will do.
    pub(super) fn ask(&self, what: &str) -> Done {
        if self.yes {
            return Ok(());
        }
        let what = out::one_line(what);
        if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            let why = format!("would {what}: pass --yes, since there is no terminal to ask on");
            return Err(Trouble::Usage(why));
        }
        let mut stderr = io::stderr();
        write!(stderr, "leasehold: {what}? [y/N] ")?;
        stderr.flush()?;
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        if matches!(answer.trim(), "y" | "Y" | "yes") {
            return Ok(());
        }
        Err(Trouble::Failed("nothing was done".to_owned()))
    }
}

/// A bar on stderr, if that is a terminal.
pub(super) fn bar(length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos} of {len}, {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// Adds up what several commands did.
pub(super) fn add(sum: &mut Controlled, more: Controlled) {
    sum.done += more.done;
    sum.skipped += more.skipped;
    sum.duplicates.extend(more.duplicates);
}

/// Prints what a command did.
pub(super) fn report(cli: &Cli, command: &str, answer: &Controlled) -> Done {
    if cli.output == Output::Table {
        out::data(&format!(
            "{command}: {} done, {} left alone",
            answer.done, answer.skipped
        ))?;
        for (dead, holder) in &answer.duplicates {
            out::note(&format!(
                "job {dead} stays dead: job {holder} holds its unique key"
            ));
        }
        return Ok(());
    }
    let duplicates = answer
        .duplicates
        .iter()
        .map(|(job, holder)| json!({ "job": job, "holder": holder }));
    let object = json!({
        "command": command,
        "done": answer.done,
        "skipped": answer.skipped,
        "duplicates": duplicates.collect::<Vec<_>>(),
    });
    out::data(&object.to_string())?;
    Ok(())
}

/// A queue that is there.
pub(super) async fn known(
    client: &Client,
    queue: &QueueName,
) -> Result<leasehold::inspect::QueueView, Trouble> {
    let view = leasehold::inspect::queue(&**client.store(), queue).await?;
    view.ok_or_else(|| Trouble::NotFound(format!("no queue {queue}")))
}

/// `1 job`, `2 jobs`.
pub(super) fn counted(number: u64, word: &str) -> String {
    format!("{number} {word}{}", if number == 1 { "" } else { "s" })
}
