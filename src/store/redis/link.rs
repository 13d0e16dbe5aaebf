//! The way to the servers: calls go out, answers come back, and what breaks is mended.
//!
//! One connection carries all calls of a handle. When it breaks, the calls that are under way
//! fail, *unknown*; the next one dials again, and whoever comes meanwhile waits for that
//! attempt and shares its outcome, so that a process does not stampede. Attempts are spread by full jitter up
//! to a second. Nothing is repeated here but a call that the server did not run because it did not
//! know the script: the caller has the request id, and knows whether a repeat is worth it.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::cluster_routing::{
    MultipleNodeRoutingInfo, ResponsePolicy, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr,
};
use redis::{Cmd, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use super::RedisOptions;
use super::dial::{Dialer, Wire};
use super::fault::{explain, is_broken};
use super::listen::Listener;
use super::url::Address;
use crate::error::{Error, ErrorKind, Result, Verb};
use crate::retry::RetryPolicy;

/// Between attempts to connect. The cap is what a worker may lose after the server is back.
const REDIAL: RetryPolicy =
    RetryPolicy::exponential(Duration::from_millis(50), Duration::from_secs(1));

/// How often a script is loaded for one call: a server that restarts in between forgets it again.
const LOADS: usize = 3;

/// Bytes of a call beside its keys and arguments, about.
const FRAME: usize = 64;

/// A script, known to the server by the hash of its text.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) name: &'static str,
    pub(crate) body: String,
    pub(crate) sha: String,
}

impl Script {
    pub(crate) fn new(name: &'static str, body: impl Into<String>) -> Self {
        let body = body.into();
        let sha = redis::Script::new(&body).get_hash().to_owned();
        Self { name, body, sha }
    }

    /// A call of it.
    pub(crate) fn with(&self, keys: &[&[u8]], args: &[&[u8]]) -> Cmd {
        let parts = keys.iter().chain(args);
        let bytes = parts.map(|part| part.len()).sum::<usize>();
        let mut call = Cmd::with_capacity(keys.len() + args.len() + 3, bytes + FRAME);
        call.arg("EVALSHA").arg(&self.sha);
        call.arg(keys.len()).arg(keys).arg(args);
        call
    }
}

/// A way to the servers. Clones share it.
#[derive(Clone)]
pub(crate) struct Link {
    shared: Arc<Shared>,
}

struct Shared {
    dialer: Arc<Dialer>,
    /// Drives the connections, whoever calls.
    runtime: Handle,
    current: RwLock<Option<Open>>,
    /// Held while dialling: what came of the last attempt.
    door: Mutex<Option<Error>>,
    /// Attempts that have ended; the number of a connection is the attempt that made it.
    attempts: AtomicU64,
    /// Attempts and connections that failed since the last answer.
    failures: AtomicU32,
}

#[derive(Clone)]
struct Open {
    number: u64,
    wire: Wire,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.shared.dialer.address().to_string();
        f.debug_tuple("Link").field(&address).finish()
    }
}

impl Link {
    /// A way to the servers that the options name. Connects at the first call; must be called on the
    /// runtime that shall drive the connection.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that makes no sense, a certificate that cannot be read, or outside of
    /// a runtime.
    pub(crate) fn open(options: &RedisOptions) -> Result<Self> {
        let address = Address::parse(options.url())?;
        if let Some((name, value)) = address.settings.first() {
            let allowed = "timeout, ca, cert, key, sentinel_user, sentinel_password";
            let found = crate::store::open::setting_found((!value.is_empty()).then_some(name));
            return Err(Error::invalid("url", found, allowed).during(Verb::Open));
        }
        Self::start(Arc::new(Dialer::new(address)?))
    }

    /// The same servers, with a connection of its own on the current runtime.
    pub(crate) fn dedicated(&self) -> Result<Self> {
        Self::start(Arc::clone(&self.shared.dialer))
    }

    fn start(dialer: Arc<Dialer>) -> Result<Self> {
        let runtime = Handle::try_current().map_err(|error| {
            Error::new(
                ErrorKind::InvalidInput,
                "a connection needs a tokio runtime",
            )
            .caused_by(error)
            .during(Verb::Open)
        })?;
        let shared = Shared {
            dialer,
            runtime,
            current: RwLock::new(None),
            door: Mutex::new(None),
            attempts: AtomicU64::new(0),
            failures: AtomicU32::new(0),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.shared.dialer.is_cluster()
    }

    /// Listens to a channel, on a connection of its own.
    ///
    /// # Errors
    /// `Unavailable`, `Denied`: nobody listens.
    pub(crate) async fn listen(&self, channel: &str) -> Result<Listener> {
        Listener::new(&self.shared.dialer, channel).await
    }

    /// Runs a script on the node of the first key.
    ///
    /// # Errors
    /// See [`explain`]: unknown, unless the kind is certain.
    pub(crate) async fn call(
        &self,
        script: &Script,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> Result<Value> {
        let place = keys.first().copied().unwrap_or_default();
        let mut loads = 0;
        loop {
            match self.send(place, script.with(keys, args)).await? {
                Ok(value) => return Ok(value),
                Err(error) if is_unknown_script(&error) && loads < LOADS => {
                    loads += 1;
                    tracing::debug!(script = script.name, "loading a script");
                    self.load(script, place, loads > 1).await?;
                }
                Err(error) => return Err(self.named(&error)),
            }
        }
    }

    /// Loads a script on the node of a key, or everywhere: while a slot is on its way, some of its
    /// calls are sent on to a node that does not own it yet.
    async fn load(&self, script: &Script, key: &[u8], everywhere: bool) -> Result<()> {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(&script.body);
        if everywhere && let Wire::Cluster(mut connection) = self.connected().await?.wire {
            let all = (
                MultipleNodeRoutingInfo::AllMasters,
                Some(ResponsePolicy::AllSucceeded),
            );
            // A node that is down may be of no concern; the call itself will tell.
            let _ = connection
                .route_command(load, RoutingInfo::MultiNode(all))
                .await;
            return Ok(());
        }
        self.run(key, load).await.map(drop)
    }

    /// Runs a plain command on the node of `key`, which it need not name.
    ///
    /// # Errors
    /// As for [`call`](Self::call).
    pub(crate) async fn run(&self, key: &[u8], command: Cmd) -> Result<Value> {
        let answer = self.send(key, command).await?;
        answer.map_err(|error| self.named(&error))
    }

    /// The outer error is of a call that was not sent; the inner one of a call that was.
    async fn send(&self, key: &[u8], command: Cmd) -> Result<RedisResult<Value>> {
        let mut open = self.connected().await?;
        let answer = match &mut open.wire {
            Wire::One(connection) => connection.send_packed_command(&command).await,
            Wire::Cluster(connection) => {
                let route = Route::new(slot(key), SlotAddr::Master);
                let node = SingleNodeRoutingInfo::SpecificNode(route);
                let node = RoutingInfo::SingleNode(node);
                connection.route_command(command, node).await
            }
        };
        let answer = answer.and_then(Value::extract_error);
        self.note_answer(&open, answer.as_ref().err());
        Ok(answer)
    }

    /// Notes what an answer says of its connection.
    fn note_answer(&self, open: &Open, error: Option<&RedisError>) {
        match error {
            Some(error) if is_broken(error) => self.shared.forget(open.number),
            // Any answer shows that the connection works.
            _ => self.shared.failures.store(0, Ordering::Relaxed),
        }
    }

    /// Adds what only the link knows: a slot that is elsewhere means trouble to a cluster, and a
    /// wrong URL to anybody else.
    fn named(&self, error: &RedisError) -> Error {
        use redis::ErrorKind::Server;
        let moved = matches!(
            error.kind(),
            Server(ServerErrorKind::Moved | ServerErrorKind::Ask)
        );
        if moved && !self.is_cluster() {
            let why = "the server belongs to a cluster; the URL must begin with redis+cluster";
            return Error::new(ErrorKind::Unsupported, why).caused_by(error.clone());
        }
        explain(error)
    }

    /// The connection, which is made if there is none.
    async fn connected(&self) -> Result<Open> {
        let shared = &self.shared;
        if let Some(open) = shared.current() {
            return Ok(open);
        }
        let seen = shared.attempts.load(Ordering::Acquire);
        let mut trouble = shared.door.lock().await;
        if let Some(open) = shared.current() {
            return Ok(open);
        }
        // Somebody else tried while this one stood at the door.
        if shared.attempts.load(Ordering::Acquire) != seen
            && let Some(error) = &*trouble
        {
            return Err(error.duplicate());
        }
        let failures = shared.failures.load(Ordering::Relaxed);
        if failures > 0 {
            tokio::time::sleep(REDIAL.delay(failures, fastrand::f64())).await;
        }
        let dialled = shared.dial().await;
        let number = shared.attempts.fetch_add(1, Ordering::AcqRel) + 1;
        match dialled {
            Ok(wire) => {
                let open = Open { number, wire };
                *trouble = None;
                *shared.slot() = Some(open.clone());
                Ok(open)
            }
            Err(error) => {
                shared.failures.fetch_add(1, Ordering::Relaxed);
                *trouble = Some(error.duplicate());
                Err(error)
            }
        }
    }
}

impl Shared {
    fn current(&self) -> Option<Open> {
        let current = self.current.read();
        current.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn slot(&self) -> std::sync::RwLockWriteGuard<'_, Option<Open>> {
        self.current.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of a connection that is broken, unless another has taken its place already.
    fn forget(&self, number: u64) {
        let mut slot = self.slot();
        if slot.as_ref().is_some_and(|open| open.number == number) {
            *slot = None;
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Dials on the runtime that is to drive the connection. If that has ended, on this one.
    async fn dial(&self) -> Result<Wire> {
        let dialer = Arc::clone(&self.dialer);
        let dialled = self.runtime.spawn(async move { dialer.dial().await });
        match dialled.await {
            Ok(wire) => wire,
            Err(_) => self.dialer.dial().await,
        }
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(ServerErrorKind::NoScript)
}

/// The slot of a key: of what is between the first braces, or of all of it.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let inner = &key[open + 1..];
        let close = inner.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &inner[..close])
    });
    let mut crc = 0_u16;
    for byte in tag.unwrap_or(key) {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            };
        }
    }
    crc % 16_384
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_the_servers() {
        // As `CLUSTER KEYSLOT` answers.
        assert_eq!(slot(b"123456789"), 12_739);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
        assert_eq!(slot(b"foo{bar}{zap}"), slot(b"bar"));
        assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
    }
}
