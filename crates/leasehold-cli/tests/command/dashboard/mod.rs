//! The dashboard over plain HTTP: each page, who may see it and who may act, what hostile clients
//! achieve, and whether its numbers are the ledger's.

use leasehold_support::http;
use leasehold_support::postgres as postgres_server;
#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
use leasehold_support::redis as redis_server;
use leasehold_support::scene;

mod actions;
mod attack;
mod cli;
mod grafana;
mod health;
mod numbers;
mod pages;
mod safety;
mod scale;
mod speed;
