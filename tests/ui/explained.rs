//! What the compiler says to a newcomer. The texts are pinned: a change of the API that makes one
//! of them worse should be seen.
//!
//! They are those of the current stable compiler. After a compiler update that words them
//! differently: `TRYBUILD=overwrite ./tests/run --only compile-errors`, and read the difference.

#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("cases/*.rs");
}
