//! A screen as a page: what was asked, the frame around the answer, and what to say when there is
//! none.

use std::str::FromStr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, OriginalUri, Query};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::guard::Actor;
use super::html::{Html, html, put, query};
use super::watch::{self, Snapshot};
use super::{App, audit, dead, expiry, job, jobs, leases, live, overview, queues, workers};
use crate::server::Connection;
use leasehold::error::Verb;
use leasehold::{Error, ErrorKind, Result};

/// What there is to look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Screen {
    Overview,
    Leases,
    Queues,
    Jobs,
    Job,
    Dead,
    Workers,
    Expiry,
    Audit,
}

impl Screen {
    /// Those in the navigation: path, name, the key that leads there.
    const LISTED: [(Self, &'static str, &'static str, &'static str); 7] = [
        (Self::Overview, "/", "Overview", "o"),
        (Self::Leases, "/leases", "Leases", "l"),
        (Self::Queues, "/queues", "Queues", "q"),
        (Self::Dead, "/dead", "Dead letters", "d"),
        (Self::Workers, "/workers", "Workers", "w"),
        (Self::Expiry, "/expiry", "Expiry analysis", "e"),
        (Self::Audit, "/audit", "Audit", "a"),
    ];

    /// Under which heading of the navigation it is found.
    fn listed(self) -> Self {
        match self {
            Self::Jobs | Self::Job => Self::Queues,
            other => other,
        }
    }
}

/// What the address asks for. Each screen reads its own part.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Params {
    pub(super) queue: Option<String>,
    pub(super) state: Option<String>,
    pub(super) owner: Option<String>,
    pub(super) task: Option<String>,
    pub(super) after: Option<String>,
    pub(super) window: Option<String>,
    /// The id that somebody looks for.
    job: Option<String>,
    /// What a command did, for the line on top.
    pub(super) done: Option<String>,
    pub(super) n: Option<u64>,
    pub(super) skipped: Option<u64>,
    #[serde(skip)]
    pub(super) id: String,
}

/// A field of a form, if anything was filled in.
pub(super) fn given(field: Option<&String>) -> Option<&str> {
    field
        .map(|text| text.trim())
        .filter(|text| !text.is_empty())
}

/// A field of a form as a value of the vocabulary.
pub(super) fn parsed<T: FromStr<Err = Error>>(
    field: Option<&String>,
) -> std::result::Result<Option<T>, Trouble> {
    let value = given(field).map(str::parse::<T>).transpose();
    value.map_err(|error: Error| Trouble::Invalid(error.to_string()))
}

/// Everything about a request that a page depends on.
#[derive(Clone)]
pub(super) struct Asked {
    pub(super) app: Arc<App>,
    pub(super) params: Params,
    /// The prefix that the router is nested under.
    pub(super) base: String,
    /// The page itself, within the prefix, for the way back.
    pub(super) here: String,
    pub(super) actor: String,
    theme: Option<&'static str>,
    wants_stream: bool,
    pub(super) connection: Option<Connection>,
}

impl FromRequestParts<Arc<App>> for Asked {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        app: &Arc<App>,
    ) -> std::result::Result<Self, Response> {
        app.start();
        let original = OriginalUri::from_request_parts(parts, app).await;
        let base = base(&original.map_or(parts.uri.clone(), |uri| uri.0), &parts.uri);
        let query = Query::<Params>::from_request_parts(parts, app).await;
        let mut params = query.map(|query| query.0).unwrap_or_default();
        let path = parts.uri.path();
        if let Some(id) = path.strip_prefix("/jobs/") {
            id.clone_into(&mut params.id);
        } else if let Some(id) = given(params.job.as_ref()) {
            params.id = id.to_owned();
        }
        let cookies = parts.headers.get(header::COOKIE);
        let cookies = cookies
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let theme = ["light", "dark"].into_iter().find(|theme| {
            cookies
                .split("; ")
                .any(|c| c.strip_prefix("leasehold_theme=") == Some(theme))
        });
        Ok(Self {
            app: Arc::clone(app),
            base,
            here: here(&parts.uri),
            actor: parts
                .extensions
                .get::<Actor>()
                .map_or_else(|| "dashboard".to_owned(), |actor| actor.0.clone()),
            theme,
            wants_stream: accepts_stream(&parts.headers),
            connection: parts.extensions.get::<Connection>().cloned(),
            params,
        })
    }
}

fn accepts_stream(headers: &HeaderMap) -> bool {
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/event-stream"))
}

/// What stands before our own part of the path.
fn base(original: &Uri, inner: &Uri) -> String {
    let (original, inner) = (original.path(), inner.path());
    let base = original.strip_suffix(inner).unwrap_or(original);
    base.trim_end_matches('/').to_owned()
}

/// The page without the line about the last command.
fn here(uri: &Uri) -> String {
    let mut here = uri.path().to_owned();
    let pairs = uri.query().unwrap_or_default().split('&');
    let kept = pairs.filter(|pair| {
        let name = pair.split('=').next().unwrap_or_default();
        !matches!(name, "" | "done" | "n" | "skipped")
    });
    for (at, pair) in kept.enumerate() {
        here.push(if at == 0 { '?' } else { '&' });
        here.push_str(pair);
    }
    here
}

impl Asked {
    /// The queues: as they are now for a page, as they were a moment ago for a stream.
    pub(super) async fn snapshot(&self) -> Result<Arc<Snapshot>> {
        if self.wants_stream {
            return watch::recent(&self.app).await;
        }
        watch::fresh(&self.app).await
    }

    /// The address of a path within the prefix.
    pub(super) fn to(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// A link that asks for confirmation of a command, or nothing if commands are not allowed.
    pub(super) fn action(&self, label: &str, style: &str, fields: &[(&str, &str)]) -> Html {
        if !self.app.actions {
            return Html::new();
        }
        let fields = fields.iter().copied().chain([("back", self.here.as_str())]);
        let fields = fields.map(|(name, value)| format!("{name}={}", query(value)));
        let address = self.to("/confirm?") + &fields.collect::<Vec<_>>().join("&");
        html!(
            r#"<a class="btn {}" data-modal href="{}">{}</a>"#,
            style,
            address,
            label
        )
    }

    /// A link to a job.
    pub(super) fn job(&self, id: leasehold::job::JobId) -> Html {
        let id = id.to_string();
        // The last part of the id is the random one.
        let short = format!("…{}", &id[id.len().saturating_sub(12)..]);
        let address = self.to(&format!("/jobs/{id}"));
        html!(
            r#"<a class="mono" href="{}" title="{}">{}</a>"#,
            address,
            id,
            short
        )
    }

    /// Links to the first and the next page, if there is more than one.
    pub(super) fn pager(&self, next: Option<&String>, shown: usize, of: Option<u64>) -> Html {
        let mut html = Html::new();
        if next.is_none() && given(self.params.after.as_ref()).is_none() {
            return html;
        }
        let (path, rest) = self.here.split_once('?').unwrap_or((&self.here, ""));
        let kept: Vec<&str> = rest
            .split('&')
            .filter(|pair| !pair.is_empty() && !pair.starts_with("after="))
            .collect();
        let first = self.to(&format!("{path}?{}", kept.join("&")));
        put!(html, r#"<nav class="pager" aria-label="Pages">"#);
        match of {
            Some(of) => put!(
                html,
                "<span>{} of {}</span>",
                shown,
                super::words::grouped(of)
            ),
            None => put!(html, "<span>{} shown</span>", shown),
        }
        if given(self.params.after.as_ref()).is_some() {
            put!(html, r#"<a class="btn" href="{}">First page</a>"#, first);
        }
        if let Some(next) = next {
            let next = format!("{first}&after={}", query(next));
            put!(
                html,
                r#"<a class="btn" rel="next" href="{}">Next page</a>"#,
                next
            );
        }
        put!(html, "</nav>");
        html
    }
}

/// A screen's answer.
pub(super) struct Shown {
    pub(super) title: String,
    /// What stays as it is: forms.
    pub(super) fixed: Html,
    /// What is kept current.
    pub(super) live: Html,
}

impl Shown {
    pub(super) fn new(title: &str, fixed: Html, live: Html) -> Self {
        Self {
            title: title.to_owned(),
            fixed,
            live,
        }
    }
}

/// Why there is no page.
#[derive(Debug)]
pub(super) enum Trouble {
    Invalid(String),
    Missing(String),
    Store(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::InvalidInput => Self::Invalid(error.to_string()),
            _ => Self::Store(error),
        }
    }
}

impl Trouble {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Missing(_) => StatusCode::NOT_FOUND,
            Self::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// One line. What a store says may name its address: only the kind is shown, the rest is
    /// logged.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Invalid(text) | Self::Missing(text) => text.clone(),
            Self::Store(error) => {
                tracing::warn!(%error, "the dashboard could not ask the store");
                format!("The store does not answer ({}).", error.kind().as_str())
            }
        }
    }
}

/// The content of a screen.
pub(super) async fn show(screen: Screen, asked: &Asked) -> std::result::Result<Shown, Trouble> {
    match screen {
        Screen::Overview => overview::show(asked).await,
        Screen::Leases => leases::show(asked).await,
        Screen::Queues => queues::show(asked).await,
        // Found by its id, from the field beside the navigation.
        Screen::Jobs if !asked.params.id.is_empty() => job::show(asked).await,
        Screen::Jobs => jobs::show(asked).await,
        Screen::Job => job::show(asked).await,
        Screen::Dead => dead::show(asked).await,
        Screen::Workers => workers::show(asked).await,
        Screen::Expiry => expiry::show(asked).await,
        Screen::Audit => audit::show(asked).await,
    }
}

/// Answers with a page, or with a stream of what changes on it.
pub(super) async fn page(screen: Screen, asked: Asked) -> Response {
    if asked.wants_stream {
        return live::stream(screen, asked);
    }
    match show(screen, &asked).await {
        Ok(shown) => {
            let mut body = Html::new();
            put!(body, "{}", said(&asked.params));
            put!(body, "<h1>{}</h1>{}", shown.title, shown.fixed);
            put!(body, r#"<div id="live" data-live>{}</div>"#, shown.live);
            document(&asked, Some(screen), &shown.title, &body, StatusCode::OK)
        }
        Err(trouble) => in_trouble(&asked, Some(screen), &trouble),
    }
}

pub(super) fn in_trouble(asked: &Asked, screen: Option<Screen>, trouble: &Trouble) -> Response {
    let status = trouble.status();
    let title = match trouble {
        Trouble::Missing(_) => "Not here",
        Trouble::Invalid(_) => "Cannot be read",
        Trouble::Store(_) => "No answer",
    };
    let body = html!(
        r#"<h1>{}</h1><div class="empty" role="alert"><p>{}</p></div>"#,
        title,
        trouble.words()
    );
    document(asked, screen, title, &body, status)
}

pub(super) async fn missing(asked: Asked) -> Response {
    let trouble = Trouble::Missing("There is no such page.".to_owned());
    in_trouble(&asked, None, &trouble)
}

/// What the last command did, in words of our own.
fn said(params: &Params) -> Html {
    let n = params.n.unwrap_or_default();
    let what = match params.done.as_deref() {
        Some("revoke") => super::words::count(n, "lease") + " force-released",
        Some("retry") => super::words::count(n, "job") + " brought back to ready",
        Some("purge") => super::words::count(n, "job") + " deleted",
        Some("cancel") => super::words::count(n, "job") + " called off",
        Some("pause") => "The queue is paused: it grants nothing".to_owned(),
        Some("resume") => "The queue grants again".to_owned(),
        _ => return Html::new(),
    };
    let mut html = html!(r#"<p class="flash" role="status">{}."#, what);
    if let Some(skipped) = params.skipped.filter(|skipped| *skipped > 0) {
        put!(
            html,
            " {} left alone.",
            super::words::count(skipped, "other")
        );
    }
    put!(html, "</p>");
    html
}

/// The frame around every page.
pub(super) fn document(
    asked: &Asked,
    screen: Option<Screen>,
    title: &str,
    body: &Html,
    status: StatusCode,
) -> Response {
    let theme = asked.theme.unwrap_or("auto");
    let mut html = Html::new();
    put!(
        html,
        r##"<!doctype html>
<html lang="en" data-theme="{}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{} · leasehold</title>
<link rel="icon" href="{}" type="image/svg+xml">
<link rel="stylesheet" href="{}">
<script src="{}" defer></script>
</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<header class="side">
<a class="brand" href="{}"><svg viewBox="0 0 24 24" aria-hidden="true"><path class="mark-a" d="M5 3h14v4l-5 5 5 5v4H5v-4l5-5-5-5z"/><path class="mark-b" d="M8.5 18.5h7L12 14.6z"/></svg><span>leasehold</span></a>
<nav aria-label="Screens"><ul>"##,
        theme,
        title,
        asked.to("/assets/icon.svg"),
        asked.to("/assets/app.css"),
        asked.to("/assets/app.js"),
        asked.to("/"),
    );
    for (listed, path, name, key) in Screen::LISTED {
        let current = screen.is_some_and(|screen| screen.listed() == listed);
        let current = html!(r#"{}"#, if current { "page" } else { "false" });
        put!(
            html,
            r#"<li><a href="{}" aria-current="{}" data-key-go="{}">{}</a></li>"#,
            asked.to(path),
            current,
            key,
            name
        );
    }
    put!(
        html,
        r#"</ul></nav><form class="find" role="search" action="{}"><input type="search" name="job" aria-label="Find a job by its id" placeholder="Find a job by its id" autocomplete="off" spellcheck="false" required></form><div class="tools">"#,
        asked.to("/jobs")
    );
    put!(
        html,
        r#"<button type="button" id="pulse" class="pulse" data-state="off" hidden><i></i><span>Live</span></button>
<button type="button" id="theme" class="quiet" hidden>Theme</button>
<p class="about"><span class="tag">{}</span> <span class="tag">{}</span> <span>v{}</span></p>
</div></header>
<main id="main" tabindex="-1">
<p id="trouble" class="trouble" role="alert" hidden></p>
{}
</main>
<dialog id="modal" aria-label="Confirm"></dialog>
</body></html>
"#,
        asked.app.client.store().name(),
        if asked.app.actions {
            "actions allowed"
        } else {
            "read-only"
        },
        env!("CARGO_PKG_VERSION"),
        body
    );
    let kind = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::VARY, "Accept, Cookie"),
    ];
    (status, kind, html.into_string()).into_response()
}

/// The scrape, if there is an exporter.
pub(super) async fn metrics(asked: Asked) -> Response {
    match &asked.app.exporter {
        Some(exporter) => crate::prometheus::answer(exporter, &asked.app.client).await,
        None => missing(asked).await,
    }
}

/// The router under a prefix.
pub(super) fn under(prefix: &str, router: Router) -> Result<Router> {
    let prefix = prefix.trim_matches('/');
    if prefix.is_empty() {
        return Ok(router);
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    if !prefix.chars().all(plain) || prefix.contains("//") {
        let found = format!("{} bytes of text", prefix.len());
        return Err(
            Error::invalid("prefix", found, "a path of letters, digits, - _ . and /")
                .during(Verb::Open),
        );
    }
    let home = format!("/{prefix}");
    let to_home = home.clone();
    let redirect = move || std::future::ready(axum::response::Redirect::to(&to_home));
    Ok(Router::new()
        .nest(&home, router)
        .route(&format!("{home}/"), axum::routing::get(redirect)))
}
