//! Job: everything that is known about a job, and how each of its leases ended.

use super::html::{Html, html, put, query};
use super::leases::{LeaseHealth, countdown, progress};
use super::page::{Asked, Shown, Trouble};
use super::words::{ago, clip, count, grouped, moment, now, short};
use leasehold::clock::Timestamp;
use leasehold::inspect::{self, JobView};
use leasehold::job::{JobId, JobState};
use leasehold::lease::{Cause, EndedLease, LeaseEnd};

/// Bytes of a payload that are shown.
const SHOWN_BYTES: usize = 16 * 1024;

pub(super) async fn show(asked: &Asked) -> Result<Shown, Trouble> {
    let id: JobId = asked
        .params
        .id
        .parse()
        .map_err(|_| Trouble::Missing("That is not the id of a job.".to_owned()))?;
    let view = inspect::job(&**asked.app.client.store(), id).await?;
    let view = view.ok_or_else(|| {
        Trouble::Missing(
            "There is no such job. It may be completed: without retention, nothing is kept of it."
                .to_owned(),
        )
    })?;
    let mut live = Html::new();
    put!(live, "{}", summary(asked, &view));
    put!(live, "{}", errors(&view));
    put!(live, "{}", leases(&view));
    put!(live, "{}", stored(asked, &view));
    Ok(Shown::new(&format!("Job {id}"), Html::new(), live))
}

fn summary(asked: &Asked, view: &JobView) -> Html {
    let job = &view.job;
    let id = job.id.to_string();
    let queue = format!(
        "/jobs?queue={}&state={}",
        query(view.queue.as_str()),
        view.state
    );
    let mut html = html!(
        r#"<section class="card lead-card"><p class="lead"><span class="chip s-{}">{}</span> <b>{}</b> in <a href="{}">{}</a></p><p>{}</p>"#,
        view.state,
        view.state,
        job.kind,
        asked.to(&queue),
        view.queue,
        words(view)
    );
    if let Some(lease) = &view.lease {
        put!(
            html,
            r#"<p class="{}">{} held by <b>{}</b> for {}, token <span class="mono">{}</span>, {}. {}</p>"#,
            LeaseHealth::of(lease).class(),
            countdown(lease),
            lease.owner,
            lease.task,
            lease.token,
            count(lease.renewals.into(), "renewal"),
            progress(lease.progress.as_ref())
        );
    }
    put!(html, r#"<p class="acts">"#);
    let mut act = |label: &str, style: &str, wish: &str| {
        put!(
            html,
            "{}",
            asked.action(label, style, &[("do", wish), ("job", &id)])
        );
    };
    match view.state {
        JobState::Leased => {
            act("Force-release", "danger", "revoke");
            act("Cancel", "", "cancel");
        }
        JobState::Scheduled | JobState::Ready => {
            act("Cancel", "", "cancel");
            act("Purge", "danger", "purge");
        }
        JobState::Dead => {
            act("Retry", "good", "retry");
            act("Purge", "danger", "purge");
        }
        JobState::Completed | JobState::Cancelled => act("Purge", "danger", "purge"),
        // A state that this page does not know yet: nothing that could be wrong.
        _ => {}
    }
    put!(html, "</p></section>");
    html
}

fn words(view: &JobView) -> Html {
    let job = &view.job;
    let now = now();
    let mut html = html!(
        "Attempt {}: {}, {}. Stored {}. ",
        view.attempt(),
        count(job.failures.into(), "failure"),
        match job.expiries {
            1 => "1 expiry".to_owned(),
            n => format!("{n} expiries"),
        },
        ago(job.enqueued_at, now)
    );
    match view.state {
        JobState::Scheduled => put!(html, "Due {}.", ago(job.run_at, now)),
        JobState::Ready if view.parked => {
            put!(html, "Waits behind another job of its exclusive key.");
        }
        JobState::Ready => put!(html, "In line since {}.", ago(job.run_at, now)),
        JobState::Leased => {}
        _ => {
            if let Some(at) = view.settled_at {
                put!(html, "Settled {}.", ago(at, now));
            }
        }
    }
    if let Some(since) = job.declined_since.filter(|_| !view.state.is_settled()) {
        put!(
            html,
            " First declined {}: no worker that claimed it can work its kind or payload yet.",
            ago(since, now)
        );
    }
    if job.is_suspect() && !view.state.is_settled() {
        put!(
            html,
            " Its lease expired twice: it may be what kills its workers, so it runs alone."
        );
    }
    html
}

fn errors(view: &JobView) -> Html {
    let Some(reason) = super::jobs::last_words(view) else {
        return Html::new();
    };
    let mut html = html!(r#"<section class="card"><h2>Last error</h2><ol class="chain">"#);
    for cause in reason.split(": ") {
        put!(html, "<li>{}</li>", cause);
    }
    put!(html, "</ol></section>");
    html
}

/// How an end is called and coloured.
pub(super) fn end_words(end: LeaseEnd) -> (&'static str, &'static str) {
    match end {
        LeaseEnd::Completed => ("released", "completed"),
        LeaseEnd::Retried => ("retried", "retried"),
        LeaseEnd::Surrendered => ("released", "surrendered"),
        LeaseEnd::Buried => ("buried", "buried"),
        LeaseEnd::Cancelled => ("released", "cancelled"),
        LeaseEnd::Expired(Cause::Deadline) => ("expired", "expired: nobody renewed"),
        LeaseEnd::Expired(Cause::Stalled) => ("expired", "expired: no progress"),
        LeaseEnd::Expired(Cause::Lifetime) => ("expired", "expired: too old"),
        LeaseEnd::Revoked => ("revoked", "revoked"),
        other => ("released", other.as_str()),
    }
}

fn leases(view: &JobView) -> Html {
    let history = &view.job.history;
    let mut html = html!(r#"<section class="card"><h2>Leases</h2>"#);
    if history.is_empty() && view.lease.is_none() {
        put!(
            html,
            r#"<p class="empty">Nobody has held it yet.</p></section>"#
        );
        return html;
    }
    put!(html, "{}", timeline(view, now()));
    put!(
        html,
        r#"<div class="scroll"><table class="rows"><caption>{}, newest first; the last eight are kept</caption><thead><tr><th scope="col">Ended</th><th scope="col">How and why</th><th scope="col">Owner and task</th><th scope="col" class="num">Token</th><th scope="col">Granted</th><th scope="col" class="num">Held</th><th scope="col" class="num">Renewals</th><th scope="col">Progress</th></tr></thead><tbody>"#,
        count(history.len() as u64, "ended lease")
    );
    for ended in history.iter().rev() {
        let (class, words) = end_words(ended.end);
        put!(
            html,
            r#"<tr data-key="{}"><td data-label="Ended">{}</td><td class="wide" data-label="How and why"><span class="chip s-{}">{}</span> <span class="why">{}</span></td><td class="what" data-label="Owner and task">{}<br><small>{}</small></td>"#,
            ended.token,
            ago(ended.ended_at, now()),
            class,
            words,
            clip(ended.why().unwrap_or_default(), 400),
            ended.owner,
            ended.task
        );
        put!(
            html,
            r#"<td class="num mono" data-label="Token">{}</td><td data-label="Granted">{}</td><td class="num" data-label="Held">{}</td><td class="num" data-label="Renewals">{}</td><td data-label="Progress">{}</td></tr>"#,
            ended.token,
            moment(ended.granted_at),
            short(held(ended)),
            ended.renewals,
            progress(ended.progress.as_ref())
        );
    }
    put!(html, "</tbody></table></div></section>");
    html
}

fn held(ended: &EndedLease) -> std::time::Duration {
    ended.ended_at.since(ended.granted_at)
}

/// The leases on one line of time.
fn timeline(view: &JobView, now: Timestamp) -> Html {
    let history = &view.job.history;
    let live = view
        .lease
        .as_ref()
        .map(|lease| (lease.granted_at, now, "live"));
    let spans: Vec<(Timestamp, Timestamp, &str)> = history
        .iter()
        .map(|ended| (ended.granted_at, ended.ended_at, end_words(ended.end).0))
        .chain(live)
        .collect();
    let start = spans.first().map_or(now, |span| span.0);
    let end = spans.iter().map(|span| span.1).max().unwrap_or(now);
    let width = end.since(start).as_secs_f64().max(1e-6);
    let mut html = html!(
        r#"<svg class="timeline" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label="the leases over time"><rect class="f-none" y="7" width="1000" height="2"/>"#
    );
    for (from, to, class) in spans {
        let x = 1_000.0 * from.since(start).as_secs_f64() / width;
        let span = (1_000.0 * to.since(from).as_secs_f64() / width).max(4.0);
        let x = x.min(1_000.0 - span).max(0.0).round();
        put!(
            html,
            r#"<rect class="f-{}" x="{}" width="{}" height="16" rx="2"/>"#,
            class,
            x,
            span.round()
        );
    }
    put!(
        html,
        r#"</svg><p class="ends"><span>{}</span><span>{} later</span></p>"#,
        moment(start),
        short(end.since(start))
    );
    html
}

fn stored(asked: &Asked, view: &JobView) -> Html {
    let job = &view.job;
    let mut html = html!(r#"<div class="cols"><section class="card"><h2>Payload</h2>"#);
    if asked.app.hide_payloads {
        put!(
            html,
            r#"<p class="empty">Payloads are hidden on this dashboard.</p></section>"#
        );
    } else {
        put!(html, "{}</section>", bytes(&job.payload));
    }
    put!(
        html,
        r#"<section class="card"><h2>Stored with it</h2><dl class="facts">"#
    );
    let mut fact =
        |name: &str, value: &str| put!(html, "<div><dt>{}</dt><dd>{}</dd></div>", name, value);
    fact("Priority", &job.options.priority.to_string());
    let durations = [
        ("Term", job.options.term),
        ("Maximum lifetime", job.options.max_lifetime),
        ("Timeout", job.options.runs.timeout),
        ("Stall limit", job.options.runs.stall_limit),
        ("Retention", job.options.retention),
    ];
    for (name, value) in durations {
        if let Some(value) = value {
            fact(name, &short(value));
        }
    }
    fact("Expiry limit", &job.options.max_expiries.to_string());
    if let Some(most) = job.options.runs.max_failures {
        fact("Failure limit", &most.to_string());
    }
    if let Some(unique) = &job.unique {
        fact("Unique key", unique.key.as_str());
    }
    if let Some(key) = &job.exclusive {
        fact("Exclusive key", key.as_str());
    }
    if !asked.app.hide_payloads {
        for (name, value) in &job.headers {
            fact(&clip(name, 80), &clip(value, 200));
        }
    }
    put!(html, "</dl>");
    if let Some(saved) = &job.checkpoint {
        put!(
            html,
            r#"<h3>Checkpoint {}</h3><p class="note">Saved under token <span class="mono">{}</span>, {} bytes</p>"#,
            saved.seq,
            saved.token,
            grouped(saved.bytes.len() as u64)
        );
        if !asked.app.hide_payloads {
            put!(html, "{}", bytes(&saved.bytes));
        }
    }
    if let Some(result) = job.result.as_ref().filter(|_| !asked.app.hide_payloads) {
        put!(html, "<h3>Result</h3>{}", bytes(result));
    }
    put!(html, "</section></div>");
    html
}

/// Text as it is stored, other bytes in hex. Never parsed: a number keeps all its digits.
fn bytes(bytes: &[u8]) -> Html {
    if bytes.is_empty() {
        return html!(r#"<p class="empty">Empty.</p>"#);
    }
    let shown = &bytes[..bytes.len().min(SHOWN_BYTES)];
    let text = match std::str::from_utf8(shown) {
        Ok(text) => text.to_owned(),
        // Cut in the middle of a character.
        Err(error) if error.error_len().is_none() => {
            String::from_utf8_lossy(&shown[..error.valid_up_to()]).into_owned()
        }
        Err(_) => hex(&shown[..shown.len().min(1_024)]),
    };
    let mut html = html!("<pre tabindex=\"0\">{}</pre>", text);
    if shown.len() < bytes.len() {
        put!(
            html,
            r#"<p class="note">The first {} of {} bytes.</p>"#,
            grouped(shown.len() as u64),
            grouped(bytes.len() as u64)
        );
    }
    html
}

fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    let mut text = String::with_capacity(bytes.len() * 3);
    for (at, byte) in bytes.iter().enumerate() {
        text.extend([digit(byte >> 4), digit(byte & 15)]);
        text.push(if at % 16 == 15 { '\n' } else { ' ' });
    }
    text
}
