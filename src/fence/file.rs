//! A file under a fence: one process at a time, each change whole or not at all.
//!
//! Every operation takes an exclusive lock, compares the token with the mark, and replaces the file
//! by a new one that is on disk before it gets the name. Whoever reads past the fence sees the old
//! content or the new, never half of it.
//!
//! Beside the file `F` stand `F.fence` (the marks), `F.fence-lock`, and while something is written
//! `F.fence-new` and `F.fence-next-N`. A named operation and its effect must not be torn apart by a
//! crash: the new content is put on disk as `F.fence-next-N` first, then the marks are replaced,
//! with the operation and N in them, then the content gets its name. If the last step was not
//! reached, the next one who takes the lock does it.
//!
//! The lock is the system's, and dies with its process; a process that is frozen with it keeps the
//! others waiting. All of it needs a local disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{Fence, FenceError, Marks, Scope};
use crate::error::{Error, ErrorKind, Verb};
use crate::lease::FencingToken;
#[cfg(feature = "testing")]
use crate::point;

/// A file that is read and replaced only by those whom its fence admits.
#[derive(Clone, Debug)]
pub struct FencedFile {
    paths: Arc<Paths>,
}

#[derive(Debug)]
struct Paths {
    file: PathBuf,
    marks: PathBuf,
    lock: PathBuf,
}

/// What `F.fence` holds.
#[derive(Default, Serialize, Deserialize)]
struct Side {
    marks: Marks,
    /// The number of the last named operation: `F.fence-next-N` is its content until it gets its
    /// name.
    next: u64,
}

impl FencedFile {
    /// The file at this path, which need not be there yet; its directory must be.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let file = path.into();
        let paths = Paths {
            marks: beside(&file, ".fence"),
            lock: beside(&file, ".fence-lock"),
            file,
        };
        Self {
            paths: Arc::new(paths),
        }
    }

    /// Forgets the marks below `below`, and admits nothing below it from now on.
    ///
    /// # Errors
    /// If the marks cannot be read or written.
    pub async fn prune(&self, below: FencingToken) -> Result<(), FenceError> {
        self.run(move |locked| {
            locked.side.marks.prune(below);
            locked.save()
        })
        .await
    }

    /// Does something under the lock, where blocking disturbs nobody.
    async fn run<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Locked) -> Result<T, FenceError> + Send + 'static,
    ) -> Result<T, FenceError> {
        let paths = Arc::clone(&self.paths);
        #[cfg(feature = "testing")]
        if point::is_polled() {
            // On a thread of its own it would go on while the test has the handler stand still.
            point::await_point().await;
            let done = Locked::take(paths).and_then(|mut locked| act(&mut locked));
            point::await_point().await;
            return done;
        }
        let done = tokio::task::spawn_blocking(move || act(&mut Locked::take(paths)?)).await;
        done.unwrap_or_else(|error| {
            let why = "the operation on the file panicked";
            Err(Error::new(ErrorKind::Unexpected, why)
                .caused_by(error)
                .into())
        })
    }
}

#[async_trait]
impl Fence for FencedFile {
    type Opened = OpenFile;

    async fn open(&self, scope: &Scope, token: FencingToken) -> Result<OpenFile, FenceError> {
        let opened = OpenFile {
            file: self.clone(),
            scope: scope.clone(),
            token,
        };
        let scope = scope.clone();
        self.run(move |locked| {
            let before = locked.side.marks.clone();
            locked.side.marks.open(&scope, token)?;
            // Opening again with the same token writes nothing.
            if locked.side.marks == before {
                return Ok(());
            }
            locked.save()
        })
        .await?;
        Ok(opened)
    }
}

/// A file that was opened under a token.
#[derive(Clone, Debug)]
pub struct OpenFile {
    file: FencedFile,
    scope: Scope,
    token: FencingToken,
}

impl OpenFile {
    /// The content; empty if the file is not there.
    ///
    /// # Errors
    /// If the file has been opened for a larger token since, or cannot be read.
    pub async fn read(&self) -> Result<Vec<u8>, FenceError> {
        let (scope, token) = (self.scope.clone(), self.token);
        self.file
            .run(move |locked| {
                locked.side.marks.read(&scope, token)?;
                locked.content()
            })
            .await
    }

    /// Replaces the content by what `change` makes of it, in one step.
    ///
    /// # Errors
    /// As [`read`](Self::read), or if the file cannot be written. After a refusal it is as it was.
    pub async fn write(
        &mut self,
        change: impl FnOnce(Vec<u8>) -> Vec<u8> + Send + 'static,
    ) -> Result<(), FenceError> {
        let (scope, token) = (self.scope.clone(), self.token);
        self.file
            .run(move |locked| {
                locked.side.marks.write(&scope, token)?;
                let content = change(locked.content()?);
                let (file, new) = (&locked.paths.file, beside(&locked.paths.file, ".fence-new"));
                write(&new, &content).map_err(|e| trouble(file, e))?;
                name(&new, file).map_err(|e| trouble(file, e))
            })
            .await
    }

    /// Replaces the content, once per token and operation; false if this token has done it before.
    ///
    /// # Errors
    /// As [`write`](Self::write), and if the operation's name is too long.
    pub async fn write_once(
        &mut self,
        operation: &str,
        change: impl FnOnce(Vec<u8>) -> Vec<u8> + Send + 'static,
    ) -> Result<bool, FenceError> {
        let (scope, token, operation) = (self.scope.clone(), self.token, operation.to_owned());
        self.file
            .run(move |locked| {
                if !locked.side.marks.write_once(&scope, token, &operation)? {
                    return Ok(false);
                }
                locked.side.next += 1;
                let content = change(locked.content()?);
                let next = locked.next();
                write(&next, &content).map_err(|e| trouble(&next, e))?;
                // From here on it is done, whatever happens.
                locked.save()?;
                name(&next, &locked.paths.file).map_err(|e| trouble(&next, e))?;
                Ok(true)
            })
            .await
    }
}

/// The lock, and the marks as they are under it.
struct Locked {
    paths: Arc<Paths>,
    side: Side,
    /// Unlocked when it is closed.
    _lock: File,
}

impl Locked {
    fn take(paths: Arc<Paths>) -> Result<Self, FenceError> {
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&paths.lock);
        let lock = lock.map_err(|e| trouble(&paths.lock, e))?;
        lock.lock().map_err(|e| trouble(&paths.lock, e))?;
        let side = match fs::read(&paths.marks) {
            Ok(side) => serde_json::from_slice(&side).map_err(|error| {
                let why = format!("{} holds no marks", paths.marks.display());
                Error::new(ErrorKind::Corrupt, why).caused_by(error)
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Side::default(),
            Err(error) => return Err(trouble(&paths.marks, error)),
        };
        let locked = Self {
            paths,
            side,
            _lock: lock,
        };
        locked.recover()?;
        Ok(locked)
    }

    /// Ends what a crash has interrupted.
    fn recover(&self) -> Result<(), FenceError> {
        let next = self.next();
        match name(&next, &self.paths.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done.map_err(|e| trouble(&next, e)),
        }
    }

    fn next(&self) -> PathBuf {
        let number = format!(".fence-next-{}", self.side.next);
        beside(&self.paths.file, &number)
    }

    fn content(&self) -> Result<Vec<u8>, FenceError> {
        match fs::read(&self.paths.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|e| trouble(&self.paths.file, e)),
        }
    }

    fn save(&self) -> Result<(), FenceError> {
        let marks = &self.paths.marks;
        let bytes = serde_json::to_vec(&self.side).map_err(|error| {
            Error::new(ErrorKind::Unexpected, "marks do not encode").caused_by(error)
        })?;
        let new = beside(marks, "-new");
        write(&new, &bytes).map_err(|e| trouble(&new, e))?;
        name(&new, marks).map_err(|e| trouble(marks, e))
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Writes a file that is on disk when this returns.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Gives a file its name, on disk when this returns.
fn name(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let parent = to.parent().filter(|path| !path.as_os_str().is_empty());
    // Directories cannot be opened everywhere; where they can, the new name must not be lost.
    match File::open(parent.unwrap_or(Path::new("."))) {
        Ok(dir) if cfg!(unix) => dir.sync_all(),
        _ => Ok(()),
    }
}

fn trouble(path: &Path, error: io::Error) -> FenceError {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::ReadOnly,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Full,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, format!("{} cannot be used", path.display()))
        .caused_by(error)
        .during(Verb::Fence)
        .into()
}
