//! Marks: the rule of every fence, as plain data.
//!
//! Adapters with an engine of their own write the same rule in its language.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{FenceError, Op, Scope, Stale, operation_name};
use crate::lease::FencingToken;

/// The high-water marks of a resource, by scope.
///
/// Pure: keep it under the lock, in the file or in the row of what it guards, so that the check and
/// the effect are one step.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Marks {
    /// Nothing below this is admitted, whatever the scope.
    floor: FencingToken,
    scopes: BTreeMap<String, Mark>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Mark {
    token: FencingToken,
    /// The named operations that this token has applied.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    done: BTreeSet<String>,
}

impl Default for Marks {
    fn default() -> Self {
        Self {
            floor: FencingToken::new(0),
            scopes: BTreeMap::new(),
        }
    }
}

impl Marks {
    /// Raises the mark of a scope to `token`. Doing it again changes nothing.
    ///
    /// # Errors
    /// If the mark, or the floor, is above the token.
    pub fn open(&mut self, scope: &Scope, token: FencingToken) -> Result<(), Stale> {
        self.admit(scope, token, Op::Open).map(|_| ())
    }

    /// Admits a read.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn read(&mut self, scope: &Scope, token: FencingToken) -> Result<(), Stale> {
        self.admit(scope, token, Op::Read).map(|_| ())
    }

    /// Admits a write.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn write(&mut self, scope: &Scope, token: FencingToken) -> Result<(), Stale> {
        self.admit(scope, token, Op::Write).map(|_| ())
    }

    /// Admits a named write. False if this token has applied it before: then leave it.
    ///
    /// # Errors
    /// As [`open`](Self::open), and if the name is too long.
    pub fn write_once(
        &mut self,
        scope: &Scope,
        token: FencingToken,
        operation: &str,
    ) -> Result<bool, FenceError> {
        operation_name(operation)?;
        let mark = self.admit(scope, token, Op::Write)?;
        Ok(mark.done.insert(operation.to_owned()))
    }

    /// Forgets the marks below `below`, and admits nothing below it from now on.
    ///
    /// Safe when `below` is older than any maximum lifetime: nobody can hold such a token.
    pub fn prune(&mut self, below: FencingToken) {
        self.floor = self.floor.max(below);
        self.scopes.retain(|_, mark| mark.token >= below);
    }

    /// The mark of a scope: the largest token it was opened for, or the floor.
    pub fn mark(&self, scope: &Scope) -> FencingToken {
        let mark = self.scopes.get(scope.as_str()).map(|mark| mark.token);
        mark.map_or(self.floor, |mark| mark.max(self.floor))
    }

    /// How many scopes have a mark.
    pub fn len(&self) -> usize {
        self.scopes.len()
    }

    /// Whether no scope has a mark.
    pub fn is_empty(&self) -> bool {
        self.scopes.is_empty()
    }

    fn admit(&mut self, scope: &Scope, token: FencingToken, op: Op) -> Result<&mut Mark, Stale> {
        let mark = self.mark(scope);
        if token < mark {
            return Err(Stale::refuse(scope, token, mark, op));
        }
        let entry = self.scopes.entry(scope.as_str().to_owned());
        let mark = entry.or_insert_with(|| Mark {
            token,
            done: BTreeSet::new(),
        });
        if mark.token < token {
            *mark = Mark {
                token,
                done: BTreeSet::new(),
            };
        }
        Ok(mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobId, Namespace, QueueName};

    fn scope() -> Scope {
        Scope::of_job(
            &Namespace::default(),
            &QueueName::default(),
            JobId::generate(),
        )
    }

    #[test]
    fn nobody_below_the_mark_or_the_floor_is_let_in() {
        let (one, other, token) = (scope(), scope(), FencingToken::new);
        let mut marks = Marks::default();
        assert!(marks.is_empty() && marks.mark(&one) == token(0));
        marks.open(&one, token(5)).unwrap();
        assert!(!marks.is_empty());
        assert!(marks.open(&one, token(4)).is_err());
        assert!(marks.read(&one, token(4)).is_err());
        assert!(marks.write(&one, token(4)).is_err());
        assert!(marks.write_once(&one, token(4), "pay").is_err());
        assert_eq!((marks.mark(&one), marks.mark(&other)), (token(5), token(0)));
        marks.read(&one, token(5)).unwrap();
        marks.write(&one, token(6)).unwrap();
        assert_eq!(marks.mark(&one), token(6));

        // What is pruned is below the floor; what stays keeps its own mark.
        marks.open(&other, token(8)).unwrap();
        assert_eq!(marks.len(), 2);
        marks.prune(token(8));
        marks.prune(token(3));
        assert_eq!(marks.len(), 1);
        assert_eq!((marks.mark(&one), marks.mark(&other)), (token(8), token(8)));
        assert!(marks.open(&one, token(7)).is_err());
        marks.open(&one, token(8)).unwrap();
    }

    #[test]
    fn a_named_write_is_applied_once_for_each_token() {
        let (scope, token) = (scope(), FencingToken::new);
        let mut marks = Marks::default();
        assert!(marks.write_once(&scope, token(5), "pay").unwrap());
        assert!(!marks.write_once(&scope, token(5), "pay").unwrap());
        assert!(marks.write_once(&scope, token(5), "mail").unwrap());
        assert!(marks.write_once(&scope, token(6), "pay").unwrap());
    }
}
