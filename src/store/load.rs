//! What a store's server has done so far: the difference between two readings is the cost of a run.

use std::time::Duration;

/// Counters of a server since it started. What it does not tell is missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerLoad {
    /// CPU time, in user and system mode together.
    pub cpu: Option<Duration>,
    /// Requests of its clients.
    pub requests: Option<u64>,
    /// Commands it ran, those inside scripts included.
    pub commands: Option<u64>,
    /// Transactions that wrote something.
    pub writes: Option<u64>,
}

impl ServerLoad {
    /// What was added since an earlier look.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        fn both<T>(now: Option<T>, then: Option<T>, minus: fn(T, T) -> T) -> Option<T> {
            now.zip(then).map(|(now, then)| minus(now, then))
        }
        Self {
            cpu: both(self.cpu, earlier.cpu, Duration::saturating_sub),
            requests: both(self.requests, earlier.requests, u64::saturating_sub),
            commands: both(self.commands, earlier.commands, u64::saturating_sub),
            writes: both(self.writes, earlier.writes, u64::saturating_sub),
        }
    }
}

/// A process as the kernel describes it.
#[derive(Clone, Copy, Debug)]
pub struct ProcessStat {
    /// Its parent.
    pub parent: u32,
    /// CPU time of its own.
    pub own: Duration,
    /// CPU time of its children that have ended and were waited for.
    pub reaped: Duration,
}

impl ProcessStat {
    /// None if there is no such process, or no such kernel.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name before the last bracket may hold spaces and brackets.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        // The kernel counts in hundredths of a second on every system that Rust runs on.
        let ticks = |at| Some(Duration::from_millis(10 * (number(at)? + number(at + 1)?)));
        Some(Self {
            parent: number(1)? as u32,
            own: ticks(11)?,
            reaped: ticks(13)?,
        })
    }

    /// The CPU time of a process and of all its children, living or not.
    #[cfg(feature = "postgres")]
    pub(crate) fn of_family(pid: u32) -> Option<Duration> {
        let head = Self::of(pid)?;
        let processes = std::fs::read_dir("/proc").ok()?;
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let children = pids.filter_map(Self::of).filter(|stat| stat.parent == pid);
        Some(
            head.own
                + head.reaped
                + children
                    .map(|stat| stat.own + stat.reaped)
                    .sum::<Duration>(),
        )
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_computes_uses_cpu_time() {
        let pid = std::process::id();
        let before = ProcessStat::of(pid).unwrap();
        let mut n = 0_u64;
        while ProcessStat::of(pid).unwrap().own < before.own + Duration::from_millis(30) {
            n = std::hint::black_box(n + 1);
        }
        assert!(ProcessStat::of(0).is_none() && before.parent > 0);
    }
}
