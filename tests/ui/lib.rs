//! What the compiler says to a newcomer: see `explained.rs`.
