//! What the SQL stores share: how grants and first answers are written, and what inspections show.
//! How they find and change rows is each engine's own.

pub(crate) mod answer;
pub(crate) mod cursor;
pub(crate) mod grant;
#[cfg(feature = "postgres")]
pub(crate) mod statements;
pub(crate) mod view;
