//! Calling a store so that repeats are safe.
//!
//! A [session](session) names this process to the store, a [lane](lane) numbers the calls of one
//! component and repeats them until they are answered, and a [merger](merge) lets callers that ask
//! at the same time share one call.

pub(crate) mod checkpoint;
pub(crate) mod enqueue;
pub(crate) mod lane;
pub(crate) mod merge;
pub(crate) mod session;
