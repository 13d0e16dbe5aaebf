//! What only one engine can do or suffer: files and processes of SQLite, servers of Redis and
//! PostgreSQL that are killed, frozen, filled up and replaced.

#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

#[cfg(unix)]
mod postgres;
#[cfg(unix)]
mod redis;
mod sqlite;
