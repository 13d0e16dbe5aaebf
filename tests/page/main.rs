//! The dashboard in a real browser, against a live pool with real expiries.
//!
//! Needs `chromium` and `chromedriver`. Each test waits for facts on the page, never for a time.
//! `contrib/screenshots` takes the pictures of the documentation with the last of them.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

#[path = "../support/http.rs"]
mod http;
#[path = "../support/scene.rs"]
mod scene;

mod browser;
mod clicks;
mod live;
mod screens;
mod shots;
