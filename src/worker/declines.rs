//! Declining: hand back what this worker cannot work, at a pace, and warn of it once a minute.
//!
//! In a rolling deploy a job of a new kind, or with a new payload, meets old workers first. Each of
//! them declines it, and the store keeps since when: [`put_off`] turns that into a delay. A worker
//! that declines many jobs spreads them out, so that a queue full of jobs that no worker knows does
//! not keep the store busy.
//!
//! Before: [`decide`](super::outcome::decide) found that the job cannot be worked here. After: the
//! [settler](super::settler) hands it back.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::pool::Pool;
use crate::calls::lane::spread;
use crate::clock::monotonic;
use crate::job::{JobRecord, Kind, QueueName};
use crate::lease::DeclineCause;
use crate::observe::{Event, metrics};
use crate::store::Outcome;

/// A declined job comes back after a twentieth of the time for which it has been declined. With one
/// new worker among ten, a try fails nine times out of ten: delays that grew by a ninth or more
/// from try to try would have no finite mean. By a twentieth, the mean wait is 1.0 s.
const SHARE: u32 = 20;
/// But not sooner: ten tries a second are enough.
const SOONEST: Duration = Duration::from_millis(100);
/// And not later: a worker that knows the job may have come.
const LATEST: Duration = Duration::from_secs(30);

/// The pace of one worker: one declined job comes back every so often, 200 a second.
const PACE: Duration = Duration::from_millis(5);
/// The pace is exceeded rather than a job be put off for longer: a million jobs of an unknown kind
/// are the fault of a deploy, too, and the next deploy corrects it.
const LONGEST_LINE: Duration = Duration::from_secs(300);

/// A worker that has declined a job lately comes to what falls due by up to this much later than
/// others: workers that wake at one moment tend to come in one order, and a job would meet the same
/// one again and again. With nine old workers and one new, the mean wait falls from about 1 s to
/// 0.1 s in memory, 2 s to 0.2 or 0.4 s on SQLite, 0.9 s to 0.2 s on Redis, 1.0 s to 0.3 or 0.6 s
/// on PostgreSQL (`tests/fault/deploy.rs`).
const STEP_BACK: Duration = Duration::from_millis(50);
/// How long ago that may be: longer than any of its jobs is put off for its age.
const LATELY: Duration = Duration::from_secs(60);

/// How often a worker warns of one kind.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// How long a job is put off that has been declined for this long.
pub(crate) fn put_off(declined_for: Duration) -> Duration {
    (declined_for / SHARE).clamp(SOONEST, LATEST)
}

/// Declines one more job: chooses its delay, counts it, and tells the observers.
pub(crate) fn decline(
    pool: &Pool,
    (queue, job): (&QueueName, &JobRecord),
    cause: DeclineCause,
    outcome: &mut Outcome,
) {
    let Outcome::Decline { delay, reason } = outcome else {
        return;
    };
    let now = monotonic();
    *delay = pool.declines.paced(*delay, now);
    pool.declines.warn(queue, &job.kind, reason, now);
    metrics::declined(queue, cause);
    pool.observers.emit(|| Event::Declined {
        queue,
        job,
        cause,
        why: reason,
        delay: *delay,
    });
}

/// What a worker remembers of the jobs that it declined.
#[derive(Debug, Default)]
pub(crate) struct Declines(Mutex<Recent>);

#[derive(Debug, Default)]
struct Recent {
    last: Option<Instant>,
    /// When the last of the declined jobs comes back, at this worker's pace.
    line_ends: Option<Instant>,
    kinds: HashMap<Kind, Warned>,
}

#[derive(Debug)]
struct Warned {
    at: Instant,
    /// Jobs declined since.
    since: u64,
}

impl Declines {
    /// The delay of one more declined job, at this worker's pace.
    fn paced(&self, delay: Duration, now: Instant) -> Duration {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.last = Some(now);
        let line = recent.line_ends.unwrap_or(now);
        let wait = line.saturating_duration_since(now).min(LONGEST_LINE);
        recent.line_ends = Some(now + wait + PACE);
        delay.max(wait)
    }

    /// How much longer the claimer sleeps, to let others come first.
    pub(crate) fn step_back(&self, now: Instant) -> Duration {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner).last;
        let lately = last.filter(|last| now < *last + LATELY);
        lately.map_or(Duration::ZERO, |_| spread(STEP_BACK))
    }

    /// Warns of a declined job, or counts it for the next warning of its kind.
    fn warn(&self, queue: &QueueName, kind: &Kind, why: &str, now: Instant) {
        let Some(jobs) = self.counted(kind, now) else {
            return;
        };
        tracing::warn!(
            %queue, %kind, jobs, why,
            "declined: this worker cannot work these jobs, and leaves them to others"
        );
    }

    /// How many jobs of a kind a warning is due for. None: not yet.
    fn counted(&self, kind: &Kind, now: Instant) -> Option<u64> {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(warned) = recent.kinds.get_mut(kind) {
            warned.since += 1;
            if now < warned.at + WARN_EVERY {
                return None;
            }
            let jobs = std::mem::take(&mut warned.since);
            warned.at = now;
            return Some(jobs);
        }
        // Any producer can invent kinds, so only those of the last minute are remembered.
        let is_recent = |warned: &Warned| now < warned.at + WARN_EVERY;
        recent.kinds.retain(|_, warned| is_recent(warned));
        let warned = Warned { at: now, since: 0 };
        recent.kinds.insert(kind.clone(), warned);
        Some(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_nobody_knows_costs_ever_less() {
        let delay = |seconds| put_off(Duration::from_secs(seconds));
        assert_eq!(delay(0), SOONEST);
        assert_eq!(delay(2), SOONEST);
        assert_eq!(delay(60), Duration::from_secs(3));
        assert_eq!(delay(600), LATEST);
        assert_eq!(delay(1 << 40), LATEST);
    }

    /// The mean over the ways in which the tries can go, when each of them fails nine times in ten.
    #[test]
    fn beside_nine_old_workers_and_one_new_the_mean_wait_is_bounded() {
        let (mut mean, mut left, mut waited) = (0.0, 1.0, Duration::ZERO);
        for _ in 0..1_000 {
            let delay = put_off(waited);
            left *= 0.9;
            mean += left * delay.as_secs_f64();
            waited += delay;
        }
        assert!((0.9..1.1).contains(&mean), "{mean}");
    }

    #[tokio::test(start_paused = true)]
    async fn many_declines_are_spread_out_and_few_are_not() {
        let (declines, now) = (Declines::default(), monotonic());
        let delays: Vec<_> = (0..20_000).map(|_| declines.paced(SOONEST, now)).collect();
        assert_eq!(delays[..20], [SOONEST; 20]);
        assert_eq!(delays[19_999], 19_999 * PACE);
        // What comes back at the pace is put off as if it were alone.
        let later = now + 20_000 * PACE;
        assert_eq!(declines.paced(SOONEST, later), SOONEST);
        for _ in 0..1_000_000 {
            assert!(declines.paced(SOONEST, later) <= LONGEST_LINE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_steps_back_while_it_declines_and_not_before_or_long_after() {
        let (declines, now) = (Declines::default(), monotonic());
        let steps_back = |at| (0..100).any(|_| declines.step_back(at) > Duration::ZERO);
        assert!(!steps_back(now));
        declines.paced(SOONEST, now);
        assert!(steps_back(now + LATEST));
        assert!(!steps_back(now + LATELY));
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_is_warned_of_once_a_minute_with_its_count() {
        let (declines, start) = (Declines::default(), monotonic());
        let [new, newer] = ["new", "newer"].map(|name| Kind::new(name).unwrap());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(declines.counted(&new, at(0)), Some(1));
        assert_eq!(declines.counted(&newer, at(0)), Some(1));
        for second in 1..60 {
            assert_eq!(declines.counted(&new, at(second)), None);
        }
        assert_eq!(declines.counted(&new, at(60)), Some(60));
        assert_eq!(declines.counted(&new, at(61)), None);
    }
}
