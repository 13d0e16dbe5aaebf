//! Layers of `tower` around the runs of a worker.

use std::error::Error as StdError;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context as Poller, Poll};

use async_trait::async_trait;
use tower_layer::Layer as TowerLayer;
use tower_service::Service;

use super::{Layer, Next};
use crate::context::Context;
use crate::handler::Failure;

type BoxError = Box<dyn StdError + Send + Sync>;

/// A layer of `tower` as a [`Layer`]: rate limits, concurrency limits, tracing and the like.
///
/// The stack is built once, and its service cloned for each run, so that limits are those of the
/// whole worker. The request is a [`Run`], the response `()`.
pub struct Tower<S>(Mutex<S>);

impl<S> Tower<S> {
    /// Builds the stack.
    pub fn new<L: TowerLayer<RunService, Service = S>>(layer: L) -> Self {
        Self(Mutex::new(layer.layer(RunService)))
    }
}

impl<S> fmt::Debug for Tower<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tower").finish_non_exhaustive()
    }
}

#[async_trait]
impl<S> Layer for Tower<S>
where
    S: Service<Run, Response = ()> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError> + Send,
{
    async fn run(&self, _: &Context, next: Next) -> Result<(), Failure> {
        let mut service = (self.0.lock().unwrap_or_else(PoisonError::into_inner)).clone();
        let ran = match poll_fn(|cx| service.poll_ready(cx)).await {
            Ok(()) => service.call(Run(next)).await,
            Err(error) => Err(error),
        };
        ran.map_err(|error| match error.into().downcast::<RunError>() {
            Ok(error) => error.0,
            Err(other) => Failure::from(other),
        })
    }
}

/// One run of a handler, as a request.
#[derive(Debug)]
pub struct Run(Next);

impl Run {
    /// The lease under which it runs.
    pub fn context(&self) -> &Context {
        self.0.context()
    }
}

/// The innermost service of a stack: it runs the handler.
#[derive(Clone, Copy, Debug)]
pub struct RunService;

impl Service<Run> for RunService {
    type Response = ();
    type Error = RunError;
    type Future = Pin<Box<dyn Future<Output = Result<(), RunError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Poller<'_>) -> Poll<Result<(), RunError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, run: Run) -> Self::Future {
        Box::pin(async move { run.0.run().await.map_err(RunError) })
    }
}

/// A [`Failure`] as an error, for layers that want one. What the handler wished for is kept.
#[derive(Debug)]
pub struct RunError(Failure);

impl RunError {
    /// What the handler failed with.
    pub fn failure(&self) -> &Failure {
        &self.0
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.reason())
    }
}

impl StdError for RunError {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::{Client, Job};

    #[derive(Serialize, Deserialize)]
    struct Try(u32);

    impl Job for Try {
        const KIND: &'static str = "try";
    }

    /// Counts calls, and makes the errors of what is inside into boxed ones, as layers do.
    #[derive(Clone)]
    struct Counting<S>(S, Arc<AtomicUsize>);

    impl<S> Service<Run> for Counting<S>
    where
        S: Service<Run, Response = (), Error = RunError>,
        S::Future: Send + 'static,
    {
        type Response = ();
        type Error = BoxError;
        type Future = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

        fn poll_ready(&mut self, cx: &mut Poller<'_>) -> Poll<Result<(), BoxError>> {
            self.0.poll_ready(cx).map_err(Into::into)
        }

        fn call(&mut self, run: Run) -> Self::Future {
            self.1
                .fetch_add(run.context().attempt() as usize, Ordering::SeqCst);
            let inner = self.0.call(run);
            Box::pin(async move { inner.await.map_err(Into::into) })
        }
    }

    #[tokio::test]
    async fn a_stack_of_tower_wraps_runs_and_keeps_their_wishes() {
        let client = Client::open("memory:").await.unwrap();
        client.enqueue_many([Try(1), Try(2)]).await.unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        let layer = tower_layer::layer_fn(move |inner| Counting(inner, Arc::clone(&count)));
        let handler = |job: Try, _: Context| async move {
            match job.0 {
                1 => Ok(()),
                _ => Err(Failure::bury("never again")),
            }
        };
        let worker = client.worker().handle(handler).layer(Tower::new(layer));
        let worker = worker.start().unwrap();
        while client.ledger().await.unwrap().released() < 2 {
            tokio::task::yield_now().await;
        }
        worker.drain();
        worker.await.unwrap();
        let ledger = client.ledger().await.unwrap();
        assert_eq!((ledger.completed, ledger.buried), (1, 1));
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }
}
