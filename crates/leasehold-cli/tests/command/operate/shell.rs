//! Completions and the manual.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::operate::world::leasehold;

fn printed(args: &[&str]) -> String {
    let output = leasehold(args).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}");
    assert!(output.stderr.is_empty(), "{args:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn completions_know_the_commands_and_are_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        let script = printed(&["completions", shell]);
        for word in ["leases", "revoke", "expiring-within", "ungrouped"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        let check = Command::new(shell)
            .arg("-n")
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        // Not every machine has every shell.
        let Ok(mut child) = check else { continue };
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(script.as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success(),
            "{shell}: {}",
            crate::operate::world::stderr(&output)
        );
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let page = printed(&["man"]);
    for part in [
        ".TH leasehold 1",
        ".SH SYNOPSIS",
        "LEASEHOLD_URL",
        "Exit codes",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let dir = tempfile::tempdir().unwrap();
    printed(&["man", "--dir", dir.path().to_str().unwrap()]);
    for name in [
        "leasehold",
        "leasehold-stats",
        "leasehold-leases-revoke",
        "leasehold-jobs-show",
    ] {
        let page = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
        assert!(
            page.starts_with(".ie") && page.contains(".SH NAME"),
            "{name}: {page}"
        );
    }
}
