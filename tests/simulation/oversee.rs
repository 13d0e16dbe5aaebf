//! Watches the handlers: I8, which no history of calls can show.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold::FencingToken;

use crate::net::LATENCY;
use crate::plan::TERMS;

/// Timers have milliseconds.
const ROUNDING: Duration = Duration::from_millis(5);

#[derive(Default)]
pub(crate) struct Overseer(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    leases: HashMap<FencingToken, Holding>,
    /// When a host was last thawed. It cannot have told anybody anything before that.
    thawed: HashMap<usize, Duration>,
    violations: Vec<String>,
    steps: u64,
}

struct Holding {
    guard: Duration,
    until: Duration,
}

impl Overseer {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A claim that was first sent at `sent` was answered.
    pub(crate) fn granted(
        &self,
        token: FencingToken,
        sent: Duration,
        term: Duration,
        granted: Duration,
    ) {
        let guard = TERMS.guard().min(term / 4);
        let until = sent + granted.saturating_sub(guard);
        self.lock().leases.insert(token, Holding { guard, until });
    }

    /// A renewal that was sent at `sent` was answered.
    pub(crate) fn renewed(&self, token: FencingToken, sent: Duration, granted: Duration) {
        if let Some(lease) = self.lock().leases.get_mut(&token) {
            lease.until = sent + granted.saturating_sub(lease.guard);
        }
    }

    pub(crate) fn thawed(&self, host: usize, now: Duration) {
        self.lock().thawed.insert(host, now);
    }

    /// A handler takes a step, and has or has not been told to stop.
    pub(crate) fn step(&self, host: usize, token: FencingToken, now: Duration, told: bool) {
        let mut seen = self.lock();
        seen.steps += 1;
        let thawed = seen.thawed.get(&host).copied();
        if told || thawed.is_some_and(|at| now <= at + LATENCY) {
            return;
        }
        let until = seen.leases.get(&token).map(|lease| lease.until);
        if let Some(until) = until.filter(|until| now > *until + ROUNDING) {
            let text = format!("I8 HolderNotTold token {token}: at {now:?}, not until {until:?}");
            seen.violations.push(text);
        }
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    pub(crate) fn steps(&self) -> u64 {
        self.lock().steps
    }
}
