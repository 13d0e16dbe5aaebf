//! Calling the `on_dead` hooks of a worker, without holding up its work.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::observe::{Death, Event, Observer};

/// A user's hook, called with each death.
pub(super) type DeathHook =
    Box<dyn Fn(Death) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// The deaths that a worker sees, on their way to its hooks.
pub(super) struct Deaths {
    hooks: Vec<DeathHook>,
    sender: UnboundedSender<Death>,
    receiver: UnboundedReceiver<Death>,
}

impl Deaths {
    /// None if there are no hooks.
    pub(super) fn told_to(hooks: Vec<DeathHook>) -> Option<Self> {
        let (sender, receiver) = unbounded_channel();
        (!hooks.is_empty()).then_some(Self {
            hooks,
            sender,
            receiver,
        })
    }

    /// Passes on the deaths that the worker sees. It is called from the worker's own tasks, and
    /// never waits.
    pub(super) fn observer(&self) -> Arc<dyn Observer> {
        let sender = self.sender.clone();
        Arc::new(move |event: &Event<'_>| {
            if let Event::Dead { death } = event {
                // Nobody listens once the worker has drained.
                let _ = sender.send((*death).clone());
            }
        })
    }

    /// Calls every hook with every death, until `ended` and all calls are done. A hook that panics
    /// ends its own call only.
    pub(super) async fn call(mut self, ended: CancellationToken) {
        let mut calls = JoinSet::new();
        let mut open = true;
        loop {
            tokio::select! {
                biased;
                Some(death) = self.receiver.recv() => {
                    for hook in &self.hooks {
                        calls.spawn(hook(death.clone()));
                    }
                }
                Some(_) = calls.join_next() => {}
                () = ended.cancelled(), if open => {
                    open = false;
                    self.receiver.close();
                }
                else => return,
            }
        }
    }
}
