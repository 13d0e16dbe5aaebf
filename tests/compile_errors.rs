//! What the compiler says to a newcomer. The texts are pinned: a change of the API that makes one
//! of them worse should be seen.
//!
//! They are those of the current stable compiler. After a compiler update that words them
//! differently: `TRYBUILD=overwrite cargo test --test compile_errors`, and read the difference.

// Every dependency of every enabled feature is checked again for it: not with all of them at once.
// `./tests/run --campaign` and plain `cargo test` run it.
#![cfg(not(feature = "cli"))]

#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
