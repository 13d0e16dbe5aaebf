//! A lease that its handler ends itself, together with its effect.

use crate::context::Context;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Verdict;
use crate::store::Store;
use crate::worker::held::HeldLease;

/// A lease whose end is being written. A renewal that sees the committed end must not take it for a
/// loss; if it comes to nothing, also because the handler was dropped, the lease is taken back.
pub(crate) struct Ending<'c> {
    ctx: &'c Context,
    over: bool,
}

impl<'c> Ending<'c> {
    pub(crate) fn of(ctx: &'c Context) -> Self {
        ctx.lease().hand_in();
        Self { ctx, over: false }
    }

    fn lease(&self) -> &HeldLease {
        self.ctx.lease()
    }

    /// The end is committed.
    pub(crate) fn committed(mut self, verdict: Verdict) {
        self.over = true;
        self.lease().complete(verdict);
        self.ctx.pool().end(&self.ctx.held, self.ctx.index);
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.lease().take_back();
        }
    }
}

/// The store as its own type.
pub(crate) fn native<'s, S: 'static>(store: &'s dyn Store, engine: &str) -> Result<&'s S> {
    let native = store.native().and_then(|native| native.downcast_ref());
    native.ok_or_else(|| {
        let store = store.name();
        let why = format!("the store is {store}, and this is for {engine}");
        Error::new(ErrorKind::Unsupported, why)
    })
}
