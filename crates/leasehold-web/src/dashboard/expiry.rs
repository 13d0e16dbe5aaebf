//! Expiry analysis: why leases expire, how near the others came, and what to change.

use std::collections::BTreeMap;
use std::time::Duration;

use super::App;
use super::chart;
use super::html::{Html, html, put};
use super::leases::share;
use super::page::{Asked, Shown, Trouble};
use super::watch::Snapshot;
use super::words::{count, grouped, percent, short};
use leasehold::Result;
use leasehold::inspect::{self, LeaseFilter, Ledger, Page};
use leasehold::job::{JobState, QueueName};
use leasehold::lease::{Cause, EndedLease, LeaseEnd};
use leasehold::limits;

/// Queues that are studied.
const QUEUES: usize = 20;
/// Jobs of a queue and state whose past is read.
const JOBS: usize = 100;
/// Attempts that have a bar of their own; the last is "and more".
const ATTEMPTS: usize = 6;

/// What the leases that can be seen tell.
#[derive(Debug, Default)]
pub(super) struct Study {
    /// Live leases by tenth of their term that is left.
    margins: [u64; 10],
    live: u64,
    /// Live leases with less than half their term left.
    late: u64,
    attempts: [u64; ATTEMPTS],
    holds: BTreeMap<QueueName, Holds>,
    /// Expired for want of renewal: all that were seen, and those never renewed.
    unrenewed: (u64, u64),
    measured: Option<crate::prometheus::Measured>,
}

/// How long a queue's leases were held.
#[derive(Debug, Default)]
struct Holds {
    /// The longest term seen: of live leases, or asked for by a job.
    term: Option<Duration>,
    held: Vec<Duration>,
    expired: u64,
}

impl Holds {
    fn quantile(&self, q: f64) -> Duration {
        let at = ((self.held.len() as f64 * q).ceil() as usize).clamp(1, self.held.len().max(1));
        self.held.get(at - 1).copied().unwrap_or_default()
    }
}

impl Study {
    fn attempt(&mut self, attempt: u32) {
        let at = (attempt.max(1) as usize - 1).min(ATTEMPTS - 1);
        self.attempts[at] += 1;
    }

    fn ended(&mut self, queue: &QueueName, ended: &EndedLease) {
        let holds = self.holds.entry(queue.clone()).or_default();
        holds.held.push(ended.ended_at.since(ended.granted_at));
        if let LeaseEnd::Expired(cause) = ended.end {
            holds.expired += 1;
            if cause == Cause::Deadline {
                self.unrenewed.0 += 1;
                self.unrenewed.1 += u64::from(ended.renewals == 0);
            }
        }
    }
}

async fn study(app: &App) -> Result<Study> {
    let store = &**app.client.store();
    let mut study = Study::default();
    let page = Page::first(limits::PAGE_ROWS);
    for lease in inspect::leases(store, LeaseFilter::default(), page)
        .await?
        .rows
    {
        let share = share(&lease);
        study.live += 1;
        study.late += u64::from(share < inspect::LATE);
        study.margins[((share * 10.0) as usize).min(9)] += 1;
        study.attempt(lease.attempt);
        let holds = study.holds.entry(lease.queue).or_default();
        holds.term = holds.term.max(Some(lease.term));
    }
    for queue in inspect::queues(store).await?.into_iter().take(QUEUES) {
        for state in [
            JobState::Dead,
            JobState::Scheduled,
            JobState::Completed,
            JobState::Leased,
        ] {
            if queue.counts.of(state) == 0 {
                continue;
            }
            let page = Page::first(JOBS);
            for view in inspect::jobs(store, queue.queue.clone(), state, page)
                .await?
                .rows
            {
                // Those that are leased have been counted above.
                if state != JobState::Leased {
                    study.attempt(view.attempt());
                }
                if let Some(term) = view.job.options.term {
                    let holds = study.holds.entry(view.queue.clone()).or_default();
                    holds.term = holds.term.max(Some(term));
                }
                for ended in &view.job.history {
                    study.ended(&view.queue, ended);
                }
            }
        }
    }
    for holds in study.holds.values_mut() {
        holds.held.sort_unstable();
    }
    {
        study.measured = app
            .exporter
            .as_ref()
            .map(crate::prometheus::Exporter::measured);
    }
    Ok(study)
}

pub(super) async fn show(asked: &Asked) -> std::result::Result<Shown, Trouble> {
    let seen = asked.snapshot().await?;
    let app = &asked.app;
    let study = app.study.get(async || study(app).await).await?;
    let mut live = hints(&seen, &study);
    put!(
        live,
        r#"<div class="cols"><div>{}{}</div><div>{}{}</div></div>{}"#,
        causes(&seen.ledger),
        at_release(&study),
        margins(&study),
        attempts(&study),
        holds(&study)
    );
    Ok(Shown::new("Expiry analysis", Html::new(), live))
}

/// What to change, in words.
fn hints(seen: &Snapshot, study: &Study) -> Html {
    let ledger = &seen.ledger;
    let ended = ledger.released() + ledger.expired() + ledger.revoked;
    let mut hints: Vec<(&str, String)> = Vec::new();
    if ledger.expired_deadline > 0 {
        let (all, never) = study.unrenewed;
        let mut text = format!(
            "{} ran out because nobody renewed: the worker died, froze, or was cut off from the store.",
            count(ledger.expired_deadline, "lease")
        );
        if all > 0 && never * 2 > all {
            let more = format!(
                " {never} of the {all} that can still be seen were never renewed once: the worker was gone within a third of the term, or blocks its own renewer. Look for kills and out-of-memory at those times before you touch the term."
            );
            text += &more;
        } else {
            text += " If the processes were alive at the time, raise the term, or find what stopped them for so long; if they were killed, the lease did its work.";
        }
        hints.push(("expired", text));
    }
    let mut tell = |class, number, what: &str, words: &str| {
        if number > 0 {
            hints.push((class, format!("{} {words}", count(number, what))));
        }
    };
    tell(
        "expired",
        ledger.expired_stalled,
        "lease",
        "lapsed because their handlers showed no progress. Call progress() more often in long loops, or raise the stall limit of those jobs.",
    );
    tell(
        "expired",
        ledger.expired_lifetime,
        "lease",
        "reached the maximum lifetime. Raise it for those jobs, or cut the work into parts and save a checkpoint after each.",
    );
    tell(
        "late",
        ledger.late,
        "settlement",
        "came after the deadline and before anybody else had the job. It went well, this time.",
    );
    tell(
        "revoked",
        ledger.fenced,
        "call",
        "that would have changed a lease were refused, because it was not the caller's any more: it had expired, was revoked, or had been settled by a call whose answer was lost.",
    );
    for (queue, holds) in &study.holds {
        let (Some(term), false) = (holds.term, holds.held.is_empty()) else {
            continue;
        };
        let p99 = holds.quantile(0.99);
        if p99 > term.mul_f64(0.9) && holds.expired > 0 {
            hints.push((
                "late",
                format!(
                    "In {queue}, 1 in 100 leases is held for {} or longer, with a term of {}. That is fine as long as they are renewed; {} were not.",
                    short(p99),
                    short(term),
                    holds.expired
                ),
            ));
        }
    }
    if study.late > 0 {
        hints.push((
            "late",
            format!(
                "Right now {} of {} live leases have less than half their term left: a renewal is overdue. If it stays so, workers or store are overloaded.",
                study.late, study.live
            ),
        ));
    }
    let mut html = html!(r#"<section class="card hints"><h2>What to change</h2><ul>"#);
    if hints.is_empty() {
        let words = if ended == 0 {
            "No lease has ended yet. Come back when workers have run."
        } else {
            "Nothing. No lease has expired, and none is late."
        };
        put!(html, r#"<li class="k-released">{}</li>"#, words);
    }
    for (class, text) in hints {
        put!(html, r#"<li class="k-{}">{}</li>"#, class, text);
    }
    put!(html, "</ul></section>");
    html
}

fn causes(ledger: &Ledger) -> Html {
    let rows = [
        ("Nobody renewed".to_owned(), ledger.expired_deadline),
        ("No progress".to_owned(), ledger.expired_stalled),
        ("Too old".to_owned(), ledger.expired_lifetime),
    ];
    let ended = ledger.released() + ledger.expired() + ledger.revoked;
    let share = if ended == 0 {
        0.0
    } else {
        ledger.expired() as f64 / ended as f64
    };
    html!(
        r#"<section class="card"><h2>Expiries by cause</h2>{}<p class="note">{} of {} expired, from the ledger: {}.</p></section>"#,
        chart::histogram("expired", &rows, "lease"),
        grouped(ledger.expired()),
        count(ended, "ended lease"),
        percent(share)
    )
}

/// A histogram with a word about it; without anything to show, a word about that.
fn card(title: &str, class: &str, rows: &[(String, u64)], of: &str, words: &str) -> Html {
    let body = if rows.iter().all(|(_, number)| *number == 0) {
        html!(r#"<p class="empty">{}</p>"#, words)
    } else {
        let bars = chart::histogram(class, rows, of);
        html!(r#"{}<p class="note">{}</p>"#, bars, words)
    };
    html!(
        r#"<section class="card"><h2>{}</h2>{}</section>"#,
        title,
        body
    )
}

fn margins(study: &Study) -> Html {
    let bar =
        |(tenth, leases): (usize, &u64)| (format!("{}–{} %", tenth * 10, tenth * 10 + 10), *leases);
    let rows: Vec<(String, u64)> = study.margins.iter().enumerate().map(bar).collect();
    let words = match study.live {
        0 => "No live leases to measure.".to_owned(),
        live => format!(
            "The share of the term that is left to the next to expire: {}. Renewed at a third, a healthy one stays above 60 %.",
            count(live, "live lease")
        ),
    };
    card("Margin now", "live", &rows, "lease", &words)
}

fn attempts(study: &Study) -> Html {
    let bar = |(at, jobs): (usize, &u64)| {
        let more = if at + 1 == ATTEMPTS { " or more" } else { "" };
        (format!("{}{more}", at + 1), *jobs)
    };
    let rows: Vec<(String, u64)> = study.attempts.iter().enumerate().map(bar).collect();
    let words = if study.attempts == [0; ATTEMPTS] {
        "No jobs to look at.".to_owned()
    } else {
        format!(
            "Jobs that are leased, dead, waiting for a retry, or retained, up to {JOBS} of each and queue. An attempt is one more than failures and expiries."
        )
    };
    card("Attempts", "leased", &rows, "job", &words)
}

/// The margins at release that workers of this process have measured.
fn released(study: &Study) -> Vec<(String, u64)> {
    let measured = study.measured.iter().flat_map(|measured| &measured.margin);
    let (mut before, mut from) = (0, 0.0);
    let bar = measured.map(|(edge, below)| {
        let within = below.saturating_sub(before);
        let label = if *edge > 0.0 {
            format!("{:.0}–{:.0} %", from * 100.0, edge * 100.0)
        } else {
            "late".to_owned()
        };
        (before, from) = (*below, edge.max(0.0));
        (label, within)
    });
    bar.collect()
}

fn at_release(study: &Study) -> Html {
    let rows = released(study);
    let words = if rows.is_empty() {
        "Known to workers only: leasehold_lease_margin_ratio in their scrape. Shown here when the dashboard runs in a worker’s process."
    } else {
        "Time left ÷ term when the holder settled, as measured by the workers of this process."
    };
    card("Margin at release", "released", &rows, "lease", words)
}

fn holds(study: &Study) -> Html {
    let mut html = html!(r#"<section class="card"><h2>Hold against term</h2>"#);
    if study.holds.values().all(|holds| holds.held.is_empty()) {
        put!(
            html,
            r#"<p class="empty">No ended lease can be seen. Jobs keep their last eight; a completed job without retention is gone.</p></section>"#
        );
        return html;
    }
    put!(
        html,
        r#"<div class="scroll"><table class="rows"><thead><tr><th scope="col">Queue</th><th scope="col" class="num">Term</th><th scope="col" class="num">Held p50</th><th scope="col" class="num">p95</th><th scope="col" class="num">p99</th><th scope="col" class="num">Longest</th><th scope="col" class="num">Leases</th><th scope="col" class="num">Expired</th></tr></thead><tbody>"#
    );
    for (queue, holds) in study
        .holds
        .iter()
        .filter(|(_, holds)| !holds.held.is_empty())
    {
        put!(
            html,
            r#"<tr data-key="{}"><th scope="row">{}</th><td class="num" data-label="Term">{}</td><td class="num" data-label="Held p50">{}</td><td class="num" data-label="p95">{}</td><td class="num" data-label="p99">{}</td><td class="num" data-label="Longest">{}</td><td class="num" data-label="Leases">{}</td><td class="num" data-label="Expired">{}</td></tr>"#,
            queue,
            queue,
            holds.term.map_or("–".to_owned(), short),
            short(holds.quantile(0.5)),
            short(holds.quantile(0.95)),
            short(holds.quantile(0.99)),
            short(holds.quantile(1.0)),
            grouped(holds.held.len() as u64),
            grouped(holds.expired)
        );
    }
    put!(
        html,
        r#"</tbody></table></div><p class="note">From the last eight leases of the jobs that can be seen. Those that failed or expired are seen more often than those that went well.</p></section>"#
    );
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let held = (1..=100).map(Duration::from_secs).collect();
        let holds = Holds {
            held,
            ..Holds::default()
        };
        assert_eq!(holds.quantile(0.5), Duration::from_secs(50));
        assert_eq!(holds.quantile(0.99), Duration::from_secs(99));
        assert_eq!(holds.quantile(1.0), Duration::from_secs(100));
        assert_eq!(Holds::default().quantile(0.5), Duration::ZERO);
    }
}
