//! The store for many machines: how its servers are reached and looked at.

use std::fmt;

#[cfg_attr(not(feature = "cli"), allow(dead_code, reason = "the doctor's"))]
mod acl;
#[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
mod dial;
#[cfg(feature = "cli")]
pub(crate) mod doctor;
#[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
mod fault;
#[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
pub(crate) mod link;
#[cfg(all(test, unix))]
mod link_tests;
#[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
mod listen;
#[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
pub(crate) mod url;

pub use acl::acl_rule;

/// How a store on Redis is opened.
#[derive(Clone)]
pub struct RedisOptions {
    #[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
    url: String,
}

impl RedisOptions {
    /// The server of a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into() }
    }

    #[cfg_attr(not(test), allow(dead_code, reason = "the verbs use it"))]
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("RedisOptions").finish_non_exhaustive()
    }
}
