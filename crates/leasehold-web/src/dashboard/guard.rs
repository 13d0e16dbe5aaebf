//! Who may ask for what: the checks before every request, and the headers on every answer.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use crate::server::same;

/// Bytes in a path and its query.
const URI_BYTES: usize = 4 * 1024;

/// Nothing but our own files; nothing inline; nobody may frame the page.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Who may look.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Auth {
    /// Whoever reaches the address.
    Open,
    /// Whoever has the token: as `Authorization: Bearer`, or as the password of any user.
    Token(Arc<str>),
    /// One user.
    Basic { user: Arc<str>, password: Arc<str> },
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "Open",
            Self::Token(_) => "Token(…)",
            Self::Basic { .. } => "Basic(…)",
        })
    }
}

impl Auth {
    /// The name under which the caller's commands go on record, if it may come in.
    fn admit(&self, headers: &HeaderMap) -> Option<String> {
        let given = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let basic = given.and_then(basic);
        let named = |user: &str| match user {
            "" => "dashboard".to_owned(),
            user => user.chars().filter(|c| !c.is_control()).take(64).collect(),
        };
        match self {
            Self::Open => Some(named("")),
            Self::Token(token) => {
                let bearer = given.and_then(|given| strip_scheme(given, "bearer"));
                if same(token.as_bytes(), bearer.unwrap_or_default().as_bytes()) {
                    return Some(named(""));
                }
                let (user, password) = basic?;
                same(token.as_bytes(), password.as_bytes()).then(|| named(&user))
            }
            Self::Basic { user, password } => {
                let (given_user, given_password) = basic?;
                // Both are compared, whatever the first says.
                let right_user = same(user.as_bytes(), given_user.as_bytes());
                let right_password = same(password.as_bytes(), given_password.as_bytes());
                (right_user & right_password).then(|| named(user))
            }
        }
    }
}

fn strip_scheme<'a>(given: &'a str, scheme: &str) -> Option<&'a str> {
    let (found, rest) = given.split_once(' ')?;
    found.eq_ignore_ascii_case(scheme).then(|| rest.trim())
}

fn basic(given: &str) -> Option<(String, String)> {
    let bytes = unbase64(strip_scheme(given, "basic")?)?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}

fn unbase64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut width) = (0_u32, 0);
    for c in text.trim_end_matches('=').bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(value)) & 0xffff;
        width += 6;
        if width >= 8 {
            width -= 8;
            bytes.push((bits >> width) as u8);
        }
    }
    Some(bytes)
}

/// The name under which the caller's commands go on record.
#[derive(Clone)]
pub(super) struct Actor(pub(super) String);

/// The checks before every request, and the headers on every answer.
pub(super) async fn guard(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Response {
    let mut response = match admit(&app, &request) {
        Ok(actor) => {
            request.extensions_mut().insert(Actor(actor));
            next.run(request).await
        }
        Err((status, why)) => refuse(status, why),
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CSP),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        // Not `no-referrer`: browsers would then send `Origin: null` with our own forms.
        (header::REFERRER_POLICY, "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

fn refuse(status: StatusCode, why: &'static str) -> Response {
    let mut response = (status, format!("{why}\n")).into_response();
    if status == StatusCode::UNAUTHORIZED {
        let challenge = HeaderValue::from_static("Basic realm=\"leasehold\", charset=\"UTF-8\"");
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

fn admit(app: &App, request: &Request) -> Result<String, (StatusCode, &'static str)> {
    let uri = request.uri();
    if uri.path_and_query().map_or(0, |path| path.as_str().len()) > URI_BYTES {
        return Err((StatusCode::URI_TOO_LONG, "the address is too long"));
    }
    let headers = request.headers();
    if app.own_hosts_only && !is_own_host(headers) {
        let why = "this dashboard answers to localhost only";
        return Err((StatusCode::MISDIRECTED_REQUEST, why));
    }
    let Some(actor) = app.auth.admit(headers) else {
        return Err((StatusCode::UNAUTHORIZED, "authentication is needed"));
    };
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(actor);
    }
    if !app.actions {
        return Err((StatusCode::FORBIDDEN, "this dashboard is read-only"));
    }
    if !is_same_site(headers) {
        return Err((
            StatusCode::FORBIDDEN,
            "commands from other sites are refused",
        ));
    }
    Ok(actor)
}

/// Without authentication, a page of another site must not reach us under its own name (DNS
/// rebinding).
fn is_own_host(headers: &HeaderMap) -> bool {
    let Some(host) = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
    else {
        return false;
    };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

/// Whether a command comes from our own page, or from no page at all.
///
/// A browser says where a request comes from, and a page cannot forge it. A program says that it is
/// none by a header that a page could not send to another site.
fn is_same_site(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(site) = text("sec-fetch-site")
        && site != "same-origin"
    {
        return false;
    }
    match (text("origin"), text("host")) {
        (Some(origin), Some(host)) => {
            let name = origin.split_once("://").map(|(_, name)| name);
            name.is_some_and(|name| name.eq_ignore_ascii_case(host))
        }
        (Some(_), None) => false,
        (None, _) => text("sec-fetch-site").is_some() || text("x-leasehold-action").is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_command_from_another_site_is_known() {
        for (pairs, own) in [
            (&[("sec-fetch-site", "same-origin")][..], true),
            (&[("sec-fetch-site", "cross-site")], false),
            (&[("sec-fetch-site", "same-site")], false),
            (
                &[("origin", "http://evil.example"), ("host", "localhost:1")],
                false,
            ),
            (
                &[("origin", "http://localhost:1"), ("host", "localhost:1")],
                true,
            ),
            (&[("origin", "null"), ("host", "localhost:1")], false),
            (
                &[
                    ("sec-fetch-site", "same-origin"),
                    ("origin", "http://evil.example"),
                    ("host", "localhost:1"),
                ],
                false,
            ),
            (&[("host", "localhost:1")], false),
            (
                &[("host", "localhost:1"), ("x-leasehold-action", "1")],
                true,
            ),
            (
                &[
                    ("sec-fetch-site", "cross-site"),
                    ("x-leasehold-action", "1"),
                ],
                false,
            ),
        ] {
            assert_eq!(is_same_site(&headers(pairs)), own, "{pairs:?}");
        }
    }

    #[test]
    fn only_our_own_names_reach_an_open_dashboard() {
        for (host, own) in [
            ("localhost", true),
            ("LocalHost:8080", true),
            ("127.0.0.1:1", true),
            ("127.9.9.9", true),
            ("[::1]:80", true),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("10.0.0.1", false),
            ("", false),
        ] {
            assert_eq!(is_own_host(&headers(&[("host", host)])), own, "{host}");
        }
        assert!(!is_own_host(&HeaderMap::new()));
    }

    #[test]
    fn credentials_are_checked_whole() {
        let token = Auth::Token("s3cret".into());
        let with = |value: &str| headers(&[("authorization", value)]);
        assert_eq!(
            token.admit(&with("Bearer s3cret")).as_deref(),
            Some("dashboard")
        );
        // ada:s3cret
        assert_eq!(
            token.admit(&with("Basic YWRhOnMzY3JldA==")).as_deref(),
            Some("ada")
        );
        for wrong in [
            "Bearer s3cre",
            "Bearer",
            "Basic",
            "Basic !!!",
            "Basic czNjcmV0",
            "s3cret",
            "",
        ] {
            assert_eq!(token.admit(&with(wrong)), None, "{wrong}");
        }
        assert_eq!(token.admit(&HeaderMap::new()), None);
        let basic = Auth::Basic {
            user: "ada".into(),
            password: "s3cret".into(),
        };
        assert_eq!(
            basic.admit(&with("basic YWRhOnMzY3JldA==")).as_deref(),
            Some("ada")
        );
        // bob:s3cret
        assert_eq!(basic.admit(&with("Basic Ym9iOnMzY3JldA==")), None);
        assert!(!format!("{basic:?}{token:?}").contains("s3cret"));
    }
}
