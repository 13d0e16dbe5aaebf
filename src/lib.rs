//! Background work under leases.
//!
//! A worker *claims* jobs for a limited time, *renews* while the handler runs, and *settles* each
//! job with the receipt of that one claim. If the worker dies, the lease expires in the store, by
//! the passage of time alone, and somebody else claims the job. Every claim carries a *fencing
//! token* that only ever grows: a resource that checks it refuses an owner that has been replaced
//! and does not know it.
//!
//! It runs embedded, on one SQLite file with no server, and on Redis or PostgreSQL when one machine
//! is not enough. It is not exactly-once: a job runs at least once. It is not a workflow engine,
//! and no broker for many readers.
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
//! [`Context`] is what a handler knows of its lease, [`Failure`] how it asks for a retry or gives
//! up. Layers around handlers are in [`layer`], looking in [`inspect`], intervening in
//! [`operator`]. The [`guide`] explains the rest.
//!
//! # Layout
//!
//! Imports go down only, from what a user holds to plain values. Put yourself in as a job: you are
//! enqueued through `calls/`, cross the [`Store`] trait, and meet a claimer, a slot, a renewer and
//! a settler in `worker/`.
//!
//! | place | what is there |
//! |---|---|
//! | `client.rs`, `operator.rs` | open, enqueue, start workers, look, intervene |
//! | `handler.rs`, `context.rs`, `layer/` | what the user writes, is given, and puts around it |
//! | `transaction/` | effect, checkpoint and settlement in one transaction |
//! | `atomic_redis.rs` | the same in one script of a Redis server |
//! | `worker/` | the description of a worker, its handle, and a file for each of its parts |
//! | `calls/` | calling a store so that repeats are safe, and many callers share a round trip |
//! | `store/` | the [`Store`] trait, and a folder per store |
//! | `rules/` | pure: what may happen to a job and to a lease |
//! | `job.rs`, `names.rs`, `limits.rs` | jobs, their names and limits |
//! | `lease.rs`, `token.rs`, `receipt.rs`, `terms.rs`, `retry.rs` | leases and waits |
//! | `fence/` | refusing the old owner where the effect happens: one file per kind of resource |
//! | `observe/` | events, and what is made of them: metrics, `tracing` records |
//! | `inspect.rs` | what can be seen: counts, ledger, live leases, jobs, audit |
//! | `clock.rs` | the only file that asks the time |
//! | `error.rs` | trouble below the answer |
//! | `guide/` | this documentation's prose, compiled as tests |
//!
//! # Features
//!
//! - `sqlite` (default): the store in one SQLite file, for several processes of one machine. The
//!   memory store is always there.
//! - `redis`: the store and the fence in Redis or Valkey, for many machines.
//! - `postgres`: the store and the fence in PostgreSQL, for many machines.
//! - `tower`: layers of `tower` around the runs of a worker.
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
#[cfg(feature = "cli")]
pub mod cli;
mod client;
pub mod clock;
mod context;
#[cfg(feature = "dashboard")]
pub mod dashboard;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
mod ending;
pub mod error;
pub mod fence;
pub mod guide;
mod handler;
mod history;
#[cfg(feature = "web")]
mod http;
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
#[cfg(feature = "testing")]
pub mod testing;
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
pub use store::Store;
pub use worker::{QueueConfig, Worker, WorkerHandle};

/// The code in the README is compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
