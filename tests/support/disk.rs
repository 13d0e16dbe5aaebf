//! A small disk in memory, to run full. Root makes one; others are told that the test was not run.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const PAGE: usize = 4_096;

/// Unmounted when it goes, also with a test that fails.
pub struct SmallDisk {
    at: PathBuf,
}

/// Says that a case did not run, or fails if it must.
fn not_run(case: &str, needs: &str, why: &str) {
    let required = std::env::var("LEASEHOLD_REQUIRE").unwrap_or_default();
    let required = required.split(',').any(|name| name == needs);
    assert!(!required, "{case}: {why}, and {needs} is required");
    // Past the harness, which keeps what a test prints to itself.
    let _ = writeln!(std::io::stderr().lock(), "{case}: ignored, {why}");
}

impl SmallDisk {
    /// A disk for a case, which is said to be ignored if there can be none, and fails if it has to
    /// run.
    pub fn for_case(case: &str, at: &Path, size: &str) -> Option<Self> {
        let disk = Self::mount(at, size);
        if disk.is_none() {
            not_run(case, "tmpfs", "no right to mount a small disk");
        }
        disk
    }

    /// A disk of this size over a directory. None: no right to mount one.
    fn mount(at: &Path, size: &str) -> Option<Self> {
        let disk = Self { at: at.to_owned() };
        if disk.mount_with(&format!("size={size}")) {
            return Some(disk);
        }
        std::mem::forget(disk);
        None
    }

    fn mount_with(&self, options: &str) -> bool {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "leasehold-fault"]);
        let mounted = mount.arg(&self.at).output();
        mounted.is_ok_and(|out| out.status.success())
    }

    pub fn grow(&self, size: &str) {
        assert!(self.mount_with(&format!("remount,size={size}")));
    }

    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Takes all the room but so many pages.
    pub fn fill(&self, leave: usize) -> Ballast {
        let path = self.at.join("ballast");
        let mut file = File::create(&path).unwrap();
        while file.write_all(&[0; PAGE]).is_ok() {}
        let pages = file.metadata().unwrap().len() as usize / PAGE;
        file.set_len(((pages - leave) * PAGE) as u64).unwrap();
        Ballast(file)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

/// What takes the room on a full disk.
pub struct Ballast(File);

impl Ballast {
    /// Gives the room back. Not by removing the file: while another test starts a process, that one
    /// has it open, too.
    pub fn drop_all(self) {
        self.0.set_len(0).unwrap();
    }
}
