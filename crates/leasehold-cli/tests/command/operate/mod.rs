//! The `leasehold` command at work on a store that others use: what each command shows and does,
//! the shape of what it prints, and how it ends.

mod act;
mod guide;
use leasehold_support::http;
mod look;
mod migrate;
use leasehold_support::postgres as postgres_server;
use leasehold_support::redis as redis_server;
mod schema;
mod shell;
mod terminal;
mod trouble;
mod world;
