//! Makes three copies of `src/lifecycle/fence.rs`, with shuttle's locks and atomics in place of the
//! standard library's: the shipped code, and two with a flaw.

use std::{env, fs, path::Path};

const SHIPPED: &str = "../../src/lifecycle/fence.rs";

/// Listening does not look whether there was a reason to stop before.
const DEAF: (&str, &str) = (
    "if self.stop.load(Ordering::SeqCst) != 0 && !bell.token.is_cancelled() {",
    "if false {",
);

/// Ending a lease looks first, and acts then.
const TWICE: (&str, &str) = (
    "!self.ended.swap(true, Ordering::AcqRel)",
    "{ let was = self.has_ended(); self.ended.store(true, Ordering::Release); !was }",
);

fn main() {
    println!("cargo::rerun-if-changed={SHIPPED}");
    let text = fs::read_to_string(SHIPPED).expect("the shipped file");
    let (code, _tests) = text.split_once("#[cfg(test)]").expect("code, then tests");
    // What is included cannot begin with the documentation of a file.
    let lines = code.lines().filter(|line| !line.starts_with("//!"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let code = code.replace("std::sync::", "crate::sync::");
    assert!(!code.contains("std::sync"));
    let out = env::var_os("OUT_DIR").expect("set by cargo");
    let write = |name: &str, code: &str| fs::write(Path::new(&out).join(name), code).expect(name);
    write("shipped.rs", &code);
    for (name, (right, wrong)) in [("deaf.rs", DEAF), ("twice.rs", TWICE)] {
        let flawed = code.replace(right, wrong);
        assert_ne!(flawed, code, "{name}: the line to be broken is not there");
        write(name, &flawed);
    }
}
