//! The command as a program: what it prints, does and refuses, on every store.

#![cfg(unix)]
#![allow(missing_docs, reason = "a test, not an interface")]
#![allow(clippy::unwrap_used, reason = "trouble here should stop it")]
#![allow(clippy::disallowed_methods, reason = "it measures the real time")]

mod alerts;
mod dashboard;
mod doctor_books;
mod doctor_clock;
mod doctor_postgres;
mod doctor_redis;
mod operate;
mod programs;
