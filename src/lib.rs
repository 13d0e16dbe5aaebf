//! Background work under leases.

#[cfg(feature = "cli")]
pub mod cli;
mod client;
pub mod clock;
mod context;
mod error;
pub mod executor;
mod handler;
pub mod inspect;
pub mod job;
pub mod lease;
pub mod lifecycle;
pub mod observe;
pub mod retry;
pub mod store;
mod worker;

pub use async_trait::async_trait;
pub use client::Client;
pub use context::Context;
pub use error::{Error, ErrorKind, Result, Verb};
pub use handler::{Failure, Handler};
pub use job::{Job, JobId, NewJob};
pub use lease::{FencingToken, LeaseTerms, Receipt, Verdict};
pub use retry::RetryPolicy;
pub use store::{MemoryStore, Store};
pub use worker::{QueueConfig, Report, WorkerBuilder};
