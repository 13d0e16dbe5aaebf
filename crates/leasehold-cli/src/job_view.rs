//! One job with its history, for `leasehold jobs show`.

use std::time::Duration;

use serde_json::{Value, json};

use super::act::counted;
use super::{Cli, Done, Output, jobs, leases, out};
use leasehold::inspect::JobView;
use leasehold::lease::{EndedLease, LeaseEnd};

/// Prints everything that is known of a job.
pub(super) fn show(view: &JobView, cli: &Cli) -> Done {
    if cli.output == Output::Table {
        out::data(&text(view))?;
    } else {
        out::data(&object(view).to_string())?;
    }
    Ok(())
}

/// How a lease ended: the end, and the cause if it expired.
pub(super) fn end(ended: &EndedLease) -> String {
    match ended.end {
        LeaseEnd::Expired(cause) => format!("expired ({})", cause.as_str()),
        end => end.as_str().to_owned(),
    }
}

/// Why a lease ended, in words.
pub(super) fn why(ended: &EndedLease) -> String {
    if let Some(why) = ended.why() {
        return why.to_owned();
    }
    let why = match ended.end {
        LeaseEnd::Completed => "done",
        LeaseEnd::Surrendered => "handed back unfinished",
        LeaseEnd::Cancelled => "called off",
        _ => "no reason given",
    };
    why.to_owned()
}

fn object(view: &JobView) -> Value {
    let job = &view.job;
    let options = &job.options;
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs_f64());
    let headers = job
        .headers
        .iter()
        .map(|(name, value)| json!({ "name": name, "value": value }));
    // Payloads are text here: a number that JSON readers would round stays what it is.
    let text = |bytes: &bytes::Bytes| String::from_utf8_lossy(bytes).into_owned();
    let checkpoint = job.checkpoint.as_ref().map(|checkpoint| {
        json!({ "token": checkpoint.token, "seq": checkpoint.seq, "bytes": checkpoint.bytes.len(), "text": text(&checkpoint.bytes) })
    });
    let mut object = jobs::object(view);
    let more = json!({
        "suspect": job.is_suspect(),
        "max_failures": options.runs.max_failures,
        "max_expiries": options.max_expiries,
        "term_seconds": seconds(options.term),
        "timeout_seconds": seconds(options.runs.timeout),
        "stall_limit_seconds": seconds(options.runs.stall_limit),
        "max_lifetime_seconds": seconds(options.max_lifetime),
        "retention_seconds": seconds(options.retention),
        "unique_key": job.unique.as_ref().map(|unique| unique.key.as_str()),
        "exclusive_key": job.exclusive.as_ref().map(leasehold::job::Key::as_str),
        "headers": headers.collect::<Vec<_>>(),
        "payload": text(&job.payload),
        "payload_version": job.version,
        "declined_since": job.declined_since.map(out::precise),
        "result": job.result.as_ref().map(text),
        "checkpoint": checkpoint,
        "lease": view.lease.as_ref().map(leases::object),
        "history": job.history.iter().map(ended_object).collect::<Vec<_>>(),
    });
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

fn ended_object(ended: &EndedLease) -> Value {
    let cause = match ended.end {
        LeaseEnd::Expired(cause) => Some(cause.as_str()),
        _ => None,
    };
    json!({
        "token": ended.token,
        "owner": ended.owner,
        "task": ended.task,
        "granted_at": out::precise(ended.granted_at),
        "ended_at": out::precise(ended.ended_at),
        "held_seconds": ended.ended_at.since(ended.granted_at).as_secs_f64(),
        "renewals": ended.renewals,
        "end": ended.end.as_str(),
        "cause": cause,
        "why": why(ended),
        "progress": ended.progress,
    })
}

/// Characters of a payload, checkpoint or result that people are shown.
const SHOWN: usize = 2_000;

fn text(view: &JobView) -> String {
    let job = &view.job;
    let mut lines = Vec::new();
    let mut line =
        |name: &str, value: String| lines.push(format!("{name:<14}{}", out::one_line(&value)));
    let parked = if view.parked {
        ", parked behind its exclusive key"
    } else {
        ""
    };
    let suspect = if job.is_suspect() { ", suspect" } else { "" };
    line("job", job.id.to_string());
    line("kind", job.kind.to_string());
    line("queue", view.queue.to_string());
    line("state", format!("{}{parked}{suspect}", view.state));
    line(
        "attempt",
        format!(
            "{} ({}, {} {} of {})",
            view.attempt(),
            counted(job.failures.into(), "failure"),
            job.expiries,
            if job.expiries == 1 {
                "expiry"
            } else {
                "expiries"
            },
            job.options.max_expiries
        ),
    );
    line("priority", job.options.priority.to_string());
    line("enqueued", out::time(job.enqueued_at));
    line("run at", out::time(job.run_at));
    if let Some(at) = view.settled_at {
        line("settled", out::time(at));
    }
    if let Some(unique) = &job.unique {
        line("unique key", unique.key.to_string());
    }
    if let Some(key) = &job.exclusive {
        line("exclusive key", key.to_string());
    }
    for (name, value) in &job.headers {
        line("header", format!("{name}: {value}"));
    }
    let bytes = |bytes: &bytes::Bytes| {
        let text = out::clip(&String::from_utf8_lossy(bytes), SHOWN);
        format!("{text} ({} bytes)", bytes.len())
    };
    line("payload", bytes(&job.payload));
    if job.version > 1 {
        line("version", job.version.to_string());
    }
    if let Some(since) = job.declined_since {
        line("declined since", out::time(since));
    }
    if let Some(checkpoint) = &job.checkpoint {
        let saved = bytes(&checkpoint.bytes);
        line(
            "checkpoint",
            format!(
                "{saved}, seq {}, saved under token {}",
                checkpoint.seq, checkpoint.token
            ),
        );
    }
    if let Some(result) = &job.result {
        line("result", bytes(result));
    }
    match &view.lease {
        None => line("lease", "none".to_owned()),
        Some(lease) => {
            let cancel = if lease.cancel { ", asked to stop" } else { "" };
            line(
                "lease",
                format!("held by {} for {}{cancel}", lease.owner, lease.task),
            );
            line("  token", lease.token.to_string());
            line("  granted", out::time(lease.granted_at));
            line(
                "  time left",
                format!(
                    "{} of a {} term, renewed {} times",
                    out::short(lease.time_left),
                    out::short(lease.term),
                    lease.renewals
                ),
            );
            if let Some(progress) = &lease.progress {
                line("  progress", leases::progress(progress));
            }
        }
    }
    let mut text = lines.join("\n");
    text += "\n\n";
    text += &timeline(&job.history);
    text
}

fn timeline(history: &[EndedLease]) -> String {
    if history.is_empty() {
        return "no lease has ended yet\n".to_owned();
    }
    let rows: Vec<Vec<String>> = history
        .iter()
        .map(|ended| {
            let progress = ended.progress.as_ref().map_or(String::new(), |progress| {
                format!("; progress {}", leases::progress(progress))
            });
            let cells = [
                out::time(ended.granted_at),
                out::short(ended.ended_at.since(ended.granted_at)),
                ended.renewals.to_string(),
                end(ended),
                ended.owner.to_string(),
                ended.task.to_string(),
                ended.token.to_string(),
                format!("{}{progress}", out::clip(&why(ended), 200)),
            ];
            cells.iter().map(|cell| out::one_line(cell)).collect()
        })
        .collect();
    out::table(
        &[
            "granted", "held", "renewals", "ended as", "owner", "task", "token", "why",
        ],
        &rows,
    )
}
