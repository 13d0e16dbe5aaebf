//! The dashboard in a real browser, against a live pool with real expiries.
//!
//! Needs `chromium` and `chromedriver`. Each test waits for facts on the page, never for a time.
//! `contrib/screenshots` takes the pictures of the documentation with the last of them.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::sync::OnceLock;

use leasehold_support::http;
use leasehold_support::scene;
use leasehold_web::prometheus::Exporter;

mod browser;
mod clicks;
mod failures;
mod live;
mod screens;
mod shots;

/// The one exporter of this process.
fn exporter() -> Exporter {
    static INSTALLED: OnceLock<Exporter> = OnceLock::new();
    INSTALLED
        .get_or_init(|| Exporter::install().unwrap())
        .clone()
}
