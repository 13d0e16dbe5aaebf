//! Where jobs live: the one seam of the crate.
//!
//! Every verb is one method, takes a batch, is atomic per queue partition, and costs O(log n) or
//! less per job in the length of the queue. `memory` is the reference model: plain code, no
//! durability. The others are compared with it, case by case and by random programs.
//!
//! | for | use |
//! |---|---|
//! | tests, and as the model | [`MemoryStore`] |
//! | one machine, several processes, one file | `SqliteStore` (feature `sqlite`) |
//! | many machines, Redis or Valkey | `RedisStore` (feature `redis`) |
//! | many machines, transactions with the user's data | `PostgresStore` (feature `postgres`) |

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::inspect::{Query, View};
use crate::job::{Namespace, QueueName};
use crate::lease::Verdict;

mod call;
#[cfg(any(feature = "sqlite", feature = "redis"))]
pub(crate) mod codec;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) mod cursor;
#[cfg(feature = "doctor")]
#[allow(missing_docs, reason = "hidden: for the command")]
pub(crate) mod health;
pub mod holding;
#[cfg(feature = "doctor")]
pub(crate) mod load;
pub(crate) mod memory;
pub(crate) mod open;
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) mod percent;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
mod wake;

pub use call::{
    Beat, Checkpoint, CheckpointRequest, Checkpointed, ClaimQueue, ClaimRequest, Claimed,
    ControlCommand, ControlRequest, Controlled, EnqueueRequest, Enqueued, Expiry, LeaseSelect,
    Outcome, PruneRequest, ReapRequest, Renewal, RequestId, SESSION_IDLE, Select, SessionId,
    SettleRequest, Settlement,
};
pub(crate) use call::{InHand, bounded, weighed};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) use call::{PruneKeys, named};
pub use holding::HoldingStore;
pub use memory::MemoryStore;
#[cfg(feature = "postgres")]
pub use postgres::{PostgresOptions, PostgresStore};
#[cfg(feature = "redis")]
pub use redis::{RedisOptions, RedisStore, acl_rule};
#[cfg(feature = "sqlite")]
pub use sqlite::{SqliteOptions, SqliteStore};

/// A place that keeps jobs and grants leases on them.
///
/// # Contract
///
/// **Time** is the store's. No argument carries a wall-clock time of the caller.
///
/// **Errors.** An `Err` from a mutating method means *unknown* unless its kind
/// [is certain](crate::ErrorKind::is_certain): repeat the same request until it answers. `renew`
/// carries no request id; it is evaluated anew each time.
///
/// **Repeats.** A request whose id is the last of its lane is answered with the first answer and
/// applied once. An older one, or one of a session that is not open, is refused with
/// [`SessionLost`](crate::ErrorKind::SessionLost) and not applied. Sessions end after
/// [`SESSION_IDLE`] without a call.
///
/// **Cancellation.** Dropping the future of a call is the same as an error: the call may have been
/// applied.
///
/// **Order of claims.** Expire the 1,000 oldest overdue leases by (deadline, token); promote the
/// 1,000 earliest due jobs by (run-at, sequence); grant by (priority, place in line). Expired and
/// surrendered jobs go to the front of their priority, in token order per step; others to the back.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// One word for errors, labels and people: `memory`, `sqlite`, `redis`, `postgres`.
    fn name(&self) -> &'static str;

    /// The application's share of the store: part of every fence's scope. A store that knows
    /// namespaces, or wraps one that does, must say which.
    fn namespace(&self) -> Namespace {
        Namespace::default()
    }

    /// The store's own type, for calls inside the caller's transaction. None, the default, for
    /// stores that offer none, and for wrappers that would be passed by.
    fn native(&self) -> Option<&dyn Any> {
        None
    }

    /// The store's other half: holdings. None, the default, for stores and wrappers that offer
    /// none.
    fn holdings(&self) -> Option<Arc<dyn HoldingStore>> {
        None
    }

    /// A handle to the same store for another runtime: the renewer runs on a thread of its own, and
    /// a connection that is driven by a blocked runtime would block it too.
    ///
    /// # Errors
    /// Any that opening the store can give.
    async fn dedicated(&self) -> Result<Arc<dyn Store>>;

    /// Opens a session, under which calls can be repeated.
    ///
    /// # Atomicity
    /// The id is new: no session, alive or ended, ever had it.
    ///
    /// # Errors
    /// On an error no session is open; call again.
    async fn open_session(&self) -> Result<SessionId>;

    /// Stores jobs.
    ///
    /// # Atomicity
    /// Together or not at all, per queue partition. One answer per job, in order: `New`, or
    /// `Duplicate` with the job that holds the unique key.
    ///
    /// # Errors
    /// `InvalidInput` names the field and the limit, and nothing is stored. Others: unknown.
    async fn enqueue(&self, request: EnqueueRequest) -> Result<Vec<Enqueued>>;

    /// Grants leases: expires what is overdue, promotes what is due, then grants, in one step per
    /// queue partition. Visits the queues in the given order until `max` leases are granted.
    ///
    /// # Atomicity
    /// One step per queue partition. Each lease has a new token, larger than any before, also while
    /// the clock is behind the last one, which the answer then tells. A paused queue expires and
    /// promotes, and grants nothing. At most one suspect is granted, and only if `admit_suspect`
    /// says so.
    ///
    /// # Repeats
    /// A repeated claim lists only those leases of its first answer that are neither ended nor
    /// overdue, with the time *originally* granted.
    ///
    /// # Errors
    /// `TokensAhead` if no token fits: certain, and transient. Others: unknown.
    async fn claim(&self, request: ClaimRequest) -> Result<Claimed>;

    /// Extends grants, each by its term from now, never beyond its maximum lifetime.
    ///
    /// # Atomicity
    /// Per grant. One answer per beat, in order.
    ///
    /// # Fencing
    /// Past its deadline a grant is gone: renewal never resurrects it. A lease that ended is listed
    /// as fenced; when none is left, the answer is [`Renewal::Fenced`]. A lease named in `lapse`
    /// expires now.
    ///
    /// # Errors
    /// Unknown. Evaluated anew on repeat, never replayed.
    async fn renew(&self, beats: Vec<Beat>) -> Result<Vec<Renewal>>;

    /// Ends leases. One verdict per settlement, in order.
    ///
    /// # Atomicity
    /// Per queue partition. The comparison of the receipt and the change are one step.
    ///
    /// # Fencing
    /// The current receipt is accepted, also past its deadline as long as the lease has not been
    /// expired (`late`). Anything else is [`Verdict::Fenced`], and no job, lease, key or checkpoint
    /// changes.
    ///
    /// # Errors
    /// `InvalidInput`: nothing was settled. Others: unknown.
    async fn settle(&self, request: SettleRequest) -> Result<Vec<Verdict>>;

    /// Saves state under leases. One answer per checkpoint, in order.
    ///
    /// # Fencing
    /// Accepted only with the current receipt (overdue but not expired included) and a `seq` that
    /// does not fall under one token. The next claim of the job gets the state, with the token that
    /// wrote it.
    ///
    /// # Errors
    /// `InvalidInput`: nothing was saved. Others: unknown.
    async fn checkpoint(&self, request: CheckpointRequest) -> Result<Vec<Checkpointed>>;

    /// Expires overdue leases without claiming, for queues that no worker claims from.
    ///
    /// # Atomicity
    /// The oldest by (deadline, token), at most `max`. Two reapers never count one expiry twice.
    ///
    /// # Errors
    /// Unknown.
    async fn reap(&self, request: ReapRequest) -> Result<Vec<Expiry>>;

    /// Carries out an operator's command, and leaves an audit record: who, when, why.
    ///
    /// # Errors
    /// `InvalidInput`: nothing was changed. Others: unknown.
    async fn control(&self, request: ControlRequest) -> Result<Controlled>;

    /// Answers a question. Never blocks the hot path; paged; scans nothing.
    ///
    /// # Errors
    /// Any; nothing is changed.
    async fn inspect(&self, query: Query) -> Result<View>;

    /// Sleeps until one of the queues may have work, at most for `limit`.
    ///
    /// Wakes for a job that became ready (in the suspects' line only if `suspects`), for a resumed
    /// queue, and for an enqueue that is due earlier than anything before. Does not wake for the
    /// passing of time: the caller has [`Claimed::next_due`] and [`Claimed::next_deadline`] for
    /// that. May wake for nothing; a lost wake-up costs at most one second.
    ///
    /// # Errors
    /// Any; the caller should fall back to sleeping, for a second at most.
    async fn wait(&self, queues: &[QueueName], suspects: bool, limit: Duration) -> Result<()>;

    /// How long a worker with nothing to do asks [`wait`](Self::wait) to sleep.
    ///
    /// More than a second only for a store whose sleepers find out by themselves, within a second,
    /// that a wake-up was lost or that a lease ends earlier than any did.
    fn longest_wait(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Deletes settled jobs past their retention, and returns how many. Unique keys past their
    /// window go too, in steps of at most as many: no step is longer for what there is to delete.
    ///
    /// # Errors
    /// Unknown.
    async fn prune(&self, request: PruneRequest) -> Result<u64>;
}
