//! Jobs: those of a queue in a state, a page at a time.

use super::html::{Html, html, put, query};
use super::page::{Asked, Shown, Trouble, given, parsed};
use super::words::{ago, clip, grouped, now};
use leasehold::inspect::{self, JobView, Page};
use leasehold::job::{JobState, QueueName};
use leasehold::lease::EndedLease;

const ROWS: usize = 50;

pub(super) async fn show(asked: &Asked) -> Result<Shown, Trouble> {
    let params = &asked.params;
    let Some(queue) = parsed::<QueueName>(params.queue.as_ref())? else {
        return Err(Trouble::Invalid(
            "Which queue? Choose one on the Queues page.".to_owned(),
        ));
    };
    let state = parsed::<JobState>(params.state.as_ref())?.unwrap_or(JobState::Ready);
    let seen = asked.snapshot().await?;
    let Some(view) = seen.queues.iter().find(|view| view.queue == queue) else {
        return Err(Trouble::Missing(format!("There is no queue {queue}.")));
    };
    let page = Page {
        after: given(params.after.as_ref()).map(str::to_owned),
        rows: ROWS,
    };
    let jobs = inspect::jobs(&**asked.app.client.store(), queue.clone(), state, page).await?;

    let mut live = html!(r#"<nav class="tabs wide" aria-label="States">"#);
    for each in JobState::ALL {
        let address = format!("/jobs?queue={}&state={each}", query(queue.as_str()));
        put!(
            live,
            r#"<a class="k-{}" href="{}" aria-current="{}">{} <b>{}</b></a>"#,
            each,
            asked.to(&address),
            if each == state { "true" } else { "false" },
            each,
            grouped(view.counts.of(each))
        );
    }
    put!(live, "</nav>");
    if jobs.rows.is_empty() {
        put!(
            live,
            r#"<div class="empty"><p>No {} jobs in {}.</p></div>"#,
            state,
            queue
        );
    } else {
        put!(
            live,
            r#"<div class="scroll"><table class="rows"><thead><tr><th scope="col">Job</th><th scope="col">Kind</th><th scope="col">{}</th><th scope="col" class="num">Attempt</th><th scope="col" class="num">Failures</th><th scope="col" class="num">Expiries</th><th scope="col" class="num">Priority</th><th scope="col">Last words</th></tr></thead><tbody>"#,
            when_label(state)
        );
        for job in &jobs.rows {
            put!(live, "{}", row(asked, job));
        }
        let total = Some(view.counts.of(state));
        put!(
            live,
            "</tbody></table></div>{}",
            asked.pager(jobs.next.as_ref(), jobs.rows.len(), total)
        );
    }
    Ok(Shown::new(&format!("Jobs in {queue}"), Html::new(), live))
}

/// What the time of a job in this state is.
fn when_label(state: JobState) -> &'static str {
    if state.is_settled() { "Settled" } else { "Due" }
}

fn row(asked: &Asked, view: &JobView) -> Html {
    let job = &view.job;
    let when = view.settled_at.unwrap_or(job.run_at);
    let mut html = html!(
        r#"<tr data-key="{}"><td data-label="Job">{}</td><td data-label="Kind"><b>{}</b>"#,
        job.id,
        asked.job(job.id),
        job.kind
    );
    if view.parked {
        put!(html, r#" <span class="chip">behind its key</span>"#);
    }
    if job.is_suspect() {
        put!(
            html,
            r#" <span class="chip s-expired" title="its lease expired twice: it runs alone">suspect</span>"#
        );
    }
    put!(
        html,
        r#"</td><td data-label="{}">{}</td><td class="num" data-label="Attempt">{}</td><td class="num" data-label="Failures">{}</td><td class="num" data-label="Expiries">{}</td><td class="num" data-label="Priority">{}</td><td class="why wide" data-label="Last words">{}</td></tr>"#,
        when_label(view.state),
        ago(when, now()),
        view.attempt(),
        job.failures,
        job.expiries,
        job.options.priority,
        clip(last_words(view).unwrap_or_default(), 120)
    );
    html
}

/// Why the last lease ended that did not end well.
pub(super) fn last_words(view: &JobView) -> Option<&str> {
    view.job.history.iter().rev().find_map(EndedLease::why)
}
