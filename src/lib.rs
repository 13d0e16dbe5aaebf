//! Background work under leases.
//!
//! A worker *claims* jobs for a limited time, *renews* while the handler runs, and *settles* each
//! job with the receipt of that one claim. If the worker dies, the lease expires in the store, by
//! the passage of time alone, and another worker claims the job. Every claim carries a *fencing
//! token* that only ever grows: a resource that checks it refuses an owner that has been replaced
//! and does not know it.
//!
//! It runs embedded, on one SQLite file with no server, or on Redis or PostgreSQL when one machine
//! is not enough. Jobs run at least once, not exactly once. It is neither a workflow engine nor a
//! publish-subscribe broker.
//!
//! ```
//! use leasehold::{Client, Context, Job};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Greet { name: String }
//!
//! impl Job for Greet {
//!     const KIND: &'static str = "greet";
//! }
//!
//! async fn greet(job: Greet, ctx: Context) -> anyhow::Result<()> {
//!     println!("hello {} (attempt {}, token {})", job.name, ctx.attempt(), ctx.token());
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> anyhow::Result<()> {
//! let client = Client::open("memory:").await?; // or "sqlite://jobs.db"
//! client.enqueue(&Greet { name: "world".into() }).await?;
//! # let a_moment = tokio::time::sleep(std::time::Duration::from_millis(50));
//! # client.worker().handle(greet).run_until(a_moment).await?;
//! # let ledger = client.queues().await?[0].ledger;
//! # assert_eq!(ledger.completed, 1);
//! # async fn not_run(client: Client) -> anyhow::Result<()> {
//! client.worker().handle(greet).run().await?; // until SIGTERM or Ctrl-C, then drains
//! # Ok(()) }
//! # Ok(()) }
//! ```
//!
//! Where to go from here: [`Client`] opens a store and enqueues, [`Worker`] runs the jobs,
//! [`Context`] tells a handler about its lease, and [`Failure`] is how it asks for a retry, a delay
//! or an end. The [`guide`] explains the rest.
//!
//! # Layout
//!
//! Imports go down this table only. [`guide::architecture`] follows one job through the files.
//!
//! | place | what is there |
//! |---|---|
//! | `client.rs`, `operator.rs`, `inspect.rs` | opening a store, enqueuing, starting workers; intervening; looking |
//! | `handler.rs`, `context.rs`, `state.rs`, `retry.rs`, `layer/` | what a handler is, is given and can return, and what can be put around it |
//! | `transaction/`, `atomic_redis.rs`, `ending.rs` | effect, checkpoint and settlement in one transaction, or in one Redis script |
//! | `worker/` | the runtime: `claimer`, `slots`, `renewer`, `settler`, `reaper`, `pruner`; `outcome.rs` decides what the end of a handler means (done, retry, dead), `lost.rs` what a lost lease means; `config.rs` describes a worker, `mod.rs` wires the parts |
//! | `calls/` | calling a store so that repeats are safe: session, lane, merge |
//! | `store/` | the [`Store`] trait, and a folder per engine with a file per verb: `memory`, `sqlite`, `postgres`, `redis`; `cursor.rs` is what the SQL stores share; `holding/` is the trait of locks and permits, which memory has so far |
//! | `rules/` | pure functions: what may happen to a job, what each end of a lease means, which token is next, what holdings conflict |
//! | `job.rs`, `lease.rs`, `token.rs`, `receipt.rs`, `terms.rs`, `settings.rs`, `history.rs`, `names.rs`, `limits.rs`, `error.rs`, `sqlite_error.rs` | values |
//! | `driver/` | what a PostgreSQL driver has to be able to do, and the limits on a transaction under a lease |
//! | `panics.rs`, `point.rs` | catching panics of user code; where a test can make a handler stand still |
//! | `clock.rs` | the only file that reads a clock |
//! | `fence/` | refusing a replaced owner where the effect happens: a file per kind of resource |
//! | `observe/` | events, and what is made of them: metrics, `tracing` records, trace context |
//! | `hooks/` | hidden seams for the tests and the crates below |
//! | `guide/` | the guide, whose code is compiled as tests |
//!
//! Six crates build on this one: `leasehold-sqlx` and `leasehold-diesel` (its calls in transactions
//! of sqlx and diesel-async), `leasehold-cli` (the `leasehold` command), `leasehold-web` (the
//! dashboard and `/metrics`), `leasehold-testing` (tests for your handlers) and
//! `leasehold-conformance` (tests for your stores and fences).
//!
//! # Features
//!
//! - `sqlite` (default): the store and the fence in one SQLite file, for several processes of one
//!   machine. The memory store is always there.
//! - `redis`: the store and the fence in Redis or Valkey, for many machines.
//! - `postgres`: the store and the fence in PostgreSQL, for many machines.
//! - `http`: the fence between HTTP clients and servers.
//! - `otel`: W3C trace context in job headers, from and to the spans of OpenTelemetry.
//! - `tower`: layers of `tower` around the runs of a worker.
//!
//! `testing` and `doctor` are for `leasehold-testing` and `leasehold-cli`, which turn them on.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "redis")]
pub mod atomic_redis;
mod calls;
mod client;
pub mod clock;
mod context;
#[cfg(feature = "postgres")]
#[doc(hidden)]
pub mod driver;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
mod ending;
pub mod error;
pub mod fence;
pub mod guide;
pub mod handler;
mod history;
#[doc(hidden)]
pub mod hooks;
pub mod inspect;
pub mod job;
pub mod layer;
pub mod lease;
pub mod limits;
mod names;
pub mod observe;
pub mod operator;
mod panics;
#[cfg(feature = "testing")]
mod point;
mod receipt;
pub mod retry;
pub mod rules;
mod settings;
#[cfg(feature = "sqlite")]
mod sqlite_error;
mod state;
pub mod store;
mod terms;
mod token;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod transaction;
pub mod worker;

pub use async_trait::async_trait;
pub use client::Client;
pub use context::Context;
pub use error::{Error, ErrorKind, Result};
pub use handler::{Failure, Handler};
pub use job::{Job, JobId, NewJob};
pub use lease::{FencingToken, LeaseTerms};
pub use retry::RetryPolicy;
pub use state::State;
pub use store::Store;
pub use worker::{QueueConfig, Worker};

/// The code in the README is compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
