//! Leases: who holds what, and for how much longer.

use std::sync::Arc;
use std::time::Duration;

use super::html::{Html, html, put};
use super::page::{Asked, Shown, Trouble, given, parsed};
use super::words::{ago, count, grouped, now, percent};
use leasehold::inspect::{self, LATE, LeaseFilter, LeaseView, Page, SILENT};
use leasehold::job::QueueName;
use leasehold::lease::Progress;

const ROWS: usize = 50;

/// How a live lease looks from outside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LeaseHealth {
    /// Renewed in time.
    Well,
    /// Less than half its term is left: a renewal at a third of the term should have come.
    Late,
    /// Hardly anything is left.
    Silent,
}

impl LeaseHealth {
    pub(super) fn of(lease: &LeaseView) -> Self {
        match share(lease) {
            s if s < SILENT => Self::Silent,
            s if s < LATE => Self::Late,
            _ => Self::Well,
        }
    }

    /// The class of its row; the script that counts down sets the same.
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Well => "is-well",
            Self::Late => "is-late",
            Self::Silent => "is-silent",
        }
    }
}

/// The share of its term that is left.
pub(super) fn share(lease: &LeaseView) -> f64 {
    let term = lease.term.as_secs_f64();
    if term > 0.0 {
        (lease.time_left.as_secs_f64() / term).min(1.0)
    } else {
        0.0
    }
}

/// The time that is left, which the script counts down between two events.
pub(super) fn countdown(lease: &LeaseView) -> Html {
    let left = format!("{:.3}", lease.time_left.as_secs_f64());
    let term = format!("{:.3}", lease.term.as_secs_f64());
    html!(
        r#"<span class="left"><progress max="{}" value="{}" aria-label="time left"></progress><time data-left="{}" data-term="{}">{}</time></span>"#,
        term,
        left,
        left,
        term,
        seconds(lease.time_left)
    )
}

/// The same words as the script's.
fn seconds(left: Duration) -> String {
    match left.as_secs_f64() {
        s if s <= 0.0 => "overdue".to_owned(),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 7_200.0 => format!("{:.0} min", (s / 60.0).floor()),
        s => format!("{:.0} h", (s / 3_600.0).floor()),
    }
}

pub(super) fn progress(progress: Option<&Progress>) -> Html {
    let Some(progress) = progress else {
        return html!(r#"<span class="faint">–</span>"#);
    };
    let mut html = html!(r#"<span class="whole">{}"#, grouped(progress.done));
    if let Some(total) = progress.total {
        put!(html, " of {}", grouped(total));
    }
    put!(html, "</span>");
    if !progress.note.is_empty() {
        put!(
            html,
            " <small>{}</small>",
            super::words::clip(&progress.note, 80)
        );
    }
    html
}

pub(super) async fn show(asked: &Asked) -> Result<Shown, Trouble> {
    let params = &asked.params;
    let filter = LeaseFilter {
        queue: parsed::<QueueName>(params.queue.as_ref())?,
        owner: given(params.owner.as_ref()).map(Arc::from),
        task: given(params.task.as_ref()).map(Arc::from),
    };
    let filtered = filter != LeaseFilter::default();
    let page = Page {
        after: given(params.after.as_ref()).map(str::to_owned),
        rows: ROWS,
    };
    let leases = inspect::leases(&**asked.app.client.store(), filter, page).await?;
    let seen = asked.snapshot().await?;

    let mut live = Html::new();
    if leases.rows.is_empty() {
        let (words, more) = if filtered {
            (
                "No live lease matches.",
                "An ended lease is on its job’s page.",
            )
        } else {
            (
                "Nobody holds a lease.",
                "When a worker claims a job, it appears here with its time counting down.",
            )
        };
        put!(
            live,
            r#"<div class="empty"><p>{}</p><p>{}</p></div>"#,
            words,
            more
        );
        return Ok(Shown::new("Leases", form(asked), live));
    }
    put!(
        live,
        r#"<div class="scroll"><table class="rows"><caption>{} live, those that expire first on top</caption><thead><tr><th scope="col">Time left</th><th scope="col" class="num">Margin</th><th scope="col">Job</th><th scope="col">Owner and task</th><th scope="col" class="num">Token</th><th scope="col" class="num">Attempt</th><th scope="col">Granted</th><th scope="col">Progress</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>"#,
        count(seen.ledger.live, "lease")
    );
    for lease in &leases.rows {
        put!(live, "{}", row(asked, lease));
    }
    let total = (!filtered).then_some(seen.ledger.live);
    put!(
        live,
        "</tbody></table></div>{}",
        asked.pager(leases.next.as_ref(), leases.rows.len(), total)
    );
    Ok(Shown::new("Leases", form(asked), live))
}

fn row(asked: &Asked, lease: &LeaseView) -> Html {
    let job = lease.job.to_string();
    let mut html = html!(
        r#"<tr data-key="{}" class="{}"><td data-label="Time left">{}</td><td class="num" data-label="Margin" data-margin>{}</td>"#,
        lease.token,
        LeaseHealth::of(lease).class(),
        countdown(lease),
        percent(share(lease))
    );
    put!(
        html,
        r#"<td class="what" data-label="Job"><b>{}</b><br><small>{}</small> {}</td><td class="what" data-label="Owner and task">{}<br><small>{}</small></td>"#,
        lease.kind,
        lease.queue,
        asked.job(lease.job),
        lease.owner,
        lease.task
    );
    put!(
        html,
        r#"<td class="num mono" data-label="Token">{}</td><td class="num" data-label="Attempt">{}</td><td class="what" data-label="Granted">{}<br><small>{}</small></td><td data-label="Progress">{}</td><td class="acts">"#,
        lease.token,
        lease.attempt,
        ago(lease.granted_at, now()),
        count(lease.renewals.into(), "renewal"),
        progress(lease.progress.as_ref())
    );
    if lease.cancel {
        put!(
            html,
            r#"<span class="chip s-cancelled">asked to stop</span>"#
        );
    }
    put!(
        html,
        "{}</td></tr>",
        asked.action(
            "Force-release",
            "danger",
            &[("do", "revoke"), ("job", &job)]
        )
    );
    html
}

fn form(asked: &Asked) -> Html {
    let params = &asked.params;
    let value = |field: &Option<String>| given(field.as_ref()).unwrap_or_default().to_owned();
    let mut html = html!(
        r#"<form class="filter" method="get" action="{}" role="search"><label>Queue <input name="queue" value="{}" autocomplete="off" spellcheck="false"></label><label>Owner <input name="owner" value="{}" autocomplete="off" spellcheck="false"></label><label>Task <input name="task" value="{}" autocomplete="off" spellcheck="false"></label><button class="btn">Filter</button>"#,
        asked.to("/leases"),
        value(&params.queue),
        value(&params.owner),
        value(&params.task)
    );
    if [&params.queue, &params.owner, &params.task]
        .iter()
        .any(|field| given(field.as_ref()).is_some())
    {
        put!(
            html,
            r#" <a class="btn quiet" href="{}">Clear</a>"#,
            asked.to("/leases")
        );
    }
    put!(
        html,
        r#"</form><p class="note">A lease is renewed at a third of its term. <span class="k-late">Late</span>: less than half is left. <span class="k-silent">Silent</span>: the holder has not been heard from; at zero the job goes to somebody else by itself.</p>"#
    );
    html
}
