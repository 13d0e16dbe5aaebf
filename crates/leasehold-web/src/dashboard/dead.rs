//! Dead letters: jobs that were given up, grouped by kind and error.

use std::collections::BTreeMap;

use super::App;
use super::html::{Html, html, put, query};
use super::jobs::last_words;
use super::page::{Asked, Shown, Trouble};
use super::words::{ago, clip, count, grouped, now};
use leasehold::Result;
use leasehold::clock::Timestamp;
use leasehold::inspect::{self, JobView, Page};
use leasehold::job::{JobId, JobState, QueueName};
use leasehold::limits;

/// Dead jobs that are looked at to make the groups.
const LOOKED_AT: usize = 2_000;
/// Groups on the page.
const SHOWN: usize = 100;
/// Characters of an error that tell it from others.
const FINGERPRINT: usize = 160;

/// Jobs that died of the same.
#[derive(Clone, Debug)]
pub(super) struct Group {
    queue: QueueName,
    kind: String,
    error: String,
    jobs: u64,
    first: Timestamp,
    last: Timestamp,
    example: JobId,
}

#[derive(Debug)]
pub(super) struct Groups {
    groups: Vec<Group>,
    looked_at: u64,
}

/// An error without what differs from job to job: its numbers.
pub(super) fn fingerprint(view: &JobView) -> String {
    let mut text = String::new();
    let mut in_number = false;
    for c in last_words(view)
        .unwrap_or("no reason given")
        .chars()
        .take(FINGERPRINT * 4)
    {
        if c.is_ascii_digit() {
            if !in_number {
                text.push('#');
            }
            in_number = true;
        } else {
            text.push(c);
            in_number = false;
        }
    }
    clip(&text, FINGERPRINT)
}

async fn groups(app: &App) -> Result<Groups> {
    let store = &**app.client.store();
    let mut found: BTreeMap<(QueueName, String, String), Group> = BTreeMap::new();
    let mut looked_at = 0;
    for queue in inspect::queues(store).await? {
        let mut after = None;
        while queue.counts.dead > 0 && looked_at < LOOKED_AT {
            let rows = (LOOKED_AT - looked_at).min(limits::PAGE_ROWS);
            let page = Page { after, rows };
            let jobs = inspect::jobs(store, queue.queue.clone(), JobState::Dead, page).await?;
            looked_at += jobs.rows.len();
            for view in &jobs.rows {
                let at = view.settled_at.unwrap_or_default();
                let (kind, error) = (view.job.kind.to_string(), fingerprint(view));
                let key = (view.queue.clone(), kind.clone(), error.clone());
                let group = found.entry(key).or_insert_with(|| Group {
                    queue: view.queue.clone(),
                    kind,
                    error,
                    jobs: 0,
                    first: at,
                    last: at,
                    example: view.job.id,
                });
                group.jobs += 1;
                group.first = group.first.min(at);
                group.last = group.last.max(at);
            }
            after = jobs.next;
            if after.is_none() {
                break;
            }
        }
    }
    let mut groups: Vec<Group> = found.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.jobs));
    Ok(Groups {
        groups,
        looked_at: looked_at as u64,
    })
}

pub(super) async fn show(asked: &Asked) -> std::result::Result<Shown, Trouble> {
    let seen = asked.snapshot().await?;
    let dead = seen.counts.dead;
    if dead == 0 {
        let live = html!(
            r#"<div class="empty"><p>No dead letters.</p><p>A job is dead when its handler gave up, its retries are used up, or its lease expired too often. It stays until somebody decides.</p></div>"#
        );
        return Ok(Shown::new("Dead letters", Html::new(), live));
    }
    let app = &asked.app;
    let found = app.dead.get(async || groups(app).await).await?;
    let mut live = html!(
        r#"<p class="lead">{} given up, by kind and error.</p>"#,
        count(dead, "job")
    );
    if found.looked_at < dead {
        put!(
            live,
            r#"<p class="note">Grouped from the {} that died first. The counts below are of those.</p>"#,
            grouped(found.looked_at)
        );
    }
    put!(
        live,
        r#"<div class="scroll"><table class="rows"><thead><tr><th scope="col" class="num">Jobs</th><th scope="col">Kind</th><th scope="col">Error, without its numbers</th><th scope="col">Queue</th><th scope="col">First</th><th scope="col">Last</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>"#
    );
    for group in found.groups.iter().take(SHOWN) {
        let fields = |wish: &'static str| {
            [
                ("do", wish),
                ("queue", group.queue.as_str()),
                ("kind", group.kind.as_str()),
                ("error", group.error.as_str()),
            ]
        };
        put!(
            live,
            r#"<tr data-key="{}/{}/{}"><td class="num big" data-label="Jobs">{}</td><td data-label="Kind"><b>{}</b></td><td class="why wide" data-label="Error, without its numbers">{}<br><small>such as {}</small></td>"#,
            group.queue,
            group.kind,
            group.error,
            grouped(group.jobs),
            group.kind,
            group.error,
            asked.job(group.example)
        );
        put!(
            live,
            r#"<td data-label="Queue"><a href="{}">{}</a></td><td data-label="First">{}</td><td data-label="Last">{}</td><td class="acts">{}{}</td></tr>"#,
            asked.to(&format!(
                "/jobs?queue={}&state=dead",
                query(group.queue.as_str())
            )),
            group.queue,
            ago(group.first, now()),
            ago(group.last, now()),
            asked.action("Retry matching", "good", &fields("retry")),
            asked.action("Purge matching", "danger", &fields("purge"))
        );
    }
    put!(live, "</tbody></table></div>");
    if found.groups.len() > SHOWN {
        put!(
            live,
            r#"<p class="note">The {} largest of {} groups.</p>"#,
            SHOWN,
            found.groups.len()
        );
    }
    Ok(Shown::new("Dead letters", Html::new(), live))
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold::FencingToken;
    use leasehold::job::{JobRecord, Kind, NewJob};
    use leasehold::lease::{Cause, EndedLease, LeaseEnd};
    use std::sync::Arc;

    #[test]
    fn a_death_by_expiry_has_its_reason() {
        let kind = Kind::new("image.crash").expect("a good name");
        let new = NewJob::raw(QueueName::default(), kind, "{}");
        let mut job = JobRecord::new(JobId::generate(), new, Timestamp::ZERO);
        let (token, at) = (FencingToken::new(1), Timestamp::ZERO);
        for end in [LeaseEnd::Retried, LeaseEnd::Expired(Cause::Stalled)] {
            let mut ended = EndedLease::new(token, "w".into(), "t".into(), at, at, end);
            ended.reason = (end == LeaseEnd::Retried).then(|| "smtp: 421".into());
            job.history.push(ended);
        }
        let view = JobView::new(QueueName::default(), JobState::Dead, Arc::new(job));
        assert_eq!(fingerprint(&view), Cause::Stalled.why());
    }
}
