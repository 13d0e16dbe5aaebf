//! prune: delete settled jobs past their retention, and unique keys past their window.

use super::State;
use crate::clock::Timestamp;

impl State {
    pub(super) fn prune(&mut self, before: Timestamp, max: usize) -> u64 {
        let mut pruned = 0;
        for at in 0..self.queues.len() {
            let queue = &mut self.queues[at];
            queue
                .unique
                .retain(|_, (_, until)| until.is_none_or(|until| until > before));
            let mut past: Vec<_> = queue
                .settled
                .iter()
                .filter(|(_, kept)| kept.keep_until <= before)
                .map(|((_, _, seq), kept)| (kept.keep_until, *seq, kept.job.id))
                .collect();
            past.sort_unstable();
            past.truncate(max - pruned);
            queue.ledger.pruned += past.len() as u64;
            pruned += past.len();
            for (_, _, id) in past {
                self.take(id);
            }
        }
        pruned as u64
    }
}
