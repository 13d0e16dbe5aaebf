//! renew: extend a grant, let single leases of it lapse.
//!
//! The grant is read and written in one immediate transaction (`grant.rs`): nothing comes between
//! test and effect.

use super::fault::Done;
use super::stored_grant::offset;
use super::tx::Tx;
use crate::clock::Timestamp;
use crate::lease::{Cause, FencingToken};
use crate::rules::ends;
use crate::rules::order::deadline;
use crate::store::{Beat, Renewal};

impl Tx<'_> {
    pub(super) fn renew(&mut self, beat: &Beat, now: Timestamp) -> Done<Renewal> {
        if !self.may_renew(beat, now)? {
            return Ok(Renewal::Fenced);
        }
        for (token, progress) in &beat.progress {
            if let Some(at) = self.live(beat.grant, *token)? {
                self.note(beat.grant, at, |note| {
                    note.progress = Some(progress.clone());
                })?;
            }
        }
        self.lapse(beat.grant, &beat.lapse, now)?;

        let mut cancel = Vec::new();
        let mut fenced = Vec::new();
        for &token in &beat.leases {
            match self.live(beat.grant, token)? {
                Some(at) if self.grants[&beat.grant].cancel(at) => cancel.push(token),
                Some(_) => {}
                None => fenced.push(token),
            }
        }
        let Some(held) = self.held(beat.grant)? else {
            return Ok(Renewal::Fenced);
        };
        held.renew(deadline(now, held.term, held.granted_at, held.max_lifetime));
        Ok(Renewal::Held {
            granted: held.deadline.since(now),
            cancel,
            fenced,
        })
    }

    fn may_renew(&mut self, beat: &Beat, now: Timestamp) -> Done<bool> {
        let Some(held) = self.held(beat.grant)? else {
            return Ok(false);
        };
        // Past its deadline a lease is gone, whether or not its expiry has been recorded.
        let may = held.deadline > now && held.nonce.matches(&beat.nonce) && beat.partition == 0;
        let queue = held.queue;
        Ok(may && self.queues[queue].name == beat.queue)
    }

    fn live(&mut self, grant: FencingToken, token: FencingToken) -> Done<Option<usize>> {
        let held = self.held(grant)?;
        Ok(held.and_then(|held| offset(grant, token).filter(|at| held.is_live(*at))))
    }

    fn lapse(&mut self, grant: FencingToken, tokens: &[FencingToken], now: Timestamp) -> Done<()> {
        let mut front = Vec::new();
        let Some(queue) = self.held(grant)?.map(|held| held.queue) else {
            return Ok(());
        };
        for &token in tokens {
            let Some(at) = self.live(grant, token)? else {
                continue;
            };
            let Some((facts, job)) = self.leased(grant, at)? else {
                continue;
            };
            let end = ends::expire(&job, Cause::Stalled, facts.cancel, now);
            front.extend(self.end(queue, grant, &facts, job, end, now)?);
        }
        self.put_front(queue, front)
    }
}
