//! The dashboard, `/metrics` and `/healthz` of [`leasehold`], for any axum application or as a
//! server of its own.
//!
//! | file | what is there |
//! |---|---|
//! | `dashboard/` | the web page: one file per screen, made from the views and commands of the client |
//! | `prometheus.rs`, `histogram.rs` | the metrics as text |
//! | `health.rs` | `/healthz` and `/readyz` |
//! | `server.rs` | an HTTP server that no client can hold up |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod dashboard;
pub mod health;
mod histogram;
pub mod prometheus;
mod server;

pub use dashboard::Dashboard;
