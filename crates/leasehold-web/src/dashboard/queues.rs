//! Queues: how deep, how fast, how busy; pause and resume.

use std::collections::HashMap;
use std::time::Duration;

use super::App;
use super::chart;
use super::html::{Html, html, put, query};
use super::page::{Asked, Shown, Trouble};
use super::watch::{Point, Snapshot};
use super::words::{count, grouped, percent, rate, short};
use crate::prometheus::{Exporter, KindRuns, Measured};
use leasehold::hooks::clip;
use leasehold::inspect::{self, Ledger, Page, ParkedView, QueueView};
use leasehold::job::{JobState, QueueName};

/// Bytes of a key that are shown.
const KEY_BYTES: usize = 40;
/// Rows on one page. Beyond it, the rest by name.
const ROWS: usize = 100;

pub(super) async fn show(asked: &Asked) -> Result<Shown, Trouble> {
    let seen = asked.snapshot().await?;
    if seen.queues.is_empty() {
        let live = html!(
            r#"<div class="empty"><p>No queues yet.</p><p>A queue exists once a job has been stored in it.</p></div>"#
        );
        return Ok(Shown::new("Queues", Html::new(), live));
    }
    let measured = measured(asked);
    let app = &asked.app;
    let parked = app.parked.get(async || parked(app, &seen).await).await?;
    let after = asked.params.after.as_deref().unwrap_or_default();
    let mut rest = seen
        .queues
        .iter()
        .filter(|view| view.queue.as_str() > after);
    let shown: Vec<&QueueView> = rest.by_ref().take(ROWS).collect();
    let next = shown.last().filter(|_| rest.next().is_some());
    let next = next.map(|view| view.queue.to_string());
    let mut live = html!(
        r#"<div class="scroll"><table class="rows"><caption>{}</caption><thead><tr><th scope="col">Queue</th><th scope="col">Jobs by state</th><th scope="col">Ended, last 5 min</th><th scope="col" class="num">Completed</th><th scope="col" class="num"><abbr title="{}">{}</abbr></th><th scope="col" class="num">Wait</th><th scope="col" class="num">Oldest ready</th><th scope="col" class="num">Failed</th><th scope="col" class="num">Expired</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>"#,
        count(seen.queues.len() as u64, "queue"),
        if measured.utilization.is_empty() {
            "Slots kept busy: arrival rate × hold time"
        } else {
            "Utilisation: arrival rate × hold time ÷ slots"
        },
        load_label(&measured.utilization)
    );
    for view in &shown {
        put!(live, "{}", row(asked, view, &measured.utilization, &parked));
    }
    let all = Some(seen.queues.len() as u64);
    put!(
        live,
        "</tbody></table></div>{}",
        asked.pager(next.as_ref(), shown.len(), all)
    );
    let load = if measured.utilization.is_empty() {
        "Busy is how many slots a queue keeps busy: arrival rate × hold time, over the last 5 minutes. How many slots there are, only workers know: Busy ÷ slots is ρ, which a worker’s own dashboard shows, and its /metrics as leasehold_utilization_ratio."
    } else {
        "ρ = arrival rate × hold time ÷ slots, as measured by the workers of this process. Where only others work, it says how many slots are busy; that ÷ their slots is ρ."
    };
    put!(
        live,
        r#"<p class="note">{} As ρ comes near 1, the wait grows without bound: add slots, or make jobs shorter. Wait is by Little’s law: jobs in line ÷ leases granted per second.</p>"#,
        load
    );
    put!(live, "{}", kinds(&measured.runs, &seen.ledger));
    Ok(Shown::new("Queues", Html::new(), live))
}

/// Rows of the kinds that fail most.
const KINDS: usize = 20;

/// What failed by kind, as the workers of this process counted it. The store counts by queue only.
pub(super) fn kinds(runs: &[KindRuns], ledger: &Ledger) -> Html {
    let mut failing: Vec<&KindRuns> = runs.iter().filter(|runs| runs.failed > 0).collect();
    if failing.is_empty() {
        if ledger.failed() == 0 || !runs.is_empty() {
            return Html::new();
        }
        return html!(
            r#"<p class="note">Only workers know which kinds fail: their own dashboards show it, and their /metrics as leasehold_leases_released_total.</p>"#
        );
    }
    failing.sort_by(|a, b| b.failed_share().total_cmp(&a.failed_share()));
    let mut html = html!(
        r#"<section class="card"><h2>Failures by kind</h2><div class="scroll"><table class="rows"><caption>{} with failed runs, as the workers of this process counted them since its start</caption><thead><tr><th scope="col">Kind</th><th scope="col">Queue</th><th scope="col" class="num">Runs</th><th scope="col" class="num">Failed</th></tr></thead><tbody>"#,
        count(failing.len() as u64, "kind")
    );
    for runs in failing.iter().take(KINDS) {
        put!(
            html,
            r#"<tr data-key="{} {}"><th scope="row">{}</th><td data-label="Queue">{}</td><td class="num" data-label="Runs">{}</td><td class="num" data-label="Failed"><span class="k-retried" title="{}">{}</span></td></tr>"#,
            runs.queue,
            runs.kind,
            runs.kind,
            runs.queue,
            grouped(runs.completed + runs.failed),
            count(runs.failed, "failed run"),
            percent(runs.failed_share())
        );
    }
    put!(html, "</tbody></table></div></section>");
    html
}

/// What can be said of how busy slots are: their share, where workers of this process have measured
/// it.
fn load_label(measured: &HashMap<String, f64>) -> &'static str {
    if measured.is_empty() { "Busy" } else { "ρ" }
}

/// What workers of this process have measured.
pub(super) fn measured(asked: &Asked) -> Measured {
    let exporter = asked.app.exporter.as_ref();
    exporter.map(Exporter::measured).unwrap_or_default()
}

/// The keys with the most parked jobs, by queue.
pub(super) type Parked = HashMap<QueueName, Vec<ParkedView>>;

/// Keys of a queue that are looked at, and that are shown.
const KEYS: usize = 1_000;
const TOP_KEYS: usize = 3;

async fn parked(app: &App, seen: &Snapshot) -> leasehold::Result<Parked> {
    let mut parked = Parked::new();
    let blocked = seen.queues.iter().filter(|view| view.counts.parked > 0);
    for view in blocked.take(ROWS) {
        let store = &**app.client.store();
        let keys = inspect::parked(store, view.queue.clone(), Page::first(KEYS)).await?;
        let mut keys = keys.rows;
        keys.sort_by(|a, b| b.jobs.cmp(&a.jobs).then_with(|| a.key.cmp(&b.key)));
        keys.truncate(TOP_KEYS);
        parked.insert(view.queue.clone(), keys);
    }
    Ok(parked)
}

fn row(asked: &Asked, view: &QueueView, measured: &HashMap<String, f64>, parked: &Parked) -> Html {
    let (recent, points) = asked
        .app
        .watch
        .of_queue(&view.queue, Duration::from_secs(60));
    let counts = &view.counts;
    let mut html = html!(
        r#"<tr data-key="{}"><th scope="row"><a href="{}">{}</a>"#,
        view.queue,
        asked.to(&format!(
            "/jobs?queue={}&state=ready",
            query(view.queue.as_str())
        )),
        view.queue
    );
    if view.paused {
        put!(html, r#" <span class="chip s-paused">paused</span>"#);
    }
    if view.relaxed {
        put!(html, r#" <span class="chip">relaxed</span>"#);
    }
    put!(
        html,
        r#"</th>{}<td data-label="Ended, last 5 min">{}</td>"#,
        depth(asked, view, parked),
        chart::spark(&points)
    );
    put!(
        html,
        r#"<td class="num" data-label="Completed">{}<small>/s</small></td>"#,
        rate(recent.rate(recent.completed))
    );
    put!(
        html,
        r#"<td class="num" data-label="{}">{}</td>"#,
        load_label(measured),
        utilization(view, &points, measured)
    );
    let granted = recent.rate(recent.granted);
    let in_line = counts.ready.saturating_sub(counts.parked);
    let wait = if in_line == 0 {
        "0 s".to_owned()
    } else if granted > 0.0 {
        let seconds = in_line as f64 / granted;
        Duration::try_from_secs_f64(seconds).map_or("∞".to_owned(), short)
    } else {
        "∞".to_owned()
    };
    let oldest = view.oldest_ready.map_or("–".to_owned(), short);
    put!(
        html,
        r#"<td class="num" data-label="Wait">{}</td><td class="num" data-label="Oldest ready">{}</td>"#,
        wait,
        oldest
    );
    let ledger = &view.ledger;
    let ended = ledger.released() + ledger.expired() + ledger.revoked;
    let expired = match ended {
        0 => "–".to_owned(),
        ended => percent(ledger.expired() as f64 / ended as f64),
    };
    let class = if ledger.expired() > 0 {
        "k-expired"
    } else {
        "faint"
    };
    put!(
        html,
        r#"<td class="num" data-label="Failed"><span class="{}" title="{} of {}, {} in the last minute">{}</span></td>"#,
        if ledger.failed() > 0 {
            "k-retried"
        } else {
            "faint"
        },
        grouped(ledger.failed()),
        count(ledger.completed + ledger.failed(), "run"),
        recent.failed_share().map_or("none".to_owned(), percent),
        ledger.failed_share().map_or("–".to_owned(), percent)
    );
    put!(
        html,
        r#"<td class="num" data-label="Expired"><span class="{}" title="{} of {}">{}</span></td><td class="acts">"#,
        class,
        grouped(ledger.expired()),
        count(ended, "ended lease"),
        expired
    );
    let (label, wish) = if view.paused {
        ("Resume", "resume")
    } else {
        ("Pause", "pause")
    };
    let fields = [("do", wish), ("queue", view.queue.as_str())];
    put!(html, "{}</td></tr>", asked.action(label, "", &fields));
    html
}

fn depth(asked: &Asked, view: &QueueView, parked: &Parked) -> Html {
    let counts = &view.counts;
    let words = format!(
        "{} ready, {} leased, {} scheduled, {} dead",
        counts.ready, counts.leased, counts.scheduled, counts.dead
    );
    let parts = [
        ("ready", counts.ready),
        ("leased", counts.leased),
        ("scheduled", counts.scheduled),
        ("dead", counts.dead),
    ];
    let mut html = html!(
        r#"<td class="depth wide">{}<ul class="states">"#,
        chart::split(&parts, &words)
    );
    for state in JobState::ALL {
        let number = counts.of(state);
        if number == 0 {
            continue;
        }
        let address = format!("/jobs?queue={}&state={state}", query(view.queue.as_str()));
        put!(
            html,
            r#"<li><a class="k-{}" href="{}">{} {}</a></li>"#,
            state,
            asked.to(&address),
            grouped(number),
            state
        );
    }
    if counts.parked > 0 {
        put!(
            html,
            r#"<li class="faint">{} behind their key</li>"#,
            grouped(counts.parked)
        );
        for key in parked.get(&view.queue).into_iter().flatten() {
            let more = if key.jobs == ParkedView::MOST {
                "+"
            } else {
                ""
            };
            put!(
                html,
                r#"<li class="faint key">{}{} behind <b>{}</b></li>"#,
                grouped(key.jobs),
                more,
                clip(key.key.as_str(), KEY_BYTES)
            );
        }
    }
    put!(html, "</ul></td>");
    html
}

/// ρ as workers have measured it; without their slots, what keeps them busy: λ · hold, which by
/// Little's law is the mean number of live leases.
fn utilization(view: &QueueView, points: &[Point], measured: &HashMap<String, f64>) -> Html {
    if let Some(ratio) = measured.get(view.queue.as_str()) {
        return html!("{}", format!("{ratio:.2}"));
    }
    let sum: u64 = points.iter().map(|point| point.live).sum();
    if sum == 0 {
        return html!(r#"<span class="faint">–</span>"#);
    }
    let mean = sum as f64 / points.len() as f64;
    if measured.is_empty() {
        return html!("{}", slots(mean));
    }
    html!("{} <small>busy</small>", slots(mean))
}

/// A mean number of slots: `0.4`, `12.5`, `1,498`.
fn slots(mean: f64) -> String {
    if mean < 100.0 {
        return format!("{mean:.1}");
    }
    grouped(mean.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_cannot_tell_the_kinds_that_fail_says_who_can() {
        let mut ledger = Ledger::default();
        assert!(kinds(&[], &ledger).into_string().is_empty());
        ledger.retried = 3;
        let elsewhere = kinds(&[], &ledger).into_string();
        assert!(elsewhere.contains("Only workers know"), "{elsewhere}");
        let mut runs = [KindRuns {
            queue: "billing".into(),
            kind: "charge".into(),
            completed: 1,
            failed: 3,
        }];
        let here = kinds(&runs, &ledger).into_string();
        assert!(here.contains("charge") && here.contains("75.0 %"), "{here}");
        // Others have failed, and not here.
        runs[0].failed = 0;
        assert!(kinds(&runs, &ledger).into_string().is_empty());
    }
}
