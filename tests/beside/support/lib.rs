//! A private PostgreSQL server for the tests beside other crates.

#[path = "../../support/postgres.rs"]
pub mod postgres;
