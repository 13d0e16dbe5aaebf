//! Background work under leases.

pub mod clock;
mod error;
pub mod inspect;
pub mod job;
pub mod lease;
pub mod lifecycle;
pub mod retry;
pub mod store;

pub use error::{Error, ErrorKind, Result, Verb};
pub use job::{Job, JobId, NewJob};
pub use lease::{FencingToken, LeaseTerms, Receipt, Verdict};
pub use retry::RetryPolicy;
pub use store::{MemoryStore, Store};
