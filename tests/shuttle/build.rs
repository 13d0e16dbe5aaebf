//! Makes copies of `src/worker/held.rs` and `nap.rs`, with shuttle's locks and atomics in place of
//! the standard library's: the shipped code, and some with a flaw.

use std::{env, fs, path::Path};

const FENCE: &str = "../../src/worker/held.rs";
const NAP: &str = "../../src/worker/nap.rs";

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

/// The settler looks for what was left, and says then that it sleeps.
const LATE: (&str, &str) = (
    "self.asleep.store(true, Ordering::SeqCst);
        let left = left()?;",
    "let left = left();
        self.asleep.store(true, Ordering::SeqCst);
        let left = left?;",
);

/// Whoever leaves something does not wake the settler.
const QUIET: (&str, &str) = (
    "self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst)",
    "self.asleep.swap(false, Ordering::SeqCst) && false",
);

fn main() {
    let fence = copy("fence", FENCE);
    let nap = copy("nap", NAP);
    for (name, code, (right, wrong)) in [
        ("deaf", &fence, DEAF),
        ("twice", &fence, TWICE),
        ("late", &nap, LATE),
        ("quiet", &nap, QUIET),
    ] {
        let flawed = code.replace(right, wrong);
        assert_ne!(flawed, *code, "{name}: the line to be broken is not there");
        write(name, &flawed);
    }
}

fn copy(name: &str, shipped: &str) -> String {
    println!("cargo::rerun-if-changed={shipped}");
    let text = fs::read_to_string(shipped).expect("the shipped file");
    let code = text.split("#[cfg(test)]").next().expect("code, then tests");
    // What is included cannot begin with the documentation of a file.
    let lines = code.lines().filter(|line| !line.starts_with("//!"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let code = code.replace("std::sync::", "crate::sync::");
    assert!(!code.contains("std::sync"));
    write(name, &code);
    code
}

fn write(name: &str, code: &str) {
    let out = env::var_os("OUT_DIR").expect("set by cargo");
    fs::write(Path::new(&out).join(format!("{name}.rs")), code).expect("written");
}
