//! Background work under leases.
//!
//! A worker *claims* jobs for a limited time, *renews* while the handler runs, and *settles* each job
//! with the receipt of that one claim. If the worker dies, the lease expires in the store, by the
//! passage of time alone, and somebody else claims the job. Every claim carries a *fencing token*
//! that only ever grows: a resource that checks it refuses an owner that has been replaced and does
//! not know it.
//!
//! It runs embedded, on one SQLite file with no server, and on Redis or PostgreSQL when one machine is
//! not enough. It is not exactly-once: a job runs at least once. It is not a workflow engine, and no
//! broker for many readers.
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
//! Where to go from here: [`Client`] opens a store and enqueues, [`Worker`] works what is enqueued,
//! [`Context`] is what a handler knows of its lease, [`Failure`] what it can wish for. The [`guide`]
//! explains the rest.
//!
//! # Layout
//!
//! A job's life is a row of verbs, and each verb is a file. Put yourself in as a job: you are
//! enqueued in `lifecycle/enqueue.rs`, cross the [`Store`] trait, and meet one file of the same name.
//!
//! | place | what is there |
//! |---|---|
//! | `client.rs` | the door: open, enqueue, start workers, look, intervene |
//! | `job.rs`, `names.rs`, `lease.rs`, `retry.rs` | data and pure rules: jobs, their names and limits, tokens, receipts and terms, waits |
//! | `handler.rs`, `context.rs` | what the user writes, and what it is given |
//! | `transaction/` | effect, checkpoint and settlement in the handler's own transaction |
//! | `one_step.rs` | effect and settlement in one script of a Redis server |
//! | `worker.rs` | the one place that wires the parts of a pool together |
//! | `lifecycle/` | one file per verb: `enqueue`, `claim`, `run`, `renew`, `fence`, `settle`, `expire`, `prune`; `mod.rs` has the transition table |
//! | `store/` | the [`Store`] trait, and a folder per store with the same verb-named files |
//! | `store/conformance/` | the contract as test cases, for any store |
//! | `fence/` | refusing the old owner where the effect happens: one file per kind of resource |
//! | `testing/` | for users' own tests: freezing a handler where it can stand still |
//! | `observe/` | events, and what is made of them: metrics, `tracing` records |
//! | `dashboard/` | the web page: one file per screen, made from `inspect` and `control` alone |
//! | `inspect.rs` | looking without touching: counts, ledger, live leases, jobs, audit |
//! | `clock.rs` | the only file that asks the time |
//! | `error.rs` | trouble below the answer |
//! | `guide/` | this documentation's prose, compiled as tests |
//! | `cli/`, `bin/leasehold.rs` | the command: one file per noun |
//!
//! # Features
//!
//! - `sqlite` (default): the store in one SQLite file, for several processes of one machine. The
//!   memory store is always there.
//! - `redis`: the store and the fence in Redis or Valkey, for many machines.
//! - `postgres`: the store and the fence in PostgreSQL, for many machines.
//! - `http`: the fence between HTTP clients and servers.
//! - `conformance`: the test cases that every store must pass.
//! - `prometheus`: metrics as text, served by the dashboard or beside a worker.
//! - `dashboard`: the web dashboard, as a router for any axum application or a server of its own.
//! - `testing`: for your own tests: a handler frozen at each of its await points, or run by hand.
//! - `otel`: W3C trace context in job headers, from and to the spans of OpenTelemetry.
//! - `cli`: the `leasehold` command.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "redis")]
pub mod atomic_redis;
mod calls;
mod client;
pub mod clock;
mod context;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
mod ending;
mod error;
pub mod fence;
pub mod guide;
mod handler;
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
mod receipt;
pub mod retry;
pub mod rules;
pub mod store;
mod terms;
mod token;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod transaction;
pub mod worker;

pub use async_trait::async_trait;
pub use client::Client;
pub use context::Context;
pub use error::{Error, ErrorKind, Result, Verb};
pub use handler::{Failure, Handler};
pub use job::{Job, JobId, NewJob};
pub use lease::{FencingToken, LeaseTerms, Receipt, Verdict};
pub use retry::RetryPolicy;
pub use store::{MemoryStore, Store};
pub use worker::{DrainReport, QueueConfig, Worker, WorkerHandle};

/// The code in the README is compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
