//! What the handlers and layers of a worker share: given once, found by its type.
//!
//! A function takes it as an argument, [`State`]; other handlers and layers ask
//! [`Context::state`]. A worker knows before it starts what its functions take, and does not start
//! without it.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;

use crate::context::Context;
use crate::handler::Failure;

/// A handler's argument: what [`Worker::state`](crate::Worker::state) was given of this type.
///
/// Each run gets a clone, as cheap as that of a connection pool. Anything else is best shared
/// as `State<Arc<T>>`, and given as `Arc::new(…)`. A worker that was not given what one of its
/// handlers takes does not start.
///
/// ```
/// use std::sync::Arc;
/// use leasehold::{Client, Context, Failure, State};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)] struct Charge { cents: u64 }
/// # impl leasehold::Job for Charge { const KIND: &'static str = "charge"; }
/// struct Prices { least: u64 }
///
/// async fn charge(
///     job: Charge,
///     ctx: Context,
///     State(prices): State<Arc<Prices>>,
/// ) -> Result<(), Failure> {
///     if job.cents < prices.least {
///         return Err(Failure::bury("too little to charge"));
///     }
///     Ok(())
/// }
///
/// # async fn example(client: Client) {
/// let worker = client.worker().handle(charge).state(Arc::new(Prices { least: 50 }));
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct State<T>(pub T);

/// What a function can take after a job and its context: [`State`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an argument of a handler",
    label = "takes an argument that is neither the job, nor its context, nor a `State<…>`",
    note = "what handlers share is given to the worker with `.state(…)`,",
    note = "and taken as `State(it): leasehold::State<{Self}>`"
)]
pub trait Argument: Send + Sized {
    /// What the worker must have been given.
    #[doc(hidden)]
    fn needed() -> StateType;

    /// The argument for one run.
    #[doc(hidden)]
    fn of(ctx: &Context) -> Result<Self, Failure>;
}

impl<T: Clone + Send + Sync + 'static> Argument for State<T> {
    fn needed() -> StateType {
        StateType::of::<T>()
    }

    fn of(ctx: &Context) -> Result<Self, Failure> {
        ctx.state().cloned().map(Self)
    }
}

/// A type that a handler takes as [`State`].
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct StateType {
    id: TypeId,
    pub(crate) name: &'static str,
}

impl StateType {
    fn of<T: 'static>() -> Self {
        Self {
            id: TypeId::of::<T>(),
            name: type_name::<T>(),
        }
    }
}

/// What the handlers of a worker share, by type.
#[derive(Default)]
pub(crate) struct StateMap(HashMap<TypeId, Box<dyn Any + Send + Sync>>);

impl StateMap {
    pub(crate) fn insert<T: Send + Sync + 'static>(&mut self, state: T) {
        self.0.insert(TypeId::of::<T>(), Box::new(state));
    }

    pub(crate) fn get<T: 'static>(&self) -> Option<&T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref()
    }

    pub(crate) fn has(&self, needed: StateType) -> bool {
        self.0.contains_key(&needed.id)
    }
}
