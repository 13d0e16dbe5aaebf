//! The guide: how the parts fit, and what to expect of them.
//!
//! | page | answers |
//! |---|---|
//! | [`architecture`] | what problem this solves, which parts there are, where each promise is kept |
//! | [`life`] | what happens to a job, verb by verb |
//! | [`leases`] | how long a lease lasts, who ends it, what a lost one means |
//! | [`fencing`] | how to stop an owner that was replaced and does not know it |
//! | [`changing`] | how to add, change and remove kinds of jobs while workers run |
//! | [`keys`] | how to have one job only, or one at a time |
//! | [`stores`] | what each store guarantees, and how to write another |
//! | [`redis`] | what Redis can lose with which settings, what to allow its user, how to size it |
//! | [`postgres`] | how to keep the queue beside the data, in one transaction |
//! | [`guarantees`] | what is promised, and on what it rests |
//! | [`security`] | which attacks are considered, and what happens to them |
//! | [`errors`] | verdicts, errors and failures: three kinds of "no" |
//! | [`operations`] | what to watch, how to choose terms, how to deploy |
//! | [`glossary`] | what each word means |
//!
//! Every piece of code in it is compiled with the tests, and run where it can end by itself.

#[doc = include_str!("architecture.md")]
pub mod architecture {}

#[doc = include_str!("life.md")]
pub mod life {}

#[doc = include_str!("leases.md")]
pub mod leases {}

#[doc = include_str!("fencing.md")]
pub mod fencing {}

#[doc = include_str!("changing.md")]
pub mod changing {}

#[doc = include_str!("keys.md")]
pub mod keys {}

#[doc = include_str!("stores.md")]
pub mod stores {}

#[cfg(feature = "redis")]
#[doc = include_str!("redis.md")]
pub mod redis {}

#[cfg_attr(feature = "postgres", doc = include_str!("postgres.md"))]
#[cfg_attr(not(feature = "postgres"), doc = "Needs the feature `postgres`.")]
pub mod postgres {}

#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("operations.md")]
pub mod operations {}

#[doc = include_str!("glossary.md")]
pub mod glossary {}

#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("security.md")]
pub mod security {}
