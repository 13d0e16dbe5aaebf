//! The exceptions. The lists only shrink: remove an entry when its last finding is fixed.

use crate::tidy::Finding;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Exception {
    pub(crate) rule: &'static str,
    /// A file, or a folder that ends with `/`.
    pub(crate) path: &'static str,
    /// As in the finding; empty for all findings there.
    pub(crate) what: &'static str,
}

impl Exception {
    pub(crate) fn covers(&self, finding: &Finding) -> bool {
        let is_there = if self.path.ends_with('/') {
            finding.path.starts_with(self.path)
        } else {
            finding.path == self.path
        };
        is_there && (self.what.is_empty() || self.what == finding.what)
    }
}

/// The list, entry by entry.
pub(crate) fn exceptions() -> Vec<Exception> {
    let mut found = Vec::new();
    for (rule, places) in KNOWN {
        for (path, whats) in *places {
            let whats = if whats.is_empty() { &[""] } else { *whats };
            found.extend(whats.iter().map(|what| Exception { rule, path, what }));
        }
    }
    found
}

/// By rule: the places, each with what is found there. An empty list stands for everything.
type List = &'static [(
    &'static str,
    &'static [(&'static str, &'static [&'static str])],
)];

/// What is still to be fixed.
const KNOWN: List = &[];
