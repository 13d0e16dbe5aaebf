//! Events as `tracing` records.
//!
//! An expiry, a death and a lost lease are warnings: each is a crash report. Everything else is
//! debug. A deploy can bring thousands of declined jobs, so the worker itself warns of those, once
//! a minute.

use tracing::{debug, enabled, warn};

use super::Event;

/// Whether anybody would see a record.
pub(super) fn is_on() -> bool {
    enabled!(tracing::Level::WARN)
}

pub(super) fn record(event: &Event<'_>) {
    match event {
        Event::Enqueued { jobs, .. } => debug!(jobs = jobs.len(), "enqueued"),
        Event::Claimed { grant } => {
            debug!(queue = %grant.queue, grant = %grant.id, leases = grant.leases.len(), "claimed");
        }
        Event::Started { queue, job, token } => {
            debug!(%queue, kind = %job.kind, job = %job.id, %token, attempt = job.attempt(), "started");
        }
        Event::Finished {
            queue,
            job,
            token,
            run,
            outcome,
        } => {
            let outcome = outcome.map(crate::store::Outcome::as_str);
            debug!(%queue, kind = %job.kind, job = %job.id, %token, ?run, ?outcome, "finished");
        }
        Event::Renewed {
            grants,
            leases,
            took,
        } => debug!(grants, leases, ?took, "renewed"),
        Event::RenewalFailed { error, leases } => warn!(%error, leases, "renewal failed"),
        Event::Settled {
            queue,
            job,
            token,
            outcome,
            late,
            cancel,
        } => {
            let outcome = outcome.as_str();
            debug!(%queue, kind = %job.kind, job = %job.id, %token, outcome, late, cancel, "settled");
        }
        Event::Fenced {
            verb,
            queue,
            job,
            token,
        } => {
            warn!(%verb, %queue, %job, %token, "fenced: this worker is stale");
        }
        Event::InDoubt { queue, job, token } => {
            warn!(%queue, %job, %token, "settlement in doubt: it was applied before, or is refused");
        }
        Event::Lost {
            queue,
            job,
            token,
            stalled,
        } => {
            warn!(%queue, kind = %job.kind, job = %job.id, %token, stalled, "lease lost");
        }
        Event::Expired { expiry } => {
            let (cause, owner, task) = (expiry.cause.as_str(), &expiry.owner, &expiry.task);
            warn!(
                queue = %expiry.queue, kind = %expiry.kind, job = %expiry.job, token = %expiry.token,
                cause, %owner, %task, expiries = expiry.expiries, now = %expiry.state, "lease expired"
            );
        }
        Event::Dead { death } => {
            warn!(
                queue = %death.queue, kind = %death.kind, job = %death.job, token = %death.token,
                reason = death.reason, "job is dead"
            );
        }
        Event::Checkpointed {
            queue,
            job,
            token,
            seq,
        } => {
            debug!(%queue, %job, %token, seq, "checkpointed");
        }
        Event::Declined {
            queue,
            job,
            cause,
            why,
            delay,
        } => {
            let cause = cause.as_str();
            debug!(%queue, kind = %job.kind, job = %job.id, cause, why, ?delay, "declined");
        }
        Event::Controlled {
            command,
            actor,
            done,
        } => {
            debug!(
                command,
                actor,
                done = done.done,
                skipped = done.skipped,
                "controlled"
            );
        }
        Event::Pruned { jobs } => debug!(jobs, "pruned"),
    }
}
