//! What must hold for any request: the dashboard's pages and forms, and the fence's headers.
//!
//! A request is a text: `METHOD path`, a line for each header, an empty line, and the body.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use leasehold::fence::Scope;
use leasehold::fence::http::{FENCING_MARK, FenceLayer, Fenced, refusal, stamp};
use leasehold::fence::memory::{Cell, OpenCell};
use leasehold::inspect::Page;
use leasehold::job::{Kind, QueueName};
use leasehold::{Client, FencingToken, NewJob};
use leasehold_web::Dashboard;
use tokio::runtime::Runtime;
use tower_layer::Layer as _;
use tower_service::Service;

/// Opens a tag if it is not escaped. The starts of the fuzzers have it in every field.
pub const TAG: &str = "<zq";
/// Lets its bearer in.
const SECRET: &str = "correct-horse-battery";

fn parse(data: &[u8]) -> Option<Request<Body>> {
    let text = String::from_utf8_lossy(data);
    let (head, body) = text.split_once("\n\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let (method, path) = lines.next()?.split_once(' ')?;
    let uri: Uri = path.parse().ok()?;
    let mut request = Request::builder()
        .method(Method::from_bytes(method.as_bytes()).ok()?)
        .uri(uri)
        .body(Body::from(body.to_owned()))
        .ok()?;
    for line in lines {
        let (name, value) = line.split_once(':')?;
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let value = HeaderValue::from_bytes(value.trim().as_bytes()).ok()?;
        request.headers_mut().append(name, value);
    }
    Some(request)
}

/// Three dashboards: one that shows, one that acts, one that is locked.
struct Desk {
    runtime: Runtime,
    client: Client,
    shows: Router,
    acts: Router,
    locked: Router,
}

impl Desk {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let job = |n: usize| {
            let kind = Kind::new(format!("kind-{n}")).expect("a name");
            NewJob::raw(QueueName::default(), kind, format!("{{\"at\":\"{TAG}\"}}"))
                .header("note", TAG)
        };
        let client = |runtime: &Runtime| {
            runtime.block_on(async {
                let client = Client::open("memory:").await.expect("memory");
                let jobs = (0..5).map(job);
                client.enqueue_many(jobs).await.expect("stored");
                client
            })
        };
        let looks = client(&runtime);
        let acts = client(&runtime);
        Self {
            shows: Dashboard::new(looks.clone()).router(),
            acts: Dashboard::new(acts).allow_actions().router(),
            locked: Dashboard::new(looks.clone())
                .allow_actions()
                .token(SECRET)
                .router(),
            client: looks,
            runtime,
        }
    }

    /// The status, and what was shown.
    fn ask(&self, router: &Router, request: Request<Body>) -> StatusCode {
        let mut router = router.clone();
        let answer = self.runtime.block_on(async {
            let answer = Service::<Request<Body>>::call(&mut router, request).await;
            answer.unwrap_or_else(|never| match never {})
        });
        let (status, headers) = (answer.status(), answer.headers().clone());
        // There may be no room for one more stream; it says so.
        let crowded =
            status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key("retry-after");
        assert!(crowded || !status.is_server_error(), "{status}");
        for name in ["content-security-policy", "x-content-type-options"] {
            assert!(headers.contains_key(name), "{status} without {name}");
        }
        if let Some(to) = headers.get("location") {
            let to = to.to_str().expect("a path");
            let ours = to.starts_with('/') && !to.starts_with("//") && !to.contains('\\');
            assert!(ours, "leads to {to}");
        }
        let kind = headers.get("content-type").and_then(|v| v.to_str().ok());
        if kind.is_some_and(|kind| kind.starts_with("text/html")) {
            let read = to_bytes(answer.into_body(), 1 << 24);
            let body = self.runtime.block_on(read).expect("a page");
            let page = String::from_utf8(body.to_vec()).expect("pages are text");
            assert!(!page.contains(TAG), "unescaped: {page}");
        } else {
            drop(answer);
        }
        // Whatever serves a stream notices that nobody listens any more.
        self.runtime.block_on(async {
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
        });
        status
    }
}

/// The dashboard survives any request, escapes everything it shows and links nowhere else. A
/// read-only one leaves no record, and a locked one lets nobody in.
pub fn dashboard(data: &[u8]) {
    thread_local!(static DESK: Desk = Desk::new());
    DESK.with(|desk| {
        let Some(request) = parse(data) else { return };
        desk.ask(&desk.shows, request);
        if let Some(request) = parse(data) {
            desk.ask(&desk.acts, request);
        }
        if let Some(request) = parse(data) {
            let knows = String::from_utf8_lossy(data).contains(SECRET);
            let status = desk.ask(&desk.locked, request);
            let shut = [StatusCode::UNAUTHORIZED, StatusCode::URI_TOO_LONG].contains(&status);
            // The word may also come as base64.
            let knows = knows
                || data
                    .windows(5)
                    .any(|five| five.eq_ignore_ascii_case(b"basic"));
            assert!(shut || knows, "{status} without the token");
        }
        let audit = desk.client.audit(Page::first(1));
        let audit = desk.runtime.block_on(audit).expect("the audit");
        assert!(audit.rows.is_empty(), "{:?}", audit.rows);
    });
}

/// A route that tells what the fence let through.
#[derive(Clone)]
struct Route;

impl Service<Request<Body>> for Route {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let fenced = request.extensions().get::<Fenced<OpenCell<u64>>>();
        let fenced = fenced.expect("the layer opened it");
        let mut again = HeaderMap::new();
        let (scope, token) = (fenced.scope(), fenced.token());
        stamp(&mut again, scope, token, fenced.operation()).expect("what was shown can be shown");
        let mut answer = Response::new(scope.as_str().to_owned());
        *answer.headers_mut() = again;
        ready(Ok(answer))
    }
}

/// A fence, and the highest token that it opened each scope for.
struct Gate {
    runtime: Runtime,
    layer: FenceLayer<Cell<u64>>,
    marks: HashMap<String, FencingToken>,
}

impl Gate {
    fn new() -> Self {
        Self {
            runtime: tokio::runtime::Builder::new_current_thread()
                .build()
                .expect("a runtime"),
            layer: FenceLayer::new(Cell::new(0)),
            marks: HashMap::new(),
        }
    }

    fn ask(&mut self, request: Request<Body>) {
        let shown = request.headers().clone();
        let mut service = self.layer.layer(Route);
        let Ok(answer) = self.runtime.block_on(service.call(request));
        let (status, headers) = (answer.status(), answer.headers());
        let sent_token = |name: &'static str| token(&shown, &HeaderName::from_static(name));
        match status.as_u16() {
            200 => {
                let token = sent_token("fencing-token").expect("let through without a token");
                let scope = Scope::parse(answer.body()).expect("let through without a scope");
                let sent = shown["fencing-scope"].as_bytes();
                let escapes = sent.iter().enumerate().filter(|(_, byte)| **byte == b'%');
                for (at, _) in escapes {
                    let hex = sent.get(at + 1..at + 3).unwrap_or_default();
                    let whole = hex.len() == 2 && hex.iter().all(u8::is_ascii_hexdigit);
                    assert!(whole, "let through with a broken escape");
                }
                assert!(refusal(status, headers, &scope, token).is_ok());
                let mark = self.marks.entry(scope.as_str().to_owned()).or_insert(token);
                assert!(*mark <= token, "{token} after {mark}");
                *mark = token;
            }
            409 => {
                let mark = token(headers, &FENCING_MARK).expect("a refusal tells the mark");
                let token = sent_token("fencing-token").expect("refused for its token");
                assert!(token < mark, "{token} refused by {mark}");
            }
            428 => {
                let both = ["fencing-token", "fencing-scope"].map(|name| shown.contains_key(name));
                assert_ne!(both, [true, true]);
            }
            other => assert_eq!(other, 400),
        }
    }
}

fn token(headers: &HeaderMap, name: &HeaderName) -> Option<FencingToken> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

/// Scopes that one fence is asked for: a fuzzer has no end of them.
const SCOPES: usize = 10_000;

/// The fence lets through what has a token and a scope, never below what it let through before; and
/// answers everything else with a status of its own.
pub fn fence(data: &[u8]) {
    thread_local!(static GATE: RefCell<Gate> = RefCell::new(Gate::new()));
    let Some(request) = parse(data) else { return };
    GATE.with_borrow_mut(|gate| {
        if gate.marks.len() > SCOPES {
            *gate = Gate::new();
        }
        gate.ask(request);
    });
}
