//! Intervening: what a person can do to queues, jobs and leases, on record with who and why.

use std::fmt;
use std::time::Duration;

use crate::client::Client;
use crate::error::Result;
use crate::job::{JobId, QueueName};
use crate::store::{ControlCommand, Controlled, LeaseSelect, Select};

/// A person or program that intervenes, by name. Made by [`Client::operator`].
///
/// Every command is kept in the store's audit trail, with the operator's name and reason.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// # let client = leasehold::Client::open("memory:").await?;
/// let ann = client.operator("ann").because("the mail server is down");
/// ann.pause("mail").await?;
/// ann.resume("mail").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "an operator does nothing until told what to do"]
pub struct Operator {
    client: Client,
    actor: String,
    reason: String,
}

impl Operator {
    pub(crate) fn new(client: Client, actor: String) -> Self {
        Self {
            client,
            actor,
            reason: String::new(),
        }
    }

    /// Why. A [`revoke`](Self::revoke) needs a reason; the others should have one.
    pub fn because(mut self, reason: impl Into<String>) -> Self {
        self.reason = reason.into();
        self
    }

    /// Pauses a queue for all workers: no more leases are granted from it.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn pause(&self, queue: impl AsRef<str>) -> Result<Controlled> {
        let queue = QueueName::new(queue)?;
        self.command(ControlCommand::Pause(queue)).await
    }

    /// Resumes a paused queue.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn resume(&self, queue: impl AsRef<str>) -> Result<Controlled> {
        let queue = QueueName::new(queue)?;
        self.command(ControlCommand::Resume(queue)).await
    }

    /// Deletes a queue that has no jobs, with its settings and its ledger.
    ///
    /// # Errors
    /// `InvalidInput` if it has jobs in any state: purge them first. As
    /// [`Store::control`](crate::Store::control).
    pub async fn remove(&self, queue: impl AsRef<str>) -> Result<Controlled> {
        let queue = QueueName::new(queue)?;
        self.command(ControlCommand::Remove(queue)).await
    }

    /// Changes how a queue behaves: with `relaxed`, a job that waits for its retry lets the next
    /// job of its exclusive key run.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn configure(&self, queue: impl AsRef<str>, relaxed: bool) -> Result<Controlled> {
        let queue = QueueName::new(queue)?;
        self.command(ControlCommand::Configure { queue, relaxed })
            .await
    }

    /// Cancels one job, by its id, or several. A pending job is cancelled at once; the holder of a
    /// leased one is told to stop.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn cancel(&self, jobs: impl Into<Select>) -> Result<Controlled> {
        self.command(ControlCommand::Cancel(jobs.into())).await
    }

    /// Ends leases now, without their holders: that of one job, by its id, or those of an owner or
    /// a task. The jobs are ready again, and nothing is counted against them.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control), and if there is no reason.
    pub async fn revoke(&self, leases: impl Into<LeaseSelect>) -> Result<Controlled> {
        self.command(ControlCommand::Revoke(leases.into())).await
    }

    /// Makes dead jobs ready again, with their failures and expiries set to zero.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn retry(&self, jobs: impl Into<Select>) -> Result<Controlled> {
        self.command(ControlCommand::RetryDead(jobs.into())).await
    }

    /// Deletes jobs. Leased ones are skipped.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn purge(&self, jobs: impl Into<Select>) -> Result<Controlled> {
        self.command(ControlCommand::Purge(jobs.into())).await
    }

    /// Makes pending jobs due `delay` from now. Leased ones are skipped.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn reschedule(&self, jobs: impl Into<Select>, delay: Duration) -> Result<Controlled> {
        let jobs = jobs.into();
        self.command(ControlCommand::Reschedule { jobs, delay })
            .await
    }

    /// Carries out a command that is given as a value.
    ///
    /// # Errors
    /// As [`Store::control`](crate::Store::control).
    pub async fn command(&self, command: ControlCommand) -> Result<Controlled> {
        self.client
            .control(command, &self.actor, &self.reason)
            .await
    }
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operator")
            .field("actor", &self.actor)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl From<JobId> for Select {
    fn from(job: JobId) -> Self {
        Self::Job(job)
    }
}

impl From<JobId> for LeaseSelect {
    fn from(job: JobId) -> Self {
        Self::Job(job)
    }
}
