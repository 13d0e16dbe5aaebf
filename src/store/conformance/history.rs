//! History.
