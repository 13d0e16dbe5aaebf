//! Makes copies of `src/worker/held.rs` for the tests: the shipped code, and some with a flaw. The
//! file takes its locks and atomics from a module `sync` beside it, which has shuttle's here.

use std::{env, fs, path::Path};

const HELD: &str = "../../src/worker/held.rs";

/// Listening does not look whether there was a reason to stop before.
const DEAF: (&str, &str) = (
    "if self.stop.load(Ordering::SeqCst) != 0 && !signal.token.is_cancelled() {",
    "if false {",
);

/// Ending a lease looks first, and acts then.
const TWICE: (&str, &str) = (
    "!self.ended.swap(true, Ordering::AcqRel)",
    "{ let was = self.has_ended(); self.ended.store(true, Ordering::Release); !was }",
);

fn main() {
    println!("cargo::rerun-if-changed={HELD}");
    let text = fs::read_to_string(HELD).expect("the shipped file");
    let code = text.split("#[cfg(test)]").next().expect("code, then tests");
    // What is included cannot begin with the documentation of a file.
    let lines = code.lines().filter(|line| !line.starts_with("//!"));
    let code = lines.collect::<Vec<_>>().join("\n");
    assert!(!code.contains("std::sync"), "{HELD} has a lock past `sync`");
    write("held", &code);
    for (name, (right, wrong)) in [("deaf", DEAF), ("twice", TWICE)] {
        let flawed = code.replace(right, wrong);
        assert_ne!(flawed, code, "{name}: the line to be broken is not there");
        write(name, &flawed);
    }
}

fn write(name: &str, code: &str) {
    let out = env::var_os("OUT_DIR").expect("set by cargo");
    fs::write(Path::new(&out).join(format!("{name}.rs")), code).expect("written");
}
