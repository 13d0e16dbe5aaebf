//! Many machines: the store on Redis or Valkey, 7.0 or later.
//!
//! Every verb is one function per queue partition, and the functions are the store: what they do is
//! atomic, what is here packs their arguments and reads their answers. Every job lies under its id;
//! lines of ready jobs and grants of leased ones name it by that. A grant has one deadline for all
//! of its leases. [`keys`] names everything that is stored.
//!
//! The time is the server's. A partition of a queue is an issuer of tokens of its own; a handle
//! shows each issuer the largest token it has seen, so that the tokens of one process grow across
//! its queues as far as the clocks agree.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_trait::async_trait;
use redis::Value;

use super::{
    Beat, CheckpointRequest, Checkpointed, ClaimRequest, Claimed, ControlRequest, Controlled,
    EnqueueRequest, Enqueued, Expiry, PruneRequest, ReapRequest, Renewal, RequestId, SessionId,
    SettleRequest, Store,
};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result, Verb};
use crate::inspect::{Query, View};
use crate::job::{Namespace, QueueName};
use crate::lease::Verdict;
use crate::rules::issue::{WhenBehind, forgets_tokens};
use keys::Keys;
use library::{BY_HAND, Functions, SERVERS};
use link::{Function, Link};
use queue::Queues;
use session::Sessions;
use wait::Sleepers;
use wire::{In, garbled};

mod acl;
pub(crate) mod answers;
#[cfg(feature = "doctor")]
#[allow(missing_debug_implementations, reason = "hidden: for the command")]
pub(crate) mod bare;
mod checkpoint;
mod claim;
mod complete;
mod control;
mod dial;
#[cfg(feature = "doctor")]
pub(crate) mod doctor;
mod enqueue;
mod fault;
mod inspect;
mod keys;
mod library;
mod link;
#[cfg(all(test, unix))]
mod link_tests;
mod listen;
#[cfg(feature = "doctor")]
pub(crate) mod mend;
mod prune;
mod queue;
mod reap;
mod renew;
mod session;
mod settle;
mod step;
mod url;
mod wait;
mod wire;
#[cfg(test)]
mod wire_tests;

pub use acl::acl_rule;

/// How a store on Redis is opened.
#[derive(Clone)]
pub struct RedisOptions {
    url: String,
    namespace: Namespace,
    partitions: Option<u16>,
    clock: Option<Arc<dyn Clock>>,
    when_behind: WhenBehind,
}

impl RedisOptions {
    /// Partitions of a queue at most: a claim that finds nothing visits all of them.
    pub const MAX_PARTITIONS: u16 = 64;

    /// The server of a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            namespace: Namespace::default(),
            partitions: None,
            clock: None,
            when_behind: WhenBehind::GoOn,
        }
    }

    /// The application's share of the server.
    #[must_use]
    pub fn namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// Over how many slots of a cluster the queues made by this handle are spread. Fixed when a
    /// queue is made; if not given, one, or whatever the queue was made with.
    #[must_use]
    pub fn partitions(mut self, partitions: u16) -> Self {
        self.partitions = Some(partitions);
        self
    }

    /// Refuses claims while the clock is behind the tokens given, and so protects against a loss of
    /// data in that time, too. Unless set, claims go on. In a URL: `clock=strict`.
    #[must_use]
    pub fn strict_clock(mut self) -> Self {
        self.when_behind = WhenBehind::Refuse;
        self
    }

    /// Another clock than the server's, for tests: the functions are the same.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("RedisOptions")
            .field("namespace", &self.namespace)
            .field("partitions", &self.partitions)
            .finish_non_exhaustive()
    }
}

/// A store on a Redis or Valkey server, or a cluster of them. Clones share its connection.
#[derive(Clone)]
pub struct RedisStore {
    link: Link,
    shared: Arc<Shared>,
}

struct Shared {
    options: RedisOptions,
    home: Keys,
    sessions: Sessions,
    queues: Queues,
    sleepers: Sleepers,
    /// The largest token that this handle has seen.
    seen: AtomicU64,
}

impl RedisStore {
    /// Opens a store. Connects at the first call.
    ///
    /// # Errors
    /// `InvalidInput` for a URL or a setting that makes no sense.
    pub fn open(options: RedisOptions) -> Result<Self> {
        let at = at(Verb::Open);
        if let Some(partitions) = options.partitions
            && !(1..=RedisOptions::MAX_PARTITIONS).contains(&partitions)
        {
            let limit = format!("1 to {}", RedisOptions::MAX_PARTITIONS);
            return Err(at(Error::invalid("partitions", partitions, limit)));
        }
        let link = Link::open(&options).map_err(at)?;
        let shared = Shared {
            home: Keys::home(&options.namespace),
            sleepers: Sleepers::new(&options.namespace),
            options,
            sessions: Sessions::default(),
            queues: Queues::default(),
            seen: AtomicU64::new(0),
        };
        Ok(Self {
            link,
            shared: Arc::new(shared),
        })
    }

    fn functions(&self) -> &'static Functions {
        match self.shared.options.clock {
            None => &SERVERS,
            Some(_) => &BY_HAND,
        }
    }

    /// Calls a function. The last argument shows a test's clock to those that go by hand.
    async fn call(&self, function: &Function, keys: &[&[u8]], args: &[&[u8]]) -> Result<Reply> {
        let clock = self.shared.options.clock.as_ref();
        let shown = clock.map(|clock| clock.now().as_micros().to_string());
        let mut args = args.to_vec();
        args.extend(shown.as_ref().map(String::as_bytes));
        match self.link.call(function, keys, &args).await? {
            Value::BulkString(answer) => Reply::read(answer),
            _ => Err(garbled()),
        }
    }

    /// Calls a function that changes nothing that must not be changed twice.
    async fn look(&self, function: &Function, keys: &Keys, args: &[&[u8]]) -> Result<Reply> {
        self.call(function, &[&keys.none, &keys.meta], args).await
    }

    /// Calls a function under a request, whose first argument it is.
    async fn request(
        &self,
        function: &Function,
        keys: &Keys,
        request: RequestId,
        verb: Verb,
        args: &[&[u8]],
    ) -> Result<Reply> {
        self.request_step(function, (keys, &[]), request, verb, 0, args)
            .await
    }

    /// The same for one step of a call, with more keys of the same slot.
    async fn request_step(
        &self,
        function: &Function,
        (keys, more): (&Keys, &[&[u8]]),
        request: RequestId,
        verb: Verb,
        step: usize,
        args: &[&[u8]],
    ) -> Result<Reply> {
        let session = keys.session(request.session);
        let name = self.sending(keys, &session, request, verb, step).await?;
        let mut all: Vec<&[u8]> = vec![&keys.none, &session];
        all.extend_from_slice(more);
        let mut with: Vec<&[u8]> = vec![&name];
        with.extend_from_slice(args);
        let reply = self.call(function, &all, &with).await?;
        let sessions = &self.shared.sessions;
        sessions.note_answer(request, keys.tag(), step, reply.now);
        Ok(reply)
    }

    /// The request as the functions read it; the partition remembers its session from here on.
    async fn sending(
        &self,
        keys: &Keys,
        session: &[u8],
        request: RequestId,
        verb: Verb,
        step: usize,
    ) -> Result<Vec<u8>> {
        self.introduce(keys, session, request).await?;
        let sessions = &self.shared.sessions;
        sessions.sending(request, verb, step, keys.tag())
    }

    /// Introduces the request's session to a partition, unless that has been done.
    async fn introduce(&self, keys: &Keys, session: &[u8], request: RequestId) -> Result<()> {
        let sessions = &self.shared.sessions;
        let Some(used) = sessions.introduction(request, keys.tag())? else {
            return Ok(());
        };
        let used = used.as_micros().to_string();
        let open = &self.functions().open;
        let reply = self
            .call(open, &[&keys.none, session], &[used.as_bytes()])
            .await?;
        if let Some(queue) = &keys.queue {
            let listed = self.check_listed(queue, !reply.body.is_empty()).await;
            listed.inspect_err(|error| sessions.leave(request.session, error))?;
        }
        sessions.introduced(request.session, keys.tag(), reply.now);
        Ok(())
    }

    /// What the store's clock shows.
    async fn now(&self) -> Result<Timestamp> {
        let (open, home) = (&self.functions().open, &self.shared.home);
        let reply = self.look(open, home, &[b"-1"]).await?;
        Ok(reply.now)
    }

    /// Ends a call that has nowhere to go: it keeps its session alive all the same.
    async fn nowhere(&self, request: RequestId) -> Result<()> {
        let now = self.now().await?;
        self.shared.sessions.touch(request, now)
    }
}

impl RedisStore {
    /// Names the verb and the store in an error of a call that may go to several partitions.
    fn told(&self, request: RequestId, verb: Verb) -> impl Fn(Error) -> Error {
        move |error| at(verb)(self.shared.sessions.of_whole_call(request, error))
    }
}

/// What a function said.
struct Reply {
    now: Timestamp,
    /// The partition was not there before.
    created: bool,
    body: In,
}

/// What a call can come to; the functions know it by these names.
const STATUS: [(&str, u8); 7] = [
    ("DONE", DONE),
    ("LOST", LOST),
    ("OVERTAKEN", OVERTAKEN),
    ("MIXED_UP", MIXED_UP),
    ("AHEAD", AHEAD),
    ("CROWDED", CROWDED),
    ("FOREIGN", FOREIGN),
];
const DONE: u8 = 0;
const LOST: u8 = 1;
const OVERTAKEN: u8 = 2;
const MIXED_UP: u8 = 3;
const AHEAD: u8 = 4;
/// There is more to do before a claim than one call should take.
const CROWDED: u8 = 5;
/// Another version of the crate made the partition.
const FOREIGN: u8 = 6;

fn refusal(status: u8) -> Result<()> {
    match status {
        DONE => Ok(()),
        FOREIGN => Err(queue::other_layout("a partition of the queue")),
        AHEAD => Err(forgets_tokens()),
        LOST => Err(session::not_open()),
        OVERTAKEN => Err(session::overtaken()),
        MIXED_UP => Err(session::mixed_up()),
        _ => Err(garbled()),
    }
}

impl Reply {
    fn read(answer: Vec<u8>) -> Result<Self> {
        let mut body = In::new(answer.into());
        refusal(body.u8()?)?;
        Ok(Self {
            now: body.time()?,
            created: body.u8()? == 1,
            body,
        })
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

fn at(verb: Verb) -> impl Fn(Error) -> Error {
    move |error| error.during(verb).in_store("redis")
}

#[async_trait]
impl Store for RedisStore {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn namespace(&self) -> Namespace {
        self.shared.options.namespace.clone()
    }

    fn native(&self) -> Option<&dyn Any> {
        Some(self)
    }

    async fn dedicated(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self {
            link: self.link.dedicated().map_err(at(Verb::Open))?,
            shared: Arc::clone(&self.shared),
        }))
    }

    async fn open_session(&self) -> Result<SessionId> {
        let opened = async {
            // A namespace of another layout is refused before anything is done in it, and so is a
            // user with too few rights: a function that may not run one of its commands stops
            // half-way, and what it has written stays.
            self.all_queues().await?;
            self.check_rights().await
        };
        let now = opened.await.map_err(at(Verb::Open))?;
        Ok(self.shared.sessions.open(now))
    }

    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>> {
        let told = self.told(request.request, Verb::Enqueue);
        self.enqueue_all(request).await.map_err(told)
    }

    async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        let told = self.told(request.request, Verb::Claim);
        self.claim_from(request).await.map_err(told)
    }

    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>> {
        self.renew_all(&beats).await.map_err(at(Verb::Renew))
    }

    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>> {
        let told = self.told(request.request, Verb::Settle);
        self.settle_all(&request).await.map_err(told)
    }

    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>> {
        let saved = self.checkpoint_all(&request).await;
        saved.map_err(self.told(request.request, Verb::Checkpoint))
    }

    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>> {
        let told = self.told(request.request, Verb::Reap);
        self.reap_all(&request).await.map_err(told)
    }

    async fn control(&self, request: ControlRequest) -> Result<Controlled> {
        let told = self.told(request.request, Verb::Control);
        self.command(&request).await.map_err(told)
    }

    async fn inspect(&self, query: Query) -> Result<View> {
        self.view(&query).await.map_err(at(Verb::Inspect))
    }

    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()> {
        let wait = self.wait_for(queues, suspects, limit);
        wait.await.map_err(at(Verb::Wait))
    }

    fn longest_wait(&self) -> Duration {
        wait::LONGEST
    }

    async fn prune(&self, request: PruneRequest) -> Result<u64> {
        let told = self.told(request.request, Verb::Prune);
        self.prune_all(&request).await.map_err(told)
    }
}
