//! Overview: is the fleet well? Released against expired, what failed, what waits, and the ledger.

use std::time::Duration;

use super::chart;
use super::html::{Html, html, put};
use super::leases::{LeaseHealth, countdown};
use super::page::{Asked, Shown, Trouble};
use super::queues;
use super::watch::{HISTORY, Snapshot};
use super::words::{count, grouped, percent, rate, short};
use leasehold::inspect::{self, LeaseFilter, Ledger, Page, QueueView};

const COLUMNS: usize = 60;
const WINDOWS: [(&str, &str, u64); 3] = [
    ("1m", "1 min", 60),
    ("5m", "5 min", 300),
    ("1h", "1 hour", 3_600),
];

pub(super) async fn show(asked: &Asked) -> Result<Shown, Trouble> {
    let seen = asked.snapshot().await?;
    let next = inspect::leases(
        &**asked.app.client.store(),
        LeaseFilter::default(),
        Page::first(6),
    )
    .await?;
    let mut live = clock_banner(&seen.queues);
    put!(live, "{}", hero(asked, &seen.ledger));
    put!(live, "{}", tiles(asked, &seen));
    put!(live, "{}", charts(asked));
    let measured = queues::measured(asked);
    put!(live, "{}", queues::kinds(&measured.runs, &seen.ledger));
    put!(live, r#"<div class="cols">"#);
    put!(
        live,
        r#"<section class="card"><h2>Next to expire <a class="more" href="{}">all leases</a></h2>"#,
        asked.to("/leases")
    );
    if next.rows.is_empty() {
        put!(
            live,
            r#"<p class="empty">Nobody holds a lease right now.</p>"#
        );
    } else {
        put!(live, r#"<ul class="soon">"#);
        for lease in &next.rows {
            let row = LeaseHealth::of(lease);
            put!(
                live,
                r#"<li data-key="{}" class="{}">{}<span class="what"><b>{}</b> {}</span><span class="who">{}</span></li>"#,
                lease.token,
                row.class(),
                countdown(lease),
                lease.kind,
                asked.job(lease.job),
                lease.owner
            );
        }
        put!(live, "</ul>");
    }
    put!(live, "</section>{}</div>", ledger(&seen.ledger));
    Ok(Shown::new("Overview", Html::new(), live))
}

/// Said for as long as the store's clock is behind the tokens that it has given.
fn clock_banner(queues: &[QueueView]) -> Html {
    match queues.iter().filter_map(|view| view.clock_behind).max() {
        None => Html::new(),
        Some(behind) => html!(
            r#"<p class="trouble" role="alert">The store's clock is {} behind the tokens that it has given: it was set back. Claims go on, unless the store's clock is strict. Until it has caught up, lose no data of the store and restore no backup.</p>"#,
            short(behind)
        ),
    }
}

/// A number that a program can read as well.
fn fact(name: &str, number: u64) -> Html {
    html!(
        r#"<data data-fact="{}" value="{}">{}</data>"#,
        name,
        number,
        grouped(number)
    )
}

/// Up to this share of failed runs, and of expired leases, all is well.
const WELL_FAILED: f64 = 0.05;
const WELL_EXPIRED: f64 = 0.01;

fn hero(asked: &Asked, ledger: &Ledger) -> Html {
    let (released, expired, revoked) = (ledger.released(), ledger.expired(), ledger.revoked);
    let ended = released + expired + revoked;
    let mut html =
        html!(r#"<section class="hero" aria-label="Released against expired, and what failed">"#);
    if ended == 0 {
        put!(
            html,
            r#"<p class="figure">–</p><div><p class="lead">No lease has ended yet.</p><p>Once workers run, this is the share of leases that their holders gave back themselves, and the share of runs that failed.</p></div></section>"#
        );
        return html;
    }
    let expired_share = expired as f64 / ended as f64;
    let failed = ledger.failed_share();
    let is_well = expired_share < WELL_EXPIRED && failed.unwrap_or_default() < WELL_FAILED;
    put!(
        html,
        r#"<div class="figures"><p class="figure{}"><data data-share="released" value="{}">{}</data><small>released</small></p>"#,
        if is_well { " is-well" } else { "" },
        released as f64 / ended as f64,
        percent(released as f64 / ended as f64)
    );
    if let Some(failed) = failed {
        put!(
            html,
            r#"<p class="figure{}"><data data-share="failed" value="{}">{}</data><small>failed</small></p>"#,
            if failed >= WELL_FAILED {
                " is-failed"
            } else {
                ""
            },
            failed,
            percent(failed)
        );
    }
    put!(
        html,
        r#"</div><div><p class="lead">{} of {} were released by their holders; {} of {} failed.</p><p>{} {}</p>"#,
        fact("released", released),
        count(ended, "ended lease"),
        fact("failed", ledger.failed()),
        count(ledger.completed + ledger.failed(), "run"),
        verdict(asked, expired_share),
        failures(asked, failed.unwrap_or_default())
    );
    let well = released - ledger.failed();
    let parts = [
        ("released", well),
        ("retried", ledger.retried),
        ("buried", ledger.buried),
        ("expired", expired),
        ("revoked", revoked),
    ];
    put!(
        html,
        r#"{}<ul class="legend"><li class="k-released">Done or handed back {}</li><li class="k-retried">Retried {}</li><li class="k-buried">Buried {}</li><li class="k-expired">Expired {}</li><li class="k-revoked">Revoked {}</li></ul></div></section>"#,
        chart::split(
            &parts,
            &format!(
                "{well} done or handed back, {} retried, {} buried, {expired} expired, {revoked} revoked",
                ledger.retried, ledger.buried
            ),
        ),
        fact("well", well),
        fact("retried", ledger.retried),
        fact("buried", ledger.buried),
        fact("expired", expired),
        fact("revoked", revoked)
    );
    html
}

fn verdict(asked: &Asked, expired: f64) -> Html {
    let words = match expired {
        0.0 => return html!("Not one lease expired: every holder lived to say how it went."),
        s if s < 0.001 => "A few leases expired, as they do when a process is killed.",
        s if s < WELL_EXPIRED => "Some leases expired.",
        _ => "Many leases expired: workers die, freeze, or work longer than they may.",
    };
    html!(r#"{} <a href="{}">See why</a>"#, words, asked.to("/expiry"))
}

fn failures(asked: &Asked, failed: f64) -> Html {
    let words = match failed {
        0.0 => return html!("No run failed."),
        s if s < WELL_FAILED => "Few runs failed.",
        s if s < 0.5 => "Many runs failed.",
        s if s < 1.0 => "Most runs failed.",
        _ => "Every run failed.",
    };
    html!(
        r#"{} <a href="{}">See which</a>"#,
        words,
        asked.to("/queues")
    )
}

fn tiles(asked: &Asked, seen: &Snapshot) -> Html {
    let minute = asked.app.watch.recent(Duration::from_secs(60));
    let counts = &seen.counts;
    let mut html = html!(r#"<ul class="tiles">"#);
    let mut tile = |name: &str, class: &str, path: &str, value: &Html, about: &str| {
        put!(
            html,
            r#"<li class="tile {}"><a href="{}"><h3>{}</h3><p>{}</p><small title="{}">{}</small></a></li>"#,
            class,
            asked.to(path),
            name,
            *value,
            about,
            about
        );
    };
    let parked = match counts.parked {
        0 => "to be claimed".to_owned(),
        parked => format!("{} behind their key", grouped(parked)),
    };
    let ready = fact("ready", counts.ready);
    tile("Ready", "s-ready", "/queues", &ready, &parked);
    tile(
        "Leased",
        "s-leased",
        "/leases",
        &fact("leased", counts.leased),
        "held by workers",
    );
    tile(
        "Scheduled",
        "s-scheduled",
        "/queues",
        &fact("scheduled", counts.scheduled),
        "due later",
    );
    let dead = if counts.dead == 0 {
        "none given up"
    } else {
        "given up: decide"
    };
    let number = fact("dead", counts.dead);
    tile("Dead", "s-dead", "/dead", &number, dead);
    let oldest = seen.longest_in_line();
    let shown = html!(
        "{}",
        oldest.map_or("–".to_owned(), |(waits, _)| short(waits))
    );
    let whose = match oldest {
        None => "nothing is in line".to_owned(),
        Some((_, view)) if view.paused => format!("in {}, paused", view.queue),
        Some((_, view)) => format!("in {}", view.queue),
    };
    tile("Oldest ready", "", "/queues", &shown, &whose);
    let done = html!("{}<i>/s</i>", rate(minute.rate(minute.completed)));
    let stored = format!("{}/s stored", rate(minute.rate(minute.enqueued)));
    tile("Completed", "", "/queues", &done, &stored);
    let failed = html!("{}", minute.failed_share().map_or("–".to_owned(), percent));
    let (class, about) = match minute.failed() {
        0 => ("", "last minute".to_owned()),
        failed => (
            "s-retried",
            format!("{}/s, last min", rate(minute.rate(failed))),
        ),
    };
    tile("Failed", class, "/queues", &failed, &about);
    put!(html, "</ul>");
    html
}

fn charts(asked: &Asked) -> Html {
    let chosen = asked.params.window.as_deref().unwrap_or("5m");
    let (_, name, seconds) = *WINDOWS
        .iter()
        .find(|(id, ..)| *id == chosen)
        .unwrap_or(&WINDOWS[0]);
    let window = Duration::from_secs(seconds).min(HISTORY);
    let columns = asked.app.watch.columns(window, COLUMNS);
    let mut html = html!(r#"<div class="cols"><section class="card"><h2>Ended leases"#);
    put!(html, r#"<span class="tabs">"#);
    for (id, name, _) in WINDOWS {
        let current = if id == chosen { "true" } else { "false" };
        put!(
            html,
            r#"<a href="{}" aria-current="{}">{}</a>"#,
            asked.to(&format!("/?window={id}")),
            current,
            name
        );
    }
    let from = format!("{name} ago");
    put!(
        html,
        r#"</span></h2>{}<ul class="legend"><li class="k-released">Done or handed back</li><li class="k-retried">Retried</li><li class="k-buried">Buried</li><li class="k-expired">Expired</li><li class="k-revoked">Revoked</li></ul></section>"#,
        chart::ends(&columns, &from)
    );
    put!(
        html,
        r#"<section class="card"><h2>Jobs per second</h2>{}<ul class="legend"><li class="k-stored">Stored</li><li class="k-done">Completed</li></ul></section></div><p class="note under">Charts are sampled by this process every {}, for up to an hour; they begin anew with it. The ledger does not.</p>"#,
        chart::flow(&columns, &from),
        short(asked.app.refresh)
    );
    html
}

fn ledger(ledger: &Ledger) -> Html {
    let mut html = html!(
        r#"<section class="card"><h2>The ledger</h2><p class="note">Kept by the store, in the same step as the change it counts: a killed worker loses none.</p><table class="ledger"><tbody>"#
    );
    let mut row = |name: &str, class: &str, fact_name: &str, number: u64| {
        put!(
            html,
            r#"<tr class="{}"><th scope="row">{}</th><td class="num">{}</td></tr>"#,
            class,
            name,
            fact(fact_name, number)
        );
    };
    row("Jobs stored", "", "ledger.enqueued", ledger.enqueued);
    row("Leases granted", "sum", "ledger.granted", ledger.granted);
    row(
        "completed",
        "of k-released",
        "ledger.completed",
        ledger.completed,
    );
    row("retried", "of k-retried", "ledger.retried", ledger.retried);
    row(
        "surrendered",
        "of k-released",
        "ledger.surrendered",
        ledger.surrendered,
    );
    row("buried", "of k-buried", "ledger.buried", ledger.buried);
    row(
        "cancelled",
        "of k-released",
        "ledger.cancelled",
        ledger.cancelled,
    );
    row(
        "expired: nobody renewed",
        "of k-expired",
        "ledger.expired_deadline",
        ledger.expired_deadline,
    );
    row(
        "expired: no progress",
        "of k-expired",
        "ledger.expired_stalled",
        ledger.expired_stalled,
    );
    row(
        "expired: too old",
        "of k-expired",
        "ledger.expired_lifetime",
        ledger.expired_lifetime,
    );
    row("revoked", "of k-revoked", "ledger.revoked", ledger.revoked);
    row("still live", "of k-live", "ledger.live", ledger.live);
    row("Jobs that died", "sum", "ledger.died", ledger.died());
    row("Settled late", "", "ledger.late", ledger.late);
    row(
        "Refused as stale (fenced)",
        "",
        "ledger.fenced",
        ledger.fenced,
    );
    row(
        "Deleted after retention",
        "",
        "ledger.pruned",
        ledger.pruned,
    );
    row("Purged", "", "ledger.purged", ledger.purged);
    put!(html, "</tbody></table>");
    if ledger.balances() {
        put!(
            html,
            r#"<p class="balance ok">Granted = released + expired + revoked + live. It balances.</p>"#
        );
    } else {
        put!(
            html,
            r#"<p class="balance bad" role="alert">Granted is not released + expired + revoked + live. The store has lost count.</p>"#
        );
    }
    put!(html, "</section>");
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold::job::QueueName;

    #[test]
    fn a_clock_that_is_behind_is_told_for_as_long() {
        let mut queues = vec![QueueView::new(QueueName::default()); 2];
        assert!(clock_banner(&queues).into_string().is_empty());
        queues[1].clock_behind = Some(Duration::from_secs(7_200));
        let banner = clock_banner(&queues).into_string();
        assert!(
            banner.contains("clock is 2.0 h behind") && banner.contains("alert"),
            "{banner}"
        );
    }
}
