//! Wake-ups inside one process: who sleeps on which queues.
//!
//! One ready job wakes one sleeper, not all of them. A sleeper that has given up is passed over,
//! so that its wake-up goes to one that still waits.

use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;

use crate::job::QueueName;

/// The sleepers of one store handle.
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    sleepers: Mutex<Vec<Sleeper>>,
}

#[derive(Debug)]
struct Sleeper {
    queues: Vec<QueueName>,
    suspects: bool,
    wakeup: oneshot::Sender<()>,
}

impl Wakers {
    /// Adds a sleeper. It is woken by dropping or answering the returned receiver's other end.
    pub(crate) fn sleep(&self, queues: &[QueueName], suspects: bool) -> oneshot::Receiver<()> {
        let (wakeup, woken) = oneshot::channel();
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        sleepers.retain(|sleeper| !sleeper.wakeup.is_closed());
        sleepers.push(Sleeper {
            queues: queues.to_vec(),
            suspects,
            wakeup,
        });
        woken
    }

    /// Wakes up to `jobs` sleepers of `queue`, the longest asleep first, and tells how many.
    pub(crate) fn wake(&self, queue: &QueueName, suspect: bool, jobs: usize) -> usize {
        let mut left = jobs;
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = 0;
        while left > 0 && at < sleepers.len() {
            let sleeper = &sleepers[at];
            if sleeper.queues.contains(queue) && (sleeper.suspects || !suspect) {
                left -= usize::from(sleepers.remove(at).wakeup.send(()).is_ok());
            } else {
                at += 1;
            }
        }
        jobs - left
    }

    /// Wakes all sleepers: something changed, and it is not known for whom.
    #[cfg_attr(
        not(any(feature = "sqlite", feature = "redis", feature = "postgres")),
        expect(dead_code, reason = "unused by the memory store")
    )]
    pub(crate) fn wake_all(&self) {
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        for sleeper in sleepers.drain(..) {
            // A sleeper that is gone needs no waking.
            let _ = sleeper.wakeup.send(());
        }
    }

    /// Whether there are sleepers on a queue.
    #[cfg(feature = "postgres")]
    pub(crate) fn has_sleeper(&self, queue: &QueueName) -> bool {
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sleepers = sleepers.iter();
        sleepers.any(|sleeper| sleeper.queues.contains(queue) && !sleeper.wakeup.is_closed())
    }

    /// Whether there are sleepers.
    #[cfg_attr(
        not(feature = "sqlite"),
        expect(dead_code, reason = "only the poll of a file asks")
    )]
    pub(crate) fn is_empty(&self) -> bool {
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        sleepers.iter().all(|sleeper| sleeper.wakeup.is_closed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_that_is_gone_takes_no_wakeup() {
        let (wakers, queue) = (Wakers::default(), QueueName::default());
        let queues = [queue.clone()];
        let mut sleepers: Vec<_> = (0..4).map(|_| wakers.sleep(&queues, false)).collect();
        sleepers.drain(..2);
        assert_eq!(wakers.wake(&queue, false, 1), 1);
        assert!(sleepers[0].try_recv().is_ok(), "the longest asleep");
        assert!(sleepers[1].try_recv().is_err(), "one job wakes one");
        assert_eq!(wakers.wake(&queue, false, 5), 1, "nobody else is there");
    }
}
