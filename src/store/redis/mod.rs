//! The store for many machines.

mod dial;
mod fault;
pub(crate) mod link;
#[cfg(all(test, unix))]
mod link_tests;
mod listen;
pub(crate) mod url;

/// How a store on Redis is opened.
#[derive(Clone)]
pub struct RedisOptions {
    url: String,
}

impl RedisOptions {
    /// The server of a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into() }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}
