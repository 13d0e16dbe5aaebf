//! What the compiler says to a newcomer. The texts are pinned: a change of the API that makes one
//! of them worse should be seen.
//!
//! They are those of the current stable compiler. After a compiler update that words them
//! differently: `TRYBUILD=overwrite cargo test --test compile_errors`, and read the difference.

#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
