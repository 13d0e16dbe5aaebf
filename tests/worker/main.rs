//! The worker runtime on the memory store: runs, edges, races, traces, metrics, the zombie test.

#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

mod deploys;
mod drain;
mod each_run;
mod edges;
mod face;
mod metrics;
mod races;
mod runs;
mod security;
mod testing;
mod trace;
