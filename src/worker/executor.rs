//! Where background parts run.
//!
//! The renewer must not share a thread with handlers. A simulation must have everything on one
//! thread, on virtual time. So the caller who starts a pool can say where its renewer runs.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;

/// A background part, to be run until it is dropped or ends.
pub type Background = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs background parts.
pub trait Executor: Send + Sync + fmt::Debug + 'static {
    /// Starts running `part`. `name` is for people.
    ///
    /// # Errors
    /// If it cannot be started.
    fn start(&self, name: &str, part: Background) -> io::Result<()>;
}

/// A thread for each part, with a runtime of its own. The default.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnThread;

impl Executor for OwnThread {
    fn start(&self, name: &str, part: Background) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let runtime = Unblocking(Some(runtime));
        let run = move || runtime.0.as_ref().map(|runtime| runtime.block_on(part));
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map(drop)
    }
}

/// A runtime that may be dropped where nothing may block. If its thread does not start, it is
/// dropped by the caller, which is mostly a task.
struct Unblocking(Option<tokio::runtime::Runtime>);

impl Drop for Unblocking {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A task on the runtime that is there: for simulations on virtual time.
#[derive(Clone, Copy, Debug, Default)]
pub struct SameRuntime;

impl Executor for SameRuntime {
    fn start(&self, _name: &str, part: Background) -> io::Result<()> {
        tokio::spawn(part);
        Ok(())
    }
}

/// Runs a part on an executor, and stops it when the returned guard is dropped.
pub(crate) fn start(
    executor: &dyn Executor,
    name: &str,
    part: impl Future<Output = ()> + Send + 'static,
) -> io::Result<tokio_util::sync::DropGuard> {
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    executor.start(
        name,
        Box::pin(async move {
            tokio::select! {
                biased;
                () = stopped.cancelled() => {}
                () = part => {}
            }
        }),
    )?;
    Ok(stop.drop_guard())
}
