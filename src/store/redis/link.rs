//! The way to the servers: calls go out, answers come back, and what breaks is mended.
//!
//! One connection carries all calls of a handle. When it breaks, the calls that are under way
//! fail, *unknown*; the next one dials again, and whoever comes meanwhile waits for that
//! attempt and shares its outcome, so that a process does not stampede. Attempts are spread by full
//! jitter up to a second. Nothing is repeated here but a call that the server did not run because
//! it did not know the function: the caller has the request id, and knows whether a repeat is worth
//! it.

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

/// How often a library is loaded for one call: a server that restarts in between forgets it again.
const LOADS: usize = 3;

/// Digits of a library's hash that stand in its name.
const HASH: usize = 12;

/// Bytes of a call beside its keys and arguments, about.
const FRAME: usize = 96;

/// A library of functions: its text, and its name, which has the hash of it.
#[derive(Debug)]
pub(crate) struct Library {
    name: String,
    text: String,
}

impl Library {
    /// The text finds the beginning of all names of functions in `LIBRARY`.
    pub(crate) fn new(name: &str, text: &str) -> Arc<Self> {
        let hash = redis::Script::new(text).get_hash().to_owned();
        let name = format!("{name}_{}", &hash[..HASH]);
        let text = format!("#!lua name={name}\nlocal LIBRARY = '{name}_'\n{text}");
        Arc::new(Self { name, text })
    }

    pub(crate) fn function(self: &Arc<Self>, verb: &'static str) -> Function {
        Function {
            verb,
            name: format!("{}_{verb}", self.name),
            library: Arc::clone(self),
        }
    }

    /// The command that loads it.
    pub(crate) fn load(&self) -> Cmd {
        let mut load = redis::cmd("FUNCTION");
        load.arg("LOAD").arg(&self.text);
        load
    }
}

/// A function of a library.
#[derive(Debug)]
pub(crate) struct Function {
    verb: &'static str,
    name: String,
    library: Arc<Library>,
}

impl Function {
    /// A call of it.
    pub(crate) fn with(&self, keys: &[&[u8]], args: &[&[u8]]) -> Cmd {
        let parts = keys.iter().chain(args);
        let bytes = parts.map(|part| part.len()).sum::<usize>();
        let mut call = Cmd::with_capacity(keys.len() + args.len() + 3, bytes + FRAME);
        call.arg("FCALL").arg(&self.name);
        call.arg(keys.len()).arg(keys).arg(args);
        call
    }

    #[cfg(feature = "doctor")]
    pub(crate) fn library(&self) -> &Library {
        &self.library
    }
}

/// A way to the servers. Clones share it.
#[derive(Clone)]
pub(crate) struct Link {
    shared: Arc<SharedLink>,
}

struct SharedLink {
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
    /// A way to the servers that the options name. Connects at the first call; must be called on
    /// the runtime that shall drive the connection.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that makes no sense, a certificate that cannot be read, or outside
    /// of a runtime.
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
        let shared = SharedLink {
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

    /// Calls a function on the node of the first key.
    ///
    /// # Errors
    /// See [`explain`]: unknown, unless the kind is certain.
    pub(crate) async fn call(
        &self,
        function: &Function,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> Result<Value> {
        let place = keys.first().copied().unwrap_or_default();
        let mut loads = 0;
        loop {
            match self.send(place, function.with(keys, args)).await? {
                Ok(value) => return Ok(value),
                Err(error) if is_unknown_function(&error) && loads < LOADS => {
                    loads += 1;
                    tracing::debug!(verb = function.verb, "loading the library");
                    self.load(&function.library, place, loads > 1).await?;
                }
                Err(error) => return Err(self.named(&error)),
            }
        }
    }

    /// Loads a library on the node of a key, or everywhere: while a slot is on its way, some of its
    /// calls are sent on to a node that does not own it yet. Others may have done so meanwhile.
    async fn load(&self, library: &Library, key: &[u8], everywhere: bool) -> Result<()> {
        if everywhere && let Wire::Cluster(mut connection) = self.connected().await?.wire {
            let all = (
                MultipleNodeRoutingInfo::AllMasters,
                Some(ResponsePolicy::AllSucceeded),
            );
            // A node that is down may be of no concern, and most of them have it; the call itself
            // will tell.
            let _ = connection
                .route_command(library.load(), RoutingInfo::MultiNode(all))
                .await;
        }
        match self.send(key, library.load()).await? {
            Err(error) if !is_there(&error) => Err(self.named(&error)),
            _ => Ok(()),
        }
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

impl SharedLink {
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

fn is_unknown_function(error: &RedisError) -> bool {
    let said = error.detail();
    said.is_some_and(|said| said.contains("Function not found"))
}

/// Whether a library could not be loaded because somebody has.
pub(super) fn is_there(error: &RedisError) -> bool {
    let said = error.detail();
    said.is_some_and(|said| said.starts_with("Library ") && said.contains("already exists"))
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
