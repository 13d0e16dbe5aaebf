//! For your own tests: show that a handler is safe from an earlier run of itself.
//!
//! A worker can stand still at any moment (a paused virtual machine, swap, a debugger), lose its
//! lease, be replaced, and go on without knowing. [`Zombie`] does that to a handler at each of its
//! await points in turn, and reports every effect that was still accepted from the replaced run:
//!
//! ```
//! use leasehold_testing::Zombie;
//! # use leasehold::{Context, Failure, Job, fence::memory::Cell};
//! # use serde::{Deserialize, Serialize};
//! # use std::collections::BTreeMap;
//! # #[derive(Serialize, Deserialize)] struct Debit { cents: i64 }
//! # impl Job for Debit { const KIND: &'static str = "debit"; }
//! # type Booked = BTreeMap<String, i64>;
//! async fn debit(job: Debit, ctx: Context, account: Cell<Booked>) -> Result<(), Failure> {
//!     let mut account = ctx.fence(&account).await?; // before the first read
//!     let booking = ctx.job_id().to_string();       // the same in every run of this job
//!     account.write(|booked| booked.insert(booking, -job.cents))?;
//!     Ok(())
//! }
//!
//! Zombie::new(&Debit { cents: 30 }, Cell::<Booked>::default, |account| {
//!         move |job: Debit, ctx: Context| debit(job, ctx, account.clone())
//!     })
//!     .watch("balance", |account| account.look(|booked| booked.values().sum::<i64>()))
//!     .run()
//!     .assert_safe(); // and prints how much was tried
//! ```
//!
//! It finds what is written without a fence ([`Accepted`](FaultKind::Accepted)), also where a token
//! is checked on writes only; a fence that is opened after the first read
//! ([`OpenedLate`](FaultKind::OpenedLate)); and what a fence cannot help with: an effect that is
//! done again by the next run of the job ([`Repeated`](FaultKind::Repeated)).
//!
//! **What counts as an await point.** Each time the handler's future waits. [`Context::fence`]
//! waits before and after the opening while it is tested, and so does every fake that calls
//! [`await_point`]. A handler without any fails the test. A real process can also stand still
//! between two awaits: put an [`await_point`] into your fakes wherever the real resource has a
//! round trip. Tasks that a handler spawns are not frozen.
//!
//! **What counts as opening.** [`Context::fence`], and `fence_in` of an SQLite transaction. A
//! zombie may still write to what its successor has not opened yet, as long as it has not read it
//! either.
//!
//! [`run`] runs a handler on one job and tells how it ended, [`run_with`] does so with the state
//! and the layers of its worker. None of these needs a store. A clock to drive a
//! [`MemoryStore`](leasehold::store::MemoryStore) by hand is [`ManualClock`].
//!
//! [`Context::fence`]: leasehold::Context::fence

mod report;
mod run;
mod stage;
mod zombie;

pub use leasehold::clock::ManualClock;
pub use leasehold::hooks::await_point;
pub use report::{Fault, FaultKind, FrozenAt, Report};
pub use run::{Ended, Ran, run, run_with};
pub use zombie::Zombie;
