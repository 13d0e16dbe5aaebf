//! A value in this process, under a fence: for tests, and for what several pools of one process
//! share.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::{Fence, FenceError, Marks, Scope, Stale};
use crate::lease::FencingToken;

/// A shared value that is read and written only by those whom its fence admits. Clones share it.
#[derive(Default)]
pub struct Cell<T> {
    shared: Arc<Mutex<Guarded<T>>>,
}

#[derive(Default)]
struct Guarded<T> {
    marks: Marks,
    value: T,
}

impl<T> Cell<T> {
    /// A value that nobody has opened yet.
    pub fn new(value: T) -> Self {
        let marks = Marks::default();
        Self {
            shared: Arc::new(Mutex::new(Guarded { marks, value })),
        }
    }

    /// The value as it is, for onlookers. What is written must not depend on it.
    pub fn look<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.lock().value)
    }

    /// The mark of a scope.
    pub fn mark(&self, scope: &Scope) -> FencingToken {
        self.lock().marks.mark(scope)
    }

    /// Forgets the marks below `below`, and admits nothing below it from now on.
    pub fn prune(&self, below: FencingToken) {
        self.lock().marks.prune(below);
    }

    fn lock(&self) -> MutexGuard<'_, Guarded<T>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for Cell<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<T> fmt::Debug for Cell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cell")
            .field("marks", &self.lock().marks)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl<T: Send> Fence for Cell<T> {
    type Opened = OpenCell<T>;

    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<OpenCell<T>, FenceError> {
        self.lock().marks.open(scope, token)?;
        Ok(OpenCell {
            cell: self.clone(),
            scope: scope.clone(),
            token,
        })
    }
}

/// A cell that was opened under a token.
#[derive(Debug)]
pub struct OpenCell<T> {
    cell: Cell<T>,
    scope: Scope,
    token: FencingToken,
}

impl<T> OpenCell<T> {
    /// The value.
    ///
    /// # Errors
    /// If the cell has been opened for a larger token since.
    pub fn read(&self) -> Result<T, Stale>
    where
        T: Clone,
    {
        let mut guarded = self.cell.lock();
        guarded.marks.read(&self.scope, self.token)?;
        Ok(guarded.value.clone())
    }

    /// Changes the value. A handler that calls it twice changes it twice.
    ///
    /// # Errors
    /// As [`read`](Self::read); then nothing is changed.
    pub fn write<R>(&mut self, change: impl FnOnce(&mut T) -> R) -> Result<R, Stale> {
        let mut guarded = self.cell.lock();
        guarded.marks.write(&self.scope, self.token)?;
        Ok(change(&mut guarded.value))
    }

    /// Changes the value, once per token and operation. None if this token has done it before.
    ///
    /// # Errors
    /// As [`write`](Self::write), and if the operation's name is too long.
    pub fn write_once<R>(
        &mut self,
        operation: &str,
        change: impl FnOnce(&mut T) -> R,
    ) -> Result<Option<R>, FenceError> {
        let mut guarded = self.cell.lock();
        let fresh = guarded
            .marks
            .write_once(&self.scope, self.token, operation)?;
        Ok(fresh.then(|| change(&mut guarded.value)))
    }
}
