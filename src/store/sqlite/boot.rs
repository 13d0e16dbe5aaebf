//! When this machine was started, by its wall clock and by a clock that nobody can set.
//!
//! How long a machine has been up is counted by a clock of its own, so the moment of its start,
//! which is the wall time less the time it has been up, moves exactly when somebody sets the wall
//! clock. The first process that opens the file after a start writes that moment into the file, and
//! `doctor` compares it with the present one.

use std::fs;
use std::time::Duration;

use crate::clock::Timestamp;

/// One run of a machine, from its start.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Boot {
    /// Tells it from all others.
    pub(super) id: String,
    /// When it began, by the wall clock that shows `now`.
    pub(super) at: Timestamp,
}

/// None where the system does not say.
pub(super) fn boot(now: Timestamp) -> Option<Boot> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // A container can have been given another count of the same run.
    let counted_in = fs::read_link("/proc/self/ns/time").unwrap_or_default();
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let seconds = uptime.split(' ').next()?.parse().ok()?;
    let up = Duration::try_from_secs_f64(seconds).ok()?;
    Some(Boot {
        id: format!("{} {}", id.trim(), counted_in.display()),
        at: now.before(up),
    })
}
