//! An HTTP server that no client can hold up.
//!
//! A client that sends its request slowly, or not at all, is cut off. When there are too many
//! connections, the one that has been idle the longest is closed, so that a thousand idle ones keep
//! nobody out.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tower_service::Service as _;

use leasehold::error::Verb;
use leasehold::{Error, ErrorKind, Result};

/// How long a client may take to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes in the head of a request, its path included.
const HEAD_BYTES: usize = 16 * 1024;
/// Headers in a request.
const HEADERS: usize = 64;
/// Connections at a time. Well below the usual limit of 1,024 open files.
const CONNECTIONS: usize = 512;
/// How long to wait after an accept that failed: out of files, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Binds `address`, which must be this machine's own unless `guarded`.
///
/// # Errors
/// `InvalidInput` for an address that others can reach without authentication; `Unavailable` if it
/// cannot be bound.
pub(crate) async fn bind(address: SocketAddr, guarded: bool) -> Result<TcpListener> {
    if !guarded && !address.ip().is_loopback() {
        let allowed = "a loopback address such as 127.0.0.1, or any address with authentication";
        return Err(Error::invalid("listen", address, allowed).during(Verb::Open));
    }
    TcpListener::bind(address).await.map_err(|error| {
        let text = format!("cannot listen on {address}");
        Error::new(ErrorKind::Unavailable, text)
            .caused_by(error)
            .during(Verb::Open)
    })
}

/// Serves until `until` is done, then drops what is still open.
pub(crate) async fn serve(listener: TcpListener, router: Router, until: impl Future<Output = ()>) {
    let table = Arc::new(Table::default());
    let _closing = Closing(Arc::clone(&table));
    let accept = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => open(&table, stream, &router),
                Err(error) => refused(&error).await,
            }
        }
    };
    tokio::select! {
        () = accept => {}
        () = until => {}
    }
}

/// Drops the connections with the server, also if it is itself dropped.
struct Closing(Arc<Table>);

impl Drop for Closing {
    fn drop(&mut self) {
        for (_, open) in self.0.lock().open.drain() {
            open.task.abort();
        }
    }
}

async fn refused(error: &io::Error) {
    tracing::warn!(%error, "a connection could not be accepted");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

fn open(table: &Arc<Table>, stream: tokio::net::TcpStream, router: &Router) {
    let Some(id) = table.admit() else {
        return;
    };
    let connection = Connection {
        table: Arc::clone(table),
        id,
    };
    let router = router.clone();
    let serve = async move {
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let busy = connection.busy();
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(connection.clone());
            let mut router = router.clone();
            async move {
                let response = router.call(request).await;
                drop(busy);
                response.map_err(|never: Infallible| never)
            }
        });
        // How a connection ended is the client's affair.
        let _ = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(HEAD_BYTES)
            .max_headers(HEADERS)
            .serve_connection(TokioIo::new(stream), service)
            .await;
        connection.table.lock().open.remove(&connection.id);
    };
    // The table knows the task before the task can leave it.
    let mut inner = table.lock();
    let task = tokio::spawn(serve).abort_handle();
    let since = inner.tick();
    inner.open.insert(
        id,
        Open {
            task,
            busy: 0,
            since,
        },
    );
}

/// The connection that a request came on.
#[derive(Clone)]
pub(crate) struct Connection {
    table: Arc<Table>,
    id: u64,
}

impl Connection {
    /// Until the guard is dropped, the connection does not make room for others.
    pub(crate) fn busy(&self) -> Busy {
        if let Some(open) = self.table.lock().open.get_mut(&self.id) {
            open.busy += 1;
        }
        Busy(self.clone())
    }
}

/// Something is under way on a connection.
pub(crate) struct Busy(Connection);

impl Drop for Busy {
    fn drop(&mut self) {
        let mut inner = self.0.table.lock();
        let now = inner.tick();
        if let Some(open) = inner.open.get_mut(&self.0.id) {
            open.busy -= 1;
            open.since = now;
        }
    }
}

#[derive(Default)]
struct Table(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    clock: u64,
    open: HashMap<u64, Open>,
}

struct Open {
    task: AbortHandle,
    busy: usize,
    /// When it last became idle, in ticks.
    since: u64,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new connection, if there is room or room can be made.
    fn admit(&self) -> Option<u64> {
        let mut inner = self.lock();
        if inner.open.len() >= CONNECTIONS {
            let idle = inner.open.iter().filter(|(_, open)| open.busy == 0);
            let oldest = idle.min_by_key(|(_, open)| open.since).map(|(id, _)| *id)?;
            if let Some(open) = inner.open.remove(&oldest) {
                open.task.abort();
            }
        }
        Some(inner.tick())
    }
}

impl Inner {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

/// Whether two secrets are the same, in a time that depends on the length of the first only as far
/// as the second tells it anyway.
pub(crate) fn same(expected: &[u8], given: &[u8]) -> bool {
    let mut differences = u8::from(expected.len() != given.len());
    for (at, byte) in expected.iter().enumerate() {
        let other = given.get(at).copied().unwrap_or_default();
        differences |= std::hint::black_box(byte ^ other);
    }
    std::hint::black_box(differences) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_compared_whole() {
        assert!(same(b"secret", b"secret"));
        for wrong in [
            &b"secreT"[..],
            b"Secret",
            b"secre",
            b"secrets",
            b"",
            b"secret\0",
        ] {
            assert!(!same(b"secret", wrong));
        }
        assert!(!same(b"", b"x"));
    }

    #[tokio::test]
    async fn a_public_address_is_refused_without_authentication() {
        let public = SocketAddr::from(([0, 0, 0, 0], 0));
        let error = bind(public, false).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(bind(public, true).await.is_ok());
        let own = SocketAddr::from(([127, 0, 0, 1], 0));
        assert!(bind(own, false).await.is_ok());
    }
}
