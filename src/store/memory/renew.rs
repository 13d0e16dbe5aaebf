//! renew: extend a grant, let single leases of it lapse.

use super::State;
use crate::clock::Timestamp;
use crate::lease::{Cause, FencingToken};
use crate::rules::ends;
use crate::rules::order::deadline;
use crate::store::{Beat, Renewal};

impl State {
    pub(super) fn renew(&mut self, beat: Beat, now: Timestamp) -> Renewal {
        if !self.may_renew(&beat, now) {
            return Renewal::Fenced;
        }
        for (token, progress) in beat.progress {
            if let Some(lease) = self.lease_mut(beat.grant, token) {
                lease.progress = Some(Box::new(progress));
            }
        }
        self.lapse(beat.grant, beat.lapse, now);

        let mut cancel = Vec::new();
        let mut fenced = Vec::new();
        for token in beat.leases {
            match self.lease_mut(beat.grant, token) {
                Some(lease) if lease.cancel => cancel.push(token),
                Some(_) => {}
                None => fenced.push(token),
            }
        }
        let Some(grant) = self.grants.get_mut(&beat.grant) else {
            return Renewal::Fenced;
        };
        let deadlines = &mut self.queues[grant.queue].deadlines;
        deadlines.remove(&(grant.deadline, beat.grant));
        grant.deadline = deadline(now, grant.term, grant.granted_at, grant.max_lifetime);
        grant.renewals += 1;
        deadlines.insert((grant.deadline, beat.grant));
        Renewal::Held {
            granted: grant.deadline.since(now),
            cancel,
            fenced,
        }
    }

    fn may_renew(&self, beat: &Beat, now: Timestamp) -> bool {
        self.grants.get(&beat.grant).is_some_and(|grant| {
            // Past its deadline a lease is gone, whether or not its expiry has been recorded.
            grant.deadline > now
                && grant.nonce.matches(&beat.nonce)
                && beat.partition == 0
                && self.queues[grant.queue].name == beat.queue
        })
    }

    /// The holder gives these up: they expire now.
    fn lapse(&mut self, grant: FencingToken, tokens: Vec<FencingToken>, now: Timestamp) {
        self.begin_step();
        for token in tokens {
            let Some((job, cancel)) = self.take_leased(grant, token) else {
                continue;
            };
            let end = ends::expire(&job, Cause::Stalled, cancel, now);
            self.end((grant, token), job, end, now);
        }
    }
}
