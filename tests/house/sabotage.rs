//! The patches of `tests/sabotage` fit the code as it is. Whether a test notices each is for
//! `tests/sabotage/run`, which takes minutes.

use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Checks the patches of a folder, and returns whether all are sound and what was said.
fn checked(patches: &Path) -> (bool, String) {
    let mut check = Command::new("bash");
    check.args(["tests/sabotage/run", "--check"]).arg(patches);
    let output = check.current_dir(ROOT).output().expect("bash starts");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (output.status.success(), said)
}

#[test]
fn every_patch_applies_and_names_its_test() {
    let (sound, said) = checked(&Path::new(ROOT).join("tests/sabotage"));
    assert!(sound, "{said}");
}

#[test]
fn a_patch_that_has_rotted_is_found() {
    let headers =
        "# caught by: worker runs::nobody_wrote_this_test\n# what: It is for a file of old.\n";
    let change = "--- a/src/old.rs\n+++ b/src/old.rs\n@@ -1 +1 @@\n-old\n+new\n";
    for (text, found) in [
        (format!("{headers}{change}"), "rotten: does not apply"),
        (
            format!("{headers}{change}"),
            "rotten: there is no test worker",
        ),
        (change.to_owned(), "rotten: its first two lines"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rotten.patch"), text).unwrap();
        let (sound, said) = checked(folder.path());
        assert!(!sound && said.contains(found), "{said}");
    }
}
