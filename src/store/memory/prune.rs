//! prune: delete settled jobs past their retention, and unique keys past their window.

use super::State;
use crate::clock::Timestamp;

impl State {
    pub(super) fn prune(&mut self, before: Timestamp, max: usize) -> u64 {
        let mut pruned = 0;
        for queue in 0..self.queues.len() {
            let at = &mut self.queues[queue];
            at.unique
                .retain(|_, (_, until)| until.is_none_or(|until| until > before));
            let past = at.kept.iter().take_while(|(until, ..)| *until <= before);
            let past: Vec<_> = past.take(max - pruned).map(|(.., id)| *id).collect();
            at.ledger.pruned += past.len() as u64;
            pruned += past.len();
            for id in past {
                self.take(id);
            }
        }
        pruned as u64
    }
}
