//! Scopes: what a mark belongs to.

use std::fmt;

use crate::error::{Error, Result};
use crate::job::{JobId, Key, Namespace, QueueName};
use crate::limits;

/// What a resource keeps one mark for.
///
/// Tokens order the *claims* of one issuer. So a scope names what is claimed: an exclusive key of a
/// queue, or a single job. Two different jobs that touch one resource at the same time are not
/// ordered by anything: give them one exclusive key, and they share a scope.
///
/// Two scopes are equal exactly if their [texts](Self::as_str) are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope {
    text: Box<str>,
    /// Where the queue's name stands in the text.
    queue: (usize, usize),
}

impl Scope {
    /// The longest text of a scope, in bytes.
    pub const BYTES: usize = 2 * (limits::NAME_BYTES + 1) + 2 + limits::KEY_BYTES;

    /// The scope of an exclusive key.
    pub fn of_key(namespace: &Namespace, queue: &QueueName, key: &Key) -> Self {
        Self::new(namespace, queue, 'k', key.as_str())
    }

    /// The scope of a single job.
    pub fn of_job(namespace: &Namespace, queue: &QueueName, job: JobId) -> Self {
        Self::new(namespace, queue, 'j', &job.to_string())
    }

    /// A scope of your own, for resources that are shared by what the other scopes keep apart. All
    /// tokens that are shown under it must come from one issuer: one SQLite or memory store, or one
    /// partition of a queue.
    ///
    /// # Errors
    /// If the name has more bytes than a key may have.
    pub fn named(namespace: &Namespace, queue: &QueueName, name: &str) -> Result<Self> {
        Ok(Self::new(namespace, queue, 'n', Key::new(name)?.as_str()))
    }

    fn new(namespace: &Namespace, queue: &QueueName, sort: char, rest: &str) -> Self {
        let start = namespace.as_str().len() + 1;
        Self {
            // Neither name can hold a slash, so that the rest may hold anything.
            text: format!("{namespace}/{queue}/{sort}:{rest}").into(),
            queue: (start, start + queue.as_str().len()),
        }
    }

    /// A scope from its text, as another process sent it.
    ///
    /// # Errors
    /// If it is not the text of a scope.
    pub fn parse(text: &str) -> Result<Self> {
        let malformed = || {
            let found = format!("{} bytes of text", text.len());
            Error::invalid("scope", found, "namespace/queue/k:key, j:job or n:name")
        };
        let mut parts = text.splitn(3, '/');
        let (Some(namespace), Some(queue), Some(rest)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(malformed());
        };
        let (namespace, queue) = (Namespace::new(namespace)?, QueueName::new(queue)?);
        match rest.split_once(':') {
            Some(("k", key)) => Ok(Self::of_key(&namespace, &queue, &Key::new(key)?)),
            Some(("j", job)) => Ok(Self::of_job(&namespace, &queue, job.parse()?)),
            Some(("n", name)) => Self::named(&namespace, &queue, name),
            _ => Err(malformed()),
        }
    }

    /// The scope as text: `namespace/queue/k:key`, `…/j:job` or `…/n:name`.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The name of the queue whose tokens it orders.
    pub fn queue(&self) -> &str {
        &self.text[self.queue.0..self.queue.1]
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_scopes_share_a_text_and_each_text_is_read_back() {
        let names = ["a", "a.b", "k", "j-1"];
        let keys = ["a", "/", "a/k:a", "k:a", "j:", "n:a", ":", "é/…"];
        let job = JobId::generate();
        let mut scopes = Vec::new();
        for namespace in names.map(|name| Namespace::new(name).unwrap()) {
            for queue in names.map(|name| QueueName::new(name).unwrap()) {
                for key in keys {
                    let of_key = Scope::of_key(&namespace, &queue, &Key::new(key).unwrap());
                    scopes.push(of_key);
                    scopes.push(Scope::named(&namespace, &queue, key).unwrap());
                }
                // A key that looks like a job is not that job.
                let posing = Key::new(job.to_string()).unwrap();
                scopes.push(Scope::of_key(&namespace, &queue, &posing));
                scopes.push(Scope::of_job(&namespace, &queue, job));
                assert_eq!(scopes.last().unwrap().queue(), queue.as_str());
            }
        }
        let texts: HashSet<&str> = scopes.iter().map(Scope::as_str).collect();
        assert_eq!(texts.len(), scopes.len());
        for scope in &scopes {
            assert_eq!(&Scope::parse(scope.as_str()).unwrap(), scope);
            assert!(scope.as_str().len() <= Scope::BYTES);
        }
    }

    #[test]
    fn the_longest_scope_is_as_long_as_it_says() {
        let name = "x".repeat(limits::NAME_BYTES);
        let key = Key::new("k".repeat(limits::KEY_BYTES)).unwrap();
        let (namespace, queue) = (
            Namespace::new(&name).unwrap(),
            QueueName::new(&name).unwrap(),
        );
        let longest = Scope::of_key(&namespace, &queue, &key);
        assert_eq!(longest.as_str().len(), Scope::BYTES);
    }

    #[test]
    fn what_is_no_scope_is_refused_by_field() {
        for text in ["", "a", "a/b", "a/b/c", "a/b/x:y", "a/b/j:1", "a b/c/k:d"] {
            let error = Scope::parse(text).unwrap_err();
            assert!(error.field().is_some(), "{text}: {error}");
        }
        let long = "x".repeat(limits::KEY_BYTES + 1);
        let error = Scope::named(&Namespace::default(), &QueueName::default(), &long);
        assert_eq!(error.unwrap_err().field(), Some("key"));
    }
}
