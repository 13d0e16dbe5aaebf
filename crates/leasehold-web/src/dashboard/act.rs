//! What an operator can do. Each action is confirmed in a form, and recorded with who and why.

use std::sync::Arc;

use axum::extract::rejection::{FormRejection, QueryRejection};
use axum::extract::{Form, Query};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;

use super::dead::fingerprint;
use super::html::{Html, html, put};
use super::page::{Asked, Trouble, document, given, in_trouble};
use leasehold::inspect::{self, Page};
use leasehold::job::{JobId, JobState, QueueName};
use leasehold::limits;
use leasehold::store::{ControlCommand, Controlled, LeaseSelect, Select};

/// Jobs that one click on a group changes. Each is a command of its own, on record.
const MATCHING: usize = 1_000;
/// Dead jobs that are looked at for it.
const LOOKED_AT: usize = 20_000;
/// Commands under way at a time.
const AT_ONCE: usize = 16;

/// What somebody wants, as the form has it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Wish {
    #[serde(rename = "do")]
    what: String,
    job: Option<String>,
    queue: Option<String>,
    owner: Option<String>,
    kind: Option<String>,
    error: Option<String>,
    reason: Option<String>,
    back: Option<String>,
}

/// What that comes down to.
#[derive(Clone, Debug)]
enum Plan {
    One(ControlCommand),
    /// Retry or purge the dead jobs of a kind that died of the same.
    Matching {
        queue: QueueName,
        kind: String,
        error: String,
        purge: bool,
    },
}

impl Wish {
    fn plan(&self) -> Result<Plan, Trouble> {
        let invalid = |error: leasehold::Error| Trouble::Invalid(error.to_string());
        let needed = |what: &str| Trouble::Invalid(format!("The form names no {what}."));
        let job = || -> Result<JobId, Trouble> {
            let id = given(self.job.as_ref()).ok_or_else(|| needed("job"))?;
            id.parse()
                .map_err(|_| Trouble::Invalid("That is not the id of a job.".to_owned()))
        };
        let queue = || -> Result<QueueName, Trouble> {
            let name = given(self.queue.as_ref()).ok_or_else(|| needed("queue"))?;
            QueueName::new(name).map_err(invalid)
        };
        let one = |command| Ok(Plan::One(command));
        match (self.what.as_str(), given(self.queue.as_ref())) {
            ("pause", _) => one(ControlCommand::Pause(queue()?)),
            ("resume", _) => one(ControlCommand::Resume(queue()?)),
            ("cancel", _) => one(ControlCommand::Cancel(Select::Job(job()?))),
            ("revoke", _) => one(ControlCommand::Revoke(match given(self.owner.as_ref()) {
                Some(owner) => LeaseSelect::Owner(Arc::from(owner)),
                None => LeaseSelect::Job(job()?),
            })),
            ("retry" | "purge", Some(_)) => Ok(Plan::Matching {
                queue: queue()?,
                kind: given(self.kind.as_ref())
                    .ok_or_else(|| needed("kind"))?
                    .to_owned(),
                // As it is: blanks at its ends are part of it.
                error: self.error.clone().ok_or_else(|| needed("error"))?,
                purge: self.what == "purge",
            }),
            ("retry", None) => one(ControlCommand::RetryDead(Select::Job(job()?))),
            ("purge", None) => one(ControlCommand::Purge(Select::Job(job()?))),
            _ => Err(Trouble::Invalid("There is no such command.".to_owned())),
        }
    }

    /// The page to return to: one of ours, or the overview.
    fn back(&self) -> &str {
        let back = self.back.as_deref().unwrap_or("/");
        let ours = back.starts_with('/')
            && !back.starts_with("//")
            && back.len() <= 2_048
            && back
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && byte != b'\\');
        if ours { back } else { "/" }
    }
}

/// The form that asks once more.
pub(super) async fn confirm(asked: Asked, query: Result<Query<Wish>, QueryRejection>) -> Response {
    let Ok(Query(wish)) = query else {
        return in_trouble(
            &asked,
            None,
            &Trouble::Invalid("There is no such command.".to_owned()),
        );
    };
    if !asked.app.actions {
        let trouble = Trouble::Invalid("This dashboard is read-only.".to_owned());
        return in_trouble(&asked, None, &trouble);
    }
    let plan = match wish.plan() {
        Ok(plan) => plan,
        Err(trouble) => return in_trouble(&asked, None, &trouble),
    };
    let (title, words, label, danger) = describe(&wish, &plan);
    let mut form = html!(
        r#"<form class="confirm" method="post" action="{}"><h2>{}</h2><p>{}</p>"#,
        asked.to("/act"),
        title,
        words
    );
    for (name, value) in [
        ("do", Some(&wish.what)),
        ("job", wish.job.as_ref()),
        ("queue", wish.queue.as_ref()),
        ("owner", wish.owner.as_ref()),
        ("kind", wish.kind.as_ref()),
        ("error", wish.error.as_ref()),
    ] {
        if let Some(value) = value {
            put!(
                form,
                r#"<input type="hidden" name="{}" value="{}">"#,
                name,
                *value
            );
        }
    }
    put!(
        form,
        r#"<input type="hidden" name="back" value="{}"><label>Reason <input name="reason" required maxlength="500" autocomplete="off" placeholder="Goes on record with your name"></label><p class="acts"><button class="btn {}">{}</button> <a class="btn quiet" data-close href="{}">Leave it</a></p></form>"#,
        wish.back(),
        if danger { "danger" } else { "good" },
        label,
        asked.to(wish.back())
    );
    let body = html!(r#"<div class="narrow">{}</div>"#, form);
    document(&asked, None, title, &body, StatusCode::OK)
}

/// Title, words, the button's label, and whether it destroys.
fn describe(wish: &Wish, plan: &Plan) -> (&'static str, Html, &'static str, bool) {
    match plan {
        Plan::One(ControlCommand::Pause(queue)) => (
            "Pause a queue",
            html!(
                "Nothing more is granted from <b>{}</b>. Leases that are live go on; jobs can still be stored.",
                queue
            ),
            "Pause",
            false,
        ),
        Plan::One(ControlCommand::Resume(queue)) => (
            "Resume a queue",
            html!("<b>{}</b> grants leases again.", queue),
            "Resume",
            false,
        ),
        Plan::One(ControlCommand::Cancel(_)) => (
            "Cancel a job",
            html!(
                "A waiting job is called off at once. Of a leased one the holder is told with its next renewal; it keeps its lease until it stops."
            ),
            "Cancel the job",
            true,
        ),
        Plan::One(ControlCommand::Revoke(LeaseSelect::Job(id))) => (
            "Force-release a lease",
            html!(
                "The lease of job <span class=\"mono\">{}</span> ends now and the job is ready again; nothing is charged to it. The old holder is fenced: what it still tries is refused by the store, and by every resource that checks its token.",
                *id
            ),
            "Force-release",
            true,
        ),
        Plan::One(ControlCommand::Revoke(_)) => (
            "Force-release all leases of a worker",
            html!(
                "Every lease of <b>{}</b> ends now and the jobs are ready again; nothing is charged to them. Right for a worker that is gone; a living one is fenced and goes on claiming.",
                wish.owner.as_deref().unwrap_or_default()
            ),
            "Release all",
            true,
        ),
        Plan::One(ControlCommand::RetryDead(_)) => (
            "Retry a dead job",
            html!("The job is ready again, with its failures and expiries at zero."),
            "Retry",
            false,
        ),
        Plan::One(_) => (
            "Purge a job",
            html!("The job is deleted, with its payload and its past. This cannot be undone."),
            "Purge",
            true,
        ),
        Plan::Matching {
            queue,
            kind,
            error,
            purge: false,
        } => (
            "Retry the matching dead letters",
            html!(
                "Every dead <b>{}</b> of <b>{}</b> whose error reads <q>{}</q> becomes ready again, up to {} at a time.",
                *kind,
                queue,
                *error,
                MATCHING
            ),
            "Retry matching",
            false,
        ),
        Plan::Matching {
            queue,
            kind,
            error,
            purge: true,
        } => (
            "Purge the matching dead letters",
            html!(
                "Every dead <b>{}</b> of <b>{}</b> whose error reads <q>{}</q> is deleted, up to {} at a time. This cannot be undone.",
                *kind,
                queue,
                *error,
                MATCHING
            ),
            "Purge matching",
            true,
        ),
    }
}

/// Does it, and returns to the page it was asked from.
pub(super) async fn act(asked: Asked, form: Result<Form<Wish>, FormRejection>) -> Response {
    let Ok(Form(wish)) = form else {
        return in_trouble(
            &asked,
            None,
            &Trouble::Invalid("The form cannot be read.".to_owned()),
        );
    };
    match carry_out(&asked, &wish).await {
        Ok(done) => {
            asked.app.fleet.forget().await;
            asked.app.dead.forget().await;
            asked.app.study.forget().await;
            let back = wish.back();
            let and = if back.contains('?') { '&' } else { '?' };
            let word = wish.what.as_str();
            let address = format!(
                "{back}{and}done={word}&n={}&skipped={}",
                done.done, done.skipped
            );
            Redirect::to(&asked.to(&address)).into_response()
        }
        Err(trouble) => in_trouble(&asked, None, &trouble),
    }
}

async fn carry_out(asked: &Asked, wish: &Wish) -> Result<Controlled, Trouble> {
    let reason = given(wish.reason.as_ref())
        .ok_or_else(|| Trouble::Invalid("A reason is needed: it goes on record.".to_owned()))?;
    match wish.plan()? {
        Plan::One(command) => Ok(asked
            .app
            .client
            .operator(&asked.actor)
            .because(reason)
            .command(command)
            .await?),
        Plan::Matching {
            queue,
            kind,
            error,
            purge,
        } => {
            let ids = matching(asked, &queue, &kind, &error).await?;
            each(asked, &ids, purge, reason).await
        }
    }
}

/// The dead jobs of a kind that died of the same.
async fn matching(
    asked: &Asked,
    queue: &QueueName,
    kind: &str,
    error: &str,
) -> Result<Vec<JobId>, Trouble> {
    let (mut ids, mut after, mut looked_at) = (Vec::new(), None, 0);
    while looked_at < LOOKED_AT && ids.len() < MATCHING {
        let page = Page {
            after,
            rows: limits::PAGE_ROWS,
        };
        let store = &**asked.app.client.store();
        let jobs = inspect::jobs(store, queue.clone(), JobState::Dead, page).await?;
        looked_at += jobs.rows.len();
        let found = jobs
            .rows
            .iter()
            .filter(|view| view.job.kind.as_str() == kind && fingerprint(view) == error);
        ids.extend(found.map(|view| view.job.id));
        after = jobs.next;
        if after.is_none() {
            break;
        }
    }
    ids.truncate(MATCHING);
    Ok(ids)
}

/// One command per job: there is none for "those that died of the same".
async fn each(
    asked: &Asked,
    ids: &[JobId],
    purge: bool,
    reason: &str,
) -> Result<Controlled, Trouble> {
    let mut sum = Controlled::default();
    for some in ids.chunks(AT_ONCE) {
        let mut under_way = tokio::task::JoinSet::new();
        for &id in some {
            let select = Select::Job(id);
            let command = if purge {
                ControlCommand::Purge(select)
            } else {
                ControlCommand::RetryDead(select)
            };
            let (client, actor, reason) = (
                asked.app.client.clone(),
                asked.actor.clone(),
                reason.to_owned(),
            );
            under_way.spawn(async move {
                client
                    .operator(actor)
                    .because(reason)
                    .command(command)
                    .await
            });
        }
        while let Some(done) = under_way.join_next().await {
            let done = done.map_err(|error| {
                let text = "a command ended without an answer";
                leasehold::Error::new(leasehold::ErrorKind::Unexpected, text).caused_by(error)
            });
            let done = done??;
            sum.done += done.done;
            sum.skipped += done.skipped;
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_back_is_one_of_ours() {
        for (back, to) in [
            ("/leases?owner=a%20b", "/leases?owner=a%20b"),
            ("//evil.example", "/"),
            ("https://evil.example", "/"),
            ("/\\evil.example", "/"),
            ("/a\r\nSet-Cookie: x", "/"),
            ("", "/"),
        ] {
            let wish = Wish {
                back: Some(back.to_owned()),
                ..Wish::default()
            };
            assert_eq!(wish.back(), to, "{back:?}");
        }
    }
}
