//! The fence between HTTP services: a real axum server on loopback, and a plain client.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use ::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::Router;
use axum::extract::Extension;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use leasehold::fence::file::FencedFile;
use leasehold::fence::http::{
    FENCING_MARK, FENCING_SCOPE, FENCING_TOKEN, FenceLayer, Fenced, conflict, refusal, stamp,
};
use leasehold::fence::memory::{Cell, OpenCell};
use leasehold::fence::{Fence, FenceError, Scope};
use leasehold::{Error, ErrorKind, FencingToken, async_trait};
use leasehold_conformance::resource::{Holder, Subject, check};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::{conforms, seed};

type Lists = Arc<HashMap<Scope, Vec<u64>>>;
type Guard = Extension<Fenced<OpenCell<Lists>>>;

async fn read(Extension(fenced): Guard) -> Response {
    match fenced.opened().await.read() {
        Ok(lists) => {
            let list = lists.get(fenced.scope()).cloned().unwrap_or_default();
            let words: Vec<String> = list.iter().map(u64::to_string).collect();
            words.join(" ").into_response()
        }
        Err(stale) => conflict(&stale),
    }
}

/// 201 if the value was appended, 200 if it had been before.
async fn append(Extension(fenced): Guard, value: String) -> Response {
    let (scope, value) = (fenced.scope().clone(), value.parse().unwrap());
    let change = |lists: &mut Lists| {
        let list = Arc::make_mut(lists).entry(scope).or_default();
        list.push(value);
    };
    let mut list = fenced.opened().await;
    let done = match fenced.operation() {
        Some(operation) => list
            .write_once(operation, change)
            .map(|done| done.is_some()),
        None => list.write(change).map(|()| true).map_err(FenceError::from),
    };
    match done {
        Ok(true) => StatusCode::CREATED.into_response(),
        Ok(false) => StatusCode::OK.into_response(),
        Err(FenceError::Stale(stale)) => conflict(&stale),
        Err(FenceError::Trouble(_)) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn serve(routes: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

fn lists(cell: &Cell<Lists>) -> Router {
    Router::new()
        .route("/list", get(read).post(append))
        .layer(FenceLayer::new(cell.clone()))
}

/// One connection, one request at a time.
struct Plain(BufReader<TcpStream>);

impl Plain {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self(BufReader::new(stream))
    }

    async fn ask(
        &mut self,
        method: &str,
        path: &str,
        headers: &HeaderMap,
        body: &str,
    ) -> (StatusCode, HeaderMap, String) {
        let length = body.len();
        let mut text =
            format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n");
        for (name, value) in headers {
            for part in [name.as_str(), ": ", value.to_str().unwrap(), "\r\n"] {
                text.push_str(part);
            }
        }
        text.push_str("\r\n");
        text.push_str(body);
        self.0.write_all(text.as_bytes()).await.unwrap();
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).await.unwrap(), 0, "hung up");
            if line.trim().is_empty() {
                break;
            }
            lines.push(line.trim().to_owned());
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = HeaderMap::new();
        for line in &lines[1..] {
            let (name, value) = line.split_once(": ").unwrap();
            let name: HeaderName = name.parse().unwrap();
            headers.insert(name, HeaderValue::from_str(value).unwrap());
        }
        let length = headers
            .get("content-length")
            .map_or("0", |n| n.to_str().unwrap());
        let mut body = vec![0; length.parse().unwrap()];
        self.0.read_exact(&mut body).await.unwrap();
        (status, headers, String::from_utf8(body).unwrap())
    }
}

/// A resource that is reached by way of a server.
struct Service<R> {
    resource: R,
    address: SocketAddr,
    idle: Arc<std::sync::Mutex<Vec<Plain>>>,
}

impl<R> Service<R> {
    async fn start(resource: R, routes: Router) -> Self {
        Self {
            resource,
            address: serve(routes).await,
            idle: Arc::default(),
        }
    }

    async fn client(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        let idle = self.idle.lock().unwrap().pop();
        let plain = match idle {
            Some(plain) => plain,
            None => Plain::connect(self.address).await,
        };
        Box::new(HttpHolder {
            plain: Some(plain),
            idle: Arc::clone(&self.idle),
            scope: scope.clone(),
            token,
        })
    }
}

struct HttpHolder {
    plain: Option<Plain>,
    idle: Arc<std::sync::Mutex<Vec<Plain>>>,
    scope: Scope,
    token: FencingToken,
}

impl Drop for HttpHolder {
    fn drop(&mut self) {
        self.idle.lock().unwrap().extend(self.plain.take());
    }
}

impl HttpHolder {
    async fn ask(
        &mut self,
        method: &str,
        operation: Option<&str>,
        body: &str,
    ) -> Result<(StatusCode, String), FenceError> {
        let mut headers = HeaderMap::new();
        stamp(&mut headers, &self.scope, self.token, operation)?;
        let plain = self.plain.as_mut().unwrap();
        let (status, headers, body) = plain.ask(method, "/list", &headers, body).await;
        refusal(status, &headers, &self.scope, self.token)?;
        if !status.is_success() {
            let why = format!("the server said {status}");
            return Err(Error::new(ErrorKind::Unexpected, why).into());
        }
        Ok((status, body))
    }
}

#[async_trait]
impl Subject for Service<Cell<Lists>> {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        self.client(scope, token).await
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        let list = |lists: &Lists| lists.get(scope).cloned().unwrap_or_default();
        self.resource.look(list)
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        self.resource.prune(below);
        Ok(())
    }
}

#[async_trait]
impl Holder for HttpHolder {
    async fn open(&mut self) -> Result<(), FenceError> {
        self.ask("GET", None, "").await.map(|_| ())
    }

    async fn read(&mut self) -> Result<Vec<u64>, FenceError> {
        let (_, body) = self.ask("GET", None, "").await?;
        let words = body.split_whitespace();
        Ok(words.map(|word| word.parse().unwrap()).collect())
    }

    async fn write(&mut self, value: u64) -> Result<(), FenceError> {
        self.ask("POST", None, &value.to_string()).await.map(|_| ())
    }

    async fn write_once(&mut self, operation: &str, value: u64) -> Result<bool, FenceError> {
        let (status, _) = self
            .ask("POST", Some(operation), &value.to_string())
            .await?;
        Ok(status == StatusCode::CREATED)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_behind_the_layer_conforms() {
    let cell = Cell::default();
    let routes = lists(&cell);
    let service = Service::start(cell, routes).await;
    conforms("http", &service).await;
}

/// Another adapter's resource, behind the layer: what a request shows opens it, and the route reads
/// and writes by what was opened.
#[derive(Clone)]
struct Behind(Arc<dyn Subject>);

#[async_trait]
impl Fence for Behind {
    type Opened = Box<dyn Holder>;

    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<Self::Opened, FenceError> {
        let mut holder = self.0.holder(scope, token).await;
        holder.open().await?;
        Ok(holder)
    }
}

type Held = Extension<Fenced<Box<dyn Holder>>>;

fn refused(error: FenceError) -> Response {
    match error {
        FenceError::Stale(stale) => conflict(&stale),
        FenceError::Trouble(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn read_held(Extension(fenced): Held) -> Response {
    match fenced.opened().await.read().await {
        Ok(list) => {
            let words: Vec<String> = list.iter().map(u64::to_string).collect();
            words.join(" ").into_response()
        }
        Err(error) => refused(error),
    }
}

async fn append_held(Extension(fenced): Held, value: String) -> Response {
    let (mut list, value) = (fenced.opened().await, value.parse().unwrap());
    let done = match fenced.operation() {
        Some(operation) => list.write_once(operation, value).await,
        None => list.write(value).await.map(|()| true),
    };
    match done {
        Ok(true) => StatusCode::CREATED.into_response(),
        Ok(false) => StatusCode::OK.into_response(),
        Err(error) => refused(error),
    }
}

#[async_trait]
impl Subject for Service<Behind> {
    async fn holder(&self, scope: &Scope, token: FencingToken) -> Box<dyn Holder> {
        self.client(scope, token).await
    }

    async fn landed(&self, scope: &Scope) -> Vec<u64> {
        self.resource.0.landed(scope).await
    }

    async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        self.resource.0.prune(below).await
    }
}

/// Fewer than for the adapter alone: each step is a request and two transactions.
const BEHIND: usize = 250;

async fn conforms_behind_the_layer(name: &str, subject: Arc<dyn Subject>) {
    let behind = Behind(subject);
    let routes = Router::new()
        .route("/list", get(read_held).post(append_held))
        .layer(FenceLayer::new(behind.clone()));
    let service = Service::start(behind, routes).await;
    let figures = check(&service, seed(), BEHIND).await;
    let figures = figures.unwrap_or_else(|breach| panic!("{name}: {breach}"));
    println!("{name} behind the layer, seed {}: {figures:?}", seed());
    assert_eq!(figures.interleavings, BEHIND);
    assert!(figures.refused > 0 && figures.repeated > 0, "{figures:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_sqlite_file_behind_the_layer_conforms() {
    conforms_behind_the_layer("sqlite", Arc::new(crate::sqlite::Sqlite::new())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs postgresql: ./tests/run"]
async fn a_postgres_database_behind_the_layer_conforms() {
    let server = crate::postgres_server::Server::start(&["fsync=off"]);
    let subject = crate::postgres::Pg::in_database(&Arc::new(server), "bank").await;
    conforms_behind_the_layer("postgres", Arc::new(subject)).await;
}

fn scope() -> Scope {
    // With everything that a header cannot hold.
    Scope::parse("bank/default/k:account 7%\r\n/ü").unwrap()
}

fn stamped(token: u64) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let token = FencingToken::new(token);
    stamp(&mut headers, &scope(), token, Some("debit ü")).unwrap();
    headers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_stood_still_behind_the_layer_is_refused_by_what_was_opened() {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let signals = (Arc::clone(&arrived), Arc::clone(&go));
    let held_up = move |Extension(fenced): Extension<Fenced<OpenCell<u64>>>| async move {
        if fenced.token() == FencingToken::new(33) {
            signals.0.notify_one();
            signals.1.notified().await;
        }
        match fenced
            .opened()
            .await
            .write(|value| *value = fenced.token().get())
        {
            Ok(()) => StatusCode::NO_CONTENT.into_response(),
            Err(stale) => conflict(&stale),
        }
    };
    let cell = Cell::new(0_u64);
    let routes = Router::new().route("/", post(held_up));
    let address = serve(routes.layer(FenceLayer::new(cell.clone()))).await;
    let old = tokio::spawn(async move {
        let mut plain = Plain::connect(address).await;
        plain.ask("POST", "/", &stamped(33), "").await
    });
    let patience = std::time::Duration::from_secs(60);
    let waited = tokio::time::timeout(patience, arrived.notified()).await;
    waited.expect("the request reaches its route");
    let mut plain = Plain::connect(address).await;
    let (status, ..) = plain.ask("POST", "/", &stamped(34), "").await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    go.notify_one();
    let (status, headers, _) = old.await.unwrap();
    assert_eq!(status, StatusCode::CONFLICT);
    assert_eq!(headers[FENCING_MARK], "34");
    let stale = refusal(status, &headers, &scope(), FencingToken::new(33)).unwrap_err();
    assert_eq!(stale.mark(), FencingToken::new(34));
    assert_eq!(cell.look(|value| *value), 34);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_shows_no_token_or_none_that_can_be_read_does_not_get_in() {
    let cell = Cell::default();
    let mut plain = Plain::connect(serve(lists(&cell)).await).await;
    let mut ask = async |headers: HeaderMap| plain.ask("GET", "/list", &headers, "").await.0;
    assert_eq!(
        ask(HeaderMap::new()).await,
        StatusCode::PRECONDITION_REQUIRED
    );
    let mut headers = stamped(5);
    headers.remove(FENCING_SCOPE);
    assert_eq!(ask(headers).await, StatusCode::PRECONDITION_REQUIRED);
    for (name, value) in [
        (FENCING_TOKEN, "five"),
        (FENCING_TOKEN, "-5"),
        (FENCING_SCOPE, "nowhere"),
        (FENCING_SCOPE, "a/b/k:%zz"),
        (FENCING_SCOPE, "a/b/k:%FF"),
    ] {
        let mut headers = stamped(5);
        headers.insert(name, HeaderValue::from_static(value));
        assert_eq!(ask(headers).await, StatusCode::BAD_REQUEST, "{value}");
    }
    assert_eq!(ask(stamped(5)).await, StatusCode::OK);
    assert_eq!(cell.mark(&scope()), FencingToken::new(5));
    let long = "x".repeat(257);
    let mut headers = HeaderMap::new();
    let refused = stamp(&mut headers, &scope(), FencingToken::new(5), Some(&long));
    assert_eq!(refused.unwrap_err().field(), Some("operation"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_fence_can_stand_behind_the_layer() {
    let dir = tempfile::tempdir().unwrap();
    let file = FencedFile::new(dir.path().join("data"));
    let routes = Router::new().route("/", get(async || StatusCode::NO_CONTENT));
    let address = serve(routes.layer(FenceLayer::new(file.clone()))).await;
    let mut plain = Plain::connect(address).await;
    let (status, ..) = plain.ask("GET", "/", &stamped(8), "").await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    file.open(&scope(), FencingToken::new(9)).await.unwrap();
    let (status, headers, _) = plain.ask("GET", "/", &stamped(8), "").await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert_eq!(headers[FENCING_MARK], "9");
    // A fence that cannot be asked lets nobody in.
    std::fs::write(dir.path().join("data.fence"), "nonsense").unwrap();
    let (status, ..) = plain.ask("GET", "/", &stamped(10), "").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}
