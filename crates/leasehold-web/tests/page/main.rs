//! The dashboard in a real browser, against a live pool with real expiries.
//!
//! Needs `chromium` and `chromedriver`. Each test waits for facts on the page, never for a time.
//! `contrib/screenshots` takes the pictures of the documentation with the last of them.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use leasehold_support::http;
use leasehold_support::scene;

mod browser;
mod clicks;
mod live;
mod screens;
mod shots;
