//! Layers: what is done around every run of a worker's handlers.
//!
//! A [`Layer`] sees the [`Context`] before the handler does and the result after it. It can log,
//! measure, set something up, turn a job away, or change what its failure means:
//!
//! ```
//! use leasehold::layer::{Layer, Next};
//! use leasehold::{Context, Failure, async_trait};
//!
//! struct Timed;
//!
//! #[async_trait]
//! impl Layer for Timed {
//!     async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
//!         let start = std::time::Instant::now();
//!         let result = next.run().await;
//!         println!("{} took {:?}, ok: {}", ctx.job().kind, start.elapsed(), result.is_ok());
//!         result
//!     }
//! }
//! ```
//!
//! Layers run inside the lease, as part of the handler: a timeout, a lost lease and a panic end
//! them with it. Whatever a layer does after [`Next::run`] is not done if the handler is dropped.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::context::Context;
use crate::handler::{AnyHandler, Failure, Running};

#[cfg(feature = "tower")]
mod tower;
#[cfg(feature = "tower")]
pub use self::tower::{Run, RunError, RunService, Tower};

/// Wraps every run of a worker's handlers. Given to [`Worker::layer`](crate::Worker::layer).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a layer",
    note = "a layer is a type with `#[async_trait] impl leasehold::layer::Layer for …`",
    note = "a `tower` layer becomes one by `leasehold::layer::Tower::new`, with the feature `tower`"
)]
#[async_trait]
pub trait Layer: Send + Sync + 'static {
    /// Runs what is inside by [`next.run()`](Next::run), or does not: what this returns is what the
    /// job is settled by.
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure>;
}

#[async_trait]
impl<L: Layer + ?Sized> Layer for Arc<L> {
    async fn run(&self, ctx: &Context, next: Next) -> Result<(), Failure> {
        (**self).run(ctx, next).await
    }
}

/// What is inside of a layer: the layers after it, and the handler.
#[must_use = "the handler does not run until `run` is called"]
pub struct Next {
    ctx: Context,
    chain: Arc<Chain>,
    /// How many layers are outside of it.
    depth: usize,
}

impl Next {
    /// The lease under which it will run.
    pub fn context(&self) -> &Context {
        &self.ctx
    }

    /// Runs it.
    ///
    /// # Errors
    /// The handler's, or what an inner layer made of it.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { ctx, chain, depth } = self;
        if let Some(layer) = chain.layers.get(depth) {
            let next = Self {
                ctx: ctx.clone(),
                chain: Arc::clone(&chain),
                depth: depth + 1,
            };
            layer.run(&ctx, next).await
        } else {
            chain.handler.start(ctx)?.await
        }
    }
}

impl fmt::Debug for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Next")
            .field("ctx", &self.ctx)
            .field("layers", &(self.chain.layers.len() - self.depth))
            .finish_non_exhaustive()
    }
}

struct Chain {
    layers: Arc<[Arc<dyn Layer>]>,
    handler: Box<dyn AnyHandler>,
}

/// A handler inside of layers.
pub(crate) struct Layered(Arc<Chain>);

impl Layered {
    /// The handler itself if there are no layers: a run then costs nothing more.
    pub(crate) fn around(
        handler: Box<dyn AnyHandler>,
        layers: &Arc<[Arc<dyn Layer>]>,
    ) -> Box<dyn AnyHandler> {
        if layers.is_empty() {
            return handler;
        }
        let layers = Arc::clone(layers);
        Box::new(Self(Arc::new(Chain { layers, handler })))
    }
}

impl AnyHandler for Layered {
    fn start(&self, ctx: Context) -> Result<Running<'_>, Failure> {
        let chain = Arc::clone(&self.0);
        let depth = 0;
        Ok(Box::pin(Next { ctx, chain, depth }.run()))
    }
}
