//! Calling a store so that repeats are safe: a session names this process, a lane numbers its calls,
//! and a merger lets callers that ask at the same time share one call.

pub(crate) mod enqueue;
pub(crate) mod lane;
pub(crate) mod merge;
