//! What is written twice is the same twice, and what is listed is there.

use std::path::Path;

/// Two packages of one name, for two versions of sqlx. They differ in `statement.rs` and in their
/// manifests. A link would do, but not every checkout has links.
#[test]
fn the_crates_for_sqlx_0_8_and_0_9_have_one_text() {
    let ours = include_str!("../../crates/leasehold-sqlx/src/lib.rs");
    let copy = include_str!("../../crates/leasehold-sqlx-0.8/src/lib.rs");
    assert!(
        ours == copy,
        "copy crates/leasehold-sqlx/src/lib.rs to crates/leasehold-sqlx-0.8/src/lib.rs"
    );
}

/// A file that has moved would silently have no mutants.
#[test]
fn the_files_that_get_mutants_exist() {
    let lists = [
        include_str!("../../.cargo/mutants.toml"),
        include_str!("../../.cargo/mutants-servers.toml"),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for list in lists {
        let files: Vec<&str> = list
            .split('"')
            .filter(|of| of.starts_with("src/"))
            .collect();
        assert!(files.len() > 5, "{list}");
        for file in files {
            assert!(root.join(file).is_file(), "{file} is not there");
        }
    }
}
