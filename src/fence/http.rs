//! A fence between HTTP services: the client shows its token, the server refuses stale ones.
//!
//! **The client** adds headers to each request ([`Context::stamp`](crate::Context::stamp)):
//! `Fencing-Token`, `Fencing-Scope`, and `Fencing-Operation` if the request must be applied once.
//! It asks [`refusal`] about each answer.
//!
//! **The server** has a [`FenceLayer`] in front of its routes, over any [`Fence`]. A request with a
//! token opens the fence before the route sees it; a stale one is answered with 409 and the mark in
//! `Fencing-Mark`, one without a token with 428, one that is malformed with 400, and with 503 if
//! the fence cannot be asked. So the first request of a new owner, a `GET` too, shuts out the old
//! one.
//!
//! **What it guarantees.** The layer's check comes before the route's effect, and a request can
//! stand still in between. Check and effect are one step only if the effect goes through what the
//! fence has opened: the route finds it among the request's extensions as [`Fenced`]. A route that
//! writes past it is protected from requests that *arrive* late, and from no others.
//!
//! ```
//! use leasehold::fence::http::{FenceLayer, Fenced};
//! use leasehold::fence::memory::{Cell, OpenCell};
//! use axum::{Extension, Router, http::StatusCode, routing::post};
//!
//! async fn debit(Extension(account): Extension<Fenced<OpenCell<i64>>>) -> StatusCode {
//!     let operation = account.operation().unwrap_or("debit").to_owned();
//!     let mut account = account.opened().await;
//!     match account.write_once(&operation, |balance| *balance -= 10) {
//!         Ok(_) => StatusCode::NO_CONTENT,
//!         Err(_) => StatusCode::CONFLICT,
//!     }
//! }
//!
//! let accounts = Cell::new(100);
//! let fence = FenceLayer::new(accounts);
//! let routes: Router = Router::new().route("/debit", post(debit)).layer(fence);
//! ```

use std::fmt::Write as _;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Poller, Poll};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use tokio::sync::{Mutex, MutexGuard};
use tower_layer::Layer;
use tower_service::Service;

use super::{Fence, FenceError, Op, Scope, Stale, operation_name};
use crate::error::{Error, Result};
use crate::lease::FencingToken;

/// The token, as a decimal number.
pub const FENCING_TOKEN: HeaderName = HeaderName::from_static("fencing-token");
/// The scope's text, with `%XX` for every byte that is no visible ASCII character, and for `%`.
pub const FENCING_SCOPE: HeaderName = HeaderName::from_static("fencing-scope");
/// The name of an operation that is applied once per token, written like the scope.
pub const FENCING_OPERATION: HeaderName = HeaderName::from_static("fencing-operation");
/// In a refusal: the resource's mark.
pub const FENCING_MARK: HeaderName = HeaderName::from_static("fencing-mark");

/// Adds scope and token to a request's headers, and the operation if it has a name.
///
/// # Errors
/// If the operation's name is too long.
pub fn stamp(
    headers: &mut HeaderMap,
    scope: &Scope,
    token: FencingToken,
    operation: Option<&str>,
) -> Result<()> {
    headers.insert(FENCING_TOKEN, HeaderValue::from(token.get()));
    headers.insert(FENCING_SCOPE, escaped(scope.as_str())?);
    if let Some(operation) = operation {
        operation_name(operation)?;
        headers.insert(FENCING_OPERATION, escaped(operation)?);
    }
    Ok(())
}

/// What an answer says about the token: `Ok` unless it is a fence's refusal.
///
/// # Errors
/// [`Stale`] if the answer is 409 with a mark.
pub fn refusal(
    status: StatusCode,
    headers: &HeaderMap,
    scope: &Scope,
    token: FencingToken,
) -> Result<(), Stale> {
    let mark = headers
        .get(FENCING_MARK)
        .and_then(|mark| mark.to_str().ok());
    match mark.and_then(|mark| mark.parse().ok()) {
        Some(mark) if status == StatusCode::CONFLICT => {
            Err(Stale::refuse(scope, token, mark, Op::Write))
        }
        _ => Ok(()),
    }
}

fn escaped(text: &str) -> Result<HeaderValue> {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_graphic() && byte != b'%' {
            out.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    let found = format!("{} bytes", out.len());
    HeaderValue::from_str(&out).map_err(|_| Error::invalid("header", found, "visible ASCII"))
}

fn unescaped(field: &'static str, value: &HeaderValue) -> Result<String> {
    let malformed = || Error::invalid(field, "a malformed header", "text with %XX in it");
    let bytes = value.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            // Digit by digit: numbers may begin with a sign, escapes may not.
            let digit = |at: usize| char::from(*bytes.get(at)?).to_digit(16);
            let byte = digit(at + 1).zip(digit(at + 2));
            let (high, low) = byte.ok_or_else(malformed)?;
            out.push((high * 16 + low) as u8);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).map_err(|_| malformed())
}

/// What a fence has opened for a request, for the route: it is among the request's extensions.
#[derive(Debug)]
pub struct Fenced<O> {
    shown: Arc<Shown>,
    opened: Arc<Mutex<O>>,
}

/// What a request has shown.
#[derive(Debug)]
struct Shown {
    scope: Scope,
    token: FencingToken,
    operation: Option<String>,
}

impl<O> Clone for Fenced<O> {
    fn clone(&self) -> Self {
        Self {
            shown: Arc::clone(&self.shown),
            opened: Arc::clone(&self.opened),
        }
    }
}

impl<O> Fenced<O> {
    /// What reads and writes.
    pub async fn opened(&self) -> MutexGuard<'_, O> {
        self.opened.lock().await
    }

    /// The request's scope.
    pub fn scope(&self) -> &Scope {
        &self.shown.scope
    }

    /// The request's token.
    pub fn token(&self) -> FencingToken {
        self.shown.token
    }

    /// The operation's name, if the request must be applied once.
    pub fn operation(&self) -> Option<&str> {
        self.shown.operation.as_deref()
    }
}

/// Puts a fence in front of a service, for axum, hyper and other `tower` servers.
#[derive(Clone, Debug)]
pub struct FenceLayer<F> {
    fence: Arc<F>,
}

impl<F: Fence> FenceLayer<F> {
    /// In front of it, this fence.
    pub fn new(fence: F) -> Self {
        Self {
            fence: Arc::new(fence),
        }
    }
}

impl<F, S> Layer<S> for FenceLayer<F> {
    type Service = FenceService<F, S>;

    fn layer(&self, inner: S) -> Self::Service {
        FenceService {
            fence: Arc::clone(&self.fence),
            inner,
        }
    }
}

/// A service behind a fence.
#[derive(Debug)]
pub struct FenceService<F, S> {
    fence: Arc<F>,
    inner: S,
}

impl<F, S: Clone> Clone for FenceService<F, S> {
    fn clone(&self) -> Self {
        Self {
            fence: Arc::clone(&self.fence),
            inner: self.inner.clone(),
        }
    }
}

impl<F, S, B, R> Service<Request<B>> for FenceService<F, S>
where
    F: Fence + 'static,
    F::Opened: 'static,
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Default,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Poller<'_>) -> Poll<std::result::Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let fence = Arc::clone(&self.fence);
        // The clone may not be ready; the one that was asked is.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            let shown = match shown(request.headers()) {
                Ok(shown) => shown,
                Err(status) => return Ok(answer(status, None)),
            };
            match fence.open(&shown.scope, shown.token).await {
                Ok(opened) => {
                    request.extensions_mut().insert(Fenced {
                        shown: Arc::new(shown),
                        opened: Arc::new(Mutex::new(opened)),
                    });
                    inner.call(request).await
                }
                Err(FenceError::Stale(stale)) => {
                    Ok(answer(StatusCode::CONFLICT, Some(stale.mark())))
                }
                Err(FenceError::Trouble(error)) => {
                    tracing::warn!(%error, "a fence could not be asked");
                    Ok(answer(StatusCode::SERVICE_UNAVAILABLE, None))
                }
            }
        })
    }
}

/// A refusal for the client, with the mark: what the layer answers, for routes whose own write was
/// refused.
pub fn conflict<R: Default>(stale: &Stale) -> Response<R> {
    answer(StatusCode::CONFLICT, Some(stale.mark()))
}

fn answer<R: Default>(status: StatusCode, mark: Option<FencingToken>) -> Response<R> {
    let mut response = Response::new(R::default());
    *response.status_mut() = status;
    if let Some(mark) = mark {
        let headers = response.headers_mut();
        headers.insert(FENCING_MARK, HeaderValue::from(mark.get()));
    }
    response
}

fn shown(headers: &HeaderMap) -> std::result::Result<Shown, StatusCode> {
    let missing = StatusCode::PRECONDITION_REQUIRED;
    let token = headers.get(FENCING_TOKEN).ok_or(missing)?;
    let scope = headers.get(FENCING_SCOPE).ok_or(missing)?;
    let malformed = |_: Error| StatusCode::BAD_REQUEST;
    let token = token.to_str().unwrap_or_default().parse();
    let scope = unescaped("scope", scope).and_then(|scope| Scope::parse(&scope));
    let operation = headers.get(FENCING_OPERATION).map(|operation| {
        let operation = unescaped("operation", operation)?;
        operation_name(&operation).map(|()| operation)
    });
    Ok(Shown {
        token: token.map_err(malformed)?,
        scope: scope.map_err(malformed)?,
        operation: operation.transpose().map_err(malformed)?,
    })
}
