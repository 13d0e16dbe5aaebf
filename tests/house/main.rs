//! The house itself: examples run, the public names are those on record, the documents promise what
//! tests show, every test binary is listed, copies are equal, and every patch of `tests/sabotage`
//! still applies.

#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

mod binaries;
mod copies;
mod examples;
mod image;
mod promises;
mod public_api;
mod sabotage;
mod tidy;
